"""Job root scenarios: the order of the end, its bounds, and what happens to those who ignore it."""

from __future__ import annotations

import math

import pytest

from streamoff.machines import job_root as j
from streamoff.machines.invariants import check_job_root
from streamoff.machines.job_root import JOB_ROOT, JobRootState

from . import samples

pytestmark = pytest.mark.core

GIB = 2**30


def play(record: j.JobRoot, *events: j.JobRootEvent) -> tuple[j.JobRoot, list[j.JobRootEffect]]:
    """Apply events; the record and all effects."""
    told: list[j.JobRootEffect] = []
    for event in events:
        record, effects = JOB_ROOT.step(record, event)
        check_job_root(record)
        told += effects
    return record, told


def test_a_root_that_drains_in_time_is_removed_and_reported() -> None:
    """Nothing new, downloads cancelled, consumers ended, root renamed away, report: in this order."""
    record, told = play(
        j.JobRoot("job-7", 5.0), j.Closed(0.0), j.ConsumersEnded(3.0, GIB), j.Removed(3.5)
    )
    assert told == [
        j.Admit(j.Admission.NOTHING),
        j.CancelDownloads(),
        j.BuryRoot(),
        j.ReportRoot(),
    ]
    assert (record.state, record.cut, record.stuck) == (JobRootState.GONE, (), ())


def test_finalising_still_lets_serves_in() -> None:
    """The final broadcast goes out after new rounds and downloads are refused."""
    record, told = play(j.JobRoot("job-7", 5.0), j.Finalised(0.0), j.Finalised(1.0))
    assert told == [j.Admit(j.Admission.SERVES)]
    record, told = play(record, j.Closed(2.0))
    assert told == [j.Admit(j.Admission.NOTHING), j.CancelDownloads()]
    assert record.due == 7.0


def test_whoever_outlasts_the_window_is_cut_and_serves_are_aborted() -> None:
    """At the window's end, to the instant, consumers are cut, then open serves end."""
    record, _ = play(j.JobRoot("job-7", 5.0), j.Closed(10.0))
    assert j.next_tick(record) == 15.0
    assert j.classify_tick(record, math.nextafter(15.0, 0.0), ("fold",)) is None
    event = j.classify_tick(record, 15.0, ("fold",))
    assert event == j.WindowClosed(15.0, ("fold",))
    record, told = play(record, event)
    assert told == [j.CutConsumers(), j.AbortServes()]
    assert record.cut == ("fold",)
    assert record.due == 15.0 + j.CUT_GRACE_SECONDS


def test_a_consumer_that_stops_within_the_grace_leaves_a_clean_end() -> None:
    """Being cut is enough; the root goes, and the report still names who was cut."""
    record, told = play(samples.job_root(JobRootState.CUTTING), j.ConsumersEnded(0.1, 0))
    assert told == [j.BuryRoot()]
    record, told = play(record, j.Removed(0.2))
    assert told == [j.ReportRoot()]
    assert record.cut == ("fold",)


def test_nothing_is_removed_under_a_consumer_that_ignores_being_cut() -> None:
    """The root is stuck and says on whom; only when that one ends does the directory go."""
    record = samples.job_root(JobRootState.CUTTING)
    event = j.classify_tick(record, j.CUT_GRACE_SECONDS, ("fold",))
    assert event is not None
    record, told = play(record, event)
    assert told == [j.HandOver(), j.ReportRoot()]
    assert (record.state, record.stuck) == (JobRootState.STUCK, ("fold",))
    assert j.next_tick(record) is None, "nobody waits for it"
    record, told = play(record, j.Closed(60.0), j.ConsumersEnded(3600.0, 0))
    assert told == [j.BuryRoot()]
    record, told = play(record, j.Removed(3600.1))
    assert record.state is JobRootState.GONE


def test_removal_is_bounded_by_size() -> None:
    """One second, and half a second per GiB; after that the janitor goes on by itself."""
    assert [j.removal_seconds(size) for size in (0, GIB, 10 * GIB)] == [1.0, 1.5, 6.0]
    record, _ = play(samples.job_root(JobRootState.DRAINING), j.ConsumersEnded(4.0, 4 * GIB))
    assert record.due == 7.0
    event = j.classify_tick(record, 7.0, ())
    assert event == j.RemovalExpired(7.0)
    record, told = play(record, event)
    assert told == [j.ReportRoot()]
    assert record.state is JobRootState.GONE
    assert play(record, j.Removed(9.0)) == (record, [])


@pytest.mark.parametrize("window", [0.0, 5.0, 600.0])
def test_the_wait_at_the_end_is_window_plus_grace(window: float) -> None:
    """If nobody ever stops, the root is left after the window and the cut grace, not later."""
    record, _ = play(j.JobRoot("job-7", window), j.Closed(0.0))
    last = 0.0
    while (due := j.next_tick(record)) is not None:
        event = j.classify_tick(record, due, ("fold",))
        assert event is not None
        record, _ = play(record, event)
        last = due
    assert last == window + j.CUT_GRACE_SECONDS
    assert record.state is JobRootState.STUCK


def test_no_clock_runs_while_a_job_is_open_or_gone() -> None:
    """Only the steps of the end have clocks."""
    for state in (JobRootState.OPEN, JobRootState.FINALISING, JobRootState.GONE):
        assert j.classify_tick(samples.job_root(state), 1e9, ()) is None


def test_a_clock_in_a_state_without_one_means_nothing() -> None:
    """A record with a left-over clock is not driven by it."""
    assert j.classify_tick(j.JobRoot("job-7", 5.0, due=1.0), 2.0, ()) is None
