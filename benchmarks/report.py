"""What a suite returns: figures, the table they come from, and the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.gates import Check, checks
from benchmarks.machine import Machine
from benchmarks.pairs import Series, ratios, spread
from streamoff.sim.tables import aligned

__all__ = ["HEAD", "Report", "row", "samples_of"]

HEAD: Final = (
    "",
    "ours MiB/s",
    "theirs",
    "ratio",
    "CPU s/GiB ours",
    "theirs",
    "receiver +MiB ours",
    "theirs",
    "faults/MiB ours",
    "theirs",
)
"""Of a table of :func:`row`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of a suite.

    Args:
        title: What was measured, and how often.
        machine: Where.
        figures: By name; those of :data:`~benchmarks.gates.GATES` are checked.
        rows: The table for people, its head first.
        notes: What else they should know, a line each.
        samples: Everything that was measured, as plain JSON values.
        quick: Whether it was too small for most checks.
    """

    title: str
    machine: Machine
    figures: Mapping[str, float]
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    samples: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False

    @property
    def checks(self) -> tuple[Check, ...]:
        """Figures beside their bounds."""
        return checks(self.figures, quick=self.quick)

    @property
    def passed(self) -> bool:
        """Whether no bound is missed."""
        return all(check.holds is not False for check in self.checks)

    def to_text(self) -> str:
        """Return the table, the checks and the machine."""
        free = [
            f"{name} {value:.4g}"
            for name, value in self.figures.items()
            if name not in {check.figure for check in self.checks}
        ]
        parts = [
            [self.title],
            list(aligned(self.rows, left=frozenset({0}))) if self.rows else [],
            [*free, *self.notes],
            [check.to_text() for check in self.checks],
            [self.machine.to_text()],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values: figures at the top, by name."""
        return {
            **self.figures,
            "title": self.title,
            "quick": self.quick,
            "passed": self.passed,
            "machine": self.machine.to_json(),
            "samples": dict(self.samples),
        }


def row(label: str, found: Mapping[str, Series], *, apart: bool = False) -> list[str]:
    """A line about two ways to do the same, ``ours`` and ``theirs``.

    Args:
        label: The first cell.
        found: Both.
        apart: Whether they were done in different processes: only then is memory told apart.
    """
    ours, theirs = found["ours"], found["theirs"]
    return [
        label,
        spread(ours.throughput, 0),
        spread(theirs.throughput, 0),
        spread(ratios(found), 2),
        *(f"{side.cpu:.2f}" for side in (ours, theirs)),
        f"{ours.receiver_growth_mib:.0f}",
        f"{theirs.receiver_growth_mib:.0f}" if apart else "-",
        *(f"{side.faults:.0f}" for side in (ours, theirs)),
    ]


def samples_of(found: Mapping[str, Mapping[str, Series]]) -> dict[str, Any]:
    """Everything that was measured, as plain JSON values."""
    return {
        name: {way: series.to_json() for way, series in ways.items()}
        for name, ways in found.items()
    }
