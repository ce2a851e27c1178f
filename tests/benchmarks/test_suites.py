"""Every suite runs from end to end, quickly, and says what it is asked for."""

import json
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.netns import lack
from benchmarks.transfer import NO_PEER, TMPFS
from streamoff.scratch.space import filesystem
from streamoff.types import MIB

FIGURES = {
    "control": {"refs_per_second"},
    "sites": {"transfers_per_second", "fds_peak", "tasks_peak"},
    "transfer": {
        "disk_vs_raw",
        "memory_vs_raw",
        "cpu_vs_raw",
        "receiver_growth_mib",
        "source_growth_mib",
    },
    "tls": {"tls_vs_raw_tls", "receiver_growth_mib", "source_growth_mib"},
    "relay": {"relay_vs_direct", "relay_growth_mib"},
    "fanout": {"fanout_vs_raw", "source_growth_mib"},
    "line": {"control_latency_seconds"},
    "lines": {"lines_used", "growth_mib"},
    "storage": {"write_mib_per_second_keep", "read_mib_per_second_drop"},
}
"""Suite to what it must find."""


@pytest.mark.parametrize("suite", FIGURES)
def test_a_quick_run_finds_every_figure(suite, monkeypatch):
    """Real processes, hosts and files give positive figures, a text and JSON, and leave nothing behind."""
    if not TMPFS.is_dir() or not filesystem(TMPFS).ram_backed:
        pytest.skip(f"{TMPFS} is no tmpfs")
    if suite in {"line", "lines"} and (reason := lack()) is not None:
        pytest.skip(reason)
    own = Path(tempfile.mkdtemp(dir=TMPFS))  # other suites run beside this one
    monkeypatch.setattr("tempfile.tempdir", str(own))  # the disk's spread is for people
    for module in ("transfer", suite):
        monkeypatch.setattr(f"benchmarks.{module}.TMPFS", own, raising=False)
    monkeypatch.setattr("benchmarks.transfer.QUICK_BYTES", 8 * MIB)
    report = import_module(f"benchmarks.{suite}").measure(quick=True)
    own.rmdir()  # empty
    assert set(report.figures) >= FIGURES[suite]
    assert all(value > 0 for value in report.figures.values())
    assert report.title in report.to_text()
    assert json.loads(json.dumps(report.to_json()))["quick"] is True
    assert "disk_vs_peer" not in report.figures
    assert (NO_PEER in report.notes) is (suite == "transfer")
