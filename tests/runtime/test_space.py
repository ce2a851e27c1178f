"""Quota and disk space under concurrency: shared, waited for within bounds, and never a deadlock."""

from __future__ import annotations

import errno
import itertools
import logging
from functools import partial
from typing import Any

import anyio
import pytest

from streamoff.errors import (
    NoSpaceError,
    QuotaExceededError,
    SourceLostError,
    StreamoffError,
    UsageError,
)
from streamoff.runtime.downloading import Terms
from streamoff.runtime.jobs import Job, open_job
from streamoff.runtime.space import GRACE_SECONDS, LOOK_SECONDS, NOTICE_SECONDS, SPACE_WAIT_SECONDS
from streamoff.runtime.threads import run_in_thread
from streamoff.tensors.state import State
from streamoff.types import MIB, Budgets, OutcomeStatus, Ref

from ..disks import crumbled, fill, tmpfs
from .world import (
    Attempt,
    ComputedSource,
    Hooked,
    assert_pattern,
    assert_same,
    assert_told,
    disk,
    files,
    settled_tasks,
    state_dict,
    swept,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_a_payload_beyond_the_quota_is_refused_before_it_is_written(tmp_path):
    """What the job's quota does not allow fails with the numbers once its header is known, and leaves no byte."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        attempt = Attempt()
        await attempt.run(partial(job.download, ref, disk(job)))
        assert isinstance(attempt.error, QuotaExceededError)
        assert_told(attempt.error, await tx.wait(), needed=ref.size)
        assert attempt.error.where["quota"] == 5 * MIB
        assert w.site.publisher.statistics().bytes_served <= 4 * MIB
        assert files(job.path) == [".lease"]
        assert job.ledger.used == 0
        other, fits = w.offer(state_dict(3))
        assert_same(await job.download(fits, disk(job)), state_dict(3))
        assert (await other.wait()).status is OutcomeStatus.COMPLETED


async def test_a_quota_is_free_again_when_what_it_was_for_is_gone(tmp_path):
    """Updates that are released one by one fit a quota that holds one of them; so do failed downloads."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=4 * MIB) as job:
        for seed in range(5):
            _, ref = w.offer(state_dict(3, seed))
            state = await job.download(ref, disk(job, space=None))
            assert_same(state, state_dict(3, seed))
            state.release()
            await swept()
        assert job.ledger.peak < 4 * MIB
        assert job.report.bytes_peak == job.ledger.peak
        assert job.report.bytes_landed > 15 * MIB


async def test_a_quota_is_shared_by_what_lands_at_once(tmp_path):
    """Of three updates that land together, where two fit, two arrive and one is refused."""
    async with (
        world(sites=3) as w,
        open_job("job", w.server, scratch=tmp_path, quota=21 * MIB, space_wait=0) as job,
    ):
        offers = [w.offer(ComputedSource(10 * MIB), site=site) for site in w.sites]
        attempts = [Attempt() for _ in offers]
        async with tasks() as group:
            for attempt, (_, ref) in zip(attempts, offers, strict=True):
                group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
        errors = [attempt.error for attempt in attempts if attempt.error is not None]
        assert [type(error) for error in errors] == [QuotaExceededError]
        for attempt in attempts:
            if attempt.state is not None:
                assert_pattern(attempt.state)
        statuses = sorted([(await tx.wait()).status for tx, _ in offers])
        assert statuses == ["completed", "completed", "failed"]
        assert job.ledger.peak <= 21 * MIB


async def test_a_quota_that_is_used_up_is_one_jobs_alone(tmp_path):
    """While one job's quota is full, and an update of it refused, another job lands what its own quota allows."""
    async with (
        world() as w,
        open_job("full", w.server, scratch=tmp_path, quota=5 * MIB, space_wait=0) as spent,
        open_job("free", w.server, scratch=tmp_path, quota=5 * MIB, space_wait=0) as spare,
    ):
        kept = await spent.download(w.offer(state_dict(4))[1], disk(spent))
        with pytest.raises(QuotaExceededError):
            await spent.download(w.offer(state_dict(3))[1], disk(spent))
        state = await spare.download(w.offer(state_dict(3))[1], disk(spare))
        assert_same(state, state_dict(3))
        assert_same(kept, state_dict(4))
        assert spent.ledger.used > 4 * MIB > spare.ledger.used > 3 * MIB


# --- waiting --------------------------------------------------------------------------------------


async def test_a_payload_waits_until_space_is_released(tmp_path):
    """What a quota has no room for is pulled as soon as there is; its source was asked to be patient, and was."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=13 * MIB) as job:
        _, ref = w.offer(ComputedSource(10 * MIB))
        held = await job.download(ref, disk(job))
        tx, ref = w.offer(ComputedSource(10 * MIB))
        late = Attempt()
        async with tasks() as group:
            group.start_soon(late.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(25)  # more than the receiver's budget for a stall
            assert not late.over.is_set()
            assert len(job.space) == 1
            [seconds] = tx.record.held
            assert seconds > 0
            held.release()
        assert late.state is not None
        assert_pattern(late.state)
        assert 25 <= late.ended <= 25 + 2 * NOTICE_SECONDS
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert job.ledger.peak <= 13 * MIB
        w.assert_idle()


async def test_who_waits_holds_nothing_that_others_need(tmp_path):
    """With more waiting than there are buffers and threads, other transfers run as if alone."""
    async with (
        world(sites=12) as w,
        open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job,
    ):
        _, ref = w.offer(state_dict(4))
        held = await job.download(ref, disk(job))
        offers = [w.offer(ComputedSource(4 * MIB), site=site) for site in w.sites]
        attempts = [Attempt() for _ in offers]
        async with tasks() as group:
            for attempt, (_, ref) in zip(attempts, offers, strict=True):
                group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(1)
            assert len(job.space) == len(offers)
            resources = w.server.resources.statistics()
            assert resources.buffers_lent == resources.landing_threads == 0
            assert resources.active_downloads == 0
            began = anyio.current_time()
            _, other = w.offer(ComputedSource(40 * MIB))
            assert_pattern(await w.download(other))
            assert anyio.current_time() == began
            for attempt in attempts:
                attempt.scope.cancel()
        assert all(attempt.cancelled for attempt in attempts)
        held.release()
        for tx, _ in offers:
            assert (await tx.wait()).status is OutcomeStatus.FAILED
        assert files(job.path) in ([".lease"], [".lease", "transfer-000001/payload.safetensors"])
        w.assert_idle()


@pytest.mark.parametrize("patience", [0, 7.5, SPACE_WAIT_SECONDS])
async def test_waiting_is_bounded_and_ends_with_the_numbers(tmp_path, patience):
    """When nobody releases anything the payload fails at the end of its patience, typed; 0 is at once."""
    async with (
        world() as w,
        open_job("job", w.server, scratch=tmp_path, quota=5 * MIB, space_wait=patience) as job,
    ):
        _, ref = w.offer(state_dict(4))
        held = await job.download(ref, disk(job))
        tx, ref = w.offer(ComputedSource(4 * MIB))
        attempt = Attempt()
        await attempt.run(partial(job.download, ref, disk(job)))
        assert attempt.seconds == patience
        assert isinstance(attempt.error, QuotaExceededError)
        assert_told(attempt.error, await tx.wait(), needed=ref.size)
        assert attempt.error.where["quota"] == 5 * MIB
        assert attempt.error.where["used"] == job.ledger.used == held.layout.size
        assert attempt.error.where["path"] == job.path
        assert attempt.error.where.get("waited") == (f"{patience:g} s" if patience else None)
        assert len(job.space) == 0
        assert_same(held, state_dict(4))
        w.assert_idle()


async def test_what_never_fits_is_refused_at_once(tmp_path):
    """More than the whole quota, or the whole disk, is not waited for, and no byte of it is pulled twice."""
    with tmpfs(tmp_path / "disk", "size=16m") as mount:
        for quota, error in ((5 * MIB, QuotaExceededError), (None, NoSpaceError)):
            async with (
                world() as w,
                open_job("job", w.server, scratch=mount, quota=quota, ram_backed="allow") as job,
            ):
                tx, ref = w.offer(ComputedSource(20 * MIB))
                attempt = Attempt()
                await attempt.run(partial(job.download, ref, disk(job)))
                assert attempt.seconds == 0
                assert type(attempt.error) is error
                assert_told(attempt.error, await tx.wait(), needed=ref.size)
                assert "waited" not in attempt.error.where
                assert w.site.publisher.statistics().bytes_served <= 4 * MIB


async def test_two_that_wait_for_each_other_do_not_for_ever(tmp_path):
    """Each of two messages has one payload here and waits for the other's space: one gives up, one is whole."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=14 * MIB) as job:
        halves = anyio.Event()
        here: list[State] = []

        async def message() -> list[State]:
            """Two payloads, or none."""
            states: list[State] = []
            try:
                states.append(await job.download(w.offer(ComputedSource(6 * MIB))[1], disk(job)))
                here.append(states[0])
                if len(here) == 2:
                    halves.set()
                await halves.wait()
                states.append(await job.download(w.offer(ComputedSource(6 * MIB))[1], disk(job)))
            except BaseException:
                for state in states:
                    state.release()
                raise
            return states

        whole: list[list[State]] = []

        async def keep() -> None:
            whole.append(await message())

        attempts = [Attempt(), Attempt()]
        async with tasks() as group:
            for attempt in attempts:
                group.start_soon(attempt.run, keep)
        [error] = [attempt.error for attempt in attempts if attempt.error is not None]
        assert isinstance(error, QuotaExceededError)
        [states] = whole
        for state in states:
            assert_pattern(state)
        ends = sorted(attempt.ended for attempt in attempts)
        assert ends[0] == SPACE_WAIT_SECONDS
        assert ends[1] <= SPACE_WAIT_SECONDS + 2 * NOTICE_SECONDS


async def test_a_line_in_which_nothing_moves_ends_together(tmp_path):
    """If what one gives up frees nothing, the others wait a second longer, and not one second each."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job:
        _, ref = w.offer(state_dict(4))
        held = await job.download(ref, disk(job))
        attempts = [Attempt() for _ in range(20)]
        async with tasks() as group:
            for attempt in attempts:
                _, ref = w.offer(ComputedSource(4 * MIB))
                group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
        assert all(isinstance(attempt.error, QuotaExceededError) for attempt in attempts)
        assert sorted({attempt.ended for attempt in attempts}) == [
            SPACE_WAIT_SECONDS,
            SPACE_WAIT_SECONDS + GRACE_SECONDS,
        ]
        held.release()


async def test_a_small_payload_passes_a_large_one_that_waits(tmp_path):
    """What fits is never held up by what does not: a message that the large one waits for may need it."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=10 * MIB) as job:
        _, ref = w.offer(ComputedSource(5 * MIB))
        held = await job.download(ref, disk(job))
        large, middle = Attempt(), Attempt()
        async with tasks() as group:
            _, ref = w.offer(ComputedSource(9 * MIB))
            group.start_soon(large.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(1)
            _, ref = w.offer(ComputedSource(4 * MIB))
            group.start_soon(middle.run, partial(job.download, ref, disk(job)))
            await middle.over.wait()
            assert middle.ended == 1
            assert middle.state is not None
            held.release()
            await anyio.sleep(3)
            assert not large.over.is_set()
            middle.state.release()
        assert large.state is not None
        assert_pattern(large.state)
        assert 4 <= large.ended <= 4 + 2 * NOTICE_SECONDS


async def test_many_more_updates_than_fit_take_turns(tmp_path):
    """Twenty updates through a quota of three, each released when it was read: all arrive, the quota holds."""
    async with (
        world(sites=20) as w,
        open_job("job", w.server, scratch=tmp_path, quota=7 * MIB) as job,
    ):
        arrived: list[str] = []

        async def use(ref: Ref) -> None:
            state = await job.download(ref, disk(job))
            await anyio.sleep(0.5)
            assert_pattern(state)
            arrived.append(ref.source)
            state.release()

        async with tasks() as group:
            for site in w.sites:
                group.start_soon(use, w.offer(ComputedSource(2 * MIB), site=site)[1])
        assert sorted(arrived) == sorted(str(site.address) for site in w.sites)
        assert job.ledger.peak <= 7 * MIB
        assert anyio.current_time() < SPACE_WAIT_SECONDS
        await swept()
        assert (job.ledger.used, files(job.path)) == (0, [".lease"])


async def test_disk_space_that_somebody_else_frees_is_noticed(tmp_path):
    """On a full disk a payload waits for whoever makes room, ours or not."""
    with tmpfs(tmp_path / "disk", "size=16m") as mount:
        async with (
            world() as w,
            open_job("job", w.server, scratch=mount, ram_backed="allow") as job,
        ):
            hog = await run_in_thread(partial(fill, mount, but=4 * MIB))
            tx, ref = w.offer(ComputedSource(10 * MIB))
            attempt = Attempt()
            async with tasks() as group:
                group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
                await anyio.sleep(12.5)
                assert len(job.space) == 1
                hog.unlink()
            assert attempt.state is not None
            assert_pattern(attempt.state)
            assert 12.5 <= attempt.ended <= 12.5 + LOOK_SECONDS + NOTICE_SECONDS
            assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_two_jobs_share_a_disk(tmp_path):
    """What one job releases is room for another that waits."""
    with tmpfs(tmp_path / "disk", "size=16m") as mount:
        async with (
            world() as w,
            open_job("one", w.server, scratch=mount, ram_backed="allow") as one,
            open_job("other", w.server, scratch=mount, ram_backed="allow") as other,
        ):
            held = await one.download(w.offer(ComputedSource(9 * MIB))[1], disk(one))
            attempt = Attempt()
            async with tasks() as group:
                _, ref = w.offer(ComputedSource(9 * MIB))
                group.start_soon(attempt.run, partial(other.download, ref, disk(other)))
                await anyio.sleep(3)
                held.release()
            assert attempt.state is not None
            assert_pattern(attempt.state)


async def test_inodes_are_waited_for_like_bytes(tmp_path):
    """Where no file can be made any more a payload waits, and goes on when one can."""
    with tmpfs(tmp_path / "disk", "size=16m,nr_inodes=64") as mount:
        async with (
            world() as w,
            open_job("job", w.server, scratch=mount, ram_backed="allow") as job,
        ):
            crumbs = crumbled(mount)
            _, ref = w.offer(state_dict())
            attempt = Attempt()
            async with tasks() as group:
                group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
                await anyio.sleep(5)
                assert not attempt.over.is_set()
                for crumb in crumbs:
                    crumb.unlink()
            assert attempt.state is not None
            assert_same(attempt.state, state_dict())


async def test_attempts_are_few_and_so_are_log_lines(tmp_path, caplog):
    """A disk that says it has room and refuses is tried a bounded number of times, with pauses, and logged once."""
    caplog.set_level(logging.DEBUG)
    tries: list[float] = []

    def refuse(_layout: object) -> None:
        tries.append(anyio.from_thread.run_sync(anyio.current_time))
        raise NoSpaceError(
            "cannot make room: the user's disk quota is spent",
            needed=4 * MIB,
            code=errno.errorcode[errno.EDQUOT],
        )

    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(ComputedSource(4 * MIB))
        terms = Terms(
            landing=lambda layout: Hooked(job.landing(layout), open=refuse), space=job.space
        )
        attempt = Attempt()
        await attempt.run(partial(job.download, ref, terms))
        assert isinstance(attempt.error, NoSpaceError)
        assert_told(attempt.error, await tx.wait(), needed=4 * MIB)
        assert attempt.seconds == SPACE_WAIT_SECONDS
        assert len(tries) <= 10
        pauses = [later - sooner for sooner, later in itertools.pairwise(tries)]
        assert pauses[-1] > 3
        lines = [line for line in caplog.messages if ref.id in line]
        assert [("waits for space" in line) for line in lines].count(True) == 1
        assert len(lines) <= 3
        await swept()
        assert (job.ledger.used, files(job.path)) == (0, [".lease"])


# --- what befalls those who wait ------------------------------------------------------------------


async def full(job: Job, w: Any) -> State:
    """Use up the quota of a job."""
    return await job.download(w.offer(state_dict(4))[1], disk(job))


async def test_a_download_that_waits_can_be_cancelled(tmp_path):
    """Giving up while it waits is immediate, tells the source, and leaves nothing."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job:
        held = await full(job, w)
        tx, ref = w.offer(ComputedSource(4 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(3)
            attempt.scope.cancel()
        assert attempt.cancelled
        assert attempt.ended == pytest.approx(3)
        outcome = await tx.wait()
        [verdict] = outcome.slots["server"].values()
        assert (outcome.status, verdict.reason) == (
            OutcomeStatus.FAILED,
            "cancelled: the receiver was cancelled",
        )
        assert len(job.space) == 0
        held.release()
        w.assert_idle()


async def test_a_job_that_closes_ends_what_waits(tmp_path):
    """A drain does not wait for space: the download is cut at once and the root goes."""
    async with world() as w:
        attempt = Attempt()
        async with tasks() as group:
            async with open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job:
                held = await full(job, w)
                tx, ref = w.offer(ComputedSource(4 * MIB))
                group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
                await anyio.sleep(3)
            assert anyio.current_time() == pytest.approx(3)
        assert isinstance(attempt.error, StreamoffError)
        assert (await tx.wait()).status is OutcomeStatus.FAILED
        assert list(tmp_path.iterdir()) == []
        del held
        w.assert_idle()


async def test_a_link_that_is_lost_meanwhile_costs_what_it_always_does(tmp_path):
    """While a payload waits its source can go: that is the error, at the end of the grace for links."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job:
        held = await full(job, w)
        _, ref = w.offer(ComputedSource(4 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(
                attempt.run,
                partial(job.download, ref, disk(job, budgets=Budgets(reconnect_grace=5))),
            )
            await anyio.sleep(3)
            w.network.cut("site-1", "server")
        assert isinstance(attempt.error, SourceLostError)
        assert attempt.ended == pytest.approx(8)
        held.release()


async def test_a_link_that_comes_back_meanwhile_changes_nothing(tmp_path):
    """A payload that waits survives the loss of its link, pulls nothing before its turn, and then lands whole."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job:
        held = await full(job, w)
        tx, ref = w.offer(ComputedSource(4 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(3)
            w.network.cut("site-1", "server")
            await anyio.sleep(1)
            w.network.mend("site-1", "server")
            await anyio.sleep(10)
            served = w.site.publisher.statistics().bytes_served
            await anyio.sleep(5)
            assert w.site.publisher.statistics().bytes_served == served
            assert not attempt.over.is_set()
            held.release()
        assert attempt.state is not None
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


@pytest.mark.parametrize("which", ["hold", "deadline"])
async def test_whatever_ends_the_waiting_the_reason_is_the_space(tmp_path, which):
    """A producer's patience or an absolute deadline that ends sooner does not hide what was waited for."""
    budgets = {
        "hold": Budgets(hold=10, stall=2),
        "deadline": Budgets(deadline=12),
    }[which]
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job:
        held = await full(job, w)
        tx, ref = w.offer(ComputedSource(4 * MIB), budgets=budgets)
        attempt = Attempt()
        await attempt.run(partial(job.download, ref, disk(job, budgets=budgets)))
        assert isinstance(attempt.error, QuotaExceededError)
        assert attempt.seconds <= 14
        assert (await tx.wait()).status is not OutcomeStatus.COMPLETED
        held.release()
        w.assert_idle()


async def test_a_payload_in_several_chunks_waits_with_none_of_them(tmp_path):
    """What was pulled along with the header is given back and pulled again: the bytes arrive whole."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=40 * MIB) as job:
        _, ref = w.offer(ComputedSource(30 * MIB))
        held = await job.download(ref, disk(job))
        _, ref = w.offer(state_dict(20, seed=2))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(1)
            await settled_tasks()
            assert w.server.resources.statistics().buffers_lent == 0
            held.release()
        assert attempt.state is not None
        assert_same(attempt.state, state_dict(20, seed=2))


async def test_a_subset_waits_for_what_it_needs(tmp_path):
    """Of a payload that does not fit, the tensors wanted may: only they are charged and waited for."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path, quota=5 * MIB) as job:
        held = await full(job, w)
        _, ref = w.offer(state_dict(4, seed=3))
        state = await job.download(ref, disk(job, names=["small", "scalar"]))
        assert anyio.current_time() == 0
        assert set(state.layout.names) == {"small", "scalar"}
        held.release()


@pytest.mark.parametrize("wrong", [-1, float("inf"), float("nan"), True])
async def test_what_is_no_patience_is_refused(tmp_path, wrong):
    """A job is not opened with a time that is none."""
    async with world() as w:
        with pytest.raises(UsageError, match="space_wait"):
            open_job("job", w.server, scratch=tmp_path, space_wait=wrong)
    assert list(tmp_path.iterdir()) == []
