"""Embed streamoff in a plain asyncio controller.

The controller owns its loop, its tasks and its decisions: it takes jobs from a queue, stops a job when the
model is good enough or when time is up, and goes on with the next. streamoff brings the updates. Run it:

    python examples/asyncio_controller.py
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from streamoff import Endpoint, MemoryNetwork, open_job
from streamoff.errors import QuorumLostError
from streamoff.fl.executors.in_process import InProcess, Result, Task
from streamoff.fl.workflows.fedavg import FedAvg

SITES = ("site-1", "site-2", "site-3")


@dataclass(frozen=True)
class Order:
    """What somebody asks the controller for."""

    job: str
    rounds: int
    good_enough: float
    seconds: float


class Controller:
    """Runs one job after the other on whatever sites are there."""

    def __init__(self, server: Endpoint) -> None:
        self._server = server
        self.orders: asyncio.Queue[Order | None] = asyncio.Queue()
        self.models: dict[str, dict[str, torch.Tensor]] = {}

    async def run(self) -> None:
        """Serve orders until there is a None."""
        while (order := await self.orders.get()) is not None:
            try:
                async with asyncio.timeout(order.seconds):
                    await self._serve(order)
            except TimeoutError:
                print(f"{order.job}: no time left")  # the job has drained, its scratch is gone
            except QuorumLostError as error:
                print(f"{order.job}: {error.what}")

    async def _serve(self, order: Order) -> None:
        workflow = FedAvg(
            initial={"weight": torch.zeros(4)},
            rounds=order.rounds,
            min_responses=2,
            cut_off=1.0,
            enable_tensor_disk_offload=True,
            server_expected_format="pytorch",
        )
        async with (
            open_job(order.job, self._server, drain_window=1.0) as job,
            workflow.run(job, SITES) as rounds,
        ):
            async for finished in rounds:
                loss = finished.metrics["loss"]
                print(f"{order.job}: round {finished.number}, loss {loss:.3f}")
                names = finished.state.layout.names
                self.models[order.job] = {name: finished.state.tensor(name) for name in names}
                if loss <= order.good_enough:
                    break  # ends the workflow: sites are told, everything it had open settles


async def site(network: MemoryNetwork, name: str, jobs: list[str]) -> None:
    """A site that serves several jobs, one after the other; it need not be in this process."""

    def train(task: Task) -> Result:
        weight = task.params["weight"]
        step = 0.5 * (torch.ones(4) - weight)
        return Result(
            params={"weight": weight + step}, weight=10, metrics={"loss": float(step.abs().max())}
        )

    async with Endpoint(name, transports=[network]) as endpoint:
        await endpoint.connect("server")
        executors = [InProcess(endpoint, job=job, train=train) for job in jobs]
        await asyncio.gather(*(executor.run() for executor in executors))


async def main() -> None:
    """Two jobs: one until it is good enough, one until time is up."""
    network = MemoryNetwork()
    async with Endpoint("server", transports=[network]) as server, asyncio.TaskGroup() as tasks:
        for name in SITES:
            tasks.create_task(site(network, name, ["good-enough", "in-time"]))
        await asyncio.sleep(0.1)
        controller = Controller(server)
        await controller.orders.put(Order("good-enough", 100, good_enough=0.1, seconds=60))
        await controller.orders.put(Order("in-time", 1_000_000, good_enough=-1.0, seconds=1.0))
        await controller.orders.put(None)
        await controller.run()
    for job, model in controller.models.items():
        print(f"{job}: weight is near one: {bool((model['weight'] > 0.8).all())}")


if __name__ == "__main__":
    asyncio.run(main())
