"""How files are kept on real disks: what the page cache holds, what is on stable storage, and what the disk refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamoff.errors import LandingError, NoSpaceError, UsageError
from streamoff.scratch.space import filesystem
from streamoff.tensors.digests import chunk_digest
from streamoff.tensors.files import Storage, drop_cached, opened
from streamoff.tensors.landing import PAYLOAD_NAME, DiskLanding
from streamoff.tensors.layout import plan
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.writer import FileWriter
from streamoff.types import CHUNK_BYTES, MIB

from ..disks import cached_bytes, fill, image, read_only, tmpfs

DROP = Storage(page_cache="drop")


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A directory whose files are not memory anyway."""
    if filesystem(tmp_path).ram_backed:
        pytest.skip("the temporary directory is in RAM, where nothing can be dropped")
    return tmp_path


def written(
    path: Path, mebibytes: int, storage: Storage, *, block: int = CHUNK_BYTES
) -> tuple[LazyStateDict, int]:
    """Write one tensor block by block; the result, and the most that the page cache had of it meanwhile."""
    layout = plan([("w", "U8", (mebibytes * MIB,))])
    writer = FileWriter(path, layout, storage=storage)
    most = 0
    for start in range(0, layout.data_nbytes, block):
        writer.write(start, memoryview(os.urandom(min(block, layout.data_nbytes - start))))
        most = max(most, cached_bytes(path.with_name(path.name + ".part")))
    return writer.finish(), most


@pytest.mark.parametrize("block", [CHUNK_BYTES, 300_007])
def test_a_file_that_is_dropped_never_fills_the_page_cache(on_disk: Path, block: int) -> None:
    """While it is written the cache has two batches and the block at hand, afterwards nothing."""
    state, most = written(on_disk / "f", 24, DROP, block=block)
    assert most <= 2 * (CHUNK_BYTES + block)
    assert cached_bytes(state.path) == 0


def test_a_file_that_is_kept_is_in_the_page_cache(on_disk: Path) -> None:
    """By default what was written can be read again without the disk."""
    state, most = written(on_disk / "f", 12, Storage())
    assert most >= 12 * MIB
    assert cached_bytes(state.path) >= 12 * MIB


def test_reading_leaves_nothing_in_the_page_cache(on_disk: Path) -> None:
    """Blocks, whole tensors and odd ranges are gone from it once they were read, and nothing is read ahead."""
    state, _ = written(on_disk / "f", 12, DROP)
    for block in state["w"].blocks(CHUNK_BYTES):
        assert block.numel() == CHUNK_BYTES
        assert cached_bytes(state.path) == 0
    state["w"].materialize()
    state["w"].read_into(memoryview(bytearray(1_000_003)), 777)
    assert cached_bytes(state.path) == 0


def test_dropping_takes_pages_that_are_in_the_range_in_part(on_disk: Path) -> None:
    """The edges of a range do not pile up in the cache."""
    path = on_disk / "f"
    path.write_bytes(bytes(MIB))
    with opened(path, os.O_RDWR) as fd:
        drop_cached(fd, 1, MIB - 2, written=True)
    assert cached_bytes(path) == 0


def test_dropping_in_ram_is_no_error(tmp_path: Path) -> None:
    """Where the page cache is the disk, asking it to forget changes nothing."""
    with tmpfs(tmp_path / "ram", "size=16m") as mount:
        state, _ = written(mount / "f", 9, DROP)
        assert state["w"].materialize().numel() == 9 * MIB


@pytest.mark.parametrize(
    "wrong", [{"page_cache": "dorp"}, {"durable": "no"}, {"durable": 1}, {"public": None}]
)
def test_what_is_no_way_to_keep_a_file_is_refused(wrong: dict[str, object]) -> None:
    """A typing error is not taken for a default."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Storage(**wrong)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("storage", [Storage(durable=True), DROP])
def test_what_cannot_get_to_the_disk_is_not_published(tmp_path: Path, storage: Storage) -> None:
    """Bytes that the kernel took and the disk then refuses are an error at the latest when the file is finished."""
    with (
        tmpfs(tmp_path / "ram", "size=6m") as ram,  # a disk that has less than it says
        image(tmp_path / "disk", ram / "image", mebibytes=32) as disk,
    ):
        path = disk / "model"
        writer = FileWriter(path, plan([("w", "U8", (16 * MIB,))]), storage=storage)

        def write_all() -> None:
            for start in range(0, 16 * MIB, CHUNK_BYTES):
                writer.write(start, memoryview(bytes([7]) * CHUNK_BYTES))
            writer.finish()

        with pytest.raises(LandingError) as caught:
            write_all()
        assert caught.value.where["path"] == disk / "model.part"
        assert caught.value.where["code"] in {"EIO", "ENOSPC"}
        assert not path.exists()


def test_a_disk_that_cannot_be_read_is_a_landing_error(tmp_path: Path) -> None:
    """A block device that fails under a landed file is typed, with path and code, and no bytes are made up."""
    with image(tmp_path / "disk", tmp_path / "image", mebibytes=32) as disk:
        state, _ = written(disk / "f", 16, DROP)
        os.truncate(tmp_path / "image", MIB)
        with pytest.raises(LandingError, match="cannot read") as caught:
            state["w"].materialize()
        assert caught.value.where == {"path": disk / "f", "code": "EIO"}


def chunks(nbytes: int) -> list[tuple[int, tuple[memoryview, ...], bytes]]:
    """A payload of one tensor as it comes."""
    layout = plan([("w", "U8", (nbytes,))])
    content = memoryview(layout.header + bytes([3]) * nbytes)
    pieces = [content[at : at + MIB] for at in range(0, layout.size, MIB)]
    starts = range(0, layout.size, MIB)
    return [
        (at, (piece,), chunk_digest((piece,), at)) for at, piece in zip(starts, pieces, strict=True)
    ]


def test_a_disk_that_cannot_reserve_may_be_full_half_way(tmp_path: Path) -> None:
    """Without fallocate(2) others can take the space: the write that finds it gone has all numbers, and nothing stays."""
    with image(tmp_path / "disk", tmp_path / "image", "ext2") as disk:
        taken: list[int] = []
        landing = DiskLanding(disk, taken=lambda: taken.append(1))
        landing.open(plan([("w", "U8", (8 * MIB,))]))
        hog = fill(disk, but=3 * MIB + MIB // 2)

        def land() -> None:
            for chunk in chunks(8 * MIB):
                landing.write(*chunk)

        with pytest.raises(NoSpaceError, match="full") as caught:
            land()
        assert caught.value.where["path"] == disk / f"{PAYLOAD_NAME}.part"
        assert caught.value.where["needed"] == MIB
        assert isinstance(caught.value.where["free"], int)
        assert caught.value.where["free"] < MIB
        assert caught.value.where["code"] == "ENOSPC"
        assert taken == []
        landing.discard()
        assert {entry.name for entry in disk.iterdir()} == {"lost+found", hog.name}


@pytest.mark.parametrize("kind", ["ext2", "ext4"])
def test_space_is_said_to_be_taken_when_it_is(tmp_path: Path, kind: str) -> None:
    """At once where the disk reserves it, and where it cannot, when the file is whole."""
    with image(tmp_path / "disk", tmp_path / "image", kind) as disk:
        taken: list[int] = []
        landing = DiskLanding(disk, taken=lambda: taken.append(1))
        landing.open(plan([("w", "U8", (4 * MIB,))]))
        assert bool(taken) is (kind == "ext4")
        for chunk in chunks(4 * MIB):
            landing.write(*chunk)
        landing.finish()
        assert taken


def test_a_disk_that_becomes_read_only_is_a_landing_error(tmp_path: Path) -> None:
    """Remounting under a landing is typed, with path, needed and free; it goes on when the disk can be written."""
    with tmpfs(tmp_path / "disk", "size=16m") as disk:
        (disk / "other").mkdir()
        landing = DiskLanding(disk)
        landing.open(plan([("w", "U8", (2 * MIB,))]))
        first, second, third = chunks(2 * MIB)
        landing.write(*first)
        with read_only(disk):
            with pytest.raises(LandingError) as caught:
                landing.write(*second)
            assert not isinstance(caught.value, NoSpaceError)
            assert caught.value.where == {
                "path": disk / f"{PAYLOAD_NAME}.part",
                "needed": MIB,
                "free": 14 * MIB - os.statvfs(disk).f_bsize,
                "code": "EROFS",
            }
            with pytest.raises(LandingError, match="EROFS"):
                DiskLanding(disk / "other").open(plan([]))
        landing.write(*second)
        landing.write(*third)
        assert landing.finish().path == disk / PAYLOAD_NAME


def test_files_are_private_unless_they_are_published(tmp_path: Path) -> None:
    """Scratch is its owner's alone whatever the umask; what is published is as the umask says."""
    before = os.umask(0o027)
    try:
        private, _ = written(tmp_path / "private", 1, Storage())
        public, _ = written(tmp_path / "public", 1, Storage(public=True))
    finally:
        os.umask(before)
    assert private.path.stat().st_mode & 0o777 == 0o600
    assert public.path.stat().st_mode & 0o777 == 0o640
