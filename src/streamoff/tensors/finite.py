"""Finding NaN and infinities in passing: while the bytes are here anyway."""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from streamoff.tensors.dtypes import FLOATING, itemsize, torch_dtype
from streamoff.tensors.layout import Layout
from streamoff.tensors.views import Views

__all__ = ["FiniteCheck"]

ReadBack: TypeAlias = Callable[[int, memoryview], None]
"""Fill a buffer with data-relative bytes of what has landed."""

_AMINMAX: Final = frozenset({"F64", "F32", "F16", "BF16", "C64"})
"""Where one pass of ``aminmax`` answers; a complex number is two of F32."""

_BLOCK: Final = 1 << 15
"""Elements looked at in one call. Above it torch spreads a call over threads, and would start a team of them
for every landing thread."""


class FiniteCheck:
    """Collects the names of tensors that hold a NaN or an infinity.

    Bytes may come in any order and cuts; an element that a cut splits is looked at in the end.

    Args:
        layout: Of the data section that the bytes belong to.
        starts: Where its tensors begin, if that is known.
    """

    def __init__(self, layout: Layout, starts: list[int] | None = None) -> None:
        self._layout: Final = layout
        self._starts: Final = starts or [spec.start for spec in layout.specs]
        self._bad: Final[set[str]] = set()
        self._split: Final[set[tuple[int, int]]] = set()

    def feed(self, start: int, views: Views) -> None:
        """Look at a run of data-relative bytes. Thread-safe: sets only grow."""
        at = start
        for view in views:
            for low, high, specs in self._groups(at, at + len(view)):
                self._look(view[low - at : high - at], low, specs)
            at += len(view)

    def apart(self) -> FiniteCheck:
        """A check of bytes that may yet turn out to be damaged; see :meth:`adopt`."""
        return FiniteCheck(self._layout, self._starts)

    def adopt(self, other: FiniteCheck) -> None:
        """Count what another one, made by :meth:`apart`, has found."""
        self._bad.update(other._bad)
        self._split.update(other._split)

    def finish(self, read_back: ReadBack) -> frozenset[str]:
        """Look at the elements that cuts had split and return every bad name."""
        for index, element in self._split:
            spec = self._layout.specs[index]
            size = itemsize(spec.dtype)
            whole = bytearray(size)
            read_back(spec.start + element * size, memoryview(whole))
            if not _is_finite(memoryview(whole), spec.dtype):
                self._bad.add(spec.name)
        aliases = self._layout.aliases.items()
        return frozenset(self._bad | {name for name, target in aliases if target in self._bad})

    def _groups(self, start: int, stop: int) -> Iterator[tuple[int, int, range]]:
        """Yield whole-element runs of neighbours of one dtype: one look for many small tensors."""
        specs = self._layout.specs
        index = bisect_right(self._starts, start) - 1
        while 0 <= index < len(specs) and specs[index].start < stop:
            first, dtype = index, specs[index].dtype
            while index < len(specs) and specs[index].start < stop and specs[index].dtype == dtype:
                index += 1
            if dtype not in FLOATING:
                continue
            low, high = max(start, specs[first].start), min(stop, specs[index - 1].stop)
            yield from self._trimmed(low, high, range(first, index))

    def _trimmed(self, low: int, high: int, group: range) -> Iterator[tuple[int, int, range]]:
        """Cut the elements that only partly lie in ``low`` to ``high`` off, and remember them."""
        base = self._layout.specs[group[0]].start
        size = itemsize(self._layout.specs[group[0]].dtype)
        for edge in (low, high):
            if (edge - base) % size:
                self._remember(edge - (edge - base) % size)
        low += -(low - base) % size
        high -= (high - base) % size
        if low < high:
            yield low, high, group

    def _remember(self, at: int) -> None:
        index = bisect_right(self._starts, at) - 1
        spec = self._layout.specs[index]
        self._split.add((index, (at - spec.start) // itemsize(spec.dtype)))

    def _look(self, view: memoryview, start: int, group: range) -> None:
        specs = self._layout.specs
        if _is_finite(view, specs[group[0]].dtype):
            return
        for spec in (specs[index] for index in group):
            low, high = max(spec.start - start, 0), min(spec.stop - start, len(view))
            if low < high and not _is_finite(view[low:high], spec.dtype):
                self._bad.add(spec.name)


def _is_finite(view: memoryview, dtype: str) -> bool:
    import torch  # noqa: PLC0415 -- only a landing that checks values needs torch

    if view.readonly:  # torch warns about memory that it could, but will not, write to
        address = _address(view)
        view = memoryview((ctypes.c_char * len(view)).from_address(address)).cast("B")
    flat = torch.frombuffer(view, dtype=torch_dtype("F32" if dtype == "C64" else dtype))
    for part in torch.split(flat, _BLOCK):
        low, high = torch.aminmax(part if dtype in _AMINMAX else part.float())
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            return False
    return True


def _address(view: memoryview) -> int:
    import numpy as np  # noqa: PLC0415 -- as torch above

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
