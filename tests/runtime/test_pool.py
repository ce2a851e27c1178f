"""The pool of buffers: a bound on bytes, fair, whole after cancellation, and not hostage to a stalled peer."""

import asyncio

import anyio
import pytest

from streamoff.errors import InvariantError, LimitError
from streamoff.runtime.pool import LAPSE_SECONDS, Buffer, BufferPool, Tenure

from .world import settled_tasks, tasks

pytestmark = pytest.mark.usefixtures("no_leaks")

KIB = 1024
SIZE = 256 * KIB


def small(buffers: int = 2) -> BufferPool:
    """A pool of so many buffers."""
    return BufferPool(buffers * SIZE, SIZE)


async def test_buffers_are_lent_and_reused():
    """A buffer that was returned is lent again: memory does not grow with use."""
    pool = small()
    first = await pool.borrow()
    memory = first.memory
    first.release()
    second = await pool.borrow()
    assert second.memory is memory
    assert (pool.lent, pool.used, pool.peak) == (1, SIZE, 1)
    second.release()
    assert (pool.lent, pool.used, pool.peak) == (0, 0, 1)


async def test_buffers_of_every_size_are_lent_again_and_kept_within_the_pool():
    """A buffer counts for the next power of two, is lent again for the like, and goes when others need its room."""
    pool = small()
    sizes = [65 * KIB, 100 * KIB, 128 * KIB, 129 * KIB, SIZE]
    assert [buffer.nbytes for buffer in [await _briefly(pool, size) for size in sizes]] == [
        *[128 * KIB] * 3,
        *[SIZE] * 2,
    ]
    first, second = await pool.borrow(128 * KIB), await pool.borrow(128 * KIB)
    kept = second.memory
    first.release()
    second.release()
    again = await pool.borrow(100 * KIB)
    assert again.memory is kept
    again.release()
    assert pool.kept > 0
    many = [await pool.borrow(64 * KIB) for _ in range(8)]
    assert (pool.used, pool.kept) == (pool.capacity, 0)
    for buffer in many:
        buffer.release()
    whole = [await pool.borrow(), await pool.borrow()]
    for buffer in whole:
        buffer.release()
    assert (pool.used, pool.kept) == (0, pool.capacity)


async def _briefly(pool: BufferPool, nbytes: int) -> Buffer:
    buffer = await pool.borrow(nbytes)
    buffer.release()
    return buffer


async def test_a_buffer_is_given_back_once_and_not_used_afterwards():
    """A second return, and a view of a returned buffer, are defects that say so."""
    buffer = await small().borrow()
    assert len(buffer.view(10)) == 10
    buffer.release()
    with pytest.raises(InvariantError, match="twice"):
        buffer.release()
    with pytest.raises(InvariantError, match="after it was returned"):
        buffer.view(1)


async def test_an_empty_pool_makes_wait_in_order():
    """Whoever waits for a buffer gets one in the order of asking."""
    pool = small()
    held = [await pool.borrow(), await pool.borrow()]
    served: list[int] = []

    async def ask(number: int) -> None:
        buffer = await pool.borrow()
        served.append(number)
        buffer.release()

    async with tasks() as group:
        for number in range(5):
            group.start_soon(ask, number)
            await settled_tasks()
        assert served == []
        held.pop().release()
    held.pop().release()
    assert served == [0, 1, 2, 3, 4]
    assert pool.used == 0


async def test_small_needs_count_for_little_and_large_ones_wait_their_turn():
    """Many small buffers fit beside each other; one larger than what is left waits until it fits."""
    pool = small()
    tiny = [await pool.borrow(10) for _ in range(8)]
    assert pool.used == 8 * 64 * KIB == pool.capacity
    got: list[Buffer] = []

    async def ask() -> None:
        got.append(await pool.borrow(SIZE))

    async with tasks() as group:
        group.start_soon(ask)
        await settled_tasks()
        for buffer in tiny[:3]:
            buffer.release()
        await settled_tasks()
        assert got == []
        tiny[3].release()
    assert len(got) == 1
    for buffer in (*got, *tiny[4:]):
        buffer.release()
    assert pool.used == pool.lent == 0


async def test_more_than_there_is_is_refused():
    """A buffer larger than the whole pool is refused and not waited for."""
    pool = small()
    with pytest.raises(LimitError):
        await pool.borrow(2 * SIZE + 1)
    assert pool.used == 0


async def test_a_cancelled_wait_takes_nothing():
    """Given up in whichever instant, also when it was just granted, a wait leaves the pool whole."""
    for steps in range(8):
        pool = small(1)
        held = await pool.borrow()
        scope = anyio.CancelScope()
        got: list[Buffer] = []

        async def ask(
            pool: BufferPool = pool, scope: anyio.CancelScope = scope, got: list[Buffer] = got
        ) -> None:
            with scope:
                got.append(await pool.borrow())

        async with tasks() as group:
            group.start_soon(ask)
            await settled_tasks()
            held.release()
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            scope.cancel()
        for buffer in got:
            buffer.release()
        assert pool.used == pool.lent == 0
        (await pool.borrow()).release()


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_wait_that_is_granted_and_cancelled_at_once_takes_nothing():
    """A task that asyncio cancels in the instant in which its buffer is granted gives it back."""
    pool = small(1)
    held = await pool.borrow()
    task = asyncio.ensure_future(pool.borrow())
    await settled_tasks()
    held.release()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.used == pool.lent == 0
    (await pool.borrow()).release()


async def test_a_buffer_that_waits_for_a_stalled_peer_is_taken_back():
    """While somebody waits, a holder that makes too little of its buffer loses it; one that uses it does not."""
    pool = small()
    ended: list[str] = []
    progress = 0

    def stalled_ends() -> None:
        ended.append("stalled")
        stalled.release()

    stalled = await pool.borrow()
    stalled.tenure = Tenure(lambda: 0, stalled_ends)
    busy = await pool.borrow()
    busy.tenure = Tenure(lambda: progress, lambda: ended.append("busy"))

    async def work() -> None:
        nonlocal progress
        while True:
            await anyio.sleep(0.1)
            progress += SIZE // 10

    async with tasks() as group:
        group.start_soon(work)
        await anyio.sleep(5)
        assert ended == []  # nobody waits
        third = await pool.borrow()
        assert anyio.current_time() == pytest.approx(5 + LAPSE_SECONDS)
        group.cancel_scope.cancel()
    assert ended == ["stalled"]
    busy.release()
    third.release()


async def test_a_buffer_that_waits_for_us_is_left_alone():
    """A buffer without a tenure, which waits for our own disk, is waited for."""
    pool = small(1)
    held = await pool.borrow()

    async def later() -> None:
        await anyio.sleep(100)
        held.release()

    async with tasks() as group:
        group.start_soon(later)
        buffer = await pool.borrow()
    assert anyio.current_time() == 100
    buffer.release()
