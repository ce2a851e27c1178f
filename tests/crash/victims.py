"""What the processes of the harness do; each runs in a forked child that loaded everything before."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import torch

from streamoff import DecodeContext, Endpoint, MemoryNetwork, open_job
from streamoff.fl.executors.in_process import InProcess, Result, Task
from streamoff.fl.workflows.fedavg import FedAvg
from streamoff.scratch.janitor import JANITOR
from streamoff.scratch.reaper import reclaim

__all__ = ["fork_in_a_job", "hold_a_job", "one_job", "run_jobs", "run_reapers", "start_a_job"]

JOB: Final = "victim"
NEXT: Final = "next"
SITES: Final = ("site-1", "site-2", "site-3")
ELEMENTS: Final = 2**17
ROUNDS: Final = 2
PATIENCE: Final = 20.0
"""Real seconds until a start has given up waiting for the dead roots to go."""


async def one_job(scratch: Path) -> None:
    """A whole life: a root, rounds with offload and aggregation, a consumer that uses its window, the end."""
    network = MemoryNetwork()
    model = {"weight": torch.zeros(ELEMENTS), "bias": torch.zeros(8)}
    workflow = FedAvg(
        initial=model,
        rounds=ROUNDS,
        enable_tensor_disk_offload=True,
        server_expected_format="pytorch",
    )
    async with (
        Endpoint("server", transports=[network]) as server,
        anyio.create_task_group() as sites,
    ):
        for name in SITES:
            await sites.start(_site, network, name)
        async with (
            open_job(JOB, server, scratch=scratch, drain_window=1, ram_backed="allow") as job,
            workflow.run(job, SITES) as rounds,
        ):
            async for _ in rounds:
                pass
            job.start(anyio.sleep, 0.01)
        sites.cancel_scope.cancel()


async def _site(
    network: MemoryNetwork, name: str, *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    async with Endpoint(name, transports=[network]) as endpoint:
        await endpoint.connect("server")
        executor = InProcess(endpoint, job=JOB, train=_train, server="server")
        task_status.started()
        await executor.run()


def _train(task: Task) -> Result:
    return Result(params={name: tensor + 1 for name, tensor in task.params.items()}, weight=1.0)


def run_jobs(scratch: Path, backend: str) -> None:
    """One job after the other, for ever."""
    torch.set_num_threads(1)
    while True:
        anyio.run(one_job, scratch, backend=backend)


def run_reapers(scratch: Path) -> None:
    """Reclaim again and again, for ever."""
    while True:
        reclaim(scratch)
        time.sleep(0.001)


def start_a_job(scratch: Path, expected: Callable[[Path], bool]) -> None:
    """The next start: open a job, and leave when nothing is there that should not be.

    Args:
        scratch: Where.
        expected: Whether an entry may stay.
    """
    anyio.run(_start, scratch, expected)
    if not JANITOR.idle(PATIENCE):
        raise TimeoutError("the janitor did not end")


async def _start(scratch: Path, expected: Callable[[Path], bool]) -> None:
    async with (
        Endpoint("next") as endpoint,
        open_job(NEXT, endpoint, scratch=scratch, ram_backed="allow"),
    ):
        with anyio.fail_after(PATIENCE):
            while unexpected := [path for path in _entries(scratch) if not expected(path)]:  # noqa: ASYNC110 - another thread removes them
                await anyio.sleep(0.002)
    assert not unexpected


def _entries(scratch: Path) -> list[Path]:
    """What is in scratch, but for the roots of starts, of which there may be two."""
    return [path for path in scratch.iterdir() if f"_{NEXT}_" not in path.name]


def hold_a_job(scratch: Path, said: int, told: int) -> None:
    """A neighbour: land an update, wait to be told, and check that nothing of it has changed.

    Args:
        scratch: Where.
        said: Descriptor on which it says the name of its root.
        told: Descriptor on which it is told to end.
    """
    anyio.run(_hold, scratch, said, told)


def fork_in_a_job(scratch: Path, said: int) -> None:
    """Open a job, fork a child that does nothing and has all that was open, and say who they are."""
    anyio.run(_fork, scratch, said)


async def _fork(scratch: Path, said: int) -> None:
    async with (
        Endpoint("owner") as endpoint,
        open_job("owner", endpoint, scratch=scratch, ram_backed="allow") as job,
    ):
        (job.path / "landed").write_bytes(bytes(ELEMENTS))
        child = os.fork()
        if child == 0:
            time.sleep(600)  # noqa: ASYNC251 - no loop runs here any more
            os._exit(0)
        os.write(said, f"{job.path.name} {child}\n".encode())
        await anyio.sleep_forever()


async def _hold(scratch: Path, said: int, told: int) -> None:
    network = MemoryNetwork()
    tensor = torch.arange(ELEMENTS)
    async with (
        Endpoint("neighbour", transports=[network]) as server,
        Endpoint("its-site", transports=[network]) as site,
    ):
        await site.connect("neighbour")
        updates = server.receive("update")
        async with open_job("neighbour", server, scratch=scratch, ram_backed="allow") as job:
            await site.send("neighbour", "update", {"w": tensor})
            tree = await (await anext(updates)).decode(DecodeContext(tensors="disk", job=job))
            os.write(said, job.path.name.encode() + b"\n")
            await anyio.to_thread.run_sync(os.read, told, 1)
            if not torch.equal(await tree["w"].load(), tensor):
                raise AssertionError("the neighbour's update has changed")
