"""The iterator a workflow feeds: one finished round at a time."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

import anyio
import anyio.lowlevel

from streamoff.errors import AggregationError, UsageError
from streamoff.fl.aggregation.report import RoundReport
from streamoff.runtime.jobs import Consumer, Job
from streamoff.tensors.state import State
from streamoff.types import Address

__all__ = ["LEAVE_SECONDS", "Gate", "Round", "Rounds", "WorkflowObserver"]

logger = logging.getLogger("streamoff.fl")

LEAVE_SECONDS: Final = 5.0
"""How long leaving waits for the workflow to settle; a blocking call that takes longer is the job's to drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A finished round.

    Args:
        number: From 1.
        state: The new global model; the workflow's: readable until the next round is here, or the context
            of the rounds is left. So it is when the next round fails, or there is none.
        accepted: Sites in the average, sorted.
        failed: Site to the reason why it is not.
        weights: Of the accepted sites.
        metrics: Of the new model if the workflow evaluates, else the sites' own, averaged.
        site_metrics: As each accepted site sent them.
        bytes_landed: Payload bytes of contributions that landed, refused ones included.
        seconds: From the broadcast to the new model.
        report: The engine's.
    """

    number: int
    state: State = field(repr=False)
    accepted: tuple[Address, ...]
    failed: Mapping[str, str]
    weights: Mapping[str, float]
    metrics: Mapping[str, float]
    site_metrics: Mapping[str, Mapping[str, float]]
    bytes_landed: int
    seconds: float
    report: RoundReport


class WorkflowObserver(Protocol):
    """Watches a workflow from the event loop; must return quickly and must not raise."""

    def round_started(self, number: int, sites: int) -> None:
        """A round was sent to ``sites`` sites."""
        ...

    def transfer(self, site: str, landed_bytes: int, total_bytes: int) -> None:
        """``landed_bytes`` of ``total_bytes`` of a site's contribution have landed."""
        ...


class Gate:
    """Between a workflow and whoever iterates: one round at a time, and none before it is asked for.

    It owns the global model, which outlives the workflow: the last one is there until the context is left.
    """

    def __init__(self) -> None:
        self.state: State | None = None
        self._ready: Round | None = None
        self._closed = False
        self._asked = anyio.Event()
        self._filled = anyio.Event()

    def keep(self, state: State) -> State:
        """Own a global model, and let go of the former."""
        self.release()
        self.state = state
        return state

    def release(self) -> None:
        """Let go of the global model. Idempotent."""
        if self.state is not None:
            self.state.release()
            self.state = None

    async def wait_asked(self) -> None:
        """Wait until the next round is asked for."""
        await self._asked.wait()

    async def publish(self, finished: Round) -> None:
        """Hand over a round and wait until the next one is asked for."""
        self._asked = anyio.Event()
        self._ready = finished
        self._filled.set()
        await self._asked.wait()

    def close(self) -> None:
        """There will be no more rounds."""
        self._closed = True
        self._filled.set()

    async def next(self) -> Round | None:
        """Ask for a round and wait for it; None if there are no more. A cancelled wait loses none."""
        await anyio.lowlevel.checkpoint()
        if not self._filled.is_set():
            self._asked.set()
            await self._filled.wait()
        ready, self._ready = self._ready, None
        if not self._closed:
            self._filled = anyio.Event()
        return ready


class Rounds:
    """An async iterator over the rounds of a running workflow, and the context that ends it.

    The workflow is a consumer of the job; it works one round ahead of nobody: the next round begins when it
    is asked for. Leaving at any point (``break``, an error, a cancellation) ends the workflow, settles
    everything it had open and tells the sites. Entering, iterating and leaving may happen in different tasks.

    Args:
        job: Whose nursery it runs in.
        name: For the job's report.
        work: The workflow; waits at the gate before the first round, and publishes each there.
    """

    def __init__(self, job: Job, name: str, work: Callable[[Gate], Awaitable[None]]) -> None:
        self._job = job
        self._name = name
        self._work = work
        self._gate = Gate()
        self._consumer: Consumer | None = None
        self._error: Exception | None = None
        self._finished = False
        self._left = False
        self._reading = False

    async def __aenter__(self) -> Self:
        """Start the workflow; it waits until a round is asked for.

        Raises:
            UsageError: It was entered before.
            JobClosedError: The job is closing. Nothing was started.
        """
        await anyio.lowlevel.checkpoint()
        if self._consumer is not None:
            raise UsageError("rounds are entered once", hint="Call run() again for another run")
        self._consumer = self._job.start(self._run, name=self._name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workflow and wait, at most :data:`LEAVE_SECONDS`, until it has settled."""
        assert self._consumer is not None
        self._left = True
        self._consumer.cancel()
        with anyio.move_on_after(LEAVE_SECONDS, shield=True):
            await self._consumer.wait()
            self._gate.release()

    async def _run(self) -> None:
        try:
            await self._work(self._gate)
            self._finished = True
        except Exception as error:  # noqa: BLE001 - raised where the rounds are awaited
            self._error = error
            if self._left:
                logger.warning("job %s: %s ended with: %s", self._job.name, self._name, error)
        finally:
            self._gate.close()
            if self._left:
                self._gate.release()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Round:
        """Run the next round and return it; a cancelled wait loses none.

        Raises:
            AggregationError: The round failed, or the job ended; the previous model stands and the workflow
                has ended.
            StopAsyncIteration: All rounds are done, or the context was left.
            UsageError: It was not entered, or another task waits already.
        """
        if self._consumer is None:
            raise UsageError("the rounds were not entered", hint="async with ... as rounds")
        if self._reading:
            raise UsageError("another task waits for the next round")
        self._reading = True
        try:
            ready = None if self._left else await self._gate.next()
        finally:
            self._reading = False
        if ready is not None:
            return ready
        if self._error is not None and not self._left:
            error, self._error = self._error, None
            self._finished = True
            raise error
        if self._finished or self._left:
            raise StopAsyncIteration
        self._finished = True
        raise AggregationError("the workflow was cut by the end of its job", job=self._job.name)
