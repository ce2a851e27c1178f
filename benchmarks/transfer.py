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
from typing import Final

from benchmarks.against import Peer, peer
from benchmarks.children import Child
from benchmarks.machine import Machine, Room
from benchmarks.pairs import PAIRS, QUICK_PAIRS, Sample, Series, in_turns, ratios
from benchmarks.peers import LOOPBACK, MODES
from benchmarks.rawcopy import WHOLE
from benchmarks.report import HEAD, Report, row, samples_of
from streamoff.scratch.space import filesystem
from streamoff.sim.sizes import format_size
from streamoff.types import MIB

__all__ = ["GPT2_MEDIUM_BYTES", "QUICK_BYTES", "TMPFS", "Pair", "measure", "measure_shapes", "pair"]

GPT2_MEDIUM_BYTES: Final = 1354 * MIB
QUICK_BYTES: Final = 64 * MIB
DISK_PAIRS: Final = 2
PEER_PAIRS: Final = 5
TMPFS: Final = Path("/dev/shm")  # noqa: S108 - tmpfs is the point
LABELS: Final = {"disk": "to tmpfs", "memory": "to memory"}
NO_PEER: Final = (
    "no other program was compared with: --peer-python names an interpreter with NVFlare"
)
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
        """One raw copy, in the form that was found to be fastest."""
        return self._copy(mode, self._piece[mode])

    def _copy(self, mode: str, piece: int) -> Sample:
        taken = self._receiver.order("copy_in", mode=mode, size=self.size)
        sent = self._source.ask("copy_out", port=self._raw_port, piece=piece)
        return Sample.of(self._receiver.answer(taken), sent)

    def choose_piece(self, mode: str, times: int) -> None:
        """Find the fastest form of a raw copy."""
        ways = {str(piece): partial(self._copy, mode, piece) for piece in PIECES}
        tried = in_turns(times, self.size, ways)
        self._piece[mode] = int(min(tried, key=lambda piece: min(tried[piece].seconds)))

    def compare(self, mode: str, pairs: int) -> dict[str, Series]:
        """Find the fastest form of a raw copy and take pairs with it."""
        self.choose_piece(mode, min(pairs, 2))
        ways = {"ours": partial(self.ours, mode), "theirs": partial(self.raw, mode)}
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


def measure(*, quick: bool, peer_python: str | None = None) -> Report:
    """Transfer GPT-2 medium's tensors."""
    return measure_shapes("transfer, 292 tensors", "gpt2-medium", quick, peer_python)


def measure_shapes(title: str, shapes: str, quick: bool, peer_python: str | None) -> Report:
    """Transfer tensors of some shapes to tmpfs, to memory and to the machine's disk.

    Args:
        title: Of the report.
        shapes: As :func:`~streamoff.sim.shapes.shapes_of`.
        quick: Whether to be quick.
        peer_python: An interpreter with NVFlare, to be compared with as well.
    """
    nbytes = QUICK_BYTES if quick else GPT2_MEDIUM_BYTES
    pairs = QUICK_PAIRS if quick else PAIRS
    with scratch(TMPFS) as directory, pair(directory, shapes, nbytes) as both:
        found = {mode: both.compare(mode, pairs) for mode in MODES}
        machine, size = Machine.here(directory), both.size
        figures = _figures(found)
        labels = {mode: f"{LABELS[mode]}, raw copy" for mode in MODES}
        if peer_python is not None:
            with peer(peer_python, directory, shapes, nbytes) as theirs:
                for mode in MODES:
                    key = f"{mode}, peer"
                    found[key] = _against(both, theirs, mode, 1 if quick else PEER_PAIRS)
                    labels[key] = f"{LABELS[mode]}, {theirs.name}"
                    figures[f"{mode}_vs_peer"] = statistics.median(ratios(found[key]))
                    figures[f"{mode}_raw_vs_peer"] = _faster(found[mode], found[key])
    notes = [] if peer_python is not None else [NO_PEER]
    base = Path(tempfile.gettempdir())
    kind, lack = filesystem(base).kind, _lack(base, nbytes)
    if lack is None:
        with scratch(base) as directory, pair(directory, shapes, nbytes) as both:
            found[kind] = both.compare("disk", 1 if quick else DISK_PAIRS)
            labels[kind] = f"to {kind}, raw copy, never gated"
    else:
        notes.append(f"not measured on {kind}: {lack}")
    return Report(
        title=f"{title}: {format_size(size)}, medians of {pairs} interleaved pairs (lowest-highest)",
        machine=machine,
        figures=figures,
        rows=[
            HEAD,
            *(row(labels[name], both, apart="peer" in name) for name, both in found.items()),
        ],
        notes=notes,
        samples=samples_of(found),
        quick=quick,
    )


def _figures(found: Mapping[str, Mapping[str, Series]]) -> dict[str, float]:
    disk = found["disk"]
    return {
        **{f"{mode}_vs_raw": statistics.median(ratios(found[mode])) for mode in MODES},
        "cpu_vs_raw": disk["ours"].cpu / disk["theirs"].cpu,
        "receiver_growth_mib": disk["ours"].receiver_growth_mib,
        "source_growth_mib": disk["ours"].source_growth_mib,
    }


def _against(ours: Pair, theirs: Peer, mode: str, pairs: int) -> dict[str, Series]:
    ways = {"ours": partial(ours.ours, mode), "theirs": partial(theirs.transfer, mode)}
    return in_turns(pairs, ours.size, ways)


def _faster(raw: Mapping[str, Series], peer: Mapping[str, Series]) -> float:
    """How many times as fast as the other program a raw copy is: more than that is out of reach for any copy."""
    speed, theirs = (statistics.median(one["theirs"].throughput) for one in (raw, peer))
    return speed / theirs


def _lack(base: Path, nbytes: int) -> str | None:
    """What keeps the disk from being measured."""
    if filesystem(base).ram_backed:
        return "temporary files are in memory; TMPDIR says where they go"
    return Room.at(base).lacks(ram=2 * nbytes, disk=2 * nbytes)


@contextmanager
def scratch(base: Path) -> Iterator[Path]:
    """A directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="streamoff-bench-", dir=base) as directory:
        yield Path(directory)
