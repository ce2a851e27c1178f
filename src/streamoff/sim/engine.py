"""The local engine: a server and its sites in one event loop, over the memory transport."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskStatus

from streamoff.fl.executors.in_process import InProcess, Result, Task as SiteWork
from streamoff.fl.persistor import FilePersistor
from streamoff.fl.workflows.fedavg import FedAvg
from streamoff.fl.workflows.rounds import Round
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Endpoint
from streamoff.runtime.jobs import open_job
from streamoff.runtime.publishing import PublisherStatistics
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.directory import RootDirectory, scratch_base
from streamoff.scratch.janitor import JANITOR
from streamoff.sim.catalogue import make_task
from streamoff.sim.config import SimulationConfig
from streamoff.sim.memory import MemorySampler, ScratchSampler, warm_torch
from streamoff.sim.observer import Observer
from streamoff.sim.report import ModelFile, RoundRow, SimulationReport, TransactionCounts
from streamoff.sim.tasks import SiteTask, Task
from streamoff.tensors.files import Storage, drop_cached
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB

__all__ = ["simulate"]

logger = logging.getLogger("streamoff.sim")

SERVER = "server"
FAREWELL_SECONDS = 30.0
"""What the sites get to leave after the last round."""

_AGGREGATIONS = {"columnar": "columnar", "in-time": "in_time"}


async def simulate(config: SimulationConfig, observer: Observer) -> SimulationReport:
    """Run a simulation and publish its model.

    Args:
        config: What to simulate.
        observer: Watches it.

    Returns:
        What was done, and what it took.

    Raises:
        QuorumLostError: Too few contributions; the output is not touched.
        StreamoffError: The job failed; the output is not touched.

    Cancellation: ends the job, removes its scratch and leaves the output as it was.
    """
    await run_in_thread(warm_torch)
    job = f"sim-{secrets.token_hex(6)}"
    base = await run_in_thread(scratch_base, config.scratch)
    root = await run_in_thread(
        partial(RootDirectory.create, f"{job}-model", base, ram_backed="allow")
    )
    try:
        workspace = await run_in_thread(root.new_transfer)
        return await _Simulation(config, observer, job, base, workspace).run()
    finally:
        with anyio.CancelScope(shield=True):
            await run_in_thread(_remove, root)


class _Simulation:
    def __init__(
        self,
        config: SimulationConfig,
        observer: Observer,
        job: str,
        base: Path,
        workspace: Path,
    ) -> None:
        self._config = config
        self._observer = observer
        self._base = base
        self._workspace = workspace
        self._job = job
        self._sites = tuple(f"site-{number}" for number in range(1, config.sites + 1))
        self._network = MemoryNetwork()
        storage = config.storage
        self._storage: dict[str, Any] = {
            "durable": storage.durable,
            "page_cache": storage.page_cache,
        }
        self._rows: list[RoundRow] = []
        self._ended: list[PublisherStatistics] = []

    async def run(self) -> SimulationReport:
        config = self._config
        task = await run_in_thread(make_task, config, self._sites, self._workspace)
        initial = await run_in_thread(task.initial_state)
        with MemorySampler() as memory, ScratchSampler(self._base, self._job) as scratch:
            async with Endpoint(SERVER, transports=[self._network]) as server:
                async with anyio.create_task_group() as sites:
                    try:
                        for name in self._sites:
                            await sites.start(self._site, name, task)
                        await self._rounds(server, task, initial)
                        sites.cancel_scope.deadline = anyio.current_time() + FAREWELL_SECONDS
                    except BaseException:
                        sites.cancel_scope.cancel()
                        raise
                self._ended.append(server.publisher.statistics())
            report = SimulationReport(
                recipe=config.recipe,
                backend=config.backend,
                engine="local",
                sites=config.sites,
                rounds=tuple(self._rows),
                model=await run_in_thread(_published, config.output, config.storage),
                memory=memory.statistics(),
                scratch=await run_in_thread(scratch.statistics),
                transactions=_counted(self._ended),
            )
        self._observer.finished(report)
        return report

    async def _rounds(self, server: Endpoint, task: Task, initial: object) -> None:
        config = self._config
        workflow = FedAvg(
            initial=initial,  # type: ignore[arg-type]  # what a task gives is what a workflow takes
            rounds=config.rounds,
            min_responses=config.min_responses,
            aggregation=_AGGREGATIONS[config.aggregation],  # type: ignore[arg-type]
            enable_tensor_disk_offload=config.offload,
            server_expected_format="pytorch",
            persistor=FilePersistor(config.output, **self._storage),
            evaluate=task.evaluate,
            observer=self._observer,
            seed=config.seed,
        )
        async with (
            open_job(self._job, server, scratch=config.scratch, **self._storage) as job,
            workflow.run(job, self._sites) as rounds,
        ):
            async for finished in rounds:
                row = _row(finished, self._sites)
                self._rows.append(row)
                self._observer.round_ended(row)

    async def _site(self, name: str, task: Task, *, task_status: TaskStatus[None]) -> None:
        """One site: its own endpoint, its own scratch if it lands on disk, and its training."""
        work = await run_in_thread(task.site, name)
        async with Endpoint(name, transports=[self._network]) as endpoint:
            await endpoint.connect(SERVER)
            if task.landing == "disk":
                async with open_job(
                    self._job, endpoint, scratch=self._config.scratch, **self._storage
                ) as job:
                    context = DecodeContext(tensors="disk", job=job)
                    await self._serve(endpoint, work, context, task_status)
            else:
                await self._serve(endpoint, work, DecodeContext(), task_status)
            self._ended.append(endpoint.publisher.statistics())

    async def _serve(
        self,
        endpoint: Endpoint,
        work: SiteTask,
        context: DecodeContext,
        task_status: TaskStatus[None],
    ) -> None:
        executor = InProcess(
            endpoint, job=self._job, train=partial(_train, work), server=SERVER, context=context
        )
        task_status.started()
        await executor.run()


def _remove(root: RootDirectory) -> None:
    gone = root.bury()
    JANITOR.reclaim(gone)
    JANITOR.wait(gone, FAREWELL_SECONDS)


def _train(work: SiteTask, task: SiteWork) -> Result:
    made = work.train(task.round, task.params)
    return Result(params=made.params, weight=made.weight, metrics=made.metrics, kind=made.kind)


def _row(finished: Round, sites: tuple[str, ...]) -> RoundRow:
    accepted = set(finished.accepted)
    return RoundRow(
        round=finished.number,
        seconds=finished.seconds,
        accepted=tuple(site for site in sites if site in accepted),
        failed=_failed(finished.failed),
        bytes_landed=finished.bytes_landed,
        metrics=finished.metrics,
    )


def _failed(reasons: Mapping[str, str]) -> dict[str, str]:
    return {str(site): reason for site, reason in reasons.items()}


def _published(path: Path, storage: Storage) -> ModelFile:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(MIB):
            digest.update(block)
            if storage.page_cache == "drop":
                drop_cached(file.fileno(), 0, file.tell(), written=False)
        return ModelFile(path=path.absolute(), bytes=file.tell(), sha256=digest.hexdigest())


def _counted(ended: list[PublisherStatistics]) -> TransactionCounts:
    return TransactionCounts(
        completed=sum(one.completed for one in ended),
        failed=sum(one.failed + one.aborted for one in ended),
        open=sum(one.open + one.settling for one in ended),
    )
