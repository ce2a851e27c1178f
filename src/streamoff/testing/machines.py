"""Machine pairs: one transaction and the downloads that pull from it, joined by a bad link, in virtual time.

No event loop, no sockets, no files: the pair plays the shell of both ends. It carries out effects, turns
the effects of one end into events of the other, and lets a seeded link drop, duplicate and reorder them,
hang on to chunks and break. A witness looks at every step; what it finds, it finds again with the same seed.

    pair = MachinePair(receivers=3, faults=ROUGH, seed=7)
    pair.at(12.0, lambda: pair.cancel(1, "job aborted"))
    pair.run()
    assert pair.outcome.succeeded == ("site-0", "site-2")
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from streamoff.errors import (
    GoneError,
    InvariantError,
    NoSpaceError,
    SourceFailedError,
    StreamoffError,
)
from streamoff.machines import download as d, serving as s, transaction as t
from streamoff.machines.download import DOWNLOAD, Download
from streamoff.testing.witness import Key, Witness
from streamoff.types import (
    MIB,
    Address,
    Budgets,
    ByteRange,
    Capability,
    Outcome,
    RangeSet,
    Ref,
    Slot,
    SlotVerdict,
)

__all__ = ["CALM", "ROUGH", "Faults", "Key", "MachinePair"]

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What the link and the landing do wrong; chances are 0 to 1, spans are seconds, drawn evenly.

    Args:
        drop: Chance that a message is lost.
        duplicate: Chance that a message arrives twice.
        latency: Time on the way; a wide span reorders.
        reading: Time for which the link reads a chunk of the source.
        wedge: Chance that the link hangs on to a chunk for ``wedged`` seconds.
        wedged: How long such a chunk is held.
        cut: Chance, per message, that the link breaks.
        down: How long a broken link stays away.
        landing: Time to check a header, to land a chunk, to finalise.
        landing_fails: Chance that any of these fails.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    latency: Span = (0.01, 0.01)
    reading: Span = (0.02, 0.02)
    wedge: float = 0.0
    wedged: float = 100.0
    cut: float = 0.0
    down: Span = (0.1, 40.0)
    landing: Span = (0.01, 0.01)
    landing_fails: float = 0.0


CALM: Final = Faults()
"""An ordered link that loses nothing."""

ROUGH: Final = Faults(
    drop=0.05,
    duplicate=0.1,
    latency=(0.001, 3.0),
    reading=(0.001, 1.0),
    wedge=0.02,
    cut=0.01,
    landing=(0.001, 0.5),
    landing_fails=0.002,
)
"""A link on which everything goes wrong now and then."""


@dataclass(slots=True)
class _Receiver:
    """What the receiving shell keeps beside the record of one download."""

    pulled: set[ByteRange] = field(default_factory=set)
    landing: set[ByteRange] = field(default_factory=set)
    planned: bool = False
    reports: list[StreamoffError | None] = field(default_factory=list)


@dataclass(slots=True)
class _Link:
    """One receiver's link: up or down; what was on its way when it broke is lost."""

    up: bool = True
    life: int = 0


class MachinePair:
    """One transaction with its downloads, and everything between them.

    Args:
        receivers: Slots of the transaction; receiver ``i`` is ``site-i``.
        refs: Refs, ``ref-0`` and so on; every receiver pulls every ref.
        nbytes: Payload size; its first 64 bytes are the header.
        chunk: Bytes of one pull.
        window: Pulls in flight per download.
        budgets: Of both ends.
        capabilities: Of both ends.
        faults: What goes wrong.
        seed: Makes it go wrong the same way again.
        min_receivers: For the quorum view.
        start: Whether to start every download at once; otherwise see :meth:`start`.
    """

    def __init__(
        self,
        *,
        receivers: int = 1,
        refs: int = 1,
        nbytes: int = 24 * MIB,
        chunk: int = 4 * MIB,
        window: int = 4,
        budgets: Budgets | None = None,
        capabilities: frozenset[Capability] = frozenset(Capability),
        faults: Faults = CALM,
        seed: int = 0,
        min_receivers: int | None = None,
        start: bool = True,
    ) -> None:
        self.now = 0.0
        self.faults = faults
        self.budgets = budgets or Budgets()
        self.source_alive = True
        self.told: list[t.TransactionEffect] = []
        self._random = Random(seed)
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._capabilities = capabilities
        self._header = ByteRange(0, min(64, nbytes))
        self._wanted = RangeSet((ByteRange(0, nbytes),))
        self._chunks = tuple(
            ByteRange(at, min(at + chunk, nbytes)) for at in range(self._header.stop, nbytes, chunk)
        )
        self._window = window
        self._nonces = (number.to_bytes(8, "big") for number in itertools.count(1))
        names = [f"ref-{index}" for index in range(refs)]
        slots = [Slot(self._random.randbytes(16)) for _ in range(receivers)]
        self.transaction = t.begin(
            id="pair",
            now=0.0,
            slots=slots,
            refs=names,
            budgets=self.budgets,
            min_receivers=min_receivers,
        )
        source = Address("source")
        self.downloads: dict[Key, Download] = {
            (index, name): Download(
                Ref(source, name, slot.ticket, nbytes), self.budgets, capabilities
            )
            for index, slot in enumerate(slots)
            for name in names
        }
        self._receivers = {key: _Receiver() for key in self.downloads}
        self._links = [_Link() for _ in slots]
        self.witness = Witness(self.downloads, self.budgets, landing=self.faults.landing[1])
        if start:
            for key in self.downloads:
                self.start(key)

    # --- looking --------------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome:
        """The outcome of the transaction.

        Raises:
            InvariantError: There is none yet.
        """
        if self.transaction.outcome is None:
            raise InvariantError("no outcome yet", story=self.witness.story.lines())
        return self.transaction.outcome

    def reports(self, key: Key) -> tuple[StreamoffError | None, ...]:
        """What the caller of a download was told: nothing yet, None for the payload, or the error."""
        return tuple(self._receivers[key].reports)

    def verdict(self, key: Key) -> SlotVerdict:
        """How the producer judges a download."""
        return self.transaction.servings[key].verdict

    # --- acting ---------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at an instant; what the link delivers at that instant comes in its order."""
        heapq.heappush(self._agenda, (max(when, self.now), next(self._order), action))

    def start(self, key: Key) -> None:
        """Start a download."""
        self._receiver_step(key, d.Started(self.now))

    def cancel(self, slot: int, reason: str = "cancelled") -> None:
        """The receiver gives up every one of its downloads."""
        for key in self._of(slot):
            self._receiver_step(key, d.CancelRequested(self.now, reason))

    def hold(self, key: Key, seconds: float) -> None:
        """The receiver must wait for its own disk, quota or turn."""
        if self.downloads[key].state is not d.DownloadState.IDLE:
            self._receiver_step(key, d.HoldAsked(self.now, seconds))

    def fail_landing(self, key: Key) -> None:
        """The receiver's disk is full, if anything is being landed now."""
        landing = {d.DownloadState.OPENING, d.DownloadState.STREAMING, d.DownloadState.BACKOFF}
        if self.downloads[key].state in landing:
            self._receiver_step(key, d.LandingFailed(self.now, NoSpaceError("disk full")))

    def abort(self, reason: str = "deleted") -> None:
        """The producer ends the transaction."""
        self._producer_step(t.Aborted(self.now, reason))

    def kill_source(self, reason: str = "killed") -> None:
        """The producer dies without a word; its owner sends every receiver a notice."""
        self.source_alive = False
        for key in self.downloads:
            error = SourceFailedError(reason)
            self.at(self.now + self._draw(self.faults.latency), self._noticer(key, error))

    def cut(self, slot: int, seconds: float = math.inf) -> None:
        """Break a receiver's link; it comes back after ``seconds``, or never."""
        link = self._links[slot]
        if not link.up:
            return
        link.up, link.life = False, link.life + 1
        for key in self._of(slot):
            self._receiver_step(key, d.LinkLost(self.now))
        if seconds < math.inf:
            self.at(self.now + seconds, lambda: self._restore(slot))

    # --- time -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do what comes next: a message or action, or else the clocks that are due.

        Returns:
            False if nothing will ever happen again.

        Raises:
            InvariantError: Something that must hold does not.
        """
        clocks = [self._producer_clock(), *map(d.next_tick, self.downloads.values())]
        due = min((clock for clock in clocks if clock is not None), default=math.inf)
        coming = self._agenda[0][0] if self._agenda else math.inf
        if min(due, coming) == math.inf:
            return False
        if coming <= due:  # truth beats clocks
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        else:
            self.now = due
            self._tick()
        return True

    def run(self, *, until: float = math.inf, steps: int = 200_000) -> None:
        """Step until ``until``, or until nothing will ever happen again; then look at both ends.

        Raises:
            InvariantError: An end that never comes, or ends that contradict each other.
        """
        for _ in range(steps):
            ahead = [self._producer_clock(), *map(d.next_tick, self.downloads.values())]
            ahead += [self._agenda[0][0]] if self._agenda else []
            if min((at for at in ahead if at is not None), default=math.inf) > until:
                self.now = max(self.now, until)
                return
            if not self.step():
                self._look_at_the_end()
                return
        raise InvariantError(
            "a story that does not end", got=steps, story=self.witness.story.lines()
        )

    def _look_at_the_end(self) -> None:
        for key, record in self.downloads.items():
            verdict = self.verdict(key).verdict if self.source_alive else None
            self.witness.download_ended(key, record, self.reports(key), verdict)
        if self.source_alive:
            self.witness.transaction_ended(self.transaction, tuple(self.told))

    def _producer_clock(self) -> float | None:
        return t.next_tick(self.transaction) if self.source_alive else None

    def _tick(self) -> None:
        clock = self._producer_clock()
        if clock is not None and clock <= self.now:
            self._producer_step(t.Ticked(self.now))
            after = self._producer_clock()
            self.witness.require(after is None or after > self.now, "a clock that stands still")
        for key in self.downloads:
            while event := d.classify_tick(self.downloads[key], self.now):
                self._receiver_step(key, event)

    # --- the producing end ----------------------------------------------------------------------

    def _producer_step(self, event: t.Event) -> None:
        if not self.source_alive:
            return
        before = self.transaction
        self.transaction, effects = t.step(before, event)
        self.witness.served(event, before, self.transaction, effects, self.downloads)
        for effect in effects:
            self._produce(effect)

    def _produce(self, effect: t.TransactionEffect) -> None:
        match effect:
            case s.AnswerOpen(ref=ref, origin=origin, nonce=nonce):
                answer = d.Accepted(0.0, nonce, self._header, self._capabilities)
                self._to_receiver((origin.stream, ref), answer)
            case s.ServeRange(ref=ref, origin=origin):
                self._read((origin.stream, ref), effect.range)
            case s.AckConfirm(ref=ref, origin=origin):
                self._to_receiver((origin.stream, ref), d.ConfirmAcked(0.0))
            case s.AnswerGone(ref=ref, origin=origin, verdict=verdict):
                gone = GoneError("the ref is settled", got=verdict.verdict, ref=ref)
                self._to_receiver((origin.stream, ref), d.Refused(0.0, gone))
            case _:
                self.told.append(effect)

    def _read(self, key: Key, span: ByteRange) -> None:
        """The link reads a chunk; if it broke or the slot ended meanwhile, the chunk is skipped."""
        life = self._links[key[0]].life
        slow = self._random.random() < self.faults.wedge
        seconds = self.faults.wedged if slow else self._draw(self.faults.reading)

        def done() -> None:
            link = self._links[key[0]]
            final = self.transaction.servings[key].final
            served = link.up and link.life == life and not final and self.source_alive
            if served:
                self._send(key[0], lambda: self._arrive(key, span))
            self._producer_step(t.RangeEnded(self.now, *key, span, served))

        self.at(self.now + seconds, done)

    # --- the receiving end ----------------------------------------------------------------------

    def _receiver_step(self, key: Key, event: d.DownloadEvent) -> None:
        before = self.downloads[key]
        after, effects = DOWNLOAD.step(before, event)
        self.downloads[key] = after
        self.witness.received(event, key, before, after, effects)
        for effect in effects:
            self._receive(key, effect)

    def _receive(self, key: Key, effect: d.DownloadEffect) -> None:
        receiver, (slot, ref) = self._receivers[key], key
        origin = s.Origin(Address(f"site-{slot}"), slot)
        match effect:
            case d.SendOpen():
                receiver.pulled.clear()
                ask = t.OpenRequested(0.0, slot, ref, origin, b"", self._wanted, self._capabilities)
                self._to_producer(slot, ask)
            case d.PullMissing():
                self._pull(key, origin)
            case d.SendHold(seconds=seconds):
                self._to_producer(slot, t.HoldRequested(0.0, slot, ref, seconds))
            case d.Finalise():
                self._later(key, lambda: d.Finalised(self.now))
            case d.SendConfirm(ok=ok, reason=reason):
                nonce = self.downloads[key].nonce
                word = t.ConfirmRequested(0.0, slot, ref, origin, ok, nonce, reason)
                self._to_producer(slot, word)
            case d.SendCancel(reason=reason):
                self._to_producer(slot, t.CancelRequested(0.0, slot, origin.address, reason))
            case d.Discard():
                receiver.pulled.clear()
            case d.Report(error=error):
                receiver.reports.append(error)

    def _pull(self, key: Key, origin: s.Origin) -> None:
        receiver, record = self._receivers[key], self.downloads[key]
        wanted = self._chunks if receiver.planned else (self._header,)
        for span in wanted:
            if len(receiver.pulled) >= self._window:
                break
            if span not in receiver.pulled and not record.landed.covers(span):
                receiver.pulled.add(span)
                self._to_producer(key[0], t.PullRequested(0.0, *key, origin, span))

    def _arrive(self, key: Key, span: ByteRange) -> None:
        """A chunk is here; what has landed or is being landed already is thrown away."""
        receiver, record = self._receivers[key], self.downloads[key]
        if record.ended or record.landed.covers(span) or span in receiver.landing:
            return
        receiver.landing.add(span)
        self._later(key, lambda: self._landed(key, span))

    def _landed(self, key: Key, span: ByteRange) -> d.DownloadEvent:
        receiver = self._receivers[key]
        receiver.landing.discard(span)
        receiver.pulled.discard(span)
        if span != self._header:
            return d.classify_landed(self.downloads[key], self.now, span)
        receiver.planned = True
        if not self._chunks:
            empty = ByteRange(span.stop, span.stop)
            self.at(self.now, lambda: self._receiver_step(key, d.LandedAll(self.now, empty)))
        return d.Planned(self.now, self._wanted, RangeSet((span,)))

    def _later(self, key: Key, make: Callable[[], d.DownloadEvent]) -> None:
        """Landing takes its time and may fail."""
        fails = self._random.random() < self.faults.landing_fails

        def done() -> None:
            event = make()
            if fails and not self.downloads[key].ended:
                event = d.LandingFailed(self.now, NoSpaceError("disk full"))
            self._receiver_step(key, event)

        self.at(self.now + self._draw(self.faults.landing), done)

    # --- the link -------------------------------------------------------------------------------

    def _to_producer(self, slot: int, event: t.Event) -> None:
        def deliver() -> None:
            stamped = replace(event, now=self.now)
            if isinstance(stamped, t.OpenRequested):
                stamped = replace(stamped, nonce=next(self._nonces))
            self._producer_step(stamped)

        self._send(slot, deliver)

    def _to_receiver(self, key: Key, event: d.DownloadEvent) -> None:
        self._send(key[0], lambda: self._receiver_step(key, replace(event, now=self.now)))

    def _send(self, slot: int, deliver: Callable[[], None]) -> None:
        link, faults = self._links[slot], self.faults
        if not link.up:
            return
        if self._random.random() < faults.cut:
            self.at(self.now, lambda: self.cut(slot, self._draw(faults.down)))
        copies = 1 + (self._random.random() < faults.duplicate)
        life = link.life

        def arrive() -> None:
            if link.up and link.life == life:
                deliver()

        for _ in range(copies):
            if self._random.random() >= faults.drop:
                self.at(self.now + self._draw(faults.latency), arrive)

    def _restore(self, slot: int) -> None:
        self._links[slot].up = True
        for key in self._of(slot):
            self._receiver_step(key, d.LinkRestored(self.now))

    def _noticer(self, key: Key, error: StreamoffError) -> Callable[[], None]:
        return lambda: self._receiver_step(key, d.Noticed(self.now, error))

    def _of(self, slot: int) -> list[Key]:
        return [key for key in self.downloads if key[0] == slot]

    def _draw(self, span: Span) -> float:
        return self._random.uniform(*span)
