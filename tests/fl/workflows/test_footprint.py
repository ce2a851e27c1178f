"""What whole workflows cost in memory, threads and descriptors, measured in processes of their own.

The sites run in the same process and compute what they send, so what grows is the aggregator, and the
endpoints of the sites where there are many of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

THREADS = 12
"""The loop's, 4 that land, 2 that read, 1 each for arithmetic, its read-ahead and roots, janitor, sampler."""
DESCRIPTORS = 20
"""Of the interpreter, the loop and the lease, and at most one for each thread that lands or reads."""


def measured(scratch: Path, backend: str, *runs: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """Run workflows of (sites, rounds, tensors, MiB per tensor) in one new process."""
    numbers = [str(number) for one in runs for number in one]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fl.workflows.footprint", backend, *numbers],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_memory_does_not_grow_with_rounds(tmp_path: Path) -> None:
    """Ten rounds of three sites and 64 MiB: each round ends where the second did, and the peak is bounded."""
    model, tensor = 64, 16
    (run,) = measured(tmp_path, "asyncio", (3, 10, model // tensor, tensor))
    second = run["after"][1]
    assert [round(now - second) for now in run["after"] if abs(now - second) > tensor] == []
    assert run["peak"] - run["base"] <= model + 2 * tensor
    assert run["peak"] - run["base"] <= 32, "what is promised is far less: a few blocks"


def test_memory_does_not_grow_with_sites(tmp_path: Path) -> None:
    """Two, four, eight and sixteen sites of 64 MiB that finish together: the same peak within a tenth."""
    runs = measured(tmp_path, "trio", *((sites, 1, 4, 16) for sites in (2, 4, 8, 16)))
    peaks = [run["peak"] for run in runs]
    assert [run["downloads"] for run in runs] == [2, 4, 8, 16], "they land at the same time"
    assert max(peaks) < 1.1 * min(peaks), peaks


def test_fifty_sites_fit_into_the_memory_of_a_few(tmp_path: Path) -> None:
    """Fifty sites, three rounds, 20 MiB an update, 3 GiB in all: a peak of less than eight updates."""
    (run,) = measured(tmp_path, "asyncio", (50, 3, 4, 5))
    assert run["peak"] - run["base"] < 8 * 20
    assert run["downloads"] > 8


@pytest.mark.parametrize(("backend", "sites"), [("asyncio", 500), ("trio", 100)])
def test_hundreds_of_sites_share_one_event_loop(tmp_path: Path, backend: str, sites: int) -> None:
    """500 sites (100 on trio) of 1 MiB in one loop: bounded threads and descriptors, two tasks a contribution."""
    (run,) = measured(tmp_path, backend, (sites, 1, 1, 1))
    assert run["threads"] <= THREADS
    assert run["descriptors"] <= DESCRIPTORS
    assert run["tasks"] <= 2 * sites + 20
    assert run["peak"] - run["base"] < 8 * 20
