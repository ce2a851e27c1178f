"""Two machines joined by a link: what one end believes is what the other end has, whatever the link does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from streamoff.errors import (
    GoneError,
    InvariantError,
    NoSpaceError,
    SourceFailedError,
    SourceLostError,
    TransferTimeoutError,
)
from streamoff.machines.download import DownloadState
from streamoff.testing.machines import CALM, ROUGH, Faults, MachinePair
from streamoff.types import MIB, Budgets, Capability, OutcomeStatus, Verdict

pytestmark = pytest.mark.core

ONE = (0, "ref-0")


# --- a calm link ----------------------------------------------------------------------------------


@pytest.mark.parametrize("receivers", [1, 2, 3, 4])
@pytest.mark.parametrize("refs", [1, 3])
def test_on_a_calm_link_everybody_gets_everything(receivers: int, refs: int) -> None:
    """Every receiver has every ref, both ends say so, and it took no retry."""
    pair = MachinePair(receivers=receivers, refs=refs)
    pair.run()
    assert pair.outcome.status is OutcomeStatus.COMPLETED
    assert {pair.reports(key) for key in pair.downloads} == {(None,)}
    assert {pair.verdict(key).nbytes for key in pair.downloads} == {24 * MIB}
    assert pair.now < 1.0


@pytest.mark.parametrize("nbytes", [8, 64, 65, 64 + 4 * MIB, 65 + 4 * MIB])
def test_sizes_around_the_header_and_the_chunk_arrive_whole(nbytes: int) -> None:
    """A payload that is all header, and payloads one byte beside a chunk boundary."""
    pair = MachinePair(nbytes=nbytes)
    pair.run()
    assert pair.downloads[ONE].landed.nbytes == nbytes
    assert pair.outcome.status is OutcomeStatus.COMPLETED


def test_a_receiver_that_starts_late_is_awaited_and_one_that_never_starts_is_not() -> None:
    """The transaction ends at the acquire budget, with the truth about each."""
    pair = MachinePair(receivers=2, start=False)
    pair.at(119.0, lambda: pair.start(ONE))
    pair.run()
    assert pair.outcome.succeeded == ("site-0",)
    assert (pair.outcome.reason, pair.outcome.settled_at) == ("acquire_timeout", 120.0)
    assert pair.reports((1, "ref-0")) == ()


def test_a_receiver_that_comes_after_the_end_is_told_that_it_is_gone() -> None:
    """A fresh download of a settled ref fails with the verdict, and is never an empty success."""
    pair = MachinePair(start=False)
    pair.run()
    pair.start(ONE)
    pair.run()
    (report,) = pair.reports(ONE)
    assert isinstance(report, GoneError)


# --- one thing goes wrong -------------------------------------------------------------------------


def test_a_link_that_breaks_in_the_middle_costs_only_what_was_on_its_way() -> None:
    """The download resumes at what has landed; nothing is served again that was safe."""
    pair = MachinePair(nbytes=400 * MIB)
    pair.at(0.5, lambda: pair.cut(0, 10.0))
    pair.run(until=5.0)
    safe = pair.downloads[ONE].landed
    assert 0 < safe.nbytes < 400 * MIB
    pair.run()
    assert pair.outcome.status is OutcomeStatus.COMPLETED
    assert pair.now > 10.5


def test_a_link_that_never_returns_ends_both_ends_by_their_budgets() -> None:
    """The receiver loses its source after the grace, the producer its receiver after idle."""
    pair = MachinePair(nbytes=400 * MIB)
    pair.at(1.0, lambda: pair.cut(0))
    pair.run()
    (report,) = pair.reports(ONE)
    assert isinstance(report, SourceLostError)
    assert pair.outcome.reason == "idle_timeout"
    assert 150.0 < pair.outcome.settled_at <= 151.0


def test_a_cancel_reaches_the_producer_at_once() -> None:
    """With the capability at both ends the slot ends in a moment; without it the budgets end it."""
    for capabilities, reason, latest in (
        (frozenset(Capability), "receiver_failed", 1.0),
        (frozenset[Capability](), "idle_timeout", 151.0),
    ):
        pair = MachinePair(nbytes=400 * MIB, capabilities=capabilities)
        pair.at(0.5, lambda pair=pair: pair.cancel(0, "job aborted"))  # type: ignore[misc]
        pair.run()
        assert pair.outcome.reason == reason
        assert pair.outcome.settled_at <= latest
        assert pair.downloads[ONE].state is DownloadState.CANCELLED


def test_a_full_disk_fails_its_own_slot_and_no_other() -> None:
    """The caller hears of the disk, the producer of the cancel, and the other receiver of nothing."""
    pair = MachinePair(receivers=2, nbytes=400 * MIB)
    pair.at(0.5, lambda: pair.fail_landing(ONE))
    pair.run()
    (report,) = pair.reports(ONE)
    assert isinstance(report, NoSpaceError)
    assert pair.outcome.succeeded == ("site-1",)
    assert pair.outcome.slots["site-0"]["ref-0"].reason == "cancelled: disk full"


def test_a_source_that_dies_is_known_by_its_notice() -> None:
    """Every receiver stops within a moment of the notice and reports the owner's reason."""
    pair = MachinePair(receivers=3, nbytes=400 * MIB)
    pair.at(0.5, lambda: pair.kill_source("exit code 137"))
    pair.run()
    for key in pair.downloads:
        (report,) = pair.reports(key)
        assert isinstance(report, SourceFailedError)
    assert pair.now < 1.0


def test_a_source_that_dies_silently_is_given_up_after_the_schedule() -> None:
    """Without a notice the retry schedule is what ends the wait."""
    pair = MachinePair(nbytes=400 * MIB, faults=replace(CALM, latency=(0.01, 0.01)))
    pair.at(0.5, lambda: setattr(pair, "source_alive", False))
    pair.run()
    (report,) = pair.reports(ONE)
    assert isinstance(report, TransferTimeoutError)
    assert 94.0 < pair.now < 95.0


def test_an_abort_by_the_producer_is_told_to_the_receiver() -> None:
    """The receiver's next request is answered with the verdict, and it reports that."""
    pair = MachinePair(nbytes=400 * MIB)
    pair.at(0.5, lambda: pair.abort("deleted"))
    pair.run()
    assert pair.outcome.status is OutcomeStatus.ABORTED
    (report,) = pair.reports(ONE)
    assert isinstance(report, GoneError)


def test_a_link_that_hangs_on_to_a_chunk_delays_settling_by_its_budget() -> None:
    """The source is not released while a chunk is read, and not kept for ever either."""
    stuck = Faults(wedge=1.0, wedged=1000.0)
    pair = MachinePair(faults=stuck)
    pair.at(5.0, lambda: pair.cancel(0))
    pair.run()
    assert pair.outcome.settled_at == pytest.approx(65.01)


def test_a_hold_keeps_both_ends_waiting() -> None:
    """A disk that takes 160 s for every step is waited for by both ends, and by neither without holds."""
    for holds in (True, False):
        pair = MachinePair(nbytes=16 * MIB, faults=Faults(landing=(160.0, 160.0)))
        for at in (1.0, 161.0, 321.0) if holds else ():
            pair.at(at, lambda pair=pair: pair.hold(ONE, 160.0))  # type: ignore[misc]
        pair.run()
        assert (pair.outcome.status is OutcomeStatus.COMPLETED) == holds
        assert (pair.reports(ONE) == (None,)) == holds


def test_a_confirmation_that_never_arrives_fails_closed() -> None:
    """The receiver has the payload and says so; the producer, which never heard, says failed."""
    pair = MachinePair()
    while pair.downloads[ONE].state is not DownloadState.FINALISING:
        pair.step()
    pair.cut(0)
    pair.run()
    assert pair.reports(ONE) == (None,)
    assert pair.verdict(ONE).verdict is Verdict.FAILED
    assert pair.outcome.reason == "idle_timeout"


# --- everything goes wrong ------------------------------------------------------------------------


def storm(seed: int, faults: Faults) -> MachinePair:
    """A pair on a bad link to which up to five more bad things happen."""
    random = Random(seed)
    pair = MachinePair(
        receivers=random.randint(1, 4),
        refs=random.randint(1, 2),
        nbytes=random.choice([64, 65, 24 * MIB, 100 * MIB]),
        window=random.choice([1, 4, 8]),
        faults=faults,
        budgets=Budgets(deadline=random.choice([None, None, 60.0])),
        capabilities=frozenset(random.choice([Capability, ()])),
        seed=seed,
    )
    keys = list(pair.downloads)
    for _ in range(random.randint(0, 5)):
        key, seconds = random.choice(keys), random.choice([1.0, 25.0, 60.0, 1000.0])
        happenings: list[Callable[[], None]] = [
            lambda key=key: pair.cancel(key[0]),  # type: ignore[misc]
            lambda key=key, seconds=seconds: pair.cut(key[0], seconds),  # type: ignore[misc]
            lambda key=key: pair.fail_landing(key),  # type: ignore[misc]
            lambda key=key, seconds=seconds: pair.hold(key, seconds),  # type: ignore[misc]
            pair.abort,
            pair.kill_source,
        ]
        when = random.uniform(0.0, random.choice([1.0, 20.0, 200.0]))
        pair.at(when, random.choices(happenings, [3, 3, 2, 4, 1, 1])[0])
    return pair


@pytest.mark.parametrize("faults", [CALM, ROUGH], ids=["calm", "rough"])
@pytest.mark.parametrize("seed", range(60))
def test_every_story_ends_and_both_ends_tell_the_same_one(seed: int, faults: Faults) -> None:
    """Dropped, doubled and reordered messages, broken links, full disks, aborts, deaths: all end in time.

    The pair's witness fails the run if a record breaks an invariant, a verdict or an outcome changes, landed
    ranges shrink, a success is claimed that nobody has, a download is reported other than once, or anything
    stays open beyond its budgets.
    """
    storm(seed, faults).run()


def test_storms_reach_every_end() -> None:
    """The storms are not all alike: each way for a download and a transaction to end is among them."""
    ends: Counter[str] = Counter()
    for seed in range(60):
        pair = storm(seed, ROUGH)
        pair.run()
        ends.update(record.state.value for record in pair.downloads.values())
        if pair.source_alive:
            ends[pair.outcome.reason] += 1
    assert set(ends) >= {"done", "failed", "cancelled", "source lost"}
    assert set(ends) >= {"all_receivers_succeeded", "receiver_failed", "idle_timeout", "deleted"}


def test_the_same_seed_tells_the_same_story() -> None:
    """A failure that was found can be found again."""
    one, two = storm(11, ROUGH), storm(11, ROUGH)
    one.run()
    two.run()
    assert one.now == two.now
    assert one.witness.story.lines() == two.witness.story.lines()


# --- the witness itself ---------------------------------------------------------------------------


def test_an_outcome_that_is_not_there_is_said_to_be_missing() -> None:
    """Asking too early is answered with the story so far."""
    with pytest.raises(InvariantError, match="no outcome yet"):
        _ = MachinePair().outcome


def test_a_story_without_end_is_noticed() -> None:
    """A run has a bound on its steps, so that a clock that stands still cannot hang a test."""
    with pytest.raises(InvariantError, match="a story that does not end"):
        MachinePair(nbytes=400 * MIB).run(steps=10)


def test_a_witness_notices_a_lie() -> None:
    """A receiver that loses what it had confirmed makes the producer's success a lie."""
    pair = MachinePair()
    while pair.downloads[ONE].state is not DownloadState.CONFIRMING:
        pair.step()
    pair.downloads[ONE] = replace(pair.downloads[ONE], state=DownloadState.STREAMING)
    with pytest.raises(InvariantError, match="a success that nobody has"):
        pair.run()
