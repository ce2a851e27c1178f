"""Rounds of federated averaging: what comes out is the exact mean of what was accepted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import anyio
import torch

from streamoff.errors import StreamoffError
from streamoff.fl.envelope import ResultEnvelope, result_topic
from streamoff.fl.executors.in_process import InProcess, Result, Task
from streamoff.fl.workflows.fedavg import FedAvg
from streamoff.fl.workflows.rounds import Round
from streamoff.payload.context import DecodeContext
from streamoff.runtime.jobs import Job, open_job

from .shell_scenario import SERVER, ShellScenario
from .shell_stage import JOB, Stage
from .shell_watch import WatchedEndpoint
from .tier import ViolationError

__all__ = ["Rounds", "contribution", "exact_mean"]

UNIT: Final = 840
"""All values are multiples of it: divisible by every total weight up to 8, so that every mean is exact."""

Tensors = dict[str, torch.Tensor]


def contribution(site: int, number: int, elements: int) -> Tensors:
    """What a site makes of a round: small multiples of a unit, different for each site and round."""

    def values(count: int) -> torch.Tensor:
        steps = torch.arange(count, dtype=torch.int64)
        return UNIT * ((steps * (site + 3) + 7 * number + site) % 11)

    return {
        "bias": values(3).to(torch.float64),
        "layer": values(elements).to(torch.float32),
        "steps": values(5),
    }


def exact_mean(weights: dict[int, int], number: int, elements: int) -> Tensors:
    """The weighted mean of the contributions of sites, in integers."""
    parts = {site: contribution(site, number, elements) for site in weights}
    total = sum(weights.values())
    mean = {}
    for name, like in parts[min(parts)].items():
        summed = sum(weights[site] * part[name].to(torch.int64) for site, part in parts.items())
        assert isinstance(summed, torch.Tensor)
        mean[name] = (summed // total).to(like.dtype)
    return mean


def difference(found: Any, wanted: Tensors) -> str:
    """How a model differs from what it should be; empty if it does not."""
    if set(found) != set(wanted):
        return f"names {sorted(found)}"
    for name, tensor in wanted.items():
        there = found[name]
        there = there.materialize() if hasattr(there, "materialize") else torch.as_tensor(there)
        if there.dtype != tensor.dtype or not torch.equal(there, tensor):
            return f"{name}: {there.flatten()[:5].tolist()} for {tensor.flatten()[:5].tolist()}"
    return ""


class Rounds(Stage):
    """Every round's model is checked at the server, and again at the sites that get it."""

    def __init__(self, scenario: ShellScenario, scratch: Path) -> None:
        super().__init__(scenario, scratch)
        zeros = contribution(0, 0, scenario.elements)
        self._models: dict[int, Tensors] = {0: {name: 0 * one for name, one in zeros.items()}}
        self.finished = 0
        self._wrong: ViolationError | None = None

    async def run(self) -> None:
        """Run it; what was wrong at a site, where it only costs the site its place, is raised now."""
        await super().run()
        if self._wrong is not None:
            raise self._wrong
        scenario = self.scenario
        calm = not any(site.mood for site in scenario.sites) and scenario.round_timeout > 1000
        touched = any(scenario.touched(index) for index in range(len(scenario.sites)))
        if calm and not touched and self.finished != scenario.rounds:
            raise ViolationError("rounds that nothing happened to failed", self.failure)

    def model_bytes(self) -> int:
        """What one update takes."""
        return sum(tensor.nbytes for tensor in self._models[0].values()) + 512

    # --- the server -----------------------------------------------------------------------------

    async def serve(self, server: WatchedEndpoint, job: Job) -> None:
        """Run the rounds and check each; ``server`` is the job's endpoint."""
        scenario = self.scenario
        workflow = FedAvg(
            initial=self._models[0],
            rounds=scenario.rounds,
            min_responses=scenario.min_responses,
            cut_off=scenario.cut_off,
            round_timeout=scenario.round_timeout,
            aggregation=scenario.engine,
            enable_tensor_disk_offload=scenario.offload,
            server_expected_format="pytorch",
        )
        self.ready(-1)
        await self.wait_ready()
        async with workflow.run(job, scenario.names) as rounds:
            async for finished in rounds:
                self._check(finished)
                self.finished += 1

    def _check(self, finished: Round) -> None:
        scenario, names = self.scenario, list(self.scenario.names)
        weights = {names.index(site): int(weight) for site, weight in finished.weights.items()}
        for index, weight in weights.items():
            if weight != scenario.sites[index].weight:
                raise ViolationError("a weight that nobody gave", finished.weights)
        if len(weights) < scenario.min_responses or set(finished.accepted) != set(finished.weights):
            raise ViolationError("a round without its quorum", finished)
        mean = exact_mean(weights, finished.number, scenario.elements)
        wrong = difference({name: finished.state.tensor(name) for name in mean}, mean)
        if wrong:
            raise ViolationError("an aggregate that is not the mean", wrong, finished)
        self._models[finished.number] = mean
        patient = scenario.cut_off is None and scenario.round_timeout > 1000
        for index, site in enumerate(scenario.sites):
            owed = patient and not site.mood and not scenario.touched(index)
            if owed and index not in weights:
                raise ViolationError("a site that nothing happened to is not in", finished.failed)

    # --- the sites ------------------------------------------------------------------------------

    async def take_part(self, index: int, endpoint: WatchedEndpoint) -> None:
        """Serve tasks until the server says goodbye."""
        site = self.scenario.sites[index]
        context = DecodeContext()
        leaving = anyio.CancelScope()

        async def train(task: Task) -> Result:
            wrong = difference(task.params, self._models[task.round - 1])
            if wrong:
                self._wrong = ViolationError("a site got another model", wrong, task.round)
                raise self._wrong
            return await self._train(index, task, endpoint, leaving)

        with leaving:
            if not site.disk:
                await self._execute(index, endpoint, train, context)
                return
            async with open_job(JOB, endpoint, scratch=self.scratch, ram_backed="allow") as job:
                self.jobs.append(job)
                await self._execute(index, endpoint, train, DecodeContext(tensors="disk", job=job))

    async def _execute(
        self, index: int, endpoint: WatchedEndpoint, train: Any, context: DecodeContext
    ) -> None:
        snapshot = self.scenario.sites[index].snapshot
        executor = InProcess(
            endpoint, job=JOB, train=train, context=context, snapshot=snapshot, server=SERVER
        )
        self.ready(index)
        await executor.run()

    async def _train(
        self, index: int, task: Task, endpoint: WatchedEndpoint, leaving: anyio.CancelScope
    ) -> Result:
        site = self.scenario.sites[index]
        await anyio.sleep(500.0 if site.mood == "slow" else site.trains)
        params: dict[str, Any] = dict(contribution(index, task.round, self.scenario.elements))
        match site.mood:
            case "fails":
                raise RuntimeError("training failed")
            case "silent":
                await anyio.sleep_forever()
            case "leaves":
                leaving.cancel()
            case "nan":
                params["layer"][0] = math.nan
            case "shape":
                params["layer"] = params["layer"][:-1]
            case "twice":
                await self._send_too(endpoint, index, task, params)
        if site.arrays:
            params["bias"] = params["bias"].numpy()
        return Result(params=params, weight=float(site.weight), metrics={"loss": 1.0})

    async def _send_too(
        self, endpoint: WatchedEndpoint, index: int, task: Task, params: dict[str, Any]
    ) -> None:
        """Send the same result once more than is asked for; one of the two counts."""
        envelope = ResultEnvelope(
            job=task.job,
            round=task.round,
            weight=float(self.scenario.sites[index].weight),
            kind=task.kind,
            params={name: tensor.clone() for name, tensor in params.items()},
            metrics={"loss": 1.0},
        )
        try:
            await endpoint.send(SERVER, result_topic(JOB), envelope.tree())
        except StreamoffError:
            return
