"""How things end, in the same words on both sides: one line in the log and one count for each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from streamoff.errors import (
    GoneError,
    PeerRefusedError,
    SourceChangedError,
    SourceFailedError,
    SourceLostError,
    StreamoffError,
    TransferTimeoutError,
    UnreachableError,
)
from streamoff.runtime.sparing import Lines
from streamoff.types import Address, Outcome, OutcomeStatus, Verdict

__all__ = [
    "LEVELS",
    "End",
    "Endings",
    "cause_of",
    "end_of_error",
    "end_of_outcome",
    "failures",
    "some",
]

NAMED: Final = 4
"""Refs, slots or receivers that a line names; the others are counted."""


class End(StrEnum):
    """How a download or a transaction ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    ABORTED = "aborted"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    REFUSED = "refused"
    LINK_LOST = "link lost"
    SOURCE_FAILED = "source failed"
    LANDING_FAILED = "landing failed"
    DEFECT = "defect"


LEVELS: Final[Mapping[End, int]] = MappingProxyType(
    {
        End.COMPLETED: logging.DEBUG,
        End.LANDING_FAILED: logging.WARNING,
        End.DEFECT: logging.ERROR,
    }
)
"""By who must act: nobody, whoever runs this machine, or we; everything else is told to whoever asks."""

_OF_ERRORS: Final[tuple[tuple[type[StreamoffError], End], ...]] = (
    (TransferTimeoutError, End.TIMED_OUT),
    (SourceLostError, End.LINK_LOST),
    (UnreachableError, End.LINK_LOST),
    (SourceFailedError, End.SOURCE_FAILED),
    (SourceChangedError, End.SOURCE_FAILED),
    (GoneError, End.REFUSED),
    (PeerRefusedError, End.REFUSED),
)

_OF_REASONS: Final[tuple[tuple[str, End], ...]] = (
    ("acquire_timeout", End.TIMED_OUT),
    ("idle_timeout", End.TIMED_OUT),
    ("deadline", End.TIMED_OUT),
    ("source_changed", End.SOURCE_FAILED),
    ("source_failed", End.SOURCE_FAILED),
)


def end_of_error(error: StreamoffError) -> End:
    """What the first cause of a download's end comes to; what is none of the others' fault is our landing's."""
    return next((end for kind, end in _OF_ERRORS if isinstance(error, kind)), End.LANDING_FAILED)


def end_of_outcome(outcome: Outcome) -> End:
    """What the outcome of a transaction comes to."""
    if outcome.status is not OutcomeStatus.FAILED:
        return End(outcome.status.value)
    reasons = (end for reason, end in _OF_REASONS if outcome.reason.startswith(reason))
    return next(reasons, End.FAILED)


def some(names: Iterable[str]) -> str:
    """The first few of many names, and how many there are besides."""
    every = tuple(names)
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return ", ".join(every[:NAMED]) + more


def failures(outcome: Outcome) -> dict[str, str]:
    """The slots of a transaction that failed on some ref, and the first reason of each."""
    failed = {
        slot: [end.reason for end in ends.values() if end.verdict is Verdict.FAILED]
        for slot, ends in outcome.slots.items()
    }
    return {slot: reasons[0] for slot, reasons in failed.items() if reasons}


def cause_of(outcome: Outcome) -> str:
    """Why a transaction did not complete: its reason, and those of its slots that have others."""
    failed = failures(outcome)
    alike = [slot for slot, reason in failed.items() if reason == outcome.reason]
    others = [f"{slot}: {reason}" for slot, reason in failed.items() if reason != outcome.reason]
    whose = f" ({some(alike)})" if alike and len(outcome.slots) > 1 else ""
    return "; ".join(filter(None, (f"{outcome.reason}{whose}", some(others))))


class Endings:
    """What has ended at one endpoint, of one sort: counts, and lines told sparingly, each end for itself.

    Args:
        what: The sort, e.g. ``"download"``.
        logger: Where the lines go.
        me: Whose they are.
        lines: Of the endpoint.
    """

    def __init__(self, what: str, logger: logging.Logger, me: Address, lines: Lines) -> None:
        self.counts: Counter[End] = Counter()
        self._what = what
        self._logger = logger
        self._me = me
        self._lines = lines

    def __call__(
        self,
        end: End,
        *,
        seconds: float,
        where: Mapping[str, object],
        cause: str,
        cleaned: str,
        story: tuple[str, ...] = (),
        exc_info: BaseException | None = None,
    ) -> None:
        """Count an end and tell it.

        Args:
            end: Which.
            seconds: What it took.
            where: Facts such as job, site and ref; those that are None are left out.
            cause: Why, in a clause; empty where nothing needs a reason.
            cleaned: What was done with what there was.
            story: For handlers that want it; the line has no room for it.
            exc_info: Whose traceback follows the line.
        """
        self.counts[end] += 1
        level = LEVELS.get(end, logging.INFO)
        if not self._logger.isEnabledFor(level):
            return
        known = {name: value for name, value in where.items() if value is not None}
        told = ", ".join(f"{name}={value}" for name, value in known.items())
        self._lines.tell(
            self._logger,
            level,
            f"{self._what} {end.value}",
            "%s: %s %s after %.2f s [%s]: %s",
            self._me,
            self._what,
            end.value,
            seconds,
            told,
            "; ".join(filter(None, (cause, cleaned))),
            facts={
                "what": self._what,
                "end": end.value,
                "seconds": seconds,
                **known,
                "cause": cause,
                "cleaned": cleaned,
                "story": story,
            },
            exc_info=exc_info,
        )

    def snapshot(self) -> Mapping[End, int]:
        """How many ended how, since the endpoint started."""
        return MappingProxyType(dict(self.counts))
