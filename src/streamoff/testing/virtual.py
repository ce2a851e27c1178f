"""Virtual time: deadlines of hours pass in milliseconds, to the exact second, and never during real work.

A virtual clock stands still while any task can run, and jumps to the next deadline when none can. That is wrong
exactly when something real is under way (a worker thread is writing a file): the program looks idle, the clock jumps,
and every timeout fires at once. These clocks therefore stand still while anything of the following is under way:

* a piece of `streamoff.activity.Work` in any thread: all worker threads of streamoff, its janitor, and whatever else
  counts itself (a supervised process, for instance);
* any other worker thread of the same event loop: `anyio.to_thread`, `trio.to_thread`, `asyncio.to_thread`,
  ``loop.run_in_executor`` and what is built on them (name lookups, aiofiles, anyio's files).

Before it jumps, a clock lets the loop look once at every descriptor, so bytes that are already in a socket of this
process come first. Limits:

* What comes from outside, from other processes, from threads started by hand or from a signal is not foreseen: count it with
  `streamoff.activity.working`, or use real time. On trio a thread that was abandoned by its caller is not seen either.
* A thread that is counted and waits for the loop stops the clock for good, unless it waits with
  `streamoff.runtime.threads.wait_from_thread`. After ten real seconds the log names who holds the clock.
* Only the loop's clock is virtual: ``time.monotonic`` and ``time.time`` are not, nor is asyncio's report of slow callbacks.
* `anyio.wait_all_tasks_blocked` polls with a sleep of 0.1 s on asyncio, which moves virtual time; on trio it
  moves nothing and goes before any jump.
* Order is as on the real clock: timers of the same instant run in the order they were set on asyncio; on trio, tasks
  that become runnable together run in random order.
"""

import asyncio
import logging
import math
import selectors
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar, TypeVarTuple, Unpack

import anyio

from streamoff.activity import at_work
from streamoff.errors import UsageError
from streamoff.runtime.threads import resting_threads

__all__ = ["Patience", "VirtualLoop", "VirtualTime", "is_virtual", "run_virtual", "virtual_backend"]

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Backend = tuple[str, dict[str, Any]]

log = logging.getLogger(__name__)


class Patience:
    """How long a clock pauses, in real seconds, before it asks again whether work is still under way."""

    shortest: ClassVar[float] = 0.001
    longest: ClassVar[float] = 0.02
    outspoken_after: ClassVar[float] = 10.0

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again: the work that was waited for has ended."""
        self._pause = self.shortest
        self._waited = 0.0

    def pause(self) -> float:
        """Return the next pause, and say once in the log who has been holding the clock for long."""
        pause, before = self._pause, self._waited
        self._pause = min(2 * pause, self.longest)
        self._waited += pause
        if before < self.outspoken_after <= self._waited:
            names = sorted(thread.name for thread in threading.enumerate())
            log.warning(
                "virtual time has stood still for %.0f s: %d pieces of streamoff's work are under way; threads: %s",
                self._waited,
                at_work(),
                ", ".join(names),
            )
        return pause


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time; the class itself is a loop factory.

    Its clock starts at 0.0. A timer runs at exactly its own time.
    """

    _scheduled: list[asyncio.TimerHandle]  # of the base class, head first
    _default_executor: ThreadPoolExecutor | None
    _clock_resolution: float

    def __init__(self) -> None:
        self._now = 0.0
        self._jobs = 0  # in executors, results not yet delivered
        super().__init__(_IdleSelector(self))

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run ``func`` as the base class does, and hold the clock until its result has been delivered."""
        if executor is None:
            self._check_default_executor()  # type: ignore[attr-defined]
            if self._default_executor is None:
                self.set_default_executor(ThreadPoolExecutor(thread_name_prefix="asyncio"))
            executor = self._default_executor
        assert executor is not None
        watched = _Watched(executor)
        future = super().run_in_executor(watched, func, *args)
        self._jobs += 1
        # after the base class's own callback, so that the result is queued before the count falls
        watched.job.add_done_callback(self._job_done)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Join the executor's threads in real time: on new Pythons there is a timeout around it."""
        self._jobs += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._jobs -= 1

    def occupied(self) -> bool:
        """Whether real work is under way that this loop, or streamoff, waits for."""
        return at_work() > 0 or self._jobs > 0 or any(map(self._is_busy, threading.enumerate()))

    def jump(self, seconds: float) -> None:
        """Move the clock to the next timer, at most ``seconds`` from now."""
        when = self._scheduled[0].when()
        self._now = when if when - self._now <= seconds else self._now + seconds
        # the base class runs what is due before now + resolution, which must be a different number
        self._clock_resolution = max(1e-9, math.ulp(self._now))

    def _is_busy(self, thread: threading.Thread) -> bool:
        """Recognise one of anyio's worker threads that has a call from this loop in hand."""
        if getattr(thread, "loop", None) is not self:
            return False
        idle = thread in getattr(thread, "idle_workers", (thread,))
        ended = getattr(thread, "stopping", False)
        return not idle and not ended and thread.ident not in resting_threads(self)

    def _job_done(self, _job: Future[Any]) -> None:
        try:
            self.call_soon_threadsafe(self._job_delivered)
        except RuntimeError:
            if not self.is_closed():
                raise

    def _job_delivered(self) -> None:
        self._jobs -= 1


class _IdleSelector(selectors.DefaultSelector):
    """Turns waiting for a timer into a jump of the clock, unless real work is under way."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._patience = Patience()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        while self._loop.occupied():
            if events := super().select(self._patience.pause()):
                return events
        self._patience.reset()
        # work that has just ended has woken the loop before it stopped counting: look before the jump
        events = super().select(0)
        if not events:
            self._loop.jump(timeout)
        return events


class _Watched(Executor):
    """Remembers the job that one submission made."""

    job: Future[Any]

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        self.job = job = self._executor.submit(fn, *args, **kwargs)
        return job


class VirtualTime:
    """The clock of the running test, as the fixture ``virtual_time`` gives it."""

    @property
    def now(self) -> float:
        """Virtual seconds since the event loop started.

        Raises:
            UsageError: There is no running event loop, or its time is real.
        """
        clock = _running_clock()
        if clock is None:
            raise UsageError(
                "the running event loop is not in virtual time",
                hint="Run it with streamoff.testing.virtual_backend or run_virtual",
            )
        return clock()


def virtual_backend(name: str = "asyncio", *, debug: bool = True) -> Backend:
    """Make the backend and options that put an anyio program, or test, in virtual time.

    Args:
        name: "asyncio" or "trio".
        debug: asyncio's debug mode; trio has none.

    Returns:
        A pair for the fixture ``anyio_backend``; its parts fit ``anyio.run(..., backend=, backend_options=)``.

    Raises:
        UsageError: No such backend.
    """
    if name == "asyncio":
        return name, {"debug": debug, "loop_factory": VirtualLoop}
    if name == "trio":
        from streamoff.testing.virtual_trio import VirtualClock  # noqa: PLC0415  # trio takes long to import

        return name, {"clock": VirtualClock()}
    raise UsageError("no such backend", expected="asyncio or trio", got=name)


def is_virtual(backend: object) -> bool:
    """Tell whether a value of the fixture ``anyio_backend`` was made by `virtual_backend`."""
    if not isinstance(backend, tuple):
        return False
    _, options = backend
    return options.get("loop_factory") is VirtualLoop or getattr(
        options.get("clock"), "is_virtual", False
    )


def run_virtual(
    async_fn: Callable[[Unpack[Ts]], Awaitable[T]],
    *args: *Ts,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> T:
    """Run ``async_fn(*args)`` in a new event loop in virtual time.

    Args:
        async_fn: Any async callable; its clock starts at 0.0.
        args: Its positional arguments.
        backend: Which event loop.

    Returns:
        What ``async_fn`` returns.

    Raises:
        Exception: What ``async_fn`` raises; ``RuntimeError`` from inside a running event loop.
    """
    name, options = virtual_backend(backend)
    return anyio.run(async_fn, *args, backend=name, backend_options=options)


def _running_clock() -> Callable[[], float] | None:
    """Return the clock of the running event loop if it is a virtual one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    if isinstance(loop, VirtualLoop):
        return loop.time
    try:
        clock = sys.modules["trio"].lowlevel.current_clock()
    except (KeyError, RuntimeError):
        return None
    return clock.current_time if getattr(clock, "is_virtual", False) else None
