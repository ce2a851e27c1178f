"""Participation scenarios: a result counts once, and only if it was there when its round closed."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from streamoff.errors import InvariantError
from streamoff.machines import participation as p
from streamoff.machines.invariants import check_participation
from streamoff.machines.participation import PARTICIPATION, ParticipationState

from . import samples

pytestmark = pytest.mark.core

Q = ParticipationState
SECOND = p.Decline(2, "a second result of this round")


def play(
    record: p.Participation, *events: p.ParticipationEvent
) -> tuple[p.Participation, list[p.ParticipationEffect]]:
    """Apply events; the record and all effects."""
    told: list[p.ParticipationEffect] = []
    for event in events:
        record, effects = PARTICIPATION.step(record, event)
        check_participation(record)
        told += effects
    return record, told


def test_a_result_is_pulled_and_counted_once() -> None:
    """The first offer is pulled; a second one, before or after it counted, is declined with the reason."""
    record, told = play(p.Participation("site-1"), p.Offered(1))
    assert told == [p.Pull(1)]
    record, told = play(record, p.Offered(2))
    assert told == [SECOND]
    assert not record.settled
    record, _ = play(record, p.Counted())
    assert record.settled
    assert play(record, p.Offered(2)) == (record, [SECOND])


def test_a_late_result_is_declined_before_a_byte_is_pulled() -> None:
    """After the round closed an offer is answered with why it closed, and nothing is pulled."""
    record = samples.participation(Q.LATE)
    assert record.settled
    record, told = play(record, p.Offered(9))
    assert told == [p.Decline(9, "too late: enough responses")]


def test_a_result_of_a_site_that_has_failed_is_declined_with_that_reason() -> None:
    """Whoever could not take part is told why, if a result of it comes after all."""
    record, _ = play(p.Participation("site-1"), p.Forfeited("unreachable"))
    assert play(record, p.Offered(9))[1] == [
        p.Decline(9, "the site has failed in this round: unreachable")
    ]


@pytest.mark.parametrize("state", [Q.LANDING, Q.CUTTING, Q.ACCEPTED, Q.FAILED, Q.LATE])
def test_what_a_site_sends_after_its_result_does_not_harm_it(state: ParticipationState) -> None:
    """Garbage or an error behind a result changes nothing: the result stands as it would have."""
    record = samples.participation(state)
    assert play(record, p.Forfeited("no envelope")) == (record, [])


def test_a_pull_under_way_is_stopped_when_the_round_closes() -> None:
    """Closing cuts the pull once, and the site is late for the reason of the closing, not of the cut."""
    record, told = play(samples.participation(Q.LANDING), p.Closed("cut-off"))
    assert told == [p.CancelPull("cut-off")]
    assert not record.settled, "whether the result was in is not known yet"
    assert play(record, p.Closed("given up")) == (record, [])
    record, told = play(record, p.Failed("cancelled"))
    assert (record.state, record.reason, told) == (Q.LATE, "cut-off", [])


def test_what_had_landed_when_the_round_closed_counts() -> None:
    """A result that the engine took while the closing was on its way is in, and not late as well."""
    record, _ = play(samples.participation(Q.LANDING), p.Closed("cut-off"), p.Counted())
    assert (record.state, record.reason, record.settled) == (Q.ACCEPTED, "", True)


def test_the_first_reason_of_a_failure_stands() -> None:
    """A site that failed stays failed for the reason it failed with first."""
    record, _ = play(samples.participation(Q.FAILED), p.Failed("also this"), p.Closed("cut-off"))
    assert (record.state, record.reason) == (Q.FAILED, "disk full")


def test_a_result_whose_blocks_cannot_be_read_is_revoked() -> None:
    """A counted result can still fail while it is averaged, and then it does not count."""
    record, told = play(samples.participation(Q.ACCEPTED), p.Failed("truncated file"))
    assert (record.state, record.reason, told) == (Q.FAILED, "truncated file", [])


class Shell:
    """Carries out the effects of one participation the way the workflow does."""

    def __init__(self) -> None:
        self.record = p.Participation("site-1")
        self.offered = 0
        self.pulling = False
        self.told: list[p.ParticipationEffect] = []

    def possible(self) -> list[p.ParticipationEvent]:
        """What can happen now; only an engine that has the result can fail to read it."""
        events: list[p.ParticipationEvent] = [
            p.Offered(self.offered + 1),
            p.Forfeited("garbage"),
            p.Closed("time is up"),
        ]
        if self.pulling:
            events += [p.Counted(), p.Failed("damaged")]
        if self.record.state is Q.ACCEPTED:
            events.append(p.Failed("truncated file"))
        return events

    def do(self, event: p.ParticipationEvent) -> None:
        """Apply one event."""
        if isinstance(event, p.Offered):
            self.offered += 1
        if isinstance(event, (p.Counted, p.Failed)):
            self.pulling = False
        self.record, told = play(self.record, event)
        self.told += told
        self.pulling |= any(isinstance(effect, p.Pull) for effect in told)

    def count(self, kind: type[object]) -> int:
        """How often an effect came out."""
        return sum(isinstance(effect, kind) for effect in self.told)


@given(st.lists(st.integers(min_value=0, max_value=99), max_size=24))
def test_whatever_happens_one_result_is_pulled_and_all_others_are_answered(
    choices: list[int],
) -> None:
    """In any order of events: one pull at most, one cut at most, every offer pulled or declined, and an end."""
    shell = Shell()
    for choice in choices:
        events = shell.possible()
        shell.do(events[choice % len(events)])
    assert shell.count(p.Pull) <= 1
    assert shell.count(p.CancelPull) <= shell.count(p.Pull)
    assert shell.count(p.Pull) + shell.count(p.Decline) == shell.offered
    shell.do(p.Closed("time is up"))
    if shell.pulling:
        assert not shell.record.settled
        shell.do(p.Failed("cancelled"))
    assert shell.record.settled
    settled = shell.record
    for event in (p.Forfeited("garbage"), p.Closed("again")):
        shell.do(event)
    assert shell.record == settled


@pytest.mark.parametrize(
    "record",
    [
        p.Participation("site-1", Q.FAILED),
        p.Participation("site-1", Q.LATE),
        p.Participation("site-1", Q.CUTTING),
        p.Participation("site-1", Q.ACCEPTED, "a reason"),
        p.Participation("site-1", Q.AWAITED, "a reason"),
    ],
    ids=lambda record: f"{record.state}-{record.reason or 'nothing'}",
)
def test_a_reason_goes_with_an_end_and_with_no_other_state(record: p.Participation) -> None:
    """Who is out says why, and who is not has nothing to say; anything else is a defect."""
    with pytest.raises(InvariantError, match="reason and state"):
        check_participation(record)


@pytest.mark.parametrize("state", Q)
def test_every_state_that_can_be_reached_keeps_the_invariant(state: ParticipationState) -> None:
    """The invariant does not cry wolf."""
    check_participation(samples.participation(state))
