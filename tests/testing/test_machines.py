"""Pairs that share a network: what one learns of the other's life, and what the network tells them."""

from __future__ import annotations

import pytest

from streamoff.errors import GoneError, InvariantError, PeerRefusedError, SourceLostError
from streamoff.machines.download import DownloadState
from streamoff.testing.lossy import ROUGH, Faults, LossyNetwork
from streamoff.testing.machines import MachinePair
from streamoff.types import MIB, Budgets, OutcomeStatus, Verdict

ONE = (0, "ref-0")


def shared(faults: Faults | None = None) -> LossyNetwork:
    """A network for several pairs."""
    return LossyNetwork(faults=faults or Faults(), seed=5)


def run(network: LossyNetwork) -> None:
    """Until nothing will ever happen again."""
    while network.step():
        pass


def test_pairs_on_one_network_share_its_clock_and_its_links() -> None:
    """A link that breaks is lost for every transfer that goes over it, and for no other."""
    network = shared()
    first = MachinePair(network=network, source="a", receivers=["b"], nbytes=40 * MIB)
    second = MachinePair(network=network, source="b", receivers=["a"], nbytes=40 * MIB)
    third = MachinePair(network=network, source="a", receivers=["c"], nbytes=40 * MIB)
    network.at(0.1, lambda: network.cut("b", "a", 10.0))
    run(network)
    for pair in (first, second, third):
        pair.look_at_the_end()
        assert pair.outcome.status is OutcomeStatus.COMPLETED
    assert first.outcome.settled_at > 10.0
    assert second.outcome.settled_at > 10.0
    assert third.outcome.settled_at < 1.0


def test_what_is_injected_is_counted() -> None:
    """Every kind of fault of a rough link is counted under its name."""
    pair = MachinePair(receivers=3, nbytes=100 * MIB, faults=ROUGH, seed=1)
    pair.run()
    assert {"drop", "duplicate", "cut"} <= set(pair.network.injected)
    assert all(pair.network.injected.values())


@pytest.mark.parametrize(("seconds", "noticed"), [(10.0, False), (20.0, True)])
def test_a_silence_is_a_lost_link_only_when_it_lasts(seconds: float, noticed: bool) -> None:
    """After a long silence both ends wait for the link, and go on when it is back; after a short one they time out."""
    pair = MachinePair(nbytes=400 * MIB)
    pair.at(0.5, lambda: pair.network.cut("source", "site-0", seconds, unnoticed=15.0))
    pair.run()
    assert (pair.now < 0.5 + 20.0 + 2.0) == noticed  # the stall budget and the first pause
    assert pair.outcome.status is OutcomeStatus.COMPLETED


def test_a_second_try_with_the_same_ticket_is_told_the_verdict() -> None:
    """A receiver that gave up and comes again is answered, and gets nothing that is not there."""
    pair = MachinePair(nbytes=100 * MIB)
    pair.at(0.1, lambda: pair.cancel(0))
    pair.at(1.0, lambda: pair.start_again(ONE))
    pair.run()
    (report,) = pair.reports(ONE)
    assert isinstance(report, GoneError)
    assert not pair.arrived(ONE)


def test_a_second_try_succeeds_where_the_first_could_not_say_that_it_gave_up() -> None:
    """Without the capability to cancel the slot is still the receiver's: it opens again and takes it."""
    pair = MachinePair(nbytes=100 * MIB, capabilities=frozenset())
    pair.at(0.1, lambda: pair.cancel(0))
    pair.at(1.0, lambda: pair.start_again(ONE))
    pair.run()
    assert pair.reports(ONE) == (None,)
    assert pair.outcome.status is OutcomeStatus.COMPLETED
    assert pair.arrived(ONE)


def test_what_is_forgotten_is_unknown() -> None:
    """A request for a ref whose tombstone has gone is refused, and a cancel for it is not even heard."""
    pair = MachinePair(start=False)
    pair.at(0.5, pair.abort)
    pair.at(1.0, lambda: pair.forget("ref-0"))
    pair.at(2.0, lambda: pair.start(ONE))
    pair.at(2.0, lambda: pair.turn_down(0, "not wanted"))
    pair.run()
    (report,) = pair.reports(ONE)
    assert isinstance(report, PeerRefusedError)


def test_a_new_instance_of_a_source_knows_nothing() -> None:
    """Who asks a source that was killed and came back is refused, at once."""
    pair = MachinePair(nbytes=400 * MIB)
    pair.at(0.3, lambda: setattr(pair, "source_alive", False))
    pair.at(0.3, lambda: pair.cut(0, 5.0))
    pair.at(2.0, lambda: setattr(pair, "reborn", True))
    pair.run()
    (report,) = pair.reports(ONE)
    assert isinstance(report, PeerRefusedError)
    assert pair.now < 10.0


def test_a_slot_that_is_turned_down_fails_before_it_is_opened() -> None:
    """A receiver that says that it will not pull is not waited for."""
    pair = MachinePair(start=False)
    pair.turn_down(0, "not wanted")
    pair.run()
    assert pair.verdict(ONE).reason == "declined: not wanted"
    assert pair.now < 1.0


def test_a_receiver_that_is_killed_says_nothing_any_more() -> None:
    """The source gives it up by its budgets; the others are served."""
    pair = MachinePair(receivers=2, nbytes=100 * MIB)
    pair.at(0.1, lambda: pair.kill_receiver(0))
    pair.run()
    assert pair.reports(ONE) == ()
    assert pair.outcome.succeeded == ("site-1",)
    assert pair.verdict(ONE).verdict is Verdict.FAILED
    assert 150.0 <= pair.outcome.settled_at < 151.0


def test_a_producer_may_know_that_a_receiver_will_not_come_back() -> None:
    """A slot that is declined by the producer fails with the reason it gives."""
    pair = MachinePair(nbytes=100 * MIB)
    pair.at(0.1, lambda: pair.decline(0, "the receiver restarted"))
    pair.run()
    assert pair.outcome.reason == "receiver_failed"
    assert pair.verdict(ONE).reason == "cancelled: the receiver restarted"


def test_first_bytes_come_along_where_they_are_asked_for() -> None:
    """An eager receiver has its header one way and back earlier."""
    slow = Faults(latency=(1.0, 1.0))
    eager, patient = (MachinePair(faults=slow, eager=eager) for eager in (True, False))
    for pair in (eager, patient):
        pair.run()
        assert pair.outcome.status is OutcomeStatus.COMPLETED
    assert patient.now - eager.now == pytest.approx(2.0)


def test_budgets_decide_how_long_a_receiver_is_awaited() -> None:
    """A link that stays away for longer than the grace costs the source, at the very second."""
    pair = MachinePair(nbytes=400 * MIB, budgets=Budgets(reconnect_grace=3.0))
    pair.at(0.5, lambda: pair.cut(0, 60.0))
    pair.run(until=10.0)
    (report,) = pair.reports(ONE)
    assert isinstance(report, SourceLostError)
    assert pair.downloads[ONE].state is DownloadState.SOURCE_LOST
    assert pair.now == 10.0


def test_a_clock_that_stands_still_is_a_defect() -> None:
    """A party that is due and stays due would hang a test: it is told instead."""

    class Stuck:
        """Never does what is due."""

        def next_due(self) -> float | None:
            return 1.0

        def tick(self) -> None:
            pass

        def link_lost(self, one: str, other: str) -> None:
            pass

        def link_restored(self, one: str, other: str) -> None:
            pass

    network = shared()
    network.join(Stuck())
    with pytest.raises(InvariantError, match="stands still"):
        network.step()
