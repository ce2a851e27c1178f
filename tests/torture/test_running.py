"""What runs the seeds: it counts, shrinks, survives what a run does to its process, and says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import __main__ as command
from .fragile import DIES, FAILS, HANGS, fragile
from .pool import run_in_processes
from .tier import Failure, Tally, run_seeds


def test_a_failing_seed_stops_no_other_and_is_shrunk() -> None:
    """Every other seed is run, and of the failing one only what fails is left."""
    found = dict(run_seeds(fragile(), range(5)))
    failure = found.pop(FAILS)
    assert isinstance(failure, Failure)
    assert (failure.what, failure.scenario) == ("ViolationError: three", "(3,)")
    assert all(isinstance(one, Tally) for one in found.values())


def test_a_seed_that_hangs_or_dies_costs_itself_and_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Processes that end, and processes that do not, are replaced behind their seed; the stacks are shown."""
    tally, failures = Tally(), {}
    for found in run_in_processes(fragile, 0, 10, 2):
        if isinstance(found, Failure):
            failures[found.seed] = found.what
        else:
            tally.add(found)
    hangs = "a run that hangs or dies"
    assert failures == {FAILS: "ViolationError: three", DIES: hangs, HANGS: hangs}
    assert tally.seeds + len(failures) >= 8  # what a process had not told yet goes with it
    assert "fragile.py" in capfd.readouterr().err


def test_the_command_says_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code, the table, the file and the text agree, and name the seed and how to run it again."""
    report = tmp_path / "found.json"
    asked = ["--tier", "machines", "--jobs", "2", "--json", str(report)]
    assert command.main([*asked, "--seeds", "0-39"]) == 0
    shown = capsys.readouterr()
    assert "machines: 40/40 seeds" in shown.err
    assert "faults injected" in shown.out
    [told] = json.loads(report.read_text())
    assert (told["run"], told["violations"], told["seeds"]) == (40, [], "0-39")
    assert told["injected"]["duplicate"] > 0

    monkeypatch.setattr(command, "machines", fragile)
    assert command.main([*asked, "--seeds", str(FAILS)]) == 1
    shown = capsys.readouterr()
    assert "python -m tests.torture --tier fragile --seeds 3-3" in shown.out
    assert json.loads(report.read_text())[0]["violations"][0]["seed"] == FAILS


@pytest.mark.parametrize("text", ["", "-", "5-3", "a-b", "-1"])
def test_nonsense_is_no_span_of_seeds(text: str) -> None:
    """Seeds are a number, or two in order."""
    with pytest.raises(ValueError, match=r".*"):
        command.span(text)
