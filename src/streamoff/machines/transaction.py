"""Transaction: one attempt to hand over 1..n refs to 1..n slots.

OPEN until every slot is final on every ref, or somebody ends it. SETTLING waits, bounded, for the chunks
that the link is reading. Then the outcome is computed once and told in a fixed order; from there on the
record is a tombstone that answers late requests until it is forgotten.

A request goes through two tables: the serving machine of its slot and ref first, then, by what that left
behind, this one.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, assert_never

from streamoff.errors import UsageError
from streamoff.machines import serving as s
from streamoff.machines.cells import Blame, Cell, Go, Ignore, Machine, Refuse
from streamoff.machines.records import replace
from streamoff.machines.serving import SERVING, Origin, Serving, ServingEffect, ServingEvent
from streamoff.types import (
    NO_RANGES,
    Address,
    Budgets,
    ByteRange,
    Capability,
    Outcome,
    OutcomeStatus,
    RangeSet,
    RefId,
    Slot,
    Verdict,
)

__all__ = [
    "MAX_SLOTS",
    "TRANSACTION",
    "Aborted",
    "Advanced",
    "CancelRequested",
    "ConfirmRequested",
    "Drained",
    "Finished",
    "Forgotten",
    "HoldRequested",
    "OpenRequested",
    "PullRequested",
    "RangeEnded",
    "RecordOutcome",
    "ReleaseSource",
    "SettleExpired",
    "TellCallbacks",
    "Ticked",
    "Transaction",
    "TransactionEffect",
    "TransactionState",
    "WakeWaiters",
    "admit",
    "begin",
    "check_quorum",
    "epitaph",
    "next_tick",
    "step",
]

MAX_SLOTS: Final = 1024
"""Receivers of one transaction."""


class TransactionState(StrEnum):
    """The life of a transaction."""

    OPEN = "open"
    SETTLING = "settling"
    SETTLED = "settled"
    FORGOTTEN = "forgotten"


T = TransactionState


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transaction.

    Args:
        id: Unique at the endpoint.
        created: Monotonic seconds.
        slots: The receivers' places; tickets are distinct.
        refs: Ref ids.
        servings: One record per (slot index, ref id).
        budgets: The producer's side of the budgets.
        min_receivers: For the quorum view; None means all.
        activity: Per slot, when it last made progress.
        held: Per slot, seconds by which holds have moved its clock, at most the budget's.
        in_flight: Chunks the links are reading.
        cause: The first real cause of a failure; empty while none.
        settle_by: When SETTLING stops waiting.
        outcome: Set once.
    """

    id: str
    created: float
    slots: tuple[Slot, ...]
    refs: tuple[RefId, ...]
    servings: Mapping[tuple[int, RefId], Serving]
    budgets: Budgets
    min_receivers: int | None = None
    state: TransactionState = TransactionState.OPEN
    activity: tuple[float, ...] = ()
    held: tuple[float, ...] = ()
    in_flight: int = 0
    cause: str = ""
    settle_by: float | None = None
    outcome: Outcome | None = None

    def of_slot(self, index: int) -> tuple[Serving, ...]:
        """The slot's records on every ref, in the order of the refs."""
        return tuple(self.servings[index, ref] for ref in self.refs)

    @property
    def finished(self) -> bool:
        """Whether every slot is final on every ref."""
        return all(serving.final for serving in self.servings.values())


def begin(
    *,
    id: str,  # noqa: A002 - the field's name
    now: float,
    slots: Iterable[Slot],
    refs: Iterable[RefId],
    budgets: Budgets,
    min_receivers: int | None = None,
) -> Transaction:
    """Open a transaction.

    Raises:
        UsageError: No slot, no ref, more than :data:`MAX_SLOTS` slots, a ticket or ref twice, or an
            impossible quorum. Nothing was opened.
    """
    slots, refs = tuple(slots), tuple(refs)
    if not 1 <= len(slots) <= MAX_SLOTS:
        raise UsageError("receivers", expected=f"1 to {MAX_SLOTS}", got=len(slots))
    if not refs or len(set(refs)) != len(refs):
        raise UsageError("refs", expected="at least one, each once", got=refs)
    if len({slot.ticket for slot in slots}) != len(slots):
        raise UsageError("slots", expected="a ticket of its own for each", got="a repeated ticket")
    check_quorum(min_receivers, len(slots))
    servings = {
        (index, ref): Serving(slot, ref) for index, slot in enumerate(slots) for ref in refs
    }
    return Transaction(
        id=id,
        created=now,
        slots=slots,
        refs=refs,
        servings=MappingProxyType(servings),
        budgets=budgets,
        min_receivers=min_receivers,
        activity=(now,) * len(slots),
        held=(0.0,) * len(slots),
    )


def check_quorum(min_receivers: int | None, slots: int) -> None:
    """Refuse a quorum that no outcome could meet, or that every one would.

    Raises:
        UsageError: It is not a whole number from 1 to the number of slots.
    """
    if min_receivers is None:
        return
    if type(min_receivers) is not int or not 1 <= min_receivers <= slots:
        raise UsageError(
            "min_receivers", expected=f"a whole number from 1 to {slots}", got=min_receivers
        )


def admit(record: Transaction, ticket: bytes, address: Address) -> int | None:
    """The slot that ``address`` may use with ``ticket``, or None for a stranger.

    A slot belongs to the address it names, else to the first address that presented the ticket. The
    comparison takes the same time for every ticket. A stranger is refused by the caller and moves no clock.
    """
    found = None
    for index, slot in enumerate(record.slots):
        if hmac.compare_digest(slot.ticket, ticket):
            bound = next((one.bound for one in record.of_slot(index) if one.bound), None)
            owner = slot.address or bound
            found = index if owner is None or owner == address else None
    return found


# --- events from outside --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenRequested:
    """A slot's ticket was presented by an admitted address."""

    now: float
    slot: int
    ref: RefId
    origin: Origin
    nonce: bytes
    wanted: RangeSet
    capabilities: frozenset[Capability]
    first: ByteRange | None = None


@dataclass(frozen=True, slots=True)
class PullRequested:
    """An admitted receiver asked for a range that lies within the payload."""

    now: float
    slot: int
    ref: RefId
    origin: Origin
    range: ByteRange


@dataclass(frozen=True, slots=True)
class RangeEnded:
    """A queued range left the queue: handed to the link (``served``), or skipped."""

    now: float
    slot: int
    ref: RefId
    range: ByteRange
    served: bool


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """The receiver waits for its own disk, quota or turn."""

    now: float
    slot: int
    ref: RefId
    seconds: float


@dataclass(frozen=True, slots=True)
class ConfirmRequested:
    """The receiver's last word."""

    now: float
    slot: int
    ref: RefId
    origin: Origin
    ok: bool
    nonce: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The receiver gave up; fails the slot on every ref of the transaction."""

    now: float
    slot: int
    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed; :func:`next_tick` said when."""

    now: float


# --- events of the table, classified --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advanced:
    """A slot moved or was answered, and something is still open."""

    now: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last slot became final while links still read chunks."""

    now: float


@dataclass(frozen=True, slots=True)
class Drained:
    """Everything is final and no link reads any more."""

    now: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """The owner, the source or the job ended it; ``reason`` says which."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class SettleExpired:
    """A link did not let go of a chunk in time."""

    now: float


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The tombstone's time or place ran out."""

    now: float


TransactionEvent = Advanced | Finished | Drained | Aborted | SettleExpired | Forgotten
Event = (
    OpenRequested
    | PullRequested
    | RangeEnded
    | HoldRequested
    | ConfirmRequested
    | CancelRequested
    | Ticked
    | Aborted
    | SettleExpired
    | Forgotten
)

# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellCallbacks:
    """Tell whoever asked to be told; a callback that raises is logged and skips nothing."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Let go of the borrowed tensors or the file."""


@dataclass(frozen=True, slots=True)
class RecordOutcome:
    """Keep the record as a tombstone."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class WakeWaiters:
    """Resolve every wait for the outcome."""

    outcome: Outcome


TransactionEffect = ServingEffect | TellCallbacks | ReleaseSource | RecordOutcome | WakeWaiters

Step = tuple[Transaction, tuple[TransactionEffect, ...]]


# --- handlers -------------------------------------------------------------------------------------


def _stay(record: Transaction, event: Advanced | Drained) -> Step:  # noqa: ARG001 - nothing to do
    return record, ()


def _wait(record: Transaction, event: Finished) -> Step:
    return replace(record, settle_by=event.now + record.budgets.settle), ()


def _settle(record: Transaction, event: Drained | SettleExpired) -> Step:
    outcome = _outcome(record, event.now)
    return replace(record, outcome=outcome, settle_by=None), (
        TellCallbacks(outcome),
        ReleaseSource(),
        RecordOutcome(outcome),
        WakeWaiters(outcome),
    )


def _abort(record: Transaction, event: Aborted) -> Step:
    dropped = s.Dropped(event.now, event.reason)
    servings = {key: SERVING.step(one, dropped)[0] for key, one in record.servings.items()}
    record = replace(
        record,
        cause=record.cause or event.reason,
        servings=MappingProxyType(servings),
        settle_by=event.now + record.budgets.settle,
    )
    return record, ()


def _forget(record: Transaction, event: Forgotten) -> Step:  # noqa: ARG001 - the shell drops the record
    return record, ()


# --- the table ------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """One row: a cell per classified event."""

    advanced: Cell[T, Transaction, TransactionEffect, Advanced]
    finished: Cell[T, Transaction, TransactionEffect, Finished]
    drained: Cell[T, Transaction, TransactionEffect, Drained]
    aborted: Cell[T, Transaction, TransactionEffect, Aborted]
    settle_expired: Cell[T, Transaction, TransactionEffect, SettleExpired]
    forgotten: Cell[T, Transaction, TransactionEffect, Forgotten]


go_on = Go(T.OPEN, _stay)
wait = Go(T.SETTLING, _wait)
settle = Go(T.SETTLED, _settle)
abort = Go(T.SETTLING, _abort)
s_on = Go(T.SETTLING, _stay)
t_on = Go(T.SETTLED, _stay)
forget = Go(T.FORGOTTEN, _forget)

waiting = Ignore("already waiting for the links")
over = Ignore("the outcome is computed once")
gone = Ignore("nothing is remembered any more")
ours = Refuse(Blame.LOCAL)

# fmt: off
TABLE: Final[dict[T, Cells]] = {
    #                  Advanced Finished Drained Aborted SettleExpired Forgotten
    T.OPEN:      Cells(go_on,   wait,    settle, abort,  ours,         ours  ),
    T.SETTLING:  Cells(s_on,    waiting, settle, over,   settle,       ours  ),
    T.SETTLED:   Cells(t_on,    over,    t_on,   over,   over,         forget),
    T.FORGOTTEN: Cells(gone,    gone,    gone,   gone,   gone,         gone  ),
}
# fmt: on

TRANSACTION: Final = Machine[T, Transaction, TransactionEffect, TransactionEvent](
    "transaction",
    TABLE,
    (Advanced, Finished, Drained, Aborted, SettleExpired, Forgotten),
    initial=T.OPEN,
    final=frozenset({T.FORGOTTEN}),
)


# --- classification -------------------------------------------------------------------------------


def step(record: Transaction, event: Event) -> Step:
    """Apply one event: the slots' own tables first, then the transaction's.

    Args:
        record: Frozen; never changed.
        event: Times never run backwards.

    Returns:
        The new record and the effects in the order in which they must be carried out.

    Raises:
        UnexpectedMessageError: The peer sent nonsense. Nothing happened.
    """
    match event:
        case Aborted():
            record, effects = TRANSACTION.step(record, event)
            return _judge(record, event.now, effects)
        case Forgotten() | SettleExpired():
            return TRANSACTION.step(record, event)
        case Ticked():
            return _tick(record, event.now)
        case CancelRequested():
            for ref in record.refs:
                serving = record.servings[event.slot, ref]
                record, _ = _serve_step(record, event.slot, ref, _cancelled(serving, event))
            return _judge(record, event.now, ())
        case RangeEnded(served=False):
            record = replace(record, in_flight=record.in_flight - 1)
            return _judge(record, event.now, ())
        case _:
            pass
    serving = record.servings[event.slot, event.ref]
    record, effects = _serve_step(record, event.slot, event.ref, _classify(record, serving, event))
    return _judge(record, event.now, effects)


def _judge(record: Transaction, now: float, effects: tuple[TransactionEffect, ...]) -> Step:
    """Tell the transaction's table what the slots' tables left behind."""
    event: TransactionEvent
    if not record.finished:
        event = Advanced(now)
    elif record.in_flight:
        event = Finished(now)
    else:
        event = Drained(now)
    record, more = TRANSACTION.step(record, event)
    return record, (*effects, *more)


def _classify(
    record: Transaction,
    serving: Serving,
    event: OpenRequested | PullRequested | RangeEnded | HoldRequested | ConfirmRequested,
) -> ServingEvent:
    match event:
        case OpenRequested():
            return s.Opened(
                event.now, event.origin, event.nonce, event.wanted, event.capabilities, event.first
            )
        case PullRequested():
            return s.Pulled(event.now, event.origin, event.range)
        case RangeEnded():
            left = serving.served.add(event.range).missing(serving.wanted)
            return (s.ServedMore if left else s.ServedAll)(event.now, event.range)
        case HoldRequested():
            return s.Held(event.now, _granted(record, event))
        case ConfirmRequested():
            return _confirmed(serving, event)
        case never:
            assert_never(never)


def _granted(record: Transaction, event: HoldRequested) -> float:
    """A hold costs what it moves the clock, so that no number of small ones outlasts the budget."""
    asked = event.now + event.seconds - record.activity[event.slot]
    return max(0.0, min(asked, record.budgets.hold - record.held[event.slot]))


def _confirmed(
    serving: Serving, event: ConfirmRequested
) -> s.ConfirmedSuccess | s.ConfirmedFailure | s.ConfirmedStale:
    if not hmac.compare_digest(event.nonce, serving.nonce):
        return s.ConfirmedStale(event.now, event.origin)
    if event.ok:
        return s.ConfirmedSuccess(event.now, event.origin)
    return s.ConfirmedFailure(event.now, event.origin, event.reason)


def _cancelled(serving: Serving, event: CancelRequested) -> s.Cancelled | s.Declined:
    if serving.bound is None:
        return s.Declined(event.now, event.address, event.reason)
    return s.Cancelled(event.now, event.reason)


def _serve_step(
    record: Transaction, index: int, ref: RefId, event: ServingEvent
) -> tuple[Transaction, tuple[ServingEffect, ...]]:
    before = record.servings[index, ref]
    after, effects = SERVING.step(before, event)
    changes: dict[str, Any] = _moved_clocks(record, index, before, after, event)
    if after is not before:
        changes["servings"] = MappingProxyType({**record.servings, (index, ref): after})
    if after.state is s.ServingState.FAILED and before.state is not after.state:
        changes["cause"] = record.cause or _cause(after, event)
    begun = sum(isinstance(effect, s.ServeRange) for effect in effects)
    ended = isinstance(event, (s.ServedMore, s.ServedAll))
    if begun or ended:
        changes["in_flight"] = record.in_flight + begun - ended
    return replace(record, **changes) if changes else record, effects


def _moved_clocks(
    record: Transaction, index: int, before: Serving, after: Serving, event: ServingEvent
) -> dict[str, Any]:
    """Progress is a byte range not served before, the first open, or a granted hold."""
    if isinstance(event, s.Held) and not after.final:
        held = _put(record.held, index, record.held[index] + event.seconds)
        activity = _put(record.activity, index, record.activity[index] + event.seconds)
        return {"held": held, "activity": activity}
    grown = after.served is not before.served and after.served.nbytes > before.served.nbytes
    if grown or (before.bound is None and after.bound is not None):
        at = max(record.activity[index], event.now)
        return {"activity": _put(record.activity, index, at)}
    return {}


def _cause(serving: Serving, event: ServingEvent) -> str:
    return serving.reason if isinstance(event, s.SlotExpired) else "receiver_failed"


def _put(values: tuple[float, ...], index: int, value: float) -> tuple[float, ...]:
    return (*values[:index], value, *values[index + 1 :])


# --- time -----------------------------------------------------------------------------------------


def _expiry(record: Transaction, index: int) -> tuple[float, str] | None:
    """When the slot's budget runs out, and which one; None when it is final."""
    servings = record.of_slot(index)
    if all(serving.final for serving in servings):
        return None
    if all(serving.bound is None for serving in servings):
        return record.created + record.budgets.acquire, "acquire_timeout"
    return record.activity[index] + record.budgets.idle, "idle_timeout"


def next_tick(record: Transaction) -> float | None:
    """When :class:`Ticked` is due next, in monotonic seconds; None when no clock runs."""
    if record.state is T.SETTLING:
        return record.settle_by
    if record.state is not T.OPEN:
        return None
    due = [expiry[0] for i in range(len(record.slots)) if (expiry := _expiry(record, i))]
    if record.budgets.deadline is not None:
        due.append(record.created + record.budgets.deadline)
    return min(due, default=None)


def _tick(record: Transaction, now: float) -> Step:
    if record.state is T.SETTLING:
        if record.settle_by is not None and now >= record.settle_by:
            return TRANSACTION.step(record, SettleExpired(now))
        return record, ()
    if record.state is not T.OPEN:
        return record, ()
    deadline = record.budgets.deadline
    if deadline is not None and now >= record.created + deadline:
        return step(record, Aborted(now, "deadline"))
    for index in range(len(record.slots)):
        expiry = _expiry(record, index)
        if expiry is not None and now >= expiry[0]:
            for ref in record.refs:
                record, _ = _serve_step(record, index, ref, s.SlotExpired(now, expiry[1]))
    return _judge(record, now, ())


# --- afterwards -----------------------------------------------------------------------------------


def epitaph(record: Transaction) -> Transaction:
    """What is kept of a settled transaction to answer late requests: who may ask, and each slot's verdict.

    Without ranges and outcome it is a third as large, which is what thousands of tombstones are made of.
    """
    servings = {
        key: replace(one, wanted=NO_RANGES, served=NO_RANGES)
        for key, one in record.servings.items()
    }
    return replace(record, servings=MappingProxyType(servings), outcome=None)


# --- verdict --------------------------------------------------------------------------------------


def _outcome(record: Transaction, now: float) -> Outcome:
    names = _slot_names(record)
    slots = {
        names[index]: MappingProxyType(
            {ref: record.servings[index, ref].verdict for ref in record.refs}
        )
        for index in range(len(record.slots))
    }
    succeeded = all(
        end.verdict is Verdict.SUCCEEDED for refs in slots.values() for end in refs.values()
    )
    if succeeded:
        status, reason = OutcomeStatus.COMPLETED, "all_receivers_succeeded"
    elif record.cause.startswith("deleted"):
        status, reason = OutcomeStatus.ABORTED, record.cause
    else:
        status, reason = OutcomeStatus.FAILED, record.cause
    return Outcome(status, reason, MappingProxyType(slots), record.min_receivers, now)


def _slot_names(record: Transaction) -> tuple[str, ...]:
    """Names that are unique within the transaction: address, bound address, or number."""
    names: list[str] = []
    for index, slot in enumerate(record.slots):
        bound = next((one.bound for one in record.of_slot(index) if one.bound), None)
        name = str(slot.address or bound or f"slot-{index}")
        names.append(name if name not in names else f"{name}#{index}")
    return tuple(names)
