"""Timers: to the exact instant, cheap to move, and nothing is kept alive by one that is over."""

import gc
import logging
import random
import weakref

import anyio
import pytest

from streamoff.runtime.timers import STALE_ENTRIES, Timer, Timers

from .world import tasks

pytestmark = pytest.mark.usefixtures("no_leaks")


class Clock:
    """Timers that run, and what they fired."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.fired: list[tuple[str, float]] = []

    def timer(self, name: str) -> Timer:
        """A timer that notes when it fires."""
        return self.timers.timer(lambda: self.fired.append((name, anyio.current_time())))


async def test_timers_fire_at_their_instant_and_in_order():
    """Each timer fires once, at exactly its time, whatever the order they were set in."""
    clock = Clock()
    async with tasks() as group:
        group.start_soon(clock.timers.run)
        await anyio.lowlevel.checkpoint()
        for name, due in [("c", 7.0), ("a", 1 / 3), ("b", 5.5)]:
            clock.timer(name).at(due)
        await anyio.sleep(100)
        group.cancel_scope.cancel()
    assert clock.fired == [("a", 1 / 3), ("b", 5.5), ("c", 7.0)]


async def test_a_timer_can_be_moved_and_switched_off():
    """Only the last due time counts; off is off, and on again is on."""
    clock = Clock()
    async with tasks() as group:
        group.start_soon(clock.timers.run)
        later, earlier, off, back = (
            clock.timer(name) for name in ("later", "earlier", "off", "back")
        )
        for timer in (later, earlier, off, back):
            timer.at(10)
        await anyio.sleep(1)
        later.at(20)
        earlier.at(3)
        off.at(None)
        back.at(None)
        back.at(12)
        await anyio.sleep(100)
        group.cancel_scope.cancel()
    assert clock.fired == [("earlier", 3), ("back", 12), ("later", 20)]


async def test_moving_later_costs_no_entry():
    """A timer that moves with every chunk keeps one entry in the heap."""
    clock = Clock()
    timer = clock.timer("busy")
    for moment in range(10_000):
        timer.at(100 + moment)
    assert len(clock.timers) == 1


async def test_stale_entries_are_swept():
    """Timers that move earlier, or are over, leave no more stale entries than live ones, or a few."""
    clock = Clock()
    kept = [clock.timer(f"kept {number}") for number in range(100)]
    for timer in kept:
        timer.at(1000)
    chance = random.Random(5)
    for _ in range(5000):
        timer = clock.timer("short-lived")
        timer.at(500 + chance.random())
        timer.at(400 + chance.random())
        timer.cancel()
        assert len(clock.timers) <= 2 * 100 + 2 * STALE_ENTRIES + 2
    async with tasks() as group:
        group.start_soon(clock.timers.run)
        await anyio.sleep(2000)
        group.cancel_scope.cancel()
    assert len(clock.fired) == 100
    assert len(clock.timers) == 0


async def test_a_timer_that_is_over_keeps_nothing_alive():
    """A cancelled timer lets go of its callback, though its entry is still in the heap."""

    class Owner:
        def tick(self) -> None:
            raise AssertionError("it was cancelled")

    clock = Clock()
    owner = Owner()
    timer = clock.timers.timer(owner.tick)
    timer.at(50)
    timer.cancel()
    timer.cancel()
    reference = weakref.ref(owner)
    del owner
    gc.collect()
    assert reference() is None
    async with tasks() as group:
        group.start_soon(clock.timers.run)
        await anyio.sleep(60)
        group.cancel_scope.cancel()


async def test_a_callback_may_move_and_cancel_other_timers():
    """Timers of the same instant that one of them cancels or moves away do not fire then."""
    clock = Clock()
    victim, moved = clock.timer("victim"), clock.timer("moved")

    def act() -> None:
        victim.cancel()
        moved.at(9)

    async with tasks() as group:
        group.start_soon(clock.timers.run)
        clock.timers.timer(act).at(5)
        victim.at(5)
        moved.at(5)
        await anyio.sleep(20)
        group.cancel_scope.cancel()
    assert clock.fired == [("moved", 9)]


async def test_a_callback_that_is_due_again_at_once_lets_others_run():
    """A timer that sets itself to now again and again starves neither other timers nor other tasks."""
    clock = Clock()
    count = 0

    def again() -> None:
        nonlocal count
        count += 1
        if count < 1000:
            eager.at(anyio.current_time())

    eager = clock.timers.timer(again)
    async with tasks() as group:
        group.start_soon(clock.timers.run)
        eager.at(1)
        clock.timer("other").at(1)
        await anyio.sleep(1.5)
        group.cancel_scope.cancel()
    assert count == 1000
    assert clock.fired == [("other", 1)]


async def test_a_callback_that_raises_stops_no_clock(caplog):
    """What a callback raises is logged, and the other timers fire."""
    clock = Clock()

    def broken() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "streamoff.timers"):
        async with tasks() as group:
            group.start_soon(clock.timers.run)
            clock.timers.timer(broken).at(1)
            clock.timer("after").at(2)
            await anyio.sleep(3)
            group.cancel_scope.cancel()
    assert clock.fired == [("after", 2)]
    assert "a timer's callback failed" in caplog.text
