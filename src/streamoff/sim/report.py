"""What a simulation did, as data, as JSON and as a table for people."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamoff.sim.sizes import format_number, format_size
from streamoff.sim.tables import aligned

__all__ = [
    "MemoryUse",
    "ModelFile",
    "RoundRow",
    "ScratchUse",
    "SimulationReport",
    "TransactionCounts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One round.

    Args:
        round: Number, counted from 1.
        seconds: From the first byte of the broadcast to the new global model.
        accepted: Sites whose contribution is in the average, in the order of the sites.
        failed: Site to the reason why its contribution is not.
        bytes_landed: Payload bytes of the contributions that reached the aggregator.
        metrics: Of the new global model, by name.
    """

    round: int
    seconds: float
    accepted: tuple[str, ...]
    failed: Mapping[str, str]
    bytes_landed: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """The published global model: absolute path, length in bytes, SHA-256 in hex."""

    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Resident memory of the process, see :mod:`streamoff.sim.memory`.

    Args:
        baseline_bytes: Before the first round, with torch loaded and warm.
        peak_bytes: The largest sample.
    """

    baseline_bytes: int
    peak_bytes: int

    @property
    def peak_delta_bytes(self) -> int:
        """How far the peak lies above the baseline."""
        return self.peak_bytes - self.baseline_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchUse:
    """Disk space below the scratch directory: the largest sample, and what the run left behind."""

    peak_bytes: int
    left_bytes: int
    left_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionCounts:
    """How the transactions of all endpoints ended; open ones were never settled."""

    completed: int
    failed: int
    open: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What a simulation did.

    Args:
        recipe: Name of the recipe, e.g. ``"fedavg"``.
        backend: ``"asyncio"`` or ``"trio"``.
        engine: Who ran the sites, e.g. ``"local"``.
        sites: Number of sites.
        rounds: One row per round that ended, in order.
        model: The published model.
        memory: Resident memory of the process.
        scratch: Disk space below the scratch directory.
        transactions: Of all endpoints.
    """

    recipe: str
    backend: str
    engine: str
    sites: int
    rounds: tuple[RoundRow, ...]
    model: ModelFile
    memory: MemoryUse
    scratch: ScratchUse
    transactions: TransactionCounts

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last global model; empty without a round."""
        return self.rounds[-1].metrics if self.rounds else {}

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values.

        Returns:
            A fresh dictionary of strings, numbers, lists and dictionaries. ``accepted`` and ``failed`` are
            numbers of sites; a metric that is not finite is None, because JSON has no such number.
        """
        return {
            "recipe": self.recipe,
            "backend": self.backend,
            "engine": self.engine,
            "sites": self.sites,
            "rounds": [
                {
                    "round": row.round,
                    "seconds": row.seconds,
                    "accepted": len(row.accepted),
                    "failed": len(row.failed),
                    "bytes_landed": row.bytes_landed,
                    "metrics": _finite(row.metrics),
                }
                for row in self.rounds
            ],
            "metrics": _finite(self.metrics),
            "model": {
                "path": str(self.model.path),
                "bytes": self.model.bytes,
                "sha256": self.model.sha256,
            },
            "memory": {
                "baseline_bytes": self.memory.baseline_bytes,
                "peak_bytes": self.memory.peak_bytes,
                "peak_delta_bytes": self.memory.peak_delta_bytes,
            },
            "scratch": {
                "peak_bytes": self.scratch.peak_bytes,
                "left_bytes": self.scratch.left_bytes,
                "left_entries": self.scratch.left_entries,
            },
            "transactions": {
                "completed": self.transactions.completed,
                "failed": self.transactions.failed,
                "open": self.transactions.open,
            },
        }

    def to_text(self) -> str:
        """Return the report as an aligned table and a few lines, without a trailing newline."""
        names = sorted({name for row in self.rounds for name in row.metrics})
        head = ["round", "seconds", "accepted", "failed", "landed", *names]
        table = [
            [
                str(row.round),
                f"{row.seconds:.2f}",
                str(len(row.accepted)),
                str(len(row.failed)),
                format_size(row.bytes_landed),
                *(
                    format_number(row.metrics[name]) if name in row.metrics else "-"
                    for name in names
                ),
            ]
            for row in self.rounds
        ]
        return "\n".join(
            [
                f"{self.recipe}: {self.sites} sites, {self.backend}, {self.engine} engine",
                "",
                *aligned([head, *table]),
                *self._failures(),
                "",
                *self._facts(),
            ]
        )

    def _failures(self) -> Iterator[str]:
        for row in self.rounds:
            for site, reason in row.failed.items():
                yield f"round {row.round}: {site} failed: {reason}"

    def _facts(self) -> Iterator[str]:
        memory, scratch, ended = self.memory, self.scratch, self.transactions
        peak, delta, start = map(
            format_size, (memory.peak_bytes, memory.peak_delta_bytes, memory.baseline_bytes)
        )
        yield f"model         {self.model.path} ({format_size(self.model.bytes)})"
        yield f"sha256        {self.model.sha256}"
        yield f"memory        {peak} at most, {delta} above the start ({start})"
        yield f"scratch       {format_size(scratch.peak_bytes)} at most, " + (
            f"{scratch.left_entries} entries left ({format_size(scratch.left_bytes)})"
            if scratch.left_entries
            else "nothing left"
        )
        yield f"transactions  {ended.completed} completed, {ended.failed} failed, {ended.open} open"


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
