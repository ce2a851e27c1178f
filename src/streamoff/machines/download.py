"""Download: one ref on its way to one landing, seen by the receiver.

Timeouts and lost links are retried and resume at the ranges already landed. Every exit that abandons an
acquired slot sends cancel, if both ends named that capability. The first real cause is what is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from streamoff.errors import (
    SourceLostError,
    StreamoffError,
    TransferError,
    TransferTimeoutError,
)
from streamoff.machines.cells import Blame, Cell, Go, Ignore, Machine, Refuse
from streamoff.machines.records import replace
from streamoff.types import NO_RANGES, Budgets, ByteRange, Capability, RangeSet, Ref

__all__ = [
    "CONFIRM_ATTEMPTS",
    "DOWNLOAD",
    "Accepted",
    "CancelRequested",
    "ConfirmAcked",
    "ConfirmDue",
    "ConfirmGivenUp",
    "Discard",
    "Download",
    "DownloadEffect",
    "DownloadEvent",
    "DownloadState",
    "Exhausted",
    "Finalise",
    "Finalised",
    "GraceExpired",
    "HoldAsked",
    "LandedAll",
    "LandedMore",
    "LandingFailed",
    "LinkLost",
    "LinkRestored",
    "Noticed",
    "Planned",
    "PullMissing",
    "Refused",
    "Report",
    "RetryDue",
    "SendCancel",
    "SendConfirm",
    "SendHold",
    "SendOpen",
    "Stalled",
    "Started",
    "classify_landed",
    "classify_tick",
    "next_tick",
]

CONFIRM_ATTEMPTS: Final = 3
"""Confirmations sent before the producer's budgets are left to settle the slot."""


class DownloadState(StrEnum):
    """The life of a download."""

    IDLE = "idle"
    OPENING = "opening"
    STREAMING = "streaming"
    BACKOFF = "backoff"
    FINALISING = "finalising"
    CONFIRMING = "confirming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SOURCE_LOST = "source lost"


D = DownloadState


@dataclass(frozen=True, slots=True)
class Download:
    """One download.

    Args:
        ref: What is pulled.
        budgets: The receiver's side of the budgets.
        mine: What this end can do.
        theirs: What the source said it can do; None until it said so.
        state: The row of the table.
        nonce: The producer's name for this life of the slot.
        wanted: Payload ranges to land; only the header until the layout is known.
        landed: Payload ranges that are safe.
        since: When the present attempt last got anywhere.
        progressed: When a range landed that had not before, or the source first answered.
        attempt: Retries used since the last progress.
        retry_at: In BACKOFF after a stall: when to open again.
        give_up_at: In BACKOFF after a lost link: when the grace ends.
        confirm_at: In CONFIRMING: when to send the confirmation again.
        confirms: Confirmations sent.
        deadline: Absolute limit, monotonic seconds.
        held: Seconds by which holds have moved the clocks, at most the budget's.
        cause: Why it ended badly; the first real cause.
    """

    ref: Ref
    budgets: Budgets
    mine: frozenset[Capability]
    theirs: frozenset[Capability] | None = None
    state: DownloadState = DownloadState.IDLE
    nonce: bytes = b""
    wanted: RangeSet = NO_RANGES
    landed: RangeSet = NO_RANGES
    since: float = 0.0
    progressed: float = 0.0
    attempt: int = 0
    retry_at: float | None = None
    give_up_at: float | None = None
    confirm_at: float | None = None
    confirms: int = 0
    deadline: float | None = None
    held: float = 0.0
    cause: StreamoffError | None = field(default=None, compare=False)

    @property
    def missing(self) -> RangeSet:
        """What is still to be pulled."""
        return self.landed.missing(self.wanted)

    @property
    def ended(self) -> bool:
        """Whether no event changes anything any more."""
        return self.state in {D.DONE, D.FAILED, D.CANCELLED, D.SOURCE_LOST}


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """Somebody wants the payload; ``theirs`` is what the link already knows of the source."""

    now: float
    theirs: frozenset[Capability] | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The source answered the open."""

    now: float
    nonce: bytes
    header: ByteRange
    capabilities: frozenset[Capability]


@dataclass(frozen=True, slots=True)
class Planned:
    """The header was checked and a place was made; ``landed`` is what came along with it.

    Where that is all there is to land, a landed range (an empty one will do) must follow.
    """

    now: float
    wanted: RangeSet
    landed: RangeSet


@dataclass(frozen=True, slots=True)
class LandedMore:
    """A range is safe and others are missing."""

    now: float
    range: ByteRange


@dataclass(frozen=True, slots=True)
class LandedAll:
    """A range is safe and nothing is missing."""

    now: float
    range: ByteRange


@dataclass(frozen=True, slots=True)
class HoldAsked:
    """The receiver itself must wait for so many seconds; the hold budget bounds what they move."""

    now: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Stalled:
    """No progress for a whole attempt, and retries are left."""

    now: float


@dataclass(frozen=True, slots=True)
class Exhausted:
    """No progress and no retries or holds left, or past the deadline."""

    now: float
    error: StreamoffError


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The pause before a retry is over."""

    now: float


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The way to the source is gone."""

    now: float


@dataclass(frozen=True, slots=True)
class LinkRestored:
    """There is a way to the source again."""

    now: float


@dataclass(frozen=True, slots=True)
class GraceExpired:
    """The link did not come back in time."""

    now: float
    error: StreamoffError


@dataclass(frozen=True, slots=True)
class Noticed:
    """The owner of the source, or a new instance of it, says that the source is dead."""

    now: float
    error: StreamoffError


@dataclass(frozen=True, slots=True)
class Refused:
    """The source refuses: the slot (gone, unknown, wrong ticket, changed), or a request, if ``waits``.

    After a request that it cannot serve the source still waits for the slot.
    """

    now: float
    error: StreamoffError
    waits: bool = False


@dataclass(frozen=True, slots=True)
class LandingFailed:
    """The bytes or their place are bad: header, digest, disk, quota, finalisation."""

    now: float
    error: StreamoffError


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The receiver, its job or its scope gives up."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Finalised:
    """Everything is in its final place."""

    now: float


@dataclass(frozen=True, slots=True)
class ConfirmDue:
    """The confirmation was not acknowledged in time."""

    now: float


@dataclass(frozen=True, slots=True)
class ConfirmAcked:
    """The producer knows."""

    now: float


@dataclass(frozen=True, slots=True)
class ConfirmGivenUp:
    """The producer did not answer; the data is here all the same."""

    now: float


DownloadEvent = (
    Started
    | Accepted
    | Planned
    | LandedMore
    | LandedAll
    | HoldAsked
    | Stalled
    | Exhausted
    | RetryDue
    | LinkLost
    | LinkRestored
    | GraceExpired
    | Noticed
    | Refused
    | LandingFailed
    | CancelRequested
    | Finalised
    | ConfirmDue
    | ConfirmAcked
    | ConfirmGivenUp
)

# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Present the ticket; comes back as Accepted or Refused."""


@dataclass(frozen=True, slots=True)
class PullMissing:
    """Pull what is missing, within the window; comes back as landed ranges or LandingFailed."""


@dataclass(frozen=True, slots=True)
class SendHold:
    """Tell the producer that the wait is ours."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Finalise:
    """Put everything in its final place; comes back as Finalised or LandingFailed."""


@dataclass(frozen=True, slots=True)
class SendConfirm:
    """Tell the producer how it ended."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell the producer that nobody waits any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove what has landed."""


@dataclass(frozen=True, slots=True)
class Report:
    """Wake the caller: with the payload if ``error`` is None."""

    error: StreamoffError | None


DownloadEffect = (
    SendOpen | PullMissing | SendHold | Finalise | SendConfirm | SendCancel | Discard | Report
)

Step = tuple[Download, tuple[DownloadEffect, ...]]

# --- handlers -------------------------------------------------------------------------------------


def _start(record: Download, event: Started) -> Step:
    deadline = record.budgets.deadline
    record = replace(
        record,
        since=event.now,
        progressed=event.now,
        theirs=event.theirs,
        deadline=None if deadline is None else event.now + deadline,
    )
    return record, (SendOpen(),)


def _accept(record: Download, event: Accepted) -> Step:
    """The header comes first; a reopened download goes on where it was."""
    progressed = record.progressed if record.wanted else event.now
    record = replace(
        record,
        nonce=event.nonce,
        theirs=event.capabilities,
        wanted=record.wanted or RangeSet((event.header,)),
        since=event.now,
        progressed=progressed,
    )
    return record, (PullMissing(),)


def _note_plan(record: Download, event: Planned) -> Step:
    landed = RangeSet.of((*record.landed, *event.landed))
    return _progress(replace(record, wanted=event.wanted, landed=landed), event.now), ()


def _plan(record: Download, event: Planned) -> Step:
    record, _ = _note_plan(record, event)
    return record, (PullMissing(),)


def _progress(record: Download, now: float) -> Download:
    """Start the clocks afresh; a hold that was granted beyond ``now`` stands."""
    return replace(
        record, since=max(record.since, now), progressed=max(record.progressed, now), attempt=0
    )


def _note(record: Download, event: LandedMore | LandedAll) -> Step:
    """Progress is a range that had not landed before; a repeated one moves no clock."""
    landed = record.landed.add(event.range)
    if landed.nbytes > record.landed.nbytes:
        record = _progress(replace(record, landed=landed), event.now)
    return record, ()


def _more(record: Download, event: LandedMore) -> Step:
    record, _ = _note(record, event)
    return record, (PullMissing(),)


def _finalise(record: Download, event: LandedAll) -> Step:
    record, _ = _note(record, event)
    return replace(record, retry_at=None, give_up_at=None), (Finalise(),)


def _hold(record: Download, event: HoldAsked) -> Step:
    """A hold costs what it moves the clock, so that no number of small ones outlasts the budget."""
    left = record.budgets.hold - record.held
    asked = max(0.0, event.now + event.seconds - record.progressed)
    progressed = record.progressed + min(asked, left)
    record = replace(
        record,
        since=max(record.since, progressed),
        progressed=progressed,
        held=record.budgets.hold if asked >= left else record.held + asked,  # spent to the last bit
    )
    return record, (SendHold(event.seconds),)


def _back_off(record: Download, event: Stalled) -> Step:
    pause = record.budgets.backoff[record.attempt]
    return replace(record, attempt=record.attempt + 1, retry_at=event.now + pause), ()


def _await_link(record: Download, event: LinkLost) -> Step:
    return replace(record, retry_at=None, give_up_at=event.now + record.budgets.reconnect_grace), ()


def _keep_waiting(record: Download, event: LinkLost) -> Step:
    """A second loss while waiting does not extend the grace."""
    end = event.now + record.budgets.reconnect_grace
    return replace(record, retry_at=None, give_up_at=record.give_up_at or end), ()


def _open_again(record: Download, event: RetryDue | LinkRestored) -> Step:
    return replace(record, since=event.now, retry_at=None, give_up_at=None), (SendOpen(),)


def _send_again(record: Download, event: LinkRestored) -> Step:  # noqa: ARG001 - the fact is enough
    """The last word may have been lost; a link that comes and goes does not extend the wait."""
    return record, (SendConfirm(ok=True),)


def _give_up(record: Download, event: Noticed | GraceExpired) -> Step:
    return replace(record, cause=event.error), (Discard(), Report(event.error))


def _abandon(record: Download, event: Exhausted | LandingFailed) -> Step:
    """The producer still waits for us: tell it, then clean up."""
    return replace(record, cause=event.error), (
        *_cancel_effects(record, event.error.what),
        Discard(),
        Report(event.error),
    )


def _refused(record: Download, event: Refused) -> Step:
    record = replace(record, cause=event.error)
    cancel = _cancel_effects(record, event.error.what) if event.waits else ()
    return record, (*cancel, Discard(), Report(event.error))


def _cancel(record: Download, event: CancelRequested) -> Step:
    error = TransferError(f"cancelled: {event.reason}", ref=record.ref.id, site=record.ref.source)
    return replace(record, cause=error), (
        *_cancel_effects(record, event.reason),
        Discard(),
        Report(error),
    )


def _never_started(record: Download, event: CancelRequested | Noticed) -> Step:
    error = (
        event.error
        if isinstance(event, Noticed)
        else TransferError(f"cancelled: {event.reason}", ref=record.ref.id, site=record.ref.source)
    )
    return replace(record, cause=error), (Report(error),)


def _fail_final(record: Download, event: LandingFailed) -> Step:
    return replace(record, cause=event.error), (
        SendConfirm(ok=False, reason=event.error.what),
        Discard(),
        Report(event.error),
    )


def _confirm_first(record: Download, event: Finalised) -> Step:
    return _confirm(record, event.now)


def _confirm_again(record: Download, event: ConfirmDue) -> Step:
    return _confirm(record, event.now)


def _confirm(record: Download, now: float) -> Step:
    record = replace(record, confirm_at=now + record.budgets.confirm, confirms=record.confirms + 1)
    return record, (SendConfirm(ok=True),)


def _deliver(
    record: Download,
    event: ConfirmAcked | ConfirmGivenUp | Refused | Noticed | CancelRequested,  # noqa: ARG001
) -> Step:
    """The payload is whole and in its place: whatever the producer says now, it is delivered."""
    return replace(record, confirm_at=None), (Report(None),)


def _cancel_effects(record: Download, reason: str) -> tuple[SendCancel, ...]:
    """Before its first answer a source behind others has not said what it can do: it is told on the chance."""
    theirs = record.mine if record.theirs is None else record.theirs
    return (SendCancel(reason),) if Capability.CANCEL in record.mine & theirs else ()


# --- the table ------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """One row: a cell per event."""

    started: Cell[D, Download, DownloadEffect, Started]
    accepted: Cell[D, Download, DownloadEffect, Accepted]
    planned: Cell[D, Download, DownloadEffect, Planned]
    landed_more: Cell[D, Download, DownloadEffect, LandedMore]
    landed_all: Cell[D, Download, DownloadEffect, LandedAll]
    hold_asked: Cell[D, Download, DownloadEffect, HoldAsked]
    stalled: Cell[D, Download, DownloadEffect, Stalled]
    exhausted: Cell[D, Download, DownloadEffect, Exhausted]
    retry_due: Cell[D, Download, DownloadEffect, RetryDue]
    link_lost: Cell[D, Download, DownloadEffect, LinkLost]
    link_restored: Cell[D, Download, DownloadEffect, LinkRestored]
    grace_expired: Cell[D, Download, DownloadEffect, GraceExpired]
    noticed: Cell[D, Download, DownloadEffect, Noticed]
    refused: Cell[D, Download, DownloadEffect, Refused]
    landing_failed: Cell[D, Download, DownloadEffect, LandingFailed]
    cancelled: Cell[D, Download, DownloadEffect, CancelRequested]
    finalised: Cell[D, Download, DownloadEffect, Finalised]
    confirm_due: Cell[D, Download, DownloadEffect, ConfirmDue]
    confirm_acked: Cell[D, Download, DownloadEffect, ConfirmAcked]
    confirm_given_up: Cell[D, Download, DownloadEffect, ConfirmGivenUp]


start = Go(D.OPENING, _start)
accept = Go(D.STREAMING, _accept)
plan = Go(D.STREAMING, _plan)
plan_o = Go(D.OPENING, _note_plan)
plan_b = Go(D.BACKOFF, _note_plan)
more = Go(D.STREAMING, _more)
note_o = Go(D.OPENING, _note)
note_b = Go(D.BACKOFF, _note)
land = Go(D.FINALISING, _finalise)
hold = Go(D.STREAMING, _hold)
hold_f = Go(D.FINALISING, _hold)
stall = Go(D.BACKOFF, _back_off)
lost = Go(D.BACKOFF, _await_link)
still = Go(D.BACKOFF, _keep_waiting)
again = Go(D.OPENING, _open_again)
nag = Go(D.CONFIRMING, _confirm_again)
renag = Go(D.CONFIRMING, _send_again)
confirm = Go(D.CONFIRMING, _confirm_first)
deliver = Go(D.DONE, _deliver)
refuse = Go(D.FAILED, _refused)
drop = Go(D.FAILED, _abandon)
f_fail = Go(D.FAILED, _fail_final)
cancel = Go(D.CANCELLED, _cancel)
i_cancel = Go(D.CANCELLED, _never_started)
i_dead = Go(D.SOURCE_LOST, _never_started)
dead = Go(D.SOURCE_LOST, _give_up)

late = Ignore("it has ended; the first cause stands")
dup = Ignore("a repeated answer after a retry")
moot = Ignore("the payload is here; only its place or its receipt is awaited")
back = Ignore("the link was not missed")
idle = Ignore("a hold matters only while the producer waits for us")
ours = Refuse(Blame.LOCAL)
peer = Refuse(Blame.PEER)

# fmt: off
TABLE: Final[dict[D, Cells]] = {
    #                    Started Accepted Planned More    All   Hold    Stalled Exhausted Retry  Lost   Restored Grace Noticed  Refused  Landing Cancel    Finalised Due   Acked    GivenUp
    D.IDLE:        Cells(start,  peer,    ours,   ours,   ours, ours,   ours,   ours,     ours,  back,  back,    ours, i_dead,  peer,    ours,   i_cancel, ours,     ours, peer,    ours   ),
    D.OPENING:     Cells(ours,   accept,  plan_o, note_o, land, idle,   stall,  drop,     ours,  lost,  back,    ours, dead,    refuse,  drop,   cancel,   ours,     ours, peer,    ours   ),
    D.STREAMING:   Cells(ours,   dup,     plan,   more,   land, hold,   stall,  drop,     ours,  lost,  back,    ours, dead,    refuse,  drop,   cancel,   ours,     ours, peer,    ours   ),
    D.BACKOFF:     Cells(ours,   dup,     plan_b, note_b, land, idle,   ours,   drop,     again, still, again,   dead, dead,    refuse,  drop,   cancel,   ours,     ours, peer,    ours   ),
    D.FINALISING:  Cells(ours,   dup,     ours,   moot,   moot, hold_f, ours,   drop,     ours,  moot,  moot,    ours, moot,    moot,    f_fail, cancel,   confirm,  ours, peer,    ours   ),
    D.CONFIRMING:  Cells(ours,   dup,     ours,   moot,   moot, idle,   ours,   ours,     ours,  moot,  renag,   ours, deliver, deliver, ours,   deliver,  ours,     nag,  deliver, deliver),
    D.DONE:        Cells(ours,   late,    late,   late,   late, late,   late,   late,     late,  late,  late,    late, late,    late,    late,   late,     late,     late, late,    late   ),
    D.FAILED:      Cells(ours,   late,    late,   late,   late, late,   late,   late,     late,  late,  late,    late, late,    late,    late,   late,     late,     late, late,    late   ),
    D.CANCELLED:   Cells(ours,   late,    late,   late,   late, late,   late,   late,     late,  late,  late,    late, late,    late,    late,   late,     late,     late, late,    late   ),
    D.SOURCE_LOST: Cells(ours,   late,    late,   late,   late, late,   late,   late,     late,  late,  late,    late, late,    late,    late,   late,     late,     late, late,    late   ),
}
# fmt: on

DOWNLOAD: Final = Machine[D, Download, DownloadEffect, DownloadEvent](
    "download",
    TABLE,
    (
        Started,
        Accepted,
        Planned,
        LandedMore,
        LandedAll,
        HoldAsked,
        Stalled,
        Exhausted,
        RetryDue,
        LinkLost,
        LinkRestored,
        GraceExpired,
        Noticed,
        Refused,
        LandingFailed,
        CancelRequested,
        Finalised,
        ConfirmDue,
        ConfirmAcked,
        ConfirmGivenUp,
    ),
    initial=D.IDLE,
    final=frozenset({D.DONE, D.FAILED, D.CANCELLED, D.SOURCE_LOST}),
)

# --- classification -------------------------------------------------------------------------------


def classify_landed(record: Download, now: float, landed: ByteRange) -> LandedMore | LandedAll:
    """Whether a range that is safe now was the last one missing."""
    left = record.landed.add(landed).missing(record.wanted)
    return LandedMore(now, landed) if left else LandedAll(now, landed)


def next_tick(record: Download) -> float | None:
    """When :func:`classify_tick` may have something, in monotonic seconds; None: no clock runs."""
    own = last = record.progressed + record.budgets.retry_schedule
    match record.state:
        case D.OPENING | D.STREAMING:
            own = record.since + record.budgets.stall
        case D.BACKOFF:
            own = min(t for t in (record.retry_at, record.give_up_at) if t is not None)
        case D.FINALISING:
            if record.held < record.budgets.hold:
                own = record.since + record.budgets.stall
        case D.CONFIRMING:
            return record.confirm_at
        case _:
            return None
    own = min(own, last)
    return own if record.deadline is None else min(own, record.deadline)


def classify_tick(record: Download, now: float) -> DownloadEvent | None:
    """What the passing of time means now; None: nothing yet."""
    due = next_tick(record)
    if due is None or now < due:
        return None
    if record.state is D.CONFIRMING:
        spent = record.confirms >= CONFIRM_ATTEMPTS
        return ConfirmGivenUp(now) if spent else ConfirmDue(now)
    if record.deadline is not None and now >= record.deadline:
        return Exhausted(now, _timed_out(record, "the transfer's deadline passed", "in time"))
    if record.give_up_at is not None and now >= record.give_up_at:
        return GraceExpired(now, _source_lost(record))
    schedule = record.budgets.retry_schedule
    finalising = record.state is D.FINALISING  # whatever that waits for is ours
    if now >= record.progressed + schedule:
        what = "the landing does not end" if finalising else "no progress in the whole schedule"
        return Exhausted(now, _timed_out(record, what, f"progress within {schedule:g} s"))
    return HoldAsked(now, record.budgets.stall) if finalising else _stalled(record, now)


def _stalled(record: Download, now: float) -> RetryDue | Stalled | Exhausted:
    if record.state is D.BACKOFF:
        return RetryDue(now)
    if record.attempt < len(record.budgets.backoff):
        return Stalled(now)
    expected = f"progress within {record.budgets.stall:g} s"
    return Exhausted(now, _timed_out(record, "no progress and no retries left", expected))


def _timed_out(record: Download, what: str, expected: str) -> TransferTimeoutError:
    return TransferTimeoutError(
        what,
        expected=expected,
        got=f"{record.landed.nbytes} of {record.ref.size} bytes after {record.attempt} retries",
        site=record.ref.source,
        ref=record.ref.id,
    )


def _source_lost(record: Download) -> SourceLostError:
    return SourceLostError(
        "the link to the source did not come back",
        expected=f"within {record.budgets.reconnect_grace:g} s",
        got=f"{record.landed.nbytes} of {record.ref.size} bytes",
        site=record.ref.source,
        ref=record.ref.id,
    )
