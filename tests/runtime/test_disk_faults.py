"""Disks that are full and quotas that are spent: said with numbers, told to the producer, and of no concern to others."""

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from streamoff.errors import NoSpaceError, StreamoffError
from streamoff.runtime.downloading import Terms
from streamoff.runtime.jobs import ConsumerEnd, open_job
from streamoff.runtime.threads import run_in_thread
from streamoff.types import MIB, OutcomeStatus

from ..disks import crumbled, fill, image, tmpfs
from .world import (
    Attempt,
    ComputedSource,
    Gate,
    Hooked,
    assert_pattern,
    assert_same,
    assert_told,
    disk,
    files,
    memory,
    not_the_first,
    state_dict,
    swept,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

DISK = 16 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MiB."""
    with tmpfs(tmp_path / "disk", f"size={DISK},nr_inodes=64") as mount:
        yield mount


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
        crumbs = crumbled(small_disk)
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


@pytest.mark.parametrize("how", ["caller", "job"])
async def test_a_full_disk_is_the_reason_also_when_the_run_is_aborted_meanwhile(tmp_path, how):
    """A thread that finds the disk full while its download is being cancelled is what gets reported."""
    gate, attempt = Gate(), Attempt()
    with image(tmp_path / "disk", tmp_path / "image", "ext2") as mount:
        async with world() as w, tasks(gate) as group:
            async with open_job("job", w.server, scratch=mount) as job:
                tx, ref = w.offer(ComputedSource(9 * MIB))
                terms = Terms(
                    landing=lambda layout: Hooked(job.landing(layout), write=not_the_first(gate))
                )
                group.start_soon(attempt.run, partial(job.download, ref, terms))
                await gate.reached()
                await run_in_thread(fill, mount)
                if how == "job":
                    job.close()
                else:
                    attempt.scope.cancel()
                assert (await tx.wait()).status is OutcomeStatus.FAILED  # the source knows already
                assert not attempt.over.is_set()
                gate.open()
                await attempt.over.wait()
            [consumer] = job.report.consumers
            assert consumer.end is ConsumerEnd.FAILED
            assert consumer.error == "cannot write: the file system is full"
            assert job.report.removed
            if how == "job":
                assert isinstance(attempt.error, NoSpaceError)
                assert attempt.error.where["needed"] == 4 * MIB
                assert str(attempt.error.where["path"]).endswith("payload.safetensors.part")
            else:
                assert attempt.cancelled
        w.assert_idle()
