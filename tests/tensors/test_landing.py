"""Landings: what counts as landed, what is left behind, and what damage is found."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from streamoff.errors import IntegrityError, LandingError, NoSpaceError, UsageError
from streamoff.tensors.digests import PAGE, chunk_digest
from streamoff.tensors.dtypes import torch_dtype
from streamoff.tensors.files import Storage
from streamoff.tensors.landing import PAYLOAD_NAME, DiskLanding, Landing, MemoryLanding
from streamoff.tensors.layout import plan
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.places import Place
from streamoff.tensors.sources import FileSource, StateDictSource
from streamoff.tensors.views import Views, clip, scatter
from streamoff.types import MIB, ByteRange, RangeSet

from ..disks import tmpfs
from .helpers import assert_holds, entry, header_of, random_bits, run_script, serve, transfer

STATE = {
    "big": random_bits("F32", (300_000,), 1),
    "half": random_bits("BF16", (1000, 3), 2),
    "flag": random_bits("BOOL", (17,), 3),
}


@pytest.fixture(params=["disk", "memory"])
def landing(request: pytest.FixtureRequest, tmp_path: Path) -> Landing:
    """Return a landing of each kind."""
    return DiskLanding(tmp_path) if request.param == "disk" else MemoryLanding()


def _chunk(source: StateDictSource, start: int, stop: int) -> tuple[int, Views, bytes]:
    views = serve(source, start, stop)
    return start, views, chunk_digest(views, start)


def test_a_header_becomes_the_ranges_to_bring(landing: Landing) -> None:
    """Opening answers what is wanted, without the header; a subset answers its own ranges."""
    layout = StateDictSource(STATE).layout
    at = layout.data_start
    assert landing.open(layout, ["flag", "big"]) == RangeSet(
        (ByteRange(at, at + 1_200_000), ByteRange(at + 1_206_000, layout.size))
    )
    with pytest.raises(UsageError, match="opened before"):
        landing.open(layout)


def _take(place: Place, content: bytes, cuts: Iterable[int] = ()) -> None:
    """Bring a chunk to its place part by part, as a link does: in its memory, or in a buffer."""
    if place.views is not None:
        scatter((memoryview(content),), place.views)
    edges = [0, *cuts, len(content)]
    for low, high in pairwise(edges):
        part: Views = (memoryview(bytearray(content[low:high])),)
        place.came(part if place.views is None else clip(place.views, low, high))


@pytest.fixture(params=["file in memory", "memory"])
def resident(request: pytest.FixtureRequest, tmp_path: Path) -> Landing:
    """Return a landing of each kind that never waits for a disk."""
    return MemoryLanding() if request.param == "memory" else DiskLanding(tmp_path, in_ram=True)


def test_a_chunk_may_be_landed_while_it_comes(resident: Landing) -> None:
    """What is landed whole and in memory has a place for a chunk; what is damaged does not count, and may come again."""
    source = StateDictSource(STATE)
    start, stop = source.layout.data_start, source.layout.size
    assert resident.place(start, stop) is None  # not open yet
    resident.open(source.layout)
    assert resident.place(start - 1, stop) is None  # the header has no place
    assert resident.place(start, stop + 1) is None
    assert resident.place(stop, stop) is None
    content = b"".join(serve(source, start, stop))
    digest = chunk_digest((memoryview(content),), start)
    cuts = (1, 7, PAGE - start, 2 * PAGE - start, 2 * PAGE + 3)
    for damaged in (bytes([content[0] ^ 1]) + content[1:], content[:-1]):
        place = resident.place(start, stop)
        assert place is not None
        if len(damaged) == len(content):
            _take(place, damaged, cuts)
        with pytest.raises(IntegrityError, match="damaged"):
            place.done(digest)
        with pytest.raises(UsageError, match="bytes are missing"):
            resident.finish()
    place = resident.place(start, stop)
    assert place is not None
    _take(place, content, cuts)
    place.done(digest)
    assert_holds(resident.finish(), STATE)


def test_a_place_in_memory_is_the_tensors_own() -> None:
    """What is received at a place in memory is copied nowhere; tensors that are too many for that are written to."""
    many = {f"t{number:03}": random_bits("I8", (9,), number) for number in range(300)}
    for state, own in ((STATE, True), (many, False)):
        source, landing = StateDictSource(state), MemoryLanding()
        start, stop = source.layout.data_start, source.layout.size
        landing.open(source.layout)
        place = landing.place(start, stop)
        assert place is not None
        assert (place.views is not None) is own
        content = b"".join(serve(source, start, stop))
        _take(place, content, [100])
        place.done(chunk_digest((memoryview(content),), start))
        landed = landing.finish()
        assert_holds(landed, state)
        if place.views is not None:
            tensor = landed.tensor("flag").view(torch.uint8)
            place.views[-1][-1] ^= 1
            assert tensor[-1] != STATE["flag"].view(torch.uint8)[-1]


def test_what_may_block_or_moves_bytes_has_no_place_for_a_chunk(tmp_path: Path) -> None:
    """A part of a payload is put together elsewhere, and a file on a disk is written by threads."""
    layout = StateDictSource(STATE).layout
    (tmp_path / "part").mkdir()
    part, disk = DiskLanding(tmp_path / "part", in_ram=True), DiskLanding(tmp_path)
    some = MemoryLanding()
    landings: tuple[Landing, ...] = (part, disk, some)
    for landing, names in zip(landings, (["flag", "big"], None, ["flag", "big"]), strict=True):
        landing.open(layout, names)
    assert [one.place(layout.data_start, layout.size) for one in landings] == [None, None, None]


def test_an_abandoned_place_leaves_nothing_behind(resident: Landing) -> None:
    """A chunk that never comes whole, or comes after the landing was given up, does not count."""
    source = StateDictSource(STATE)
    start, stop = source.layout.data_start, source.layout.size
    resident.open(source.layout)
    content = b"".join(serve(source, start, stop))
    short, late = resident.place(start, stop), resident.place(start, stop)
    assert short is not None
    assert late is not None
    _take(short, content[:100])
    _take(late, content)
    resident.discard()
    with pytest.raises(UsageError, match=r"finished or discarded|not open"):
        late.done(chunk_digest((memoryview(content),), start))
    with pytest.raises(UsageError):
        resident.finish()


@pytest.mark.parametrize("damaged", [False, True])
def test_values_are_looked_at_while_they_come(tmp_path: Path, damaged: bool) -> None:
    """A NaN is found wherever a chunk is cut, also inside of it; one that only damage has brought does not count."""
    bad = torch.zeros(PAGE)
    bad[PAGE // 2] = float("nan")
    good = {"a": torch.zeros(PAGE), "b": torch.zeros(PAGE)}
    source = StateDictSource(good if damaged else {**good, "b": bad})
    start, stop = source.layout.data_start, source.layout.size
    content = b"".join(serve(source, start, stop))
    digest = chunk_digest((memoryview(content),), start)
    inside = source.layout.spec("b").start + 4 * (PAGE // 2)
    wrong = content[:inside] + struct.pack("<f", float("nan")) + content[inside + 4 :]
    landings: tuple[Landing, ...] = (
        MemoryLanding(check_finite=True),
        DiskLanding(tmp_path, check_finite=True, in_ram=True),
    )
    for landing in landings:
        landing.open(source.layout)
        if damaged:
            place = landing.place(start, stop)
            assert place is not None
            _take(place, wrong, [inside])
            with pytest.raises(IntegrityError):
                place.done(digest)
        place = landing.place(start, stop)
        assert place is not None
        _take(place, content, [5, 1000, inside, inside + 2])
        place.done(digest)
        assert landing.finish().nonfinite == (frozenset() if damaged else {"b"})


def test_an_unknown_name_allocates_nothing(landing: Landing, tmp_path: Path) -> None:
    """A name that is not in the payload is refused before a file is made."""
    with pytest.raises(KeyError):
        landing.open(StateDictSource(STATE).layout, ["nobody"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "digest"])
def test_a_damaged_chunk_is_never_landed(landing: Landing, damage: str) -> None:
    """A flipped bit, a missing or extra byte, or a wrong digest is an IntegrityError, then a retry works."""
    source = StateDictSource(STATE)
    landing.open(source.layout)
    base = source.layout.data_start
    start, views, digest = _chunk(source, base, source.layout.size)
    content = bytearray(b"".join(views))
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    elif damage == "short":
        content.pop()
    elif damage == "long":
        content.append(0)
    else:
        digest = bytes(16)
    with pytest.raises(IntegrityError, match="damaged"):
        landing.write(start, (memoryview(content),), digest)
    with pytest.raises(UsageError, match="missing"):
        landing.finish()
    landing.write(*_chunk(source, base, source.layout.size))
    assert_holds(landing.finish(), STATE)


def test_a_chunk_may_begin_with_the_header(landing: Landing) -> None:
    """A producer's first chunk may hold the header; it must be the one that was accepted."""
    source = StateDictSource(STATE)
    landing.open(source.layout)
    start, views, digest = _chunk(source, 0, source.layout.size)
    other = bytearray(b"".join(views))
    other[source.layout.data_start - 1] ^= 1
    forged = (memoryview(other),)
    with pytest.raises(IntegrityError, match="accepted header"):
        landing.write(0, forged, chunk_digest(forged, 0))
    landing.write(start, views, digest)
    assert_holds(landing.finish(), STATE)


def test_chunks_outside_the_payload_are_refused(landing: Landing) -> None:
    """Nothing is ever written past the size that was accepted."""
    source = StateDictSource(STATE)
    landing.open(source.layout)
    extra = (memoryview(bytes(10)),)
    for start in (source.layout.size - 9, source.layout.size, 2**62, -1):
        with pytest.raises(UsageError, match="outside"):
            landing.write(start, extra, chunk_digest(extra, start))


def test_bytes_that_are_not_wanted_are_dropped(landing: Landing) -> None:
    """A chunk that spans wanted and unwanted tensors lands only what is wanted."""
    source = StateDictSource(STATE)
    landing.open(source.layout, ["half"])
    landing.write(*_chunk(source, 0, source.layout.size))
    assert_holds(landing.finish(), {"half": STATE["half"]})


def test_a_subset_of_a_file_in_any_order_lands(landing: Landing, tmp_path: Path) -> None:
    """A served file may order its tensors as it likes; wanted ones land in our order, bit for bit."""
    tree = {
        "a": entry("U8", [300_001], 0, 300_001),
        "b": entry("F64", [3], 300_001, 300_025),
        "c": entry("U8", [7], 300_025, 300_032),
        "d": entry("F32", [2], 300_032, 300_040),
    }
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    header, data = header_of(tree), random_bits("U8", (300_040,), 1)
    (theirs / "file").write_bytes(header + bytes(data.numpy()))
    wanted = {
        "a": data[:300_001],
        "b": data[300_001:300_025].clone().view(torch.float64),
        "d": data[300_032:].clone().view(torch.float32),
    }
    state = transfer(FileSource(theirs / "file"), landing, names=wanted, chunk=299_999, seed=2)
    assert [spec.name for spec in state.layout.specs] == ["b", "d", "a"]
    assert_holds(state, wanted)


def test_the_same_chunk_twice_is_one(landing: Landing) -> None:
    """A retried range lands again without harm: to the bytes, to the count and to the digests."""
    source = StateDictSource(STATE)
    landing.open(source.layout)
    base, size = source.layout.data_start, source.layout.size
    for start, stop in [(base, 700_000), (base, 700_000), (500_000, size), (base + 3, 900_000)]:
        landing.write(*_chunk(source, start, stop))
    assert_holds(landing.finish(), STATE)


def test_a_landing_that_is_not_open_takes_nothing(landing: Landing) -> None:
    """Before it is opened and after it is discarded a landing refuses, typed."""
    source = StateDictSource(STATE)
    for call in (lambda: landing.write(*_chunk(source, 0, 8)), landing.finish):
        with pytest.raises(UsageError):
            call()
    landing.open(source.layout)
    landing.discard()
    landing.discard()
    for call in (lambda: landing.write(*_chunk(source, 0, 8)), landing.finish):
        with pytest.raises(UsageError):
            call()


def test_ranges_land_from_several_threads(landing: Landing) -> None:
    """Distinct ranges, cut through pages, may be written at the same time."""
    source = StateDictSource(STATE)
    (wanted,) = landing.open(source.layout)
    cuts = range(wanted.start, wanted.stop, 10_007)
    with ThreadPoolExecutor(4) as pool:
        chunks = [_chunk(source, at, min(at + 10_007, wanted.stop)) for at in cuts]
        list(pool.map(lambda chunk: landing.write(*chunk), chunks))
    assert_holds(landing.finish(), STATE)


def test_the_file_appears_under_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    """Until the end there is one ``.part`` of full size; then one file, named after nothing."""
    source = StateDictSource({"../../x": torch.zeros(9), "/abs": torch.ones(9)})
    landing = DiskLanding(tmp_path, storage=Storage(durable=True))
    landing.open(source.layout)
    part = tmp_path / (PAYLOAD_NAME + ".part")
    assert [*tmp_path.iterdir()] == [part]
    assert part.stat().st_size == source.layout.size
    assert part.stat().st_mode & 0o777 == 0o600
    landing.write(*_chunk(source, 0, source.layout.size))
    assert landing.finish().path == tmp_path / PAYLOAD_NAME
    assert [*tmp_path.iterdir()] == [tmp_path / PAYLOAD_NAME]


def test_a_small_payload_lands_in_one_call(tmp_path: Path) -> None:
    """Open, write and finish need one thread hop."""
    source = StateDictSource(STATE)
    chunk = _chunk(source, source.layout.data_start, source.layout.size)
    assert_holds(DiskLanding(tmp_path).land_whole(source.layout, [chunk]), STATE)


def test_a_small_payload_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Damage in the one call removes the file, or hands the directory over."""
    source = StateDictSource(STATE)
    start, views, _ = _chunk(source, source.layout.data_start, source.layout.size)
    with pytest.raises(IntegrityError):
        DiskLanding(tmp_path).land_whole(source.layout, [(start, views, bytes(16))])
    assert list(tmp_path.iterdir()) == []
    handed: list[Path] = []
    for names in (None, ["nobody"]):
        with pytest.raises((IntegrityError, KeyError)):
            DiskLanding(tmp_path, dispose=handed.append).land_whole(
                source.layout, [(start, views, bytes(16))], names
            )
    assert handed == [tmp_path, tmp_path]


def test_discarding_removes_the_file_or_hands_over_the_directory(tmp_path: Path) -> None:
    """Without an owner only our file goes; with one the directory does, once."""
    handed: list[Path] = []
    layout = StateDictSource(STATE).layout
    mine = DiskLanding(tmp_path)
    mine.open(layout)
    mine.discard()
    assert list(tmp_path.iterdir()) == []
    theirs = DiskLanding(tmp_path, dispose=handed.append)
    theirs.open(layout)
    theirs.discard()
    theirs.discard()
    assert handed == [tmp_path]


def test_what_has_been_published_is_not_discarded(tmp_path: Path) -> None:
    """A discard that comes after the end is too late to harm."""
    handed: list[Path] = []
    landing = DiskLanding(tmp_path, dispose=handed.append)
    state = transfer(StateDictSource(STATE), landing)
    landing.discard()
    assert handed == []
    assert_holds(state, STATE)


def test_a_directory_that_goes_away_is_a_landing_error(tmp_path: Path) -> None:
    """Losing the directory or the file under a landing is typed and names the path."""
    source = StateDictSource(STATE)
    with pytest.raises(LandingError) as caught:
        DiskLanding(tmp_path / "absent").open(source.layout)
    assert caught.value.where["code"] == "ENOENT"
    landing = DiskLanding(tmp_path)
    landing.open(source.layout)
    part = tmp_path / (PAYLOAD_NAME + ".part")
    part.rename(tmp_path / "stolen")
    with pytest.raises(LandingError, match="write"):
        landing.write(*_chunk(source, 0, source.layout.size))
    part.write_bytes(bytes(source.layout.size))
    with pytest.raises(LandingError, match="replaced"):
        landing.write(*_chunk(source, 0, source.layout.size))
    assert part.read_bytes() == bytes(source.layout.size)


def test_a_second_landing_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    """A directory is one landing's alone."""
    layout = StateDictSource(STATE).layout
    DiskLanding(tmp_path).open(layout)
    with pytest.raises(LandingError, match="EEXIST"):
        DiskLanding(tmp_path).open(layout)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return an empty file system of 8 MiB."""
    with tmpfs(tmp_path / "small", "size=8m") as mount:
        yield mount


@pytest.fixture
def no_inodes(tmp_path: Path) -> Iterator[Path]:
    """Return a file system whose only inode is its root."""
    with tmpfs(tmp_path / "small", "size=8m,nr_inodes=1") as mount:
        yield mount


def test_a_full_disk_is_known_before_the_first_byte(small_disk: Path) -> None:
    """A payload that does not fit is refused at the start, with both numbers, and leaves nothing."""
    layout = plan([("w", "F32", (5 * MIB,))])
    with pytest.raises(NoSpaceError, match="full") as caught:
        DiskLanding(small_disk).open(layout)
    assert caught.value.where["needed"] == layout.size
    assert caught.value.where["free"] == 8 * MIB
    assert list(small_disk.iterdir()) == []


def test_reserved_space_cannot_be_taken_by_others(small_disk: Path) -> None:
    """Once open, a landing succeeds although the file system is filled meanwhile."""
    state = {"w": random_bits("U8", (4 * MIB,), 1)}
    source = StateDictSource(state)
    landing = DiskLanding(small_disk)
    landing.open(source.layout)
    with pytest.raises(OSError, match="No space"), (small_disk / "greedy").open("wb") as file:
        file.write(bytes(8 * MIB))
    landing.write(*_chunk(source, 0, source.layout.size))
    assert_holds(landing.finish(), state)


def test_running_out_of_inodes_says_so(no_inodes: Path) -> None:
    """No space with gigabytes free is explained."""
    with pytest.raises(NoSpaceError, match="inodes"):
        DiskLanding(no_inodes).open(plan([("w", "U8", (1,))]))


def test_any_number_of_tensors_is_one_file(tmp_path: Path) -> None:
    """Fifty thousand tiny tensors land on a file system that has room for three files."""
    layout = plan((f"w{number}", "F32", ()) for number in range(50_000))
    content = memoryview(layout.header + bytes(layout.data_nbytes))
    with tmpfs(tmp_path / "small", "size=16m,nr_inodes=3") as mount:
        (mount / "transfer").mkdir()
        landing = DiskLanding(mount / "transfer")
        landing.open(layout)
        landing.write(0, (content,), chunk_digest((content,), 0))
        state = landing.finish()
        assert len(state) == 50_000
        assert [path.name for path in mount.rglob("*")] == ["transfer", PAYLOAD_NAME]


FILE_SIZE_LIMIT = """
import resource, sys, torch, pathlib
from streamoff.errors import LandingError, NoSpaceError
from streamoff.tensors.landing import DiskLanding
from streamoff.tensors.layout import plan
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
where = pathlib.Path(sys.argv[1])
try:
    DiskLanding(where).open(plan([("w", "U8", (1 << 21,))]))
except NoSpaceError:
    raise
except LandingError as error:
    print(error.where["code"], list(where.iterdir()))
"""


def test_a_file_size_limit_is_a_landing_error(tmp_path: Path) -> None:
    """What the system refuses for another reason than space is typed too, and leaves nothing."""
    assert run_script(FILE_SIZE_LIMIT, tmp_path) == "EFBIG []\n"


HUGE_MEMORY = """
import resource
from streamoff.errors import LandingError
from streamoff.tensors.landing import MemoryLanding
from streamoff.tensors.layout import plan
layout = plan([("small", "U8", (1,)), ("huge", "U8", (1 << 40,))])
import torch
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    MemoryLanding().open(layout)
except LandingError as error:
    print(error.where["needed"])
"""


def test_tensors_that_do_not_fit_in_memory_are_a_landing_error() -> None:
    """An allocation that fails is the transfer's error, not the process's."""
    assert run_script(HUGE_MEMORY) == f"{2**40 + 1}\n"


@pytest.mark.parametrize("chunk", [PAGE, 4 * MIB, 262_128, 100_003])
def test_every_page_of_a_landed_file_is_verified(tmp_path: Path, chunk: int) -> None:
    """One flipped bit anywhere, header included, is found when its page is read, however it was cut."""
    state = transfer(StateDictSource(STATE), DiskLanding(tmp_path), chunk=chunk, seed=7)
    assert isinstance(state, LazyStateDict)
    content = state.path.read_bytes()
    for at in (1, PAGE - 1, PAGE, 3 * PAGE + 77, len(content) - 1):
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        state.path.write_bytes(damaged)
        with pytest.raises(IntegrityError) as caught:
            state.reader.read(at, memoryview(bytearray(1)))
        assert caught.value.where["offset"] == at // PAGE * PAGE
    state.path.write_bytes(content)
    assert_holds(state, STATE)


NONFINITE: dict[str, tuple[str, Any]] = {
    "f64": ("F64", float("inf")),
    "f32": ("F32", float("nan")),
    "f16": ("F16", float("-inf")),
    "bf16": ("BF16", float("nan")),
    "e5m2": ("F8_E5M2", float("inf")),
    "e4m3": ("F8_E4M3", float("nan")),
    "e4m3fnuz": ("F8_E4M3FNUZ", float("nan")),
    "e5m2fnuz": ("F8_E5M2FNUZ", float("nan")),
    "e8m0": ("F8_E8M0", float("nan")),
    "c64": ("C64", complex(0.0, float("inf"))),
}


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize("chunk", [1, 5, 64, 1000, 10_000])
def test_non_finite_values_are_found_in_passing(tmp_path: Path, kind: str, chunk: int) -> None:
    """A NaN or infinity anywhere is found in every dtype that has them, in any cut, and only there."""
    state: dict[str, torch.Tensor] = {}
    for number, (name, (dtype, value)) in enumerate(NONFINITE.items()):
        for suffix in ("good", "bad"):
            tensor = torch.ones(37, dtype=torch.complex64 if dtype == "C64" else torch.float32)
            if suffix == "bad":
                tensor[(number * 11) % 37] = value
            state[f"{name}.{suffix}"] = tensor.to(torch_dtype(dtype))
    state["i64"] = torch.full((9,), -1)
    state["tied"] = state["f32.bad"]
    landing = (
        DiskLanding(tmp_path, check_finite=True)
        if kind == "disk"
        else MemoryLanding(check_finite=True)
    )
    landed = transfer(StateDictSource(state), landing, chunk=chunk, seed=chunk)
    # The name that comes later in the state dict is the alias; both are reported.
    assert landed.nonfinite == {f"{name}.bad" for name in NONFINITE} | {"tied"}


def test_read_only_bytes_are_looked_at_without_a_warning() -> None:
    """A chunk that nobody may write to is checked like any other."""
    state = {"good": torch.ones(5), "bad": torch.tensor([1.0, float("nan")])}
    source = StateDictSource(state)
    content = bytes(b"".join(serve(source, 0, source.layout.size)))
    landing = MemoryLanding(check_finite=True)
    landing.open(source.layout)
    landing.write(0, (memoryview(content),), chunk_digest((memoryview(content),), 0))
    assert landing.finish().nonfinite == {"bad"}


def test_nobody_looks_for_non_finite_values_unless_asked(tmp_path: Path) -> None:
    """Without the check the set is empty."""
    state = {"w": torch.tensor([float("nan")])}
    assert transfer(StateDictSource(state), DiskLanding(tmp_path)).nonfinite == frozenset()


WITHOUT_TORCH = """
import sys, pathlib
from streamoff.tensors import digests, dtypes, landing, layout, lazy, sources, state, writer
where = pathlib.Path(sys.argv[1])
planned = layout.plan([("a", "F32", (3,)), ("b", "BF16", (5,))])
out = writer.FileWriter(where / "made.safetensors", planned)
out.write(0, memoryview(bytes(range(22))))
source = sources.FileSource(out.finish())
disk = landing.DiskLanding(where)
for item in disk.open(layout.parse(source.layout.header, size=source.layout.size)):
    buffer = memoryview(bytearray(item.nbytes))
    source.read_into(item.start, buffer)
    disk.write(item.start, (buffer,), digests.chunk_digest((buffer,), item.start))
landed = disk.finish()
got = memoryview(bytearray(22))
landed.read_span(0, 22, got)
assert bytes(got) == bytes(range(22)), bytes(got)
assert not {"torch", "anyio", "numpy"} & set(sys.modules), "imported too much"
print(landed["b"].shape)
"""


def test_files_are_served_landed_and_read_without_torch(tmp_path: Path) -> None:
    """A relay or an inspector pays no two seconds for an import that it does not need."""
    assert run_script(WITHOUT_TORCH, tmp_path) == "(5,)\n"


WRITES = """
import os, sys, pathlib
from streamoff.tensors import digests, landing, layout
calls = []
sys.addaudithook(lambda event, args: calls.append(args[0]) if event == "open" else None)
planned = layout.plan([("w", "U8", (8 << 20,))])
disk = landing.DiskLanding(pathlib.Path(sys.argv[1]))
disk.open(planned)
calls.clear()
real, sizes = os.pwritev, []
def counted(fd, views, offset):
    sizes.append(real(fd, views, offset))
    return sizes[-1]
os.pwritev = counted
views = tuple(memoryview(bytes(1 << 18)) for _ in range(16))
disk.write(4 << 20, views, digests.chunk_digest(views, 4 << 20))
print(sizes, len(calls))
"""


def test_a_whole_chunk_is_one_system_call(tmp_path: Path) -> None:
    """Sixteen frames of a chunk are written by one pwritev into a file opened once."""
    assert run_script(WRITES, tmp_path) == "[4194304] 1\n"


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    """Open landings, lazy dicts and sources hold no descriptor between calls."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept: list[object] = []
    for number in range(100):
        (tmp_path / str(number)).mkdir()
        landing = DiskLanding(tmp_path / str(number))
        if number % 2:
            landing.open(StateDictSource(STATE).layout)
            kept.append(landing)
        else:
            kept.append(transfer(StateDictSource(STATE), landing))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
