"""A thousand sites in one event loop: each offers 1 MiB, and the server lands all of it on disk."""

import asyncio
import os
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import torch

from benchmarks.garbage import garbage_is_new
from benchmarks.machine import Machine
from benchmarks.report import Report
from streamoff import DecodeContext, Endpoint, Job, MemoryNetwork, Message, open_job
from streamoff.types import MIB

__all__ = ["measure"]

SITES: Final = 1000
QUICK_SITES: Final = 50
SAMPLE_SECONDS: Final = 0.1


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


def measure(*, quick: bool) -> Report:
    """Land one update of every site, all at once."""
    sites = QUICK_SITES if quick else SITES
    with tempfile.TemporaryDirectory(prefix="streamoff-bench-") as directory:
        seconds, peaks = anyio.run(_run, sites, Path(directory))
        machine = Machine.here(Path(directory))
    return Report(
        title=f"sites: {sites} sites of 1 MiB in one event loop, landed on {machine.scratch}",
        machine=machine,
        figures={
            "transfers_per_second": sites / seconds,
            "fds_peak": peaks.fds,
            "tasks_peak": peaks.tasks,
            "threads_peak": peaks.threads,
        },
        quick=quick,
    )


async def _run(number: int, scratch: Path) -> tuple[float, _Peaks]:
    network, peaks = MemoryNetwork(), _Peaks()
    update = {"update": torch.randn(MIB // 4)}
    async with Endpoint("server", transports=[network]) as server:
        box = server.receive("update")
        async with anyio.create_task_group() as sites, AsyncExitStack() as stack:
            for index in range(number):
                await sites.start(_site, network, f"site-{index}", update)
            async with (
                open_job("sites", server, scratch=scratch) as job,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(peaks.watch)
                stack.enter_context(garbage_is_new())
                begun = time.perf_counter()
                await server.send([f"site-{index}" for index in range(number)], "go", {"go": True})
                async with anyio.create_task_group() as landings:
                    for _ in range(number):
                        message = await anext(box)
                        landings.start_soon(_land, message, job)
                seconds = time.perf_counter() - begun
                tasks.cancel_scope.cancel()
    return seconds, peaks


async def _land(message: Message, job: Job) -> None:
    await message.decode(DecodeContext(tensors="disk", job=job))


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
