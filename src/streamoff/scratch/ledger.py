"""How many bytes of scratch a job may use, and does.

A charge is made when a header is accepted, before anything is written, and released when the bytes
are gone from disk. Until its space is really taken a charge is a promise, and what was promised to
one is not free for another. Releasing takes no lock, because it may happen in a finaliser: what is
returned is put on a deque and counted by the next who looks.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from streamoff.errors import NoSpaceError, QuotaExceededError, UsageError

__all__ = ["Charge", "Ledger", "Room"]


class Room(NamedTuple):
    """What is left, in bytes: of the quota and of the disk; None: no quota, or the disk does not say."""

    quota: int | None
    free: int | None


class _Returned(NamedTuple):
    """What a charge gives back: bytes of the quota, and bytes that were promised."""

    charged: int
    promised: int


class Charge:
    """Bytes that a ledger counts until they are released."""

    __slots__ = ("_held", "_promised", "_returned", "what")

    def __init__(self, nbytes: int, what: str, returned: deque[_Returned]) -> None:
        self._held = [nbytes]
        self._promised = [nbytes]
        self._returned = returned
        self.what = what

    @property
    def nbytes(self) -> int:
        """Bytes charged now; 0 after the release."""
        return sum(self._held)

    def taken(self) -> None:
        """Note that the space is really taken: the disk itself says now that it is not free."""
        self._give_back([], self._promised)

    def release(self) -> None:
        """Give everything back; a second call does nothing. Safe in finalisers."""
        self._give_back(self._held, self._promised)

    def _give_back(self, held: list[int], promised: list[int]) -> None:
        """Each is popped once, whoever comes first: no lock is needed."""
        back = _Returned(_popped(held), _popped(promised))
        if any(back):
            self._returned.append(back)


def _popped(number: list[int]) -> int:
    try:
        return number.pop()
    except IndexError:
        return 0


class Ledger:
    """The account of one job's scratch space; thread-safe.

    Args:
        quota: Bytes that all charges together may reach; None for no quota.
        space: Says how many bytes are free on disk, or None if that is unknown (which is not zero).
            Called in the charging thread.

    Raises:
        UsageError: The quota is not a positive number of bytes.
    """

    def __init__(self, quota: int | None, space: Callable[[], int | None]) -> None:
        if quota is not None and (isinstance(quota, bool) or quota <= 0):
            raise UsageError("scratch quota", expected="bytes above 0, or None", got=quota)
        self.quota = quota
        self._space = space
        self._lock = threading.Lock()
        self._returned: deque[_Returned] = deque()
        self._used = 0
        self._promised = 0
        self._peak = 0
        self._releases = 0

    def charge(self, nbytes: int, what: str) -> Charge:
        """Account for bytes that are about to be written.

        The disk is asked at this moment, and what it has is shared with all programs: an admitted landing
        can still find it full, and then fails with `NoSpaceError` itself.

        Args:
            nbytes: Bytes, >= 0.
            what: What they are for, as errors name it.

        Returns:
            The charge; whoever holds it releases it when the bytes are off the disk.

        Raises:
            UsageError: Not a number of bytes.
            QuotaExceededError: The job's quota does not allow it. Nothing was charged.
            NoSpaceError: The disk has less room. Nothing was charged.
        """
        if isinstance(nbytes, bool) or nbytes < 0:
            raise UsageError("scratch charge", expected="bytes, 0 or more", got=nbytes)
        free = self._space()
        with self._lock:
            room = self._room(free)
            if room.quota is not None and nbytes > room.quota:
                raise QuotaExceededError(
                    f"the job's scratch quota does not allow {what}",
                    expected=f"at most {room.quota} of {self.quota} bytes left",
                    got=f"{nbytes} bytes needed",
                    hint="Raise the quota, or release updates earlier",
                    needed=nbytes,
                    used=self._used,
                    quota=self.quota,
                )
            if room.free is not None and nbytes > room.free:
                raise NoSpaceError(
                    f"no room on disk for {what}",
                    expected=f"at most {room.free} bytes free",
                    got=f"{nbytes} bytes needed",
                    hint="Free the disk, or give a scratch directory on a larger one",
                    needed=nbytes,
                    free=room.free,
                )
            self._used += nbytes
            self._promised += nbytes
            self._peak = max(self._peak, self._used)
        return Charge(nbytes, what, self._returned)

    def room(self) -> Room:
        """What is left; asks the disk."""
        free = self._space()
        with self._lock:
            return self._room(free)

    @property
    def used(self) -> int:
        """Bytes charged and not released."""
        with self._lock:
            self._settle()
            return self._used

    @property
    def peak(self) -> int:
        """The most that was ever charged at once."""
        return self._peak

    @property
    def releases(self) -> int:
        """How often bytes were given back; one who waits for some looks again when it has changed."""
        with self._lock:
            self._settle()
            return self._releases

    def _room(self, free: int | None) -> Room:
        self._settle()
        return Room(
            None if self.quota is None else self.quota - self._used,
            None if free is None else max(0, free - self._promised),
        )

    def _settle(self) -> None:
        while self._returned:
            back = self._returned.popleft()
            self._used -= back.charged
            self._promised -= back.promised
            self._releases += back.charged > 0
