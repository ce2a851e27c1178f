"""The memory table: what a whole simulation, server and sites in one process, adds to its resident memory.

Each row is ``streamoff simulate --task checkpoint`` in a fresh process. Memory is anonymous resident memory (``RssAnon``)
above the baseline, which is taken with torch loaded and warm; the page cache of the landed files is not in it.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.machine import Machine, Room
from benchmarks.runs import Case, Measured, simulate
from streamoff.sim.sizes import format_size
from streamoff.types import MIB

__all__ = ["Check", "MemoryReport", "Row", "cases", "checks", "measure"]

ENGINES: Final = ("columnar", "in-time", "memory")
SHAPES: Final = ("many", "1")
SITES: Final = (2, 8, 16)
MODEL_BYTES: Final = 512 * MIB
QUICK_MODEL_BYTES: Final = 64 * MIB

FIXED_BYTES: Final = 96 * MIB
"""What offload may add beside the accumulator, whatever the model and the number of sites."""
GROWTH_BYTES: Final = 8 * MIB
"""What more sites, or a larger tensor, may add to that."""

_NAMES: Final = {
    "columnar": "offload, columnar",
    "in-time": "offload, in-time",
    "memory": "no offload",
    "many": "1000 tensors",
    "1": "one tensor",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A case and what it took, or why it was not (or could not be) measured."""

    case: Case
    measured: Measured | None
    skipped: str = ""
    failed: str = ""

    @property
    def delta(self) -> int | None:
        """Bytes above the baseline, if measured."""
        return None if self.measured is None else self.measured.peak_delta_bytes


@dataclass(frozen=True, slots=True)
class Check:
    """A promise about rows: ``value`` may not exceed ``limit``; without a value it was not measured."""

    promise: str
    value: int | None
    limit: int

    @property
    def holds(self) -> bool | None:
        """Whether it holds; None if it was not measured."""
        return None if self.value is None else self.value <= self.limit

    def to_text(self) -> str:
        """Return one line."""
        if self.value is None:
            return f"not measured  {self.promise}"
        word = "holds" if self.holds else "BROKEN"
        return f"{word:12}  {self.promise}: {_mib(self.value)} MiB of {_mib(self.limit)} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What the suite measured."""

    machine: Machine
    model_bytes: int
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed and no promise is broken; skipped rows do not count."""
        broken = any(check.holds is False for check in self.checks)
        return not broken and not any(row.failed for row in self.rows)

    def to_text(self) -> str:
        """Return the machine, the README's table, every row, and the checks."""
        return "\n".join(
            [
                self.machine.to_text(),
                "",
                *_summary(self.rows, self.model_bytes),
                "",
                *_details(self.rows),
                "",
                *(check.to_text() for check in self.checks),
            ]
        )

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values; sizes are bytes."""
        return {
            "suite": "memory",
            "machine": self.machine.to_json(),
            "model_bytes": self.model_bytes,
            "rows": [asdict(row) for row in self.rows],
            "checks": [{**asdict(check), "holds": check.holds} for check in self.checks],
        }


def cases(model_bytes: int) -> Iterator[Case]:
    """Every case, the small ones of each kind first."""
    for engine, shapes, sites in product(ENGINES, SHAPES, SITES):
        yield Case(engine=engine, shapes=shapes, sites=sites, model_bytes=model_bytes)


def measure(*, quick: bool) -> MemoryReport:
    """Measure every case that fits into what is free; progress goes to stderr."""
    model_bytes = QUICK_MODEL_BYTES if quick else MODEL_BYTES
    scratch = Path(tempfile.gettempdir())
    rows = tuple(_row(case, scratch) for case in cases(model_bytes))
    return MemoryReport(
        machine=Machine.here(scratch),
        model_bytes=model_bytes,
        rows=rows,
        checks=tuple(checks(rows, model_bytes)),
    )


def _row(case: Case, scratch: Path) -> Row:
    lack = Room.at(scratch).lacks(ram=case.ram_bytes, disk=case.disk_bytes)
    if lack is not None:
        row = Row(case, None, skipped=lack)
    else:
        found = simulate(case)
        row = Row(case, None, failed=found) if isinstance(found, str) else Row(case, found)
    sys.stderr.write(f"{case}: {_said(row)}\n")
    return row


def _said(row: Row) -> str:
    if row.measured is None:
        return f"skipped: {row.skipped}" if row.skipped else f"failed: {row.failed}"
    return f"{format_size(row.measured.peak_delta_bytes)} above the start"


def checks(rows: Sequence[Row], model_bytes: int) -> Iterator[Check]:
    """Compare what was measured with what is promised.

    Args:
        rows: Of one model size.
        model_bytes: That size; the accumulator of the float32 model is as large.
    """
    columnar = [row.delta for row in rows if row.case.engine == "columnar"]
    yield Check("columnar, any sites and shapes", _largest(columnar), FIXED_BYTES)
    in_time = [row.delta for row in rows if row.case.engine == "in-time"]
    yield Check(
        "in-time beside its float32 accumulator, any sites and shapes",
        _minus(_largest(in_time), model_bytes),
        FIXED_BYTES,
    )
    few, most = min(SITES), max(SITES)
    found = {(row.case.engine, row.case.shapes, row.case.sites): row.delta for row in rows}
    for engine in ("columnar", "in-time"):
        for shapes in SHAPES:
            growth = _minus(found.get((engine, shapes, most)), found.get((engine, shapes, few)))
            promise = f"{engine}, {_NAMES[shapes]}: {most} sites - {few} sites"
            yield Check(promise, growth, GROWTH_BYTES)
        giant = _minus(found.get((engine, "1", most)), found.get((engine, "many", most)))
        promise = f"{engine}, {most} sites: {_NAMES['1']} - {_NAMES['many']}"
        yield Check(promise, giant, GROWTH_BYTES)


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _minus(value: int | None, other: int | None) -> int | None:
    return None if value is None or other is None else value - other


def _summary(rows: Sequence[Row], model_bytes: int) -> Iterator[str]:
    """The README's table: a line per engine and shapes, a column per number of sites."""
    found = {(row.case.engine, row.case.shapes, row.case.sites): row for row in rows}
    head = "".join(f" {sites} sites |" for sites in SITES)
    yield f"| MiB above the start, model of {format_size(model_bytes)} |{head}"
    yield "|---|" + "---:|" * len(SITES)
    for engine, shapes in product(ENGINES, SHAPES):
        cells = [_cell(found[engine, shapes, sites]) for sites in SITES]
        yield f"| {_NAMES[engine]}, {_NAMES[shapes]} | " + " | ".join(cells) + " |"


def _cell(row: Row) -> str:
    if row.delta is None:
        return "skipped" if row.skipped else "failed"
    return _mib(row.delta)


def _details(rows: Sequence[Row]) -> Iterator[str]:
    yield "| aggregation | tensors | sites | MiB above the start | MiB of scratch | seconds |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in rows:
        case, measured = row.case, row.measured
        if measured is None:
            facts = [_cell(row), "-", "-"]
        else:
            facts = [
                _mib(measured.peak_delta_bytes),
                f"{measured.scratch_bytes / MIB:.0f}",
                f"{measured.seconds:.0f}",
            ]
        cells = [_NAMES[case.engine], _NAMES[case.shapes], str(case.sites), *facts]
        yield "| " + " | ".join(cells) + " |"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}" if abs(nbytes) < 1000 * MIB else f"{nbytes / MIB:.0f}"
