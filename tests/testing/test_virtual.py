"""Virtual time, on both backends."""

import asyncio
import math
import socket
import threading
import time
from functools import partial
from typing import Literal

import anyio
import anyio.to_thread
import pytest
import trio

from streamoff.activity import working
from streamoff.errors import UsageError
from streamoff.runtime.threads import run_in_thread
from streamoff.testing import VirtualLoop, VirtualTime, run_virtual, virtual_backend

BACKENDS = ["asyncio", "trio"]


async def alarm(fired: list[float], seconds: float) -> None:
    """Note the time after a sleep."""
    await anyio.sleep(seconds)
    fired.append(anyio.current_time())


async def unchanged_while(call) -> None:
    """Assert that a timer of 600 s does not fire, and the clock does not move, during a real call."""
    fired: list[float] = []
    before = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(alarm, fired, 600)
        await anyio.lowlevel.checkpoint()
        await call()
        assert fired == []
        assert anyio.current_time() == before
        group.cancel_scope.cancel()


async def test_a_sleep_ends_at_its_exact_second():
    """Ten seconds are exactly ten seconds, from zero."""
    assert anyio.current_time() == 0
    await anyio.sleep(10)
    assert anyio.current_time() == 10


async def test_uneven_sleeps_add_up_like_their_numbers():
    """The clock shows the deadline itself, not something close to it."""
    expected = 0.0
    for seconds in (0.1, 0.2, 1 / 3, 1e-6, 86_399.7, 7.0):
        expected += seconds
        await anyio.sleep(seconds)
        assert anyio.current_time() == expected


async def test_very_long_times_pass():
    """A century passes, and short sleeps still work after it."""
    century = 100 * 365 * 86_400.0
    await anyio.sleep(century)
    assert anyio.current_time() == century
    for _ in range(3):
        await anyio.sleep(0.001)
    assert anyio.current_time() == pytest.approx(century + 0.003, abs=1e-6)


async def test_a_timeout_cuts_at_its_exact_second():
    """Cancellation by deadline comes at the deadline."""
    with anyio.move_on_after(12.5) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert anyio.current_time() == 12.5


async def test_nested_timeouts_cut_inside_out():
    """Two deadlines fire each at its own time, whatever order they were set in."""
    with anyio.move_on_after(20):
        with anyio.move_on_after(5):
            await anyio.sleep(10)
        assert anyio.current_time() == 5
        await anyio.sleep(100)
    assert anyio.current_time() == 20


async def test_what_happened_first_wins_in_the_same_instant():
    """Work that ends before its deadline is not cut by it, however close the two are."""
    with anyio.fail_after(10):
        await anyio.sleep(math.nextafter(10, 0))
    assert anyio.current_time() < 10


async def test_thousands_of_timers_fire_in_order():
    """Each of 3,000 timers sees its own time."""
    fired: list[float] = []
    async with anyio.create_task_group() as group:
        for number in range(3000, 0, -1):
            group.start_soon(alarm, fired, number)
    assert fired == [float(number) for number in range(1, 3001)]


async def test_a_cancelled_timer_does_not_move_the_clock():
    """Time stands where it was when the only timer is gone."""
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep, 500)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert anyio.current_time() == 0


@pytest.mark.parametrize("seconds", [0.0, 0.2])
async def test_our_worker_threads_hold_the_clock(seconds):
    """A blocking call of ours, long or instant, lets no timer fire."""
    for _ in range(1 if seconds else 50):
        await unchanged_while(partial(run_in_thread, time.sleep, seconds))


@pytest.mark.parametrize("seconds", [0.0, 0.2])
async def test_foreign_worker_threads_hold_the_clock(seconds):
    """A blocking call through anyio lets no timer fire, with the default limiter and with another one."""
    for limiter in (None, anyio.CapacityLimiter(1)):
        call = partial(anyio.to_thread.run_sync, time.sleep, seconds, limiter=limiter)
        for _ in range(1 if seconds else 25):
            await unchanged_while(call)


async def test_name_lookups_hold_the_clock():
    """A lookup, which runs in a thread of the backend's own, lets no timer fire."""
    for _ in range(20):
        await unchanged_while(partial(anyio.getaddrinfo, "localhost", 80))


async def test_files_hold_the_clock(tmp_path):
    """Asynchronous file access lets no timer fire."""
    path = anyio.Path(tmp_path / "file")

    async def access() -> None:
        for _ in range(20):
            await path.write_bytes(b"x")
            assert await path.read_bytes() == b"x"

    await unchanged_while(access)


async def test_work_in_a_thread_started_by_hand_holds_the_clock():
    """A thread that says that it works lets no timer fire, although nobody in the loop waits for it."""
    fired: list[float] = []
    entered, leave = threading.Event(), threading.Event()
    seen: list[float] = []

    def work() -> None:
        with working():
            entered.set()
            leave.wait()
            time.sleep(0.05)
            seen.extend(fired)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    async with anyio.create_task_group() as group:
        group.start_soon(alarm, fired, 600)
        await anyio.lowlevel.checkpoint()
        leave.set()
    thread.join()
    assert seen == []
    assert fired == [600]


async def test_waiting_for_work_costs_no_processor():
    """While a thread works, the loop sleeps instead of spinning."""
    fired: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(alarm, fired, 600)
        await anyio.lowlevel.checkpoint()
        before = time.thread_time()
        await run_in_thread(time.sleep, 0.5)
        spent = time.thread_time() - before
        group.cancel_scope.cancel()
    assert spent < 0.1


async def test_many_threads_and_timers_together():
    """Timers keep their exact seconds when real calls are under way all the time."""
    ends: list[float] = []

    async def one(number: int) -> None:
        for _ in range(5):
            await anyio.sleep(number)
            await run_in_thread(time.sleep, 0.001)
        ends.append(anyio.current_time())

    async with anyio.create_task_group() as group:
        for number in range(1, 21):
            group.start_soon(one, number)
    assert sorted(ends) == [5.0 * number for number in range(1, 21)]


async def test_bytes_in_a_socket_come_before_a_jump():
    """Two tasks that talk through a socket pair for long let no timer fire."""

    async def talk() -> None:
        one, other = socket.socketpair()
        with one, other:
            one.settimeout(0)
            other.settimeout(0)
            async with anyio.create_task_group() as group:
                group.start_soon(echo, other, 300)
                for number in range(300):
                    one.send(b"%d\n" % number)
                    await anyio.wait_readable(one)
                    assert one.recv(16) == b"%d\n" % number

    async def echo(sock: socket.socket, times: int) -> None:
        for _ in range(times):
            await anyio.wait_readable(sock)
            sock.send(sock.recv(16))

    await unchanged_while(talk)


async def test_bytes_sent_by_a_working_thread_come_before_a_jump():
    """A descriptor that a counted thread makes ready is served before any timer."""

    async def receive() -> None:
        one, other = socket.socketpair()
        one.settimeout(0)

        def send() -> None:
            with working():
                time.sleep(0.03)
                other.send(b"x")

        with one, other:
            for _ in range(10):
                thread = threading.Thread(target=send)
                with working():  # the thread's own block begins when it pleases
                    thread.start()
                    await anyio.wait_readable(one)
                assert one.recv(1) == b"x"
                thread.join()

    await unchanged_while(receive)


def test_an_abandoned_executor_job_still_holds_the_clock():
    """On asyncio, a job whose caller was cut goes on holding the clock until it ends."""
    ended: list[float] = []
    release = threading.Event()

    def job() -> None:
        release.wait()
        time.sleep(0.05)
        ended.append(1)

    async def main() -> None:
        future = asyncio.get_running_loop().run_in_executor(None, job)
        await asyncio.sleep(0)
        future.cancel()
        release.set()
        await asyncio.sleep(600)
        assert ended == [1]

    run_virtual(main)


async def test_waiting_for_all_tasks_to_block_goes_before_a_jump(anyio_backend_name):
    """A test may let everything settle without moving a timer beyond what it waits for."""
    fired: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(alarm, fired, 1)
        await anyio.wait_all_tasks_blocked()
        assert fired == []
        if anyio_backend_name == "trio":
            assert anyio.current_time() == 0
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert anyio.current_time() == 0
            assert fired == []
        group.cancel_scope.cancel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_virtual_returns_the_result_and_restarts_the_clock(backend):
    """Each run begins at zero and gives back what the function returns."""

    async def main(seconds: float) -> float:
        await anyio.sleep(seconds)
        return anyio.current_time()

    assert run_virtual(main, 3600, backend=backend) == 3600
    assert run_virtual(main, 1.5, backend=backend) == 1.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_virtual_raises_what_the_function_raises(backend):
    """An error leaves the run as it is."""

    async def main() -> None:
        await anyio.sleep(1)
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        run_virtual(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backend_pair_fits_anyio_run_more_than_once(backend):
    """One pair of backend and options serves several runs, each from zero."""
    name, options = virtual_backend(backend)

    async def main() -> float:
        await anyio.sleep(7)
        return anyio.current_time()

    for _ in range(2):
        assert anyio.run(main, backend=name, backend_options=options) == 7


def test_an_unknown_backend_is_refused():
    """A backend that does not exist is named in the error."""
    with pytest.raises(UsageError, match="curio"):
        virtual_backend("curio")


async def test_the_clock_of_the_test_shows_the_time(virtual_time):
    """The handle that the fixture gives reads the running clock."""
    await anyio.sleep(4)
    assert virtual_time.now == 4


@pytest.mark.real_time
async def test_a_real_clock_is_not_taken_for_a_virtual_one():
    """Asking for virtual time in a loop that runs in real time is an error."""
    with pytest.raises(UsageError, match="not in virtual time"):
        _ = VirtualTime().now


def test_no_clock_without_a_loop():
    """Outside an event loop there is no virtual time to read."""
    with pytest.raises(UsageError, match="not in virtual time"):
        _ = VirtualTime().now


def test_the_loop_serves_plain_asyncio():
    """The runner, tasks, timeouts and executor of asyncio itself work in virtual time, in debug mode."""

    async def main() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        assert loop.get_debug()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(60)
        later = asyncio.create_task(asyncio.sleep(600, "late"))
        total = await asyncio.to_thread(sum, [1, 2])
        await asyncio.to_thread(time.sleep, 0.05)
        assert not later.done()
        later.cancel()
        return loop.time(), total

    with asyncio.Runner(debug=True, loop_factory=VirtualLoop) as runner:
        assert runner.run(main()) == (30, 3)


def test_a_long_hold_is_explained_in_the_log(caplog, monkeypatch):
    """Whoever waits for a clock that something holds for long finds the threads in the log, once."""
    monkeypatch.setattr("streamoff.testing.virtual.Patience.outspoken_after", 0.05)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 1)
            await run_in_thread(time.sleep, 0.3)

    backend: Literal["asyncio", "trio"]
    for backend in ("asyncio", "trio"):
        caplog.clear()
        run_virtual(main, backend=backend)
        assert len(caplog.records) == 1
        assert "threads: " in caplog.text
        assert "1 pieces of streamoff's work" in caplog.text
