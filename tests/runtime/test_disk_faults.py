"""Disks that are full and quotas that are spent: said with numbers, told to the producer, and of no concern to others."""

import errno
import logging
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from streamoff.errors import LandingError, NoSpaceError, ScratchError, StreamoffError
from streamoff.runtime.downloading import Terms
from streamoff.runtime.jobs import ConsumerEnd, open_job
from streamoff.runtime.space import SPACE_WAIT_SECONDS
from streamoff.runtime.threads import run_in_thread
from streamoff.tensors.landing import Landing
from streamoff.tensors.layout import Layout
from streamoff.tensors.lazy import LazyStateDict
from streamoff.types import MIB, OutcomeStatus, Ref, Slot, Verdict

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
GIB = 1024 * MIB


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


async def test_a_payload_beyond_the_disk_is_refused_before_a_byte_of_it_lands(small_disk):
    """Ten GiB for sixteen MiB: no file is made, no patience helps, and both numbers are told."""
    async with (
        world() as w,
        open_job("job", w.server, scratch=small_disk, ram_backed="allow") as job,
    ):
        tx, ref = w.offer(ComputedSource(10 * GIB))
        attempt = Attempt()
        await attempt.run(partial(job.download, ref, disk(job)))
        assert isinstance(attempt.error, NoSpaceError)
        assert_told(attempt.error, await tx.wait(), needed=ref.size)
        free = attempt.error.where["free"]
        assert isinstance(free, int)
        assert free <= DISK
        assert attempt.error.where["path"] == job.path
        assert attempt.seconds == 0
        assert files(job.path) == [".lease"]
        assert not (job.path / "transfer-000001").exists()
        assert w.site.publisher.statistics().bytes_served <= 4 * MIB  # the header came in a chunk


async def test_where_the_room_is_unknown_the_disk_has_the_last_word(small_disk, monkeypatch):
    """A disk that cannot be asked is tried: it refuses itself, typed, and what fits lands."""

    def unknown(_path: object) -> os.statvfs_result:
        raise OSError(errno.ENOSYS, "Function not implemented")

    async with (
        world() as w,
        open_job("job", w.server, scratch=small_disk, ram_backed="allow", space_wait=0) as job,
    ):
        monkeypatch.setattr(os, "statvfs", unknown)
        tx, ref = w.offer(ComputedSource(20 * MIB))
        attempt = Attempt()
        await attempt.run(partial(job.download, ref, disk(job)))
        assert isinstance(attempt.error, NoSpaceError)
        assert_told(attempt.error, await tx.wait(), needed=ref.size)
        assert attempt.error.where["code"] == "ENOSPC"
        assert "free" not in attempt.error.where
        await swept()
        assert (job.ledger.used, files(job.path)) == (0, [".lease"])
        _, fits = w.offer(ComputedSource(10 * MIB))
        assert_pattern(await job.download(fits, disk(job)))


async def test_a_disk_that_stays_full_is_not_stormed(small_disk, caplog):
    """While the disk is full a payload is pulled once, tried a few times, told in two lines, and given up in time."""
    caplog.set_level(logging.DEBUG)
    tries: list[Layout] = []
    async with (
        world() as w,
        open_job("job", w.server, scratch=small_disk, ram_backed="allow") as job,
    ):
        hog = await run_in_thread(fill, small_disk)

        def landing(layout: Layout) -> Landing:
            tries.append(layout)
            return job.landing(layout)

        tx, ref = w.offer(ComputedSource(8 * MIB))
        attempt = Attempt()
        await attempt.run(partial(job.download, ref, Terms(landing=landing, space=job.space)))
        assert isinstance(attempt.error, NoSpaceError)
        assert_told(attempt.error, await tx.wait(), needed=ref.size)
        assert attempt.seconds == SPACE_WAIT_SECONDS
        assert len(tries) == 1  # it never seemed to fit
        assert w.site.publisher.statistics().bytes_served <= 4 * MIB
        assert len([line for line in caplog.messages if ref.id in line]) <= 3
        hog.unlink()


async def test_a_durable_landing_is_on_the_disk_or_fails(tmp_path):
    """What the kernel took and the disk then refuses is no payload: the source hears that it failed."""
    with (
        tmpfs(tmp_path / "ram", "size=6m") as ram,  # a disk that has less than it says
        image(tmp_path / "disk", ram / "image", mebibytes=32) as mount,
    ):
        async with world() as w, open_job("job", w.server, scratch=mount, durable=True) as job:
            tx, ref = w.offer(ComputedSource(16 * MIB))
            attempt = Attempt()
            await attempt.run(partial(job.download, ref, disk(job)))
            assert isinstance(attempt.error, LandingError)
            assert attempt.error.where["code"] in {"EIO", "ENOSPC"}
            assert (await tx.wait()).status is OutcomeStatus.FAILED


async def test_a_receiver_that_cannot_put_its_payload_in_place_fails_alone(tmp_path):
    """Where the last rename fails one receiver has failed and says why; the other has succeeded, and both are told apart."""
    async with world(sites=2) as w, open_job("job", w.site, scratch=tmp_path) as job:
        source = ComputedSource(9 * MIB)
        slots = [Slot(secrets.token_bytes(16), site.address) for site in w.sites]
        tx = w.server.publish([source], slots)

        def tidied_up() -> None:
            for directory in job.path.glob("transfer-*"):
                shutil.rmtree(directory)

        terms = Terms(landing=lambda layout: Hooked(job.landing(layout), finish=tidied_up))
        bad, good = Attempt(), Attempt()
        other = w.sites[1]
        async with tasks() as group:
            group.start_soon(bad.run, partial(job.download, tx.refs(0)[0], terms))
            transfer = other.transfer(tx.refs(1)[0], memory())
            group.start_soon(good.run, partial(other.run_transfer, transfer))
        assert isinstance(bad.error, LandingError)
        assert good.state is not None
        assert_pattern(good.state)
        outcome = await tx.wait()
        assert (outcome.status, outcome.reason) == (OutcomeStatus.FAILED, "receiver_failed")
        assert (outcome.succeeded, outcome.quorum) == (("site-2",), False)
        [verdict] = outcome.slots["site-1"].values()
        assert verdict.verdict is Verdict.FAILED
        assert bad.error.what in verdict.reason
        assert source.closed
        await swept()
        assert (job.ledger.used, files(job.path)) == (0, [".lease"])


async def test_files_go_with_their_last_reader(tmp_path):
    """Twenty updates, three at a time, each read and let go: the disk never has more than those and one."""
    size = 2 * MIB
    on_disk: list[int] = []
    async with world(sites=20) as w, open_job("job", w.server, scratch=tmp_path) as job:
        at_once = anyio.CapacityLimiter(3)

        def look(*_: object) -> None:
            blocks = (path.lstat().st_blocks for path in job.path.rglob("payload*"))
            on_disk.append(512 * sum(blocks))

        async def use(ref: Ref) -> None:
            async with at_once:
                state = await job.download(ref, disk(job, progress=look))
                assert isinstance(state, LazyStateDict)
                assert_pattern(state)
                state.release()
                await swept()
                assert not state.path.exists()

        async with tasks() as group:
            for site in w.sites:
                group.start_soon(use, w.offer(ComputedSource(size), site=site)[1])
        assert size < max(on_disk) <= 4 * (size + 64 * 1024)
        assert job.ledger.peak <= 4 * (size + 64 * 1024)
        assert files(job.path) == [".lease"]


@pytest.mark.parametrize("setting", ["warn", "refuse", "allow"])
async def test_scratch_in_memory_is_warned_about_refused_or_allowed(small_disk, caplog, setting):
    """A job on a tmpfs does as it was told, and the warning and the refusal name the mount."""
    async with world() as w:
        if setting == "refuse":
            with pytest.raises(ScratchError, match=f"tmpfs mounted at {small_disk}"):
                async with open_job("job", w.server, scratch=small_disk, ram_backed="refuse"):
                    pass
        else:
            async with open_job("job", w.server, scratch=small_disk, ram_backed=setting) as job:
                _, ref = w.offer(state_dict())
                assert_same(await job.download(ref, disk(job)), state_dict())
    told = [line for line in caplog.messages if str(small_disk) in line]
    assert len(told) == (setting == "warn")
    assert list(small_disk.iterdir()) == []


OVERFULL = """
import sys
import anyio
from tests.runtime.world import ComputedSource, disk, world
from streamoff.errors import NoSpaceError, TruncatedFileError
from streamoff.runtime.jobs import open_job
from streamoff.types import MIB
import os


async def main():
    async with (
        world() as w,
        open_job("job", w.server, scratch=sys.argv[1], ram_backed="allow", space_wait=0) as job,
    ):
        try:
            await job.download(w.offer(ComputedSource(20 * MIB))[1], disk(job))
        except NoSpaceError as error:
            print("full", error.needed > error.free)
        state = await job.download(w.offer(ComputedSource(6 * MIB))[1], disk(job))
        os.truncate(state.path, MIB)
        try:
            state.tensor("w")
        except TruncatedFileError:
            print("truncated")


anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_neither_a_full_nor_a_shrunken_file_is_a_bus_error(small_disk, backend):
    """Nothing is written or read through a mapping: a process whose tmpfs is full, or whose file was cut, lives on."""
    command = [sys.executable, "-c", OVERFULL, str(small_disk), backend]
    here = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert (done.returncode, done.stdout) == (0, "full True\ntruncated\n"), done.stderr
