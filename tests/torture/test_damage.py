"""The torture finds what is wrong: with one thing broken on purpose, a few seeds are enough, and shrink.

What is broken is a cell of a table, or a step of the shell that somebody could forget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from streamoff.fl.aggregation.arithmetic import Method
from streamoff.machines import (
    download as d,
    job_root as j,
    notice as n,
    participation as p,
    serving as s,
    transaction as t,
)
from streamoff.machines.cells import Machine
from streamoff.runtime.jobs import Job
from streamoff.runtime.publishing import Publisher
from streamoff.tensors import landing

from .machine_scenario import MachineScenario, draw
from .machines import Machines
from .shell import Shell
from .shell_scenario import draw as draw_shell
from .tier import Failure, Tally, Tier, ViolationError, run_seeds

D, J, Q = d.DownloadState, j.JobRootState, p.ParticipationState


def first_failure(tier: Tier, seeds: Iterable[int]) -> Failure:
    """The first failing seed, made smaller."""
    for _, found in run_seeds(tier, seeds):
        if isinstance(found, Failure):
            return found
    pytest.fail("nothing was found")


CELLS: dict[str, tuple[Machine[Any, Any, Any, Any], Any, type, Any]] = {
    "a cancel counts as a success": (s.SERVING, s.ServingState.ACQUIRED, s.Cancelled, s.success),
    "an outcome is computed twice": (
        t.TRANSACTION,
        t.TransactionState.SETTLED,
        t.Drained,
        t.settle,
    ),
    "an abort is forgotten": (t.TRANSACTION, t.TransactionState.OPEN, t.Aborted, t.over),
    "a full disk is no reason to fail": (d.DOWNLOAD, D.STREAMING, d.LandingFailed, d.late),
    "what was not put in its place is confirmed": (
        d.DOWNLOAD,
        D.FINALISING,
        d.LandingFailed,
        d.confirm,
    ),
    "a notice is not believed": (d.DOWNLOAD, D.STREAMING, d.Noticed, d.late),
    "the root is removed under a consumer": (j.JOB_ROOT, J.DRAINING, j.WindowClosed, j.bury),
    "the cut is not told": (p.PARTICIPATION, Q.LANDING, p.Closed, p.over),
    "what has landed when the round closes is lost": (p.PARTICIPATION, Q.CUTTING, p.Counted, p.has),
    "a notice is never given up": (n.NOTICE, n.NoticeState.SENT, n.TotalExpired, n.late),
}


@pytest.mark.parametrize("what", CELLS)
def test_a_wrong_cell_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with one wrong cell does not survive a few hundred worlds of machines."""
    machine, state, event, cell = CELLS[what]
    monkeypatch.setitem(machine._grid, (state, event), cell)
    found = first_failure(Machines(), range(600))
    assert f"--seeds {found.seed}-{found.seed}" in str(found)


def test_what_is_found_is_made_smaller() -> None:
    """Of a scenario with many sites, faults and happenings only what is needed is left, and it fails in the same way."""
    tier = Machines()
    large = draw(22)

    class Fragile(Machines):
        """Fails where a site is killed."""

        def run(self, scenario: MachineScenario) -> Tally:
            if any(one.what == "crash" for one in scenario.happenings):
                raise ViolationError("killed")
            return tier.run(scenario)

    found = first_failure(Fragile(), range(200))
    assert found.what == "ViolationError: killed"
    assert "Happening(what='crash'" in found.scenario
    assert found.scenario.count("Happening(") == 1
    assert found.scenario.count("Site(") == 1
    assert "faults=Faults(drop=0.0, duplicate=0.0, latency=(0.01, 0.01)" in found.scenario
    assert large == draw(22)


def no_check(landing: Any, start: int, views: Any, digest: bytes, actual: bytes) -> Any:
    """Land a chunk whatever its digest is."""
    return landing_checked(landing, start, views, actual, actual)


landing_checked = landing._Landing._checked


def forget_source(_tx: Any) -> None:
    """Do not close sources."""


def leave_root(_job: Any, _seconds: float) -> bool:
    """Say that the root is gone, and leave it."""
    return True


def keep_buffer(_transfer: Any, _inbound: Any) -> None:
    """Drop a chunk that nobody asked for without giving its memory back."""


def corrupting() -> Iterator[int]:
    """Seeds whose network flips bits, without those of real processes."""
    for seed in range(600):
        scenario = draw_shell(seed)
        if scenario.plan.faults.corruption and scenario.kind != "processes":
            yield seed


SHELL: dict[str, tuple[tuple[Any, str, Any], Iterable[int]]] = {
    "a damaged chunk is landed": ((landing._Landing, "_checked", no_check), tuple(corrupting())),
    "a source is not closed": (
        (Publisher, "_release", staticmethod(forget_source)),
        range(120),
    ),
    "a root stays": ((Job, "_bury", leave_root), range(120)),
    "weights are not what they were": (
        (Method, "rounded", lambda _method, weight: weight + 1.0),
        range(120),
    ),
}
"""What is forgotten, and the seeds that are tried: what few of them can meet is looked for where it can be met."""


@pytest.mark.parametrize("what", SHELL)
def test_a_forgotten_step_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that forgets one thing does not survive a few dozen runs of whole endpoints."""
    forgotten, seeds = SHELL[what]
    monkeypatch.setattr(*forgotten)
    monkeypatch.setattr(Shell, "most_shrinks", 0)
    first_failure(Shell("asyncio"), seeds)
