"""The recent past of one machine, kept so that an error can tell it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["STORY_LINES", "Line", "Story"]

STORY_LINES: Final = 32
"""Lines kept per machine; older ones are counted, not kept."""


@dataclass(frozen=True, slots=True)
class Line:
    """One transition: when, on which event, from where to where, with what effects."""

    at: float
    event: str
    before: str
    after: str
    effects: tuple[str, ...]

    def __str__(self) -> str:
        arrow = self.before if self.before == self.after else f"{self.before} -> {self.after}"
        effects = f": {', '.join(self.effects)}" if self.effects else ""
        return f"t={self.at:.3f} {self.event} [{arrow}]{effects}"


class Story:
    """A bounded list of transitions; at most :data:`STORY_LINES` are kept.

    Args:
        title: What the machine is about, e.g. the ref.
    """

    __slots__ = ("_dropped", "_lines", "title")

    def __init__(self, title: str) -> None:
        self.title = title
        self._lines: deque[Line] = deque(maxlen=STORY_LINES)
        self._dropped = 0

    def tell(
        self, now: float, event: object, before: Enum, after: Enum, effects: tuple[object, ...]
    ) -> None:
        """Add one transition; steps that neither move nor do anything are left out."""
        if before is after and not effects:
            return
        if len(self._lines) == STORY_LINES:
            self._dropped += 1
        names = tuple(type(effect).__name__ for effect in effects)
        self._lines.append(Line(now, type(event).__name__, str(before), str(after), names))

    def lines(self) -> tuple[str, ...]:
        """The story, oldest first, ready for an error."""
        head = (f"... {self._dropped} earlier transitions",) if self._dropped else ()
        return (*head, *(str(line) for line in self._lines))
