"""The bytes of the ``transfer`` suite as one tensor: nothing may depend on how large a tensor is."""

from benchmarks.transfer import GPT2_MEDIUM_BYTES, QUICK_BYTES, TransferReport, measure_shapes

__all__ = ["measure"]


def measure(*, quick: bool) -> TransferReport:
    """Transfer one giant tensor."""
    return measure_shapes("giant, one tensor", "1", QUICK_BYTES if quick else GPT2_MEDIUM_BYTES)
