"""Running a job under signals."""

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, Generic, NoReturn, TypeVar

import anyio
from anyio.abc import TaskStatus

from streamoff.cli.exits import StoppedError

__all__ = ["supervised", "terminable"]

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block by an exception, so that a command still cleans up.

    Inside, :func:`supervised` takes over while it runs.

    Raises:
        StoppedError: SIGTERM came.
    """
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(signum: int, _frame: FrameType | None) -> NoReturn:
    raise StoppedError(signum)


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    """End the process without another look at anything that may hang."""
    os._exit(128 + signum)


def supervised(
    job: Callable[[], Awaitable[T]], *, backend: str, stopping: Callable[[], object]
) -> T:
    """Run a job in an event loop of its own; the first SIGINT, SIGTERM or SIGHUP cancels it.

    A second signal ends the process at once, with the same exit code, in the middle of a cleanup that
    takes too long; the next job to start in the same place finds and removes what is left.

    Args:
        job: Cleans up when it is cancelled.
        backend: ``"asyncio"`` or ``"trio"``.
        stopping: Called in the event loop when the first signal came; leaves the terminal in order.

    Returns:
        What the job returned, also if a signal came too late to stop it.

    Raises:
        StoppedError: A signal came, and the job ended because of it.
        Exception: What the job raised.
    """
    run = _Run(job, stopping)
    before = {signum: signal.getsignal(signum) for signum in run.signals}
    try:
        anyio.run(run.main, backend=backend)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from group
        # Our own task group wraps what the job raised; a signal does not hide a failure.
        raise group.exceptions[0] if len(group.exceptions) == 1 else group from None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if run.results:
        return run.results[0]
    assert run.signum is not None
    raise StoppedError(run.signum)


class _Run(Generic[T]):
    """One run: the job, and what became of it."""

    def __init__(self, job: Callable[[], Awaitable[T]], stopping: Callable[[], object]) -> None:
        self._job = job
        self._stopping = stopping
        # nohup(1) ignores SIGHUP for us, and that is to stay so
        self.signals = [
            signum
            for signum in _SIGNALS
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
        ]
        self.results: list[T] = []
        self.signum: int | None = None

    async def main(self) -> None:
        async with anyio.create_task_group() as group:
            await group.start(self._listen, group.cancel_scope)
            self.results.append(await self._job())
            group.cancel_scope.cancel()

    async def _listen(
        self, scope: anyio.CancelScope, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        with anyio.open_signal_receiver(*self.signals) as signals:
            task_status.started()
            async for signum in signals:
                self.signum = signum
                break
        for listened in self.signals:
            signal.signal(listened, _leave)
        with suppress(OSError):  # the terminal may be what has gone
            self._stopping()
        scope.cancel()
