"""Jobs that end while something else goes wrong: with their directory, their files, their callbacks, their threads."""

import itertools
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from streamoff.errors import JobClosedError, StreamoffError
from streamoff.machines.job_root import JobRootState
from streamoff.runtime.downloading import Terms
from streamoff.runtime.jobs import ConsumerEnd, Job, open_job
from streamoff.runtime.resources import LANDING_THREADS
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.janitor import JANITOR
from streamoff.scratch.reaper import reclaim
from streamoff.tensors.lazy import LazyStateDict, LazyTensor
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, OutcomeStatus

from .world import Attempt, ComputedSource, Gate, Hooked, disk, files, state_dict, tasks, world

pytestmark = pytest.mark.usefixtures("no_leaks")


# --- the directory --------------------------------------------------------------------------------


async def test_a_root_that_somebody_else_removed_is_gone(tmp_path):
    """When the directory of a job was deleted under it the job ends as ever, and says that it is gone."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            _, ref = w.offer(state_dict())
            kept = await job.download(ref, disk(job))
            job.start(anyio.sleep, 2)
            await run_in_thread(shutil.rmtree, job.path)
        assert anyio.current_time() == 2
        assert (job.report.state, job.report.removed) == (JobRootState.GONE, True)
        kept.release()


@contextmanager
def immovable(path: Path) -> Iterator[None]:
    """Mount a directory on itself: it cannot be renamed."""
    if subprocess.run(["mount", "--bind", str(path), str(path)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


async def test_a_root_that_cannot_be_moved_holds_nobody_up(tmp_path, caplog):
    """A job whose directory resists ends in time, frees its name, and says in the log and the report what it leaves."""
    caplog.set_level(logging.WARNING, "streamoff.jobs")
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            mount = immovable(job.path)
            await run_in_thread(mount.__enter__)
            consumer = job.start(anyio.sleep, 1)
        assert anyio.current_time() == 1
        assert consumer.end is ConsumerEnd.FINISHED
        assert (job.report.state, job.report.removed) == (JobRootState.GONE, False)
        assert f"{job.path} is not removed yet" in caplog.text
        assert not w.server.open_jobs
        await run_in_thread(mount.__exit__, None, None, None)
        assert job.path.exists()
        await run_in_thread(job._root.bury)
        assert (await run_in_thread(reclaim, tmp_path)).removed


async def test_a_janitor_that_is_busy_holds_nobody_up(tmp_path, caplog):
    """While the janitor has other work a job ends after its second, says that its root is not gone, and it goes later."""
    caplog.set_level(logging.WARNING, "streamoff.jobs")
    held = threading.Event()
    other = tmp_path / "other"
    other.mkdir()
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            JANITOR.reclaim(other, held.wait)
        try:
            assert (job.report.state, job.report.removed) == (JobRootState.GONE, False)
            assert job.path.name.startswith(".gone-")
            assert f"{job.path} is not removed yet" in caplog.text
        finally:
            held.set()
        assert await run_in_thread(JANITOR.idle, 30)
        assert list(tmp_path.iterdir()) == []


async def test_files_come_and_go_under_a_root_that_ends(tmp_path):
    """With threads that add and delete files until they are cut, and one that is never told, the root is gone afterwards."""
    async with world() as w:

        def add(root: Path) -> None:
            for number in itertools.count():
                anyio.from_thread.check_cancelled()
                (root / f"added-{number % 50}").write_bytes(b"x")

        def delete(root: Path) -> None:
            while True:
                anyio.from_thread.check_cancelled()
                for path in root.glob("added-*"):
                    path.unlink(missing_ok=True)

        def stranger(root: Path) -> None:
            with suppress(FileNotFoundError):
                for number in itertools.count():
                    (root / f"strange-{number % 50}").write_bytes(b"x")

        async with tasks() as group:
            async with open_job("job", w.server, scratch=tmp_path, drain_window=0) as job:
                group.start_soon(run_in_thread, stranger, job.path)
                consumers = [job.start(run_in_thread, call, job.path) for call in (add, delete)]
                while len(files(job.path)) < 20:
                    await run_in_thread(threading.Event().wait, 0.001)
            assert [consumer.end for consumer in consumers] == [ConsumerEnd.CUT] * 2
            assert (job.report.state, job.report.removed) == (JobRootState.GONE, True)
        assert list(tmp_path.iterdir()) == []


# --- descriptors, mappings, writes under way ------------------------------------------------------


def held_under(place: Path) -> list[str]:
    """Descriptors and mappings of this process that lie under a directory."""
    found = []
    for item in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(item.readlink()))
    found += Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in found if str(place) in line]


async def test_nothing_is_held_open_under_a_root_when_it_goes(tmp_path):
    """While readers are half way through a file nothing of theirs is open: when the top is removed nothing is, at all."""
    held: list[list[str]] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and event == "os.rmdir" and str(args[0]).startswith(str(tmp_path / ".gone-")):
            held.append(held_under(tmp_path))

    watching = True
    sys.addaudithook(hook)
    try:
        async with world() as w:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                _, ref = w.offer(state_dict())
                state = await job.download(ref, disk(job))
                assert isinstance(state, LazyStateDict)
                reader = state["large"].blocks(1000)
                next(reader)
                tensor = state["small"]
                tensor.materialize()
                await anyio.sleep(1)  # the search for dead roots is over
                assert [Path(line).name for line in held_under(tmp_path)] == [".lease"]
            with pytest.raises(JobClosedError):
                next(reader)
            with pytest.raises(JobClosedError):
                tensor.materialize()
    finally:
        watching = False
    assert held == [[]]


async def test_writes_under_way_are_waited_for_and_leave_nothing(tmp_path):
    """Eight downloads that write when the job ends: told at once, their threads are waited for, then nothing is left."""
    gate = Gate()
    async with world(sites=8) as w:
        offers = [w.offer(ComputedSource(9 * MIB), site=site) for site in w.sites]
        attempts = [Attempt() for _ in offers]
        async with tasks(gate) as group:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                terms = Terms(landing=lambda layout: Hooked(job.landing(layout), write=gate))
                for attempt, (_, ref) in zip(attempts, offers, strict=True):
                    group.start_soon(attempt.run, partial(job.download, ref, terms))
                while gate.waiting < LANDING_THREADS:
                    await anyio.lowlevel.checkpoint()

                async def later() -> None:
                    await anyio.sleep(3)
                    assert [tx.record.outcome is not None for tx, _ in offers] == [True] * 8
                    gate.open()

                group.start_soon(later)
            assert anyio.current_time() == 3
        assert {type(attempt.error) for attempt in attempts} == {JobClosedError}
        for tx, _ in offers:
            assert (await tx.wait()).settled_at == 0
        assert job.report.ends == {ConsumerEnd.CANCELLED: 8}
        assert (job.report.state, job.ledger.used) == (JobRootState.GONE, 0)
        assert list(tmp_path.iterdir()) == []
        w.assert_idle()


async def test_giving_up_waits_for_no_thread_of_others(tmp_path):
    """With every landing thread held up by other downloads, one that is given up ends in that instant."""
    gate = Gate()
    network = MemoryNetwork()
    async with world(sites=2, network=network) as w, tasks(gate) as group:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            started = anyio.Event()
            network.conditions("site-2", "server").set(bandwidth=MIB)
            tx, ref = w.offer(ComputedSource(20 * MIB), site=w.sites[1])
            attempt = Attempt()
            terms = disk(job, progress=lambda _landed, _wanted: started.set())
            group.start_soon(attempt.run, partial(job.download, ref, terms))
            await started.wait()
            for _ in range(LANDING_THREADS):
                _, other = w.offer(ComputedSource(9 * MIB))
                held = Terms(landing=lambda layout: Hooked(job.landing(layout), write=gate))
                group.start_soon(Attempt().run, partial(job.download, other, held))
            while gate.waiting < LANDING_THREADS:
                await anyio.lowlevel.checkpoint()
            given_up_at = anyio.current_time()
            attempt.scope.cancel()
            with anyio.fail_after(60):
                await attempt.over.wait()
            assert anyio.current_time() == given_up_at
            assert (await tx.wait()).settled_at == given_up_at
            gate.open()
        assert list(tmp_path.iterdir()) == []


async def test_a_tensor_that_somebody_keeps_keeps_no_root(tmp_path):
    """Aborted with lazy tensors in the hands of others, a job removes its root; the tensors say that it is over."""
    async with world() as w:
        kept: list[LazyTensor] = []
        with anyio.CancelScope() as scope:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                _, ref = w.offer(state_dict())
                state = await job.download(ref, disk(job))
                assert isinstance(state, LazyStateDict)
                kept += state.values()
                scope.cancel()
                await anyio.sleep_forever()
        assert list(tmp_path.iterdir()) == []
        for tensor in kept:
            with pytest.raises(JobClosedError, match="the job root is gone"):
                tensor.materialize()


# --- what is called on the way --------------------------------------------------------------------


async def test_a_step_that_fails_skips_no_other(tmp_path):
    """Callbacks, discards and clean-ups that raise while a job ends cost nobody else a step."""
    async with world(sites=2) as w:

        def broken(*_: object) -> None:
            raise RuntimeError("on the way out")

        def landing(job: Job) -> Terms:
            return Terms(landing=lambda layout: Hooked(job.landing(layout), discard=broken))

        attempts = [Attempt(), Attempt()]
        gate = Gate()
        offers = [w.offer(ComputedSource(9 * MIB, gate), site=site) for site in w.sites]
        for tx, _ in offers:
            tx.on_settled.append(broken)
        async with tasks(gate) as group:
            async with open_job("job", w.server, scratch=tmp_path, drain_window=1) as job:
                for attempt, (_, ref) in zip(attempts, offers, strict=True):
                    group.start_soon(attempt.run, partial(job.download, ref, landing(job)))
                other = job.start(anyio.sleep, 0.5)
                await gate.reached()
                gate.open()
            assert anyio.current_time() == 0.5
        assert other.end is ConsumerEnd.FINISHED
        assert [(await tx.wait()).status for tx, _ in offers] == [OutcomeStatus.FAILED] * 2
        assert all(isinstance(attempt.error, StreamoffError) for attempt in attempts)
        assert (job.report.state, job.report.removed) == (JobRootState.GONE, True)
        assert list(tmp_path.iterdir()) == []


# --- several event loops --------------------------------------------------------------------------


def test_event_loops_of_one_process_share_no_fate(tmp_path):
    """Two threads run a loop and a job each: one is aborted and removed while the other lands and reads on, and ends well."""
    ended, landed = threading.Event(), threading.Event()
    reports: dict[str, Job] = {}

    async def aborted() -> None:
        at_work = anyio.Event()

        async def work() -> None:
            at_work.set()
            await anyio.sleep_forever()

        async with world() as w:
            with anyio.CancelScope() as scope:
                async with open_job("job", w.server, scratch=tmp_path, drain_window=0) as job:
                    reports["aborted"] = job
                    job.start(work)
                    await at_work.wait()
                    scope.cancel()
                    await anyio.sleep_forever()
        ended.set()

    async def goes_on() -> None:
        async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
            reports["goes on"] = job
            for number in range(3):
                _, ref = w.offer(state_dict(seed=number))
                state = await job.download(ref, disk(job))
                landed.set()
                await run_in_thread(ended.wait)
                assert state.tensor("scalar").item() == number

    threads = [
        threading.Thread(target=anyio.run, args=(call,), kwargs={"backend": backend})
        for call, backend in ((goes_on, "asyncio"), (aborted, "trio"))
    ]
    threads[0].start()
    assert landed.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert {name: job.report.removed for name, job in reports.items()} == {
        "aborted": True,
        "goes on": True,
    }
    assert reports["aborted"].report.ends == {ConsumerEnd.CUT: 1}
    assert reports["goes on"].report.ends == {ConsumerEnd.FINISHED: 3}
    assert list(tmp_path.iterdir()) == []
