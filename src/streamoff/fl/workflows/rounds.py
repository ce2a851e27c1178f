"""The iterator a workflow feeds: one finished round at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import anyio

from streamoff.errors import AggregationError
from streamoff.fl.aggregation.report import RoundReport
from streamoff.runtime.jobs import Consumer, Job
from streamoff.tensors.state import State
from streamoff.types import Address

__all__ = ["Round", "Rounds", "WorkflowObserver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A finished round.

    Args:
        number: From 1.
        state: The new global model; the workflow's: valid until the next round is asked for or the
            iteration is left.
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
    failed: Mapping[Address, str]
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


Publish = Callable[[Round], Awaitable[None]]


class Rounds:
    """An async iterator over the rounds of a running workflow, and the context that ends it.

    The workflow is a consumer of the job; it works one round ahead of nobody: the next round begins when it
    is asked for. Leaving at any point (``break``, an error, a cancellation) ends the workflow and settles
    everything it had open.

    Args:
        job: Whose nursery it runs in.
        name: For the job's report.
        work: The workflow; awaits ``publish(round)`` after each round.
    """

    def __init__(self, job: Job, name: str, work: Callable[[Publish], Awaitable[None]]) -> None:
        self._job = job
        self._name = name
        self._work = work
        self._consumer: Consumer | None = None
        self._ready: Round | None = None
        self._error: Exception | None = None
        self._ended = False
        self._asked = anyio.Event()
        self._filled = anyio.Event()

    async def __aenter__(self) -> Self:
        """Start the workflow; it waits until a round is asked for."""
        self._consumer = self._job.start(self._run, name=self._name)
        await anyio.lowlevel.checkpoint()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workflow and wait until it has settled."""
        assert self._consumer is not None
        self._consumer.cancel()
        with anyio.CancelScope(shield=True):
            await self._consumer.wait()

    async def _run(self) -> None:
        try:
            await self._asked.wait()
            await self._work(self._publish)
        except Exception as error:  # noqa: BLE001 - raised where the rounds are awaited
            self._error = error
        finally:
            self._ended = True
            self._filled.set()

    async def _publish(self, finished: Round) -> None:
        self._asked = anyio.Event()
        self._ready = finished
        self._filled.set()
        await self._asked.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Round:
        """Run the next round and return it.

        Raises:
            AggregationError: The round failed; the previous model stands and the workflow has ended.
            StopAsyncIteration: All rounds are done.
        """
        self._filled = anyio.Event() if not self._ended else self._filled
        self._asked.set()
        await self._filled.wait()
        ready, self._ready = self._ready, None
        if ready is not None:
            return ready
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._consumer is not None and self._consumer.scope.cancel_called:
            raise AggregationError("the workflow was cut by the end of its job", job=self._job.name)
        raise StopAsyncIteration
