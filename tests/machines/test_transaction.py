"""Transaction scenarios: who is served, what ends a slot, what the outcome says, when clocks run out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from streamoff.errors import UnexpectedMessageError, UsageError
from streamoff.machines import serving as s, transaction as t
from streamoff.machines.tombstones import Tombstones
from streamoff.types import (
    Address,
    Budgets,
    ByteRange,
    OutcomeStatus,
    Slot,
    Verdict,
)

from . import samples
from .desk import Desk

pytestmark = pytest.mark.core

SETTLED = (t.TellCallbacks, t.ReleaseSource, t.RecordOutcome, t.WakeWaiters)


def kinds(effects: tuple[object, ...]) -> tuple[type, ...]:
    """Effect types, in order."""
    return tuple(map(type, effects))


# --- opening a transaction ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": []},
        {"slots": [Slot(index.to_bytes(16, "big")) for index in range(t.MAX_SLOTS + 1)]},
        {"slots": [Slot(samples.TICKET), Slot(samples.TICKET)]},
        {"refs": []},
        {"refs": ["ref-1", "ref-1"]},
        {"min_receivers": 0},
        {"min_receivers": 2},
        {"min_receivers": True},
        {"min_receivers": 1.0},
    ],
    ids=[
        "no-slot",
        "slots",
        "same-ticket",
        "no-ref",
        "same-ref",
        "quorum-0",
        "quorum-2",
        "quorum-bool",
        "quorum-float",
    ],
)
def test_an_impossible_transaction_is_refused(changes: dict[str, Any]) -> None:
    """No receiver, too many, a shared ticket, no ref, a repeated ref or an impossible quorum."""
    with pytest.raises(UsageError):
        samples.begin(**changes)


def test_as_many_receivers_as_promised_fit() -> None:
    """The documented number of receivers is a limit that can be used."""
    slots = [Slot(index.to_bytes(16, "big")) for index in range(t.MAX_SLOTS)]
    assert len(samples.begin(slots=slots).servings) == t.MAX_SLOTS


# --- admission ------------------------------------------------------------------------------------


def test_a_ticket_belongs_to_the_first_address_that_presents_it() -> None:
    """Before a slot is bound anybody may use its ticket, afterwards only the one who opened."""
    desk = Desk(slots=2, refs=2)
    assert t.admit(desk.record, samples.ticket(1), Address("site-1")) == 1
    assert t.admit(desk.record, samples.ticket(1), samples.STRANGER) == 1
    desk.open(1, "ref-2")
    assert t.admit(desk.record, samples.ticket(1), Address("site-1")) == 1
    assert t.admit(desk.record, samples.ticket(1), samples.STRANGER) is None


def test_a_declared_receiver_is_the_only_one_admitted() -> None:
    """A slot that names its receiver refuses everyone else, even with the right ticket."""
    record = samples.begin(slots=[Slot(samples.TICKET, samples.SERVER)])
    assert t.admit(record, samples.TICKET, samples.SERVER) == 0
    assert t.admit(record, samples.TICKET, samples.STRANGER) is None
    assert t.admit(record, samples.TICKET, samples.SERVER.child("job-7")) is None


def test_a_wrong_ticket_is_a_stranger() -> None:
    """An unknown ticket admits nobody, whatever the address."""
    record = samples.begin(slots=[Slot(samples.TICKET, samples.SERVER)])
    assert t.admit(record, b"x" * 16, samples.SERVER) is None
    assert t.admit(record, b"", samples.SERVER) is None


def test_a_stranger_moves_no_clock() -> None:
    """Whoever is not admitted leaves the acquire budget of the slot exactly where it was."""
    record = samples.begin(slots=[Slot(samples.TICKET, samples.SERVER)])
    before = t.next_tick(record)
    assert t.admit(record, samples.TICKET, samples.STRANGER) is None
    assert t.next_tick(record) == before == samples.BUDGETS.acquire


# --- handing over ---------------------------------------------------------------------------------


def test_an_open_is_answered_and_a_second_one_gets_the_same_nonce() -> None:
    """A repeated open is answered alike: the slot keeps the life it has."""
    desk = Desk()
    (first,) = desk.open(nonce=b"1" * 8)
    (second,) = desk.open(nonce=b"2" * 8)
    assert first == second == s.AnswerOpen("ref-1", desk.origin(0), b"1" * 8)


def test_an_open_may_take_the_first_range_along() -> None:
    """The first range follows the answer without a pull, and is in flight and then served like any other."""
    desk = Desk()
    first = ByteRange(0, 40)
    answer, range_ = desk.open(first=first)
    assert isinstance(answer, s.AnswerOpen)
    assert answer.first == first
    assert isinstance(range_, s.ServeRange)
    assert range_.range == first
    assert desk.record.in_flight == 1
    desk.ended(start=0, stop=40)
    assert desk.record.in_flight == 0
    assert desk.record.servings[0, "ref-1"].served.nbytes == 40


def test_everything_served_is_provisional_until_it_is_confirmed() -> None:
    """Bytes on the link finish nothing; only the receiver's word does."""
    desk = Desk()
    desk.serve()
    assert desk.record.servings[0, "ref-1"].state is s.ServingState.PROVISIONAL
    assert desk.record.state is t.TransactionState.OPEN
    assert desk.verdict() is Verdict.PENDING
    desk.confirm()
    assert desk.verdict() is Verdict.SUCCEEDED
    assert desk.outcome.status is OutcomeStatus.COMPLETED


def test_the_last_confirmation_settles_in_a_fixed_order() -> None:
    """Acknowledge, tell callbacks, release the source, record, wake: in this order and once."""
    desk = Desk(now=3.0)
    desk.serve(now=4.0)
    assert kinds(desk.confirm(now=5.0)) == (s.AckConfirm, *SETTLED)
    assert desk.outcome.settled_at == 5.0
    for again in (desk.confirm(now=6.0), desk.tick(7.0), desk.abort(now=8.0), desk.cancel(now=9.0)):
        assert not set(SETTLED) & set(kinds(again))


def test_the_receivers_word_beats_the_producers() -> None:
    """All bytes served and then confirmed as failed is a failure."""
    desk = Desk()
    desk.serve()
    desk.confirm(ok=False, reason="disk full")
    assert (desk.outcome.status, desk.outcome.reason) == (OutcomeStatus.FAILED, "receiver_failed")
    end = desk.outcome.slots["site-0"]["ref-1"]
    assert (end.verdict, end.reason, end.nbytes) == (Verdict.FAILED, "receiver: disk full", 100)


def test_success_before_everything_was_served_is_nonsense() -> None:
    """A receiver cannot have what was not served; the slot stays as it was."""
    desk = Desk()
    desk.open()
    before = desk.record
    with pytest.raises(UnexpectedMessageError):
        desk.confirm()
    assert desk.record is before


@pytest.mark.parametrize("command", ["pull", "hold", "confirm"])
def test_requests_before_the_open_are_nonsense(command: str) -> None:
    """Before a slot is opened there is nothing to pull, to hold or to confirm."""
    desk = Desk()
    before = desk.record
    with pytest.raises(UnexpectedMessageError):
        desk.confirm(nonce=b"") if command == "confirm" else (
            desk.hold(1.0) if command == "hold" else desk.pull()
        )
    assert desk.record is before


def test_the_first_confirmation_stands_against_a_contradicting_one() -> None:
    """Success and then failure stays success, and the answer says so; likewise the other way."""
    for first, verdict in ((True, Verdict.SUCCEEDED), (False, Verdict.FAILED)):
        desk = Desk(slots=2)
        desk.serve()
        desk.confirm(ok=first, reason="disk full")
        (ack,) = desk.confirm(ok=not first, reason="changed my mind")
        assert isinstance(ack, s.AckConfirm)
        assert ack.verdict.verdict is verdict
        assert desk.verdict() is verdict


def test_a_confirmation_of_another_life_changes_nothing() -> None:
    """A stale nonce neither certifies nor poisons, moves no clock, and gets no answer."""
    desk = Desk()
    desk.serve()
    before = desk.record
    for ok in (True, False):
        assert desk.confirm(now=9.0, ok=ok, nonce=b"stale...") == ()
    assert desk.record == before
    assert t.next_tick(desk.record) == samples.BUDGETS.idle
    desk.confirm(now=10.0)
    assert desk.outcome.status is OutcomeStatus.COMPLETED


def test_a_ref_id_used_twice_keeps_two_lives_apart() -> None:
    """Two transactions may use one ref id: ending one leaves the other whole and confirmable."""
    one = Desk(slots=[Slot(samples.ticket(0))])
    two = Desk(slots=[Slot(samples.ticket(1))], id="tx-2")
    one.serve()
    two.open(nonce=b"2" * 8)
    assert t.admit(two.record, samples.ticket(0), samples.SITE) is None
    one.abort("deleted")
    two.pull()
    two.ended()
    assert two.confirm() == (), "the other life's nonce"
    two.confirm(nonce=b"2" * 8)
    assert two.outcome.status is OutcomeStatus.COMPLETED
    assert one.outcome.status is OutcomeStatus.ABORTED


def test_the_same_receiver_counts_once() -> None:
    """Two receivers are awaited: one of them confirming twice is still one."""
    desk = Desk(slots=2)
    desk.hand_over(0)
    desk.confirm(0)
    assert desk.record.state is t.TransactionState.OPEN
    desk.hand_over(1)
    assert desk.outcome.succeeded == ("site-0", "site-1")
    assert desk.told(t.WakeWaiters) == 1


def test_a_receiver_of_two_refs_is_awaited_on_both() -> None:
    """Only the confirmation of the last ref settles."""
    desk = Desk(refs=2)
    desk.hand_over(ref="ref-1")
    assert desk.record.state is t.TransactionState.OPEN
    desk.hand_over(ref="ref-2")
    assert desk.outcome.status is OutcomeStatus.COMPLETED


def test_ranges_pulled_again_are_served_again_and_counted_once() -> None:
    """A retry re-reads what was lost on the way; the byte count does not grow and no clock moves."""
    desk = Desk()
    desk.serve(now=1.0)
    desk.open(now=50.0)
    assert kinds(desk.pull(now=50.0)) == (s.ServeRange,)
    desk.ended(now=51.0)
    assert desk.record.servings[0, "ref-1"].served.nbytes == 100
    assert t.next_tick(desk.record) == 1.0 + samples.BUDGETS.idle


# --- cancel and decline ---------------------------------------------------------------------------


def test_cancel_fails_the_slot_on_every_ref() -> None:
    """A receiver that gives up on one ref is failed on all, also on those it never opened."""
    desk = Desk(refs=3)
    desk.hand_over(ref="ref-1")
    desk.open(ref="ref-2")
    desk.pull(ref="ref-2")
    desk.ended(ref="ref-2", stop=40)
    assert kinds(desk.cancel(reason="job aborted")) == SETTLED
    ends = desk.outcome.slots["site-0"]
    assert [end.verdict for end in ends.values()] == [
        Verdict.SUCCEEDED,
        Verdict.FAILED,
        Verdict.FAILED,
    ]
    assert (ends["ref-2"].reason, ends["ref-2"].nbytes) == ("cancelled: job aborted", 40)
    assert (desk.outcome.status, desk.outcome.reason) == (OutcomeStatus.FAILED, "receiver_failed")


def test_one_receiver_cancels_and_the_other_is_served_to_the_end() -> None:
    """The source stays until the last receiver is done; the outcome tells both fates."""
    desk = Desk(slots=2)
    desk.open(0)
    desk.open(1)
    desk.cancel(0)
    assert desk.told(t.ReleaseSource) == 0
    desk.hand_over(1)
    assert desk.told(t.ReleaseSource) == 1
    assert desk.outcome.status is OutcomeStatus.FAILED
    assert desk.outcome.succeeded == ("site-1",)


def test_cancel_after_the_verdict_changes_nothing() -> None:
    """A confirmed receiver that cancels late, or cancels twice, stays as it was judged."""
    desk = Desk(slots=2)
    desk.hand_over(0)
    assert desk.cancel(0) == ()
    assert desk.verdict(0) is Verdict.SUCCEEDED
    desk.open(1)
    desk.cancel(1)
    outcome = desk.outcome
    assert desk.cancel(1) == ()
    assert desk.outcome is outcome


def test_a_cancel_waits_for_the_chunk_that_a_link_reads() -> None:
    """The source is released only after the link let go of the chunk it was reading."""
    desk = Desk()
    desk.open()
    desk.pull()
    assert desk.cancel(now=1.0) == ()
    assert desk.record.state is t.TransactionState.SETTLING
    assert t.next_tick(desk.record) == 1.0 + samples.BUDGETS.settle
    assert kinds(desk.ended(now=2.0, served=False)) == SETTLED
    assert desk.outcome.settled_at == 2.0


def test_a_ticket_presented_only_to_decline_ends_its_slot() -> None:
    """A receiver that never opened may say that nobody will pull; nobody waits for it then."""
    desk = Desk()
    assert kinds(desk.cancel(reason="not sampled")) == SETTLED
    end = desk.outcome.slots["site-0"]["ref-1"]
    assert (end.verdict, end.reason) == (Verdict.FAILED, "declined: not sampled")
    assert kinds(desk.open(now=1.0)) == (s.AnswerGone,)


# --- budgets, at the exact instant ----------------------------------------------------------------


def test_a_receiver_that_never_comes_fails_at_the_acquire_budget() -> None:
    """One instant before nothing happens; at the instant the slot fails with that reason."""
    desk = Desk(now=10.0)
    due = 10.0 + samples.BUDGETS.acquire
    assert t.next_tick(desk.record) == due
    assert desk.tick(math.nextafter(due, 0.0)) == ()
    assert desk.record.state is t.TransactionState.OPEN
    assert kinds(desk.tick(due)) == SETTLED
    assert (desk.outcome.status, desk.outcome.reason) == (OutcomeStatus.FAILED, "acquire_timeout")
    assert desk.outcome.settled_at == due


def test_a_silent_receiver_fails_at_the_idle_budget() -> None:
    """Idle runs from the last byte range not served before, and fires at its exact instant."""
    desk = Desk()
    desk.open(now=5.0)
    assert t.next_tick(desk.record) == 5.0 + samples.BUDGETS.idle
    desk.pull(now=6.0)
    assert t.next_tick(desk.record) == 5.0 + samples.BUDGETS.idle, "a request is no progress"
    desk.ended(now=7.0, stop=40)
    due = 7.0 + samples.BUDGETS.idle
    assert t.next_tick(desk.record) == due
    assert desk.tick(math.nextafter(due, 0.0)) == ()
    desk.tick(due)
    assert desk.outcome.reason == "idle_timeout"


def test_a_lost_confirmation_is_bounded_by_idle() -> None:
    """Everything served and nothing confirmed does not pin the source for ever."""
    desk = Desk()
    desk.serve(now=1.0)
    desk.tick(1.0 + samples.BUDGETS.idle)
    assert desk.outcome.reason == "idle_timeout"
    assert desk.outcome.slots["site-0"]["ref-1"].nbytes == 100


def test_only_the_stalled_receiver_fails() -> None:
    """Another receiver with progress of its own is untouched by the first one's budget."""
    desk = Desk(slots=2)
    desk.open(0, now=0.0)
    desk.open(1, now=100.0)
    desk.tick(samples.BUDGETS.idle)
    assert desk.verdict(0) is Verdict.FAILED
    assert desk.verdict(1) is Verdict.PENDING
    desk.hand_over(1, now=160.0)
    assert desk.outcome.succeeded == ("site-1",)
    assert desk.outcome.reason == "idle_timeout"


def test_a_receiver_busy_on_one_ref_is_not_missing_on_another() -> None:
    """Acquiring and idling are judged over all refs of the transaction."""
    desk = Desk(refs=2)
    desk.hand_over(ref="ref-1", now=100.0)
    desk.tick(samples.BUDGETS.acquire)
    assert desk.record.state is t.TransactionState.OPEN
    due = 100.0 + samples.BUDGETS.idle
    assert t.next_tick(desk.record) == due
    desk.tick(due)
    ends = desk.outcome.slots["site-0"]
    assert ends["ref-1"].verdict is Verdict.SUCCEEDED
    assert (ends["ref-2"].verdict, ends["ref-2"].reason) == (Verdict.FAILED, "idle_timeout")


def test_a_budgets_verdict_is_final() -> None:
    """A correct confirmation after the budget ran out is answered with the failure."""
    desk = Desk(slots=2)
    desk.serve(0)
    desk.open(1, now=100.0)
    desk.tick(samples.BUDGETS.idle)
    (ack,) = desk.confirm(0, now=samples.BUDGETS.idle)
    assert isinstance(ack, s.AckConfirm)
    assert (ack.verdict.verdict, ack.verdict.reason) == (Verdict.FAILED, "idle_timeout")


def test_truth_beats_the_clock_in_the_same_instant() -> None:
    """A slot confirmed at the very instant its budget ends has succeeded."""
    desk = Desk(slots=2, budgets=Budgets(deadline=300.0))
    due = samples.BUDGETS.idle
    desk.serve(0)
    desk.open(1)
    desk.confirm(0, now=due)
    desk.tick(due)
    assert desk.verdict(0) is Verdict.SUCCEEDED
    assert desk.verdict(1) is Verdict.FAILED
    late = Desk(budgets=Budgets(deadline=300.0))
    late.serve(now=299.0)
    late.confirm(now=300.0)
    late.tick(300.0)
    assert late.outcome.status is OutcomeStatus.COMPLETED


def test_the_deadline_ends_a_transaction_that_still_moves() -> None:
    """With a deadline, progress does not help past it."""
    desk = Desk(budgets=Budgets(deadline=30.0))
    desk.open(now=29.0)
    assert t.next_tick(desk.record) == 30.0
    assert desk.tick(29.9) == ()
    assert kinds(desk.tick(30.0)) == SETTLED
    assert (desk.outcome.status, desk.outcome.reason) == (OutcomeStatus.FAILED, "deadline")


def test_a_hold_moves_the_idle_clock_by_what_it_asks() -> None:
    """While a receiver waits for its own disk, the producer waits with it."""
    desk = Desk()
    desk.open()
    desk.hold(200.0, now=10.0)
    assert t.next_tick(desk.record) == 210.0 + samples.BUDGETS.idle
    desk.hold(20.0, now=100.0)
    assert t.next_tick(desk.record) == 210.0 + samples.BUDGETS.idle, "overlapping holds"


@pytest.mark.parametrize("seconds", [0.001, 30.0, 1e9])
def test_holds_cost_what_they_move_however_they_are_cut(seconds: float) -> None:
    """However a receiver cuts its holds, they move the idle clock by the budget at most."""
    budgets = Budgets()
    desk = Desk(budgets=budgets)
    desk.open()
    for _ in range(100):
        due = t.next_tick(desk.record)
        if due is None:
            break
        desk.hold(seconds, now=math.nextafter(due, 0.0))
        desk.tick(due)
    assert desk.outcome.reason == "idle_timeout"
    assert desk.outcome.settled_at <= budgets.hold + budgets.idle
    assert desk.record.held[0] == pytest.approx(budgets.hold)


def test_a_hold_after_progress_does_not_shorten_the_wait() -> None:
    """A negative or tiny hold cannot pull a clock back."""
    desk = Desk()
    desk.open()
    desk.hold(100.0, now=10.0)
    desk.pull(now=11.0)
    desk.ended(now=12.0, stop=40)
    desk.hold(-50.0, now=13.0)
    assert t.next_tick(desk.record) == 110.0 + samples.BUDGETS.idle


def test_settling_is_bounded_when_a_link_never_lets_go() -> None:
    """A link that hangs on to a chunk delays the outcome by the settle budget, not for ever."""
    desk = Desk()
    desk.serve()
    desk.pull()
    assert kinds(desk.confirm(now=5.0)) == (s.AckConfirm,)
    due = 5.0 + samples.BUDGETS.settle
    assert t.next_tick(desk.record) == due
    assert desk.tick(math.nextafter(due, 0.0)) == ()
    assert kinds(desk.tick(due)) == SETTLED
    assert desk.outcome.status is OutcomeStatus.COMPLETED
    assert desk.ended(now=due + 1.0) == (), "the chunk that came too late"
    assert desk.record.in_flight == 0


def test_no_clock_runs_once_it_is_settled() -> None:
    """A settled transaction asks for no tick and ignores one."""
    desk = Desk()
    desk.abort()
    assert t.next_tick(desk.record) is None
    assert desk.tick(1e9) == ()


# --- ending it from this side ---------------------------------------------------------------------


def test_an_abort_fails_what_is_open_and_keeps_what_is_true() -> None:
    """Deleting a transaction does not undo a receiver that has confirmed."""
    desk = Desk(slots=3)
    desk.hand_over(0)
    desk.open(1)
    assert kinds(desk.abort("deleted", now=2.0)) == SETTLED
    assert desk.outcome.status is OutcomeStatus.ABORTED
    assert [desk.verdict(slot) for slot in range(3)] == [
        Verdict.SUCCEEDED,
        Verdict.FAILED,
        Verdict.FAILED,
    ]
    assert desk.confirm(1) == (
        s.AckConfirm("ref-1", desk.origin(1), desk.outcome.slots["site-1"]["ref-1"]),
    )


def test_an_abort_while_settling_is_too_late() -> None:
    """The outcome is decided by what was true when the last slot became final."""
    desk = Desk()
    desk.serve()
    desk.pull()
    desk.confirm()
    assert desk.abort("deleted") == ()
    desk.ended()
    assert desk.outcome.status is OutcomeStatus.COMPLETED


def test_an_abort_waits_for_the_chunk_that_a_link_reads() -> None:
    """Aborting releases the source only after the last chunk was let go."""
    desk = Desk()
    desk.open()
    desk.pull()
    assert desk.abort(now=1.0) == ()
    assert kinds(desk.ended(now=2.0)) == SETTLED


# --- outcome --------------------------------------------------------------------------------------

HOW: dict[str, tuple[Callable[[Desk, int], object], bool | None]] = {
    "confirmed": (lambda desk, slot: desk.hand_over(slot), True),
    "failed": (lambda desk, slot: (desk.open(slot), desk.confirm(slot, ok=False)), False),
    "cancelled": (lambda desk, slot: (desk.open(slot), desk.cancel(slot)), False),
    "declined": (lambda desk, slot: desk.cancel(slot), False),
    "silent": (lambda desk, slot: desk.open(slot), None),
    "absent": (lambda desk, slot: None, None),
}


@pytest.mark.parametrize("end", ["clock", "deleted", "source_changed"])
@pytest.mark.parametrize("ways", list(itertools.product(HOW, repeat=2)), ids="-".join)
def test_the_outcome_tells_the_truth(ways: tuple[str, str], end: str) -> None:
    """Every pair of fates, ended by clocks, by deletion or by a changed source, is told as it was."""
    desk = Desk(slots=2)
    for slot, way in enumerate(ways):
        HOW[way][0](desk, slot)
    if end == "clock":
        desk.tick(samples.BUDGETS.acquire)
        desk.tick(samples.BUDGETS.idle)
    else:
        desk.abort(end)
    outcome = desk.outcome
    fates = [HOW[way][1] for way in ways]
    assert [len(outcome.succeeded), outcome.quorum] == [fates.count(True), all(fates)]
    timeouts = {"absent": "acquire_timeout", "silent": "idle_timeout"}
    if all(fates):
        expected = (OutcomeStatus.COMPLETED, "all_receivers_succeeded")
    elif False in fates:
        expected = (OutcomeStatus.FAILED, "receiver_failed")
    elif end == "clock":
        first = "absent" if "absent" in ways else "silent"
        expected = (OutcomeStatus.FAILED, timeouts[first])
    elif end == "deleted":
        expected = (OutcomeStatus.ABORTED, "deleted")
    else:
        expected = (OutcomeStatus.FAILED, end)
    assert (outcome.status, outcome.reason) == expected


def test_a_quorum_is_met_by_receivers_that_have_everything() -> None:
    """The quorum counts those that succeeded on every ref, and completed stays strict."""
    desk = Desk(slots=3, refs=2, min_receivers=1)
    desk.hand_over(0, "ref-1")
    desk.hand_over(0, "ref-2")
    desk.hand_over(1, "ref-1")
    desk.abort("deleted")
    assert desk.outcome.quorum
    assert desk.outcome.succeeded == ("site-0",)
    assert desk.outcome.status is OutcomeStatus.ABORTED
    strict = Desk(slots=3, min_receivers=2)
    strict.hand_over(0)
    strict.abort("deleted")
    assert not strict.outcome.quorum


def test_a_quorum_is_met_without_who_never_came() -> None:
    """A receiver that never opens fails at its budget; with enough others the quorum is met, and completed is not."""
    desk = Desk(slots=2, min_receivers=1)
    desk.hand_over(0)
    assert desk.tick(math.nextafter(samples.BUDGETS.acquire, 0.0)) == ()
    desk.tick(samples.BUDGETS.acquire)
    assert desk.outcome.quorum
    assert desk.outcome.succeeded == ("site-0",)
    assert (desk.outcome.status, desk.outcome.reason) == (OutcomeStatus.FAILED, "acquire_timeout")


def test_an_outcome_cannot_be_changed() -> None:
    """What callbacks are given is read-only all the way down."""
    desk = Desk()
    desk.hand_over()
    with pytest.raises(TypeError):
        desk.outcome.slots["site-0"] = {}  # type: ignore[index]
    with pytest.raises(TypeError):
        desk.outcome.slots["site-0"]["ref-1"] = None  # type: ignore[index]
    with pytest.raises(AttributeError):
        desk.outcome.status = OutcomeStatus.FAILED  # type: ignore[misc]


def test_every_slot_has_a_name_of_its_own() -> None:
    """Declared, bound and absent receivers are told apart, even one that sits in two slots."""
    site = Address("site-1")
    slots = [Slot(samples.ticket(0), site), Slot(samples.ticket(1)), Slot(samples.ticket(2))]
    desk = Desk(slots=slots)
    desk.open(1)
    desk.abort()
    assert list(desk.outcome.slots) == ["site-1", "site-1#1", "slot-2"]


# --- after settlement -----------------------------------------------------------------------------


def test_a_repeated_confirmation_gets_the_same_answer_after_settlement() -> None:
    """A receiver whose acknowledgement was lost asks again and hears the same verdict, for ever."""
    desk = Desk()
    desk.serve()
    first = desk.confirm(now=1.0)[0]
    for now in (2.0, 3.0, 1799.0):
        assert desk.confirm(now=now) == (first,)
    assert desk.outcome.slots["site-0"]["ref-1"].nbytes == 100


def test_a_fresh_pull_of_a_finished_ref_is_told_that_it_is_gone() -> None:
    """Opening or pulling a finished ref never looks like a success without data."""
    desk = Desk()
    desk.hand_over()
    gone = s.AnswerGone("ref-1", desk.origin(0), desk.outcome.slots["site-0"]["ref-1"])
    assert desk.open(now=1.0) == (gone,)
    assert desk.pull(now=1.0) == (gone,)
    assert gone.verdict.verdict is Verdict.SUCCEEDED


def test_what_is_kept_of_a_settled_transaction_answers_as_the_whole_would() -> None:
    """The epitaph admits the same receivers and gives the same answers, without ranges and outcome."""
    desk = Desk(2)
    desk.hand_over()
    desk.serve(1)
    desk.abort("deleted")
    whole, kept = desk.record, t.epitaph(desk.record)
    assert kept.outcome is None
    for slot in range(2):
        address, ticket = Address(f"site-{slot}"), samples.ticket(slot)
        assert t.admit(kept, ticket, address) == t.admit(whole, ticket, address) == slot
        origin = desk.origin(slot)
        for event in (
            t.OpenRequested(9.0, slot, "ref-1", origin, b"n" * 8, samples.WHOLE, samples.CANCEL),
            t.ConfirmRequested(9.0, slot, "ref-1", origin, True, samples.NONCE, ""),
        ):
            (old,), (new,) = t.step(whole, event)[1], t.step(kept, event)[1]
            assert isinstance(old, (s.AnswerGone, s.AckConfirm))
            assert isinstance(new, (s.AnswerGone, s.AckConfirm))
            assert type(new) is type(old)
            assert (new.verdict.verdict, new.verdict.reason) == (
                old.verdict.verdict,
                old.verdict.reason,
            )


@pytest.mark.parametrize("end", ["deleted", "deadline", "idle_timeout"])
def test_a_late_request_hears_why_it_failed(end: str) -> None:
    """After an abort or a timeout the same receiver is told the reason, never a success."""
    desk = Desk()
    desk.open()
    desk.abort(end)
    (gone,) = desk.open(now=1.0)
    assert isinstance(gone, s.AnswerGone)
    assert (gone.verdict.verdict, gone.verdict.reason) == (Verdict.FAILED, end)


def test_an_unknown_receiver_stays_unknown_after_settlement() -> None:
    """A tombstone admits the receivers of the transaction and nobody else."""
    desk = Desk()
    desk.hand_over()
    assert t.admit(desk.record, samples.ticket(0), Address("site-0")) == 0
    assert t.admit(desk.record, samples.ticket(0), samples.STRANGER) is None
    assert t.admit(desk.record, samples.ticket(5), Address("site-0")) is None


def test_sixteen_receivers_of_twenty_four_refs_with_every_answer_asked_twice() -> None:
    """Duplicate last requests are answered alike, nothing is counted twice, one outcome comes out."""
    desk = Desk(slots=16, refs=24)
    for slot, ref in itertools.product(range(16), desk.record.refs):
        desk.serve(slot, ref)
        desk.open(slot, ref)
        (ack, *_), again = desk.confirm(slot, ref), desk.confirm(slot, ref)
        assert again == (ack,)
    assert desk.told(t.WakeWaiters) == 1
    assert desk.outcome.status is OutcomeStatus.COMPLETED
    assert len(desk.outcome.succeeded) == 16
    assert {end.nbytes for ends in desk.outcome.slots.values() for end in ends.values()} == {100}


def test_a_tombstone_answers_until_its_time_and_then_no_more() -> None:
    """A settled transaction is remembered for its lifetime, which no late request extends."""
    book: Tombstones[str, t.Transaction] = Tombstones()
    desk = Desk()
    desk.hand_over(now=10.0)
    book.bury(10.0, "tx-1", desk.record)
    for now in (11.0, 1000.0, 1809.9):
        assert book.get(now, "tx-1") == desk.record
        assert kinds(desk.confirm(now=now)) == (s.AckConfirm,)
    assert book.get(1810.0, "tx-1") is None
    (forgotten,) = book.expire(1810.0)
    forgotten, effects = t.step(forgotten, t.Forgotten(1810.0))
    assert forgotten.state is t.TransactionState.FORGOTTEN
    assert effects == ()
