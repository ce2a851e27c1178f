"""Log lines that a peer can provoke: a few at once, then few over time, however often it tries."""

from __future__ import annotations

import logging
from typing import Final

import anyio

__all__ = ["SparingLog"]

BURST: Final = 8
"""Lines that may follow each other at once."""
SECONDS_EACH: Final = 10.0
"""After a burst, one line in so many seconds."""


class SparingLog:
    """One kind of line; what is left out is counted and told with the next one.

    Args:
        logger: Where it goes.
        level: Of :mod:`logging`.
    """

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._credit = float(BURST)
        self._since = 0.0
        self._left_out = 0

    def __call__(self, text: str, *args: object) -> None:
        """Log a line, or count it; inside an event loop."""
        now = anyio.current_time()
        self._since = min(self._since, now)  # above it, if this is another event loop
        self._credit = min(BURST, self._credit + (now - self._since) / SECONDS_EACH)
        self._since = now
        if self._credit < 1:
            self._left_out += 1
            return
        self._credit -= 1
        if self._left_out:
            text, args = f"{text} (%d more were not logged)", (*args, self._left_out)
            self._left_out = 0
        self._logger.log(self._level, text, *args)
