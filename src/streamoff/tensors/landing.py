"""What receives a payload: a file or memory. Bytes count as landed when their digest was right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from streamoff.errors import IntegrityError, UsageError
from streamoff.tensors.digests import combined, piece_digests, whole_pages
from streamoff.tensors.files import DEFAULT_STORAGE, Dispose, Guard, Storage
from streamoff.tensors.finite import FiniteCheck
from streamoff.tensors.layout import Layout, subset
from streamoff.tensors.lazy import Hop, LazyStateDict
from streamoff.tensors.places import Place, verify
from streamoff.tensors.state import MemoryState, State
from streamoff.tensors.views import Views, clip, nbytes
from streamoff.tensors.writer import FileWriter, MemoryWriter
from streamoff.types import RangeSet

__all__ = ["PAYLOAD_NAME", "Chunk", "DiskLanding", "Landing", "MemoryLanding"]

PAYLOAD_NAME: Final = "payload.safetensors"
"""The one file name of every landing; nothing is ever named after a tensor."""

Chunk = tuple[int, Views, bytes]
"""Payload offset, bytes, :func:`~streamoff.tensors.digests.chunk_digest` of them."""


class Landing(Protocol):
    """Receives the wanted ranges of one payload, in any order; every method blocks."""

    @property
    def hands_over(self) -> bool:
        """Whether :meth:`discard` only hands over what has landed, and does not block."""
        ...

    def open(self, layout: Layout, names: Iterable[str] | None = None) -> RangeSet:
        """Allocate for a payload whose header was accepted.

        Args:
            layout: Of the payload as the source serves it.
            names: The tensors wanted; None: all.

        Returns:
            The payload-relative ranges to bring, without the header.

        Raises:
            KeyError: A name is not in the payload. Nothing was allocated.
            LandingError: No room. Nothing is left behind.
        """
        ...

    def place(self, start: int, stop: int) -> Place | None:
        """A place to land a chunk while it comes, instead of :meth:`write`; neither this nor that ever blocks.

        Returns:
            None: this landing may block, or moves the bytes of this range, or has no such range.
        """
        ...

    def write(self, start: int, views: Views, digest: bytes) -> None:
        """Check a chunk and land it; distinct ranges may be written from several threads.

        Args:
            start: Payload offset of its first byte.
            views: Its bytes; bytes that are not wanted are dropped after the check.
            digest: :func:`~streamoff.tensors.digests.chunk_digest` of all of them.

        Raises:
            IntegrityError: The bytes do not have the digest. Nothing was landed.
            UsageError: Outside the payload, or the landing is not open.
            LandingError: The system refused; the chunk may be landed again.
        """
        ...

    def finish(self) -> State:
        """Publish the whole.

        Raises:
            UsageError: Wanted bytes are missing. Nothing was published.
            LandingError: The system refused. Nothing was published.
        """
        ...

    def discard(self) -> None:
        """Give up what has landed; nothing after :meth:`finish`. Idempotent."""
        ...


class _Moves:
    """Where the bytes of a served payload go in the payload that is landed."""

    def __init__(self, served: Layout, landed: Layout, names: frozenset[str] | None) -> None:
        self.served: Final = served
        self.whole: Final = names is None
        self._moves: Final = [] if names is None else sorted(_moves(served, landed, names))
        self._starts: Final = [start for start, _, _ in self._moves]

    def runs(self, start: int, views: Views) -> Iterator[tuple[int, Views]]:
        """Cut a chunk into runs with their offsets in the landed payload."""
        if self.whole:
            yield start, views
            return
        run: list[memoryview] = []
        offset = stop = 0
        for target, piece in self._pieces(start, views):
            if run and target != stop:
                yield offset, tuple(run)
                run.clear()
            if not run:
                offset = stop = target
            run += piece
            stop += nbytes(piece)
        if run:
            yield offset, tuple(run)

    def _pieces(self, start: int, views: Views) -> Iterator[tuple[int, Views]]:
        stop = start + nbytes(views)
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._moves) and self._moves[index][0] < stop:
            low, high, target = self._moves[index]
            first, last = max(low, start), min(high, stop)
            if first < last:
                yield target + first - low, clip(views, first - start, last - start)
            index += 1


def _moves(served: Layout, landed: Layout, names: frozenset[str]) -> list[tuple[int, int, int]]:
    """Return (start, stop, target) of each wanted entry; neighbours that stay neighbours are one."""
    holders = {served.spec(name).name: name for name in names}
    found: list[tuple[int, int, int]] = []
    for spec in served.specs:
        if spec.name not in holders or not spec.nbytes:
            continue
        start = served.data_start + spec.start
        target = landed.data_start + landed.spec(holders[spec.name]).start
        if found and found[-1][1] == start and found[-1][2] + start - found[-1][0] == target:
            found[-1] = (found[-1][0], start + spec.nbytes, found[-1][2])
        else:
            found.append((start, start + spec.nbytes, target))
    return found


W = TypeVar("W", FileWriter, MemoryWriter)


class _Landing(Generic[W]):
    """What disk and memory have in common: acceptance of a header, digests, finiteness."""

    def __init__(self, *, check_finite: bool, in_ram: bool) -> None:
        self._check_finite: Final = check_finite
        self._in_ram: Final = in_ram
        self._finite: FiniteCheck | None = None
        self._moves: _Moves | None = None
        self._writer: W | None = None

    def _accept(self, layout: Layout, names: Iterable[str] | None) -> tuple[Layout, RangeSet]:
        if self._moves is not None:
            raise UsageError("the landing was opened before")
        wanted = None if names is None else frozenset(names)
        ranges = layout.ranges(wanted)
        landed = layout if wanted is None else subset(layout, wanted)
        self._moves = _Moves(layout, landed, wanted)
        self._finite = FiniteCheck(landed) if self._check_finite else None
        return landed, ranges

    def place(self, start: int, stop: int) -> Place | None:
        """A place for what is landed in memory, and whole; see :class:`Landing`."""
        writer, moves = self._writer, self._moves
        if not self._in_ram or writer is None or moves is None or not moves.whole:
            return None
        if not writer.layout.data_start <= start < stop <= writer.layout.size:
            return None
        return Place(writer, start, stop, self._finite)

    def write(self, start: int, views: Views, digest: bytes) -> None:
        """Check a chunk and write it where it belongs; see :class:`Landing`.

        The digests that verify it are its pages', too, unless a part of the payload is landed.
        """
        writer = self._opened()
        pieces = piece_digests(views, start)
        moves = self._checked(start, views, digest, combined(pieces))
        pages = None
        if moves.whole:
            pages = whole_pages(pieces, start, start + nbytes(views), writer.layout.size)
        for offset, run in moves.runs(start, views):
            self._look(writer.layout, offset, run)
            writer.put(offset, run, pages)

    def _checked(self, start: int, views: Views, given: bytes, actual: bytes) -> _Moves:
        moves = self._moves
        if moves is None:
            raise UsageError("the landing is not open")
        stop = start + nbytes(views)
        verify(start, stop, given=given, actual=actual)
        served = moves.served
        if not 0 <= start <= stop <= served.size:
            raise UsageError("chunk outside the payload", expected=served.size, got=(start, stop))
        header = b"".join(clip(views, 0, max(served.data_start - start, 0)))
        if header != served.header[start : start + len(header)]:
            raise IntegrityError("chunk does not repeat the accepted header", start=start)
        return moves

    def _look(self, landed: Layout, offset: int, views: Views) -> None:
        if self._finite is not None:
            skip = max(landed.data_start - offset, 0)
            self._finite.feed(
                offset + skip - landed.data_start,
                clip(views, skip, nbytes(views)) if skip else views,
            )

    def _nonfinite(self, writer: W) -> frozenset[str]:
        if self._finite is None:
            return frozenset()
        base = writer.layout.data_start
        return self._finite.finish(lambda start, out: writer.read_back(base + start, out))

    def _opened(self) -> W:
        if self._writer is None:
            raise UsageError("the landing is not open")
        return self._writer


class DiskLanding(_Landing[FileWriter]):
    """Lands a payload as one safetensors file, ``payload.safetensors``, in a directory of its own.

    Args:
        directory: Exists, empty, and is this landing's alone.
        check_finite: Whether to look for NaN and infinities in passing.
        guard: Entered around each read of the result.
        dispose: Takes the directory when it is discarded or the result is let go; must not block.
            None: the directory stays the caller's, and only the unfinished file is removed.
        storage: How the file is kept.
        hop: How the result's ``load`` leaves the event loop.
        taken: See :class:`~streamoff.tensors.writer.FileWriter`.
        in_ram: Whether the directory is memory (tmpfs): a write to the file then never waits for a disk.
    """

    def __init__(
        self,
        directory: Path,
        *,
        check_finite: bool = False,
        guard: Guard | None = None,
        dispose: Dispose | None = None,
        storage: Storage = DEFAULT_STORAGE,
        hop: Hop | None = None,
        taken: Callable[[], object] | None = None,
        in_ram: bool = False,
    ) -> None:
        super().__init__(check_finite=check_finite, in_ram=in_ram)
        self._path: Final = directory / PAYLOAD_NAME
        self._guard: Final = guard
        self._dispose: Final = dispose
        self._storage: Final = storage
        self._hop: Final = hop
        self._taken: Final = taken
        self._discarded = False

    def open(self, layout: Layout, names: Iterable[str] | None = None) -> RangeSet:
        """Make the file at its full size and write its header; see :class:`Landing`."""
        landed, ranges = self._accept(layout, names)
        self._writer = FileWriter(
            self._path,
            landed,
            storage=self._storage,
            replace=False,
            guard=self._guard,
            dispose=self._dispose,
            hop=self._hop,
            taken=self._taken,
        )
        return ranges

    def finish(self) -> LazyStateDict:
        """Rename the file into place; see :class:`Landing`."""
        writer = self._opened()
        return writer.finish(self._nonfinite(writer))

    def land_whole(
        self, layout: Layout, chunks: Iterable[Chunk], names: Iterable[str] | None = None
    ) -> LazyStateDict:
        """Open, write and finish in one call, for payloads that a thread hop per step would dominate.

        Raises:
            KeyError, IntegrityError, UsageError, LandingError: As the steps; nothing is left behind.
        """
        try:
            self.open(layout, names)
            for start, views, digest in chunks:
                self.write(start, views, digest)
            return self.finish()
        except BaseException:
            self.discard()
            raise

    @property
    def hands_over(self) -> bool:
        """Whether somebody else removes the directory; see :class:`Landing`."""
        return self._dispose is not None

    def discard(self) -> None:
        """Remove the unfinished file, or hand the directory over; see :class:`Landing`."""
        if self._writer is not None:
            self._writer.discard()
        elif self._dispose is not None and not self._discarded:
            self._dispose(self._path.parent)
        self._discarded = True


class MemoryLanding(_Landing[MemoryWriter]):
    """Lands a payload in tensors that are allocated once and received into.

    Args:
        check_finite: Whether to look for NaN and infinities in passing.
    """

    def __init__(self, *, check_finite: bool = False) -> None:
        super().__init__(check_finite=check_finite, in_ram=True)

    def open(self, layout: Layout, names: Iterable[str] | None = None) -> RangeSet:
        """Allocate the tensors; see :class:`Landing`."""
        landed, ranges = self._accept(layout, names)
        self._writer = MemoryWriter(landed)
        return ranges

    def finish(self) -> MemoryState:
        """Return the tensors; see :class:`Landing`."""
        writer = self._opened()
        return writer.finish(self._nonfinite(writer))

    @property
    def hands_over(self) -> bool:
        """False: to give much memory back takes a while; see :class:`Landing`."""
        return False

    def discard(self) -> None:
        """Drop the tensors; see :class:`Landing`."""
        if self._writer is not None:
            self._writer.discard()
        self._writer = None
