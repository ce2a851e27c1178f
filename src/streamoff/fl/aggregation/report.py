"""What an aggregation says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from streamoff.tensors.state import State

__all__ = ["AggregationResult", "Reason", "Rejection", "RoundReport"]


class Reason(StrEnum):
    """Why a contribution was rejected."""

    DUPLICATE = "duplicate"
    JOB = "job"
    KIND = "kind"
    NONFINITE = "nonfinite"
    READ = "read"
    ROUND = "round"
    SPEC = "spec"


@dataclass(frozen=True, slots=True)
class Rejection:
    """One contribution that is not in the result.

    Args:
        site: Whose.
        reason: The rule it broke.
        message: The error in full: key, what was expected, what came.
        tensor: The first key concerned, if one is.
    """

    site: str
    reason: Reason
    message: str
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What went into a result, and what did not.

    Args:
        engine: The engine that made it.
        round: The round, from 0.
        job: The job.
        weights: Site to weight as given, of the contributions in the result, sorted by site. One of
            weight 0 is listed and was not read.
        rejected: In the order of rejection.
        partial: Key to the sites averaged, where it is not all of them.
        kept: Keys that keep their previous value although they are not excluded: no site of positive
            weight had them.
        dropped: Site to keys that the global model lacks and the ``drop`` policy ignored.
        restarts: How often the walk began again because a contribution failed on the way.
    """

    engine: str
    round: int
    job: str
    weights: Mapping[str, float]
    rejected: tuple[Rejection, ...] = ()
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    restarts: int = 0

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites in the result, sorted."""
        return tuple(self.weights)


@dataclass(frozen=True, slots=True)
class AggregationResult:
    """A finished round.

    Args:
        state: The new global model; the caller owns it.
        report: What went into it.
    """

    state: State
    report: RoundReport
