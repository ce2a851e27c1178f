"""How many bytes of scratch a job may use, and does.

A charge is made when a header is accepted, before anything is written, and released when the bytes
are gone from disk. Releasing takes no lock, because it may happen in a finaliser: what is returned
is put on a deque and counted by the next who looks.
"""

import threading
from collections import deque
from collections.abc import Callable

from streamoff.errors import NoSpaceError, QuotaExceededError, UsageError

__all__ = ["Charge", "Ledger"]


class Charge:
    """Bytes that a ledger counts until they are released."""

    __slots__ = ("_held", "_returned", "what")

    def __init__(self, nbytes: int, what: str, returned: "deque[int]") -> None:
        self._held = [nbytes]
        self._returned = returned
        self.what = what

    @property
    def nbytes(self) -> int:
        """Bytes charged now; 0 after the release."""
        return sum(self._held)

    def shrink(self, nbytes: int) -> None:
        """Keep only part of the charge, e.g. when a subset of the tensors is wanted.

        Args:
            nbytes: Bytes to keep, 0 to :attr:`nbytes`.

        Raises:
            UsageError: It would grow. Nothing changed.
        """
        if not 0 <= nbytes <= self.nbytes:
            raise UsageError(
                "a charge only shrinks", expected=f"0 to {self.nbytes} bytes", got=nbytes
            )
        if self._held:
            self._returned.append(self._held[0] - nbytes)
            self._held[0] = nbytes

    def release(self) -> None:
        """Give everything back; a second call does nothing. Safe in finalisers."""
        try:
            self._returned.append(self._held.pop())
        except IndexError:
            return


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
        self._returned: deque[int] = deque()
        self._used = 0
        self._peak = 0

    def charge(self, nbytes: int, what: str) -> Charge:
        """Account for bytes that are about to be written.

        The free space is compared at this moment. A landing that allocates at once makes it real;
        where the file system cannot allocate, landings that were admitted together can still run
        out together, and then fail with `NoSpaceError` themselves.

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
        if free is not None and nbytes > free:
            raise NoSpaceError(
                f"no room on disk for {what}",
                expected=f"at most {free} bytes free",
                got=f"{nbytes} bytes needed",
                hint="Free the disk, or give a scratch directory on a larger one",
                needed=nbytes,
                free=free,
            )
        with self._lock:
            self._settle()
            if self.quota is not None and self._used + nbytes > self.quota:
                raise QuotaExceededError(
                    f"the job's scratch quota does not allow {what}",
                    expected=f"at most {self.quota - self._used} of {self.quota} bytes left",
                    got=f"{nbytes} bytes needed",
                    hint="Raise the quota, or release updates earlier",
                    needed=nbytes,
                    used=self._used,
                    quota=self.quota,
                )
            self._used += nbytes
            self._peak = max(self._peak, self._used)
        return Charge(nbytes, what, self._returned)

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

    def _settle(self) -> None:
        while self._returned:
            self._used -= self._returned.popleft()
