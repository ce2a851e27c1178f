"""Disks that are full and quotas that are spent: said with numbers, told to the producer, and of no concern to others."""

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from streamoff.errors import NoSpaceError, QuotaExceededError, StreamoffError
from streamoff.runtime.downloading import Terms
from streamoff.runtime.jobs import open_job
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.janitor import JANITOR
from streamoff.types import MIB, OutcomeStatus

from .world import (
    Attempt,
    ComputedSource,
    Hooked,
    assert_pattern,
    assert_same,
    disk,
    files,
    memory,
    state_dict,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

DISK = 16 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},nr_inodes=64", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


async def swept() -> None:
    """Wait for the janitor."""
    await run_in_thread(JANITOR.idle, 10.0)


def assert_told(error: BaseException | None, tx_outcome, *, needed: int) -> None:
    """The error has the numbers and the names; the producer was told in the receiver's words."""
    assert isinstance(error, StreamoffError)
    assert error.where["site"] == "site-1"
    assert error.where["ref"]
    assert error.where["needed"] == needed
    assert tx_outcome.status is OutcomeStatus.FAILED
    [verdict] = tx_outcome.slots["server"].values()
    assert error.what in verdict.reason


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
            state = await job.download(ref, disk(job))
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
        open_job("job", w.server, scratch=tmp_path, quota=21 * MIB) as job,
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


async def test_a_full_disk_is_an_error_with_numbers(small_disk):
    """A payload that the disk has no room for fails with site, ref, needed and free bytes; nothing is left."""
    async with world() as w:
        async with open_job("job", w.server, scratch=small_disk, ram_backed="allow") as job:
            tx, ref = w.offer(ComputedSource(20 * MIB))
            attempt = Attempt()
            await attempt.run(partial(job.download, ref, disk(job)))
            assert isinstance(attempt.error, NoSpaceError)
            assert_told(attempt.error, await tx.wait(), needed=ref.size)
            free = attempt.error.where["free"]
            assert isinstance(free, int)
            assert 15 * MIB < free < DISK
            await swept()
            assert files(job.path) == [".lease"]
            other, fits = w.offer(ComputedSource(10 * MIB))
            assert_pattern(await job.download(fits, disk(job)))
            assert (await other.wait()).status is OutcomeStatus.COMPLETED
        assert list(small_disk.iterdir()) == []


async def test_a_disk_that_fills_up_meanwhile_ends_one_download_and_no_other(small_disk):
    """Where somebody else takes the room between the check and the write, one download fails, others go on."""
    async with (
        world(sites=2) as w,
        open_job("job", w.server, scratch=small_disk, ram_backed="allow") as job,
    ):
        hog = small_disk / "somebody else's"

        def fill(_layout: object) -> None:
            with hog.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 12 * MIB)

        tx, ref = w.offer(ComputedSource(9 * MIB))
        other, spare = w.offer(ComputedSource(9 * MIB), site=w.sites[1])
        terms = Terms(landing=lambda layout: Hooked(job.landing(layout), open=fill))
        full, fine = Attempt(), Attempt()
        async with tasks() as group:
            group.start_soon(full.run, partial(job.download, ref, terms))
            group.start_soon(fine.run, partial(job.download, spare, memory()))
        assert isinstance(full.error, NoSpaceError)
        assert_told(full.error, await tx.wait(), needed=ref.size)
        assert fine.state is not None
        assert_pattern(fine.state)
        assert (await other.wait()).status is OutcomeStatus.COMPLETED
        hog.unlink()
        await swept()
        assert files(job.path) == [".lease"]
        assert job.ledger.used == 0
        w.assert_idle()


async def test_a_disk_without_inodes_is_a_full_disk(small_disk):
    """Where files cannot be made any more the error says so, and the job goes on when they can."""
    async with (
        world() as w,
        open_job("job", w.server, scratch=small_disk, ram_backed="allow") as job,
    ):
        crumbs: list[Path] = []
        try:
            while True:
                crumb = small_disk / f"crumb-{len(crumbs)}"
                crumb.touch()
                crumbs.append(crumb)
        except OSError:
            pass
        tx, ref = w.offer(state_dict())
        attempt = Attempt()
        await attempt.run(partial(job.download, ref, disk(job)))
        assert isinstance(attempt.error, NoSpaceError)
        assert "inodes" in str(attempt.error)
        assert (await tx.wait()).status is OutcomeStatus.FAILED
        for crumb in crumbs:
            crumb.unlink()
        assert job.ledger.used == 0
        _, again = w.offer(state_dict())
        assert_same(await job.download(again, disk(job)), state_dict())


async def test_a_disk_that_cannot_be_written_ends_a_download_typed(tmp_path):
    """A root that somebody removed is a typed error, and the drain still ends."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path, drain_window=1) as job:
            job.path.rename(tmp_path / "moved away")
            tx, ref = w.offer(state_dict())
            attempt = Attempt()
            await attempt.run(partial(job.download, ref, disk(job)))
            assert isinstance(attempt.error, StreamoffError)
            assert (await tx.wait()).status is OutcomeStatus.FAILED
        assert anyio.current_time() == 0
        await run_in_thread(
            partial(subprocess.run, ["rm", "-r", str(tmp_path / "moved away")], check=True)
        )
