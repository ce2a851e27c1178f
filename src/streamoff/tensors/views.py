"""Runs of bytes as tuples of memoryviews: cut and copied, never joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Views", "as_bytes", "clip", "nbytes", "scatter"]

Views: TypeAlias = tuple[memoryview, ...]
"""Consecutive bytes; each view has format "B", one dimension, C-contiguous."""


def as_bytes(buffer: memoryview | bytes | bytearray) -> memoryview:
    """Return ``buffer`` as a flat view of bytes, sharing its memory.

    Raises:
        TypeError: The buffer is not C-contiguous.
    """
    view = memoryview(buffer)
    flat = view.format == "B" and view.ndim == 1 and view.c_contiguous
    return view if flat else view.cast("B")


def nbytes(views: Iterable[memoryview]) -> int:
    """Return the number of bytes in a run."""
    return sum(view.nbytes for view in views)


def clip(views: Views, start: int, stop: int) -> Views:
    """Return bytes ``start`` to ``stop`` of a run, sharing its memory; empty pieces vanish."""
    found: list[memoryview] = []
    at = 0
    for view in views:
        low, high = max(start - at, 0), min(stop - at, len(view))
        if low < high:
            found.append(view if high - low == len(view) else view[low:high])
        at += len(view)
    return tuple(found)


def scatter(views: Views, into: Iterable[memoryview]) -> None:
    """Copy a run into another run of the same length, whatever the cuts of either.

    Args:
        views: The bytes to copy.
        into: Writable views, at least as many bytes in all.
    """
    targets = iter(into)
    target = memoryview(b"")
    for view in views:
        rest = view
        while rest:
            if not target:
                target = next(targets)
                continue
            step = min(len(rest), len(target))
            target[:step] = rest[:step]
            rest, target = rest[step:], target[step:]
