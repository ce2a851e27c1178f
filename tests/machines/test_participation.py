"""Participation scenarios: a result counts once, and only while its round is open."""

from __future__ import annotations

import pytest

from streamoff.machines import participation as p
from streamoff.machines.participation import PARTICIPATION, ParticipationState

from . import samples

pytestmark = pytest.mark.core


def test_a_result_is_pulled_and_counted_once() -> None:
    """The first offer is pulled; a second one, before or after it counted, is declined with the reason."""
    record, effects = PARTICIPATION.step(p.Participation("site-1"), p.Offered(1))
    assert effects == (p.Pull(1),)
    second = p.Decline(2, "a second result of this round")
    record, effects = PARTICIPATION.step(record, p.Offered(2))
    assert effects == (second,)
    assert not record.settled
    record, _ = PARTICIPATION.step(record, p.Counted())
    assert record.settled
    assert PARTICIPATION.step(record, p.Offered(2)) == (record, (second,))


def test_a_late_result_is_declined_before_a_byte_is_pulled() -> None:
    """After the round closed an offer is answered with why it closed, and nothing is pulled."""
    record = samples.participation(ParticipationState.LATE)
    assert record.settled
    record, effects = PARTICIPATION.step(record, p.Offered(9))
    assert effects == (p.Decline(9, "too late: enough responses"),)


def test_a_pull_under_way_is_stopped_when_the_round_closes() -> None:
    """Closing cancels the pull with the reason; whatever crosses it on the way changes nothing."""
    record = samples.participation(ParticipationState.LANDING)
    record, effects = PARTICIPATION.step(record, p.Closed("cut-off"))
    assert effects == (p.CancelPull("cut-off"),)
    for crossing in (p.Counted(), p.Failed("cancelled")):
        assert PARTICIPATION.step(record, crossing) == (record, ())


def test_the_first_reason_of_a_failure_stands() -> None:
    """A site that failed stays failed for the reason it failed with first."""
    record = samples.participation(ParticipationState.FAILED)
    record, _ = PARTICIPATION.step(record, p.Failed("also this"))
    record, _ = PARTICIPATION.step(record, p.Closed("cut-off"))
    assert (record.state, record.reason) == (ParticipationState.FAILED, "disk full")


def test_a_result_whose_blocks_cannot_be_read_is_revoked() -> None:
    """A counted result can still fail while it is averaged, and then it does not count."""
    record, effects = PARTICIPATION.step(
        samples.participation(ParticipationState.ACCEPTED), p.Failed("truncated file")
    )
    assert (record.state, record.reason, effects) == (
        ParticipationState.FAILED,
        "truncated file",
        (),
    )
