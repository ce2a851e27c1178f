"""A model between two processes over loopback, against a raw copy in the same two processes.

Files lie on tmpfs: a disk's own spread would drown what is measured. Pairs of ours and raw are interleaved, the
first pair is not counted, and every figure is the median over pairs.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import Machine
from benchmarks.peers import MODES, Sample, read_line
from streamoff.sim.sizes import format_size
from streamoff.sim.tables import aligned
from streamoff.types import MIB

__all__ = ["Figures", "TransferReport", "measure", "measure_shapes"]

GPT2_MEDIUM_BYTES: Final = 1354 * MIB
QUICK_BYTES: Final = 128 * MIB
PAIRS: Final = 5
TMPFS: Final = Path("/dev/shm")  # noqa: S108 - tmpfs is the point

THROUGHPUT_FLOOR: Final = 0.85
CPU_CEILING: Final = 1.3
RECEIVER_MIB: Final = 40.0
SOURCE_MIB: Final = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a suite found: ratios of ours to raw in throughput and in CPU seconds, growth in MiB."""

    disk_vs_raw: float
    memory_vs_raw: float
    cpu_vs_raw: float
    receiver_growth_mib: float
    source_growth_mib: float

    @property
    def checks(self) -> dict[str, bool]:
        """Promise to whether it holds."""
        return {
            f"disk_vs_raw >= {THROUGHPUT_FLOOR}": self.disk_vs_raw >= THROUGHPUT_FLOOR,
            f"memory_vs_raw >= {THROUGHPUT_FLOOR}": self.memory_vs_raw >= THROUGHPUT_FLOOR,
            f"cpu_vs_raw <= {CPU_CEILING}": self.cpu_vs_raw <= CPU_CEILING,
            f"receiver_growth_mib <= {RECEIVER_MIB:g}": self.receiver_growth_mib <= RECEIVER_MIB,
            f"source_growth_mib <= {SOURCE_MIB:g}": self.source_growth_mib <= SOURCE_MIB,
        }

    def to_json(self) -> dict[str, object]:
        """The figures by name."""
        return {
            "disk_vs_raw": self.disk_vs_raw,
            "memory_vs_raw": self.memory_vs_raw,
            "cpu_vs_raw": self.cpu_vs_raw,
            "receiver_growth_mib": self.receiver_growth_mib,
            "source_growth_mib": self.source_growth_mib,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """One run of the suite."""

    title: str
    machine: Machine
    nbytes: int
    pairs: int
    samples: tuple[Sample, ...]
    figures: Figures

    @property
    def passed(self) -> bool:
        """Whether every promise holds."""
        return all(self.figures.checks.values())

    def to_text(self) -> str:
        """Return the table, the machine and the promises."""
        rows = [["", "ours MiB/s", "raw MiB/s", "ratio", "ours CPU s/GiB", "raw CPU s/GiB"]]
        for mode in MODES:
            ours, raw = _of(self.samples, mode, ours=True), _of(self.samples, mode, ours=False)
            rows.append(
                [
                    f"to {mode}",
                    *(
                        f"{self.nbytes / MIB / _median(s.seconds for s in side):.0f}"
                        for side in (ours, raw)
                    ),
                    f"{_ratio(ours, raw):.2f}",
                    *(f"{_cpu(side) / (self.nbytes / 2**30):.2f}" for side in (ours, raw)),
                ]
            )
        checks = [
            f"{'ok  ' if holds else 'FAIL'} {what}" for what, holds in self.figures.checks.items()
        ]
        growth = (
            f"growth: receiver {self.figures.receiver_growth_mib:.1f} MiB to disk, "
            f"source {self.figures.source_growth_mib:.1f} MiB"
        )
        head = f"{self.title}: {format_size(self.nbytes)}, median of {self.pairs} interleaved pairs"
        return "\n".join(
            [head, "", *aligned(rows), "", growth, *checks, "", self.machine.to_text()]
        )

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            **self.figures.to_json(),
            "nbytes": self.nbytes,
            "pairs": self.pairs,
            "machine": self.machine.to_json(),
            "samples": [sample.to_json() for sample in self.samples],
        }


def measure(*, quick: bool) -> TransferReport:
    """Transfer GPT-2 medium's tensors."""
    nbytes = QUICK_BYTES if quick else GPT2_MEDIUM_BYTES
    return measure_shapes("transfer, 292 tensors", "gpt2-medium", nbytes)


def measure_shapes(title: str, shapes: str, nbytes: int, pairs: int = PAIRS) -> TransferReport:
    """Run the two processes and make sense of what they say."""
    with tempfile.TemporaryDirectory(prefix="streamoff-bench-", dir=TMPFS) as directory:
        lines = list(_run(Path(directory), shapes, nbytes, pairs))
        machine = Machine.here(Path(directory))
    samples = tuple(Sample(**line) for line in lines if "mode" in line)
    size = next(line["size"] for line in lines if "size" in line)
    disk = {ours: _of(samples, "disk", ours=ours) for ours in (True, False)}
    memory = {ours: _of(samples, "memory", ours=ours) for ours in (True, False)}
    figures = Figures(
        disk_vs_raw=_ratio(disk[True], disk[False]),
        memory_vs_raw=_ratio(memory[True], memory[False]),
        cpu_vs_raw=_cpu(disk[True]) / _cpu(disk[False]),
        receiver_growth_mib=max(sample.receiver_growth for sample in disk[True]) / MIB,
        source_growth_mib=max(sample.source_growth for sample in disk[True]) / MIB,
    )
    return TransferReport(
        title=title, machine=machine, nbytes=size, pairs=pairs, samples=samples, figures=figures
    )


def _run(scratch: Path, shapes: str, nbytes: int, pairs: int) -> Iterator[dict[str, Any]]:
    base = [sys.executable, "-m", "benchmarks.peers"]
    with _child([*base, "receiver", str(scratch), str(pairs), *MODES]) as receiver:
        port = read_line(receiver)["port"]
        with _child([*base, "source", str(port), shapes, str(nbytes)]):
            while line := read_line(receiver):
                yield line


@contextmanager
def _child(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
            if child.wait(timeout=60):
                raise RuntimeError(f"{command[3]} failed with exit code {child.returncode}")
        finally:
            child.kill()


def _of(samples: Sequence[Sample], mode: str, *, ours: bool) -> list[Sample]:
    return [sample for sample in samples if sample.mode == mode and sample.ours is ours]


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


def _ratio(ours: list[Sample], raw: list[Sample]) -> float:
    """Median over pairs of our throughput to the raw one."""
    return _median(theirs.seconds / mine.seconds for mine, theirs in zip(ours, raw, strict=True))


def _cpu(samples: list[Sample]) -> float:
    """CPU seconds of both processes."""
    return _median(sample.receiver_cpu + sample.source_cpu for sample in samples)
