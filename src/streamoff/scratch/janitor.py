"""The one thread of a process that removes directories.

Unlinking takes a quarter of a second per GiB, so it happens neither on an event loop nor in a
finaliser: both only put a path on a queue. The queue is the one kind that may be used from a
finaliser, which can run at any point of any thread, even while that thread holds a lock.
"""

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from streamoff.activity import Work
from streamoff.scratch.removal import remove

__all__ = ["EXIT_GRACE", "JANITOR", "Janitor", "JanitorStatistics"]

EXIT_GRACE: Final = 5.0
"""Seconds that a process waits at its exit for what is queued; a reaper finds what is left."""

_REMEMBERED: Final = 16

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JanitorStatistics:
    """What the janitor of this process did so far.

    Args:
        removed: Directories that are gone.
        failed: Directories that resisted every retry.
        pending: Directories queued or being removed.
        nbytes: Disk space freed.
        failures: The last 16 failures, oldest first: path and reason.
    """

    removed: int
    failed: int
    pending: int
    nbytes: int
    failures: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, slots=True)
class _Errand:
    path: Path
    freed: Callable[[], object] | None
    work: Work | None


class Janitor:
    """A queue of directories and the daemon thread that removes them, one by one and in order."""

    def __init__(self) -> None:
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Begin with nothing; also in a forked child, which has neither thread nor errands."""
        self._queue: SimpleQueue[_Errand | threading.Event] = SimpleQueue()
        self._pending: deque[None] = deque()  # a tally that needs no lock
        self._failures: deque[tuple[Path, str]] = deque(maxlen=_REMEMBERED)
        self._removed = self._failed = self._nbytes = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if this process has none yet. Not for finalisers."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="streamoff-janitor", daemon=True
                )
                self._thread.start()

    def reclaim(self, path: Path, freed: Callable[[], object] | None = None) -> None:
        """Queue a directory for removal and return at once.

        Safe in finalisers: takes no lock, logs nothing, starts no thread. If the thread was never
        started (making a job root starts it), the errand waits until it is.

        Args:
            path: A directory that nobody uses any more; it may be gone already.
            freed: Called in the janitor's thread once the directory is gone; not if it resists.
        """
        self._pending.append(None)
        self._queue.put(_Errand(path, freed, Work() if self._thread is not None else None))

    def wait(self, path: Path, timeout: float) -> bool:
        """Block until everything queued before has been dealt with.

        Args:
            path: A directory that was queued before.
            timeout: Seconds, real time.

        Returns:
            Whether the directory is gone; False if the time was too short or it resists.
        """
        return self.idle(timeout) and not os.path.lexists(path)

    def idle(self, timeout: float) -> bool:
        """Block until everything queued before has been dealt with; not for finalisers.

        Args:
            timeout: Seconds, real time.

        Returns:
            Whether the time was enough.
        """
        self.start()
        marker = threading.Event()
        self._queue.put(marker)
        return marker.wait(timeout)

    def statistics(self) -> JanitorStatistics:
        """A snapshot of what was done; the counts belong to this process, not to its parent."""
        return JanitorStatistics(
            removed=self._removed,
            failed=self._failed,
            pending=len(self._pending),
            nbytes=self._nbytes,
            failures=tuple(self._failures),
        )

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._do(item)
            finally:
                self._pending.pop()
                if item.work is not None:
                    item.work.end()
                del item  # the queue's next wait must not keep what the callback refers to

    def _do(self, errand: _Errand) -> None:
        removal = remove(errand.path)
        self._nbytes += removal.nbytes
        if removal.error is not None:
            self._failed += 1
            self._failures.append((errand.path, removal.error))
            _log.warning("cannot remove %s: %s", errand.path, removal.error)
            return
        self._removed += 1
        if errand.freed is not None:
            try:
                errand.freed()
            except Exception:  # noqa: BLE001  a callback must not end the thread
                _log.exception("after removing %s", errand.path)

    def _at_exit(self) -> None:
        if self._thread is not None:
            self.idle(EXIT_GRACE)


JANITOR: Final = Janitor()
"""The janitor of this process: one, because the disk is one."""

os.register_at_fork(after_in_child=JANITOR._start_afresh)  # noqa: SLF001  same module
atexit.register(JANITOR._at_exit)  # noqa: SLF001  same module
