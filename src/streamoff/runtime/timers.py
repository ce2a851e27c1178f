"""One task that keeps the time of a whole endpoint."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable
from itertools import count

import anyio

__all__ = ["Timer", "Timers"]

logger = logging.getLogger("streamoff.timers")


class Timer:
    """A callback with a moving due time.

    Moving it later costs nothing: the heap entry stays and is looked at again when it comes up.
    """

    __slots__ = ("_callback", "_queued", "_timers", "due")

    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self.due = math.inf
        self._timers = timers
        self._callback = callback
        self._queued = math.inf

    def at(self, due: float | None) -> None:
        """Move the due time, monotonic seconds of the event loop; None switches the timer off."""
        self.due = math.inf if due is None else due
        if self.due < self._queued:
            self._timers._push(self)  # noqa: SLF001 - the two halves of one clock

    def cancel(self) -> None:
        """Switch the timer off for good."""
        self.due = math.inf


class Timers:
    """A heap of timers and the task that waits for the first.

    At most one live heap entry per timer is the rule; moving a timer earlier leaves a stale one that is
    dropped when it comes up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._moved = anyio.Event()

    def timer(self, callback: Callable[[], None]) -> Timer:
        """A new timer, switched off; ``callback`` must not block and should not raise."""
        return Timer(self, callback)

    def _push(self, timer: Timer) -> None:
        first = self._heap[0][0] if self._heap else math.inf
        timer._queued = timer.due  # noqa: SLF001 - the two halves of one clock
        heapq.heappush(self._heap, (timer.due, next(self._order), timer))
        if timer.due < first:
            self._moved.set()

    def __len__(self) -> int:
        return len(self._heap)

    async def run(self) -> None:
        """Fire timers until cancelled."""
        while True:
            self._fire(anyio.current_time())
            self._moved = anyio.Event()
            due = self._heap[0][0] if self._heap else math.inf
            with anyio.CancelScope(deadline=due):
                await self._moved.wait()

    def _fire(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            queued, _, timer = heapq.heappop(self._heap)
            if queued != timer._queued:  # noqa: SLF001 - a stale entry of a timer that was moved earlier
                continue
            timer._queued = math.inf  # noqa: SLF001
            if timer.due > now:
                timer.at(None if math.isinf(timer.due) else timer.due)
                continue
            timer.due = math.inf
            try:
                timer._callback()  # noqa: SLF001
            except Exception:
                logger.exception("a timer's callback failed")
