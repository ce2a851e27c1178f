"""The memory suite: what it runs, what it leaves out, and what it says about its promises."""

import json
from dataclasses import replace

import pytest

from benchmarks.machine import Machine, Room
from benchmarks.memory import MemoryReport, Row, cases, checks
from benchmarks.runs import Case, Measured, simulate
from streamoff.types import MIB

MODEL = 64 * MIB


def rows(**growth: int) -> list[Row]:
    """Rows that keep every promise; ``growth`` is what a site costs in an engine, in bytes."""
    fixed = {"columnar": 50 * MIB, "in-time": 60 * MIB + MODEL, "memory": 50 * MIB}
    return [
        Row(case, Measured(baseline_bytes=1, peak_delta_bytes=delta, scratch_bytes=1, seconds=1.0))
        for case in cases(MODEL)
        for delta in [
            fixed[case.engine] + case.sites * growth.get(case.engine.replace("-", "_"), 0)
        ]
    ]


def report(found: list[Row]) -> MemoryReport:
    """A report on rows, from a machine of no interest."""
    machine = Machine(
        processor="P", cores=2, ram_bytes=None, system="S", scratch="ext4", software={"python": "3"}
    )
    return MemoryReport(
        machine=machine, model_bytes=MODEL, rows=tuple(found), checks=tuple(checks(found, MODEL))
    )


def test_promises_that_are_kept_pass():
    """Rows within every bound make a report that passes."""
    found = report(rows())
    assert all(check.holds for check in found.checks)
    assert found.passed


@pytest.mark.parametrize("engine", ["columnar", "in_time"])
def test_memory_that_grows_with_the_sites_is_a_broken_promise(engine):
    """One MiB per site is 14 MiB between 2 and 16 sites, and the report says so and fails."""
    found = report(rows(**{engine: MIB}))
    broken = [check for check in found.checks if check.holds is False]
    assert {check.value for check in broken} == {14 * MIB}
    assert {check.promise.split(",")[0] for check in broken} == {engine.replace("_", "-")}
    assert "BROKEN" in found.to_text()
    assert not found.passed


def test_memory_without_offload_promises_nothing():
    """What offload is compared with may cost what it likes."""
    assert report(rows(memory=1000 * MIB)).passed


def test_too_much_at_any_number_of_sites_is_a_broken_promise():
    """One row above the fixed bound is enough, and it is the largest that is judged."""
    found = rows()
    at = next(i for i, row in enumerate(found) if row.case.engine == "columnar")
    measured = found[at].measured
    assert measured is not None
    found[at] = replace(found[at], measured=replace(measured, peak_delta_bytes=97 * MIB))
    broken = next(check for check in report(found).checks if check.holds is False)
    assert (broken.value, broken.limit) == (97 * MIB, 96 * MIB)


def test_what_was_skipped_is_not_taken_for_kept():
    """Without the large rows the promises about them are not measured, and the report still passes."""
    found = [
        Row(row.case, None, skipped="no room") if row.case.sites == 16 else row for row in rows()
    ]
    made = report(found)
    assert [check.holds for check in made.checks if "16 sites" in check.promise] == [None] * 6
    assert "skipped" in made.to_text()
    assert "not measured" in made.to_text()
    assert made.passed


def test_a_run_that_failed_fails_the_report():
    """A row that could not be measured because the simulation failed is no success."""
    found = rows()
    found[0] = Row(found[0].case, None, failed="exit code 1: no")
    assert not report(found).passed


def test_the_report_is_plain_json():
    """What is written with --json reads back with rows, checks and machine."""
    made = json.loads(json.dumps(report(rows()).to_json()))
    assert len(made["rows"]) == len(list(cases(MODEL)))
    assert {check["holds"] for check in made["checks"]} == {True}
    assert made["machine"]["cores"] == 2


@pytest.mark.parametrize(
    ("room", "lack"),
    [
        (Room(ram=100, disk=100, disk_is_ram=False), None),
        (Room(ram=None, disk=None, disk_is_ram=False), None),
        (Room(ram=59, disk=100, disk_is_ram=False), "60 B of RAM"),
        (Room(ram=100, disk=69, disk_is_ram=False), "70 B of disk"),
        (Room(ram=100, disk=100, disk_is_ram=True), "130 B of RAM"),
    ],
)
def test_what_does_not_fit_is_told_before_it_is_tried(room, lack):
    """Disk and memory are compared with what is free; a disk in RAM counts as both; unknown is not zero."""
    said = room.lacks(ram=60, disk=70)
    assert said is None if lack is None else lack in said


def test_a_run_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    """A small case returns what it took and leaves nothing in the temporary directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = simulate(Case(engine="columnar", shapes="1", sites=2, model_bytes=MIB))
    assert isinstance(found, Measured), found
    assert found.peak_delta_bytes > 0
    assert found.seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_says_why():
    """The reason is what the command said last."""
    said = simulate(Case(engine="columnar", shapes="no such", sites=2, model_bytes=MIB))
    assert isinstance(said, str)
    assert said.startswith("exit code 2: ")
    assert "no such" in said
