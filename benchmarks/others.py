"""What else the machine did while a suite ran: figures of a busy machine say little."""

import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["Others"]

STAT: Final = Path("/proc/stat")
BUSY: Final = (0, 1, 2, 5, 6)
"""Columns of its first line: user, nice, system, irq, softirq."""
STOLEN: Final = 7


class Others:
    """Counts CPU seconds from ``with`` to the end of its block; nothing where the kernel does not say."""

    def __init__(self) -> None:
        self._used: float | None = None
        self._stolen = 0.0
        self._seconds = 0.0

    def __enter__(self) -> Self:
        self._begun = (time.monotonic(), _counts(), _ours())
        return self

    def __exit__(self, *_: object) -> None:
        began, before, own = self._begun
        self._seconds = time.monotonic() - began
        after = _counts()
        if before is not None and after is not None:
            self._used = max(0.0, after[0] - before[0] - (_ours() - own))
            self._stolen = after[1] - before[1]

    def to_text(self) -> str:
        """Return one line."""
        if self._used is None:
            return "what other programs did meanwhile is not known"
        return (
            f"in {self._seconds:.0f} s other programs used {self._used:.1f} CPU s,"
            f" and the host of the machine took {self._stolen:.1f}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "seconds": self._seconds,
            "other_cpu_seconds": self._used,
            "stolen_cpu_seconds": self._stolen,
        }


def _counts() -> tuple[float, float] | None:
    """CPU seconds of all processes so far, and those that a host took."""
    with suppress(OSError):
        columns = STAT.read_text(encoding="ascii").splitlines()[0].split()[1:]
        tick = os.sysconf("SC_CLK_TCK")
        return sum(int(columns[at]) for at in BUSY) / tick, int(columns[STOLEN]) / tick
    return None


def _ours() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
