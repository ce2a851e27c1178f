"""System calls on landed files: positional, continued when short, errors named once."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeAlias

from streamoff.errors import LandingError, NoSpaceError
from streamoff.tensors.views import Views, clip, nbytes

__all__ = [
    "Dispose",
    "Guard",
    "allocate",
    "no_guard",
    "opened",
    "read_exactly",
    "sync_directory",
    "translated",
    "write_all",
]

Guard: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Entered around each read of a file; raises JobClosedError when the file may no longer be used."""

Dispose: TypeAlias = Callable[[Path], object]
"""Takes over a directory that nobody needs any more; called from finalisers, so it must not block."""

_IOV_MAX: Final = 1024
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


def no_guard() -> AbstractContextManager[object]:
    """Guard nothing: the file belongs to the caller."""
    return nullcontext()


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file for the time of one operation: descriptors are bounded by the threads at work."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
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
        if error.errno not in _NO_SPACE:
            raise LandingError(
                f"cannot {what}", got=error.strerror, path=path, code=code
            ) from error
        free, inodes = _space(path)
        if error.errno == errno.EDQUOT:
            lacking = "the user's disk quota is spent"
        elif inodes == 0:
            lacking = "the file system has no inodes left"
        else:
            lacking = "the file system is full"
        raise NoSpaceError(
            f"cannot {what}: {lacking}", path=path, needed=needed, free=free, code=code
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
