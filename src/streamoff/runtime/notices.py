"""Sending failure notices: the owner of a dead source tells everybody who might pull from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

import anyio

from streamoff.errors import UsageError
from streamoff.machines import notice as m
from streamoff.machines.notice import NOTICE, REASON_CHARACTERS
from streamoff.runtime.endings import some
from streamoff.runtime.sparing import Lines
from streamoff.runtime.timers import Timer, Timers
from streamoff.types import Address, Capability, RefId
from streamoff.wire.frames import Notice, Routed
from streamoff.wire.limits import clip

__all__ = ["Notifier", "NotifierStatistics"]

logger = logging.getLogger("streamoff.notices")


@dataclass(frozen=True, slots=True)
class NotifierStatistics:
    """A snapshot of the notices that an endpoint sends; counters since it started.

    Args:
        under_way: Notices that wait for an answer.
        acknowledged: Notices that a receiver has believed.
        given_up: Notices that were not answered, not believed, or not sent to whom does not hear them.
    """

    under_way: int
    acknowledged: int
    given_up: int


class _Telling:
    """One notice on its way to one receiver."""

    def __init__(self, notifier: Notifier, frame: Notice, timers: Timers) -> None:
        self._notifier = notifier
        self.frame = frame
        self.record = m.Notice(frame.to)
        self.unreachable = False
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

    @property
    def why_not(self) -> str:
        """Why the receiver does not know; empty if it does."""
        way = ", the way ends before it" if self.record.reason and self.unreachable else ""
        return f"{self.record.reason}{way}"


class Notifier:
    """The notices that one endpoint sends.

    Args:
        address: Whose they are.
        capabilities: What this end names.
        capabilities_of: What a neighbour has named as well; None for others.
        timers: The endpoint's clock.
        send: Queues a frame; loses it if there is no way.
        lines: The endpoint's log.
    """

    def __init__(
        self,
        *,
        address: Address,
        capabilities: frozenset[Capability],
        capabilities_of: Callable[[Address], frozenset[Capability] | None],
        timers: Timers,
        send: Callable[[Routed], None],
        lines: Lines,
    ) -> None:
        self.address = address
        self.send = send
        self._capabilities = capabilities
        self._capabilities_of = capabilities_of
        self._timers = timers
        self._lines = lines
        self._ids = count(1)
        self._under_way: dict[int, _Telling] = {}
        self._acknowledged = 0
        self._given_up = 0

    def statistics(self) -> NotifierStatistics:
        """A snapshot."""
        return NotifierStatistics(len(self._under_way), self._acknowledged, self._given_up)

    async def notify(
        self, receivers: Iterable[Address], source: Address, refs: Iterable[RefId], reason: str
    ) -> dict[Address, str]:
        """Tell all receivers at once that a source is dead.

        A receiver that has not named the capability is not told: its own budgets end what it pulls.

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
        told = {receiver: self._deaf(receiver) for receiver in receivers}
        tellings = [
            self._telling(receiver, source, batch, reason)
            for batch in m.split(refs)
            for receiver, deaf in told.items()
            if not deaf
        ]
        await self._tell(tellings)
        for telling in tellings:
            told[telling.frame.to] = told[telling.frame.to] or telling.why_not
        self._acknowledged += sum(not telling.why_not for telling in tellings)
        self._given_up += sum(bool(why) for why in told.values())
        self._log(source, reason, told)
        return told

    def _deaf(self, receiver: Address) -> str:
        """Why it is of no use to tell a receiver; empty if it is, as far as anybody knows."""
        theirs = self._capabilities_of(receiver)
        known = self._capabilities if theirs is None else theirs
        return "" if Capability.NOTICE in known else "it hears no notices, or this end sends none"

    async def _tell(self, tellings: list[_Telling]) -> None:
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

    def _log(self, source: Address, reason: str, told: dict[Address, str]) -> None:
        unknowing = [f"{receiver}: {why}" for receiver, why in told.items() if why]
        self._lines.tell(
            logger,
            logging.INFO,
            "some do not know" if unknowing else "all know",
            "%s: told %d of %d receivers that %s is dead (%s)%s",
            self.address,
            len(told) - len(unknowing),
            len(told),
            source,
            reason,
            f"; not told: {some(unknowing)}" if unknowing else "",
        )

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

    def on_unreachable(self, receiver: Address, notice: int) -> None:
        """Somebody on the way has no way on; it may have one when the notice is sent again."""
        telling = self._under_way.get(notice)
        if telling is not None and telling.frame.to == receiver:
            telling.unreachable = True
