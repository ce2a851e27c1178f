"""System calls on landed files: positional, continued when short, errors named once."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from streamoff.errors import LandingError, NoSpaceError, UsageError
from streamoff.tensors.views import Views, clip, nbytes

__all__ = [
    "DEFAULT_STORAGE",
    "Dispose",
    "Guard",
    "PageCache",
    "Storage",
    "allocate",
    "drop_cached",
    "no_guard",
    "opened",
    "read_exactly",
    "read_nothing_ahead",
    "start_writeback",
    "sync_directory",
    "translated",
    "write_all",
]

Guard: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Entered around each read of a file; raises JobClosedError when the file may no longer be used."""

Dispose: TypeAlias = Callable[[Path], object]
"""Takes over a directory that nobody needs any more; called from finalisers, so it must not block."""

PageCache = Literal["keep", "drop"]
"""What the kernel's page cache does with a file: keep what it likes, or only what is being written or read."""

_IOV_MAX: Final = 1024
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE
_WRITE_AND_WAIT: Final = 7  # ..._WAIT_BEFORE | ..._WRITE | ..._WAIT_AFTER
_ADVICE: Final = hasattr(os, "posix_fadvise")
_CACHED: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a file is kept.

    Args:
        durable: Whether it counts as written only when it and its name are on stable storage.
        page_cache: ``"drop"`` writes back and drops from the page cache what has been written, and drops
            what has been read: the cache of a file is then a few chunks. Without effect where the system
            has no such calls (macOS), and on file systems in RAM.
        public: Whether others may read it: made with mode 0666 less the umask. Else 0600.

    Raises:
        UsageError: A value of the wrong kind.
    """

    durable: bool = False
    page_cache: PageCache = "keep"
    public: bool = False

    def __post_init__(self) -> None:
        for name in ("durable", "public"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(name, expected="True or False", got=getattr(self, name))
        if self.page_cache not in get_args(PageCache):
            raise UsageError("page_cache", expected="'keep' or 'drop'", got=self.page_cache)

    @property
    def mode(self) -> int:
        """The mode that a file is made with, before the umask."""
        return 0o666 if self.public else 0o600


DEFAULT_STORAGE: Final = Storage()
"""Private, in the page cache, and not synced."""


def no_guard() -> AbstractContextManager[object]:
    """Guard nothing: the file belongs to the caller."""
    return nullcontext()


@contextmanager
def opened(path: Path, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Open a file for the time of one operation: descriptors are bounded by the threads at work."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def translated(path: Path, what: str, needed: int | None = None) -> Iterator[None]:
    """Turn an OSError into the error of a landing, with the place and the numbers.

    Args:
        path: The file worked on.
        what: The operation, for the message.
        needed: Bytes that it wanted.

    Raises:
        NoSpaceError: No room, no inodes or no quota left.
        LandingError: Anything else the system refused.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, LandingError):
            raise
        code = errno.errorcode.get(error.errno or 0, "unknown")
        free, inodes = _space(path)
        if error.errno not in _NO_SPACE:
            raise LandingError(
                f"cannot {what} ({error.strerror})", needed=needed, free=free, code=code, path=path
            ) from error
        if error.errno == errno.EDQUOT:
            lacking = "the user's disk quota is spent"
        elif inodes == 0:
            lacking = "the file system has no inodes left"
        else:
            lacking = "the file system is full"
        raise NoSpaceError(
            f"cannot {what}: {lacking}",
            needed=needed,
            free=free,
            inodes=inodes if inodes == 0 else None,
            code=code,
            path=path,
        ) from error


def _space(path: Path) -> tuple[int | None, int | None]:
    """Return free bytes and free inodes; None where the file system does not count them."""
    try:
        stats = os.statvfs(path.parent)
    except OSError:
        return None, None
    return (
        stats.f_bavail * stats.f_frsize if stats.f_blocks else None,
        stats.f_favail if stats.f_files else None,
    )


def allocate(fd: int, size: int) -> bool:
    """Reserve ``size`` bytes with fallocate(2), never with its emulation.

    glibc's posix_fallocate writes to every page where the file system cannot allocate.

    Returns:
        Whether the space is reserved; False where the system call or the file system lacks it.

    Raises:
        OSError: No room for it.
    """
    call = _fallocate()
    if call is None or size == 0:
        return False
    while call(fd, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


@functools.cache
def _fallocate() -> Callable[..., Any] | None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        call.restype = ctypes.c_int
    return call


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Have the kernel begin to write a range to disk; does not wait for it.

    Raises:
        OSError: An earlier write to the file failed on its way to the disk.
    """
    _sync_range(fd, offset, length, _WRITE)


def read_nothing_ahead(fd: int) -> None:
    """Have the kernel read what is asked for and no more: what is read ahead would stay in the page cache."""
    if _ADVICE:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def drop_cached(fd: int, offset: int, length: int, *, written: bool) -> None:
    """Drop a range of a file from the page cache.

    Args:
        fd: The file.
        offset: Of the range; a page that is in it in part goes, too.
        length: Bytes; 0 up to the end of the file.
        written: Whether it may have to be written back first; then this waits for the disk.

    Raises:
        OSError: The range, or an earlier one, could not be written back.
    """
    if written:
        _sync_range(fd, offset, length, _WRITE_AND_WAIT)
    if _ADVICE:
        start = offset - offset % _CACHED
        stop = offset + length + -(offset + length) % _CACHED if length else start
        os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)


def _sync_range(fd: int, offset: int, length: int, how: int) -> None:
    call = _sync_file_range()
    if call is None or call(fd, offset, length, how) == 0:
        return
    code = ctypes.get_errno()
    if code not in _UNSUPPORTED and code != errno.ESPIPE:
        raise OSError(code, os.strerror(code))


@functools.cache
def _sync_file_range() -> Callable[..., Any] | None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        call.restype = ctypes.c_int
    return call


def write_all(fd: int, views: Views, offset: int) -> None:
    """Write a run of bytes at ``offset``: one pwritev(2) unless the kernel takes less.

    Raises:
        OSError: The system refused; part of the run may be written.
    """
    left = nbytes(views)
    while left:
        done = os.pwritev(fd, views[:_IOV_MAX], offset)
        offset += done
        left -= done
        if left:
            views = clip(views, done, done + left)


def read_exactly(fd: int, buffers: Views, offset: int) -> int:
    """Fill writable views from ``offset`` on: one preadv(2) unless the kernel gives less.

    Returns:
        Bytes read; fewer than asked for only at the end of the file.
    """
    total, left = 0, nbytes(buffers)
    while left:
        done = os.preadv(fd, buffers[:_IOV_MAX], offset + total)
        if done == 0:
            break
        total += done
        left -= done
        if left:
            buffers = clip(buffers, done, done + left)
    return total


def sync_directory(path: Path) -> None:
    """Make a rename in a directory durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
