"""What it costs to have files on stable storage and out of the page cache: one file written, then read once."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.machine import Machine
from benchmarks.report import Report
from streamoff.tensors.files import Storage
from streamoff.tensors.layout import Layout, plan
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.writer import FileWriter
from streamoff.types import CHUNK_BYTES, MIB

__all__ = ["measure"]

BYTES: Final = 1024 * MIB
QUICK_BYTES: Final = 32 * MIB
TURNS: Final = 8
QUICK_TURNS: Final = 1

WAYS: Final = {
    "keep": Storage(),
    "keep_durable": Storage(durable=True),
    "drop": Storage(page_cache="drop"),
    "drop_durable": Storage(page_cache="drop", durable=True),
}


def measure(*, quick: bool) -> Report:
    """Write and read a file in each of the four ways, by turns in shuffled order: each leaves the next a mark."""
    nbytes, turns = (QUICK_BYTES, QUICK_TURNS) if quick else (BYTES, TURNS)
    layout = plan([("w", "U8", (nbytes,))])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="streamoff-bench-") as directory:
        path = Path(directory) / "file"
        for turn in range(turns):
            for name in Random(turn).sample(list(WAYS), len(WAYS)):
                found[name].append(_once(path, layout, WAYS[name]))
        machine = Machine.here(Path(directory))
    return Report(
        title=f"storage: {nbytes // MIB} MiB in blocks of 4 MiB on {machine.scratch}, median of {turns}",
        machine=machine,
        figures={
            f"{what}_mib_per_second_{name}": statistics.median(rates)
            for name, both in found.items()
            for what, rates in zip(("write", "read"), zip(*both, strict=True), strict=True)
        },
        rows=[
            ("", "write MiB/s", "slowest", "fastest", "read MiB/s", "slowest", "fastest"),
            *(_row(name.replace("_", ", "), both) for name, both in found.items()),
        ],
        samples=found,
        quick=quick,
    )


def _row(label: str, both: list[tuple[float, float]]) -> tuple[str, ...]:
    columns = zip(*both, strict=True)
    cells = [(statistics.median(rates), min(rates), max(rates)) for rates in columns]
    return (label, *(f"{rate:.0f}" for cell in cells for rate in cell))


def _once(path: Path, layout: Layout, storage: Storage) -> tuple[float, float]:
    """MiB/s of writing and of reading; the disk has nothing else to do when either begins."""
    block = memoryview(os.urandom(CHUNK_BYTES))
    os.sync()
    with _timed() as write:
        writer = FileWriter(path, layout, storage=storage)
        for start in range(0, layout.data_nbytes, CHUNK_BYTES):
            writer.write(start, block)
        state = writer.finish()
    os.sync()
    with _timed() as read:
        _read(state)
    state.release()
    path.unlink()
    return layout.size / MIB / write[0], layout.size / MIB / read[0]


def _read(state: LazyStateDict) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for start in range(0, state.layout.data_nbytes, CHUNK_BYTES):
        state.read_span(start, start + CHUNK_BYTES, buffer)


@contextmanager
def _timed() -> Iterator[list[float]]:
    """The seconds that the block took, once it has ended."""
    seconds: list[float] = []
    begun = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - begun)
