"""What an engine is, which one fits, and whether a round fits at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Protocol, Self, TypeAlias, get_args, runtime_checkable

from streamoff.errors import NoSpaceError, QuotaExceededError, UsageError
from streamoff.fl.aggregation.contribution import Contribution
from streamoff.fl.aggregation.report import AggregationResult
from streamoff.tensors.layout import Layout
from streamoff.tensors.writer import StateWriter

__all__ = [
    "Choice",
    "Engine",
    "EngineName",
    "NewWriter",
    "Stop",
    "check_engine",
    "choose_engine",
    "never_stop",
    "preflight",
]

Stop: TypeAlias = Callable[[], None]
"""Called between blocks; raises when the work is to be cut."""

NewWriter: TypeAlias = Callable[[Layout], StateWriter]
"""Makes the writer of one result; called again if a walk has to restart."""

EngineName = Literal["columnar", "in_time"]
Requested = Literal["auto", "columnar", "in_time"]

_GIB: Final = 1024**3


def never_stop() -> None:
    """Let the work go on."""


@runtime_checkable
class Engine(Protocol):
    """One round of aggregation.

    Synchronous and for one thread at a time; a context manager that closes. The engine owns what it is
    given: a contribution's state is released when the contribution is rejected, folded or averaged, and
    on :meth:`close`.
    """

    @property
    def name(self) -> EngineName:
        """How reports call the engine."""
        ...

    def add(self, contribution: Contribution, *, stop: Stop = never_stop) -> None:
        """Take one contribution.

        Raises:
            ContributionRejectedError: It broke a rule and is out; the round goes on without it.
            AggregationError: The round is lost; the previous model stands.
        """
        ...

    def finish(self, new_writer: NewWriter, *, stop: Stop = never_stop) -> AggregationResult:
        """Close the round and write the new model.

        Args:
            new_writer: Makes the writer; what it writes is finished or discarded, never half published.
            stop: Called between blocks.

        Raises:
            WeightError: All weights are 0.
            AggregationError: No contribution is left, or the round is lost.
            LandingError: The result cannot be written.
        """
        ...

    def close(self) -> None:
        """Release what is left; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine of a round.

    Args:
        engine: Its name.
        notice: Why it is not the default, for the log; None if it is.
    """

    engine: EngineName
    notice: str | None = None


def choose_engine(
    requested: Requested, *, sites: int, model_bytes: int, quota: int | None, free: int | None
) -> Choice:
    """Choose the engine of a round.

    Args:
        requested: ``auto`` is ``columnar`` where every contribution fits on disk at once, else
            ``in_time``. An explicit choice is taken as it is; :func:`preflight` refuses it if need be.
        sites: Contributions expected.
        model_bytes: Payload of one.
        quota: What is left of the job's own quota in bytes, or None: there is none.
        free: What the file system has left in bytes, or None: it does not say.

    Raises:
        UsageError: An argument is of the wrong type or range.
    """
    if requested not in get_args(Requested):
        raise UsageError("engine", expected=" | ".join(get_args(Requested)), got=requested)
    _check_numbers(sites, model_bytes, quota, free)
    if requested != "auto":
        return Choice(requested)
    needed = _disk_needed("columnar", sites, model_bytes, 1)
    for what, room in (("the job's quota", quota), ("the free space", free)):
        if room is not None and needed > room:
            return Choice(
                "in_time",
                f"{sites} contributions and a result of {_size(model_bytes)} each need "
                f"{_size(needed)}, {what} is {_size(room)}: folding each on arrival (in_time). "
                "Results then depend on the order of arrival in their last bits",
            )
    return Choice("columnar")


def preflight(
    engine: EngineName,
    *,
    sites: int,
    model_bytes: int,
    quota: int | None,
    free: int | None,
    concurrent: int = 1,
) -> int:
    """Refuse a round that cannot fit on disk, before anything is pulled.

    Args:
        engine: ``columnar`` keeps every contribution until the round closes, ``in_time`` at most
            ``concurrent`` of them.
        sites: Contributions expected.
        model_bytes: Payload of one; the result has the same size.
        quota: As in :func:`choose_engine`.
        free: As in :func:`choose_engine`.
        concurrent: Contributions that land at the same time, at least 1.

    Returns:
        The bytes of disk the round needs.

    Raises:
        QuotaExceededError: More than the quota leaves.
        NoSpaceError: More than the file system has.
        UsageError: An argument is of the wrong type or range.
    """
    check_engine(engine)
    _check_numbers(sites, model_bytes, quota, free)
    if type(concurrent) is not int or concurrent < 1:
        raise UsageError("concurrent", expected="an int from 1", got=concurrent)
    needed = _disk_needed(engine, sites, model_bytes, concurrent)
    hint = "Raise it, use engine='in_time', or have fewer sites per round"
    if quota is not None and needed > quota:
        raise QuotaExceededError(
            "the round does not fit the job's quota",
            expected=f"at least {needed} bytes",
            got=f"{quota} bytes",
            hint=hint,
            sites=sites,
            model_bytes=model_bytes,
            engine=engine,
        )
    if free is not None and needed > free:
        raise NoSpaceError(
            "the round does not fit on the file system",
            expected=f"at least {needed} bytes",
            got=f"{free} bytes",
            hint=hint,
            sites=sites,
            model_bytes=model_bytes,
            engine=engine,
        )
    return needed


def check_engine(name: object) -> None:
    """Make sure that there is such an engine.

    Raises:
        UsageError: There is none.
    """
    if name not in get_args(EngineName):
        raise UsageError("engine", expected=" | ".join(get_args(EngineName)), got=name)


def _disk_needed(engine: EngineName, sites: int, model_bytes: int, concurrent: int) -> int:
    held = sites if engine == "columnar" else min(sites, concurrent)
    return (held + 1) * model_bytes


def _check_numbers(sites: int, model_bytes: int, quota: int | None, free: int | None) -> None:
    for name, number, least in (
        ("sites", sites, 1),
        ("model_bytes", model_bytes, 0),
        ("quota", quota, 0),
        ("free", free, 0),
    ):
        if number is None and name in {"quota", "free"}:
            continue
        if type(number) is not int or number < least:
            raise UsageError(name, expected=f"an int from {least}", got=number)


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB // 100 else f"{nbytes} bytes"
