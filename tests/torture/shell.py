"""The shell tier: whole endpoints on a faulty network in virtual time, and some with real processes.

After each run nothing may be left: no task, thread, descriptor, mapping or file.
"""

from __future__ import annotations

import gc
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import torch

from streamoff.scratch.janitor import JANITOR
from streamoff.testing.leaks import LeakCheck, leaving_no_tasks
from streamoff.testing.virtual import virtual_backend

from . import shell_scenario
from .shell_moves import Moves
from .shell_processes import Processes, prepare
from .shell_rounds import Rounds
from .shell_scenario import ShellScenario
from .shell_stage import Stage
from .shell_watch import only_expected_logs
from .tier import Tally, ViolationError

__all__ = ["Shell"]

_STAGES: Final[dict[str, type[Stage]]] = {"rounds": Rounds, "moves": Moves}

Backend = Literal["asyncio", "trio"]


class Shell:
    """Whole endpoints.

    Args:
        backend: Of the event loop.
    """

    attempts = 3
    most_shrinks = 80
    patience = 300.0

    def __init__(self, backend: Backend) -> None:
        self.name = f"shell --backend {backend}"
        self._backend = backend
        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # what was imported need not be walked by every leak check

    def draw(self, seed: int) -> ShellScenario:
        """The scenario of a seed."""
        return shell_scenario.draw(seed)

    def smaller(self, scenario: ShellScenario) -> Iterator[ShellScenario]:
        """Neighbours with one thing less."""
        return shell_scenario.smaller(scenario)

    def run(self, scenario: ShellScenario) -> Tally:
        """Run it and look at everything.

        Raises:
            ViolationError: A promise is broken.
        """
        with tempfile.TemporaryDirectory(prefix="torture-") as directory:
            scratch = Path(directory) / "scratch"
            scratch.mkdir()
            if scenario.kind == "processes":
                prepare()
            with limited(scratch, scenario):
                tally = self._watched(scenario, scratch, Path(directory))
        return tally

    def _watched(self, scenario: ShellScenario, scratch: Path, control: Path) -> Tally:
        check = LeakCheck(scratch)
        with only_expected_logs():
            if scenario.kind == "processes":
                tally = self._run_processes(scenario, scratch, control)
            else:
                tally = self._run(scenario, scratch)
        if not JANITOR.idle(30.0):
            raise ViolationError("a janitor that does not come to an end")
        if leaks := check.settle():
            raise ViolationError("something is left", *leaks)
        return tally

    def _run(self, scenario: ShellScenario, scratch: Path) -> Tally:
        stage = _STAGES[scenario.kind](scenario, scratch)
        _run_in_loop(stage, self._backend)
        return _tally(stage, scenario, stage.network.injected)

    def _run_processes(self, scenario: ShellScenario, scratch: Path, control: Path) -> Tally:
        stage = Processes(scenario, scratch, control, self._backend)
        anyio.run(leaving_no_tasks(stage.run), backend=self._backend)
        happened = {"cut", "kill", "partition"} if stage.signals else ()
        tally = _tally(stage, scenario, happened)
        tally.injected = stage.signals + _own_faults(scenario)
        return tally


@contextmanager
def limited(scratch: Path, scenario: ShellScenario) -> Iterator[None]:
    """Make the disk of all job roots as small as the scenario says, where this process may mount one."""
    if scenario.disk is None:
        yield
        return
    model = 16 * scenario.elements + 4096
    size = max(256 * 1024, int(scenario.disk * model))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "torture", str(scratch)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", str(scratch)], check=True)


def _tally(stage: Stage, scenario: ShellScenario, happened: Iterable[str]) -> Tally:
    ends = stage.watch.look_at_the_end(scenario, happened)
    return Tally(1, stage.network.injected + _own_faults(scenario), ends)


def _own_faults(scenario: ShellScenario) -> Counter[str]:
    """What the scenario itself does wrong, beside the network."""
    bounds = [name for name in ("quota", "disk", "deadline") if getattr(scenario, name) is not None]
    moods = [site.mood for site in scenario.sites if site.mood]
    mute = ["no capabilities" for site in scenario.sites if site.mute]
    moved = [move.how for move in scenario.moves if move.how not in {"take", "pass", "again"}]
    withdrawn = ["withdrawn" for move in scenario.moves if move.withdrawn is not None]
    ended = [f"job: {one.what}" for one in scenario.endings]
    return Counter(bounds + moods + mute + moved + withdrawn + ended)


def _run_in_loop(stage: Stage, backend: Backend) -> None:
    name, options = virtual_backend(backend, debug=False)
    if backend == "trio":
        _order_by(stage.scenario.seed)
    run: Any = leaving_no_tasks(stage.run)
    anyio.run(run, backend=name, backend_options=options)


def _order_by(seed: int) -> None:
    """Let the order in which trio runs tasks that become ready together follow from the seed.

    It is random on purpose, and trio has no public way to choose it; hypothesis does it in this way too.
    """
    loop = import_module("trio._core._run")
    setattr(loop, "_ALLOW_DETERMINISTIC_SCHEDULING", True)  # noqa: B010 - it is declared final
    loop._r.seed(seed)
