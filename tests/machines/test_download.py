"""Download scenarios: what is retried, what is given up, what is said to whom, and when."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from streamoff.errors import (
    GoneError,
    InvariantError,
    NoSpaceError,
    PeerRefusedError,
    SourceFailedError,
    SourceLostError,
    StreamoffError,
    TransferTimeoutError,
)
from streamoff.machines import download as d
from streamoff.machines.download import DOWNLOAD, DownloadState
from streamoff.machines.invariants import check_download
from streamoff.types import Budgets, ByteRange, Capability, RangeSet

from . import samples

pytestmark = pytest.mark.core

B = samples.BUDGETS


class Seat:
    """One download, driven by events; every step is checked against the invariants."""

    def __init__(
        self,
        state: DownloadState = DownloadState.IDLE,
        *,
        budgets: Budgets = B,
        theirs: frozenset[Capability] = samples.CANCEL,
    ) -> None:
        self.record = replace(samples.download(state, theirs=theirs), budgets=budgets)
        self.effects: list[d.DownloadEffect] = []

    def do(self, event: d.DownloadEvent) -> tuple[d.DownloadEffect, ...]:
        """Apply one event and keep its effects."""
        self.record, effects = DOWNLOAD.step(self.record, event)
        check_download(self.record)
        self.effects += effects
        return effects

    def land(self, now: float, start: int, stop: int) -> tuple[d.DownloadEffect, ...]:
        """A range is safe."""
        return self.do(d.classify_landed(self.record, now, ByteRange(start, stop)))

    def plan(self, now: float) -> tuple[d.DownloadEffect, ...]:
        """The source answers and its header is accepted."""
        self.do(d.Accepted(now, samples.NONCE, samples.HEADER, samples.CANCEL))
        return self.do(d.Planned(now, samples.WHOLE, RangeSet((samples.HEADER,))))

    def until(self, now: float) -> tuple[d.DownloadEffect, ...]:
        """Let every clock fire that is due up to ``now``; the effects of all of them."""
        told: list[d.DownloadEffect] = []
        while (due := d.next_tick(self.record)) is not None and due <= now:
            assert d.classify_tick(self.record, math.nextafter(due, -1.0)) is None
            event = d.classify_tick(self.record, due)
            assert event is not None, "a clock that fires for nothing"
            told += self.do(event)
        return tuple(told)

    @property
    def cause(self) -> StreamoffError:
        """Why it ended badly."""
        assert self.record.cause is not None
        return self.record.cause


def kinds(effects: tuple[object, ...]) -> tuple[type, ...]:
    """Effect types, in order."""
    return tuple(map(type, effects))


# --- the good way ---------------------------------------------------------------------------------


def test_a_download_opens_pulls_finalises_confirms_and_reports() -> None:
    """The whole way, with every effect in its order, and the payload reported only at its end."""
    seat = Seat()
    seat.do(d.Started(0.0))
    seat.plan(1.0)
    seat.land(2.0, 16, 60)
    seat.land(3.0, 60, 100)
    seat.do(d.Finalised(4.0))
    seat.do(d.ConfirmAcked(5.0))
    assert seat.effects == [
        d.SendOpen(),
        d.PullMissing(),
        d.PullMissing(),
        d.PullMissing(),
        d.Finalise(),
        d.SendConfirm(ok=True),
        d.Report(None),
    ]
    assert seat.record.state is DownloadState.DONE


def test_a_payload_that_is_all_header_ends_with_an_empty_range() -> None:
    """A state dict without bytes is planned, found complete and finalised."""
    seat = Seat(DownloadState.OPENING)
    seat.do(d.Accepted(1.0, samples.NONCE, samples.HEADER, samples.CANCEL))
    everything = RangeSet((samples.HEADER,))
    seat.do(d.Planned(1.0, everything, everything))
    assert kinds(seat.land(1.0, 0, 0)) == (d.Finalise,)


@pytest.mark.parametrize(
    "word",
    [
        d.ConfirmAcked(1.0),
        d.ConfirmGivenUp(1.0),
        d.Refused(1.0, GoneError("settled")),
        d.Noticed(1.0, SourceFailedError("the trainer died")),
        d.CancelRequested(1.0, "job aborted"),
    ],
    ids=lambda word: type(word).__name__,
)
def test_a_whole_payload_is_delivered_whatever_the_producer_says(word: d.DownloadEvent) -> None:
    """Once everything is in its place, no late word turns the delivery into a failure."""
    seat = Seat(DownloadState.CONFIRMING)
    assert seat.do(word) == (d.Report(None),)
    assert seat.record.state is DownloadState.DONE
    assert seat.record.cause is None


def test_an_unanswered_confirmation_is_repeated_and_then_left_to_the_producer() -> None:
    """The confirmation is sent three times in all; the payload is delivered all the same."""
    seat = Seat(DownloadState.CONFIRMING)
    assert seat.until(B.confirm) == (d.SendConfirm(ok=True),)
    assert seat.until(2 * B.confirm) == (d.SendConfirm(ok=True),)
    assert seat.until(3 * B.confirm - 0.1) == ()
    assert seat.until(3 * B.confirm) == (d.Report(None),)
    assert seat.record.confirms == d.CONFIRM_ATTEMPTS


def test_a_link_that_comes_and_goes_does_not_prolong_confirming() -> None:
    """Each new link carries the confirmation again, and the wait ends when it would have ended."""
    seat = Seat(DownloadState.CONFIRMING)
    now = 0.0
    while seat.record.state is DownloadState.CONFIRMING and now < 100.0:
        now += 1.0
        seat.do(d.LinkLost(now))
        assert seat.do(d.LinkRestored(now)) == (d.SendConfirm(ok=True),)
        seat.until(now)
    assert now == 3 * B.confirm


# --- retries --------------------------------------------------------------------------------------


def test_a_stall_is_retried_and_resumes_where_it_was() -> None:
    """After a stall the source is opened again, and what has landed stays landed."""
    seat = Seat(DownloadState.STREAMING)
    landed = seat.record.landed
    assert seat.until(B.stall) == ()
    assert seat.record.state is DownloadState.BACKOFF
    assert seat.until(B.stall + B.backoff[0]) == (d.SendOpen(),)
    assert seat.do(d.Accepted(23.0, samples.NONCE, samples.HEADER, samples.CANCEL)) == (
        d.PullMissing(),
    )
    assert seat.record.landed == landed
    assert seat.record.missing == RangeSet((samples.REST,))


def test_a_silent_source_is_given_up_after_the_whole_schedule() -> None:
    """Four attempts of 20 s with pauses of 2, 4 and 8 s: at 94 s, not an instant sooner or later."""
    seat = Seat(DownloadState.STREAMING)
    opens = seat.until(94.0 - 1e-6)
    assert opens == (d.SendOpen(),) * 3
    assert not seat.record.ended
    assert kinds(seat.until(94.0)) == (d.SendCancel, d.Discard, d.Report)
    assert isinstance(seat.cause, TransferTimeoutError)
    assert "60 of 100 bytes after 3 retries" in str(seat.cause)


def test_progress_gives_all_retries_back() -> None:
    """A range that lands after three retries makes the next stall the first one again."""
    seat = Seat(DownloadState.STREAMING)
    seat.until(80.0)
    seat.do(d.Accepted(80.0, samples.NONCE, samples.HEADER, samples.CANCEL))
    assert seat.record.attempt == 3
    seat.land(81.0, 60, 80)
    assert seat.record.attempt == 0
    seat.until(101.0)
    assert seat.record.state is DownloadState.BACKOFF
    assert seat.record.retry_at == 101.0 + B.backoff[0]


@pytest.mark.parametrize("state", [DownloadState.OPENING, DownloadState.BACKOFF])
def test_a_range_that_lands_between_attempts_is_progress_too(state: DownloadState) -> None:
    """A chunk slower than an attempt is kept and counts: a slow link that moves bytes never times out."""
    seat = Seat(DownloadState.STREAMING)
    seat.until(B.stall)
    now = B.stall
    if state is DownloadState.OPENING:
        now += B.backoff[0]
        seat.until(now)
    assert seat.record.state is state
    assert seat.land(now + 1.0, 60, 80) == ()
    assert seat.record.attempt == 0
    assert seat.record.landed.nbytes == 80
    assert seat.record.progressed == now + 1.0


def test_a_plan_made_while_the_link_was_lost_is_kept() -> None:
    """Checking a header takes a while; if the link goes meanwhile, the plan is resumed, not refused."""
    seat = Seat(DownloadState.OPENING)
    seat.do(d.Accepted(1.0, samples.NONCE, samples.HEADER, samples.CANCEL))
    seat.do(d.LinkLost(2.0))
    assert seat.do(d.Planned(3.0, samples.WHOLE, RangeSet((samples.HEADER,)))) == ()
    assert seat.do(d.LinkRestored(4.0)) == (d.SendOpen(),)
    seat.do(d.Accepted(5.0, samples.NONCE, samples.HEADER, samples.CANCEL))
    assert seat.record.missing == RangeSet((ByteRange(16, 100),))


def test_a_second_plan_keeps_what_has_landed() -> None:
    """However often a plan is made, ranges that are safe stay safe."""
    seat = Seat(DownloadState.STREAMING)
    seat.do(d.Planned(3.0, samples.WHOLE, RangeSet((samples.HEADER,))))
    assert seat.record.missing == RangeSet((samples.REST,))


def test_the_last_range_may_land_in_any_attempt() -> None:
    """What completes the payload while a retry is pending ends the retry."""
    for state in (DownloadState.OPENING, DownloadState.BACKOFF):
        seat = Seat(DownloadState.STREAMING)
        seat.until(B.stall if state is DownloadState.BACKOFF else B.stall + B.backoff[0])
        assert seat.land(30.0, 60, 100) == (d.Finalise(),)
        assert (seat.record.retry_at, seat.record.give_up_at) == (None, None)
        assert d.next_tick(seat.record) == 30.0 + B.stall


def test_a_range_that_lands_twice_is_no_progress() -> None:
    """A source that repeats itself does not keep the receiver waiting."""
    seat = Seat(DownloadState.STREAMING)
    due = d.next_tick(seat.record)
    seat.land(10.0, 0, 60)
    assert d.next_tick(seat.record) == due == B.stall


# --- links ----------------------------------------------------------------------------------------


def test_a_lost_link_is_awaited_and_the_download_resumes() -> None:
    """Within the grace the link comes back, and the download opens again at once."""
    seat = Seat(DownloadState.STREAMING)
    seat.do(d.LinkLost(5.0))
    assert d.next_tick(seat.record) == 5.0 + B.reconnect_grace
    assert seat.do(d.LinkRestored(34.9)) == (d.SendOpen(),)
    assert seat.record.landed.nbytes == 60


def test_a_link_that_stays_away_loses_the_source() -> None:
    """At the end of the grace, to the instant, the source is lost; no cancel can reach it."""
    seat = Seat(DownloadState.STREAMING)
    seat.do(d.LinkLost(5.0))
    seat.do(d.LinkLost(20.0))
    assert seat.until(math.nextafter(35.0, 0.0)) == ()
    assert kinds(seat.until(35.0)) == (d.Discard, d.Report)
    assert seat.record.state is DownloadState.SOURCE_LOST
    assert isinstance(seat.cause, SourceLostError)


def test_a_link_lost_during_a_pause_is_awaited_from_then() -> None:
    """The pause before a retry turns into the wait for the link."""
    seat = Seat(DownloadState.STREAMING)
    seat.until(B.stall)
    seat.do(d.LinkLost(21.0))
    assert (seat.record.retry_at, seat.record.give_up_at) == (None, 21.0 + B.reconnect_grace)


@pytest.mark.parametrize("period", [1.0, 7.0, 19.0, 29.0])
def test_a_flapping_link_does_not_keep_a_download_for_ever(period: float) -> None:
    """However often the link returns, a whole retry schedule without a new byte is the end."""
    seat = Seat(DownloadState.STREAMING)
    now = 0.0
    while not seat.record.ended:
        now += period
        seat.until(now)
        seat.do(d.LinkLost(now))
        seat.until(now + period / 2)
        seat.do(d.LinkRestored(now + period / 2))
        assert now < 1000.0
    assert now <= B.retry_schedule + period
    assert isinstance(seat.cause, TransferTimeoutError)


def test_a_receiver_gives_up_before_its_producer_does() -> None:
    """Whatever the mix of slow answers and stalls, the receiver's end comes before the idle budget."""
    seat = Seat(DownloadState.STREAMING)
    due: float | None = None
    while not seat.record.ended:
        due = d.next_tick(seat.record)
        assert due is not None
        assert due < 5000.0, "no end in sight"
        seat.until(due)
        if seat.record.state is DownloadState.OPENING:
            late = seat.record.since + B.stall - 0.1
            seat.do(d.Accepted(late, samples.NONCE, samples.HEADER, samples.CANCEL))
    assert due == B.retry_schedule < B.idle


# --- holds ----------------------------------------------------------------------------------------


def test_a_hold_moves_the_clock_and_is_told() -> None:
    """Waiting for our own disk is no stall of the source, and the source is asked for patience."""
    seat = Seat(DownloadState.STREAMING)
    assert seat.do(d.HoldAsked(10.0, 100.0)) == (d.SendHold(100.0),)
    assert d.next_tick(seat.record) == 110.0 + B.stall
    assert seat.record.held == 110.0


@pytest.mark.parametrize("seconds", [0.001, 30.0, 1e9])
def test_holds_are_bounded_however_they_are_cut(seconds: float) -> None:
    """No number of holds, small or large, keeps a download beyond the hold budget and one schedule."""
    seat = Seat(DownloadState.STREAMING)
    now = 0.0
    while not seat.record.ended:
        due = d.next_tick(seat.record)
        assert due is not None
        assert due < 5000.0, "no end in sight"
        now = due
        if seat.record.state is DownloadState.STREAMING:
            seat.do(d.HoldAsked(math.nextafter(now, 0.0), seconds))
        seat.until(now)
        if seat.record.state is DownloadState.OPENING:
            seat.do(d.Accepted(now, samples.NONCE, samples.HEADER, samples.CANCEL))
    assert now <= B.hold + B.retry_schedule
    assert seat.record.held <= B.hold * (1 + 1e-9)


def test_a_long_finalisation_asks_for_patience_as_often_as_it_takes() -> None:
    """While the last flush takes minutes the producer is asked to hold, and never left to its idle budget."""
    seat = Seat()
    seat.do(d.Started(0.0))
    seat.plan(0.0)
    seat.land(5.0, 16, 100)
    holds = []
    while (due := d.next_tick(seat.record)) is not None and due < 400.0:
        assert seat.until(due) == (d.SendHold(B.stall),)
        holds.append(due)
    assert holds == [25.0 + 2 * B.stall * number for number in range(10)]
    assert kinds(seat.do(d.Finalised(400.0))) == (d.SendConfirm,)


def test_the_patience_with_a_long_finalisation_has_an_end() -> None:
    """Holds spent and one schedule later a finalisation is given up, and the producer is told."""
    seat = Seat()
    seat.do(d.Started(0.0, samples.CANCEL))
    seat.plan(0.0)
    seat.land(5.0, 16, 100)
    end = 5.0 + B.hold + B.retry_schedule
    seat.until(end - 0.001)
    assert seat.record.state is DownloadState.FINALISING
    told = seat.until(end)
    assert kinds(told) == (d.SendCancel, d.Discard, d.Report)
    assert isinstance(seat.cause, TransferTimeoutError)
    assert seat.cause.what == "the landing does not end"
    assert seat.do(d.Finalised(end + 1.0)) == ()


@pytest.mark.parametrize("stall", [0.1, 0.7, 20.0])
@pytest.mark.parametrize("start", [0.0, 1e6 + 1 / 3, 1e9 + 1 / 7])
def test_a_receiver_that_holds_at_every_stall_gets_on(start: float, stall: float) -> None:
    """Asking for all that is left whenever a stall is due spends the budget; it never asks for nothing."""
    seat = Seat(budgets=Budgets(stall=stall, hold=60.1))
    seat.do(d.Started(start))
    seat.plan(start)
    for _ in range(10_000):
        due = d.next_tick(seat.record)
        if due is None:
            break
        event = d.classify_tick(seat.record, due)
        assert event is not None
        left = seat.record.budgets.hold - seat.record.held
        if isinstance(event, d.Stalled) and seat.record.state is DownloadState.STREAMING and left:
            event = d.HoldAsked(due, min(left, stall))
        seat.do(event)
    assert seat.record.ended
    assert seat.record.held == 60.1


# --- deadline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["opening", "streaming", "backoff", "finalising"])
def test_the_deadline_ends_a_download_wherever_it_is(state: str) -> None:
    """With a deadline, an attempt in any state ends at that instant."""
    seat = Seat(budgets=Budgets(deadline=30.0, idle=500.0))
    seat.do(d.Started(0.0))
    if state != "opening":
        seat.plan(28.0)
    else:
        seat.do(d.LinkLost(1.0))
        seat.do(d.LinkRestored(25.0))
    if state == "backoff":
        seat.do(d.LinkLost(29.0))
    if state == "finalising":
        seat.land(29.0, 16, 100)
    assert d.next_tick(seat.record) == 30.0
    assert d.classify_tick(seat.record, 29.9) is None
    seat.until(30.0)
    assert seat.record.state is DownloadState.FAILED
    assert "deadline" in seat.cause.what


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [samples.CANCEL, frozenset()])
@pytest.mark.parametrize("theirs", [samples.CANCEL, frozenset()])
@pytest.mark.parametrize(
    "end",
    [
        d.CancelRequested(1.0, "job aborted"),
        d.LandingFailed(1.0, NoSpaceError("disk full")),
        d.Exhausted(1.0, TransferTimeoutError("no progress")),
        d.Refused(1.0, PeerRefusedError("no such tensor"), waits=True),
    ],
    ids=lambda end: type(end).__name__,
)
def test_an_abandoned_slot_is_cancelled_if_both_ends_can(
    end: d.DownloadEvent, mine: frozenset[Capability], theirs: frozenset[Capability]
) -> None:
    """Cancel is sent first, and only if both ends named it; otherwise the producer's budgets clean up."""
    seat = Seat(DownloadState.STREAMING, theirs=theirs)
    seat.record = replace(seat.record, mine=mine)
    both = bool(mine and theirs)
    assert kinds(seat.do(end)) == ((d.SendCancel,) if both else ()) + (d.Discard, d.Report)


@pytest.mark.parametrize("theirs", [samples.CANCEL, None])
def test_cancel_works_before_the_first_answer(theirs: frozenset[Capability] | None) -> None:
    """An open that nobody answered is cancelled if the source can be, as far as anybody knows."""
    seat = Seat()
    seat.do(d.Started(0.0, theirs))
    assert kinds(seat.do(d.CancelRequested(1.0, "aborted"))) == (d.SendCancel, d.Discard, d.Report)


def test_a_source_that_is_known_not_to_understand_is_sent_no_cancel() -> None:
    """A neighbour that has not named the capability is left to its budgets."""
    seat = Seat()
    seat.do(d.Started(0.0, frozenset()))
    assert kinds(seat.do(d.CancelRequested(1.0, "aborted"))) == (d.Discard, d.Report)


def test_a_failing_finalisation_is_confirmed_as_failed() -> None:
    """All bytes came, but their place is bad: the producer hears that it failed, and why."""
    seat = Seat(DownloadState.FINALISING)
    error = NoSpaceError("no room for the rename")
    assert seat.do(d.LandingFailed(1.0, error)) == (
        d.SendConfirm(ok=False, reason="no room for the rename"),
        d.Discard(),
        d.Report(error),
    )


def test_a_refused_slot_is_not_cancelled() -> None:
    """Where the source has nothing to give there is nobody to tell; other refs of the slot are left alone."""
    seat = Seat(DownloadState.STREAMING)
    told = seat.do(d.Refused(1.0, GoneError("settled")))
    assert kinds(told) == (d.Discard, d.Report)


def test_the_first_cause_is_the_one_reported() -> None:
    """A full disk that leads to a cancelled job stays a full disk; one report is all there is."""
    seat = Seat(DownloadState.STREAMING)
    error = NoSpaceError("disk full")
    seat.do(d.LandingFailed(1.0, error))
    for event in samples.DOWNLOAD_EVENTS[1:]:
        assert seat.do(event) == ()
    assert seat.cause is error
    assert [effect for effect in seat.effects if isinstance(effect, d.Report)] == [d.Report(error)]


def test_a_notice_before_the_start_fails_without_a_request() -> None:
    """A download of a source known to be dead ends before it sends anything."""
    seat = Seat()
    error = SourceFailedError("the trainer died")
    assert seat.do(d.Noticed(0.0, error)) == (d.Report(error),)
    assert seat.record.state is DownloadState.SOURCE_LOST


def test_a_cancel_before_the_start_sends_nothing() -> None:
    """Nobody needs to be told of a download that never began."""
    seat = Seat()
    assert kinds(seat.do(d.CancelRequested(0.0, "scope left"))) == (d.Report,)
    assert seat.cause.what == "cancelled: scope left"


@pytest.mark.parametrize(
    "state", [DownloadState.OPENING, DownloadState.STREAMING, DownloadState.BACKOFF]
)
def test_a_notice_interrupts_at_once_with_its_own_reason(state: DownloadState) -> None:
    """The owner's word ends every attempt immediately; there is nobody left to cancel at."""
    seat = Seat(state)
    error = SourceFailedError("exit code 137")
    assert seat.do(d.Noticed(1.0, error)) == (d.Discard(), d.Report(error))
    assert seat.cause is error


def test_no_clock_runs_before_the_start_and_after_the_end() -> None:
    """Neither a download that waits to be started nor one that ended wants to be woken."""
    for state in (DownloadState.IDLE, *DOWNLOAD.final):
        record = samples.download(state)
        assert d.next_tick(record) is None
        assert d.classify_tick(record, 1e9) is None


def test_a_download_is_started_once() -> None:
    """Starting twice is our own mistake and is said so."""
    with pytest.raises(InvariantError, match="Started cannot happen while done"):
        DOWNLOAD.step(samples.download(DownloadState.DONE), d.Started(1.0))
