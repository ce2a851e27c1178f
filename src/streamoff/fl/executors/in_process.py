"""A site that trains in the process of its endpoint: in a coroutine or in a thread."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from streamoff.errors import StreamoffError, UsageError
from streamoff.fl.aggregation.contribution import Kind
from streamoff.fl.envelope import ResultEnvelope, TaskEnvelope, result_topic, task_topic
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Delivery, Endpoint, Message
from streamoff.payload.resolve import pull, whole_state
from streamoff.runtime.threads import run_in_thread
from streamoff.tensors.sources import Source
from streamoff.tensors.state import State
from streamoff.types import OutcomeStatus

if TYPE_CHECKING:
    import torch

__all__ = ["InProcess", "Result", "Task"]

logger = logging.getLogger("streamoff.fl.executors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a site is asked to do.

    Args:
        job: The job.
        round: From 1.
        rounds: How many there will be.
        kind: What the server wants back.
        params: The global model: tensors or arrays by name (memory), or a lazy state dict (disk).
    """

    job: str
    round: int
    rounds: int
    kind: Kind
    params: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What training made of it.

    Args:
        params: Tensors or arrays by name, a state, or a source of one. Borrowed until the server has them
            or will not take them; then a source is closed.
        weight: Finite and not negative, usually the number of samples.
        metrics: Of the training, by name.
        kind: Whether ``params`` are a model or a difference.
    """

    params: Mapping[str, torch.Tensor] | State | Source
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    kind: Kind = Kind.FULL


Train = Callable[[Task], Result] | Callable[[Task], Awaitable[Result]]


class InProcess:
    """Serves the tasks of one job at one site.

    Args:
        endpoint: The site's, connected to the server.
        job: The job's name, as the server's.
        train: A coroutine function, or a function that runs in a worker thread of its own limiter.
        server: The server's address.
        context: Where global models land; in memory by default.
        limiter: Bounds how many functions train at once; the event loop's maths limiter by default.
        snapshot: Copy resulting tensors before they are sent, for training loops that go on changing them.

    Raises:
        UsageError: ``train`` is not callable.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        job: str,
        train: Train,
        server: str = "server",
        context: DecodeContext | None = None,
        limiter: anyio.CapacityLimiter | None = None,
        snapshot: bool = False,
    ) -> None:
        if not callable(train):
            raise UsageError("train", expected="a function", got=train)
        self._endpoint = endpoint
        self._job = job
        self._train = train
        self._server = server
        self._context = context or DecodeContext()
        self._limiter = limiter
        self._snapshot = snapshot
        self._tasks = endpoint.receive(task_topic(job))

    async def run(self) -> None:
        """Serve tasks until the server says that the job is over.

        A task that fails here is reported to the server and costs this site the round. A result that the
        server refuses is logged; the site waits for the next task.

        Cancellation: cancels what is being pulled or trained and withdraws what is offered.
        """
        with self._tasks:
            async for message in self._tasks:
                try:
                    task = TaskEnvelope.of(message.tree, site=self._server)
                except StreamoffError as error:
                    logger.warning("%s: no task: %s", self._endpoint.address, error)
                    continue
                if task.params is None:
                    return
                await self._serve(message, task)

    async def _serve(self, message: Message, envelope: TaskEnvelope) -> None:
        try:
            params = await self._params(message, envelope)
            task = Task(
                job=envelope.job,
                round=envelope.round,
                rounds=envelope.rounds,
                kind=envelope.kind,
                params=params,
            )
            result = await self._run_training(task)
            delivery = await self._send(envelope, result)
        except Exception as error:  # noqa: BLE001 - the server is told; it decides what a failed site costs
            logger.warning("%s: round %d: %s", self._endpoint.address, envelope.round, error)
            await self._report(envelope, error)
            return
        try:
            outcome = await delivery.wait()
        except BaseException:
            delivery.cancel("the site is leaving")
            raise
        if outcome.status is not OutcomeStatus.COMPLETED:
            logger.info(
                "%s: round %d: the result was not taken: %s",
                self._endpoint.address,
                envelope.round,
                "; ".join(end.reason for refs in outcome.slots.values() for end in refs.values()),
            )

    async def _params(self, message: Message, envelope: TaskEnvelope) -> Any:
        """The global model: one ref as a whole, anything else leaf by leaf."""
        batch = whole_state(envelope.params)
        if batch is None or batch.partial or not batch.vouched:
            return (await message.resolve(self._context))["params"]
        puller, context = self._context.settled(self._endpoint)
        batch.consume((), str(puller.address))
        return await pull(puller, batch.ref, context)

    async def _run_training(self, task: Task) -> Result:
        if inspect.iscoroutinefunction(self._train):
            made = await self._train(task)
        else:
            limiter = self._limiter or self._endpoint.resources.maths
            made = await run_in_thread(self._train, task, limiter=limiter)
        if not isinstance(made, Result):
            raise UsageError("train() must return a Result", got=type(made).__name__)
        return made

    async def _send(self, task: TaskEnvelope, result: Result) -> Delivery:
        params: Any = result.params
        if self._snapshot and isinstance(params, Mapping):
            params = {name: _copied(value) for name, value in params.items()}
        elif isinstance(params, Mapping) and not isinstance(params, (State, Source)):
            params = dict(params)
        envelope = ResultEnvelope(
            job=task.job,
            round=task.round,
            weight=result.weight,
            kind=result.kind,
            params=params,
            metrics=result.metrics,
        )
        return await self._endpoint.send(self._server, result_topic(self._job), envelope.tree())

    async def _report(self, task: TaskEnvelope, error: Exception) -> None:
        what = (
            error.what if isinstance(error, StreamoffError) else f"{type(error).__name__}: {error}"
        )
        envelope = ResultEnvelope(
            job=task.job, round=task.round, kind=task.kind, error=what[:1024] or "unknown"
        )
        try:
            await self._endpoint.send(self._server, result_topic(self._job), envelope.tree())
        except StreamoffError as unsent:
            logger.warning("%s: the server was not told: %s", self._endpoint.address, unsent)


def _copied(value: Any) -> Any:
    copy = getattr(value, "detach", None)
    return copy().clone() if callable(copy) else value.copy()
