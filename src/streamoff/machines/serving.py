"""Serving: one receiver's place on one ref, seen by the producer.

``open`` binds the slot to the first address that presents its ticket. When every wanted range has been
served the slot is provisional; the receiver's confirmation makes it final, with its word over ours.
Final states absorb everything: a late request is answered, never obeyed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from streamoff.machines.cells import Blame, Cell, Go, Ignore, Machine, Refuse
from streamoff.machines.records import replace
from streamoff.types import (
    NO_RANGES,
    Address,
    ByteRange,
    Capability,
    RangeSet,
    RefId,
    Slot,
    SlotVerdict,
    Verdict,
)

__all__ = [
    "SERVING",
    "AckConfirm",
    "AnswerGone",
    "AnswerOpen",
    "Cancelled",
    "ConfirmedFailure",
    "ConfirmedStale",
    "ConfirmedSuccess",
    "Declined",
    "Dropped",
    "Held",
    "Opened",
    "Origin",
    "Pulled",
    "ServeRange",
    "ServedAll",
    "ServedMore",
    "Serving",
    "ServingEffect",
    "ServingEvent",
    "ServingState",
    "SlotExpired",
]


class ServingState(StrEnum):
    """Where a slot stands on one ref."""

    UNSEEN = "unseen"
    ACQUIRED = "acquired"
    PROVISIONAL = "provisional"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


P = ServingState


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from and where its answer goes."""

    address: Address
    stream: int


@dataclass(frozen=True, slots=True)
class Serving:
    """One slot on one ref.

    Args:
        slot: The receiver's place; its ticket is the identity.
        ref: The ref.
        state: The row of the table.
        bound: The address that presented the ticket first.
        nonce: Identifies this life of the slot; a confirmation must carry it.
        capabilities: What both ends named.
        wanted: Payload ranges the receiver asked for when it opened.
        served: Payload ranges handed to the link.
        reason: Why it failed; empty otherwise.
    """

    slot: Slot
    ref: RefId
    state: ServingState = ServingState.UNSEEN
    bound: Address | None = None
    nonce: bytes = b""
    capabilities: frozenset[Capability] = frozenset()
    wanted: RangeSet = NO_RANGES
    served: RangeSet = NO_RANGES
    reason: str = ""

    @property
    def final(self) -> bool:
        """Whether the verdict is in."""
        return self.state in {P.SUCCEEDED, P.FAILED}

    @property
    def verdict(self) -> SlotVerdict:
        """The verdict as it stands."""
        kind = {P.SUCCEEDED: Verdict.SUCCEEDED, P.FAILED: Verdict.FAILED}
        return SlotVerdict(kind.get(self.state, Verdict.PENDING), self.reason, self.served.nbytes)


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The receiver presented its ticket; ``nonce`` is fresh and used only if it binds now.

    ``first`` is a range that it takes along with the answer, already checked; it saves the pull.
    """

    now: float
    origin: Origin
    nonce: bytes
    wanted: RangeSet
    capabilities: frozenset[Capability]
    first: ByteRange | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """The bound receiver asked for a range, already checked against what it may ask for."""

    now: float
    origin: Origin
    range: ByteRange


@dataclass(frozen=True, slots=True)
class ServedMore:
    """A range was handed to the link and wanted bytes are still unserved."""

    now: float
    range: ByteRange


@dataclass(frozen=True, slots=True)
class ServedAll:
    """A range was handed to the link and nothing wanted is left."""

    now: float
    range: ByteRange


@dataclass(frozen=True, slots=True)
class Held:
    """The bound receiver waits for its own disk, quota or turn; ``seconds`` are what is granted."""

    now: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ConfirmedSuccess:
    """The receiver has everything; nonce checked."""

    now: float
    origin: Origin


@dataclass(frozen=True, slots=True)
class ConfirmedFailure:
    """The receiver could not keep it; nonce checked."""

    now: float
    origin: Origin
    reason: str


@dataclass(frozen=True, slots=True)
class ConfirmedStale:
    """A confirmation of another life of this slot."""

    now: float
    origin: Origin


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The bound receiver gave up."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A ticket was presented only to say that nobody will pull."""

    now: float
    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class SlotExpired:
    """A budget of this slot ran out; ``reason`` names it."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The transaction ended under the slot; ``reason`` says why."""

    now: float
    reason: str


ServingEvent = (
    Opened
    | Pulled
    | ServedMore
    | ServedAll
    | Held
    | ConfirmedSuccess
    | ConfirmedFailure
    | ConfirmedStale
    | Cancelled
    | Declined
    | SlotExpired
    | Dropped
)


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerOpen:
    """Tell the receiver size, header length and digest, the nonce, both ends' capabilities and what follows."""

    ref: RefId
    origin: Origin
    nonce: bytes
    first: ByteRange | None = None


@dataclass(frozen=True, slots=True)
class ServeRange:
    """Queue one chunk on the link; comes back as a served or a skipped range."""

    ref: RefId
    slot: Slot
    origin: Origin
    range: ByteRange


@dataclass(frozen=True, slots=True)
class AckConfirm:
    """Acknowledge a confirmation with the verdict that stands."""

    ref: RefId
    origin: Origin
    verdict: SlotVerdict


@dataclass(frozen=True, slots=True)
class AnswerGone:
    """Tell a late receiver that the data is gone, and how its slot ended."""

    ref: RefId
    origin: Origin
    verdict: SlotVerdict


ServingEffect = AnswerOpen | ServeRange | AckConfirm | AnswerGone

Step = tuple[Serving, tuple[ServingEffect, ...]]


# --- handlers -------------------------------------------------------------------------------------


def _acquire(record: Serving, event: Opened) -> Step:
    bound = replace(
        record,
        bound=event.origin.address,
        nonce=event.nonce,
        wanted=event.wanted,
        capabilities=event.capabilities,
    )
    return bound, _answer(bound, event)


def _reopen(record: Serving, event: Opened) -> Step:
    return record, _answer(record, event)


def _answer(record: Serving, event: Opened) -> tuple[ServingEffect, ...]:
    answer = AnswerOpen(record.ref, event.origin, record.nonce, event.first)
    if event.first is None:
        return (answer,)
    return answer, ServeRange(record.ref, record.slot, event.origin, event.first)


def _serve(record: Serving, event: Pulled) -> Step:
    return record, (ServeRange(record.ref, record.slot, event.origin, event.range),)


def _count(record: Serving, event: ServedMore | ServedAll) -> Step:
    return replace(record, served=record.served.add(event.range)), ()


def _hold(record: Serving, event: Held) -> Step:  # noqa: ARG001 - the transaction moves the clock
    return record, ()


def _succeed(record: Serving, event: ConfirmedSuccess) -> Step:
    done = replace(record, state=P.SUCCEEDED)
    return done, (AckConfirm(record.ref, event.origin, done.verdict),)


def _own_up(record: Serving, event: ConfirmedFailure) -> Step:
    done = replace(record, state=P.FAILED, reason=f"receiver: {event.reason}")
    return done, (AckConfirm(record.ref, event.origin, done.verdict),)


def _cancel(record: Serving, event: Cancelled) -> Step:
    return replace(record, reason=f"cancelled: {event.reason}"), ()


def _decline(record: Serving, event: Declined) -> Step:
    return replace(record, bound=event.address, reason=f"declined: {event.reason}"), ()


def _expire(record: Serving, event: SlotExpired | Dropped) -> Step:
    return replace(record, reason=event.reason), ()


def _reack(record: Serving, event: ConfirmedSuccess | ConfirmedFailure) -> Step:
    return record, (AckConfirm(record.ref, event.origin, record.verdict),)


def _gone(record: Serving, event: Opened | Pulled) -> Step:
    return record, (AnswerGone(record.ref, event.origin, record.verdict),)


# --- the table ------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """One row: a cell per event."""

    opened: Cell[P, Serving, ServingEffect, Opened]
    pulled: Cell[P, Serving, ServingEffect, Pulled]
    served_more: Cell[P, Serving, ServingEffect, ServedMore]
    served_all: Cell[P, Serving, ServingEffect, ServedAll]
    held: Cell[P, Serving, ServingEffect, Held]
    confirmed_success: Cell[P, Serving, ServingEffect, ConfirmedSuccess]
    confirmed_failure: Cell[P, Serving, ServingEffect, ConfirmedFailure]
    confirmed_stale: Cell[P, Serving, ServingEffect, ConfirmedStale]
    cancelled: Cell[P, Serving, ServingEffect, Cancelled]
    declined: Cell[P, Serving, ServingEffect, Declined]
    expired: Cell[P, Serving, ServingEffect, SlotExpired]
    dropped: Cell[P, Serving, ServingEffect, Dropped]


acquire = Go(P.ACQUIRED, _acquire)
reopen = Go(P.ACQUIRED, _reopen)
serve = Go(P.ACQUIRED, _serve)
more = Go(P.ACQUIRED, _count)
all_out = Go(P.PROVISIONAL, _count)
hold = Go(P.ACQUIRED, _hold)
p_reopen = Go(P.PROVISIONAL, _reopen)
p_serve = Go(P.PROVISIONAL, _serve)
p_again = Go(P.PROVISIONAL, _count)
p_hold = Go(P.PROVISIONAL, _hold)
success = Go(P.SUCCEEDED, _succeed)
failure = Go(P.FAILED, _own_up)
cancel = Go(P.FAILED, _cancel)
decline = Go(P.FAILED, _decline)
expire = Go(P.FAILED, _expire)
s_ack = Go(P.SUCCEEDED, _reack)
f_ack = Go(P.FAILED, _reack)
s_gone = Go(P.SUCCEEDED, _gone)
f_gone = Go(P.FAILED, _gone)

late = Ignore("the verdict is in; truth beats clocks and late words alike")
stray = Ignore("without a bound slot there is nothing to end")
stale = Ignore("a confirmation of another life of this slot proves nothing")
known = Ignore("a bound slot is ended by cancel, which it is classified as")
peer = Refuse(Blame.PEER)
ours = Refuse(Blame.LOCAL)

# fmt: off
TABLE: Final[dict[P, Cells]] = {
    #                     Opened    Pulled   ServedMore ServedAll Held    Success  Failure  Stale  Cancelled Declined Expired Dropped
    P.UNSEEN:      Cells(acquire,  peer,    ours,      ours,     peer,   peer,    peer,    stale, stray,    decline, expire, expire),
    P.ACQUIRED:    Cells(reopen,   serve,   more,      all_out,  hold,   peer,    failure, stale, cancel,   known,   expire, expire),
    P.PROVISIONAL: Cells(p_reopen, p_serve, p_again,   p_again,  p_hold, success, failure, stale, cancel,   known,   expire, expire),
    P.SUCCEEDED:   Cells(s_gone,   s_gone,  late,      late,     late,   s_ack,   s_ack,   stale, late,     late,    late,   late  ),
    P.FAILED:      Cells(f_gone,   f_gone,  late,      late,     late,   f_ack,   f_ack,   stale, late,     late,    late,   late  ),
}
# fmt: on

SERVING: Final = Machine[P, Serving, ServingEffect, ServingEvent](
    "serving",
    TABLE,
    (
        Opened,
        Pulled,
        ServedMore,
        ServedAll,
        Held,
        ConfirmedSuccess,
        ConfirmedFailure,
        ConfirmedStale,
        Cancelled,
        Declined,
        SlotExpired,
        Dropped,
    ),
    initial=P.UNSEEN,
    final=frozenset({P.SUCCEEDED, P.FAILED}),
)
