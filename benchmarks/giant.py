"""The bytes of the ``transfer`` suite as one tensor: nothing may depend on how large a tensor is."""

from benchmarks.report import Report
from benchmarks.transfer import measure_shapes

__all__ = ["measure"]


def measure(*, quick: bool, peer_python: str | None = None) -> Report:
    """Transfer one giant tensor."""
    return measure_shapes("giant, one tensor", "1", quick, peer_python)
