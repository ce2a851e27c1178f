"""What a test leaves behind is found and named."""

import asyncio
import mmap
import os
import socket
import threading
from collections.abc import Callable
from functools import partial

import anyio
import pytest
import trio

from streamoff.scratch.directory import RootDirectory
from streamoff.scratch.janitor import JANITOR
from streamoff.testing.leaks import LeakCheck, leaving_no_tasks


def test_nothing_left_is_nothing_found():
    """Files, sockets, threads and job roots that were ended are no leaks."""
    check = LeakCheck()
    thread = threading.Thread(target=int)
    thread.start()
    with socket.socket():
        thread.join()
    assert check.leaks() == []


def test_what_was_there_before_is_no_leak(tmp_path):
    """Only what came after the snapshot counts."""
    with (tmp_path / "early").open("w"), socket.socket():
        assert LeakCheck(scratch=tmp_path).leaks() == []


def test_a_thread_is_named():
    """A thread that goes on is found under its name, and gone once it has ended."""
    check = LeakCheck()
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="lingerer", daemon=True)
    thread.start()
    assert check.leaks() == ["thread: lingerer (daemon)"]
    leave.set()
    assert check.settle() == []


def test_an_open_file_is_named(tmp_path):
    """A descriptor that stays open is found with the file it leads to."""
    check = LeakCheck()
    path = tmp_path / "forgotten"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        assert check.leaks() == [f"descriptor: {descriptor} -> {path}"]
    finally:
        os.close(descriptor)
    assert check.leaks() == []


def test_a_reused_descriptor_number_is_still_a_leak(tmp_path):
    """A number that was open before, and now leads elsewhere, is found."""
    first = os.open(tmp_path / "one", os.O_CREAT | os.O_RDWR, 0o600)
    check = LeakCheck()
    os.close(first)
    second = os.open(tmp_path / "two", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        assert second == first
        assert check.leaks() == [f"descriptor: {second} -> {tmp_path / 'two'}"]
    finally:
        os.close(second)


def test_garbage_is_collected_first(tmp_path):
    """A descriptor that only a reference cycle keeps open is no leak."""

    class Holder:
        def __init__(self) -> None:
            self.descriptor = os.open(tmp_path / "held", os.O_CREAT | os.O_RDWR, 0o600)
            self.myself = self

        def __del__(self) -> None:
            os.close(self.descriptor)

    check = LeakCheck()
    Holder()
    assert check.leaks() == []


@pytest.fixture
def default_scratch(tmp_path, monkeypatch):
    """Put the default scratch directory in the test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_job_root_in_the_default_place_is_named(default_scratch):
    """A job root of this process that nobody buried is found, and its lease's descriptor too."""
    check = LeakCheck()
    root = RootDirectory.create("job-1", ram_backed="allow")
    leaks = check.leaks()
    assert f"scratch: {root.path}" in leaks
    assert any(leak.startswith("descriptor: ") and str(root.path) in leak for leak in leaks)
    JANITOR.reclaim(root.bury())
    assert check.settle() == []


def test_a_job_root_of_another_process_is_none_of_ours(default_scratch):
    """Others use the default place too: their roots are not taken for leaks."""
    check = LeakCheck()
    pid = os.fork()
    if pid == 0:
        RootDirectory.create("job-1", ram_backed="allow")
        os._exit(0)
    os.waitpid(pid, 0)
    assert [path.name for path in default_scratch.iterdir()] != []
    assert check.leaks() == []


def test_every_new_entry_of_a_given_directory_is_a_leak(tmp_path):
    """In a directory of the test's own, whatever appears is found."""
    check = LeakCheck(scratch=tmp_path)
    (tmp_path / "x").mkdir()
    assert check.leaks() == [f"scratch: {tmp_path / 'x'}"]


def test_a_mapped_file_of_a_job_root_is_named(default_scratch):
    """A mapping is found, also when its file and descriptor are gone."""
    check = LeakCheck()
    root = RootDirectory.create("job-1", ram_backed="allow")
    path = root.new_transfer() / "payload.safetensors"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    JANITOR.reclaim(root.bury())
    assert JANITOR.wait(root.path, 5)
    assert any(
        leak.startswith("mapping: ") and "payload.safetensors" in leak for leak in check.leaks()
    )
    mapped.close()
    assert check.settle() == []


async def test_a_task_is_named(anyio_backend_name):
    """A test that returns while a task of its own runs on is told which."""

    async def lingerer() -> None:
        await anyio.sleep_forever()

    stop: list[Callable[[], object]] = []

    async def careless() -> None:
        if anyio_backend_name == "trio":
            scope = trio.CancelScope()

            async def scoped() -> None:
                with scope:
                    await lingerer()

            scoped.__qualname__ = "lingerer"
            trio.lowlevel.spawn_system_task(scoped)
            stop.append(scope.cancel)
        else:
            stop.append(asyncio.create_task(lingerer()).cancel)

    with pytest.raises(AssertionError, match=r"left tasks running:\n  .*lingerer"):
        await leaving_no_tasks(careless)()
    stop[0]()


async def test_a_task_that_is_ending_is_no_leak(anyio_backend_name):
    """A task that was cancelled gets its last steps."""

    async def cancelled() -> None:
        if anyio_backend_name == "trio":
            trio.lowlevel.spawn_system_task(trio.lowlevel.checkpoint)
        else:
            asyncio.create_task(anyio.sleep_forever()).cancel()

    await leaving_no_tasks(cancelled)()


async def test_an_error_of_the_test_goes_first():
    """The wrapper does not hide what the test raised."""

    async def failing() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError):
        await leaving_no_tasks(failing)()


async def test_idle_workers_are_no_leak():
    """Worker threads that the backend keeps for later are not taken for leaks."""
    check = LeakCheck()
    await anyio.to_thread.run_sync(int)
    assert check.settle() == []


async def test_a_busy_worker_is_a_leak():
    """A worker thread that its caller abandoned in a call is found."""
    check = LeakCheck()
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        leave.wait()

    async with anyio.create_task_group() as group:
        group.start_soon(partial(anyio.to_thread.run_sync, block, abandon_on_cancel=True))
        while not entered.is_set():
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert [leak for leak in check.leaks() if leak.startswith("thread: ")] != []
    leave.set()
    while check.leaks():
        await anyio.lowlevel.checkpoint()
