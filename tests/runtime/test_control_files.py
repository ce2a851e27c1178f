"""Small files that processes tell each other things by."""

import asyncio
import os
import resource
import socket
import stat
from pathlib import Path

import anyio
import pytest

from streamoff.activity import at_work
from streamoff.errors import LimitError, ScratchError
from streamoff.runtime.control_files import (
    CONTROL_FILE_LIMIT,
    read_control_file,
    write_control_file,
)


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    return sorted(entry.name for entry in directory.iterdir())


async def test_what_was_written_is_read(tmp_path: Path) -> None:
    """A control file holds exactly the bytes written, is private, and leaves nothing beside it."""
    path = tmp_path / "endpoint.json"
    await write_control_file(path, b"one")
    await write_control_file(path, b"\0two\n")
    assert await read_control_file(path) == b"\0two\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == [path.name]
    assert at_work() == 0


async def test_a_missing_file_is_none(tmp_path: Path) -> None:
    """Asking for a file that is not there yet is a normal question."""
    assert await read_control_file(tmp_path / "absent") is None


async def test_the_limit_is_exact_for_readers_and_writers(tmp_path: Path) -> None:
    """A file of the limit passes; one byte more is refused by name on both sides, and not written."""
    path = tmp_path / "file"
    whole = b"x" * CONTROL_FILE_LIMIT
    await write_control_file(path, whole)
    assert await read_control_file(path) == whole
    with pytest.raises(LimitError, match="control file"):
        await write_control_file(path, whole + b"x")
    assert await read_control_file(path) == whole
    path.write_bytes(whole + b"x")
    with pytest.raises(LimitError, match="at most 65536 bytes"):
        await read_control_file(path)
    assert await read_control_file(path, limit=CONTROL_FILE_LIMIT + 1) == whole + b"x"


async def test_links_pipes_directories_and_sockets_are_refused(tmp_path: Path) -> None:
    """What is no regular file is an error at once: no link is followed and no thread waits for a pipe."""
    target = tmp_path / "target"
    target.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("link", "directory", "pipe", "socket"):
            with pytest.raises(ScratchError, match=name):
                await read_control_file(tmp_path / name)


async def test_writing_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    """A symbolic link in the file's place is replaced; what it pointed to keeps its bytes."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    await write_control_file(link, b"new")
    assert target.read_bytes() == b"precious"
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


async def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """A write stopped half way by a file size limit keeps the old content and removes its own remains."""
    path = tmp_path / "file"
    await write_control_file(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(ScratchError, match="too large"):
            await write_control_file(path, b"x" * 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == [path.name]


async def test_a_directory_that_is_missing_is_reported(tmp_path: Path) -> None:
    """Writing below a directory that does not exist says which file could not be written."""
    with pytest.raises(ScratchError, match="absent/file"):
        await write_control_file(tmp_path / "absent" / "file", b"x")


async def test_a_cancelled_scope_writes_nothing_new(tmp_path: Path) -> None:
    """A write in a scope that is already cancelled does not begin."""
    path = tmp_path / "file"
    with anyio.CancelScope() as scope:
        scope.cancel()
        await write_control_file(path, b"x")
    assert scope.cancelled_caught
    assert names(tmp_path) == []


async def test_a_write_that_has_begun_is_finished_before_the_cancellation(tmp_path: Path) -> None:
    """Cancelling a running write ends it whole: the file is complete and nothing is left beside it."""
    path = tmp_path / "file"
    async with anyio.create_task_group() as group:
        group.start_soon(write_control_file, path, b"x" * 1000)
        while not at_work():
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert at_work() == 0
    assert path.read_bytes() == b"x" * 1000
    assert names(tmp_path) == [path.name]


@pytest.mark.asyncio
async def test_cancelling_the_asyncio_task_itself_abandons_no_thread(tmp_path: Path) -> None:
    """Task.cancel() passes every shield, and still the write is over when the task is."""
    path = tmp_path / "file"
    task = asyncio.ensure_future(write_control_file(path, b"x" * 1000))
    while not at_work():
        await anyio.lowlevel.checkpoint()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert at_work() == 0
    assert path.read_bytes() == b"x" * 1000
    assert names(tmp_path) == [path.name]


async def test_readers_never_see_a_part(tmp_path: Path) -> None:
    """While writers replace the file, every reader gets one whole content."""
    path = tmp_path / "file"
    contents = {bytes([65 + n]) * 3000 for n in range(8)}
    await write_control_file(path, min(contents))
    seen: set[bytes | None] = set()

    async def read() -> None:
        for _ in range(10):
            seen.add(await read_control_file(path))

    async with anyio.create_task_group() as group:
        for content in contents:
            group.start_soon(write_control_file, path, content)
        group.start_soon(read)
    assert seen <= contents
