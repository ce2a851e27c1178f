"""The receiving shell of a machine pair: one download, its landing, and a disk that remembers what is on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from streamoff.errors import NoSpaceError, StreamoffError
from streamoff.machines import download as d, serving as s, transaction as t
from streamoff.machines.download import DOWNLOAD, Download
from streamoff.testing.lossy import LossyNetwork
from streamoff.testing.witness import Key, Witness
from streamoff.types import NO_RANGES, Address, ByteRange, RangeSet

__all__ = ["Payload", "Receiving"]

OnReport: TypeAlias = Callable[[Key, StreamoffError | None], None]


@dataclass(frozen=True, slots=True)
class Payload:
    """The ranges of one payload: its header, the chunks after it, and all of it.

    Args:
        nbytes: Its size; the first 64 bytes are the header.
        chunk: Bytes of one pull.
    """

    nbytes: int
    chunk: int

    @property
    def header(self) -> ByteRange:
        """What comes first."""
        return ByteRange(0, min(64, self.nbytes))

    @property
    def whole(self) -> RangeSet:
        """What is wanted."""
        return RangeSet((ByteRange(0, self.nbytes),))

    def chunks(self) -> tuple[ByteRange, ...]:
        """What is pulled once the header is known."""
        return tuple(
            ByteRange(at, min(at + self.chunk, self.nbytes))
            for at in range(self.header.stop, self.nbytes, self.chunk)
        )


class Receiving:
    """Plays the shell of one download.

    Args:
        key: Which one.
        records: Where its record is kept.
        address: Whose it is.
        network: The clock, and the dice of the landing.
        witness: Sees every step.
        payload: What is pulled.
        window: Pulls in flight.
        eager: Whether the first bytes are asked for along with the open.
        ask: Sends an event to the producer.
        on_report: Called with what the caller is told.
    """

    def __init__(
        self,
        key: Key,
        records: dict[Key, Download],
        *,
        address: Address,
        network: LossyNetwork,
        witness: Witness,
        payload: Payload,
        window: int,
        eager: bool,
        ask: Callable[[t.Event], None],
        on_report: OnReport,
    ) -> None:
        self.alive = True
        self.due: float | None = None
        """When its clock is due; None: none runs."""
        self.attempt = 0
        self.reports: list[StreamoffError | None] = []
        self.disk = NO_RANGES
        """What of the payload is there, as the disk says."""
        self._key = key
        self._records = records
        self._address = address
        self._network = network
        self._witness = witness
        self._payload = payload
        self._chunks = payload.chunks()
        self._window = window
        self._eager = eager
        self._ask = ask
        self._on_report = on_report
        self._pulled: set[ByteRange] = set()
        self._landing: set[ByteRange] = set()
        self._planned = False

    @property
    def record(self) -> Download:
        """The download."""
        return self._records[self._key]

    def die(self) -> None:
        """Do nothing any more."""
        self.alive, self.due = False, None

    def tick(self) -> None:
        """Do what is due now."""
        while self.alive and (event := d.classify_tick(self.record, self._network.now)):
            self.step(event)

    def begin_again(self, record: Download) -> None:
        """The caller tries once more, with a fresh record, after an end without the payload."""
        self._records[self._key] = record
        self.attempt += 1
        self.reports.clear()
        self._pulled.clear()
        self._landing.clear()
        self._planned = False
        self._witness.begun_again(self._key)

    def step(self, event: d.DownloadEvent) -> None:
        """Apply one event and carry out what follows; the dead do nothing."""
        if not self.alive:
            return
        before = self.record
        after, effects = DOWNLOAD.step(before, event)
        self._records[self._key] = after
        self._witness.received(event, self._key, before, after, effects)
        self.due = d.next_tick(after)
        for effect in effects:
            self._carry_out(effect)

    def answer(self, event: d.DownloadEvent, attempt: int) -> None:
        """Hear what the producer says to an attempt of ours; to an earlier one, it is void."""
        if attempt == self.attempt:
            self.step(event)

    def _carry_out(self, effect: d.DownloadEffect) -> None:
        (slot, ref), origin = self._key, s.Origin(self._address, self.attempt)
        now = self._network.now
        match effect:
            case d.SendOpen():
                self._pulled.clear()
                first = self._payload.header if self._eager and not self._planned else None
                whole, mine = self._payload.whole, self.record.mine
                self._ask(t.OpenRequested(now, slot, ref, origin, b"", whole, mine, first))
            case d.PullMissing():
                self._pull(origin)
            case d.SendHold(seconds=seconds):
                self._ask(t.HoldRequested(now, slot, ref, seconds))
            case d.Finalise():
                self._later(lambda: d.Finalised(self._network.now))
            case d.SendConfirm(ok=ok, reason=reason):
                nonce = self.record.nonce
                self._ask(t.ConfirmRequested(now, slot, ref, origin, ok, nonce, reason))
            case d.SendCancel(reason=reason):
                self._ask(t.CancelRequested(now, slot, self._address, reason))
            case d.Discard():
                self._pulled.clear()
                self.disk = NO_RANGES
            case d.Report(error=error):
                self.reports.append(error)
                self._on_report(self._key, error)

    def _pull(self, origin: s.Origin) -> None:
        slot, ref = self._key
        for span in self._chunks if self._planned else (self._payload.header,):
            if len(self._pulled) >= self._window:
                break
            if span not in self._pulled and not self.record.landed.covers(span):
                self._pulled.add(span)
                self._ask(t.PullRequested(self._network.now, slot, ref, origin, span))

    def arrive(self, span: ByteRange, attempt: int) -> None:
        """A chunk is here; what has landed or is being landed already is thrown away."""
        void = attempt != self.attempt or self.record.ended or not self.alive
        if void or self.record.landed.covers(span) or span in self._landing:
            return
        self._landing.add(span)
        self._later(lambda: self._landed(span))

    def _landed(self, span: ByteRange) -> d.DownloadEvent:
        now = self._network.now
        self._landing.discard(span)
        self._pulled.discard(span)
        if not self.record.ended:
            self.disk = self.disk.add(span)
        if span != self._payload.header:
            return d.classify_landed(self.record, now, span)
        self._planned = True
        if not self._chunks:
            empty = ByteRange(span.stop, span.stop)
            attempt = self.attempt
            self._network.at(now, lambda: self.answer(d.LandedAll(now, empty), attempt))
        return d.Planned(now, self._payload.whole, RangeSet((span,)))

    def _later(self, make: Callable[[], d.DownloadEvent]) -> None:
        """Landing takes its time and may fail; what an earlier attempt left is nobody's."""
        network, attempt = self._network, self.attempt
        fails = network.random.random() < network.faults.landing_fails

        def done() -> None:
            if attempt != self.attempt or not self.alive:
                return
            event = make()
            if fails and not self.record.ended:
                network.injected["landing"] += 1
                event = d.LandingFailed(network.now, NoSpaceError("disk full"))
            self.step(event)

        network.after(network.faults.landing, done)
