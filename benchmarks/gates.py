"""What is promised: a bound for each figure that has one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["GATES", "Check", "Gate", "checks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A bound.

    Args:
        at_least: The figure may not be below it.
        at_most: The figure may not be above it.
        at_any_size: Whether it holds for a small payload as well, where fixed costs are most of the time.
    """

    at_least: float | None = None
    at_most: float | None = None
    at_any_size: bool = False

    def holds(self, value: float) -> bool:
        """Whether a figure is within it."""
        low = self.at_least is None or value >= self.at_least
        return low and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return f"at most {self.at_most:g}"


GATES: Final[Mapping[str, Gate]] = {
    "disk_vs_raw": Gate(at_least=0.85),
    "memory_vs_raw": Gate(at_least=0.85),
    "cpu_vs_raw": Gate(at_most=1.3),
    "tls_vs_raw_tls": Gate(at_least=0.85),
    "disk_vs_peer": Gate(at_least=8.0),
    "memory_vs_peer": Gate(at_least=8.0),
    "refs_per_second": Gate(at_least=1500.0),
    "transfers_per_second": Gate(at_least=300.0),
    "receiver_growth_mib": Gate(at_most=40.0, at_any_size=True),
    "source_growth_mib": Gate(at_most=16.0, at_any_size=True),
    "relay_growth_mib": Gate(at_most=16.0, at_any_size=True),
    "control_latency_seconds": Gate(at_most=0.2),
    "lines_used": Gate(at_least=0.8),
    "overrun_seconds": Gate(at_most=0.25, at_any_size=True),
    "cancel_p99_ms": Gate(at_most=50.0),
    "notice_p99_ms": Gate(at_most=50.0),
    "left_entries": Gate(at_most=0.0, at_any_size=True),
}
"""Figure to bound. Ratios are taken inside one run, so that they mean the same on any machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A figure beside its bound; ``holds`` is None where a quick run says nothing about it."""

    figure: str
    value: float
    gate: Gate
    holds: bool | None

    def to_text(self) -> str:
        """Return one line."""
        word = {True: "ok", False: "FAIL", None: "-"}[self.holds]
        why = "" if self.holds is not None else ", not judged: quick"
        return f"{word:4}  {self.figure} {self.value:.4g} ({self.gate}{why})"


def checks(figures: Mapping[str, float], *, quick: bool) -> tuple[Check, ...]:
    """Compare figures with their bounds; those without one are left out."""
    return tuple(
        Check(
            figure=name,
            value=value,
            gate=gate,
            holds=gate.holds(value) if gate.at_any_size or not quick else None,
        )
        for name, value in figures.items()
        if (gate := GATES.get(name)) is not None
    )
