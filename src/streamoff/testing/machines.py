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

import itertools
import math
from collections.abc import Callable, Sequence

from streamoff.errors import (
    GoneError,
    InvariantError,
    NoSpaceError,
    PeerRefusedError,
    SourceFailedError,
    StreamoffError,
)
from streamoff.machines import download as d, serving as s, transaction as t
from streamoff.machines.download import Download
from streamoff.machines.records import replace
from streamoff.testing.lossy import CALM, ROUGH, Faults, LossyNetwork
from streamoff.testing.receiving import Payload, Receiving
from streamoff.testing.witness import Key, Witness
from streamoff.types import (
    MIB,
    Address,
    Budgets,
    ByteRange,
    Capability,
    Outcome,
    Ref,
    Slot,
    SlotVerdict,
)

__all__ = ["CALM", "ROUGH", "Faults", "Key", "MachinePair"]


class MachinePair:
    """One transaction with its downloads, and everything between them.

    Args:
        receivers: Slots of the transaction: addresses, or a number of them, then ``site-0`` and so on.
        refs: Refs, ``ref-0`` and so on; every receiver pulls every ref.
        nbytes: Payload size; its first 64 bytes are the header.
        chunk: Bytes of one pull.
        window: Pulls in flight per download.
        eager: Whether receivers ask for the first bytes along with the open.
        budgets: Of both ends.
        capabilities: Of both ends.
        faults: What goes wrong.
        seed: Makes it go wrong the same way again.
        min_receivers: For the quorum view.
        start: Whether to start every download at once; otherwise see :meth:`start`.
        network: To share with others; by default one of its own, from ``faults`` and ``seed``.
        source: Address of the producer.
    """

    def __init__(
        self,
        *,
        receivers: int | Sequence[str] = 1,
        refs: int = 1,
        nbytes: int = 24 * MIB,
        chunk: int = 4 * MIB,
        window: int = 4,
        eager: bool = False,
        budgets: Budgets | None = None,
        capabilities: frozenset[Capability] = frozenset(Capability),
        faults: Faults = CALM,
        seed: int = 0,
        min_receivers: int | None = None,
        start: bool = True,
        network: LossyNetwork | None = None,
        source: str = "source",
    ) -> None:
        self.network = network or LossyNetwork(faults=faults, seed=seed)
        self.budgets = budgets or Budgets()
        self.source = Address(source)
        self.source_alive = True
        self.reborn = False
        """Whether a new instance of the source is there, which knows nothing of the transaction."""
        self.told: list[t.TransactionEffect] = []
        self.on_report: Callable[[Key, StreamoffError | None], None] = lambda _key, _error: None
        """Called with what the caller of a download is told."""
        self.on_settled: Callable[[Outcome], None] = lambda _outcome: None
        """Called with the outcome."""
        names = range(receivers) if isinstance(receivers, int) else receivers
        self.receivers = tuple(
            Address(f"site-{name}" if isinstance(name, int) else name) for name in names
        )
        self._capabilities = capabilities
        self._payload = Payload(nbytes, chunk)
        self._forgotten: set[str] = set()
        self._nonces = (number.to_bytes(8, "big") for number in itertools.count(1))
        refs_named = [f"ref-{index}" for index in range(refs)]
        slots = [Slot(self.network.random.randbytes(16)) for _ in self.receivers]
        self.transaction = t.begin(
            id="pair",
            now=self.network.now,
            slots=slots,
            refs=refs_named,
            budgets=self.budgets,
            min_receivers=min_receivers,
        )
        self._due = t.next_tick(self.transaction)
        self.downloads: dict[Key, Download] = {
            (index, name): self._fresh(slot, name)
            for index, slot in enumerate(slots)
            for name in refs_named
        }
        self.witness = Witness(
            self.downloads, self.budgets, landing=self.faults.landing[1], began=self.now
        )
        self._receivers = {
            key: Receiving(
                key,
                self.downloads,
                address=self.receivers[key[0]],
                network=self.network,
                witness=self.witness,
                payload=self._payload,
                window=window,
                eager=eager,
                ask=self._asker(key[0]),
                on_report=self._report,
            )
            for key in self.downloads
        }
        self.network.join(self)
        if start:
            for key in self.downloads:
                self.start(key)

    def _fresh(self, slot: Slot, ref: str) -> Download:
        wanted = Ref(self.source, ref, slot.ticket, self._payload.nbytes)
        return Download(wanted, self.budgets, self._capabilities)

    # --- looking --------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.network.now

    @property
    def faults(self) -> Faults:
        """What goes wrong."""
        return self.network.faults

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

    def arrived(self, key: Key) -> bool:
        """Whether the whole payload of a download is on the receiver's disk."""
        return not self._receivers[key].disk.missing(self._payload.whole)

    # --- acting ---------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at an instant; what the link delivers at that instant comes in its order."""
        self.network.at(when, action)

    def start(self, key: Key) -> None:
        """Start a download."""
        self._receivers[key].step(d.Started(self.now))

    def start_again(self, key: Key) -> None:
        """The caller tries a download that ended without the payload once more, with the same ticket."""
        if self._receivers[key].alive:
            self._receivers[key].begin_again(self._fresh(self.transaction.slots[key[0]], key[1]))
            self.start(key)

    def cancel(self, slot: int, reason: str = "cancelled") -> None:
        """The receiver gives up every one of its downloads."""
        for key in self._of(slot):
            self._receivers[key].step(d.CancelRequested(self.now, reason))

    def hold(self, key: Key, seconds: float) -> None:
        """The receiver must wait for its own disk, quota or turn."""
        if self.downloads[key].state is not d.DownloadState.IDLE:
            self._receivers[key].step(d.HoldAsked(self.now, seconds))

    def fail_landing(self, key: Key) -> None:
        """The receiver's disk is full, if anything is being landed now."""
        landing = {d.DownloadState.OPENING, d.DownloadState.STREAMING, d.DownloadState.BACKOFF}
        if self.downloads[key].state in landing:
            self._receivers[key].step(d.LandingFailed(self.now, NoSpaceError("disk full")))

    def refuse(self, slot: int, error: StreamoffError) -> None:
        """The source is known to be dead: by a notice, or because a new instance of it is there."""
        for key in self._of(slot):
            self._receivers[key].step(d.Noticed(self.now, error))

    def decline(self, slot: int, reason: str) -> None:
        """The producer knows that a receiver will not come, or not come back."""
        event = t.CancelRequested(self.now, slot, self.receivers[slot], reason)
        self._producer_step(event)

    def abort(self, reason: str = "deleted") -> None:
        """The producer ends the transaction."""
        self._producer_step(t.Aborted(self.now, reason))

    def forget(self, ref: str) -> None:
        """The place or the time of a ref's tombstone ran out."""
        self._forgotten.add(ref)
        self._producer_step(t.Forgotten(self.now))

    def kill_source(self, reason: str = "killed") -> None:
        """The producer dies without a word; its owner sends every receiver a notice."""
        self.source_alive = False
        error = SourceFailedError(reason)
        for key in self.downloads:
            self.network.after(self.faults.latency, self._noticer(key, error))

    def turn_down(self, slot: int, reason: str) -> None:
        """The receiver says that it will not pull."""
        self._asker(slot)(t.CancelRequested(self.now, slot, self.receivers[slot], reason))

    def kill_receiver(self, slot: int) -> None:
        """A receiver dies without a word: its downloads do nothing any more."""
        for key in self._of(slot):
            self._receivers[key].die()

    def cut(self, slot: int, seconds: float = math.inf) -> None:
        """Break a receiver's link; it comes back after ``seconds``, or never."""
        self.network.cut(self.source, self.receivers[slot], seconds)

    # --- time -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do what comes next: a message or action, or else the clocks that are due.

        Returns:
            False if nothing will ever happen again.

        Raises:
            InvariantError: Something that must hold does not.
        """
        return self.network.step()

    def run(self, *, until: float = math.inf, steps: int = 200_000) -> None:
        """Step until ``until``, or until nothing will ever happen again; then look at both ends.

        Raises:
            InvariantError: An end that never comes, or ends that contradict each other.
        """
        for _ in range(steps):
            if until < math.inf and self.network.next_due() > until:
                self.network.now = max(self.now, until)
                return
            if not self.step():
                self.look_at_the_end()
                return
        raise InvariantError(
            "a story that does not end", got=steps, story=self.witness.story.lines()
        )

    def look_at_the_end(self) -> None:
        """Compare both ends once nothing will happen any more.

        Raises:
            InvariantError: One of them has not ended, or they contradict each other.
        """
        for key, record in self.downloads.items():
            if not self._receivers[key].alive:
                continue
            verdict = self.verdict(key).verdict if self.source_alive else None
            arrived = self.arrived(key)
            self.witness.download_ended(key, record, self.reports(key), verdict, arrived)
        if self.source_alive:
            self.witness.transaction_ended(self.transaction, tuple(self.told))

    def next_due(self) -> float | None:
        """When a clock of either end is due; None: none runs."""
        dues = [receiver.due for receiver in self._receivers.values()]
        if self.source_alive:
            dues.append(self._due)
        return min((due for due in dues if due is not None), default=None)

    def tick(self) -> None:
        """Let the clocks of both ends do what is due."""
        if self._due is not None and self._due <= self.now:
            self._producer_step(t.Ticked(self.now))
        for receiver in self._receivers.values():
            receiver.tick()

    def link_lost(self, one: str, other: str) -> None:
        """The receivers at a link learn that it is gone."""
        self._tell_link(one, other, lambda: d.LinkLost(self.now))

    def link_restored(self, one: str, other: str) -> None:
        """The receivers at a link learn that it is back."""
        self._tell_link(one, other, lambda: d.LinkRestored(self.now))

    def _tell_link(self, one: str, other: str, event: Callable[[], d.DownloadEvent]) -> None:
        for key, receiver in self._receivers.items():
            if {one, other} == {self.source, self.receivers[key[0]]}:
                receiver.step(event())

    # --- the producing end ----------------------------------------------------------------------

    def _producer_step(self, event: t.Event) -> None:
        if not self.source_alive:
            return
        before = self.transaction
        self.transaction, effects = t.step(before, event)
        self._due = t.next_tick(self.transaction)
        self.witness.served(event, before, self.transaction, effects, self.downloads)
        for effect in effects:
            self._produce(effect)

    def _produce(self, effect: t.TransactionEffect) -> None:
        match effect:
            case s.AnswerOpen(ref=ref, origin=origin, nonce=nonce):
                answer = d.Accepted(0.0, nonce, self._payload.header, self._capabilities)
                self._answer(ref, origin, answer)
            case s.ServeRange(ref=ref, origin=origin):
                self._read(ref, origin, effect.range)
            case s.AckConfirm(ref=ref, origin=origin):
                self._answer(ref, origin, d.ConfirmAcked(0.0))
            case s.AnswerGone(ref=ref, origin=origin, verdict=verdict):
                gone = GoneError("the ref is settled", got=verdict.verdict, ref=ref)
                self._answer(ref, origin, d.Refused(0.0, gone))
            case t.RecordOutcome(outcome=outcome):
                self.told.append(effect)
                self.on_settled(outcome)
            case _:
                self.told.append(effect)

    def _read(self, ref: str, origin: s.Origin, span: ByteRange) -> None:
        """The link reads a chunk; if it broke or the slot ended meanwhile, the chunk is skipped."""
        slot = self.receivers.index(origin.address)
        key, receiver = (slot, ref), self._receivers[slot, ref]
        link = self.network.link(self.source, origin.address)
        life = link.life
        slow = self.network.strikes("wedge", self.faults.wedge)
        seconds = self.faults.wedged if slow else self.network.draw(self.faults.reading)

        def done() -> None:
            final = self.transaction.servings[key].final
            served = link.up and link.life == life and not final and self.source_alive
            if served:
                arrive = lambda: receiver.arrive(span, origin.stream)  # noqa: E731 - it reads in order
                self.network.send(self.source, origin.address, arrive)
            self._producer_step(t.RangeEnded(self.now, *key, span, served))

        self.at(self.now + seconds, done)

    # --- the link -------------------------------------------------------------------------------

    def _report(self, key: Key, error: StreamoffError | None) -> None:
        self.on_report(key, error)

    def _asker(self, slot: int) -> Callable[[t.Event], None]:
        return lambda event: self.network.send(
            self.receivers[slot], self.source, lambda: self._hear(event)
        )

    def _hear(self, event: t.Event) -> None:
        ref = getattr(event, "ref", self.transaction.refs[0])
        if self.reborn or ref in self._forgotten:
            if isinstance(event, (t.OpenRequested, t.PullRequested, t.ConfirmRequested)):
                unknown = PeerRefusedError("no such ref", ref=ref)
                self._answer(ref, event.origin, d.Refused(0.0, unknown))
            return
        stamped = replace(event, now=self.now)
        if isinstance(stamped, t.OpenRequested):
            stamped = replace(stamped, nonce=next(self._nonces))
        self._producer_step(stamped)

    def _answer(self, ref: str, origin: s.Origin, event: d.DownloadEvent) -> None:
        receiver = self._receivers[self.receivers.index(origin.address), ref]
        self.network.send(
            self.source,
            origin.address,
            lambda: receiver.answer(replace(event, now=self.now), origin.stream),
        )

    def _noticer(self, key: Key, error: StreamoffError) -> Callable[[], None]:
        return lambda: self._receivers[key].step(d.Noticed(self.now, error))

    def _of(self, slot: int) -> list[Key]:
        return [key for key in self.downloads if key[0] == slot]
