"""Participation: one site's part in one round, seen by the aggregator.

A result counts once. What comes before it was asked for, after the round closed, or a second time is
declined with the reason, before a byte of it is pulled. What a site sends after its result neither helps
nor harms it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from streamoff.machines.cells import Blame, Cell, Go, Ignore, Machine, Refuse
from streamoff.machines.records import replace

__all__ = [
    "PARTICIPATION",
    "CancelPull",
    "Closed",
    "Counted",
    "Decline",
    "Failed",
    "Forfeited",
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
    CUTTING = "cutting"
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
        return self.state not in {Q.AWAITED, Q.LANDING, Q.CUTTING}


@dataclass(frozen=True, slots=True)
class Offered:
    """A result of this round came; its envelope was in order."""

    message: int


@dataclass(frozen=True, slots=True)
class Forfeited:
    """No result can come: the model did not reach the site, it failed, or it sent something else."""

    reason: str


@dataclass(frozen=True, slots=True)
class Counted:
    """The result was pulled and the engine took it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The result was pulled in vain, or could not be read after all."""

    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The round closed: enough, or long enough."""

    reason: str


ParticipationEvent = Offered | Forfeited | Counted | Failed | Closed


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull the result and give it to the engine; comes back as Counted or Failed, also when it is cut."""

    message: int


@dataclass(frozen=True, slots=True)
class Decline:
    """Tell the site that its result is not wanted, and why."""

    message: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Stop pulling the result; one that has landed still counts."""

    reason: str


ParticipationEffect = Pull | Decline | CancelPull
Step = tuple[Participation, tuple[ParticipationEffect, ...]]


def _pull(record: Participation, event: Offered) -> Step:
    return record, (Pull(event.message),)


def _second(record: Participation, event: Offered) -> Step:
    return record, (Decline(event.message, "a second result of this round"),)


def _spent(record: Participation, event: Offered) -> Step:
    return record, (Decline(event.message, f"the site has failed in this round: {record.reason}"),)


def _too_late(record: Participation, event: Offered) -> Step:
    return record, (Decline(event.message, f"too late: {record.reason}"),)


def _count(record: Participation, event: Counted) -> Step:  # noqa: ARG001 - the fact is enough
    return replace(record, reason=""), ()


def _forfeit(record: Participation, event: Forfeited) -> Step:
    return replace(record, reason=event.reason), ()


def _fail(record: Participation, event: Failed) -> Step:
    return replace(record, reason=event.reason), ()


def _was_cut(record: Participation, event: Failed) -> Step:  # noqa: ARG001 - the closing was first
    return record, ()


def _miss(record: Participation, event: Closed) -> Step:
    return replace(record, reason=event.reason), ()


def _cut(record: Participation, event: Closed) -> Step:
    return replace(record, reason=event.reason), (CancelPull(event.reason),)


class Cells(NamedTuple):
    """One row: a cell per event."""

    offered: Cell[Q, Participation, ParticipationEffect, Offered]
    forfeited: Cell[Q, Participation, ParticipationEffect, Forfeited]
    counted: Cell[Q, Participation, ParticipationEffect, Counted]
    failed: Cell[Q, Participation, ParticipationEffect, Failed]
    closed: Cell[Q, Participation, ParticipationEffect, Closed]


pull = Go(Q.LANDING, _pull)
dup_l = Go(Q.LANDING, _second)
dup_c = Go(Q.CUTTING, _too_late)
dup_a = Go(Q.ACCEPTED, _second)
spent = Go(Q.FAILED, _spent)
late = Go(Q.LATE, _too_late)
forfeit = Go(Q.FAILED, _forfeit)
count = Go(Q.ACCEPTED, _count)
fail = Go(Q.FAILED, _fail)
revoke = Go(Q.FAILED, _fail)
miss = Go(Q.LATE, _miss)
cut = Go(Q.CUTTING, _cut)
was_cut = Go(Q.LATE, _was_cut)
has = Ignore("it has sent a result, and that one stands")
over = Ignore("its part in the round is over")
closing = Ignore("the round has closed already")
ours = Refuse(Blame.LOCAL)

# fmt: off
TABLE: Final[dict[Q, Cells]] = {
    #                 Offered Forfeited Counted Failed   Closed
    Q.AWAITED:  Cells(pull,   forfeit,  ours,   ours,    miss   ),
    Q.LANDING:  Cells(dup_l,  has,      count,  fail,    cut    ),
    Q.CUTTING:  Cells(dup_c,  has,      count,  was_cut, closing),
    Q.ACCEPTED: Cells(dup_a,  has,      ours,   revoke,  over   ),
    Q.FAILED:   Cells(spent,  over,     ours,   over,    over   ),
    Q.LATE:     Cells(late,   over,     ours,   over,    over   ),
}
# fmt: on

PARTICIPATION: Final = Machine[Q, Participation, ParticipationEffect, ParticipationEvent](
    "participation",
    TABLE,
    (Offered, Forfeited, Counted, Failed, Closed),
    initial=Q.AWAITED,
    final=frozenset({Q.FAILED, Q.LATE}),
)
