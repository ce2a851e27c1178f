"""A site that trains in the process of its endpoint: in a coroutine or in a thread."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np
from anyio.lowlevel import RunVar

from streamoff.errors import (
    StreamoffError,
    TransferError,
    UnexpectedMessageError,
    UnreachableError,
    UsageError,
)
from streamoff.fl.aggregation.contribution import Kind
from streamoff.fl.envelope import (
    MAX_TEXT,
    ResultEnvelope,
    TaskEnvelope,
    result_topic,
    task_topic,
)
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Delivery, Endpoint, Message
from streamoff.payload.leaves import Batch
from streamoff.payload.resolve import pull, whole_state
from streamoff.runtime.threads import run_in_thread
from streamoff.tensors.sources import Source
from streamoff.tensors.state import MemoryState, State
from streamoff.types import Address, OutcomeStatus

if TYPE_CHECKING:
    import torch

__all__ = ["InProcess", "Result", "Task"]

logger = logging.getLogger("streamoff.fl.executors")

RETRY_SECONDS: Final = 0.5
"""Between attempts to send while the link is lost."""
REASON_CHARACTERS: Final = 300


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

_training: RunVar[anyio.CapacityLimiter] = RunVar("streamoff.training")


class InProcess:
    """Serves the tasks of one job at one site.

    Args:
        endpoint: The site's, connected to the server.
        job: The job's name, as the server's.
        train: A coroutine function, or a function that runs in a worker thread.
        server: The server's address; tasks of anybody else are declined.
        context: Where global models land; in memory by default.
        limiter: Bounds how many functions train at once; one per event loop by default.
        snapshot: Copy resulting tensors before they are sent, for training loops that go on changing them.

    Raises:
        UsageError: ``train`` is not callable, or somebody serves this job at this endpoint already.
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
        self._server = Address(server)
        self._context = context or DecodeContext()
        self._limiter = limiter
        self._snapshot = snapshot
        self._tasks = endpoint.receive(task_topic(job))

    async def run(self) -> None:
        """Serve tasks until the server says that the job is over, or the endpoint closes.

        A task that fails here is reported to the server and costs this site the round. A result that the
        server refuses is logged; the site waits for the next task. A server whose link is lost and that does
        not come back says nothing: bound this, or cancel it, where that can be.

        Cancellation: cancels what is being pulled or trained and withdraws what is offered.
        """
        with self._tasks:
            async for message in self._tasks:
                try:
                    task = self._checked(message)
                except StreamoffError as error:
                    self._tell(logging.WARNING, "no task", "%s: no task: %s", error)
                    message.decline(error.what)
                    continue
                if task.params is None:
                    return
                batch, task = _lightened(message, task)
                await self._serve(message, task, batch)

    def _checked(self, message: Message) -> TaskEnvelope:
        if message.sender != self._server:
            raise UnexpectedMessageError(
                "a task of somebody else", expected=self._server, got=message.sender
            )
        task = TaskEnvelope.of(message.tree, site=self._server)
        if task.job != self._job:
            raise UnexpectedMessageError(
                "a task of another job", expected=self._job, got=task.job, site=self._server
            )
        return task

    async def _serve(self, message: Message, envelope: TaskEnvelope, batch: Batch | None) -> None:
        try:
            result = await self._made(message, envelope, batch)
            delivery = await self._send(envelope, result)
        except Exception as error:  # noqa: BLE001 - the server is told; it decides what a failed site costs
            self._tell(logging.WARNING, "failed", "%s: round %d: %s", envelope.round, error)
            message.decline(f"the site failed: {_what(error)}"[:REASON_CHARACTERS])
            await self._report(envelope, error)
            return
        del result  # the delivery borrows what it needs, and nothing here keeps it longer
        try:
            outcome = await delivery.wait()
        except TransferError as error:
            self._tell(logging.INFO, "not heard", "%s: round %d: %s", envelope.round, error)
            return
        except BaseException:
            delivery.cancel("the site is leaving")
            raise
        if outcome.status is not OutcomeStatus.COMPLETED:
            text = "%s: round %d: the result was not taken: %s"
            why = "; ".join(end.reason for refs in outcome.slots.values() for end in refs.values())
            self._tell(logging.INFO, "not taken", text, envelope.round, why)

    def _tell(self, level: int, kind: str, text: str, *args: object) -> None:
        self._endpoint.lines.tell(logger, level, kind, text, self._endpoint.address, *args)

    async def _made(self, message: Message, envelope: TaskEnvelope, batch: Batch | None) -> Result:
        """Get the model and train; nothing of the model is kept."""
        task = Task(
            job=envelope.job,
            round=envelope.round,
            rounds=envelope.rounds,
            kind=envelope.kind,
            params=await self._params(message, batch),
        )
        return await self._run_training(task)

    async def _params(self, message: Message, batch: Batch | None) -> Any:
        """The global model: one ref as a whole, anything else leaf by leaf."""
        if batch is None:
            return (await message.resolve(self._context))["params"]
        puller, context = self._context.settled(self._endpoint)
        batch.consume((), str(puller.address))
        return await pull(puller, batch.ref, context)

    async def _run_training(self, task: Task) -> Result:
        made: object
        if inspect.iscoroutinefunction(self._train):
            made = await self._train(task)
        else:
            limiter = self._limiter or _one_at_a_time()
            (made,) = await run_in_thread(_called, self._train, task, limiter=limiter)
            if inspect.isawaitable(
                made
            ):  # of an object whose __call__ is async, or a plain function
                made = await made
        if not isinstance(made, Result):
            raise UsageError("train() must return a Result", got=type(made).__name__)
        return made

    async def _send(self, task: TaskEnvelope, result: Result) -> Delivery:
        try:
            params = await self._outgoing(result.params)
            envelope = ResultEnvelope(
                job=task.job,
                round=task.round,
                weight=result.weight,
                kind=Kind(result.kind),
                params=params,
                metrics={name: float(value) for name, value in result.metrics.items()},
            )
            return await self._deliver(envelope)
        except BaseException:
            if isinstance(result.params, Source):
                result.params.close()
            raise

    async def _outgoing(self, params: Any) -> Any:
        if isinstance(params, MemoryState):
            params = dict(params)
        if not isinstance(params, Mapping) or isinstance(params, (State, Source)):
            return params  # a file, or a source: nobody goes on changing it
        params = {name: _whole(value) for name, value in params.items()}
        if not self._snapshot:
            return params
        return await run_in_thread(_copied, params, limiter=self._endpoint.resources.maths)

    async def _deliver(self, envelope: ResultEnvelope) -> Delivery:
        """Send, and give a lost link the time that a download gives it.

        The server may let a result wait for its turn as long as a receiver may ask for patience.
        """
        budgets = self._endpoint.budgets
        patient = replace(budgets, acquire=max(budgets.acquire, budgets.hold))
        give_up_at = anyio.current_time() + budgets.reconnect_grace
        while True:
            try:
                return await self._endpoint.send(
                    self._server, result_topic(self._job), envelope.tree(), budgets=patient
                )
            except UnreachableError:
                if anyio.current_time() >= give_up_at:
                    raise
                await anyio.sleep(RETRY_SECONDS)

    async def _report(self, task: TaskEnvelope, error: Exception) -> None:
        envelope = ResultEnvelope(
            job=task.job,
            round=task.round,
            kind=task.kind,
            error=_what(error)[:MAX_TEXT] or "unknown",
        )
        try:
            await self._deliver(envelope)
        except StreamoffError as unsent:
            text = "%s: the server was not told: %s"
            self._tell(logging.WARNING, "server not told", text, unsent)


def _called(train: Train, task: Task) -> tuple[object]:
    """Train; what comes is wrapped because trio's threads return no coroutines."""
    return (train(task),)


def _one_at_a_time() -> anyio.CapacityLimiter:
    """The event loop's own limit for training, apart from the arithmetic of an aggregator in the same loop."""
    try:
        return _training.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(1)
        _training.set(limiter)
        return limiter


def _lightened(message: Message, task: TaskEnvelope) -> tuple[Batch | None, TaskEnvelope]:
    """The one ref behind a model, without the thousand leaves that say no more than it."""
    batch = whole_state(task.params)
    if batch is None or batch.partial or not batch.vouched:
        return None, task
    message.tree = None
    return batch, replace(task, params=None)


def _what(error: Exception) -> str:
    return error.what if isinstance(error, StreamoffError) else f"{type(error).__name__}: {error}"


def _whole(value: Any) -> Any:
    """Turn NumPy's numbers back into the 0-dimensional arrays that its arithmetic made them of."""
    return np.asarray(value) if isinstance(value, np.generic) else value


def _copied(params: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors and arrays; what shared memory goes on sharing it, so that ties survive."""
    plain = {
        name: value.detach() if hasattr(value, "detach") else value
        for name, value in params.items()
    }
    return copy.deepcopy(plain)
