"""Job roots: what runs under them, how they end, and what is left afterwards, which is nothing."""

import asyncio
import json
import secrets
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from streamoff.errors import (
    JobClosedError,
    JobExistsError,
    StreamoffError,
    UsageError,
)
from streamoff.machines.job_root import CUT_GRACE_SECONDS, JobRootState
from streamoff.runtime.control_files import read_control_file
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import MAX_REPORTED, STUCK_REPORT, ConsumerEnd, open_job
from streamoff.runtime.threads import run_in_thread
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.sources import FileSource
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, OutcomeStatus, Ref, Slot

from ..soon import soon
from .world import (
    Attempt,
    ComputedSource,
    Gate,
    Hooked,
    all_dead,
    assert_pattern,
    assert_same,
    disk,
    memory,
    settled_tasks,
    state_dict,
    tasks,
    until_gone,
    watched,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


async def landed(w, job, tensors=None) -> LazyStateDict:
    """A payload on the job's disk."""
    _, ref = w.offer(tensors if tensors is not None else state_dict())
    state = await job.download(ref, disk(job))
    assert isinstance(state, LazyStateDict)
    return state


# --- opening --------------------------------------------------------------------------------------


async def test_a_job_that_nobody_uses_ends_at_once(tmp_path):
    """Leaving the body of an idle job takes no time, and its directory is gone."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            assert job.path.parent == tmp_path
            assert job.state is JobRootState.OPEN
        report = job.report
        assert report.state is JobRootState.GONE
        assert report.removed
        assert report.drain_seconds == 0
        assert report.ends == {}
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("window", [-1, float("inf"), float("nan"), True])
async def test_a_window_that_is_none_is_refused(window):
    """A drain window is a finite number of seconds, zero or more."""
    async with world() as w:
        with pytest.raises(UsageError, match="drain_window"):
            open_job("job", w.server, drain_window=window)


async def test_a_name_is_taken_while_its_job_is_open(tmp_path):
    """Two open jobs of one endpoint have two names; afterwards the name is free again."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path):
            with pytest.raises(JobExistsError):
                await open_job("job", w.server, scratch=tmp_path).__aenter__()
            async with open_job("job", w.site, scratch=tmp_path):
                pass
        async with open_job("job", w.server, scratch=tmp_path):
            pass


async def test_a_job_that_cannot_be_opened_leaves_its_name_free(tmp_path):
    """A scratch directory that is not there, or a name that is none, fails the opening and nothing else."""
    async with world() as w:
        with pytest.raises(OSError, match="no scratch directory"):
            await open_job("job", w.server, scratch=tmp_path / "absent").__aenter__()
        with pytest.raises(UsageError):
            await open_job("", w.server, scratch=tmp_path).__aenter__()
        async with open_job("job", w.server, scratch=tmp_path):
            pass
        assert list(tmp_path.iterdir()) == []


async def test_an_opening_that_is_cancelled_leaves_nothing(tmp_path):
    """Cancelled in whichever instant of its opening, a job leaves no directory, and its name is free."""
    async with world() as w:
        for steps in range(12):
            async with anyio.create_task_group() as group:

                async def use() -> None:
                    async with open_job("job", w.server, scratch=tmp_path):
                        await anyio.sleep_forever()

                group.start_soon(use)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            assert list(tmp_path.iterdir()) == []
            assert not w.server.open_jobs
            while w.server.jobs:  # noqa: ASYNC110 - its last thread ends on its own
                await anyio.sleep(0.001)


# --- the drain ------------------------------------------------------------------------------------


async def test_consumers_get_the_window_to_finish(tmp_path):
    """A consumer that needs three of five seconds finishes, and the root goes when it has."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            state = await landed(w, job)

            async def slow() -> None:
                await anyio.sleep(3)
                assert_same(state, state_dict())

            consumer = job.start(slow)
        assert anyio.current_time() == 3
        assert consumer.end is ConsumerEnd.FINISHED
        assert job.report.drain_seconds == 3
        assert job.report.ends == {ConsumerEnd.FINISHED: 2}
        assert job.report.consumers == ()
        assert job.report.removed


@pytest.mark.parametrize("window", [0, 0.5, 5])
async def test_consumers_that_need_longer_are_cut(tmp_path, window):
    """What still runs when the window closes is cancelled then, to the second, and named."""
    async with world() as w:
        cleaned: list[float] = []

        async def endless() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                cleaned.append(anyio.current_time())

        async with open_job("job", w.server, scratch=tmp_path, drain_window=window) as job:
            consumer = job.start(endless, name="the endless one")
            await settled_tasks()
        assert anyio.current_time() == window
        assert cleaned == [window]
        assert consumer.end is ConsumerEnd.CUT
        [entry] = job.report.consumers
        assert (entry.name, entry.end, entry.seconds) == (
            "the endless one",
            ConsumerEnd.CUT,
            window,
        )
        assert job.report.state is JobRootState.GONE


async def test_nothing_new_is_admitted_once_the_body_is_left(tmp_path):
    """While it drains a job starts no consumer, no download and attaches no transaction."""
    async with world() as w:
        refused: list[str] = []

        async def late(job) -> None:
            await anyio.sleep(1)
            _, ref = w.offer(state_dict())
            tx = w.server.publish([ComputedSource(10)], [Slot(secrets.token_bytes(16))])
            with pytest.raises(JobClosedError):
                job.start(late, job)
            refused.append("start")
            with pytest.raises(JobClosedError):
                await job.download(ref, disk(job))
            refused.append("download")
            with pytest.raises(JobClosedError):
                job.attach(tx)
            refused.append("attach")
            tx.cancel()

        async with open_job("job", w.server, scratch=tmp_path) as job:
            job.start(late, job)
        assert refused == ["start", "download", "attach"]
        with pytest.raises(JobClosedError):
            job.start(late, job)


async def test_a_job_that_is_finalised_serves_on_and_takes_nothing_in(tmp_path):
    """After ``finalise`` no download starts, while consumers and served files go on as before."""
    async with world(sites=2) as w, open_job("job", w.server, scratch=tmp_path) as job:
        state = await landed(w, job)
        job.finalise()
        job.finalise()
        assert job.state is JobRootState.FINALISING
        _, ref = w.offer(state_dict())
        with pytest.raises(JobClosedError):
            await job.download(ref, disk(job))
        tx = w.server.publish([FileSource(state)], [Slot(secrets.token_bytes(16))])
        job.attach(tx)
        assert await job.start(settled_tasks).wait() is ConsumerEnd.FINISHED
        site = w.sites[1]
        assert_same(await site.run_transfer(site.transfer(tx.refs(0)[0], memory())), state_dict())
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_downloads_are_cancelled_at_their_source_when_the_body_is_left(tmp_path):
    """What is still landing when the body is left is given up at once: the producer hears it, no file is left."""
    async with world(network=MemoryNetwork(bandwidth=MIB)) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
                await anyio.sleep(9.5)
            assert anyio.current_time() == 9.5
        assert (await tx.wait()).settled_at == 9.5
        assert isinstance(attempt.error, StreamoffError)
        assert "job job is closing" in str(attempt.error)
        assert job.report.ends == {ConsumerEnd.CANCELLED: 1}
        assert list(tmp_path.iterdir()) == []
        w.assert_idle()


@pytest.mark.parametrize(
    ("chunk", "inside"), [*((k, False) for k in range(5)), *((k, True) for k in range(4))]
)
@pytest.mark.parametrize("how", ["left", "aborted"])
async def test_a_body_that_ends_in_the_middle_of_a_download_leaves_nothing(
    tmp_path, how, chunk, inside
):
    """Left or aborted after so many of four chunks, or inside the write of the next, a job leaves no directory."""
    gate = Gate()
    async with world() as w:
        tx, ref = w.offer(ComputedSource(13 * MIB))
        attempt = Attempt()
        reached = anyio.Event()

        def write(start: int) -> None:
            if inside and start >= chunk * 4 * MIB:
                gate()

        def progress(landed: int, wanted: int) -> None:
            if not inside and landed >= min(chunk * 4 * MIB, wanted):
                reached.set()

        async with tasks(gate) as group:
            with anyio.CancelScope() as scope:
                async with open_job("job", w.server, scratch=tmp_path, drain_window=1) as job:
                    terms = Terms(
                        landing=lambda layout: Hooked(job.landing(layout), write=write),
                        progress=progress,
                    )
                    group.start_soon(attempt.run, partial(job.download, ref, terms))
                    await (gate.reached() if inside else reached.wait())

                    async def later() -> None:
                        await anyio.sleep(0.5)
                        gate.open()

                    group.start_soon(later)
                    if how == "aborted":
                        scope.cancel()
                        await anyio.sleep_forever()
            assert scope.cancelled_caught is (how == "aborted")
            assert job.state is JobRootState.GONE
            assert list(tmp_path.iterdir()) == []
        outcome = await tx.wait()
        if attempt.state is None:  # after the last chunk it may have been whole already
            assert outcome.status is OutcomeStatus.FAILED
            assert attempt.error is not None
        else:
            assert (chunk, inside) == (4, False)
            attempt.state = None
        w.assert_idle()


async def test_served_files_share_the_window(tmp_path):
    """A receiver that pulls a file of the root finishes within the window, and is cut when it needs longer."""
    network = MemoryNetwork()
    async with world(sites=3, network=network) as w:
        network.conditions("server", "site-2").set(bandwidth=4 * MIB)
        network.conditions("server", "site-3").set(bandwidth=MIB)
        attempts = [Attempt(), Attempt()]
        async with tasks() as group:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                state = await landed(w, job, ComputedSource(12 * MIB))
                sends = []
                for site, attempt in zip(w.sites[1:], attempts, strict=True):
                    tx = w.server.publish([FileSource(state)], [Slot(secrets.token_bytes(16))])
                    job.attach(tx)
                    job.attach(tx)
                    sends.append(tx)
                    call = site.run_transfer
                    transfer = site.transfer(tx.refs(0)[0], memory())
                    group.start_soon(attempt.run, partial(call, transfer))
                await anyio.sleep(1)
                del state
            assert anyio.current_time() == 1 + 5
        quick, slow = sends
        assert (await quick.wait()).status is OutcomeStatus.COMPLETED
        assert (await quick.wait()).settled_at < 1 + 5
        assert attempts[0].state is not None
        assert_pattern(attempts[0].state)
        outcome = await slow.wait()
        assert outcome.status is OutcomeStatus.ABORTED
        assert outcome.reason.startswith("deleted")
        assert isinstance(attempts[1].error, StreamoffError)
        assert job.report.ends == {ConsumerEnd.FINISHED: 2, ConsumerEnd.CUT: 1}
        assert list(tmp_path.iterdir()) == []
        w.assert_idle()


async def test_a_read_holds_the_root(tmp_path):
    """A read of a landed file in a foreign thread is waited for, whoever started it."""
    async with world() as w:
        gate = Gate()
        seen: list[bool] = []
        async with tasks(gate) as group:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                state = await landed(w, job)

                def read() -> None:
                    with job.guard():
                        gate()
                        seen.append(job.path.exists())

                group.start_soon(run_in_thread, read)
                await gate.reached()

                async def later() -> None:
                    await anyio.sleep(2)
                    gate.open()

                group.start_soon(later)
            assert seen == [True]
            assert 2 <= anyio.current_time() <= 2.02
        assert job.report.state is JobRootState.GONE
        with pytest.raises(JobClosedError):
            state["large"].materialize()


async def test_a_lazy_tensor_of_an_ended_job_says_so(tmp_path):
    """Reading a landed tensor after its job is a typed error that names the job, never a missing file."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            state = await landed(w, job)
            kept = state["large"]
        for read in (
            kept.materialize,
            lambda: list(kept.blocks(10)),
            lambda: state.tensor("small"),
        ):
            with pytest.raises(JobClosedError) as caught:
                read()
            assert caught.value.where["job"] == "job"
        with pytest.raises(JobClosedError):
            await kept.load()


async def test_a_thread_that_reads_block_by_block_stops_when_it_is_cut(tmp_path):
    """Blocking work that only reads is cut at its next read: it is not stuck, and the root goes."""
    async with world() as w:
        steps = 0
        async with open_job("job", w.server, scratch=tmp_path, drain_window=2) as job:
            state = await landed(w, job)

            async def tick() -> None:
                await anyio.sleep(0.01)

            def endless() -> None:
                from streamoff.runtime.threads import wait_from_thread

                nonlocal steps
                while True:
                    state["small"].materialize()
                    steps += 1
                    wait_from_thread(tick)

            consumer = job.start(run_in_thread, endless, name="reader")
        assert 2 <= anyio.current_time() <= 2.02
        assert steps > 100
        assert consumer.end is ConsumerEnd.CUT
        assert job.report.state is JobRootState.GONE
        assert [entry.name for entry in job.report.consumers] == ["reader"]


async def test_what_ignores_being_cut_is_stuck_and_nothing_is_removed_under_it(tmp_path):
    """A consumer that blocks in a thread delays nobody: the body returns, the root goes when the thread ends."""
    async with world() as w:
        gate = Gate()
        found: list[list[str]] = []
        async with tasks(gate):
            async with open_job("job", w.server, scratch=tmp_path, drain_window=1) as job:
                state = await landed(w, job)

                def block() -> None:
                    gate()
                    found.append(sorted(path.name for path in state.path.parent.iterdir()))

                job.start(run_in_thread, block, name="the blocked one")
                await gate.reached()
            assert anyio.current_time() == 1 + CUT_GRACE_SECONDS
            report = job.report
            assert report.state is JobRootState.STUCK
            assert not report.removed
            assert [(one.name, one.end) for one in report.consumers] == [
                ("the blocked one", ConsumerEnd.STUCK)
            ]
            async with open_job("job", w.server, scratch=tmp_path):
                pass  # the name is free
            await anyio.sleep(100)
            word = await read_control_file(job.path / STUCK_REPORT)
            assert word is not None
            assert json.loads(word)["stuck"] == ["the blocked one"]
            gate.open()
        await until_gone(job)
        assert found == [["payload.safetensors"]]
        assert job.report.removed
        assert list(tmp_path.iterdir()) == []


async def test_a_stuck_read_of_a_foreign_thread_keeps_the_root_until_it_ends(tmp_path):
    """A read that nobody can cut leaves the root stuck, and the root goes once the read has ended."""
    async with world() as w:
        gate = Gate()
        async with tasks(gate) as group:
            async with open_job("job", w.server, scratch=tmp_path, drain_window=0) as job:

                def read() -> None:
                    with job.guard():
                        gate()

                group.start_soon(run_in_thread, read)
                await gate.reached()
            assert job.report.state is JobRootState.STUCK
            await anyio.sleep(50)
            assert job.path.exists()
            gate.open()
        await until_gone(job)
        assert list(tmp_path.iterdir()) == []


async def test_a_download_that_is_stuck_in_a_thread_delays_nobody(tmp_path):
    """A landing that blocks past window and grace leaves the root stuck; its producer was told at once."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        async with tasks(gate) as group:
            async with open_job("job", w.server, scratch=tmp_path, drain_window=1) as job:
                terms = Terms(landing=lambda layout: Hooked(job.landing(layout), write=gate))
                group.start_soon(attempt.run, partial(job.download, ref, terms))
                await gate.reached()
                await anyio.sleep(7)
            assert anyio.current_time() == 7 + 1 + CUT_GRACE_SECONDS
            assert job.report.state is JobRootState.STUCK
            assert (await tx.wait()).settled_at == 7
            gate.open()
        await until_gone(job)
        assert list(tmp_path.iterdir()) == []
        w.assert_idle()


async def test_every_end_is_reported_and_the_body_returns_within_the_window(tmp_path):
    """Finished, cancelled, cut and stuck side by side: each is reported as what it was, in the time promised."""
    async with world(network=MemoryNetwork(bandwidth=MIB)) as w:
        gate = Gate()
        async with tasks(gate) as group:
            async with open_job("job", w.server, scratch=tmp_path, drain_window=3) as job:
                tx, ref = w.offer(ComputedSource(20 * MIB))
                attempt = Attempt()
                group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
                job.start(anyio.sleep, 1, name="quick")
                job.start(anyio.sleep_forever, name="endless")
                job.start(run_in_thread, gate, name="blocked")
                given_up = job.start(anyio.sleep_forever, name="given up")
                await anyio.sleep(0.5)
                given_up.cancel()
                assert await given_up.wait() is ConsumerEnd.CANCELLED
                left_at = anyio.current_time()
            assert anyio.current_time() - left_at <= 3 + 0.25
            assert job.report.ends == {
                ConsumerEnd.FINISHED: 1,
                ConsumerEnd.CANCELLED: 2,
                ConsumerEnd.CUT: 1,
                ConsumerEnd.STUCK: 1,
            }
            assert {entry.name: entry.end for entry in job.report.consumers} == {
                "given up": ConsumerEnd.CANCELLED,
                f"download {ref.id} from site-1": ConsumerEnd.CANCELLED,
                "endless": ConsumerEnd.CUT,
                "blocked": ConsumerEnd.STUCK,
            }
            gate.open()
        assert (await tx.wait()).status is OutcomeStatus.FAILED


async def test_a_report_names_only_so_many(tmp_path):
    """However many consumers are cut, the report names a bounded number of them and counts all."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path, drain_window=0) as job:
            for number in range(MAX_REPORTED + 50):
                job.start(anyio.sleep_forever, name=f"n{number}")
            await settled_tasks()
        assert len(job.report.consumers) == MAX_REPORTED
        assert job.report.ends == {ConsumerEnd.CUT: MAX_REPORTED + 50}


# --- failures and cancellation --------------------------------------------------------------------


async def test_a_failing_consumer_cuts_its_own_body_and_no_other(tmp_path):
    """The error of a consumer cancels the body of its job and is raised there; another job does not notice."""
    async with world() as w:

        async def broken() -> None:
            await anyio.sleep(2)
            raise KeyError("broken")

        async def other(job) -> None:
            await anyio.sleep(4)

        async with open_job("other", w.server, scratch=tmp_path) as bystander:
            quiet = bystander.start(other, bystander)
            reports = []

            async def body() -> None:
                async with open_job("job", w.server, scratch=tmp_path) as job:
                    reports.append(job)
                    job.start(broken)
                    await anyio.sleep_forever()

            with pytest.raises(KeyError, match="broken"):
                await body()
            assert anyio.current_time() == 2
            assert reports[0].report.ends == {ConsumerEnd.FAILED: 1}
            [entry] = reports[0].report.consumers
            assert "broken" in entry.error
            assert await quiet.wait() is ConsumerEnd.FINISHED


async def test_several_failures_are_raised_together(tmp_path):
    """Errors of several consumers, and of the body, come as one group, none of them lost."""
    async with world() as w:

        async def broken(number: int) -> None:
            raise ValueError(number)

        async def body(*numbers: int, error: Exception | None = None) -> None:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                for number in numbers:
                    job.start(broken, number)
                if error is not None:
                    raise error
                await anyio.sleep_forever()

        with pytest.raises(ExceptionGroup) as caught:
            await body(1, 2)
        assert sorted(str(error) for error in caught.value.exceptions) == ["1", "2"]
        with pytest.raises(ExceptionGroup) as caught:
            await body(1, error=KeyError("body"))
        assert [type(error) for error in caught.value.exceptions] == [KeyError, ValueError]


async def test_an_error_of_the_body_is_raised_as_it_is(tmp_path):
    """What the body raises comes out unwrapped, after the drain."""
    async with world() as w:

        async def body() -> None:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                job.start(anyio.sleep, 2)
                raise KeyError("body")

        with pytest.raises(KeyError, match="body"):
            await body()
        assert anyio.current_time() == 2
        assert list(tmp_path.iterdir()) == []


async def test_an_outer_cancel_cuts_the_body_and_leaves_the_window(tmp_path):
    """A cancelled controller leaves its body at once; its consumers get their window, its producers their cancels."""
    async with world(network=MemoryNetwork(bandwidth=MIB)) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        ends: list[float] = []
        with anyio.move_on_after(4.5) as scope:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                consumer = job.start(anyio.sleep, 6)
                try:
                    await job.download(ref, disk(job))
                finally:
                    ends.append(anyio.current_time())
        assert scope.cancelled_caught
        assert ends == [4.5]
        assert anyio.current_time() == 6
        assert consumer.end is ConsumerEnd.FINISHED
        assert (await tx.wait()).settled_at == 4.5
        assert list(tmp_path.iterdir()) == []
        w.assert_idle()


async def test_a_cancelled_controller_still_gets_its_cancels_out(tmp_path):
    """Endpoint and job inside a cancelled scope end cleanly, and every producer hears of it before the links go."""
    network = MemoryNetwork(latency=0.5, bandwidth=MIB)
    async with BaseEndpoint("site-1", transports=[network]) as site:
        with anyio.move_on_after(10) as scope:
            async with BaseEndpoint("server", transports=[network]) as server:
                await site.connect("server")
                tx = site.publish([ComputedSource(50 * MIB)], [Slot(secrets.token_bytes(16))])
                async with open_job("job", server, scratch=tmp_path) as job:
                    await job.download(tx.refs(0)[0], disk(job))
        assert scope.cancelled_caught
        outcome = await tx.wait()
        assert outcome.reason == "receiver_failed"
        assert outcome.settled_at == 10 + 0.5
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_cancellation_that_is_asyncios_own_breaks_no_drain(tmp_path):
    """A task that is cancelled the asyncio way while its job drains goes; the drain goes on, and the name is free."""
    async with world() as w:
        ends: list[float] = []

        async def slow() -> None:
            await anyio.sleep(3)
            ends.append(anyio.current_time())

        async def controller() -> None:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                job.start(slow)
                await anyio.sleep_forever()

        task = asyncio.ensure_future(controller())
        await anyio.sleep(1)
        task.cancel()
        await anyio.sleep(1)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert anyio.current_time() == 2
        await anyio.sleep(2)
        assert ends == [3]
        assert not w.server.open_jobs
        assert list(tmp_path.iterdir()) == []


async def test_a_cancelled_consumer_is_only_that(tmp_path):
    """Cancelling one consumer ends it and no other, and is no failure."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        consumer = job.start(anyio.sleep_forever)
        other = job.start(anyio.sleep, 5)
        await settled_tasks()
        consumer.cancel()
        assert await consumer.wait() is ConsumerEnd.CANCELLED
        assert await other.wait() is ConsumerEnd.FINISHED


async def test_a_consumer_has_a_result(tmp_path):
    """What a consumer returns can be had from it."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:

        async def answer() -> int:
            return 42

        consumer = job.start(answer)
        await consumer.wait()
        assert consumer.result == 42


# --- several jobs, and the endpoint ---------------------------------------------------------------


async def test_jobs_share_nothing_but_the_endpoint(tmp_path):
    """Of two jobs with downloads from one site, one ends and takes its own away; the other goes on."""
    async with world(network=MemoryNetwork(bandwidth=8 * MIB)) as w:
        async with open_job("b", w.server, scratch=tmp_path) as second, tasks() as group:
            stays = Attempt()
            kept_tx, kept = w.offer(ComputedSource(20 * MIB))
            async with open_job("a", w.server, scratch=tmp_path) as first:
                goes = Attempt()
                tx, ref = w.offer(ComputedSource(20 * MIB))
                group.start_soon(goes.run, partial(first.download, ref, disk(first)))
                group.start_soon(stays.run, partial(second.download, kept, disk(second)))
                await anyio.sleep(2)
            assert (await tx.wait()).status is OutcomeStatus.FAILED
            await stays.over.wait()
            assert stays.state is not None
            assert_pattern(stays.state)
            assert (await kept_tx.wait()).status is OutcomeStatus.COMPLETED
            assert first.report.removed
            assert second.state is JobRootState.OPEN
            stays.state = None
        assert list(tmp_path.iterdir()) == []


async def test_an_endpoint_that_closes_drains_its_jobs_together(tmp_path):
    """Jobs still open when their endpoint closes get their windows side by side, and what they serve with them."""
    network = MemoryNetwork()
    async with BaseEndpoint("site-1", transports=[network]) as site, tasks() as group:
        async with BaseEndpoint("server", transports=[network]) as server:
            await site.connect("server")
            network.conditions("server", "site-1").set(bandwidth=4 * MIB)
            ends: list[tuple[str, float]] = []
            leave = anyio.Event()

            async def controller(name: str, seconds: float) -> None:
                async with open_job(name, server, scratch=tmp_path, drain_window=4) as job:
                    job.start(anyio.sleep, seconds)
                    await leave.wait()
                ends.append((name, anyio.current_time()))

            async def serving() -> None:
                async with open_job("serving", server, scratch=tmp_path, drain_window=4) as job:
                    tx = site.publish([ComputedSource(8 * MIB)], [Slot(secrets.token_bytes(16))])
                    state = await job.download(tx.refs(0)[0], disk(job))
                    assert isinstance(state, LazyStateDict)
                    onward = server.publish([FileSource(state)], [Slot(secrets.token_bytes(16))])
                    job.attach(onward)
                    transfer = site.transfer(onward.refs(0)[0], memory())
                    back = await site.run_transfer(transfer)
                    assert_pattern(back)
                    ends.append(("served", anyio.current_time()))
                    await leave.wait()

            group.start_soon(controller, "a", 100)
            group.start_soon(controller, "b", 100)
            group.start_soon(serving)
            await anyio.sleep(1)
        assert anyio.current_time() == 1 + 4
        assert [name for name, _ in ends] == ["served"]
        leave.set()
    assert list(tmp_path.iterdir()) == []


async def test_nothing_starts_on_an_endpoint_that_closes(tmp_path):
    """While an endpoint closes it opens no job, publishes nothing and downloads nothing."""
    refused: list[str] = []
    started, leave = anyio.Event(), anyio.Event()
    network = MemoryNetwork()

    async def late(server: BaseEndpoint, ref: Ref) -> None:
        await anyio.sleep(1)
        with pytest.raises(UsageError, match="closing"):
            server.transfer(ref, memory())
        refused.append("download")
        with pytest.raises(UsageError, match="closing"):
            await open_job("late", server, scratch=tmp_path).__aenter__()
        refused.append("job")

    async def controller(server: BaseEndpoint, ref: Ref) -> None:
        async with open_job("job", server, scratch=tmp_path) as job:
            job.start(late, server, ref)
            started.set()
            await leave.wait()

    async with BaseEndpoint("site-1", transports=[network]) as site, tasks() as group:
        async with BaseEndpoint("server", transports=[network]) as server:
            await site.connect("server")
            tx = site.publish([ComputedSource(10)], [Slot(secrets.token_bytes(16))])
            group.start_soon(controller, server, tx.refs(0)[0])
            await started.wait()
        with pytest.raises(UsageError, match="closing"):
            server.publish([ComputedSource(10)], [Slot(secrets.token_bytes(16))])
        leave.set()
        tx.cancel()
    assert refused == ["download", "job"]
    assert list(tmp_path.iterdir()) == []


async def test_an_ended_job_keeps_nothing_alive(tmp_path):
    """Tensors that a job sent, and what it landed, are let go with it."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            source, references = watched(state_dict(5))
            tx, ref = w.offer(source)
            del source
            state = await job.download(ref, disk(job))
            state.release()
            await tx.wait()
            assert soon(lambda: job.ledger.used == 0)
        assert all_dead(references)


async def test_a_state_that_nobody_keeps_frees_its_disk_at_once(tmp_path):
    """When the last reference to a landed payload goes, its file goes and its charge is returned, in an open job."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        state = await landed(w, job, state_dict(3))
        assert job.ledger.used > 3 * MIB
        del state
        assert soon(lambda: job.ledger.used == 0)
        assert [path.name for path in job.path.iterdir()] == [".lease"]


async def test_the_lease_is_kept_while_a_job_lives(tmp_path):
    """An open job says every thirty seconds that it is alive, also while it is stuck."""
    async with world() as w:
        gate = Gate()
        async with tasks(gate):
            async with open_job("job", w.server, scratch=tmp_path, drain_window=0) as job:
                lease = job.path / ".lease"
                before = lease.stat().st_mtime_ns
                await anyio.sleep(31)
                between = lease.stat().st_mtime_ns
                assert between > before
                job.start(run_in_thread, gate)
                await gate.reached()
            assert job.state is JobRootState.STUCK
            await anyio.sleep(31)
            assert lease.stat().st_mtime_ns > between
            gate.open()


async def test_user_code_that_holds_every_thread_starves_no_transfer(tmp_path):
    """With all forty default threads blocked by user code, jobs open, transfers finish and drains end."""
    async with world() as w:
        gate = Gate()
        async with tasks(gate) as group:
            limiter = anyio.to_thread.current_default_thread_limiter()
            for _ in range(int(limiter.total_tokens)):
                group.start_soon(run_in_thread, gate)
            while gate.waiting < limiter.total_tokens:
                await anyio.lowlevel.checkpoint()
            async with open_job("job", w.server, scratch=tmp_path) as job:
                tx, ref = w.offer(ComputedSource(9 * MIB))
                state = await job.download(ref, disk(job))
                await state["w"].load()  # type: ignore[index]
                assert (await tx.wait()).status is OutcomeStatus.COMPLETED
                assert limiter.available_tokens == 0
            assert job.report.removed
            assert anyio.current_time() == 0
            gate.open()
