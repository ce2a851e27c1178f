"""Blocking calls in worker threads."""

import asyncio
import threading

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from streamoff.activity import at_work
from streamoff.runtime.threads import run_in_thread, wait_from_thread

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)


async def test_result_and_arguments_pass_through():
    """A call returns what its function returns for the arguments given."""
    assert await run_in_thread(divmod, 7, 3) == (2, 1)


async def test_runs_in_another_thread():
    """The function runs outside the event loop's thread."""
    assert await run_in_thread(threading.get_ident) != threading.get_ident()


async def test_error_passes_through():
    """What the function raises reaches the caller as it is."""
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(divmod, 1, 0)
    assert at_work() == 0


async def test_counts_as_work_until_the_result_is_delivered():
    """From its start until the caller has the result, a call is at work."""
    assert at_work() == 0
    assert await run_in_thread(at_work) == 1
    assert at_work() == 0


async def test_cancellation_waits_for_the_call():
    """A cancelled caller is released only after the function has ended."""
    entered, leave = threading.Event(), threading.Event()
    ended = False

    def block() -> None:
        nonlocal ended
        entered.set()
        leave.wait()
        ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(run_in_thread, block)
        while not entered.is_set():
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
        leave.set()
    assert ended
    assert at_work() == 0


@on_asyncio
@pytest.mark.parametrize("strikes", [1, 3])
async def test_asyncios_own_cancellation_waits_for_the_call_and_shows_afterwards(strikes):
    """Struck while its call is under way, a task has the result first, and the cancellation at its next checkpoint."""
    entered, leave = threading.Event(), threading.Event()
    results: list[str] = []

    def block() -> str:
        entered.set()
        leave.wait()
        return "made"

    async def caller() -> None:
        results.append(await run_in_thread(block))
        await anyio.lowlevel.checkpoint()
        results.append("went on")

    task = asyncio.ensure_future(caller())
    while not entered.is_set():
        await anyio.lowlevel.checkpoint()
    for _ in range(strikes):
        task.cancel()
        await anyio.lowlevel.checkpoint()
        assert at_work() == 1
        assert not task.done()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert results == ["made"]
    assert at_work() == 0


@on_asyncio
async def test_an_error_goes_before_asyncios_own_cancellation():
    """What a call raises after its caller was struck is raised where it is called; the cancellation follows."""
    entered, leave = threading.Event(), threading.Event()

    def fail() -> None:
        entered.set()
        leave.wait()
        raise OSError("full")

    async def caller() -> None:
        with pytest.raises(OSError, match="full"):
            await run_in_thread(fail)
        await anyio.sleep_forever()

    task = asyncio.ensure_future(caller())
    while not entered.is_set():
        await anyio.lowlevel.checkpoint()
    task.cancel()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@on_asyncio
async def test_a_timeout_of_asyncios_is_one_when_the_call_has_ended():
    """A call that outlasts asyncio.timeout is waited for; the timeout is raised all the same."""
    ended: list[bool] = []

    async def pause() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(3)

    def block() -> None:
        wait_from_thread(pause)
        ended.append(True)

    async def bounded() -> None:
        async with asyncio.timeout(1):
            await run_in_thread(block)
            await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        await bounded()
    assert ended == [True]
    assert anyio.current_time() == 3
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@on_asyncio
async def test_a_call_that_was_struck_before_it_began_is_not_made():
    """A task that is struck on its way to a thread starts nothing there, at whichever of its steps."""
    calls: list[int] = []
    for steps in range(4):
        task = asyncio.ensure_future(run_in_thread(calls.append, steps))
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        made = list(calls)
        await run_in_thread(threading.Event().wait, 0.01)
        assert calls == made


async def test_cancellation_before_the_start_runs_nothing():
    """A caller that is already cancelled starts no thread."""
    calls: list[int] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run_in_thread(calls.append, 1)
    assert calls == []
    assert at_work() == 0


async def test_limiter_bounds_the_calls():
    """No more calls run at once than the limiter has tokens."""
    limiter = anyio.CapacityLimiter(2)
    lock = threading.Lock()
    running = most = 0
    together = threading.Barrier(2)

    def step() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(lambda: run_in_thread(step, limiter=limiter))
    assert most == 2


async def test_waiting_for_the_limiter_is_not_work():
    """A call that has no thread yet does not hold the clock."""
    limiter = anyio.CapacityLimiter(1)
    async with anyio.create_task_group() as group, limiter:
        group.start_soon(lambda: run_in_thread(int, limiter=limiter))
        await anyio.sleep(5)
        assert at_work() == 0
    assert anyio.current_time() == 5


async def test_a_thread_may_wait_for_the_loop_in_virtual_time():
    """A worker that sleeps in its loop gets its time, to the exact second, and counts as work around it."""
    counts: list[int] = []

    async def nap(seconds: float) -> float:
        counts.append(at_work())
        await anyio.sleep(seconds)
        return anyio.current_time()

    def work() -> float:
        counts.append(at_work())
        woke = wait_from_thread(nap, 30)
        counts.append(at_work())
        return woke

    assert await run_in_thread(work) == 30
    assert counts == [1, 0, 1]
    assert at_work() == 0


async def test_any_worker_thread_may_wait_for_the_loop():
    """A thread that was started without us can wait as well, and the count stays right."""

    def work() -> None:
        wait_from_thread(anyio.sleep, 30)

    await anyio.to_thread.run_sync(work)
    assert anyio.current_time() == 30
    assert at_work() == 0


async def test_an_error_in_the_loop_reaches_the_waiting_thread():
    """What the async function raises is raised in the thread, which is at work again."""

    async def fail() -> None:
        raise LookupError("gone")

    def work() -> int:
        with pytest.raises(LookupError):
            wait_from_thread(fail)
        return at_work()

    assert await run_in_thread(work) == 1


def test_waiting_outside_a_worker_thread_is_an_error():
    """Without an event loop to wait for, the call says so."""
    with pytest.raises(RuntimeError):
        wait_from_thread(anyio.sleep, 1)
