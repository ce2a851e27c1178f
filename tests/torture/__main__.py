"""Run many seeds, show how it goes, and say what was found.

python -m tests.torture --tier machines --seeds 0-99999 --jobs 2
python -m tests.torture --tier shell --seeds 0-499 --backend trio --json shell-trio.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .pool import run_in_processes
from .tier import Failure, Tally, Tier
from .tiers import machines, shell

__all__ = ["main"]

SHOW_SECONDS = 10.0
"""How often a line is written where it cannot be overwritten."""
MOST_VIOLATIONS = 10
"""Violations after which a tier is given up: there is enough to look at."""


def span(text: str) -> tuple[int, int]:
    """Read ``A-B``, or a single seed."""
    first, dash, last = text.partition("-")
    found = int(first), int(last if dash else first)
    if not 0 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


class Display:
    """The progress of one tier, on one line."""

    def __init__(self, name: str, seeds: int) -> None:
        self._name = name
        self._seeds = seeds
        self._began = self._shown = time.monotonic()
        self._tty = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def show(self, tally: Tally, failures: int, *, done: bool = False) -> None:
        """Say how far it is."""
        now = time.monotonic()
        if not done and now - self._shown < (0.2 if self._tty else SHOW_SECONDS):
            return
        self._shown = now
        rate = tally.seeds / max(self.seconds, 1e-9)
        left = (self._seeds - tally.seeds - failures) / max(rate, 1e-9)
        line = f"{self._name}: {tally.seeds + failures}/{self._seeds} seeds, {rate:.1f}/s, {failures} violations"
        line += "" if done else f", {left:.0f} s to go"
        sys.stderr.write(f"\r{line:<79}" if self._tty else f"{line}\n")
        if self._tty and done:
            sys.stderr.write("\n")
        sys.stderr.flush()


def torture(
    name: str, make: Callable[[], Tier], seeds: tuple[int, int], jobs: int
) -> tuple[dict[str, Any], list[Failure]]:
    """Run the seeds of one tier.

    Returns:
        What was found, ready for JSON, and the failures.
    """
    display = Display(name, seeds[1] - seeds[0] + 1)
    tally, failures = Tally(), list[Failure]()
    for found in run_in_processes(make, *seeds, jobs):
        if isinstance(found, Failure):
            failures.append(found)
            sys.stderr.write(f"\n{found}\n")
        else:
            tally.add(found)
        display.show(tally, len(failures))
        if len(failures) >= MOST_VIOLATIONS:
            break
    display.show(tally, len(failures), done=True)
    report = {
        "tier": name,
        "seeds": f"{seeds[0]}-{seeds[1]}",
        "run": tally.seeds + len(failures),
        "seconds": round(display.seconds, 1),
        "violations": [
            {"seed": one.seed, "what": one.what, "scenario": one.scenario} for one in failures
        ],
        "injected": dict(tally.injected.most_common()),
        "ends": dict(tally.ends.most_common()),
    }
    return report, failures


def table(reports: list[dict[str, Any]]) -> str:
    """What was run, what was injected and how it ended."""
    lines = [f"{'tier':<16}{'seeds':>9}{'seconds':>9}{'seeds/s':>9}{'violations':>12}"]
    for one in reports:
        rate = one["run"] / max(one["seconds"], 0.1)
        found = len(one["violations"])
        lines.append(
            f"{one['tier']:<16}{one['run']:>9}{one['seconds']:>9.1f}{rate:>9.1f}{found:>12}"
        )
    for what in ("injected", "ends"):
        total: Counter[str] = Counter()
        for one in reports:
            total.update(one[what])
        lines += ["", "faults injected" if what == "injected" else "how things ended"]
        lines += [f"  {name:<30}{count:>12}" for name, count in total.most_common()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns:
        0 if nothing was found, 1 if something was.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seeds", type=span, default=(0, 999), help="A-B, both included")
    parser.add_argument("--tier", choices=("machines", "shell", "both"), default="both")
    parser.add_argument("--backend", choices=("asyncio", "trio", "both"), default="both")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    asked = parser.parse_args(arguments)
    tiers: dict[str, Callable[[], Tier]] = {}
    if asked.tier != "shell":
        tiers["machines"] = machines
    if asked.tier != "machines":
        for backend in ("asyncio", "trio") if asked.backend == "both" else (asked.backend,):
            tiers[f"shell {backend}"] = partial(shell, backend)
    reports, failures = [], []
    for name, make in tiers.items():
        report, failed = torture(name, make, asked.seeds, max(1, asked.jobs))
        reports.append(report)
        failures += failed
    sys.stdout.write(table(reports) + "\n")
    for failure in failures:
        sys.stdout.write(f"\n{failure}\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(reports, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
