"""Positional, verified reads of one safetensors file; never a mapping."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from streamoff.errors import (
    IntegrityError,
    JobClosedError,
    LandingError,
    PeerError,
    SourceChangedError,
    TruncatedFileError,
    UsageError,
)
from streamoff.tensors.digests import PAGE, PageDigests, page_digests
from streamoff.tensors.files import (
    DEFAULT_STORAGE,
    Guard,
    Storage,
    drop_cached,
    no_guard,
    opened,
    read_exactly,
    read_nothing_ahead,
)
from streamoff.tensors.layout import DEFAULT_LIMITS, HeaderLimits, Layout, header_length, parse
from streamoff.tensors.views import Views, as_bytes, nbytes

__all__ = ["FileReader", "Identity", "read_layout"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells one state of a file from another: device, inode, size, mtime in ns."""

    device: int
    inode: int
    size: int
    mtime: int

    @classmethod
    def of(cls, fd: int) -> Self:
        """Return the identity of an open file."""
        stat = os.fstat(fd)
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def read_layout(path: Path, limits: HeaderLimits = DEFAULT_LIMITS) -> Layout:
    """Read and check the header of an existing safetensors file.

    Raises:
        TruncatedFileError: The file ends before its header or its data does.
        IntegrityError: Bytes follow the data.
        HeaderError: Not a safetensors file.
        LimitError: A header above a limit.
        OSError: The file cannot be opened or read.
    """
    return _identified_layout(path, limits)[0]


def _identified_layout(path: Path, limits: HeaderLimits) -> tuple[Layout, Identity]:
    with opened(path, os.O_RDONLY) as fd:
        identity = Identity.of(fd)
        try:
            first = _read_prefix(fd, 8, identity.size, path)
            length = 8 + header_length(first, limits)
            layout = parse(_read_prefix(fd, length, identity.size, path), limits=limits)
        except PeerError as error:
            error.located(path=path)
            raise
    if layout.size > identity.size:
        cut = next(s for s in layout.specs if layout.data_start + s.stop > identity.size)
        raise _truncated(path, layout.size, identity.size, cut.name)
    if layout.size < identity.size:
        raise IntegrityError("trailing bytes", expected=layout.size, got=identity.size, path=path)
    return layout, identity


def _read_prefix(fd: int, length: int, size: int, path: Path) -> bytes:
    if size < length:
        raise _truncated(path, f"at least {length}", size)
    prefix = bytearray(length)
    got = read_exactly(fd, (memoryview(prefix),), 0)
    if got < length:
        raise _truncated(path, f"at least {length}", got)
    return bytes(prefix)


def _truncated(
    path: Path, expected: object, got: int, tensor: str | None = None
) -> TruncatedFileError:
    return TruncatedFileError(
        "file is truncated", expected=f"{expected} bytes", got=got, path=path, tensor=tensor
    )


class FileReader:
    """Reads of one payload file; opens it for each read, so it holds no descriptor.

    Args:
        path: The file.
        layout: Its layout.
        pages: Page digests kept at landing; None: nothing is known, pages are not verified.
        guard: Entered around each read.
        identity: If given, the file must still be in this state at each read.
        storage: Whether what has been read is dropped from the page cache.

    Safe to use from several threads at once.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        *,
        pages: PageDigests[int] | None = None,
        guard: Guard | None = None,
        identity: Identity | None = None,
        storage: Storage = DEFAULT_STORAGE,
    ) -> None:
        self.path: Final = path
        self.layout: Final = layout
        self._pages: Final = pages
        self._guard: Final = guard or no_guard
        self._identity: Final = identity
        self._drop: Final = storage.page_cache == "drop"
        self._closed = False

    @classmethod
    def frozen(cls, path: Path, limits: HeaderLimits, guard: Guard | None = None) -> Self:
        """Read the header of a file and return a reader that notices when the file changes.

        Raises:
            TruncatedFileError: As :func:`read_layout`.
            HeaderError: As :func:`read_layout`.
            LimitError: As :func:`read_layout`.
            OSError: As :func:`read_layout`.
        """
        layout, identity = _identified_layout(path, limits)
        return cls(path, layout, guard=guard, identity=identity)

    def check(self) -> None:
        """Make sure that the file is there and unchanged.

        Raises:
            JobClosedError: The file is gone, or may no longer be used.
            SourceChangedError: It is not the file it was.
        """
        with self._opened() as fd:
            self._compare(fd)

    def close(self) -> None:
        """Let no read begin any more."""
        self._closed = True

    def read(self, start: int, buffer: memoryview, *, tensor: str | None = None) -> None:
        """Fill ``buffer`` with payload bytes from ``start`` on, verifying whole pages.

        Args:
            start: Offset in the file; the header counts.
            buffer: Writable, C-contiguous. Undefined after an error.
            tensor: Whose bytes these are, for the message.

        Raises:
            UsageError: The range is not inside the file.
            JobClosedError: The file is gone, or may no longer be used.
            SourceChangedError: It is not the file it was.
            TruncatedFileError: It ends early.
            IntegrityError: A page does not have the digest it landed with.
            LandingError: The system cannot read it.
        """
        into = as_bytes(buffer)
        stop = start + len(into)
        if not 0 <= start <= stop <= self.layout.size:
            raise UsageError(
                "range outside the file", expected=f"0 to {self.layout.size}", got=(start, stop)
            )
        first, views = (start, (into,)) if self._pages is None else self._whole_pages(start, into)
        with self._opened() as fd:
            self._compare(fd)
            if start == stop:
                return
            if self._drop:
                read_nothing_ahead(fd)
            got = read_exactly(fd, views, first)
            size = os.fstat(fd).st_size
            if self._drop:
                drop_cached(fd, first, nbytes(views), written=False)
        if got < nbytes(views):
            raise _truncated(self.path, self.layout.size, size, tensor)
        if self._pages is not None:
            self._verify(self._pages, first, views, tensor)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if self._closed:
            raise JobClosedError("the file was released", path=self.path)
        with self._guard(), _present(self.path), opened(self.path, os.O_RDONLY) as fd:
            yield fd

    def _whole_pages(self, start: int, into: memoryview) -> tuple[int, Views]:
        """Widen a read to whole pages: the margins go to scratch, the middle straight to ``into``."""
        stop = start + len(into)
        first = start - start % PAGE
        last = min(stop + -stop % PAGE, self.layout.size)
        margins = (memoryview(bytearray(start - first)), memoryview(bytearray(last - stop)))
        return first, tuple(view for view in (margins[0], into, margins[1]) if view)

    def _verify(
        self, pages: PageDigests[int], first: int, views: Views, tensor: str | None
    ) -> None:
        for page, digest in page_digests(views, first, self.layout.size).items():
            if pages[page] != digest:
                raise IntegrityError(
                    "page changed since it landed",
                    expected=f"{pages[page]:016x}",
                    got=f"{digest:016x}",
                    path=self.path,
                    tensor=tensor,
                    offset=page * PAGE,
                )

    def _compare(self, fd: int) -> None:
        if self._identity is not None:
            now = Identity.of(fd)
            if now != self._identity:
                raise SourceChangedError(
                    "file changed while it is being served",
                    expected=self._identity,
                    got=now,
                    path=self.path,
                )


@contextmanager
def _present(path: Path) -> Iterator[None]:
    """Say what a failing read means: a file that is gone is a closed job, the rest the system's fault."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise JobClosedError("the file is gone", path=path) from error
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "unknown")
        raise LandingError(f"cannot read ({error.strerror})", path=path, code=code) from error
