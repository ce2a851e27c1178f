"""Log lines that others can provoke: a few at once, then few over time, however often they try."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import anyio

from streamoff.errors import StreamoffError
from streamoff.runtime.timers import Timer, Timers

__all__ = ["BURST", "MAX_CHARACTERS", "SECONDS_EACH", "Lines", "SparingLog", "printable"]

BURST: Final = 16
"""Lines of one kind that may follow each other at once."""
SECONDS_EACH: Final = 5.0
"""After a burst, one line of the kind in so many seconds."""
MAX_CHARACTERS: Final = 500
"""Of anything in a line that is text."""

Facts = Mapping[str, object]
ExcInfo = BaseException | None
_Line = tuple[str, tuple[object, ...], Facts | None, ExcInfo]


def printable(text: str) -> str:
    """Text on one line: what cannot be printed is escaped, and what is beyond the limit is cut and counted."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    most = MAX_CHARACTERS
    return text if len(text) <= most else f"{text[: most - 40]}... ({len(text)} characters)"


def _plain(value: object) -> object:
    if isinstance(value, (int, float)):
        return value
    return printable(value.line() if isinstance(value, StreamoffError) else str(value))


class SparingLog:
    """One kind of line; what is left out is counted, and told with the next one.

    Args:
        logger: Where it goes.
        level: Of :mod:`logging`.
        timers: With a clock, the last line that was left out is told as soon as there is room for it.
    """

    def __init__(self, logger: logging.Logger, level: int, timers: Timers | None = None) -> None:
        self._logger = logger
        self._level = level
        self._now = anyio.current_time if timers is None else timers.now
        self._timer: Timer | None = None if timers is None else timers.timer(self._tell_last)
        self._credit = float(BURST)
        self._since = 0.0
        self._waiting = 0
        self._last: _Line | None = None
        self.left_out = 0

    def __call__(
        self, text: str, *args: object, facts: Facts | None = None, exc_info: ExcInfo = None
    ) -> None:
        """Log a line, or count it; inside an event loop.

        Args:
            text: With a place for each argument.
            args: Numbers as they are, errors without their stories, everything else as printable text.
            facts: What the line says, for handlers that want it in parts: the record's attribute ``facts``.
            exc_info: Whose traceback is told.
        """
        if not self._logger.isEnabledFor(self._level):
            return
        now = self._refill()
        if self._credit >= 1:
            self._tell((text, args, facts, exc_info), self._waiting)
            return
        held = tuple(_plain(one) if isinstance(one, BaseException) else one for one in args)
        self._last = (
            text,
            held,
            facts,
            None,
        )  # an error would keep its frames, and what is in them
        self._waiting += 1
        self.left_out += 1
        if self._timer is not None and self._waiting == 1:
            self._timer.at(now + (1 - self._credit) * SECONDS_EACH)

    def _refill(self) -> float:
        now = self._now()
        self._since = min(self._since, now)  # above it, if this is another event loop
        self._credit = min(BURST, self._credit + (now - self._since) / SECONDS_EACH)
        self._since = now
        return now

    def _tell(self, line: _Line, others: int) -> None:
        text, args, facts, exc_info = line
        self._credit -= 1
        self._waiting, self._last = 0, None
        if self._timer is not None:
            self._timer.at(None)
        if others:
            text, args = f"{text} (%d more were not logged)", (*args, others)
        extra = None if facts is None else {"facts": facts}
        plain = map(_plain, args)
        self._logger.log(self._level, text, *plain, extra=extra, exc_info=exc_info)

    def _tell_last(self) -> None:
        self._refill()
        if self._last is not None:
            self.left_out -= 1
            self._tell(self._last, self._waiting - 1)

    def close(self) -> None:
        """Tell what was left out last, and how much there was; nothing is to be logged any more."""
        self._tell_last()
        if self._timer is not None:
            self._timer.cancel()


class Lines:
    """The log of one endpoint: each kind of line is told sparingly.

    Args:
        timers: The endpoint's clock.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._kinds: dict[tuple[str, str], SparingLog] = {}

    @property
    def left_out(self) -> int:
        """Lines that were counted and not told."""
        return sum(kind.left_out for kind in self._kinds.values())

    def tell(
        self,
        logger: logging.Logger,
        level: int,
        kind: str,
        text: str,
        *args: object,
        facts: Facts | None = None,
        exc_info: ExcInfo = None,
    ) -> None:
        """Log a line of a kind; kinds are words of the program, never of a peer."""
        sparing = self._kinds.get((logger.name, kind))
        if sparing is None:
            sparing = SparingLog(logger, level, self._timers)
            self._kinds[logger.name, kind] = sparing
        sparing(text, *args, facts=facts, exc_info=exc_info)

    def close(self) -> None:
        """Tell what was left out last of every kind."""
        for kind in self._kinds.values():
            kind.close()
