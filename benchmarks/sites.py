"""A thousand sites in one event loop: each offers 1 MiB, and the server lands all of it on disk."""

import asyncio
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import torch

from benchmarks.machine import Machine
from streamoff import DecodeContext, Endpoint, MemoryNetwork, open_job
from streamoff.runtime.jobs import Job
from streamoff.types import MIB

__all__ = ["SitesReport", "measure"]

SITES: Final = 1000
QUICK_SITES: Final = 50
FLOOR: Final = 300.0
SAMPLE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesReport:
    """One run: transfers per second, and the most descriptors, tasks and threads at any moment."""

    machine: Machine
    sites: int
    transfers_per_second: float
    fds_peak: int
    tasks_peak: int
    threads_peak: int

    @property
    def passed(self) -> bool:
        """Whether it is fast enough."""
        return self.transfers_per_second >= FLOOR

    def to_text(self) -> str:
        """Return a few lines."""
        verdict = "ok" if self.passed else "FAIL"
        return (
            f"sites: {self.sites} sites of 1 MiB in one event loop, landed on {self.machine.scratch}\n\n"
            f"{self.transfers_per_second:.0f} transfers per second ({verdict}, at least {FLOOR:.0f})\n"
            f"at most {self.fds_peak} descriptors, {self.tasks_peak} tasks, {self.threads_peak} threads\n\n"
            f"{self.machine.to_text()}"
        )

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            "sites": self.sites,
            "transfers_per_second": self.transfers_per_second,
            "fds_peak": self.fds_peak,
            "tasks_peak": self.tasks_peak,
            "threads_peak": self.threads_peak,
            "machine": self.machine.to_json(),
        }


@dataclass(slots=True)
class _Peaks:
    fds: int = 0
    tasks: int = 0
    threads: int = 0

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            self.fds = max(self.fds, len(os.listdir("/proc/self/fd")))  # noqa: PTH208
            self.tasks = max(self.tasks, len(asyncio.all_tasks()))
            self.threads = max(self.threads, threading.active_count())
            await anyio.sleep(SAMPLE_SECONDS)


def measure(*, quick: bool) -> SitesReport:
    """Land one update of every site, all at once."""
    sites = QUICK_SITES if quick else SITES
    with tempfile.TemporaryDirectory(prefix="streamoff-bench-") as directory:
        seconds, peaks = anyio.run(_run, sites, Path(directory))
        machine = Machine.here(Path(directory))
    return SitesReport(
        machine=machine,
        sites=sites,
        transfers_per_second=sites / seconds,
        fds_peak=peaks.fds,
        tasks_peak=peaks.tasks,
        threads_peak=peaks.threads,
    )


async def _run(number: int, scratch: Path) -> tuple[float, _Peaks]:
    network, peaks = MemoryNetwork(), _Peaks()
    update = {"update": torch.randn(MIB // 4)}
    async with Endpoint("server", transports=[network]) as server:
        box = server.receive("update")
        async with anyio.create_task_group() as sites:
            for index in range(number):
                await sites.start(_site, network, f"site-{index}", update)
            async with (
                open_job("sites", server, scratch=scratch) as job,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(peaks.watch)
                begun = time.perf_counter()
                await server.send([f"site-{index}" for index in range(number)], "go", {"go": True})
                async with anyio.create_task_group() as landings:
                    for _ in range(number):
                        message = await anext(box)
                        landings.start_soon(_land, message, job)
                seconds = time.perf_counter() - begun
                tasks.cancel_scope.cancel()
    return seconds, peaks


async def _land(message: object, job: Job) -> None:
    await message.decode(DecodeContext(tensors="disk", job=job))  # type: ignore[attr-defined]


async def _site(
    network: MemoryNetwork,
    name: str,
    update: dict[str, torch.Tensor],
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    async with Endpoint(name, transports=[network]) as endpoint:
        orders = endpoint.receive("go")
        await endpoint.connect("server")
        task_status.started()
        await anext(orders)
        await (await endpoint.send("server", "update", {"params": update})).wait()
