"""The shell tier: whole endpoints on a faulty network in virtual time, and some with real processes.

After each run nothing may be left: no task, thread, descriptor, mapping or file.
"""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import torch

from streamoff.scratch.janitor import JANITOR
from streamoff.testing.leaks import LeakCheck, leaving_no_tasks
from streamoff.testing.virtual import virtual_backend

from . import shell_scenario
from .shell_moves import Moves
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
            scratch = Path(directory)
            check = LeakCheck(scratch)
            with only_expected_logs():
                tally = self._run(scenario, scratch)
            if not JANITOR.idle(30.0):
                raise ViolationError("a janitor that does not come to an end")
            if leaks := check.settle():
                raise ViolationError("something is left", *leaks)
        return tally

    def _run(self, scenario: ShellScenario, scratch: Path) -> Tally:
        stage = _STAGES[scenario.kind](scenario, scratch)
        _run_in_loop(stage, self._backend)
        injected = stage.network.injected
        ends = stage.watch.look_at_the_end(scenario, injected)
        injected = Counter(injected)
        injected.update(one.what for one in scenario.endings)
        injected.update(site.mood for site in scenario.sites if site.mood)
        return Tally(1, injected, ends)


def _run_in_loop(stage: Stage, backend: Backend) -> None:
    name, options = virtual_backend(backend, debug=False)
    run: Any = leaving_no_tasks(stage.run)
    anyio.run(run, backend=name, backend_options=options)
