"""A count of the work that is under way outside the event loop.

Virtual time may only jump while nothing real is happening: a clock that leaps to the next timer
while a worker thread is half way through a write makes every deadline fire at once. Threads that do
work for the program (the worker threads that the runtime hops to, the janitor) say so here, and a
virtual clock waits until the count is zero.

The count is module-level on purpose: it describes the process, not a job, and those who count and
those who wait do not know of each other. It is a deque used as a tally, because adding to it and
taking from it are atomic without a lock that a finaliser could find held.
"""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Work", "at_work", "resting", "working"]

_tally: deque[None] = deque()


def _start_afresh() -> None:
    """In a forked child only the forking thread exists, so nothing else is under way."""
    global _tally  # noqa: PLW0603  work begun before the fork ends on the old tally
    _tally = deque()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


class Work:
    """One piece of work that begins when this is made and may end in another thread.

    Making one and ending it takes no lock, so both are safe in finalisers.
    """

    __slots__ = ("_over", "_tally")

    def __init__(self) -> None:
        self._over = False
        self._tally = _tally
        self._tally.append(None)

    def end(self) -> None:
        """Count the work as done; a second call does nothing."""
        if not self._over:
            self._over = True
            self._tally.pop()


@contextmanager
def working() -> Iterator[None]:
    """Count the enclosed block as work under way, in any thread, however the block ends.

    Yields:
        Nothing.
    """
    work = Work()
    try:
        yield
    finally:
        work.end()


@contextmanager
def resting() -> Iterator[None]:
    """Take one piece of work out of the count while it waits for the program itself.

    A worker thread that calls back into its event loop and waits there is not doing anything real:
    if it held the clock, what it waits for could never come. Enter and leave this in the event
    loop, around what the thread waits for: left in the thread, the clock could jump between the
    answer and the thread's waking up.

    Yields:
        Nothing; the work is counted again when the block ends.
    """
    tally = _tally
    tally.pop()
    try:
        yield
    finally:
        tally.append(None)


def at_work() -> int:
    """How much work is under way in this process, in all threads.

    Returns:
        The number of `Work` begun and not ended; never negative, 0 in a freshly forked child.
    """
    return len(_tally)
