"""A model between two processes over loopback, against a raw copy in the same two processes.

What is gated lies on tmpfs: a disk's own spread would drown what is measured. The disk of the machine is shown
with its spread.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.children import Child
from benchmarks.machine import Machine, Room
from benchmarks.pairs import PAIRS, QUICK_PAIRS, Sample, Series, in_turns, ratios, spread
from benchmarks.peers import LOOPBACK, MODES
from benchmarks.rawcopy import WHOLE
from benchmarks.report import Report
from streamoff.scratch.space import filesystem
from streamoff.sim.sizes import format_size
from streamoff.types import MIB

__all__ = ["GPT2_MEDIUM_BYTES", "QUICK_BYTES", "TMPFS", "Pair", "measure", "measure_shapes", "pair"]

GPT2_MEDIUM_BYTES: Final = 1354 * MIB
QUICK_BYTES: Final = 64 * MIB
DISK_PAIRS: Final = 2
TMPFS: Final = Path("/dev/shm")  # noqa: S108 - tmpfs is the point
PIECES: Final = (MIB // 4, MIB, WHOLE)
"""What a raw copy may hand to its socket at a time; the fastest is the yardstick."""


class Pair:
    """A source and a receiver that are at work, ours and raw.

    Args:
        source: Its process.
        receiver: Its process.
        size: Bytes of the payload.
        raw_port: Where the receiver takes raw copies.
    """

    def __init__(self, source: Child, receiver: Child, size: int, raw_port: int) -> None:
        self.size = size
        self._source = source
        self._receiver = receiver
        self._raw_port = raw_port
        self._piece: dict[str, int] = {}

    def ours(self, mode: str) -> Sample:
        """One transfer."""
        sent = self._source.order("serve", at="source", to=["receiver"])
        got = self._receiver.ask("pull", at=["receiver"], mode=mode)
        return Sample.of(got, self._source.answer(sent))

    def raw(self, mode: str) -> Sample:
        """One raw copy, in the form that was fastest when it was warmed up."""
        return self._copy(mode, self._piece[mode])

    def _copy(self, mode: str, piece: int) -> Sample:
        taken = self._receiver.order("copy_in", mode=mode, size=self.size)
        sent = self._source.ask("copy_out", port=self._raw_port, piece=piece)
        return Sample.of(self._receiver.answer(taken), sent)

    def warm_up(self, mode: str) -> None:
        """Do everything once, and find the fastest form of a raw copy, each twice."""
        self.ours(mode)
        tried = {
            piece: min(self._copy(mode, piece).receiver.seconds for _ in range(2))
            for piece in PIECES
        }
        self._piece[mode] = min(tried, key=tried.__getitem__)

    def compare(self, mode: str, pairs: int) -> dict[str, Series]:
        """Warm up and take pairs."""
        self.warm_up(mode)
        ways = {"ours": partial(self.ours, mode), "raw": partial(self.raw, mode)}
        return in_turns(pairs, self.size, ways)


@contextmanager
def pair(
    scratch: Path, shapes: str, nbytes: int, identities: dict[str, str] | None = None
) -> Iterator[Pair]:
    """Start a source and a receiver; ``identities`` are directories by address, for TLS."""
    identity = identities or {}
    receiver = {
        "endpoints": [{"address": "receiver", "listen": True, "dial": {}}],
        "scratch": str(scratch),
        "identity": identity.get("receiver"),
    }
    with Child("peers", receiver) as taking:
        ready = taking.answer()
        place = f"{LOOPBACK}:{ready['ports']['receiver']}"
        source = {
            "endpoints": [{"address": "source", "listen": False, "dial": {"receiver": place}}],
            "models": {"payload": (shapes, nbytes)},
            "identity": identity.get("source"),
        }
        with Child("peers", source) as serving:
            size = serving.answer()["sizes"]["payload"]
            yield Pair(serving, taking, size, ready["raw_port"])


def measure(*, quick: bool) -> Report:
    """Transfer GPT-2 medium's tensors."""
    return measure_shapes("transfer, 292 tensors", "gpt2-medium", quick=quick)


def measure_shapes(title: str, shapes: str, *, quick: bool) -> Report:
    """Transfer tensors of some shapes to tmpfs, to memory and to the machine's disk."""
    nbytes = QUICK_BYTES if quick else GPT2_MEDIUM_BYTES
    pairs = QUICK_PAIRS if quick else PAIRS
    with scratch(TMPFS) as directory, pair(directory, shapes, nbytes) as both:
        found = {mode: both.compare(mode, pairs) for mode in MODES}
        machine, size = Machine.here(directory), both.size
    base = Path(tempfile.gettempdir())
    kind, lack = filesystem(base).kind, _lack(base, nbytes)
    notes = []
    if lack is None:
        with scratch(base) as directory, pair(directory, shapes, nbytes) as both:
            found[kind] = both.compare("disk", QUICK_PAIRS if quick else DISK_PAIRS)
    else:
        notes.append(f"not measured on {kind}: {lack}")
    disk, memory = found["disk"], found["memory"]
    figures = {
        "disk_vs_raw": statistics.median(ratios(disk["ours"], disk["raw"])),
        "memory_vs_raw": statistics.median(ratios(memory["ours"], memory["raw"])),
        "cpu_vs_raw": disk["ours"].cpu / disk["raw"].cpu,
        "receiver_growth_mib": disk["ours"].receiver_growth_mib,
        "source_growth_mib": disk["ours"].source_growth_mib,
    }
    labels = {"disk": "to tmpfs", "memory": "to memory", kind: f"to {kind}, never gated"}
    return Report(
        title=f"{title}: {format_size(size)}, medians of {pairs} interleaved pairs (lowest-highest)",
        machine=machine,
        figures=figures,
        rows=[HEAD, *(row(labels[name], both) for name, both in found.items())],
        notes=notes,
        samples=samples_of(found),
        quick=quick,
    )


def samples_of(found: Mapping[str, Mapping[str, Series]]) -> dict[str, Any]:
    """Everything that was measured, as plain JSON values."""
    return {
        name: {way: series.to_json() for way, series in ways.items()}
        for name, ways in found.items()
    }


def _lack(base: Path, nbytes: int) -> str | None:
    """What keeps the disk from being measured."""
    if filesystem(base).ram_backed:
        return "temporary files are in memory; TMPDIR says where they go"
    return Room.at(base).lacks(ram=2 * nbytes, disk=2 * nbytes)


HEAD: Final = (
    "",
    "ours MiB/s",
    "raw MiB/s",
    "ratio",
    "CPU s/GiB ours",
    "raw",
    "faults/MiB ours",
    "raw",
)


def row(label: str, found: dict[str, Series]) -> list[str]:
    """One line of the table."""
    ours, raw = found["ours"], found["raw"]
    return [
        label,
        spread(ours.throughput, 0),
        spread(raw.throughput, 0),
        spread(ratios(ours, raw), 2),
        f"{ours.cpu:.2f}",
        f"{raw.cpu:.2f}",
        f"{ours.faults:.0f}",
        f"{raw.faults:.0f}",
    ]


@contextmanager
def scratch(base: Path) -> Iterator[Path]:
    """A directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="streamoff-bench-", dir=base) as directory:
        yield Path(directory)
