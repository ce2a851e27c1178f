"""Blocking calls in worker threads, counted, so that virtual time does not run away from them.

A call is never abandoned: a write that goes on after its caller has left lands in whatever file reuses the
descriptor. Cancellation therefore waits for the call, and long work is cut into short calls.
"""

import math
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from streamoff.activity import resting, working

__all__ = ["resting_threads", "run_in_thread", "wait_from_thread"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_resting: dict[int, object] = {}  # thread ident -> the event loop it waits for
_local = threading.local()


async def run_in_thread(
    fn: Callable[[Unpack[Ts]], T], *args: *Ts, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """Run ``fn(*args)`` in a worker thread and wait for it, whatever happens meanwhile.

    Args:
        fn: Any blocking callable. What it borrows (buffers, descriptors) stays in use until this returns or raises.
        args: Its positional arguments.
        limiter: Bounds how many such calls run at once; the event loop's default (40) if None. Waiting for it does
            not count as work.

    Returns:
        What ``fn`` returns.

    Raises:
        Exception: What ``fn`` raises.

    Cancellation: a checkpoint before the call starts. Once it runs, the caller stays until it has ended; the
        cancellation then shows here or, at the latest, at the next checkpoint.
    """
    async with limiter or anyio.to_thread.current_default_thread_limiter():
        # counted here and not in the thread: the count may fall only when the result is in the loop's hands
        with working():
            return await anyio.to_thread.run_sync(
                _counted, fn, args, limiter=anyio.CapacityLimiter(math.inf)
            )


def wait_from_thread(async_fn: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> T:
    """Run ``async_fn(*args)`` in the event loop and block the calling worker thread until it is done.

    The same as `anyio.from_thread.run`, except that the waiting thread does not hold virtual time: a thread that
    sleeps in the loop for ten seconds would otherwise wait for a clock that waits for the thread.

    Args:
        async_fn: Any async callable.
        args: Its positional arguments.

    Returns:
        What ``async_fn`` returns.

    Raises:
        Exception: What ``async_fn`` raises; ``RuntimeError`` outside a worker thread of an event loop.
    """
    counted: bool = getattr(_local, "counted", False)
    return anyio.from_thread.run(_rested, threading.get_ident(), counted, async_fn, args)


def resting_threads(loop: object) -> frozenset[int]:
    """Worker threads that wait for their own event loop right now.

    Args:
        loop: The asyncio loop, or the trio token, of a run.

    Returns:
        Thread idents. Meant for virtual clocks, and only exact when asked from inside that loop.
    """
    return frozenset(ident for ident, waits_for in _resting.items() if waits_for is loop)


def _counted(fn: Callable[[Unpack[Ts]], T], args: tuple[*Ts]) -> T:
    _local.counted = True
    try:
        return fn(*args)
    finally:
        _local.counted = False


async def _rested(
    thread: int,
    counted: bool,
    async_fn: Callable[[Unpack[Ts]], Awaitable[T]],
    args: tuple[*Ts],
) -> T:
    # here and not in the thread: from the answer on, before it even wakes up, the thread is at work again
    token = anyio.lowlevel.current_token()
    _resting[thread] = getattr(token, "native_token", token)  # plain before anyio 4.11
    try:
        with resting() if counted else nullcontext():
            return await async_fn(*args)
    finally:
        del _resting[thread]
