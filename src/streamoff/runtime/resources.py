"""What all endpoints of one event loop share, so that a thousand of them need no more than one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
from anyio.lowlevel import RunVar

from streamoff.runtime.pool import BufferPool

__all__ = [
    "LANDING_THREADS",
    "MAX_WINDOW",
    "MIN_WINDOW",
    "READING_THREADS",
    "ROOT_THREADS",
    "ResourceStatistics",
    "Resources",
]

LANDING_THREADS: Final = 4
READING_THREADS: Final = 2
ROOT_THREADS: Final = 4
MIN_WINDOW: Final = 2
MAX_WINDOW: Final = 8
"""Chunks that one download may have asked for and not landed."""


@dataclass(frozen=True, slots=True)
class ResourceStatistics:
    """A snapshot of what is in use."""

    active_downloads: int
    buffers_lent: int
    buffers_peak: int
    landing_threads: int
    reading_threads: int


@dataclass(slots=True)
class Resources:
    """Bounded resources of one event loop; use :meth:`current`.

    Memory in flight is the pool, whatever the number of sites: a buffer is lent when bytes are here, never
    when they are asked for. Landing, reading, making and removing job roots, and arithmetic have thread limits of their own, so a program
    that fills the default one cannot starve a transfer, and the other way round. A landing thread opens at
    most one file, so descriptors are bounded with the threads.
    """

    pool: BufferPool = field(default_factory=BufferPool)
    landing: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(LANDING_THREADS)
    )
    reading: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(READING_THREADS)
    )
    roots: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(ROOT_THREADS)
    )
    maths: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    in_turn: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(math.inf))
    """For calls whose turn was taken before."""
    active: int = 0
    reaped: dict[Path, float] = field(default_factory=dict)
    """Scratch directories that were searched for dead roots, and when; at most 16."""

    @staticmethod
    def current() -> Resources:
        """The resources of the running event loop, made at the first call."""
        try:
            return _current.get()
        except LookupError:
            resources = Resources()
            _current.set(resources)
            return resources

    @property
    def window(self) -> int:
        """Chunks one download may have under way: its share of the pool, at least 2, at most 8.

        Of two, the second is asked for before the first is here: a line is never idle for a round trip.
        """
        return max(MIN_WINDOW, min(MAX_WINDOW, self.pool.count // max(1, self.active)))

    @property
    def share(self) -> int:
        """Bytes of the pool that one more download would have if all had the same."""
        return self.pool.capacity // (self.active + 1)

    def statistics(self) -> ResourceStatistics:
        """A snapshot."""
        return ResourceStatistics(
            self.active,
            self.pool.lent,
            self.pool.peak,
            int(self.landing.borrowed_tokens),
            int(self.reading.borrowed_tokens),
        )


_current: RunVar[Resources] = RunVar("streamoff.resources")
