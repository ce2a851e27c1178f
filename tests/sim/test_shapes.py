"""Shapes of synthetic models."""

import math
from collections.abc import Iterable

import pytest

from streamoff.errors import UsageError
from streamoff.sim.shapes import ELEMENT_BYTES, shapes_of

MIB = 1024 * 1024


def nbytes(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Return the size of all tensors."""
    return sum(math.prod(shape) for _, shape in shapes) * ELEMENT_BYTES


@pytest.mark.parametrize(("kind", "count"), [("1", 1), ("7", 7), ("many", 1000)])
def test_vectors_meet_the_size_to_the_element(kind: str, count: int) -> None:
    """However many vectors a model has, together they have the size that was asked for."""
    shapes = shapes_of(kind, 5 * MIB + 3)
    assert len(dict(shapes)) == count
    assert nbytes(shapes) == 5 * MIB
    assert all(math.prod(shape) > 0 for _, shape in shapes)


def test_many_tensors_are_uneven() -> None:
    """``many`` has small and large tensors: a factor of a thousand apart."""
    sizes = [math.prod(shape) for _, shape in shapes_of("many", 64 * MIB)]
    assert max(sizes) > 900 * min(sizes)


def test_the_transformer_is_gpt2_medium_at_its_own_size() -> None:
    """At 1354 MiB the shapes are those of GPT-2 medium: 292 tensors, 354,823,168 parameters."""
    shapes = dict(shapes_of("gpt2-medium", 1354 * MIB))
    assert len(shapes) == 292
    assert nbytes(shapes.items()) == 354_823_168 * ELEMENT_BYTES
    assert shapes["wte.weight"] == (50_257, 1024)
    assert shapes["h.23.mlp.c_fc.weight"] == (1024, 4096)
    assert shapes["h.0.attn.c_attn.bias"] == (3072,)


@pytest.mark.parametrize("size", [MIB, 64 * MIB, 512 * MIB, 6000 * MIB])
def test_the_transformer_fills_the_size_from_below(size: int) -> None:
    """A scaled transformer stays below the size, by less than one more step of its width."""
    width = dict(shapes_of("gpt2-medium", size))["ln_f.bias"][0]
    step = 4 * (50_257 + 1024 + 24 * (12 * (2 * width + 1) + 13) + 2)
    assert size - step < nbytes(shapes_of("gpt2-medium", size)) <= size


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("0", 100),
        ("-1", 100),
        ("1.5", 100),
        ("gpt3", 100),
        ("", 100),
        ("\u00b2", 100),
        ("1000000", 10**9),
        ("1", 3),
        ("26", 100),
        ("many", 500_000),
        ("gpt2-medium", 200_000),
    ],
)
def test_impossible_shapes_are_refused(kind: str, size: int) -> None:
    """An unknown kind, or a size with less than one element per tensor, is the caller's error."""
    with pytest.raises(UsageError):
        shapes_of(kind, size)
