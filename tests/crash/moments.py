"""When a victim is killed: in front of one of its file operations, counted, or after a while."""

import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["Moment", "draw"]

OPERATIONS: Final = frozenset(
    {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "fcntl.flock"}
)
"""Audit events of what makes, leases, fills, renames and removes a root."""


MAKING: Final = 8
"""The first operations of a life, in which its root is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment.

    Args:
        operation: The process ends right before its operation of this number; 0: by the clock.
        seconds: After its start, if by the clock.
    """

    operation: int = 0
    seconds: float = 0.0

    def arm(self, scratch: Path) -> None:
        """Let this process, and no other, kill itself when its moment comes."""
        if self.operation:
            _watch(scratch, self.operation)

    def __str__(self) -> str:
        return f"operation {self.operation}" if self.operation else f"{self.seconds * 1000:.0f} ms"


def draw(chance: random.Random, operations: int, seconds: float) -> Moment:
    """Two of three by operation: between two of them there is nothing that the disk would show.

    One of four of those is among the few in which a root is made, where an owner is hardest to tell.
    """
    if chance.random() >= 2 / 3:
        return Moment(seconds=chance.uniform(0, seconds))
    making = chance.random() < 1 / 4
    return Moment(operation=chance.randint(1, MAKING if making else operations))


def _watch(scratch: Path, fatal: int) -> None:
    place, count = str(scratch), 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in OPERATIONS or (event == "open" and not str(args[0]).startswith(place)):
            return
        count += 1
        if count == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
