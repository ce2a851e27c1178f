"""One task that keeps the time of a whole endpoint."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import sys
from collections.abc import Callable
from itertools import count
from typing import Final

import anyio

from streamoff.runtime.signal import Signal

__all__ = ["Timer", "Timers", "loop_clock"]

logger = logging.getLogger("streamoff.timers")

STALE_ENTRIES: Final = 64
"""Heap entries of timers that are gone that are not worth sweeping."""


def loop_clock() -> Callable[[], float]:
    """The clock of the running event loop, to be asked often: ``anyio.current_time`` without the search.

    Returns:
        A function for monotonic seconds, valid in this loop only.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        clock: Callable[[], float] = trio.current_time
        return clock
    return asyncio.get_running_loop().time


def _nothing() -> None:
    """Stand in for the callback of a timer that was switched off: it keeps nothing alive."""


class Timer:
    """A callback with a moving due time.

    Moving it later costs nothing: the heap entry stays and is looked at again when it comes up.
    """

    __slots__ = ("_callback", "_entry", "_queued", "_timers", "due")

    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self.due = math.inf
        self._timers = timers
        self._callback = callback
        self._queued = math.inf  # when its heap entry comes up
        self._entry = 0  # which entry that is; every other one is stale

    def at(self, due: float | None) -> None:
        """Move the due time, monotonic seconds of the event loop; None switches the timer off."""
        self.due = math.inf if due is None else due
        if self.due < self._queued:
            self._timers._push(self)  # noqa: SLF001 - the two halves of one clock

    def cancel(self) -> None:
        """Switch the timer off for good and let go of its callback. Idempotent."""
        self.due = math.inf
        self._callback = _nothing
        if self._entry:
            self._queued, self._entry = math.inf, 0
            self._timers._left_stale()  # noqa: SLF001


class Timers:
    """A heap of timers and the task that waits for the first.

    At most one live heap entry per timer is the rule; moving a timer earlier, or cancelling it, leaves a
    stale one that goes when it comes up, or when stale ones are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._stale = 0
        self._order = count(1)
        self._moved = Signal()
        self.now: Final = loop_clock()

    def timer(self, callback: Callable[[], None]) -> Timer:
        """A new timer, switched off; ``callback`` must not block and should not raise."""
        return Timer(self, callback)

    def _push(self, timer: Timer) -> None:
        first = self._heap[0][0] if self._heap else math.inf
        was_queued = timer._entry != 0  # noqa: SLF001 - the two halves of one clock
        timer._queued, timer._entry = timer.due, next(self._order)  # noqa: SLF001
        heapq.heappush(self._heap, (timer.due, timer._entry, timer))  # noqa: SLF001
        if was_queued:
            self._left_stale()
        if timer.due < first:
            self._moved.notify()

    def _left_stale(self) -> None:
        self._stale += 1
        if self._stale > max(STALE_ENTRIES, len(self._heap) // 2):
            self._heap = [item for item in self._heap if item[1] == item[2]._entry]  # noqa: SLF001
            heapq.heapify(self._heap)
            self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    async def run(self) -> None:
        """Fire timers until cancelled."""
        while True:
            self._fire(self.now())
            due = self._heap[0][0] if self._heap else math.inf
            with anyio.CancelScope(deadline=due):
                await self._moved.wait()

    def _fire(self, now: float) -> None:
        """Fire what is due, each once: a callback that is due again at once waits for its next turn."""
        for timer in self._take_due(now):
            if timer.due > now:
                timer.at(timer.due)
                continue
            timer.due = math.inf
            try:
                timer._callback()  # noqa: SLF001
            except Exception:
                logger.exception("a timer's callback failed")

    def _take_due(self, now: float) -> list[Timer]:
        taken: list[Timer] = []
        while self._heap and self._heap[0][0] <= now:
            _, entry, timer = heapq.heappop(self._heap)
            if entry != timer._entry:  # noqa: SLF001
                self._stale -= 1
                continue
            timer._queued, timer._entry = math.inf, 0  # noqa: SLF001
            taken.append(timer)
        return taken
