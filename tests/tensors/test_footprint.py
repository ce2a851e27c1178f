"""What memory a transfer costs, measured by the kernel in a process of its own.

Resident growth is RssAnon and RssFile of /proc/self/status, sampled by a thread, with a baseline taken
when torch is warm.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .helpers import run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

METER = """
import gc, mmap, os, pathlib, re, sys, threading
import torch
from streamoff.tensors.digests import chunk_digest
from streamoff.tensors.landing import DiskLanding, MemoryLanding
from streamoff.tensors.layout import plan
from streamoff.tensors.lazy import open_state
from streamoff.tensors.sources import FileSource, StateDictSource
from streamoff.tensors.writer import FileWriter
MIB = 1 << 20
where = pathlib.Path(sys.argv[1])

def resident(kind):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(kind + r":\\s+(\\d+) kB", text)[1]) * 1024

class Peak:
    def __init__(self, *kinds):
        self.kinds = kinds
    def now(self):
        return sum(resident(kind) for kind in self.kinds)
    def __enter__(self):
        gc.collect()
        self.base = self.peak = self.now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.done.wait(0.001):
            self.peak = max(self.peak, self.now())
    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, self.now())
        self.growth = (self.peak - self.base) / MIB

def make(path, count, mib):
    layout = plan([(f"t{i:03d}", "F32", (mib * MIB // 4,)) for i in range(count)])
    writer = FileWriter(path, layout)
    block = memoryview(bytes(MIB))
    for at in range(0, layout.data_nbytes, MIB):
        writer.write(at, block)
    return writer.finish()

def transfer(source, landing, chunk=4 * MIB):
    buffer = memoryview(bytearray(chunk))
    for item in landing.open(source.layout):
        for start in range(item.start, item.stop, chunk):
            stop = min(start + chunk, item.stop)
            views = source.views(start, stop)
            if views is None:
                source.read_into(start, buffer[: stop - start])
                views = (buffer[: stop - start],)
            landing.write(start, views, chunk_digest(views, start))
    return landing.finish()

def maps():
    return pathlib.Path("/proc/self/maps").read_text().splitlines()

def mapped():
    return [line for line in maps() if str(where) in line]

warm = make(where / "warm", 2, 1)
for lazy in warm.values():
    (lazy.materialize() + 1).sum()
(where / "0").mkdir()
transfer(FileSource(warm), DiskLanding(where / "0", check_finite=True))
"""


def _measure(tmp_path: Path, script: str) -> str:
    return run_script(METER + script, tmp_path)


MATERIALISE = """
state = make(where / "update", 8, 32)
with Peak("RssFile") as file:
    for lazy in state.values():
        tensor = lazy.materialize()
        assert not mapped(), "a scratch file is mapped"
        del tensor
assert file.growth < 32, file.growth
assert not mapped()
"""


def test_materialising_maps_no_file(tmp_path: Path) -> None:
    """Reading 256 MiB tensor by tensor keeps no page of the file resident and maps nothing."""
    _measure(tmp_path, MATERIALISE)


ITERATE = """
state = make(where / "update", 32, 32)
with Peak("RssAnon", "RssFile") as all:
    total = torch.zeros(8 * MIB)
    for lazy in state.values():
        total += lazy.materialize()
assert all.growth < 32 + 2 * 32 + 8, all.growth
"""


def test_iterating_over_a_gibibyte_needs_two_tensors(tmp_path: Path) -> None:
    """A lazy pass over 1 GiB costs the accumulator and at most two of the largest tensor."""
    _measure(tmp_path, ITERATE)


LOOP = """
def round(number):
    state = make(where / str(number + 100), 4, 16)
    for lazy in state.values():
        lazy.materialize().sum()
    state.path.unlink()
    state.release()
    gc.collect()
    return resident("RssAnon") + resident("RssFile")
first = round(0)
for number in range(1, 20):
    last = round(number)
assert last < first * 1.05, (first / MIB, last / MIB)
"""


def test_twenty_updates_leave_nothing_resident(tmp_path: Path) -> None:
    """After 20 updates of 64 MiB the process is as large as after the first, within 5 per cent."""
    _measure(tmp_path, LOOP)


SEND = """
giant = {"giant": torch.zeros(10 * MIB)}
source = StateDictSource(giant)
with Peak("RssAnon") as plain:
    for start in range(0, source.layout.size, MIB):
        views = source.views(start, min(start + MIB, source.layout.size))
        chunk_digest(views, start)
assert plain.growth <= 2, plain.growth

strided = StateDictSource({"giant": torch.zeros(10 * MIB).view(2048, -1).t()})
buffer = memoryview(bytearray(MIB))
with Peak("RssAnon") as gathered:
    for start in range(0, strided.layout.size, MIB):
        stop = min(start + MIB, strided.layout.size)
        assert strided.views(start, stop) is None or start == 0
        strided.read_into(start, buffer[: stop - start])
assert gathered.growth <= 2, gathered.growth
"""


def test_serving_a_giant_tensor_costs_two_chunks(tmp_path: Path) -> None:
    """A sender of 40 MiB in 1 MiB chunks needs no copy of it, contiguous or not."""
    _measure(tmp_path, SEND)


LAND = """
for number, (count, mib) in enumerate([(1, 256), (64, 4)]):
    state = make(where / f"made{number}", count, mib)
    (where / f"landed{number}").mkdir()
    with Peak("RssAnon") as disk:
        transfer(FileSource(state), DiskLanding(where / f"landed{number}", check_finite=True))
    assert disk.growth < 10, (count, disk.growth)
    with Peak("RssAnon") as memory:
        landed = transfer(FileSource(state), MemoryLanding(check_finite=True))
    assert 250 < memory.growth < 256 + 16, (count, memory.growth)
    del landed
"""


def test_one_giant_tensor_costs_no_more_than_many_small_ones(tmp_path: Path) -> None:
    """Landing 256 MiB takes a few chunks on disk and one model in memory, whatever its tensors."""
    _measure(tmp_path, LAND)


BLOCKS = """
state = make(where / "update", 1, 256)
with Peak("RssAnon") as blocks:
    for block in state["t000"].blocks(4 * MIB):
        block.sum()
assert blocks.growth < 32, blocks.growth
"""


def test_a_tensor_larger_than_its_budget_is_read_in_blocks(tmp_path: Path) -> None:
    """256 MiB read block by block cost a few blocks."""
    _measure(tmp_path, BLOCKS)


ADDRESS_SPACE = """
import resource
state = make(where / "update", 2, 1)
layout = plan([("huge", "F32", (6 << 30,)), ("small", "F32", (3,))])
path = where / "sparse"
with path.open("wb") as file:
    file.write(layout.header)
    file.truncate(layout.size)
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), used + (2 << 30)))
lazy = open_state(path)
assert lazy["huge"].nbytes > 20 << 30
assert lazy["small"].materialize().tolist() == [0.0, 0.0, 0.0]
assert next(lazy["huge"].blocks(MIB)).nbytes == MIB
"""


def test_a_file_larger_than_the_address_space_is_read(tmp_path: Path) -> None:
    """One small tensor of a 24 GiB file is read with 2 GiB of address space left."""
    _measure(tmp_path, ADDRESS_SPACE)


MANY = """
layout = plan([(f"t{i:05d}", "F32", (4,)) for i in range(70_000)])
writer = FileWriter(where / "many", layout)
writer.write(0, memoryview(bytes(layout.data_nbytes)))
state = writer.finish()
kept = [lazy.materialize() for lazy in state.values()]
assert len(kept) == 70_000
assert not mapped()
assert len(maps()) < 5000
"""


def test_seventy_thousand_tensors_are_held_at_once(tmp_path: Path) -> None:
    """Materialised tensors cost no mapping each, so their number has no limit but memory."""
    _measure(tmp_path, MANY)


HOSTILE = """
from streamoff.errors import LimitError
from streamoff.tensors.layout import header_length, parse
with Peak("RssAnon") as hostile:
    for length in (2**62, 2**32, 2**64 - 1, 33 * MIB):
        for call in (header_length, parse):
            try:
                call(length.to_bytes(8, "little"))
            except LimitError:
                continue
            raise SystemExit("accepted")
assert hostile.growth < 1, hostile.growth
"""


def test_a_hostile_header_length_costs_nothing(tmp_path: Path) -> None:
    """A length of 2**62 is refused without a mebibyte being allocated for it."""
    _measure(tmp_path, HOSTILE)
