"""What server and sites say to each other around the tensors, checked before anything is pulled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from streamoff.errors import ContributionRejectedError
from streamoff.fl.aggregation.contribution import Kind
from streamoff.fl.aggregation.weights import weight_of

__all__ = [
    "MAX_METRICS",
    "MAX_TEXT",
    "ResultEnvelope",
    "TaskEnvelope",
    "result_topic",
    "task_topic",
]

MAX_METRICS: Final = 256
"""Metrics of one result."""
MAX_TEXT: Final = 1024
"""Characters of a job, a kind, a metric's name; of an error this many are kept."""
MAX_ROUND: Final = 2**31


def task_topic(job: str) -> str:
    """Where a site gets its tasks."""
    return f"streamoff.{job}.task"


def result_topic(job: str) -> str:
    """Where the server gets results."""
    return f"streamoff.{job}.result"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnvelope:
    """A task: train on these parameters, or stop.

    Args:
        job: The job.
        round: From 1.
        rounds: How many there will be.
        kind: What the server wants back.
        params: Global parameters by name: tensors, or refs while they travel. None: the job is over.
    """

    job: str
    round: int
    rounds: int
    kind: Kind = Kind.FULL
    params: Any = None

    def tree(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "job": self.job,
            "round": self.round,
            "rounds": self.rounds,
            "kind": self.kind.value,
            "params": self.params,
        }

    @classmethod
    def of(cls, tree: object, *, site: str) -> TaskEnvelope:
        """Check what came.

        Raises:
            ContributionRejectedError: It is no task.
        """
        fields = _fields(tree, {"job": str, "round": int, "rounds": int, "kind": str}, site)
        _check_range(fields["rounds"], "rounds", site)
        return cls(
            job=fields["job"],
            round=fields["round"],
            rounds=fields["rounds"],
            kind=_kind(fields["kind"], site),
            params=fields["params"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultEnvelope:
    """What a site sends back.

    Args:
        job: The job it was made for.
        round: The round it was made for.
        weight: Finite and not negative, usually the number of samples.
        kind: Whether ``params`` are a model or a difference.
        params: By name: tensors, or refs while they travel.
        metrics: Of the training, by name; numbers.
        error: Why there is no result; empty if there is one.
    """

    job: str
    round: int
    weight: float = 0.0
    kind: Kind = Kind.FULL
    params: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    def tree(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "job": self.job,
            "round": self.round,
            "weight": self.weight,
            "kind": self.kind.value,
            "params": self.params,
            "metrics": dict(self.metrics),
            "error": self.error,
        }

    @classmethod
    def of(cls, tree: object, *, site: str) -> ResultEnvelope:
        """Check what came; nothing has been pulled.

        Raises:
            ContributionRejectedError: It is no result.
            WeightError: Its weight is not a finite number, 0 or more.
        """
        wanted = {"job": str, "round": int, "kind": str, "metrics": dict, "error": str}
        fields = _fields(tree, wanted, site)
        error = fields["error"][:MAX_TEXT]
        return cls(
            job=fields["job"],
            round=fields["round"],
            weight=0.0 if error else weight_of(fields.get("weight"), site=site),
            kind=_kind(fields["kind"], site),
            params=fields["params"],
            metrics=_metrics(fields["metrics"], site),
            error=error,
        )


def _fields(tree: object, wanted: Mapping[str, type], site: str) -> dict[str, Any]:
    if type(tree) is not dict or "params" not in tree:
        raise ContributionRejectedError("no envelope", got=type(tree).__name__, site=site)
    for name, kind in wanted.items():
        if type(tree.get(name)) is not kind:
            raise ContributionRejectedError(
                f"envelope field {name!r}",
                expected=kind.__name__,
                got=type(tree.get(name)).__name__,
                site=site,
            )
    for name in ("job", "kind"):
        if len(tree[name]) > MAX_TEXT:
            raise ContributionRejectedError(
                f"envelope field {name!r}",
                expected=f"at most {MAX_TEXT} characters",
                got=len(tree[name]),
                site=site,
            )
    _check_range(tree["round"], "round", site)
    return tree


def _check_range(number: int, name: str, site: str) -> None:
    """Bound a number before it is ever shown: a peer's int may have more digits than Python prints."""
    if not 0 <= number < MAX_ROUND:
        raise ContributionRejectedError(
            f"envelope field {name!r}", expected=f"0 to {MAX_ROUND - 1}", got="another", site=site
        )


def _kind(text: str, site: str) -> Kind:
    try:
        return Kind(text)
    except ValueError as error:
        raise ContributionRejectedError(
            "envelope field 'kind'", expected=" or ".join(Kind), got=text, site=site
        ) from error


def _metrics(values: dict[Any, Any], site: str) -> dict[str, float]:
    """Numbers by name; anything else costs the result, not the job."""
    if len(values) > MAX_METRICS:
        raise ContributionRejectedError(
            "metrics", expected=f"at most {MAX_METRICS}", got=len(values), site=site
        )
    metrics: dict[str, float] = {}
    for name, value in values.items():
        if type(name) is not str or len(name) > MAX_TEXT:
            raise ContributionRejectedError(
                "a metric's name",
                expected=f"at most {MAX_TEXT} characters",
                got=type(name).__name__,
                site=site,
            )
        try:
            number = float(value) if type(value) in {int, float} else None
        except OverflowError:
            number = None
        if number is None:
            raise ContributionRejectedError(
                "a metric",
                expected="a number that fits a float",
                got=type(value).__name__,
                site=site,
                metric=name,
            )
        metrics[name] = number
    return metrics
