"""The tensors that a benchmark moves."""

import torch

from streamoff.sim.shapes import shapes_of
from streamoff.tensors.sources import StateDictSource

__all__ = ["Model"]


class Model:
    """Random tensors, and the very same memory as bytes.

    Args:
        shapes: As :func:`~streamoff.sim.shapes.shapes_of`.
        nbytes: Of all tensors together.
    """

    def __init__(self, shapes: str, nbytes: int) -> None:
        generator = torch.Generator().manual_seed(1)  # nobody on the way can make anything of noise
        self.tensors = {
            name: torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)
            for name, shape in shapes_of(shapes, nbytes)
        }
        source = StateDictSource(self.tensors)
        layout = source.layout
        self.views: list[memoryview] = [memoryview(layout.header)]
        for spec in layout.specs:
            found = source.views(layout.data_start + spec.start, layout.data_start + spec.stop)
            assert found is not None
            self.views += found

    @property
    def size(self) -> int:
        """Bytes of the payload, header included."""
        return sum(map(len, self.views))
