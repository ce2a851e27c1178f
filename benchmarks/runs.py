"""One simulation in a process of its own, so that no run inherits another's memory."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamoff.sim.sizes import format_size
from streamoff.types import MIB

__all__ = ["ROUNDS", "Case", "Measured", "simulate"]

ROUNDS: Final = 2
"""The second round finds what the first one leaves behind."""
PROCESS_BYTES: Final = 512 * MIB
"""More than Python, torch and every buffer of a run take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated.

    Args:
        engine: ``"columnar"`` or ``"in-time"`` with offload, or ``"memory"``: columnar without offload.
        shapes: As ``--site-tensors``.
        sites: Their number.
        model_bytes: Size of the float32 model.
    """

    engine: str
    shapes: str
    sites: int
    model_bytes: int

    @property
    def arguments(self) -> list[str]:
        """What ``streamoff simulate`` is told."""
        how = (
            ["--no-offload"]
            if self.engine == "memory"
            else ["--offload", "--aggregation", self.engine]
        )
        return [
            *("--task", "checkpoint", "--model-size", str(self.model_bytes)),
            *("--site-tensors", self.shapes, "--sites", str(self.sites), "--rounds", str(ROUNDS)),
            *how,
        ]

    @property
    def disk_bytes(self) -> int:
        """What it needs on disk at most.

        The first model, the result and a global model per site; with offload also two global models at the
        server and a contribution per site.
        """
        models = self.sites + 2 if self.engine == "memory" else 2 * self.sites + 4
        return models * self.model_bytes

    @property
    def ram_bytes(self) -> int:
        """What it needs in RAM at most.

        Without offload: a contribution per site, two global models, and what the allocator keeps of tensors
        that were freed.
        """
        models = {"columnar": 0, "in-time": 1, "memory": self.sites + 10}[self.engine]
        return PROCESS_BYTES + models * self.model_bytes

    def __str__(self) -> str:
        return (
            f"{self.engine}, {self.sites} sites x {format_size(self.model_bytes)},"
            f" --site-tensors {self.shapes}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run took.

    Args:
        baseline_bytes: Resident memory before the first round, torch included.
        peak_delta_bytes: How far the largest sample lay above it.
        scratch_bytes: The largest sample of the job roots of all endpoints.
        seconds: Of all rounds; the order of magnitude is all that it says.
    """

    baseline_bytes: int
    peak_delta_bytes: int
    scratch_bytes: int
    seconds: float


def simulate(case: Case) -> Measured | str:
    """Run a case to its end in a fresh process and a fresh directory, which is removed.

    Returns:
        What it took, or the last line of what it said when it failed.
    """
    with tempfile.TemporaryDirectory(prefix="streamoff-bench-") as directory:
        report = Path(directory) / "report.json"
        files = ["--scratch", directory, "--output", f"{directory}/model.safetensors"]
        command = [sys.executable, "-m", "streamoff", "simulate", *case.arguments, *files]
        done = subprocess.run(
            [*command, "--quiet", "--json", str(report)],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["nothing was said"]
            return f"exit code {done.returncode}: {said[-1]}"
        return _measured(json.loads(report.read_text(encoding="utf-8")))


def _measured(report: dict[str, Any]) -> Measured:
    return Measured(
        baseline_bytes=report["memory"]["baseline_bytes"],
        peak_delta_bytes=report["memory"]["peak_delta_bytes"],
        scratch_bytes=report["scratch"]["peak_bytes"],
        seconds=sum(row["seconds"] for row in report["rounds"]),
    )
