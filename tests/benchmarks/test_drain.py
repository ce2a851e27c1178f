"""The drain suite, small: it ends what is under way in every way that needs no second source."""

import pytest

from benchmarks import drain
from benchmarks.transfer import TMPFS
from streamoff.scratch.space import filesystem
from streamoff.types import MIB


def test_what_ends_downloads_is_timed_at_both_ends(monkeypatch):
    """Real downloads from another process are cancelled, declared dead and left, and the report tells each figure."""
    if not TMPFS.is_dir() or not filesystem(TMPFS).ram_backed:
        pytest.skip(f"{TMPFS} is no tmpfs")
    kept = tuple(one for one in drain.SCENARIOS if not one.once)
    monkeypatch.setattr(drain, "SCENARIOS", kept)
    monkeypatch.setattr(drain, "DOWNLOADS", 4)
    monkeypatch.setattr(drain, "NBYTES", 64 * MIB)
    report = drain.measure(quick=True)
    figures = dict(report.figures)
    assert figures.pop("left_entries") == 0
    assert figures.pop("overrun_seconds") >= 0.2  # what is stuck gets that
    assert set(figures) == {one.figure for one in kept}
    assert all(value > 0 for value in figures.values())
    assert [len(report.samples[one.figure][0]["seconds"]) for one in kept] == [4] * len(kept)
    for one in kept:
        assert one.what in report.to_text()


@pytest.mark.parametrize(("percent", "expected"), [(50, 50.0), (99, 99.0), (100, 100.0), (1, 1.0)])
def test_a_percentile_is_one_of_the_values(percent, expected):
    """Of the numbers 1 to 100 the 99th percentile is 99, whatever their order."""
    values = [float(number) for number in range(100, 0, -1)]
    assert drain._percentile(values, percent) == expected
    assert drain._percentile([7.0], percent) == 7.0
