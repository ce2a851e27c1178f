"""Blocking calls in worker threads, counted, so that virtual time does not run away from them.

A call is never abandoned: a write that goes on after its caller has left lands in whatever file reuses the
descriptor. Cancellation therefore waits for the call, and long work is cut into short calls. asyncio's own
cancellation passes every shield; here it is caught, and struck again when the call has ended.
"""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import Generic, TypeVar, TypeVarTuple, Unpack

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
            call = _Call(lambda: fn(*args))
            try:
                return await anyio.to_thread.run_sync(
                    call.run, limiter=anyio.CapacityLimiter(math.inf)
                )
            except asyncio.CancelledError as struck:
                if struck is call.error or call.revoke():
                    raise
                await call.outlast()
                _strike_again(struck)
            return call.outcome()


class _Call(Generic[T]):
    """One call, which a thread makes while somebody may lose interest in it.

    Args:
        fn: What to call.
    """

    __slots__ = ("_began", "_ended", "_fn", "_lock", "_result", "_tell", "error")

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._lock = threading.Lock()
        self._began = self._ended = False
        self._tell: Callable[[], object] | None = None
        self._result: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> T:
        """Make the call, unless it was revoked; in the thread."""
        with self._lock:
            revoked, self._began = self._began, True
        if revoked:
            raise _RevokedError
        _local.counted = True
        try:
            result = self._fn()
            self._result.append(result)
        except BaseException as error:
            self.error = error
            raise
        finally:
            _local.counted = False
            with self._lock:
                self._ended, tell = True, self._tell
            if tell is not None:
                tell()
        return result

    def revoke(self) -> bool:
        """Let it not begin; False if it has."""
        with self._lock:
            began, self._began = self._began, True
        return not began

    async def outlast(self) -> None:
        """Wait until it has ended, however often this task is struck meanwhile; on asyncio."""
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._lock:
            if self._ended:
                return
            self._tell = lambda: loop.call_soon_threadsafe(over.set)
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    def outcome(self) -> T:
        """What it returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self._result[0]


class _RevokedError(Exception):
    """Nobody waits for a call that did not begin."""


def _strike_again(struck: asyncio.CancelledError) -> None:
    """Let the cancellation show at the next checkpoint, and count as often as it was asked for."""
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        task.uncancel()
    task.cancel(*struck.args)


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
