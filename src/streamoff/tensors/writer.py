"""Writing a state dict of known layout in pieces, in any order: to a file or to memory."""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from streamoff.errors import LandingError, UsageError
from streamoff.tensors.digests import PAGE, page_count, page_digests
from streamoff.tensors.files import (
    DEFAULT_STORAGE,
    Dispose,
    Guard,
    Storage,
    allocate,
    drop_cached,
    opened,
    read_exactly,
    start_writeback,
    sync_directory,
    translated,
    write_all,
)
from streamoff.tensors.layout import Layout
from streamoff.tensors.lazy import Hop, LazyStateDict
from streamoff.tensors.state import MemoryState, State
from streamoff.tensors.views import Views, as_bytes, nbytes
from streamoff.types import CHUNK_BYTES, ByteRange, RangeSet

if TYPE_CHECKING:
    import torch

__all__ = ["FileWriter", "MemoryWriter", "StateWriter"]


class StateWriter(Protocol):
    """Receives the bytes of a state dict; distinct ranges may be written from several threads."""

    @property
    def layout(self) -> Layout:
        """What is being written."""
        ...

    def write(self, start: int, buffer: memoryview) -> None:
        """Put bytes at offset ``start`` of the data section: blocking.

        Raises:
            UsageError: Outside the data section, or the writer is finished or discarded.
            LandingError: The system refused.
        """
        ...

    def finish(self) -> State:
        """Publish the whole: blocking.

        Raises:
            UsageError: Bytes are missing; nothing was published.
            LandingError: The system refused; nothing was published.
        """
        ...

    def discard(self) -> None:
        """Give up what was written; nothing after :meth:`finish`. Idempotent."""
        ...


class FileWriter:
    """Writes a safetensors file under ``<name>.part`` and renames it into place.

    The file is opened for each operation; only a writer that may be replaced holds a descriptor. A page of the
    file gets its digest from the bytes that are written; only a page that several writes share is read back,
    once, by the write that completes it.

    Args:
        path: The file to appear; its directory exists.
        layout: What will be written.
        storage: How the file is kept, while it is written and as the result.
        replace: Whether a ``.part`` left by a crash, and an existing ``path``, are replaced.
        guard: For the reads of the result.
        dispose: For the result: takes the file's directory.
        hop: For the result.
        taken: Called when the space of the whole file is taken: at once where the file system reserves it,
            else when the file is whole.

    Raises:
        NoSpaceError: The file system has no room for the whole; nothing is left behind.
        LandingError: The file cannot be made; nothing is left behind.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        *,
        storage: Storage = DEFAULT_STORAGE,
        replace: bool = True,
        guard: Guard | None = None,
        dispose: Dispose | None = None,
        hop: Hop | None = None,
        taken: Callable[[], object] | None = None,
    ) -> None:
        self._path: Final = path
        self._part: Final = path.with_name(path.name + ".part")
        self._layout: Final = layout
        self._storage: Final = storage
        self._cache: Final = _Writeback() if storage.page_cache == "drop" else None
        self._guard: Final = guard
        self._dispose: Final = dispose
        self._hop: Final = hop
        self._taken: Final = taken
        self._pages: Final = array("Q", bytes(8 * page_count(layout.size)))
        self._lock: Final = threading.Lock()
        self._written = RangeSet()
        self._over = False
        self._inode = self._create(replace=replace)
        # A name can come back with the same inode number once that is free: so it is kept in use.
        self._unpin = weakref.finalize(self, os.close, self._pin()) if replace else None
        try:
            self.put(0, (memoryview(layout.header),))
        except BaseException:
            self._remove()
            raise

    @property
    def layout(self) -> Layout:
        """What is being written."""
        return self._layout

    def write(self, start: int, buffer: memoryview) -> None:
        """Put bytes at offset ``start`` of the data section; see :class:`StateWriter`."""
        self.put(self._layout.data_start + start, (as_bytes(buffer),))

    def put(self, offset: int, views: Views, pages: Mapping[int, int] | None = None) -> None:
        """Put a run of bytes at an offset of the file, in one pwritev(2) where possible.

        Args:
            offset: Offset in the file; the header counts.
            views: The bytes.
            pages: Their page digests, if the caller has made them in an earlier pass.

        Raises:
            UsageError: Outside the file, or the writer is finished or discarded.
            NoSpaceError: No room.
            LandingError: The system refused, or the file is no longer the one that was made.
        """
        if pages is None:
            pages = page_digests(views, offset, self._layout.size)
        self.lay(offset, views)
        self.count(ByteRange(offset, offset + nbytes(views)), pages)

    def views(self, start: int, stop: int) -> None:  # noqa: ARG002 - as MemoryWriter's
        """None: a file has no memory of its own."""
        return

    def lay(self, offset: int, views: Views) -> None:
        """Write a run of bytes that do not count yet; errors as those of :meth:`put`."""
        item = ByteRange(offset, offset + nbytes(views))
        if item.stop > self._layout.size:
            raise UsageError("write outside the file", expected=self._layout.size, got=item.stop)
        self._check_open()
        with translated(self._part, "write", item.nbytes), opened(self._part, os.O_RDWR) as fd:
            self._check_same(fd)
            write_all(fd, views, offset)
            if self._cache is not None:
                self._cache.written(fd, item)

    def count(self, item: ByteRange, pages: Mapping[int, int]) -> None:
        """Count a range that was laid; errors as those of :meth:`put`.

        Args:
            item: Where it is in the file.
            pages: The digests of the pages that it covers whole.
        """
        self._check_open()
        shared = self._record(item, pages)
        if shared:
            with translated(self._part, "read"), opened(self._part, os.O_RDONLY) as fd:
                self._check_same(fd)
                for page in shared:
                    self._pages[page] = self._read_page(fd, page)

    def read_back(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of the unfinished file.

        Raises:
            LandingError: The system refused, or the bytes are not there.
        """
        with translated(self._part, "read"), opened(self._part, os.O_RDONLY) as fd:
            self._check_same(fd)
            if read_exactly(fd, (buffer,), offset) < buffer.nbytes:
                raise LandingError("the unfinished file is too short", path=self._part)

    def finish(self, nonfinite: frozenset[str] = frozenset()) -> LazyStateDict:
        """Rename the file into place and return it; see :class:`StateWriter`."""
        self._check_open()
        missing = self._written.missing(RangeSet.of([ByteRange(0, self._layout.size)]))
        if missing:
            raise UsageError(
                "bytes are missing", expected=self._layout.size, got=self._written.nbytes
            )
        with translated(self._part, "publish", self._layout.size):
            with opened(self._part, os.O_RDONLY) as fd:
                self._check_same(fd)
                if self._storage.durable:
                    os.fsync(fd)
                if self._cache is not None:
                    drop_cached(fd, 0, 0, written=True)
            self._part.rename(self._path)
            if self._storage.durable:
                sync_directory(self._path.parent)
        self._end()
        if self._taken is not None:
            self._taken()
        return LazyStateDict(
            self._path,
            self._layout,
            pages=self._pages,
            nonfinite=nonfinite,
            guard=self._guard,
            dispose=self._dispose,
            hop=self._hop,
            storage=self._storage,
        )

    def discard(self) -> None:
        """Remove the unfinished file, or hand its directory over; nothing after :meth:`finish`."""
        with self._lock:
            over, self._over = self._over, True
        if over:
            return
        if self._dispose is not None:
            self._dispose(self._path.parent)
        else:
            self._remove()
        self._end()

    def _remove(self) -> None:
        """Remove the unfinished file unless it is another writer's by now."""
        with suppress(OSError), opened(self._part, os.O_RDONLY) as fd:
            self._check_same(fd)
            self._part.unlink()

    def _end(self) -> None:
        self._over = True
        if self._unpin is not None:
            self._unpin()

    def _create(self, *, replace: bool) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with translated(self._part, "make room", self._layout.size):
            if replace:
                self._part.unlink(missing_ok=True)
            with opened(self._part, flags, self._storage.mode) as fd:
                try:
                    if not allocate(fd, self._layout.size):
                        os.ftruncate(fd, self._layout.size)
                    elif self._taken is not None:
                        self._taken()
                except OSError:
                    self._part.unlink(missing_ok=True)
                    raise
                stat = os.fstat(fd)
                return stat.st_dev, stat.st_ino

    def _pin(self) -> int:
        with translated(self._part, "open"):
            return os.open(self._part, os.O_RDONLY | os.O_CLOEXEC)

    def _record(self, item: ByteRange, pages: Mapping[int, int]) -> list[int]:
        """Note what is written; return the pages that this write has completed, but not alone."""
        with self._lock:
            for page, digest in pages.items():
                self._pages[page] = digest
            self._written = self._written.add(item)
            edges = {item.start // PAGE, max(item.stop - 1, item.start) // PAGE}
            return [page for page in edges - pages.keys() if self._is_written(page)]

    def _is_written(self, page: int) -> bool:
        stop = min((page + 1) * PAGE, self._layout.size)
        return page * PAGE < stop and self._written.covers(ByteRange(page * PAGE, stop))

    def _read_page(self, fd: int, page: int) -> int:
        start = page * PAGE
        content = memoryview(bytearray(min(PAGE, self._layout.size - start)))
        if read_exactly(fd, (content,), start) < len(content):
            raise LandingError("the unfinished file is too short", path=self._part)
        return page_digests((content,), start, self._layout.size)[page]

    def _check_open(self) -> None:
        if self._over:
            raise UsageError("the writer is finished or discarded", path=self._path)

    def _check_same(self, fd: int) -> None:
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino) != self._inode:
            raise LandingError("the unfinished file was replaced", path=self._part)


class _Writeback:
    """Keeps what is written out of the page cache: a batch is being written back while the next one fills."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._filling: ByteRange | None = None
        self._filled = 0
        self._leaving: ByteRange | None = None

    def written(self, fd: int, item: ByteRange) -> None:
        """Note a range that was written; once a batch is full, wait for the one before it, and drop that.

        Raises:
            OSError: What was written before cannot get to the disk.
        """
        with self._lock:
            box = self._filling or item
            self._filling = ByteRange(min(box.start, item.start), max(box.stop, item.stop))
            self._filled += item.nbytes
            if self._filled < CHUNK_BYTES:
                return
            batch, before = self._filling, self._leaving
            self._filling, self._filled, self._leaving = None, 0, self._filling
        start_writeback(fd, batch.start, batch.nbytes)
        if before is not None:
            drop_cached(fd, before.start, before.nbytes, written=True)


class MemoryWriter:
    """Writes a state dict into tensors that are allocated once.

    Args:
        layout: What will be written.

    Raises:
        LandingError: There is no memory for it; nothing is kept.
    """

    def __init__(self, layout: Layout) -> None:
        from streamoff.tensors.memory import (  # noqa: PLC0415 -- imports torch
            TensorBytes,
            allocate,
            prefault,
        )

        try:
            self._tensors: dict[str, torch.Tensor] = allocate(layout)
        except MemoryError as error:
            raise LandingError("no memory for the tensors", needed=layout.data_nbytes) from error
        self._bytes: Final = TensorBytes(layout, self._tensors)
        self._prefault: Final = prefault
        self._layout: Final = layout
        self._lock: Final = threading.Lock()
        self._written = RangeSet()
        self._over = False

    @property
    def layout(self) -> Layout:
        """What is being written."""
        return self._layout

    def write(self, start: int, buffer: memoryview) -> None:
        """Put bytes at offset ``start`` of the data section; see :class:`StateWriter`."""
        self.put(self._layout.data_start + start, (as_bytes(buffer),))

    def views(self, start: int, stop: int) -> Views | None:
        """The tensors' own memory for a range that is about to be filled; None where they are too many.

        Raises:
            UsageError: Outside the payload.
        """
        views = self._bytes.views(start, stop)
        if views is not None:
            self._prefault(views)
        return views

    def put(self, offset: int, views: Views, pages: Mapping[int, int] | None = None) -> None:
        """Put a run of bytes at an offset of the payload; header bytes are passed over.

        Args:
            offset: Offset in the payload.
            views: The bytes.
            pages: Of no use here.

        Raises:
            UsageError: Outside the payload, or the writer is finished or discarded.
        """
        self.lay(offset, views)
        self.count(ByteRange(offset, offset + nbytes(views)), pages or {})

    def lay(self, offset: int, views: Views) -> None:
        """Copy bytes that do not count yet; errors as those of :meth:`put`."""
        self._check_open()
        self._bytes.write(offset, views)

    def count(self, item: ByteRange, pages: Mapping[int, int]) -> None:  # noqa: ARG002 - as FileWriter's
        """Count a range that is there; errors as those of :meth:`put`."""
        self._check_open()
        with self._lock:
            self._written = self._written.add(item)

    def read_back(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes that were written."""
        self._bytes.read_into(offset, buffer)

    def finish(self, nonfinite: frozenset[str] = frozenset()) -> MemoryState:
        """Return the tensors; see :class:`StateWriter`."""
        self._check_open()
        missing = self._written.missing(self._layout.ranges())
        if missing:
            raise UsageError("bytes are missing", got=missing.nbytes)
        self._over = True
        return MemoryState(self._tensors, nonfinite=nonfinite, layout=self._layout)

    def discard(self) -> None:
        """Drop the tensors; nothing after :meth:`finish`."""
        self._over = True

    def _check_open(self) -> None:
        if self._over:
            raise UsageError("the writer is finished or discarded")
