"""How a model is cut into blocks that fit the buffers.

A block is a contiguous run of the global model's data section in which every element is calculated the
same way. Many small tensors share a block, a large one spans many; so neither the number of tensors nor
their size decides how many reads there are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from streamoff.errors import InvariantError
from streamoff.fl.aggregation.arithmetic import COMPONENTS, Bytes, Method, NonfiniteError
from streamoff.tensors.digests import PAGE
from streamoff.tensors.dtypes import itemsize
from streamoff.tensors.layout import Layout
from streamoff.tensors.state import State
from streamoff.types import MIB, TensorSpec

__all__ = ["BLOCK_BYTES", "Block", "Piece", "Segment", "blocks", "fill", "fold", "inspect"]

BLOCK_BYTES: Final = 4 * MIB
"""No buffer of an engine is larger."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one tensor: ``elements`` of them from ``start``, at ``at`` in the block."""

    name: str
    start: int
    elements: int
    at: int


@dataclass(frozen=True, slots=True, eq=False)  # a key by identity
class Block:
    """A run of elements of the global model.

    Args:
        method: Their arithmetic, or None: they keep their previous value.
        group: What the caller's grouping said of all its keys.
        start: First byte, relative to the data section.
        elements: How many; bytes if ``method`` is None.
        stride: Bytes per element that the buffers have room for.
        pieces: What they are, in file order.
    """

    method: Method | None
    group: Hashable
    start: int
    elements: int
    stride: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the global model."""
        return self.elements * (1 if self.method is None else itemsize(self.method.dtype))


class Segment(NamedTuple):
    """Part of a block as it was read: elements ``start`` to ``stop`` of the block, of ``dtype``."""

    start: int
    stop: int
    dtype: str
    raw: Bytes


def blocks(
    layout: Layout,
    methods: Mapping[str, Method | None],
    group: Callable[[str], Hashable],
    *,
    any_dtype: bool,
) -> Iterator[Block]:
    """Cut a model into blocks.

    Args:
        layout: The global model's.
        methods: Arithmetic by entry name; None keeps the previous value.
        group: Keys of different groups never share a block.
        any_dtype: Whether contributions may have another dtype than the model, up to 8 bytes.

    Yields:
        Blocks in file order that cover the data section without hole or overlap. Neither the elements of
        the model, nor of a contribution, nor accumulators of a block exceed ``BLOCK_BYTES``.
    """

    def key(spec: TensorSpec) -> tuple[Method | None, Hashable]:
        method = methods[spec.name]
        return method, None if method is None else group(spec.name)

    for (method, shared), run in groupby((s for s in layout.specs if s.nbytes), key):
        size = 1 if method is None else itemsize(method.dtype)
        stride = 1 if method is None else 8 if any_dtype else max(size, method.width)
        yield from _cut(run, method, shared, size, stride, layout.data_start)


def _cut(  # noqa: PLR0917 -- a loop body with a name
    run: Iterable[TensorSpec],
    method: Method | None,
    group: Hashable,
    size: int,
    stride: int,
    origin: int,
) -> Iterator[Block]:
    room = 0
    pieces: list[Piece] = []
    begin = at = 0
    for spec in run:
        done, total = 0, spec.nbytes // size
        while done < total:
            if not pieces:
                begin = spec.start + done * size
                # end on a page: landed files are verified page by page
                room = BLOCK_BYTES // stride - (origin + begin) % PAGE // size
            take = min(total - done, room - at)
            pieces.append(Piece(spec.name, done, take, at))
            done, at = done + take, at + take
            if at == room:
                yield Block(method, group, begin, at, stride, tuple(pieces))
                pieces, at = [], 0
    if pieces:
        yield Block(method, group, begin, at, stride, tuple(pieces))


def fill(state: State, block: Block, buffer: Bytes, *, same: bool) -> list[Segment]:
    """Read one contribution's share of a block.

    Args:
        state: Read from; one call if the block lies in one piece there too.
        block: What to read; its method is not None.
        buffer: At least ``BLOCK_BYTES``; overwritten.
        same: Whether the entries of ``state`` lie exactly where the global model's do.

    Returns:
        The block in file order; views of ``buffer``.

    Raises:
        StreamoffError: The read failed.
        OSError: So here.
    """
    method = block.method
    assert method is not None
    if same:
        dtype, size, begin = method.dtype, itemsize(method.dtype), block.start
    else:
        found = _contiguous(state.layout, block)
        if found is None:
            return _scattered(state, block, buffer)
        dtype, size, begin = found
    raw = buffer[: block.elements * size]
    state.read_span(begin, begin + raw.nbytes, raw.data)
    return [Segment(0, block.elements, dtype, raw)]


def _contiguous(layout: Layout, block: Block) -> tuple[str, int, int] | None:
    """Return dtype, bytes per element and first byte if the block lies in one run there."""
    head = block.pieces[0]
    first = layout.spec(head.name)
    dtype, size = _components(first)
    begin = first.start + head.start * size
    for piece in block.pieces:
        spec = layout.spec(piece.name)
        at = spec.start + piece.start * size
        if spec.dtype != first.dtype or at != begin + piece.at * size:
            return None
    return dtype, size, begin


def _scattered(state: State, block: Block, buffer: Bytes) -> list[Segment]:
    """Read piece by piece, each to the place that its elements have in the block."""
    found = []
    for piece in block.pieces:
        spec = state.layout.spec(piece.name)
        dtype, size = _components(spec)
        offset = piece.at * block.stride
        raw = buffer[offset : offset + piece.elements * size]
        state.read_into(spec.name, piece.start * size, raw.data)
        found.append(Segment(piece.at, piece.at + piece.elements, dtype, raw))
    return found


def _components(spec: TensorSpec) -> tuple[str, int]:
    """Return dtype and size of the elements as the arithmetic counts them: a complex number is two."""
    dtype = COMPONENTS.get(spec.dtype, spec.dtype)
    return dtype, itemsize(dtype)


def fold(
    block: Block,
    accumulator: Bytes,
    parts: list[Segment],
    weight: float,
    scratch: Bytes,
    *,
    first: bool,
    check: bool,
) -> None:
    """Add what :func:`fill` read to an accumulator; the arguments are those of ``Method.fold``.

    Raises:
        NonfiniteError: With the key. Parts before it have been added.
    """
    method = block.method
    assert method is not None
    for part in parts:
        into = accumulator[part.start * method.width : part.stop * method.width]
        try:
            method.fold(into, part.raw, part.dtype, weight, scratch, first=first, check=check)
        except NonfiniteError:
            raise NonfiniteError(_culprit(method, block, part, scratch)) from None


def inspect(block: Block, parts: list[Segment], scratch: Bytes) -> None:
    """Look for NaN and infinity in what :func:`fill` read.

    Raises:
        NonfiniteError: With the key.
    """
    method = block.method
    assert method is not None
    for part in parts:
        if not method.finite(part.raw, part.dtype, scratch):
            raise NonfiniteError(_culprit(method, block, part, scratch))


def _culprit(method: Method, block: Block, part: Segment, scratch: Bytes) -> str:
    size = itemsize(part.dtype)
    for piece in block.pieces:
        low, high = piece.at - part.start, piece.at + piece.elements - part.start
        if part.start <= piece.at < part.stop and not method.finite(
            part.raw[low * size : high * size], part.dtype, scratch
        ):
            return piece.name
    raise InvariantError("a value was not finite and now is", tensor=block.pieces[0].name)
