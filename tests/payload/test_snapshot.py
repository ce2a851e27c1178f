"""Snapshots: what is in memory may change as soon as the send returns; on every failure nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from streamoff.errors import (
    JobClosedError,
    QuotaExceededError,
    SourceChangedError,
    StreamoffError,
    UnreachableError,
)
from streamoff.payload.context import DecodeContext
from streamoff.payload.encode import encode
from streamoff.payload.snapshot import snapshot_of
from streamoff.runtime.jobs import Job, open_job
from streamoff.tensors.layout import Layout
from streamoff.tensors.lazy import open_state
from streamoff.tensors.sources import StateDictSource
from streamoff.tensors.views import Views
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, OutcomeStatus

from ..tensors.helpers import same
from .helpers import TOPIC, alike, assert_idle, connected, received, tensors_of, until

pytestmark = pytest.mark.usefixtures("no_leaks")


async def assert_clean(job: Job) -> None:
    """Nothing is on disk, charged or at work under a root."""
    await anyio.sleep(0.1)
    assert not list(job.path.glob("transfer-*"))
    assert job.ledger.used == 0


def trees() -> dict[str, Callable[[], dict[str, Any]]]:
    """Trees with tensors of all sorts, made anew each time."""
    tied = torch.arange(5.0)
    return {
        "small": lambda: {"w": torch.ones(3), "a": np.arange(4), "n": 1},
        "several blocks": lambda: {"w": torch.randn(3 * MIB), "v": torch.randn(1000)},
        "tied": lambda: {"x": tied, "y": tied, "z": tied.clone()},
        "views": lambda: {"t": torch.randn(1500, 1001).T, "f": np.asfortranarray(np.ones((3, 2)))},
        "many small": lambda: {f"w{n}": torch.tensor([n]) for n in range(1000)},
        "empty": lambda: {"w": torch.empty(0)},
    }


@pytest.mark.parametrize("name", trees())
async def test_the_originals_may_change_at_once(name: str, tmp_path: Path) -> None:
    """What arrives is what was there when the send returned, whatever happens to the tensors after."""
    async with connected("site-1") as (server, site):
        async with open_job("job", site, scratch=tmp_path) as job:
            tree = trees()[name]()
            wanted = {
                key: value.clone() if isinstance(value, torch.Tensor) else np.copy(value)
                for key, value in tree.items()
                if key != "n"
            }
            message, delivery = await received(site, server, tree, snapshot=job)
            for value in tree.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-1)
                elif isinstance(value, np.ndarray):
                    value[...] = -1
            arrived = await message.decode()
            assert alike(wanted, {key: arrived[key] for key in wanted})
            assert (await delivery.wait()).status is OutcomeStatus.COMPLETED
            await assert_clean(job)
        assert job.report.removed


async def test_a_snapshot_is_a_plain_file_that_is_charged(tmp_path: Path) -> None:
    """The copy is a safetensors file under the root, on the job's account until the delivery settles."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", site, scratch=tmp_path) as job,
    ):
        message, delivery = await received(site, server, tensors_of(3), snapshot=job)
        (path,) = job.path.glob("transfer-*/payload.safetensors")
        assert job.ledger.used == path.stat().st_size == message.tree["w0"].ref.size
        state = open_state(path)
        assert all(same(state.tensor(name), one) for name, one in tensors_of(3).items())
        message.decline("seen")
        await delivery.wait()
        await assert_clean(job)


async def test_lazy_and_kept_tensors_are_not_copied(tmp_path: Path) -> None:
    """Only what lies in memory is copied; files and refs go as they do without a snapshot."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        first, one = await received(site, server, {"w": torch.ones(MIB)})
        lazy = await first.decode(DecodeContext(tensors="disk", job=job))
        await one.wait()
        before = job.ledger.used
        second, kept = await received(site, server, {"w": torch.zeros(MIB)}, receivers=[None])
        tree = {"lazy": lazy, "kept": second.tree, "own": torch.full((10,), 2.0)}
        message, delivery = await received(server, site, tree, snapshot=job)
        assert job.ledger.used - before < 1000
        arrived = await message.decode(only=lambda leaf: leaf.ref.source == "server")
        assert same(arrived["lazy"]["w"], torch.ones(MIB))
        assert same(arrived["own"], torch.full((10,), 2.0))
        assert (await delivery.wait()).status is OutcomeStatus.COMPLETED
        kept.cancel("not needed")
        await kept.wait()
        del lazy, tree
        await assert_clean(job)


class Changing:
    """A source whose tensor somebody changes while it is copied."""

    blocking = False

    def __init__(self, weight: torch.Tensor) -> None:
        self._inner = StateDictSource({"w": weight})
        self._weight = weight

    @property
    def layout(self) -> Layout:
        return self._inner.layout

    def views(self, start: int, stop: int) -> Views | None:
        views = self._inner.views(start, stop)
        if stop == self.layout.size:
            self._weight.add_(1)
        return views

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._inner.read_into(start, buffer)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()


async def test_a_tensor_that_changes_meanwhile_fails_the_snapshot(tmp_path: Path) -> None:
    """A copy of which half is from before a change and half from after is not sent."""
    async with connected("site-1") as (_, site), open_job("job", site, scratch=tmp_path) as job:
        weight = torch.ones(3 * MIB)
        encoded = encode({"w": weight})
        own = encoded.own[0]
        changed = type(own)(Changing(weight), borrowed=True)
        with pytest.raises(SourceChangedError) as caught:
            await snapshot_of(type(encoded)(encoded.tree, (changed,)), job)
        assert caught.value.where["tensor"] == "w"
        encoded.close()
        await assert_clean(job)


async def fails(job: Job, site: Any, tree: Any, error: type[Exception], to: str = "server") -> None:
    """Send a snapshot in vain."""
    with pytest.raises(error):
        await site.send(to, TOPIC, tree, snapshot=job)
    assert_idle(site)
    await assert_clean(job)


async def test_no_room_for_a_snapshot(tmp_path: Path) -> None:
    """A snapshot that the quota does not allow is refused before it is written; a first file goes too."""
    async with connected("site-1") as (server, site):
        with server.receive(TOPIC):
            async with open_job("job", site, scratch=tmp_path, quota=MIB) as job:
                await fails(job, site, {"w": torch.ones(MIB)}, QuotaExceededError)
                await fails(job, site, [torch.ones(10), np.ones(MIB)], QuotaExceededError)


async def test_no_way_to_the_target(tmp_path: Path) -> None:
    """Nothing is copied for somebody who cannot be reached."""
    async with connected("site-1") as (_, site), open_job("job", site, scratch=tmp_path) as job:
        await fails(job, site, {"w": torch.ones(3)}, UnreachableError, to="site-1.ghost")
        assert job.ledger.peak == 0


async def test_a_target_that_is_lost_during_the_copy(tmp_path: Path) -> None:
    """When the way is gone once the copy is made, the copy goes, too."""
    net = MemoryNetwork()
    async with (
        connected("site-1", net=net) as (server, site),
        open_job("job", site, scratch=tmp_path) as job,
    ):
        with server.receive(TOPIC):
            async with anyio.create_task_group() as tasks:

                async def cut() -> None:
                    await until(lambda: job.ledger.used)
                    net.cut("site-1", "server")

                tasks.start_soon(cut)
                with pytest.raises(UnreachableError):
                    await site.send("server", TOPIC, {"w": torch.ones(16 * MIB)}, snapshot=job)
            assert_idle(site)
            await assert_clean(job)
        net.mend("site-1", "server")
        await anyio.sleep(10)


async def test_a_cancelled_send_leaves_no_copy(tmp_path: Path) -> None:
    """Cancelling a send in the middle of its copy removes what was written; nobody gets a message."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", site, scratch=tmp_path) as job,
    ):
        with server.receive(TOPIC):
            async with anyio.create_task_group() as tasks:

                async def send() -> None:
                    await site.send("server", TOPIC, {"w": torch.ones(16 * MIB)}, snapshot=job)

                tasks.start_soon(send)
                await until(lambda: job.ledger.used)
                tasks.cancel_scope.cancel()
            await assert_clean(job)
            assert_idle(site)
        assert server.statistics().mailbox.queued == 0


async def test_a_closed_job_makes_no_snapshot(tmp_path: Path) -> None:
    """A job that is over takes no snapshot, and says so."""
    async with connected("site-1") as (server, site):
        async with open_job("job", site, scratch=tmp_path) as job:
            pass
        with server.receive(TOPIC), pytest.raises(JobClosedError):
            await site.send("server", TOPIC, {"w": torch.ones(3)}, snapshot=job)
        assert_idle(site)


async def test_a_job_that_ends_during_the_copy(tmp_path: Path) -> None:
    """The copy shares the drain window; with none it is cut, the send fails typed, and the root goes."""
    async with connected("site-1") as (server, site):
        errors: list[StreamoffError] = []

        async def send(job: Job) -> None:
            try:
                await site.send("server", TOPIC, {"w": torch.ones(16 * MIB)}, snapshot=job)
            except StreamoffError as error:
                errors.append(error)

        with server.receive(TOPIC):
            async with (
                anyio.create_task_group() as tasks,
                open_job("job", site, scratch=tmp_path, drain_window=0) as job,
            ):
                tasks.start_soon(send, job)
                await until(lambda: job.ledger.used)
            assert [type(error) for error in errors] == [JobClosedError]
            assert_idle(site)


async def test_a_snapshot_in_a_finalising_job(tmp_path: Path) -> None:
    """The final broadcast may be a snapshot: finalisation forbids downloads, not serving."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        job.finalise()
        message, delivery = await received(server, site, tensors_of(2), snapshot=job)
        assert alike(dict(tensors_of(2)), await message.decode())
        assert (await delivery.wait()).status is OutcomeStatus.COMPLETED
