"""One record per state, reached by the events that lead there, and one event per column."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from streamoff.errors import GoneError, NoSpaceError, SourceFailedError, TransferTimeoutError
from streamoff.machines import (
    download as d,
    job_root as j,
    notice as n,
    participation as p,
    serving as s,
    transaction as t,
)
from streamoff.machines.cells import Machine, Record
from streamoff.types import Address, Budgets, ByteRange, Capability, RangeSet, Ref, Slot

BUDGETS = Budgets()
CANCEL = frozenset({Capability.CANCEL, Capability.NOTICE})
SITE = Address("site-1")
SERVER = Address("server")
STRANGER = Address("site-9")
ORIGIN = s.Origin(SERVER, 7)
TICKET = b"t" * 16
NONCE = b"n" * 8
HEADER = ByteRange(0, 16)
FIRST = ByteRange(0, 60)
REST = ByteRange(60, 100)
WHOLE = RangeSet((ByteRange(0, 100),))
REF = Ref(SITE, "ref-1", TICKET, 100)


def ticket(index: int) -> bytes:
    """The ticket of one slot."""
    return bytes([index + 1]) * 16


R = TypeVar("R", bound=Record)
E = TypeVar("E")


def run(machine: Machine[Any, R, Any, E], record: R, *events: E) -> R:
    """The record after ``events``."""
    for event in events:
        record, _ = machine.step(record, event)
    return record


# --- serving --------------------------------------------------------------------------------------

SERVING_EVENTS: tuple[s.ServingEvent, ...] = (
    s.Opened(1.0, ORIGIN, b"m" * 8, WHOLE, CANCEL),
    s.Pulled(1.0, ORIGIN, REST),
    s.ServedMore(1.0, FIRST),
    s.ServedAll(1.0, REST),
    s.Held(1.0, 5.0),
    s.ConfirmedSuccess(1.0, ORIGIN),
    s.ConfirmedFailure(1.0, ORIGIN, "disk full"),
    s.ConfirmedStale(1.0, ORIGIN),
    s.Cancelled(1.0, "gave up"),
    s.Declined(1.0, SERVER, "no room"),
    s.SlotExpired(1.0, "idle_timeout"),
    s.Dropped(1.0, "deleted"),
)


def serving(state: s.ServingState) -> s.Serving:
    """One slot on one ref, brought to ``state``."""
    unseen = s.Serving(Slot(TICKET), "ref-1")
    opened = s.Opened(0.0, ORIGIN, NONCE, WHOLE, CANCEL)
    acquired = run(s.SERVING, unseen, opened, s.ServedMore(0.0, FIRST))
    provisional = run(s.SERVING, acquired, s.ServedAll(0.0, REST))
    states = {
        s.ServingState.UNSEEN: unseen,
        s.ServingState.ACQUIRED: acquired,
        s.ServingState.PROVISIONAL: provisional,
        s.ServingState.SUCCEEDED: run(s.SERVING, provisional, s.ConfirmedSuccess(0.0, ORIGIN)),
        s.ServingState.FAILED: run(s.SERVING, acquired, s.Cancelled(0.0, "gave up")),
    }
    return states[state]


# --- transaction ----------------------------------------------------------------------------------

TRANSACTION_EVENTS: tuple[t.TransactionEvent, ...] = (
    t.Advanced(1.0),
    t.Finished(1.0),
    t.Drained(1.0),
    t.Aborted(1.0, "deleted"),
    t.SettleExpired(1.0),
    t.Forgotten(1.0),
)


def begin(slots: int | list[Slot] = 1, refs: int | list[str] = 1, **changes: Any) -> t.Transaction:
    """A transaction opened at 0 s; a number of slots makes undeclared ones, of refs names them."""
    arguments: dict[str, Any] = {
        "id": "tx-1",
        "now": 0.0,
        "slots": [Slot(ticket(i)) for i in range(slots)] if isinstance(slots, int) else slots,
        "refs": [f"ref-{i + 1}" for i in range(refs)] if isinstance(refs, int) else refs,
        "budgets": BUDGETS,
    }
    return t.begin(**(arguments | changes))


def transaction(state: t.TransactionState) -> t.Transaction:
    """A transaction of one slot and one ref, brought to ``state``."""
    fresh = begin()
    settling = replace(run(t.TRANSACTION, fresh, t.Aborted(0.0, "deleted")), in_flight=1)
    settled = run(t.TRANSACTION, replace(settling, in_flight=0), t.Drained(0.0))
    states = {
        t.TransactionState.OPEN: fresh,
        t.TransactionState.SETTLING: settling,
        t.TransactionState.SETTLED: settled,
        t.TransactionState.FORGOTTEN: run(t.TRANSACTION, settled, t.Forgotten(0.0)),
    }
    return states[state]


# --- download -------------------------------------------------------------------------------------

TIMED_OUT = TransferTimeoutError("no progress")
DOWNLOAD_EVENTS: tuple[d.DownloadEvent, ...] = (
    d.Started(1.0),
    d.Accepted(1.0, NONCE, HEADER, CANCEL),
    d.Planned(1.0, WHOLE, RangeSet((HEADER,))),
    d.LandedMore(1.0, ByteRange(16, 60)),
    d.LandedAll(1.0, REST),
    d.HoldAsked(1.0, 5.0),
    d.Stalled(1.0),
    d.Exhausted(1.0, TIMED_OUT),
    d.RetryDue(1.0),
    d.LinkLost(1.0),
    d.LinkRestored(1.0),
    d.GraceExpired(1.0, TIMED_OUT),
    d.Noticed(1.0, SourceFailedError("the trainer died")),
    d.Refused(1.0, GoneError("settled")),
    d.LandingFailed(1.0, NoSpaceError("disk full")),
    d.CancelRequested(1.0, "job aborted"),
    d.Finalised(1.0),
    d.ConfirmDue(1.0),
    d.ConfirmAcked(1.0),
    d.ConfirmGivenUp(1.0),
)


def download(state: d.DownloadState, *, theirs: frozenset[Capability] = CANCEL) -> d.Download:
    """A download of 100 bytes, brought to ``state`` at 0 s."""
    idle = d.Download(REF, BUDGETS, CANCEL)
    opening = run(d.DOWNLOAD, idle, d.Started(0.0))
    streaming = run(
        d.DOWNLOAD,
        opening,
        d.Accepted(0.0, NONCE, HEADER, theirs),
        d.Planned(0.0, WHOLE, RangeSet((HEADER,))),
        d.LandedMore(0.0, FIRST),
    )
    finalising = run(d.DOWNLOAD, streaming, d.LandedAll(0.0, REST))
    confirming = run(d.DOWNLOAD, finalising, d.Finalised(0.0))
    states = {
        d.DownloadState.IDLE: idle,
        d.DownloadState.OPENING: opening,
        d.DownloadState.STREAMING: streaming,
        d.DownloadState.BACKOFF: run(d.DOWNLOAD, streaming, d.Stalled(0.0)),
        d.DownloadState.FINALISING: finalising,
        d.DownloadState.CONFIRMING: confirming,
        d.DownloadState.DONE: run(d.DOWNLOAD, confirming, d.ConfirmAcked(0.0)),
        d.DownloadState.FAILED: run(
            d.DOWNLOAD, streaming, d.LandingFailed(0.0, NoSpaceError("disk full"))
        ),
        d.DownloadState.CANCELLED: run(d.DOWNLOAD, streaming, d.CancelRequested(0.0, "aborted")),
        d.DownloadState.SOURCE_LOST: run(
            d.DOWNLOAD, streaming, d.Noticed(0.0, SourceFailedError("the trainer died"))
        ),
    }
    return states[state]


# --- failure notice -------------------------------------------------------------------------------

NOTICE_EVENTS: tuple[n.NoticeEvent, ...] = (
    n.Started(1.0),
    n.Acked(1.0),
    n.Rejected(1.0, "not the owner"),
    n.AttemptExpired(1.0),
    n.RetryDue(1.0),
    n.TotalExpired(1.0),
)


def notice(state: n.NoticeState) -> n.Notice:
    """One notice to one receiver, brought to ``state`` at 0 s."""
    pending = n.Notice(SERVER)
    sent = run(n.NOTICE, pending, n.Started(0.0))
    states = {
        n.NoticeState.PENDING: pending,
        n.NoticeState.SENT: sent,
        n.NoticeState.BACKOFF: run(n.NOTICE, sent, n.AttemptExpired(0.0)),
        n.NoticeState.ACKED: run(n.NOTICE, sent, n.Acked(0.0)),
        n.NoticeState.GIVEN_UP: run(n.NOTICE, sent, n.TotalExpired(0.0)),
    }
    return states[state]


# --- participation --------------------------------------------------------------------------------

PARTICIPATION_EVENTS: tuple[p.ParticipationEvent, ...] = (
    p.Offered(7),
    p.Forfeited("the training failed"),
    p.Counted(),
    p.Failed("disk full"),
    p.Closed("enough responses"),
)


def participation(state: p.ParticipationState) -> p.Participation:
    """One site in one round, brought to ``state``."""
    awaited = p.Participation("site-1")
    landing = run(p.PARTICIPATION, awaited, p.Offered(6))
    closed = p.Closed("enough responses")
    states = {
        p.ParticipationState.AWAITED: awaited,
        p.ParticipationState.LANDING: landing,
        p.ParticipationState.CUTTING: run(p.PARTICIPATION, landing, closed),
        p.ParticipationState.ACCEPTED: run(p.PARTICIPATION, landing, p.Counted()),
        p.ParticipationState.FAILED: run(p.PARTICIPATION, landing, p.Failed("disk full")),
        p.ParticipationState.LATE: run(p.PARTICIPATION, awaited, closed),
    }
    return states[state]


# --- job root -------------------------------------------------------------------------------------

JOB_ROOT_EVENTS: tuple[j.JobRootEvent, ...] = (
    j.Finalised(1.0),
    j.Closed(1.0),
    j.ConsumersEnded(1.0, 2**30),
    j.WindowClosed(1.0, ("fold",)),
    j.GraceClosed(1.0, ("fold",)),
    j.Removed(1.0),
    j.RemovalExpired(1.0),
)


def job_root(state: j.JobRootState) -> j.JobRoot:
    """A job root with a drain window of 5 s, brought to ``state`` at 0 s."""
    fresh = j.JobRoot("job-7", 5.0)
    draining = run(j.JOB_ROOT, fresh, j.Closed(0.0))
    cutting = run(j.JOB_ROOT, draining, j.WindowClosed(0.0, ("fold",)))
    removing = run(j.JOB_ROOT, draining, j.ConsumersEnded(0.0, 0))
    states = {
        j.JobRootState.OPEN: fresh,
        j.JobRootState.FINALISING: run(j.JOB_ROOT, fresh, j.Finalised(0.0)),
        j.JobRootState.DRAINING: draining,
        j.JobRootState.CUTTING: cutting,
        j.JobRootState.REMOVING: removing,
        j.JobRootState.GONE: run(j.JOB_ROOT, removing, j.Removed(0.0)),
        j.JobRootState.STUCK: run(j.JOB_ROOT, cutting, j.GraceClosed(0.0, ("fold",))),
    }
    return states[state]
