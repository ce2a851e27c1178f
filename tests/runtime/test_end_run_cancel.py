"""Cancelling a controller: once, twice, while it drains and while its endpoint closes; the way out goes on."""

import asyncio
import random
import secrets
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from streamoff.machines.job_root import CUT_GRACE_SECONDS, JobRootState
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import ConsumerEnd, Job, open_job
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.janitor import JANITOR
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, OutcomeStatus, Slot

from .world import (
    Attempt,
    ComputedSource,
    Gate,
    World,
    disk,
    state_dict,
    tasks,
    until_gone,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)


@pytest.mark.parametrize("strikes", [[0.5], [1.5], [0.5, 0.75], [0.5, 1.5], [1.5, 2.5, 3.5]])
async def test_a_cancelled_drain_goes_on(tmp_path, strikes):
    """Cancelled in the body, in the drain, or in both, a controller leaves when its consumers have had their window."""
    async with world() as w, tasks() as group:
        scopes = [anyio.CancelScope() for _ in strikes]
        jobs: list[Job] = []
        returned: list[float] = []

        async def controller(depth: int = 0) -> None:
            if depth < len(scopes):
                with scopes[depth]:
                    await controller(depth + 1)
                return
            try:
                async with open_job("job", w.server, scratch=tmp_path) as job:
                    jobs.append(job)
                    job.start(anyio.sleep, 4)
                    await anyio.sleep(1)
            finally:
                returned.append(anyio.current_time())
            await (
                anyio.lowlevel.checkpoint()
            )  # where a cancellation that came meanwhile is delivered
            raise AssertionError("the cancellation was swallowed")

        group.start_soon(controller)
        now = 0.0
        for scope, strike in zip(reversed(scopes), strikes, strict=True):
            await anyio.sleep(strike - now)
            now = strike
            scope.cancel()
        await anyio.sleep(5 - now)
        assert returned == [4]
        assert scopes[0].cancelled_caught
        report = jobs[0].report
        assert report.ends == {ConsumerEnd.FINISHED: 1}
        assert report.drain_seconds == 4 - min(strikes[0], 1)
        assert list(tmp_path.iterdir()) == []


@on_asyncio
@pytest.mark.parametrize("strikes", [1, 2, 5])
async def test_an_endpoint_closes_however_often_its_task_is_cancelled(tmp_path, strikes):
    """Cancelled the asyncio way, once or again and again, a task that leaves its endpoint the body, and neither the drain nor the closing."""
    network = MemoryNetwork(bandwidth=MIB)
    async with BaseEndpoint("site", transports=[network]) as site:
        tx = site.publish([ComputedSource(20 * MIB)], [Slot(secrets.token_bytes(16))])
        ends: list[float] = []

        async def slow() -> None:
            await anyio.sleep(4)
            ends.append(anyio.current_time())

        async def controller() -> None:
            async with BaseEndpoint("server", transports=[network]) as server:
                await server.connect("site")
                async with open_job("job", server, scratch=tmp_path) as job:
                    job.start(slow)
                    await job.download(tx.refs(0)[0], disk(job))

        task = asyncio.ensure_future(controller())
        await anyio.sleep(1.5)
        for _ in range(strikes):
            task.cancel()
            await anyio.sleep(0.25)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == [4]
        assert anyio.current_time() == 4
        assert tx.outcome is not None
        assert tx.outcome.settled_at == 1.5
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("struck", ["outer", "inner"])
async def test_nested_jobs_end_one_after_the_other(tmp_path, struck):
    """Of two jobs, one in the body of the other, each has a window of its own, and its own consumers only."""
    async with world() as w:
        scopes = {"outer": anyio.CancelScope(), "inner": anyio.CancelScope()}
        ends: dict[str, float] = {}

        async def lasts(name: str) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ends[name] = anyio.current_time()

        async with tasks() as group:

            async def strike() -> None:
                await anyio.sleep(1)
                scopes[struck].cancel()

            group.start_soon(strike)
            with scopes["outer"]:
                async with open_job("outer", w.server, scratch=tmp_path, drain_window=3) as outer:
                    outer.start(lasts, "outer")
                    with scopes["inner"]:
                        async with open_job(
                            "inner", w.site, scratch=tmp_path, drain_window=2
                        ) as inner:
                            inner.start(lasts, "inner")
                            await anyio.sleep_forever()
                    assert outer.state is JobRootState.OPEN
                    await anyio.sleep(4)
        left = 1 + 2 if struck == "outer" else 1 + 2 + 4
        assert ends == {"inner": 1 + 2, "outer": left + 3}
        for job, window in ((outer, 3), (inner, 2)):
            assert job.report.ends == {ConsumerEnd.CUT: 1}
            assert job.report.drain_seconds == window
            assert job.report.removed


async def test_jobs_at_once_end_each_in_its_own_way(tmp_path):
    """Ten jobs of one process, with other windows, tempers and ends, share nothing: each ends at its own second."""
    gate = Gate()
    async with world(sites=2) as w, tasks(gate) as group:
        reports: dict[str, Job] = {}
        returned: dict[str, float] = {}

        async def controller(name: str, window: float, left_at: float, temper: str) -> None:
            endpoint = w.server if window % 2 else w.sites[1]
            try:
                async with open_job(name, endpoint, scratch=tmp_path, drain_window=window) as job:
                    reports[name] = job
                    if temper == "blocks":
                        job.start(run_in_thread, gate)
                        await gate.reached()
                    elif temper == "fails":
                        job.start(fail)
                    else:
                        job.start(anyio.sleep, 1 if temper == "finishes" else 1000)
                    await anyio.sleep(left_at)
            except KeyError:
                assert temper == "fails"
            returned[name] = anyio.current_time()

        async def fail() -> None:
            await anyio.sleep(0.5)
            raise KeyError

        expected: dict[str, tuple[float, ConsumerEnd]] = {}
        for window in (1, 2):
            for temper in ("finishes", "lasts", "blocks", "fails", "outlives"):
                name = f"{temper}-{window}"
                group.start_soon(controller, name, window, 4 * window, temper)
                left = 4 * window
                expected[name] = {
                    "finishes": (left, ConsumerEnd.FINISHED),
                    "lasts": (left + window, ConsumerEnd.CUT),
                    "blocks": (left + window + CUT_GRACE_SECONDS, ConsumerEnd.STUCK),
                    "fails": (0.5, ConsumerEnd.FAILED),
                    "outlives": (left + window, ConsumerEnd.CUT),
                }[temper]
        await anyio.sleep(20)
        assert returned == {name: time for name, (time, _) in expected.items()}
        for name, (_, end) in expected.items():
            assert reports[name].report.ends == {end: 1}, name
        stuck = {name for name, job in reports.items() if job.state is JobRootState.STUCK}
        assert stuck == {"blocks-1", "blocks-2"}
        assert len(list(tmp_path.iterdir())) == 2
        gate.open()
        for name in stuck:
            await until_gone(reports[name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(5))
async def test_a_cancel_in_any_instant_of_a_job_is_delivered_and_leaves_nothing(tmp_path, seed):
    """Struck in whichever instant of opening, landing or draining, a controller is cancelled, or was through already."""
    chance = random.Random(seed)
    network = MemoryNetwork(latency=0.001)
    async with world(network=network) as w:
        ends = set()
        for _ in range(20):
            attempt = Attempt()
            async with tasks() as group:
                group.start_soon(attempt.run, partial(a_job, w, tmp_path))
                await anyio.sleep(chance.randrange(12) * 0.001)
                for _ in range(chance.randrange(8)):
                    await anyio.lowlevel.checkpoint()
                attempt.scope.cancel()
            assert attempt.error is None
            assert attempt.cancelled is (attempt.state is None)
            ends.add(attempt.cancelled)
            assert list(tmp_path.iterdir()) == []
            assert not w.server.open_jobs
            await anyio.sleep(0.01)
            assert w.site.publisher.statistics().open == 0
        assert ends == {True, False}
        w.assert_idle()


async def a_job(w: World, scratch: object) -> object:
    """A short job with everything: a landing, a consumer, a window that is used."""
    async with open_job("job", w.server, scratch=scratch, drain_window=0.01) as job:  # type: ignore[arg-type]
        tx, ref = w.offer(state_dict(0.01))
        try:
            state = await job.download(ref, disk(job))
            job.start(anyio.sleep, 0.005)
            state.release()
        finally:
            tx.cancel()
    return OutcomeStatus.COMPLETED


def test_a_loop_that_is_torn_down_leaves_no_root(tmp_path):
    """When asyncio.run ends with a job open in some task, everything is cancelled at once, and the root goes."""

    async def controller(opened: asyncio.Event) -> None:
        async with (
            BaseEndpoint("server") as server,
            open_job("job", server, scratch=tmp_path) as job,
        ):
            (job.path / "landed").write_bytes(b"something")
            job.start(anyio.sleep_forever)
            opened.set()
            await anyio.sleep_forever()

    async def main() -> asyncio.Task[None]:
        opened = asyncio.Event()
        task = asyncio.create_task(controller(opened))
        await opened.wait()
        return task

    assert asyncio.run(main()).cancelled()
    assert JANITOR.idle(30)
    assert list(tmp_path.iterdir()) == []


@on_asyncio
@pytest.mark.parametrize("strikes", [1, 2])
async def test_an_opening_that_is_cancelled_the_asyncio_way_leaves_nothing(tmp_path, strikes):
    """Struck once or twice in whichever instant of its opening, a job leaves no directory, and its name is free."""
    async with world() as w:

        async def use() -> None:
            async with open_job("job", w.server, scratch=tmp_path):
                await anyio.sleep_forever()

        for steps in range(16):
            task = asyncio.ensure_future(use())
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            for _ in range(strikes):
                task.cancel()
                await anyio.lowlevel.checkpoint()
            with pytest.raises(asyncio.CancelledError):
                await task
            while w.server.jobs:  # noqa: ASYNC110 - its last thread ends on its own
                await anyio.sleep(0.001)
            assert await run_in_thread(JANITOR.idle, 30)
            assert not w.server.open_jobs
            assert list(tmp_path.iterdir()) == []
