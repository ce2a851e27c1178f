"""Waking whoever waits, at no cost while nobody does."""

from __future__ import annotations

import anyio

__all__ = ["Signal"]


class Signal:
    """Wakes those that wait at this moment; it remembers nothing.

    Look at what you wait for, and if it is not there yet, :meth:`wait` without awaiting anything in between.
    An event is made when somebody waits and not for every change: most changes find nobody waiting.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        """Wake everybody that waits."""
        event, self._event = self._event, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        """Wait for the next :meth:`notify`."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()
