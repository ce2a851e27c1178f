"""Small files by which processes on one machine tell each other things: read whole, replaced whole.

The bytes are few, so what counts is that a reader never sees half of them, that a hostile or broken
file costs neither memory nor a thread, and that a cancelled writer leaves nothing behind.
"""

import asyncio
import os
import secrets
import stat
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar, TypeVarTuple, Unpack

import aiofiles
import anyio
import anyio.lowlevel

from streamoff.activity import working
from streamoff.errors import LimitError, ScratchError

__all__ = ["CONTROL_FILE_LIMIT", "read_control_file", "write_control_file"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CONTROL_FILE_LIMIT: Final = 64 * 1024
"""Bytes of a control file, unless the caller says otherwise."""


async def read_control_file(path: Path, *, limit: int = CONTROL_FILE_LIMIT) -> bytes | None:
    """Read a control file.

    Args:
        path: A regular file; a symbolic link in its place is refused.
        limit: Bytes it may have.

    Returns:
        Its content; None if there is no such file.

    Raises:
        LimitError: It is longer. At most ``limit + 1`` bytes were read.
        ScratchError: It cannot be read, or is no regular file.

    Cancellation: a checkpoint before; once begun, the read is waited for.
    """
    try:
        data = await _unabandoned(_read, path, limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ScratchError(f"cannot read a control file ({error})", path=path) from error
    if len(data) > limit:
        raise LimitError(
            "control file", expected=f"at most {limit} bytes", got="more", path=path, limit=limit
        )
    return data


async def write_control_file(path: Path, data: bytes, *, limit: int = CONTROL_FILE_LIMIT) -> None:
    """Write a control file under another name and rename it into place, readable by its owner only.

    It survives a crash of the process, not of the machine.

    Args:
        path: Where it goes; replaced if it is there. A symbolic link is replaced, not followed.
        data: Its whole content.
        limit: Bytes it may have.

    Raises:
        LimitError: It is longer. Nothing was written.
        ScratchError: It cannot be written. The old file, if any, stands, and nothing is left beside
            it.

    Cancellation: a checkpoint before; once begun, the file is written and the cancellation shows
        after.
    """
    if len(data) > limit:
        raise LimitError(
            "control file",
            expected=f"at most {limit} bytes",
            got=f"{len(data)} bytes",
            path=path,
            limit=limit,
        )
    part = path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}.part")
    try:
        await _unabandoned(_write, path, part, data)
    except OSError as error:
        raise ScratchError(f"cannot write a control file ({error})", path=path) from error


async def _read(path: Path, size: int) -> bytes:
    async with _open(path, "rb") as file:
        return await file.read(size)


async def _write(path: Path, part: Path, data: bytes) -> None:
    try:
        async with _open(part, "xb") as file:
            await file.write(data)
        await anyio.Path(part).replace(path)
    except BaseException:
        await anyio.Path(part).unlink(missing_ok=True)
        raise


class _File(Protocol):
    async def read(self, size: int, /) -> bytes: ...

    async def write(self, data: bytes, /) -> int: ...


@asynccontextmanager
async def _open(path: Path, mode: Literal["rb", "xb"]) -> AsyncIterator[_File]:
    if _in_trio():
        async with await anyio.open_file(path, mode, opener=_opener) as file:
            yield file
    else:
        async with aiofiles.open(path, mode, opener=_opener) as other:
            yield other


def _opener(path: str, flags: int) -> int:
    """Open without following a link or waiting for the other end of a pipe; regular files only."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"not a regular file: {path}")
    return fd


async def _unabandoned(fn: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]], *args: *Ts) -> T:
    """Await file work to its end: aiofiles leaves its thread behind when it is cancelled.

    A shield keeps out the cancellation of scopes. Cancelling the asyncio task itself passes any
    shield, so there the work is a task of its own.
    """
    await anyio.lowlevel.checkpoint()
    with working(), anyio.CancelScope(shield=True):
        if _in_trio():
            return await fn(*args)
        task = asyncio.ensure_future(fn(*args))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            task.exception()  # seen: the cancellation is what the caller is told
            raise cancelled
        return task.result()
    raise AssertionError("a shielded scope is never cancelled")  # the type checker cannot know


def _in_trio() -> bool:
    """Whether this is a trio task; trio is not imported for the question."""
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_task()
