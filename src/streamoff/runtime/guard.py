"""The lease that every read of a job's files holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from streamoff.errors import JobClosedError

__all__ = ["ReadGuard"]


class ReadGuard:
    """Counts reads under a job root, and refuses them once the root is closed; thread-safe.

    Args:
        job: Its name, for the error.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._reads = 0
        self._closed = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lease for one read.

        Raises:
            JobClosedError: The root is gone, or about to go.
        """
        with self._lock:
            if self._closed:
                raise JobClosedError(
                    "the job root is gone and its files with it",
                    job=self._job,
                    hint="Load or copy what must outlive the job before it ends",
                )
            self._reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads -= 1

    def close(self) -> None:
        """Admit no more reads."""
        with self._lock:
            self._closed = True

    @property
    def reads(self) -> int:
        """Reads under way."""
        return self._reads
