"""Participation: one site's part in one round, seen by the aggregator.

A result counts once. What comes before it was asked for, after the round closed, or a second time is
declined with the reason, before a byte of it is pulled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from streamoff.machines.cells import Blame, Cell, Go, Ignore, Machine, Refuse

__all__ = [
    "PARTICIPATION",
    "CancelPull",
    "Closed",
    "Counted",
    "Decline",
    "Failed",
    "Offered",
    "Participation",
    "ParticipationEffect",
    "ParticipationEvent",
    "ParticipationState",
    "Pull",
]


class ParticipationState(StrEnum):
    """How far a site has come in a round."""

    AWAITED = "awaited"
    LANDING = "landing"
    ACCEPTED = "accepted"
    FAILED = "failed"
    LATE = "late"


Q = ParticipationState


@dataclass(frozen=True, slots=True)
class Participation:
    """One site in one round.

    Args:
        site: Its address.
        state: The row of the table.
        reason: Why it failed or is late; empty otherwise.
    """

    site: str
    state: ParticipationState = ParticipationState.AWAITED
    reason: str = ""

    @property
    def settled(self) -> bool:
        """Whether nothing more is awaited of it."""
        return self.state not in {Q.AWAITED, Q.LANDING}


@dataclass(frozen=True, slots=True)
class Offered:
    """A result of this round came; its envelope was in order."""

    message: int


@dataclass(frozen=True, slots=True)
class Counted:
    """The result was pulled and the engine took it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The site said so, its result was refused, or its transfer failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The round closed: enough, or long enough."""

    reason: str


ParticipationEvent = Offered | Counted | Failed | Closed


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull the result; comes back as Counted or Failed."""

    message: int


@dataclass(frozen=True, slots=True)
class Decline:
    """Tell the site that its result is not wanted, and why."""

    message: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Stop pulling the result."""

    reason: str


ParticipationEffect = Pull | Decline | CancelPull
Step = tuple[Participation, tuple[ParticipationEffect, ...]]


def _pull(record: Participation, event: Offered) -> Step:
    return record, (Pull(event.message),)


def _second(record: Participation, event: Offered) -> Step:
    return record, (Decline(event.message, "a second result of this round"),)


def _too_late(record: Participation, event: Offered) -> Step:
    return record, (Decline(event.message, f"too late: {record.reason}"),)


def _count(record: Participation, event: Counted) -> Step:  # noqa: ARG001 - the fact is enough
    return record, ()


def _fail(record: Participation, event: Failed) -> Step:
    return replace(record, reason=event.reason), ()


def _miss(record: Participation, event: Closed) -> Step:
    return replace(record, reason=event.reason), ()


def _cut(record: Participation, event: Closed) -> Step:
    return replace(record, reason=event.reason), (CancelPull(event.reason),)


class Cells(NamedTuple):
    """One row: a cell per event."""

    offered: Cell[Q, Participation, ParticipationEffect, Offered]
    counted: Cell[Q, Participation, ParticipationEffect, Counted]
    failed: Cell[Q, Participation, ParticipationEffect, Failed]
    closed: Cell[Q, Participation, ParticipationEffect, Closed]


pull = Go(Q.LANDING, _pull)
dup_l = Go(Q.LANDING, _second)
dup_a = Go(Q.ACCEPTED, _second)
dup_f = Go(Q.FAILED, _second)
late = Go(Q.LATE, _too_late)
count = Go(Q.ACCEPTED, _count)
fail = Go(Q.FAILED, _fail)
revoke = Go(Q.FAILED, _fail)
miss = Go(Q.LATE, _miss)
cut = Go(Q.LATE, _cut)
over = Ignore("its part in the round is over")
crossed = Ignore("the round closed while it was being pulled")
ours = Refuse(Blame.LOCAL)

# fmt: off
TABLE: Final[dict[Q, Cells]] = {
    #                 Offered Counted  Failed   Closed
    Q.AWAITED:  Cells(pull,   ours,    fail,    miss),
    Q.LANDING:  Cells(dup_l,  count,   fail,    cut ),
    Q.ACCEPTED: Cells(dup_a,  ours,    revoke,  over),
    Q.FAILED:   Cells(dup_f,  ours,    over,    over),
    Q.LATE:     Cells(late,   crossed, crossed, over),
}
# fmt: on

PARTICIPATION: Final = Machine[Q, Participation, ParticipationEffect, ParticipationEvent](
    "participation",
    TABLE,
    (Offered, Counted, Failed, Closed),
    initial=Q.AWAITED,
    final=frozenset({Q.FAILED, Q.LATE}),
)
