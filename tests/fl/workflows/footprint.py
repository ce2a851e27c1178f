"""A whole workflow in a process of its own, measured from outside the event loop; prints JSON.

Sites compute what they send and do not fetch the model: what is measured is the aggregator. One line of
arguments: backend, sites, rounds, tensors, MiB per tensor, repeated for each run after the first.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import numpy as np
from anyio.abc import TaskGroup, TaskStatus

from streamoff.fl.envelope import ResultEnvelope, TaskEnvelope, result_topic, task_topic
from streamoff.fl.workflows.fedavg import FedAvg
from streamoff.payload.endpoint import Endpoint
from streamoff.runtime.jobs import open_job
from streamoff.sim.memory import MemorySampler, resident_bytes, warm_torch
from streamoff.tensors.layout import Layout, plan
from streamoff.tensors.views import Views
from streamoff.tensors.writer import FileWriter
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB

JOB = "job-1"
PATTERN = memoryview(np.random.default_rng(1).standard_normal(MIB // 4, np.float32).tobytes())


class Computed:
    """A model that is nowhere: a pattern of one MiB, over and over."""

    blocking = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def views(self, start: int, stop: int) -> Views | None:
        """The bytes of a range, as views of the header and of the pattern."""
        found = [memoryview(self.layout.header)[start:stop]]
        at = max(start, self.layout.data_start) - self.layout.data_start
        end = stop - self.layout.data_start
        while at < end:
            within = at % MIB
            piece = min(MIB - within, end - at)
            found.append(PATTERN[within : within + piece])
            at += piece
        return tuple(view for view in found if view)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Copy a range."""
        at = 0
        for view in self.views(start, start + len(buffer)) or ():
            buffer[at : at + len(view)] = view
            at += len(view)

    def check(self) -> None:
        """It never changes."""

    def close(self) -> None:
        """It holds nothing."""


class Load:
    """What is in use at the worst moment, as far as it is looked at: at every landed range."""

    def __init__(self) -> None:
        self.threads = self.descriptors = self.downloads = self.tasks = 0
        self.endpoint: Endpoint | None = None
        self._looked = 0

    def round_started(self, number: int, sites: int) -> None:
        """Look once, also where nothing lands."""
        self.transfer("", 0, 0)

    def transfer(self, site: str, landed_bytes: int, total_bytes: int) -> None:
        """Look at what is in use now."""
        assert self.endpoint is not None
        self.threads = max(self.threads, threading.active_count())
        self.descriptors = max(self.descriptors, sum(1 for _ in Path("/proc/self/fd").iterdir()))
        self.downloads = max(self.downloads, self.endpoint.statistics().downloads.active)
        self._looked += 1
        if self._looked % 25 == 0:  # it is slow to count them
            self.tasks = max(self.tasks, len(anyio.get_running_tasks()))


async def site(
    network: MemoryNetwork, name: str, layout: Layout, *, task_status: TaskStatus[None]
) -> None:
    """Answer every task with a computed model, without having looked at its own."""
    async with Endpoint(name, transports=[network]) as endpoint:
        await endpoint.connect("server")
        with endpoint.receive(task_topic(JOB)) as tasks:
            task_status.started()
            async for message in tasks:
                task = TaskEnvelope.of(message.tree, site="server")
                if task.params is None:
                    return
                result = ResultEnvelope(
                    job=JOB, round=task.round, weight=1.0, params=Computed(layout)
                )
                await endpoint.send("server", result_topic(JOB), result.tree())


@contextmanager
def initial_file(layout: Layout) -> Iterator[Path]:
    """The first global model, in a file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        writer = FileWriter(path, layout)
        for start in range(0, layout.data_nbytes, MIB):
            writer.write(start, PATTERN)
        writer.finish().release()
        yield path


async def run(sites: int, rounds: int, tensors: int, mebibytes: int) -> dict[str, object]:
    """Run one workflow.

    Returns:
        Base, peak and the values after each round of the resident memory, in MiB, and the load.
    """
    layout = plan([(f"w{n}", "F32", (mebibytes * MIB // 4,)) for n in range(tensors)])
    network, load, after = MemoryNetwork(), Load(), []
    with initial_file(layout) as path, MemorySampler(interval=0.005) as memory:
        async with Endpoint("server", transports=[network]) as server:
            load.endpoint = server
            async with anyio.create_task_group() as group:
                names = [f"site-{number}" for number in range(sites)]
                await _start(group, network, names, layout)
                idle = len(anyio.get_running_tasks())
                workflow = FedAvg(
                    initial=path,
                    rounds=rounds,
                    enable_tensor_disk_offload=True,
                    server_expected_format="pytorch",
                    observer=load,
                )
                async with (
                    open_job(JOB, server) as job,
                    workflow.run(job, names) as running,
                ):
                    async for finished in running:
                        assert len(finished.accepted) == sites, finished.failed
                        gc.collect()
                        after.append(resident_bytes()[1] / MIB)
    use = memory.statistics()
    return {
        "base": use.baseline_bytes / MIB,
        "peak": use.peak_bytes / MIB,
        "after": after,
        "threads": load.threads,
        "descriptors": load.descriptors,
        "downloads": load.downloads,
        "tasks": load.tasks - idle,
    }


async def _start(
    group: TaskGroup, network: MemoryNetwork, names: list[str], layout: Layout
) -> None:
    for name in names:
        await group.start(site, network, name, layout)


def main(backend: str, *numbers: str) -> None:
    """Run the workflows one after the other and print what they took."""
    warm_torch()
    found = []
    for at in range(0, len(numbers), 4):
        sites, rounds, tensors, mebibytes = map(int, numbers[at : at + 4])
        found.append(anyio.run(run, sites, rounds, tensors, mebibytes, backend=backend))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
