"""The report of a simulation."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from streamoff.sim.report import (
    MemoryUse,
    ModelFile,
    RoundRow,
    ScratchUse,
    SimulationReport,
    TransactionCounts,
)


def a_report(
    *,
    metrics: Mapping[str, float] | None = None,
    failed: Mapping[str, str] | None = None,
    left: int = 0,
) -> SimulationReport:
    """Return a report of two rounds."""
    rows = tuple(
        RoundRow(
            round=number,
            seconds=1.5 * number,
            accepted=("site-1", "site-2"),
            failed=failed or {},
            bytes_landed=3 * 2**20 * number,
            metrics={"accuracy": 0.9 + number / 100, "loss": 2.5} | dict(metrics or {}),
        )
        for number in (1, 2)
    )
    return SimulationReport(
        recipe="fedavg",
        backend="trio",
        engine="local",
        sites=3,
        rounds=rows,
        model=ModelFile(path=Path("/models/m.safetensors"), bytes=2048, sha256="ab" * 32),
        memory=MemoryUse(baseline_bytes=200 * 2**20, peak_bytes=250 * 2**20),
        scratch=ScratchUse(peak_bytes=9 * 2**20, left_bytes=left * 4096, left_entries=left),
        transactions=TransactionCounts(completed=12, failed=1, open=0),
    )


def test_the_json_has_exactly_the_promised_keys() -> None:
    """A reader of the JSON finds these keys and no others."""
    found = json.loads(json.dumps(a_report().to_json()))
    assert found == {
        "recipe": "fedavg",
        "backend": "trio",
        "engine": "local",
        "sites": 3,
        "rounds": [
            {
                "round": number,
                "seconds": 1.5 * number,
                "accepted": 2,
                "failed": 0,
                "bytes_landed": 3 * 2**20 * number,
                "metrics": {"accuracy": 0.9 + number / 100, "loss": 2.5},
            }
            for number in (1, 2)
        ],
        "metrics": {"accuracy": 0.92, "loss": 2.5},
        "model": {"path": "/models/m.safetensors", "bytes": 2048, "sha256": "ab" * 32},
        "memory": {
            "baseline_bytes": 200 * 2**20,
            "peak_bytes": 250 * 2**20,
            "peak_delta_bytes": 50 * 2**20,
        },
        "scratch": {"peak_bytes": 9 * 2**20, "left_bytes": 0, "left_entries": 0},
        "transactions": {"completed": 12, "failed": 1, "open": 0},
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_null(value: float) -> None:
    """The JSON stays JSON when a metric is not finite."""
    text = json.dumps(a_report(metrics={"loss": value}).to_json(), allow_nan=False)
    assert json.loads(text)["metrics"]["loss"] is None


def test_the_columns_of_the_text_are_aligned() -> None:
    """Every line of the table is as wide as its head, and the last round's numbers stand in it."""
    head, first, second = a_report(metrics={"drift": 1e-9}).to_text().splitlines()[2:5]
    assert len(head) == len(first) == len(second)
    assert head.split() == [
        "round", "seconds", "accepted", "failed", "landed", "accuracy", "drift", "loss",
    ]  # fmt: skip
    assert second.split() == ["2", "3.00", "2", "0", "6.0", "MiB", "0.9200", "1e-09", "2.5000"]


def test_the_text_names_failures_and_leftovers() -> None:
    """What went wrong is said: which site, why, and what was left on disk."""
    text = a_report(failed={"site-3": "no space"}, left=2).to_text()
    assert "round 1: site-3 failed: no space" in text
    assert "2 entries left (8.0 KiB)" in text
    assert "nothing left" in a_report().to_text()
