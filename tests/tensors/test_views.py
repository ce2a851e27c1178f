"""Runs of bytes are cut and copied without being joined."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from streamoff.tensors.views import Views, as_bytes, clip, nbytes, scatter


def _views(run: list[bytes]) -> Views:
    return tuple(memoryview(piece) for piece in run)


RUNS = st.lists(st.binary(max_size=9), max_size=5).map(_views)


@given(run=RUNS, start=st.integers(0, 40), length=st.integers(0, 40))
def test_clipping_is_slicing(run: Views, start: int, length: int) -> None:
    """A clipped run is the slice of the joined one, without empty pieces and without a copy."""
    cut = clip(run, start, start + length)
    assert b"".join(cut) == b"".join(run)[start : start + length]
    assert all(cut)
    assert nbytes(cut) <= nbytes(run)
    assert {id(view.obj) for view in cut} <= {id(view.obj) for view in run}


@given(run=RUNS, cuts=st.lists(st.integers(0, 50), max_size=5))
def test_scattering_keeps_the_order(run: Views, cuts: list[int]) -> None:
    """A run is copied into pieces of any other cut, empty ones included."""
    target = bytearray(nbytes(run))
    edges = [0, *sorted(min(cut, len(target)) for cut in cuts), len(target)]
    whole = memoryview(target)
    scatter(run, [whole[a:b] for a, b in pairwise(edges)])
    assert bytes(target) == b"".join(run)


def test_any_contiguous_buffer_is_bytes() -> None:
    """Typed and many-dimensional buffers are seen flat; a strided one is refused."""
    numbers = array("I", [1, 2])
    assert as_bytes(memoryview(numbers)).nbytes == 8
    assert as_bytes(memoryview(bytes(6)).cast("B", [2, 3])).shape == (6,)
    with pytest.raises(TypeError):
        as_bytes(memoryview(bytes(6))[::2])
