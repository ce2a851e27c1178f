"""Failure notice: the owner of a dead source tells its receivers, and they believe only the owner.

The sender runs one machine per receiver, all at once under one total budget. The receiver keeps a bounded
book: a notice interrupts matching downloads now and refuses those that start just after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple

from streamoff.errors import LimitError, UnexpectedMessageError
from streamoff.machines.cells import Blame, Cell, Go, Ignore, Machine, Refuse
from streamoff.machines.records import replace
from streamoff.machines.tombstones import TOMBSTONE_SECONDS, TOMBSTONES, Tombstones
from streamoff.types import Address, RefId

__all__ = [
    "NOTICE",
    "NOTICE_ATTEMPTS",
    "NOTICE_REFS",
    "NOTICE_TOTAL_SECONDS",
    "NOTICE_WAIT_SECONDS",
    "REASON_CHARACTERS",
    "Acked",
    "AttemptExpired",
    "Notice",
    "NoticeBook",
    "NoticeEffect",
    "NoticeEvent",
    "NoticeState",
    "Rejected",
    "ReportNotice",
    "RetryDue",
    "SendNotice",
    "Started",
    "TotalExpired",
    "classify_tick",
    "next_tick",
    "split",
]

NOTICE_ATTEMPTS: Final = 4
NOTICE_WAIT_SECONDS: Final = 2.0
"""Until it is sent again; an answer to any attempt counts, and the last one has all that is left of the total."""
NOTICE_TOTAL_SECONDS: Final = 10.0
NOTICE_PAUSES: Final = (0.25, 0.5, 1.0)
NOTICE_REFS: Final = 256
REASON_CHARACTERS: Final = 1024


class NoticeState(StrEnum):
    """How far one receiver has been told."""

    PENDING = "pending"
    SENT = "sent"
    BACKOFF = "backoff"
    ACKED = "acked"
    GIVEN_UP = "given up"


N = NoticeState


@dataclass(frozen=True, slots=True)
class Notice:
    """One notice on its way to one receiver.

    Args:
        to: The receiver.
        state: The row of the table.
        attempts: Sent so far, at most :data:`NOTICE_ATTEMPTS`.
        due: When the wait or the pause ends.
        give_up_at: When the total budget ends.
        reason: Why it was given up; empty otherwise.
    """

    to: Address
    state: NoticeState = NoticeState.PENDING
    attempts: int = 0
    due: float = 0.0
    give_up_at: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """The source is dead."""

    now: float


@dataclass(frozen=True, slots=True)
class Acked:
    """The receiver knows."""

    now: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """The receiver does not believe us; repeating it would not help."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptExpired:
    """No answer to this attempt, and another is left."""

    now: float


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The pause is over."""

    now: float


@dataclass(frozen=True, slots=True)
class TotalExpired:
    """All attempts or all time are used up."""

    now: float


NoticeEvent = Started | Acked | Rejected | AttemptExpired | RetryDue | TotalExpired


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Send the notice once; comes back as Acked, Rejected or nothing."""

    to: Address


@dataclass(frozen=True, slots=True)
class ReportNotice:
    """Tell the sender how this receiver took it; ``reason`` is empty if it knows."""

    to: Address
    reason: str


NoticeEffect = SendNotice | ReportNotice
Step = tuple[Notice, tuple[NoticeEffect, ...]]


def _send(record: Notice, event: Started | RetryDue) -> Step:
    end = record.give_up_at or event.now + NOTICE_TOTAL_SECONDS
    attempts = record.attempts + 1
    due = event.now + NOTICE_WAIT_SECONDS if attempts < NOTICE_ATTEMPTS else end
    return replace(record, attempts=attempts, give_up_at=end, due=due), (SendNotice(record.to),)


def _pause(record: Notice, event: AttemptExpired) -> Step:
    return replace(record, due=event.now + NOTICE_PAUSES[record.attempts - 1]), ()


def _done(record: Notice, event: Acked) -> Step:  # noqa: ARG001 - the fact is enough
    return record, (ReportNotice(record.to, ""),)


def _rejected(record: Notice, event: Rejected) -> Step:
    return replace(record, reason=event.reason), (ReportNotice(record.to, event.reason),)


def _give_up(record: Notice, event: TotalExpired) -> Step:  # noqa: ARG001 - the fact is enough
    reason = f"no answer to {record.attempts} attempts"
    return replace(record, reason=reason), (ReportNotice(record.to, reason),)


class Cells(NamedTuple):
    """One row: a cell per event."""

    started: Cell[N, Notice, NoticeEffect, Started]
    acked: Cell[N, Notice, NoticeEffect, Acked]
    rejected: Cell[N, Notice, NoticeEffect, Rejected]
    attempt_expired: Cell[N, Notice, NoticeEffect, AttemptExpired]
    retry_due: Cell[N, Notice, NoticeEffect, RetryDue]
    total_expired: Cell[N, Notice, NoticeEffect, TotalExpired]


send = Go(N.SENT, _send)
pause = Go(N.BACKOFF, _pause)
done = Go(N.ACKED, _done)
no = Go(N.GIVEN_UP, _rejected)
give_up = Go(N.GIVEN_UP, _give_up)
late = Ignore("an answer to an earlier attempt; the first one counted")
ours = Refuse(Blame.LOCAL)
peer = Refuse(Blame.PEER)

# fmt: off
TABLE: Final[dict[N, Cells]] = {
    #                 Started Acked Rejected AttemptExpired RetryDue TotalExpired
    N.PENDING:  Cells(send,   peer, peer,    ours,          ours,    ours   ),
    N.SENT:     Cells(ours,   done, no,      pause,         ours,    give_up),
    N.BACKOFF:  Cells(ours,   done, no,      ours,          send,    give_up),
    N.ACKED:    Cells(ours,   late, late,    ours,          ours,    ours   ),
    N.GIVEN_UP: Cells(ours,   late, late,    ours,          ours,    ours   ),
}
# fmt: on

NOTICE: Final = Machine[N, Notice, NoticeEffect, NoticeEvent](
    "failure notice",
    TABLE,
    (Started, Acked, Rejected, AttemptExpired, RetryDue, TotalExpired),
    initial=N.PENDING,
    final=frozenset({N.ACKED, N.GIVEN_UP}),
)


def next_tick(record: Notice) -> float | None:
    """When :func:`classify_tick` may have something; None: no clock runs."""
    return record.due if record.state in {N.SENT, N.BACKOFF} else None


def classify_tick(record: Notice, now: float) -> NoticeEvent | None:
    """What the passing of time means now; None: nothing yet."""
    due = next_tick(record)
    if due is None or now < due:
        return None
    if now >= record.give_up_at:
        return TotalExpired(now)
    return RetryDue(now) if record.state is N.BACKOFF else AttemptExpired(now)


def split(refs: Iterable[RefId]) -> Iterator[tuple[RefId, ...]]:
    """Cut refs into notices of at most :data:`NOTICE_REFS`, each ref once, in order."""
    distinct = iter(dict.fromkeys(refs))
    while batch := tuple(islice(distinct, NOTICE_REFS)):
        yield batch


class NoticeBook:
    """What a receiver was told about dead sources; exact match on (source, ref).

    Sources whose addresses begin alike are of one family. When the book is full the largest family forgets its
    oldest entry, so that nobody can make it forget what others have said.

    Args:
        capacity: Entries kept, at least 1.
        lifetime: Seconds an entry is kept.
    """

    def __init__(self, *, capacity: int = TOMBSTONES, lifetime: float = TOMBSTONE_SECONDS) -> None:
        self._capacity = capacity
        self._lifetime = lifetime
        self._families: dict[str, Tombstones[tuple[Address, RefId], str]] = {}

    def enter(
        self, now: float, origin: Address, source: Address, refs: tuple[RefId, ...], reason: str
    ) -> tuple[tuple[Address, RefId], ...]:
        """Believe a notice.

        Args:
            now: Monotonic seconds.
            origin: Who sent it, as the link vouches.
            source: Who is said to be dead.
            refs: 1 to :data:`NOTICE_REFS` ref ids of that source.
            reason: Kept up to :data:`REASON_CHARACTERS`.

        Returns:
            The keys whose downloads must be interrupted.

        Raises:
            UnexpectedMessageError: ``origin`` is neither the source nor an ancestor of it. Nothing changed.
            LimitError: No refs, or too many. Nothing changed.
        """
        if not origin.covers(source):
            raise UnexpectedMessageError(
                "a notice from somebody who does not own the source",
                expected=f"{source} or an ancestor of it",
                got=origin,
            )
        if not 1 <= len(refs) <= NOTICE_REFS:
            raise LimitError("notice refs", expected=f"1 to {NOTICE_REFS}", got=len(refs))
        keys = tuple((source, ref) for ref in dict.fromkeys(refs))
        family = self._families.get(_family(source))
        if family is None:
            family = Tombstones(capacity=self._capacity, lifetime=self._lifetime)
            self._families[_family(source)] = family
        for key in keys:
            family.bury(now, key, reason[:REASON_CHARACTERS])
        self._make_room(now)
        return keys

    def _make_room(self, now: float) -> None:
        """Forget what is past its time, and then, as far as need be, the oldest of the largest families."""
        families = self._families
        if len(self) > self._capacity:
            for family in families.values():
                family.expire(now)
        while (excess := len(self) - self._capacity) > 0:
            largest = max(families.values(), key=len)  # the first of several
            *_, second, first = (0, *sorted(map(len, families.values())))
            for _ in range(max(1, min(excess, first - second))):
                largest.drop_oldest()
        for name in [name for name, family in families.items() if not family]:
            del families[name]

    def reason(self, now: float, source: Address, ref: RefId) -> str | None:
        """Why a ref is dead, or None if nobody said so."""
        family = self._families.get(_family(source))
        return None if family is None else family.get(now, (source, ref))

    def __len__(self) -> int:
        return sum(map(len, self._families.values()))


def _family(source: Address) -> str:
    return source.partition(".")[0]
