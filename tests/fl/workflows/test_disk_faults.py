"""Disks that fail under a round: they cost the site whose bytes they had, in words with numbers, and no other."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import anyio
import pytest
import torch

from streamoff.errors import ScratchError
from streamoff.runtime.jobs import Job
from streamoff.runtime.threads import run_in_thread
from streamoff.types import MIB, OutcomeStatus

from ...disks import break_down, crumbled, fill, image, tmpfs
from ..world import SERVER, World, entries, federated, landed_bytes, reasons

MODEL = {"layer": torch.zeros(MIB // 4)}


def model(value: float) -> dict[str, torch.Tensor]:
    """A model of 1 MiB, all of one value."""
    return {"layer": torch.full((MIB // 4,), value)}


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Somebody else takes nearly all space."""
    hog = fill(disk, but=MIB // 2)
    yield
    hog.unlink()


@contextmanager
def no_inodes(disk: Path) -> Iterator[None]:
    """Somebody else makes as many files as there can be."""
    crumbs = crumbled(disk)
    yield
    for crumb in crumbs:
        crumb.unlink()


@contextmanager
def small_files_only(disk: Path) -> Iterator[None]:
    """The process may make no file above 64 KiB; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused(code: int) -> Callable[[Path], AbstractContextManager[None]]:
    """The system refuses to write, for a reason that cannot be brought about for real everywhere."""

    @contextmanager
    def fault(disk: Path) -> Iterator[None]:
        def pwritev(fd: int, *_: object) -> int:
            assert Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(disk)
            raise OSError(code, os.strerror(code))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            yield

    return fault


FAULTS = {
    "no space": (full, ["no room on disk", "needed=1048", "free="]),
    "no inodes": (no_inodes, ["no inodes left", "free=", "inodes=0"]),
    "read-only": (refused(errno.EROFS), ["Read-only file system", "free=", "code=EROFS"]),
    "file size limit": (small_files_only, ["File too large", "needed=1048", "code=EFBIG"]),
    "quota of the user": (refused(errno.EDQUOT), ["quota is spent", "needed=", "code=EDQUOT"]),
    "broken disk": (refused(errno.EIO), ["Input/output error", "needed=", "code=EIO"]),
}


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_disk_fault_costs_the_site_it_befell(
    tmp_path: Path, name: str, aggregation: str
) -> None:
    """Whatever the system refuses fails one site with path and numbers; the others are averaged, nothing is left."""
    fault, words = FAULTS[name]
    with tmpfs(tmp_path / "disk", "size=16m,nr_inodes=64") as disk:
        async with World(disk) as world:
            hands = [await world.hand(f"site-{number}") for number in (1, 2, 3)]
            told: list[str] = []

            async def sites() -> None:
                for hand in hands:
                    await hand.fetch()
                one = await hands[0].answer(model(1.0), weight=1.0)
                assert (await one.wait()).status is OutcomeStatus.COMPLETED
                await anyio.sleep(1)  # what is added on arrival is gone then
                with fault(disk):
                    two = await hands[1].answer(model(100.0), weight=10.0)
                    told.append(reasons(await two.wait()))
                await hands[2].answer(model(4.0), weight=2.0)

            async with world.open_job(space_wait=0, ram_backed="allow") as job:
                world.tasks.start_soon(sites)
                workflow = federated(initial=MODEL, min_responses=2, aggregation=aggregation)
                async with workflow.run(job, ["site-1", "site-2", "site-3"]) as rounds:
                    finished = await anext(rounds)
                    assert finished.accepted == ("site-1", "site-3")
                    assert finished.weights == {"site-1": 1.0, "site-3": 2.0}
                    assert torch.equal(finished.state.tensor("layer"), model(3.0)["layer"])
                    [(site, why)] = finished.failed.items()
                    assert site == "site-2"
                    for word in [*words, f"path={job.path}"]:
                        assert word in why
                    assert words[0] in told[0]
                    left = await run_in_thread(landed_bytes, job)
                    assert left == finished.state.layout.size
        assert entries(disk) == []


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
async def test_a_disk_that_is_full_for_a_while_costs_nobody(
    tmp_path: Path, aggregation: str
) -> None:
    """A result that arrives while somebody else has the space waits for it, and is in the average."""
    with tmpfs(tmp_path / "disk", "size=16m") as disk:
        async with World(disk) as world:
            hands = [await world.hand(f"site-{number}") for number in (1, 2)]

            async def sites() -> None:
                for hand in hands:
                    await hand.fetch()
                one = await hands[0].answer(model(1.0))
                assert (await one.wait()).status is OutcomeStatus.COMPLETED
                await anyio.sleep(1)  # what is added on arrival is gone then
                with full(disk):
                    await hands[1].answer(model(3.0))
                    await anyio.sleep(20)

            async with world.open_job(ram_backed="allow") as job:
                world.tasks.start_soon(sites)
                workflow = federated(initial=MODEL, aggregation=aggregation)
                async with workflow.run(job, ["site-1", "site-2"]) as rounds:
                    finished = await anext(rounds)
                    assert finished.accepted == ("site-1", "site-2")
                    assert torch.equal(finished.state.tensor("layer"), model(2.0)["layer"])
                    assert 21 <= finished.seconds < 23


async def test_a_disk_that_gives_up_ends_the_round_and_the_job_in_order(tmp_path: Path) -> None:
    """A file system that becomes read-only is named for the site and for the round; the end is bounded and told."""
    with image(tmp_path / "disk", tmp_path / "image") as disk:
        async with World(disk) as world:
            hands = [await world.hand(f"site-{number}") for number in (1, 2)]
            told: list[str] = []

            async def sites() -> None:
                for hand in hands:
                    await hand.fetch()
                one = await hands[0].answer(model(1.0))
                assert (await one.wait()).status is OutcomeStatus.COMPLETED
                break_down(disk)
                two = await hands[1].answer(model(3.0))
                told.append(reasons(await two.wait()))

            async with world.open_job() as job:
                world.tasks.start_soon(sites)
                workflow = federated(initial=MODEL, min_responses=1)
                async with workflow.run(job, ["site-1", "site-2"]) as rounds:
                    with pytest.raises(ScratchError, match="Read-only") as caught:
                        await anext(rounds)
            assert "Read-only file system" in told[0]
            assert caught.value.where["code"] == "EROFS"
            assert not job.report.removed
            assert anyio.current_time() < 5


async def test_a_disk_that_cannot_reserve_costs_only_whom_it_runs_out_under(tmp_path: Path) -> None:
    """Where space cannot be reserved and is gone half way through an upload, that site fails; the others count."""
    large = {"layer": torch.ones(9 * MIB // 4)}
    with image(tmp_path / "disk", tmp_path / "image", "ext2", mebibytes=48) as disk:
        async with World(disk) as world:
            hands = [await world.hand(f"site-{number}") for number in (1, 2)]
            watch = Watch()
            told: list[str] = []

            async def sites() -> None:
                for hand in hands:
                    await hand.fetch()
                one = await hands[0].answer(large)
                assert (await one.wait()).status is OutcomeStatus.COMPLETED
                world.network.conditions("site-2", SERVER).set(bandwidth=2 * MIB)
                two = await hands[1].answer(large)
                await watch.half["site-2"].wait()
                hog = await run_in_thread(fill, disk)
                told.append(reasons(await two.wait()))
                hog.unlink()

            async with world.open_job() as job:
                world.tasks.start_soon(sites)
                workflow = federated(
                    initial={"layer": torch.zeros(9 * MIB // 4)}, min_responses=1, observer=watch
                )
                async with workflow.run(job, ["site-1", "site-2"]) as rounds:
                    finished = await anext(rounds)
                    assert finished.accepted == ("site-1",)
                    assert "cannot write: the file system is full" in finished.failed["site-2"]
                    for word in ("needed=", "free=", "path="):
                        assert word in finished.failed["site-2"]
                    assert torch.equal(finished.state.tensor("layer"), large["layer"])
                    assert await run_in_thread(landed_bytes, job) == finished.state.layout.size
            assert "the file system is full" in told[0]


class Watch:
    """Tells when four MiB of a site have landed."""

    def __init__(self) -> None:
        self.half = {"site-1": anyio.Event(), "site-2": anyio.Event()}

    def round_started(self, number: int, sites: int) -> None:
        """Nothing is to be done."""

    def transfer(self, site: str, landed_bytes: int, total_bytes: int) -> None:
        """See whether it is half way."""
        if 4 * MIB <= landed_bytes < total_bytes:
            self.half[site].set()


def cut_off(path: Path) -> None:
    """Take the second half of a file away."""
    os.truncate(path, path.stat().st_size // 2)


def rot(path: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def replace_whole(path: Path) -> None:
    """Put another file of the same size in its place."""
    path.with_name("other").write_bytes(bytes(path.stat().st_size))
    path.with_name("other").rename(path)


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_off, "file is truncated"),
        (rot, "page changed since it landed"),
        (replace_whole, "page changed since it landed"),
        (Path.unlink, "the file is gone"),
    ],
)
async def test_a_landed_file_that_is_changed_behind_our_back_costs_its_site(
    tmp_path: Path, damage: Callable[[Path], None], words: str, aggregation: str
) -> None:
    """Cut, altered, replaced or removed before it was added: its site is out, and the others' weights are the round's."""
    async with World(tmp_path) as world:
        hands = [await world.hand(f"site-{number}") for number in (1, 2, 3)]

        async def sites(job: Job) -> None:
            for hand in hands:
                await hand.fetch()
            async with world.server.resources.maths:  # nothing is added meanwhile
                two = await hands[1].answer(model(100.0), weight=5.0)
                assert (await two.wait()).status is OutcomeStatus.COMPLETED
                landed = [p for p in job.path.rglob("*.safetensors") if "model" not in p.name]
                damage(*landed)
            await hands[0].answer(model(1.0), weight=1.0)
            await hands[2].answer(model(4.0), weight=2.0)

        async with world.open_job() as job:
            world.tasks.start_soon(sites, job)
            workflow = federated(initial=MODEL, min_responses=2, aggregation=aggregation)
            async with workflow.run(job, ["site-1", "site-2", "site-3"]) as rounds:
                finished = await anext(rounds)
                assert finished.accepted == ("site-1", "site-3")
                assert finished.weights == {"site-1": 1.0, "site-3": 2.0}
                assert torch.equal(finished.state.tensor("layer"), model(3.0)["layer"])
                [(site, why)] = finished.failed.items()
                assert site == "site-2"
                assert words in why
                assert str(job.path) in why
                assert await run_in_thread(landed_bytes, job) == finished.state.layout.size
