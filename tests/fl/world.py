"""What the tests of workflows and executors share: a server, sites that train, and sites driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import torch
from anyio.abc import TaskGroup, TaskStatus

from streamoff.fl.envelope import TaskEnvelope, result_topic, task_topic
from streamoff.fl.executors.in_process import InProcess, Result, Task
from streamoff.fl.workflows.fedavg import FedAvg
from streamoff.fl.workflows.rounds import Round
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Delivery, Endpoint, Message
from streamoff.runtime.jobs import Job, open_job
from streamoff.scratch.janitor import JANITOR
from streamoff.tensors.state import State
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import Outcome

JOB = "job-1"
SERVER = "server"

Tensors = Mapping[str, torch.Tensor]
Train = Callable[[Task], Any]


def model(value: float = 0.0) -> dict[str, torch.Tensor]:
    """A tiny model: a matrix, a vector and a counter."""
    return {
        "layer": torch.full((2, 3), value),
        "bias": torch.full((3,), value),
        "steps": torch.tensor(0),
    }


def plus(amount: float, weight: float = 1.0) -> Train:
    """Training that adds a number to every float, tensor or array."""

    async def train(task: Task) -> Result:
        params = {
            name: value + amount if name != "steps" else value
            for name, value in task.params.items()
        }
        return Result(params=params, weight=weight, metrics={"loss": amount})

    return train


def value_of(state: State) -> float:
    """The value that every float of a model made by these tests has."""
    values = torch.cat([state.tensor("layer").flatten(), state.tensor("bias").flatten()])
    assert bool((values == values[0]).all())
    return float(values[0])


def federated(rounds: int = 1, *, disk: bool = True, **options: Any) -> FedAvg:
    """FedAvg on the tiny model, tensors on disk unless said otherwise."""
    settings: dict[str, Any] = {
        "initial": model(),
        "rounds": rounds,
        "enable_tensor_disk_offload": disk,
        "server_expected_format": "pytorch",
    }
    return FedAvg(**(settings | options))


class World:
    """A server and its sites in one event loop; a context manager.

    Args:
        scratch: Where job roots are made.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.network = MemoryNetwork()
        self.ended: dict[str, float] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        self.server = await self._stack.enter_async_context(
            Endpoint(SERVER, transports=[self.network])
        )
        self.tasks: TaskGroup = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.tasks.cancel_scope.cancel()
        return bool(await self._stack.__aexit__(kind, error, trace))

    def open_job(self, **options: Any) -> open_job:
        """The server's job."""
        return open_job(JOB, self.server, scratch=self.scratch, **options)

    async def endpoint(self, name: str) -> Endpoint:
        """An endpoint connected to the server, open until the world ends."""
        endpoint: Endpoint = await self.tasks.start(self._endpoint, name)
        return endpoint

    async def _endpoint(self, name: str, *, task_status: TaskStatus[Endpoint]) -> None:
        async with Endpoint(name, transports=[self.network]) as endpoint:
            await endpoint.connect(SERVER)
            task_status.started(endpoint)
            await anyio.sleep_forever()

    async def site(
        self, name: str, train: Train, *, on_disk: bool = False, **options: Any
    ) -> Endpoint:
        """A site with an executor; it leaves when the server says goodbye."""
        endpoint: Endpoint = await self.tasks.start(self._site, name, train, on_disk, options)
        return endpoint

    async def _site(
        self,
        name: str,
        train: Train,
        on_disk: bool,
        options: dict[str, Any],
        *,
        task_status: TaskStatus[Endpoint],
    ) -> None:
        async with AsyncExitStack() as stack:
            endpoint = await stack.enter_async_context(Endpoint(name, transports=[self.network]))
            await endpoint.connect(SERVER)
            if on_disk:
                job = await stack.enter_async_context(open_job(JOB, endpoint, scratch=self.scratch))
                options = options | {"context": DecodeContext(tensors="disk", job=job)}
            executor = InProcess(endpoint, job=JOB, train=train, **options)
            task_status.started(endpoint)
            await executor.run()
            self.ended[name] = anyio.current_time()

    async def sites(self, trains: Mapping[str, Train]) -> tuple[str, ...]:
        """Several sites; their names."""
        for name, train in trains.items():
            await self.site(name, train)
        return tuple(trains)

    async def hand(self, name: str) -> Hand:
        """A site that does what the test says."""
        return Hand(await self.endpoint(name))

    async def run(
        self, workflow: FedAvg, sites: Iterable[str], **job: Any
    ) -> tuple[list[Round], list[float]]:
        """All rounds of a workflow in a job of its own, and the value of the model after each."""
        rounds, values = [], []
        async with self.open_job(**job) as opened, workflow.run(opened, sites) as running:
            async for finished in running:
                rounds.append(finished)
                values.append(value_of(finished.state))
        return rounds, values


class Hand:
    """A site driven by hand.

    Args:
        endpoint: Its own.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.tasks = endpoint.receive(task_topic(JOB))

    async def task(self) -> Message:
        """The next task."""
        return await anext(self.tasks)

    async def fetch(self) -> tuple[TaskEnvelope, dict[str, Any]]:
        """The next task and its model."""
        message = await self.task()
        tree = await message.resolve(DecodeContext())
        return TaskEnvelope.of(message.tree, site=SERVER), tree["params"]

    async def answer(self, params: object = None, **fields: object) -> Delivery:
        """Send a result that is in order but for ``fields``."""
        tree = {
            "job": JOB,
            "round": 1,
            "weight": 1.0,
            "kind": "full",
            "params": params if params is not None else model(1.0),
            "metrics": {"loss": 1.0},
            "error": "",
        }
        return await self.send(tree | fields)

    async def send(self, tree: object) -> Delivery:
        """Send anything as a result."""
        return await self.endpoint.send(SERVER, result_topic(JOB), tree)

    async def refused(self, delivery: Delivery) -> str:
        """Why the server did not take a result."""
        return reasons(await delivery.wait())


def reasons(outcome: Outcome) -> str:
    """Why slots of an outcome failed."""
    return "; ".join(end.reason for refs in outcome.slots.values() for end in refs.values())


def landed_bytes(job: Job) -> int:
    """Bytes of safetensors files, whole or in part, under a job's root, once what was released is gone."""
    assert JANITOR.idle(10.0)
    return sum(path.stat().st_size for path in job.path.rglob("*.safetensors*"))


def entries(directory: Path) -> list[str]:
    """Names in a directory."""
    return sorted(path.name for path in directory.iterdir())


async def settled(*endpoints: Endpoint) -> None:
    """Wait until no transaction of these endpoints is open."""
    for endpoint in endpoints:
        for transaction in endpoint.publisher.open:
            await transaction.wait()
