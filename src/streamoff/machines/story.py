"""The recent past of one machine, kept so that an error can tell it."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, NamedTuple

__all__ = ["STORY_LINES", "Line", "Story"]

STORY_LINES: Final = 32
"""Lines kept per machine; older ones are counted, not kept."""


class Line(NamedTuple):
    """One transition: when, on which event, from where to where, with what effects; types only, so it keeps nothing."""

    at: float
    event: type
    before: Enum
    after: Enum
    effects: tuple[type, ...]

    def __str__(self) -> str:
        arrow = self.before if self.before is self.after else f"{self.before} -> {self.after}"
        effects = ", ".join(effect.__name__ for effect in self.effects)
        return f"t={self.at:.3f} {self.event.__name__} [{arrow}]{effects and f': {effects}'}"


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
        self._lines.append(Line(now, type(event), before, after, tuple(map(type, effects))))

    def lines(self) -> tuple[str, ...]:
        """The story, oldest first, ready for an error."""
        head = (f"... {self._dropped} earlier transitions",) if self._dropped else ()
        return (*head, *(str(line) for line in self._lines))
