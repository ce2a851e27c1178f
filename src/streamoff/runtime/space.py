"""Waiting for scratch space: bounded, in no thread and with no buffer held, and never for what cannot come.

Space of a job comes back when its updates are released; space of a disk also when anybody else frees some. Who waits
stands in line and is let through as soon as it fits, so a large payload at the head keeps no small one behind it.
What a payload needs is charged in one piece, but a message may bring several: two messages can each hold what the
other waits for. Then the first to run out of patience gives up, and the others wait a second longer for what that
frees.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, NoReturn

import anyio

from streamoff.errors import NoSpaceError, QuotaExceededError
from streamoff.runtime.signal import Signal
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.ledger import Ledger
from streamoff.scratch.space import capacity

__all__ = ["SPACE_WAIT_SECONDS", "SpaceQueue", "Turn"]

SPACE_WAIT_SECONDS: Final = 30.0
"""How long a payload waits for scratch space by default."""
NOTICE_SECONDS: Final = 0.05
"""How soon it is noticed that an update of the job was released."""
LOOK_SECONDS: Final = 1.0
"""How often the disk is asked for what others have freed."""
GRACE_SECONDS: Final = 1.0
"""What those in line get for what one that gave up frees."""
MAX_PAUSE_SECONDS: Final = 8.0
"""The longest pause between two attempts of one payload that seemed to fit and did not; the first is 0.1 s."""

SpaceError = QuotaExceededError | NoSpaceError


class SpaceQueue:
    """Who waits for space of one job, in one event loop; :meth:`watch` lets them through.

    Args:
        ledger: The job's account.
        path: A directory on the disk.
        patience: Seconds that a payload waits at most, 0 or more; 0 refuses at once.
        limiter: For the thread that asks the disk.
    """

    def __init__(
        self, ledger: Ledger, path: Path, *, patience: float, limiter: anyio.CapacityLimiter
    ) -> None:
        self._ledger: Final = ledger
        self._path: Final = path
        self._patience: Final = patience
        self._limiter: Final = limiter
        self._line: list[Turn] = []
        self._joined: Final = Signal()
        self._seen = -1
        self._look_at = -math.inf
        self._excused = -1

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def turn(self) -> Turn:
        """The place of one payload in the line; its patience begins now."""
        return Turn(self, anyio.current_time() + self._patience)

    async def watch(self) -> None:
        """Let through what fits, for as long as this runs."""
        while True:
            while self._line:
                await self._look()
                await anyio.sleep(NOTICE_SECONDS)
            await self._joined.wait()

    async def _look(self) -> None:
        """Ask the disk if something was released, or it was not asked for a while."""
        now, releases = anyio.current_time(), self._ledger.releases
        if releases == self._seen and now < self._look_at:
            return
        self._seen, self._look_at = releases, now + LOOK_SECONDS
        quota, free = await run_in_thread(self._ledger.room, limiter=self._limiter)
        for turn in tuple(self._line):
            if turn.not_before <= now and _fits(turn.needed, quota, free):
                quota, free = _less(turn.needed, quota), _less(turn.needed, free)
                turn.called.set()

    # --- for turns --------------------------------------------------------------------------------

    async def check_hope(self, error: SpaceError, needed: int) -> None:
        """Raise the error if no waiting helps: more is needed than there can ever be."""
        quota = self._ledger.quota
        if quota is not None and needed > quota:
            raise error
        if isinstance(error, NoSpaceError):
            most = await run_in_thread(capacity, self._path, limiter=self._limiter)
            if most is not None and needed > most:
                raise error

    def join(self, turn: Turn) -> None:
        """Stand in line behind those whose patience began earlier."""
        self._line.append(turn)
        self._line.sort(key=lambda one: one.began)
        self._joined.notify()

    def leave(self, turn: Turn) -> None:
        """Leave it."""
        self._line.remove(turn)

    def excuse(self) -> None:
        """One gives up: the others wait for what it frees, unless the last one's going freed nothing."""
        releases = self._ledger.releases
        if releases != self._excused:
            self._excused = releases
            until = anyio.current_time() + GRACE_SECONDS
            for turn in self._line:
                turn.deadline = max(turn.deadline, until)


class Turn:
    """One payload that waits, perhaps several times: what seemed to fit may be taken by another.

    Attributes:
        needed: Bytes it waits for; 0 if it is not bytes that lack, but inodes.
        began: When it began to wait, monotonic seconds.
        deadline: When its patience ends.
        not_before: When it may try again.
        called: Set when it fits.
    """

    def __init__(self, queue: SpaceQueue, deadline: float) -> None:
        self.needed = 0
        self.began: Final = anyio.current_time()
        self.deadline = deadline
        self.not_before = -math.inf
        self.called = anyio.Event()
        self._queue: Final = queue
        self._pause = NOTICE_SECONDS

    async def wait(self, error: SpaceError) -> None:
        """Wait until what was refused seems to fit.

        Args:
            error: The refusal.

        Raises:
            QuotaExceededError, NoSpaceError: That one: it never fits, or it took too long.

        Cancellation: leaves the line.
        """
        needed = error.where.get("needed")
        self.needed = needed if isinstance(needed, int) else 0
        await self._queue.check_hope(error, self.needed)
        self.called = anyio.Event()
        self._queue.join(self)
        try:
            while not self.called.is_set():
                if anyio.current_time() >= self.deadline:
                    self._give_up(error)
                with anyio.CancelScope(deadline=self.deadline):
                    await self.called.wait()
        finally:
            self._queue.leave(self)
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
        self.not_before = anyio.current_time() + self._pause

    def _give_up(self, error: SpaceError) -> NoReturn:
        self._queue.excuse()
        waited = anyio.current_time() - self.began
        raise error.located(waited=f"{waited:g} s") if waited else error


def _fits(needed: int, *room: int | None) -> bool:
    return all(one is None or needed <= one for one in room)


def _less(needed: int, room: int | None) -> int | None:
    return None if room is None else room - needed
