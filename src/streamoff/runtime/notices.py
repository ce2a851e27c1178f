"""Sending failure notices: the owner of a dead source tells everybody who might pull from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import count

import anyio

from streamoff.errors import UsageError
from streamoff.machines import notice as m
from streamoff.machines.notice import NOTICE, REASON_CHARACTERS
from streamoff.runtime.timers import Timer, Timers
from streamoff.types import Address, RefId
from streamoff.wire.frames import Notice, Routed
from streamoff.wire.limits import clip

__all__ = ["Notifier"]

logger = logging.getLogger("streamoff.notices")


class _Telling:
    """One notice on its way to one receiver."""

    def __init__(self, notifier: Notifier, frame: Notice, timers: Timers) -> None:
        self._notifier = notifier
        self.frame = frame
        self.record = m.Notice(frame.to)
        self.done = anyio.Event()
        self.timer: Timer = timers.timer(self._tick)

    def step(self, event: m.NoticeEvent) -> None:
        self.record, effects = NOTICE.step(self.record, event)
        self.timer.at(m.next_tick(self.record))
        for effect in effects:
            match effect:
                case m.SendNotice():
                    self._notifier.send(self.frame)
                case m.ReportNotice():
                    self.done.set()

    def _tick(self) -> None:
        event = m.classify_tick(self.record, anyio.current_time())
        if event is not None:
            self.step(event)
        else:
            self.timer.at(m.next_tick(self.record))


class Notifier:
    """The notices that one endpoint sends.

    Args:
        address: Whose they are.
        timers: The endpoint's clock.
        send: Queues a frame; loses it if there is no way.
    """

    def __init__(self, *, address: Address, timers: Timers, send: Callable[[Routed], None]) -> None:
        self.address = address
        self.send = send
        self._timers = timers
        self._ids = count(1)
        self._under_way: dict[int, _Telling] = {}

    async def notify(
        self, receivers: Iterable[Address], source: Address, refs: Iterable[RefId], reason: str
    ) -> dict[Address, str]:
        """Tell all receivers at once that a source is dead.

        Args:
            receivers: Who might pull from it.
            source: Mine, or below me: nobody believes a notice of anybody else.
            refs: What is lost; many are told in several notices of at most 256.
            reason: Why.

        Returns:
            Receiver to why it does not know; empty text if it does.

        Raises:
            UsageError: I do not own the source. Nothing was sent.

        Cancellation: stops repeating; what was sent was sent. Bounded by 10 s in all.
        """
        if not self.address.covers(source):
            raise UsageError(
                "not mine to declare dead", expected=f"{self.address} or below it", got=source
            )
        targets = tuple(dict.fromkeys(receivers))
        tellings = [
            self._telling(receiver, source, batch, reason)
            for batch in m.split(refs)
            for receiver in targets
        ]
        self._under_way |= {telling.frame.id: telling for telling in tellings}
        try:
            for telling in tellings:
                telling.step(m.Started(anyio.current_time()))
            for telling in tellings:
                await telling.done.wait()
        finally:
            for telling in tellings:
                telling.timer.cancel()
                self._under_way.pop(telling.frame.id, None)
        told: dict[Address, str] = {}
        for telling in tellings:
            told[telling.record.to] = told.get(telling.record.to, "") or telling.record.reason
        unknowing = {to: why for to, why in told.items() if why}
        logger.info(
            "%s: %d of %d receivers know that %s is dead (%s)%s",
            self.address,
            len(told) - len(unknowing),
            len(told),
            source,
            reason,
            f"; not told: {unknowing}" if unknowing else "",
        )
        return told

    def _telling(
        self, to: Address, source: Address, refs: tuple[RefId, ...], reason: str
    ) -> _Telling:
        frame = Notice(
            to=to,
            sender=self.address,
            id=next(self._ids),
            source=source,
            refs=refs,
            reason=clip(reason, REASON_CHARACTERS),
        )
        return _Telling(self, frame, self._timers)

    def close(self) -> None:
        """Wait for nobody any more: who has not answered is reported as not told."""
        for telling in tuple(self._under_way.values()):
            if not telling.done.is_set():
                telling.step(m.TotalExpired(anyio.current_time()))

    def on_acked(self, sender: Address, notice: int) -> None:
        """A receiver knows."""
        telling = self._under_way.get(notice)
        if telling is not None and telling.frame.to == sender:
            telling.step(m.Acked(anyio.current_time()))

    def on_rejected(self, sender: Address, notice: int, why: str) -> None:
        """A receiver does not believe it."""
        telling = self._under_way.get(notice)
        if telling is not None and telling.frame.to == sender:
            telling.step(m.Rejected(anyio.current_time(), why))
