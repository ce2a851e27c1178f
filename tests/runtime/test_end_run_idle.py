"""A drain that waits does nothing: with cancellations pending and threads blocked, the event loop sleeps."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from streamoff.machines.job_root import JobRootState
from streamoff.runtime.jobs import ConsumerEnd, open_job
from streamoff.runtime.threads import run_in_thread

from .world import until_gone, world

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_leaks")]

SECONDS = 0.3
TURNS = 150
"""Of the event loop: what timers, threads and the polling of foreign reads need in that time, three times over.

A loop that spins takes tens of thousands.
"""


class Turns:
    """Counts turns of the running event loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        """Trio is about to look for events."""
        self.count += 1


@contextmanager
def turns(backend: str) -> Iterator[Turns]:
    """Count the turns of the running event loop in a block."""
    counted = Turns()
    if backend == "trio":
        import trio

        trio.lowlevel.add_instrument(counted)  # type: ignore[arg-type]
        try:
            yield counted
        finally:
            trio.lowlevel.remove_instrument(counted)  # type: ignore[arg-type]
        return
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select = selector.select

    def counting(timeout: float | None = None) -> object:
        counted.count += 1
        return select(timeout)

    selector.select = counting
    try:
        yield counted
    finally:
        del selector.select


async def test_an_aborted_drain_does_not_spin(tmp_path, anyio_backend):
    """Cancelled three task groups deep, a drain waits for its consumer without a turn of the loop more than it needs."""
    async with world() as w:
        with turns(anyio_backend[0]) as counted, anyio.CancelScope() as scope:
            async with (
                anyio.create_task_group(),
                anyio.create_task_group(),
                anyio.create_task_group(),
                open_job("job", w.server, scratch=tmp_path) as job,
            ):
                consumer = job.start(anyio.sleep, SECONDS)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert consumer.end is ConsumerEnd.FINISHED
        assert 0 < counted.count < TURNS


async def test_a_blocked_write_with_a_cancellation_pending_does_not_spin(tmp_path, anyio_backend):
    """A thread in the middle of a write cannot be cut: the loop sleeps until the write ends, and so does the root."""
    out, into = os.pipe()
    os.set_blocking(into, False)
    while True:
        try:
            os.write(into, bytes(65536))
        except BlockingIOError:
            break
    os.set_blocking(into, True)
    begun = threading.Event()
    drained = threading.Timer(SECONDS, os.read, (out, 65536))

    def write() -> None:
        begun.set()
        os.write(into, b"one more")

    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path, drain_window=0) as job:
            consumer = job.start(run_in_thread, write)
            while not begun.is_set():  # noqa: ASYNC110 - another thread begins it
                await anyio.sleep(0.001)
            with turns(anyio_backend[0]) as counted:
                job.close()
                while job.state is not JobRootState.STUCK:  # noqa: ASYNC110 - a state
                    await anyio.sleep(0.01)
                drained.start()
                await consumer.wait()
        await until_gone(job)
        drained.join()
        assert 0 < counted.count < TURNS
        assert job.report.ends == {ConsumerEnd.STUCK: 1}
    os.close(out)
    os.close(into)


async def test_a_read_in_a_foreign_thread_is_looked_at_now_and_then(tmp_path, anyio_backend):
    """While somebody else's read is all that keeps a root, the loop looks at it, and sleeps in between."""
    over = threading.Event()
    async with world() as w, anyio.create_task_group() as group:
        async with open_job("job", w.server, scratch=tmp_path, drain_window=0) as job:

            def read() -> None:
                with job.guard():
                    over.wait(60)

            group.start_soon(run_in_thread, read)
            while not job.guard.reads:  # noqa: ASYNC110 - another thread begins it
                await anyio.sleep(0.001)
        with turns(anyio_backend[0]) as counted:
            await anyio.sleep(SECONDS)
        over.set()
        assert job.report.state is JobRootState.STUCK
        await until_gone(job)
        assert 0 < counted.count < TURNS


@pytest.mark.parametrize(
    "anyio_backend", ["asyncio"], indirect=True
)  # trio would not let others run
async def test_a_consumer_that_swallows_every_cancellation_is_stuck_like_any_other(tmp_path):
    """Who catches each cancellation and goes on is named as stuck, and keeps its root, and nobody else, until it ends."""
    over = False
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while not over:
            try:
                await anyio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1

    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path, drain_window=0) as job:
            consumer = job.start(stubborn, name="stubborn")
            await anyio.sleep(0.01)
        assert job.report.state is JobRootState.STUCK
        assert [one.name for one in job.report.consumers] == ["stubborn"]
        assert swallowed > 1
        assert job.path.exists()
        async with open_job("job", w.server, scratch=tmp_path):
            over = True
            assert await consumer.wait() is ConsumerEnd.FINISHED
        await until_gone(job)
    assert list(tmp_path.iterdir()) == []
