"""Bounds: what is compared with them, and what a report says about it."""

import json

import pytest

from benchmarks.gates import GATES, checks
from benchmarks.machine import Machine
from benchmarks.report import Report


def report(figures: dict[str, float], *, quick: bool = False) -> Report:
    """A report of some figures, from a machine of no interest."""
    machine = Machine(
        processor="P",
        cores=2,
        ram_bytes=None,
        system="S",
        scratch="tmpfs",
        software={"python": "3"},
    )
    return Report(title="T", machine=machine, figures=figures, quick=quick)


@pytest.mark.parametrize("name", sorted(GATES))
def test_a_bound_is_kept_at_the_bound_and_missed_beyond_it(name):
    """A figure may be what its bound says, and not a little worse."""
    gate = GATES[name]
    bound = gate.at_least if gate.at_least is not None else gate.at_most
    assert bound is not None
    worse = bound + (-0.001 if gate.at_least is not None else 0.001)
    assert report({name: bound}).passed
    missed = report({name: worse})
    assert not missed.passed
    assert "FAIL" in missed.to_text()


def test_a_figure_without_a_bound_is_shown_and_not_judged():
    """What has no bound appears in the text and cannot fail."""
    found = report({"relay_vs_direct": 0.001})
    assert found.passed
    assert "relay_vs_direct 0.001" in found.to_text()


def test_a_quick_run_judges_memory_and_not_speed():
    """A ratio of small transfers is shown without a verdict; memory is judged at any size."""
    found = report({"disk_vs_raw": 0.1, "source_growth_mib": 99.0}, quick=True)
    verdicts = {check.figure: check.holds for check in found.checks}
    assert verdicts == {"disk_vs_raw": None, "source_growth_mib": False}
    assert "not judged" in found.to_text()
    assert not found.passed
    assert report({"disk_vs_raw": 0.1}, quick=True).passed


def test_figures_are_at_the_top_of_the_json():
    """Whoever reads the file finds a figure by its name."""
    read = json.loads(json.dumps(report({"disk_vs_raw": 0.9}).to_json()))
    assert read["disk_vs_raw"] == 0.9
    assert read["passed"] is True
    assert read["machine"]["cores"] == 2


def test_checks_come_in_the_order_of_the_figures():
    """A report's checks are those of its figures that have bounds, in their order."""
    found = checks({"tls_vs_raw_tls": 1.0, "other": 1.0, "cpu_vs_raw": 1.0}, quick=False)
    assert [check.figure for check in found] == ["tls_vs_raw_tls", "cpu_vs_raw"]
