"""Running a job under signals."""

import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, NoReturn, TypeVar

import anyio
from anyio.abc import TaskStatus

from streamoff.cli.exits import StoppedError

__all__ = ["supervised", "terminable"]

T = TypeVar("T")


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


def supervised(
    job: Callable[[], Awaitable[T]], *, backend: str, stopping: Callable[[], object]
) -> T:
    """Run a job in an event loop of its own; the first SIGINT or SIGTERM cancels it.

    A second signal acts as if nobody listened: it ends the process, or the loop, where it stands.

    Args:
        job: Cleans up when it is cancelled.
        backend: ``"asyncio"`` or ``"trio"``.
        stopping: Called when the first signal came.

    Returns:
        What the job returned, also if a signal came too late to stop it.

    Raises:
        StoppedError: A signal came, and the job ended because of it.
        Exception: What the job raised.
    """
    run = _Run(job, stopping)
    try:
        anyio.run(run.main, backend=backend)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from group
        # Our own task group wraps what the job raised; a signal does not hide a failure.
        raise group.exceptions[0] if len(group.exceptions) == 1 else group from None
    if run.results:
        return run.results[0]
    assert run.signum is not None
    raise StoppedError(run.signum)


class _Run(Generic[T]):
    """One run: the job, and what became of it."""

    def __init__(self, job: Callable[[], Awaitable[T]], stopping: Callable[[], object]) -> None:
        self._job = job
        self._stopping = stopping
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
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for signum in signals:
                self.signum = signum
                break
        # Nobody listens any more: a second SIGINT interrupts, and a second SIGTERM ends the process.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._stopping()
        scope.cancel()
