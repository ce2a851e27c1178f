"""One way to each end of a transfer, to be watched from both sides."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from streamoff.runtime.downloading import Terms
from streamoff.runtime.jobs import Job, open_job
from streamoff.runtime.publishing import Transaction
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Ref

from .world import (
    Attempt,
    ComputedSource,
    Gate,
    Hooked,
    World,
    disk,
    not_the_first,
    state_dict,
    tasks,
    world,
)


@dataclass(frozen=True)
class Stage:
    """One site that serves to a job of a server, on a line of a mebibyte a second."""

    w: World
    job: Job

    def offer(self) -> tuple[Transaction, Ref]:
        """Publish three chunks."""
        return self.w.offer(ComputedSource(9 * MIB))

    async def attempt(self, ref: Ref, terms: Terms | None = None) -> Attempt:
        """Pull them to the job's disk."""
        attempt = Attempt()
        await attempt.run(partial(self.job.download, ref, terms or disk(self.job)))
        return attempt


@asynccontextmanager
async def stage(tmp_path: Path, network: MemoryNetwork | None = None) -> AsyncIterator[Stage]:
    """Set it up."""
    network = network or MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w, open_job("job-42", w.server, scratch=tmp_path) as job:
        yield Stage(w, job)


async def completed(s: Stage) -> None:
    """The payload arrives."""
    tx, ref = s.offer()
    await s.attempt(ref)
    await tx.wait()


async def cancelled(s: Stage) -> None:
    """The receiver is cancelled while it pulls."""
    tx, ref = s.offer()
    with anyio.move_on_after(5.6):
        await s.job.download(ref, disk(s.job))
    await tx.wait()


async def aborted(s: Stage) -> None:
    """The owner of the transaction ends it."""
    tx, ref = s.offer()
    async with tasks() as group:
        group.start_soon(s.attempt, ref)
        await anyio.sleep(5.6)
        tx.cancel("the round is over")


async def landing_failed(s: Stage) -> None:
    """The receiver's disk is full."""
    tx, ref = s.offer()

    def full(_start: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/scratch/x")

    await s.attempt(ref, Terms(landing=lambda layout: Hooked(s.job.landing(layout), write=full)))
    await tx.wait()


async def finish_failed(s: Stage) -> None:
    """The receiver cannot put the payload in its place."""
    tx, ref = s.offer()

    def broken() -> None:
        raise OSError(errno.EIO, "Input/output error", "/scratch/x")

    await s.attempt(ref, Terms(landing=lambda layout: Hooked(s.job.landing(layout), finish=broken)))
    await tx.wait()


async def timed_out(s: Stage) -> None:
    """The source hangs in its own disk."""
    gate = Gate()
    tx, ref = s.w.offer(ComputedSource(9 * MIB, not_the_first(gate)))
    async with tasks(gate) as group:
        group.start_soon(s.attempt, ref)
        await anyio.sleep(200)
        gate.open()
    await tx.wait()


async def source_failed(s: Stage) -> None:
    """The owner of the source says that it is dead."""
    tx, ref = s.offer()
    async with tasks() as group:
        group.start_soon(s.attempt, ref)
        await anyio.sleep(5.6)
        await s.w.site.notify_failure(["server"], "site-1", [ref.id], "out of memory")
    tx.cancel("out of memory")


async def source_changed(s: Stage) -> None:
    """A borrowed tensor is changed while it is served."""
    tensors = state_dict(9)
    tx, ref = s.w.offer(tensors)
    async with tasks() as group:
        group.start_soon(s.attempt, ref)
        await anyio.sleep(1)
        tensors["large"].add_(1)
    await tx.wait()


async def link_lost(s: Stage) -> None:
    """The link is lost and does not come back in time."""
    tx, ref = s.offer()
    async with tasks() as group:
        group.start_soon(s.attempt, ref)
        await anyio.sleep(5.6)
        s.w.network.cut("server", "site-1")
    await tx.wait()
    s.w.network.mend("server", "site-1")
