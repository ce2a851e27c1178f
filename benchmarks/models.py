"""The tensors that a benchmark moves; needs nothing but torch."""

import torch

from streamoff.sim.shapes import shapes_of

__all__ = ["tensors_of"]


def tensors_of(shapes: str, nbytes: int) -> dict[str, torch.Tensor]:
    """Random float32 tensors, the same every time: nobody on the way can make anything of noise.

    Args:
        shapes: As :func:`~streamoff.sim.shapes.shapes_of`.
        nbytes: Of all tensors together.
    """
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)
        for name, shape in shapes_of(shapes, nbytes)
    }
