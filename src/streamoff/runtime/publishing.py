"""The producer's shell: transactions, the chunks they serve, and the tombstones they leave."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

import anyio
import xxhash

from streamoff.errors import (
    InvariantError,
    SourceChangedError,
    StreamoffError,
    UsageError,
)
from streamoff.machines import serving as s, transaction as m
from streamoff.machines.story import Story
from streamoff.machines.tombstones import Tombstones
from streamoff.runtime.endings import End, Endings, cause_of, end_of_outcome, failures, some
from streamoff.runtime.link import Deferred, Inbound
from streamoff.runtime.pool import Buffer
from streamoff.runtime.resources import MAX_WINDOW, Resources
from streamoff.runtime.sparing import Lines
from streamoff.runtime.threads import run_in_thread
from streamoff.runtime.timers import Timer, Timers
from streamoff.tensors.digests import chunk_digest
from streamoff.tensors.sources import Source
from streamoff.tensors.views import Views
from streamoff.types import (
    NO_RANGES,
    Address,
    Budgets,
    ByteRange,
    Capability,
    Outcome,
    OutcomeStatus,
    Ref,
    RefId,
    Slot,
    Verdict,
)
from streamoff.wire.frames import (
    Ack,
    AckOf,
    Cancel,
    Chunk,
    Confirm,
    Error,
    ErrorCode,
    FrameType,
    Hold,
    Open,
    Opened,
    Pull,
    Routed,
)
from streamoff.wire.limits import clip

__all__ = ["MAX_PULLS", "Publisher", "PublisherStatistics", "Transaction"]

logger = logging.getLogger("streamoff.publishing")

MAX_PULLS: Final = 2 * MAX_WINDOW
"""Pulls of one slot on one ref that may wait; a receiver that asks for more is refused."""

MAX_REMEMBERED: Final = 16_384
"""Slots of settled transactions, counted per ref, that are remembered; the oldest ref goes first."""

OutcomeCallback = Callable[[Outcome], object]


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """A snapshot of an endpoint's transactions; counters since it started.

    Args:
        open: Transactions that still wait for a receiver.
        settling: Those that only wait for chunks that a link is reading.
        completed: Outcomes.
        failed: Outcomes.
        aborted: Outcomes.
        ended: The same with the failed ones told apart.
        slots_failed: Slots that failed on some ref of a transaction that has ended.
        refused: Requests that were refused: strangers, wrong tickets, ranges and tensors that are not there.
        tombstones: Refs of settled transactions that still answer.
        streams: Receivers with an open ref, counted per ref.
        bytes_served: Handed to links.
    """

    open: int
    settling: int
    completed: int
    failed: int
    aborted: int
    ended: Mapping[End, int]
    slots_failed: int
    refused: int
    tombstones: int
    streams: int
    bytes_served: int


class Transaction:
    """One attempt to hand over 1..n refs; the owner's handle on it.

    Made by :meth:`Publisher.publish`. The sources are borrowed until it settles.
    """

    def __init__(
        self,
        publisher: Publisher,
        record: m.Transaction,
        sources: Mapping[RefId, Source],
        on_settled: tuple[OutcomeCallback, ...],
    ) -> None:
        self._publisher = publisher
        self.record = record
        self.sources = dict(sources)
        self.on_settled = list(on_settled)
        self.story = Story(f"transaction {record.id}")
        self.streams: dict[s.Origin, tuple[int, RefId]] = {}
        self.queued: set[_Serve] = set()
        self.waiting: Counter[tuple[int, RefId]] = Counter()
        self.rendering: set[_Serve] = set()
        self.settled = anyio.Event()
        self.timer: Timer | None = None
        self.job: str | None = None
        """Whose file it serves, if it does, for the log."""
        self.source_kept = False
        self.header_digests = {
            ref: xxhash.xxh3_128_digest(source.layout.header) for ref, source in sources.items()
        }

    @property
    def id(self) -> str:
        """Unique at the endpoint."""
        return self.record.id

    @property
    def outcome(self) -> Outcome | None:
        """The verdict, or None while it is open."""
        return self.record.outcome

    def refs(self, slot: int) -> tuple[Ref, ...]:
        """The refs as one receiver gets them: each slot has a ticket of its own."""
        return tuple(
            Ref(
                self._publisher.address,
                ref,
                self.record.slots[slot].ticket,
                self.sources[ref].layout.size,
            )
            for ref in self.record.refs
        )

    async def wait(self) -> Outcome:
        """Wait for the verdict; bounded by the budgets of the transaction.

        Returns:
            The outcome. Callbacks have run and the sources are released.

        Cancellation: leaves the transaction as it is.
        """
        await self.settled.wait()
        outcome = self.record.outcome
        if outcome is None:
            raise InvariantError("woken without an outcome", story=self.story.lines())
        return outcome

    def cancel(self, reason: str = "") -> None:
        """End it now: what is not final fails, the outcome is ``aborted``; no-op when it has settled."""
        why = f"deleted: {reason}" if reason else "deleted"
        self._publisher.abort(self, why)

    def decline(self, slot: int, reason: str) -> None:
        """Fail one slot whose receiver said, or is known, never to come."""
        self._publisher.decline(self, slot, reason)


class _Serve:
    """A chunk to be: fetched when the link can send it, void as soon as nobody wants it any more.

    It is counted in flight from the pull until it has been handed over or is void, once.
    """

    __slots__ = ("_publisher", "_tx", "effect", "slot")

    def __init__(
        self, publisher: Publisher, tx: Transaction, slot: int, effect: s.ServeRange
    ) -> None:
        self._publisher = publisher
        self._tx = tx
        self.slot = slot
        self.effect = effect

    @property
    def nbytes(self) -> int:
        """Bytes of the body; none once it is void."""
        return self.effect.range.nbytes if self in self._tx.queued else 0

    def queue(self) -> None:
        self._tx.queued.add(self)
        self._tx.waiting[self.slot, self.effect.ref] += 1

    def drop(self) -> None:
        self._end(served=False)

    def _end(self, *, served: bool) -> None:
        if self in self._tx.queued:
            self._tx.queued.discard(self)
            self._tx.waiting[self.slot, self.effect.ref] -= 1
            self._publisher.range_ended(self._tx, self.slot, self.effect, served=served)

    async def render(self) -> Inbound | None:
        if self not in self._tx.queued or not self._wanted():
            self.drop()
            return None
        self._tx.rendering.add(self)
        buffer: Buffer | None = None
        try:
            views, buffer = await self._publisher.fetch(self._tx, self.effect)
            chunk = self._chunk(views)
        except BaseException as error:
            if buffer is not None:
                buffer.release()
            self.drop()
            if not isinstance(error, Exception):
                raise
            self._publisher.source_failed(self._tx, error)
            return None
        finally:
            self._tx.rendering.discard(self)
        self._end(served=True)
        return Inbound(chunk) if buffer is None else Inbound(chunk, buffer.release, buffer)

    def _wanted(self) -> bool:
        serving = self._tx.record.servings[self.slot, self.effect.ref]
        return not serving.final and self.effect.origin in self._tx.streams

    def _chunk(self, views: Views) -> Chunk:
        return Chunk(
            to=self.effect.origin.address,
            sender=self._publisher.address,
            stream=self.effect.origin.stream,
            start=self.effect.range.start,
            stop=self.effect.range.stop,
            digest=chunk_digest(views, self.effect.range.start),
            body=views,
        )


class Publisher:
    """All transactions of one endpoint.

    Args:
        address: Whose they are.
        capabilities: What this end names.
        timers: The endpoint's clock.
        send: Queues a frame on the way to its address; loses it if there is none.
        serve: Queues a chunk on the way to an address; drops it if there is none.
        resources: Of this event loop.
        lines: The endpoint's log.
        tombstones: Settled transactions that still answer.
    """

    def __init__(
        self,
        *,
        address: Address,
        capabilities: frozenset[Capability],
        timers: Timers,
        send: Callable[[Routed], None],
        serve: Callable[[Address, Deferred], None],
        resources: Resources,
        lines: Lines,
        tombstones: Tombstones[RefId, m.Transaction] | None = None,
    ) -> None:
        self.address = address
        self._capabilities = capabilities
        self._timers = timers
        self._now = timers.now
        self._send = send
        self._serve = serve
        self._resources = resources
        self._live: dict[RefId, Transaction] = {}
        self._streams: dict[s.Origin, Transaction] = {}
        self._buried = tombstones if tombstones is not None else Tombstones[RefId, m.Transaction]()
        self._prefix = secrets.token_hex(4)
        self._number = count(1)
        self._remembered = 0
        self._closed = False
        self._lines = lines
        self._endings = Endings("transaction", logger, address, lines)
        self._statuses = Counter[OutcomeStatus]()
        self._slots_failed = 0
        self._refused = 0
        self._bytes_served = 0

    # --- for the owner ----------------------------------------------------------------------------

    def publish(
        self,
        sources: Iterable[Source],
        slots: Iterable[Slot],
        *,
        budgets: Budgets,
        min_receivers: int | None = None,
        on_settled: tuple[OutcomeCallback, ...] = (),
    ) -> Transaction:
        """Offer payloads to receivers.

        Args:
            sources: One ref each; borrowed, and closed when the transaction settles.
            slots: The receivers' places.
            budgets: The producer's side counts.
            min_receivers: For the quorum view of the outcome.
            on_settled: Called with the outcome, in order, before the sources are closed.

        Raises:
            UsageError: See :func:`streamoff.machines.transaction.begin`, or the endpoint is closing. Nothing
                was offered.
        """
        if self._closed:
            raise UsageError("the endpoint is closing", got=self.address)
        offered = {self._name("r"): source for source in sources}
        now = self._now()
        record = m.begin(
            id=self._name("t"),
            now=now,
            slots=slots,
            refs=offered,
            budgets=budgets,
            min_receivers=min_receivers,
        )
        tx = Transaction(self, record, offered, on_settled)
        tx.timer = self._timers.timer(lambda: self._step(tx, m.Ticked(self._now())))
        tx.timer.at(m.next_tick(record))
        self._live.update(dict.fromkeys(offered, tx))
        return tx

    def _name(self, kind: str) -> str:
        """A name that no endpoint gives twice, also after a restart; the secret is the ticket."""
        return f"{kind}{self._prefix}{next(self._number):x}"

    def close(self, reason: str) -> None:
        """End every transaction; nothing is offered any more."""
        self._closed = True
        for tx in self.open:
            tx.cancel(reason)

    async def settled(self) -> None:
        """Wait until every transaction has settled; the caller bounds it."""
        for tx in self.open:
            await tx.settled.wait()

    def give_up(self, reason: str) -> None:
        """End every transaction and wait for no chunk that is being read: the clock for that is about to stop."""
        self.close(reason)
        for tx in self.open:
            self._step(tx, m.SettleExpired(self._now()))

    def abort(self, tx: Transaction, reason: str) -> None:
        """End a transaction; no-op when it has settled."""
        self._step(tx, m.Aborted(self._now(), reason))

    def decline(self, tx: Transaction, slot: int, reason: str) -> None:
        """Fail one slot."""
        address = tx.record.slots[slot].address or self.address
        self._step(tx, m.CancelRequested(self._now(), slot, address, clip(reason)))

    def peer_restarted(self, address: Address) -> None:
        """A new instance of an address is there: end the slots of the old one."""
        for tx in self.open:
            for index in range(len(tx.record.slots)):
                if any(one.bound == address for one in tx.record.of_slot(index)):
                    self.decline(tx, index, "the receiver restarted")

    @property
    def open(self) -> tuple[Transaction, ...]:
        """Transactions that have not settled."""
        return tuple(dict.fromkeys(self._live.values()))

    def statistics(self) -> PublisherStatistics:
        """A snapshot."""
        states = [tx.record.state for tx in self.open]
        return PublisherStatistics(
            open=states.count(m.TransactionState.OPEN),
            settling=states.count(m.TransactionState.SETTLING),
            completed=self._statuses[OutcomeStatus.COMPLETED],
            failed=self._statuses[OutcomeStatus.FAILED],
            aborted=self._statuses[OutcomeStatus.ABORTED],
            ended=self._endings.snapshot(),
            slots_failed=self._slots_failed,
            refused=self._refused,
            tombstones=len(self._buried),
            streams=len(self._streams),
            bytes_served=self._bytes_served,
        )

    # --- frames -----------------------------------------------------------------------------------

    def on_open(self, frame: Open) -> None:
        """A receiver presents a ticket."""
        record = self._record(frame.ref)
        if record is None:
            self._refuse(frame, frame.stream, ErrorCode.UNKNOWN_REF, "no such ref")
            return
        slot = m.admit(record, frame.ticket, frame.sender)
        if slot is None:
            self._refuse(frame, frame.stream, ErrorCode.BAD_TICKET, "not your ticket")
            return
        origin = s.Origin(frame.sender, frame.stream)
        wanted, first = NO_RANGES, None
        tx = self._live.get(frame.ref)
        if tx is not None:
            layout = tx.sources[frame.ref].layout
            try:
                wanted = layout.ranges(frame.names).add(ByteRange(0, layout.data_start))
            except KeyError as error:
                self._refuse(frame, frame.stream, ErrorCode.UNKNOWN_TENSOR, f"no tensor {error}")
                return
            self._bind(tx, origin, slot, frame.ref)
            if 0 < frame.first <= self._resources.pool.size:
                first = ByteRange(0, min(frame.first, layout.size))
        event = m.OpenRequested(
            self._now(),
            slot,
            frame.ref,
            origin,
            secrets.token_bytes(8),
            wanted,
            frame.capabilities & self._capabilities,
            first,
        )
        self._apply(frame.ref, event)

    def on_pull(self, frame: Pull) -> None:
        """A bound receiver asks for a range."""
        found = self._stream(frame, frame.stream)
        if found is None:
            return
        tx, origin, slot, ref = found
        size, most = tx.sources[ref].layout.size, self._resources.pool.size
        if frame.stop > size or frame.stop - frame.start > most:
            what = f"outside 0 to {size}, or above {most} bytes"
            self._refuse(frame, frame.stream, ErrorCode.BAD_RANGE, what)
            return
        if tx.waiting[slot, ref] >= MAX_PULLS:
            self._refuse(frame, frame.stream, ErrorCode.LIMIT, f"more than {MAX_PULLS} pulls")
            return
        asked = ByteRange(frame.start, frame.stop)
        self._step(tx, m.PullRequested(self._now(), slot, ref, origin, asked))

    def on_hold(self, frame: Hold) -> None:
        """A bound receiver waits for itself."""
        found = self._stream(frame, frame.stream)
        if found is not None:
            tx, _, slot, ref = found
            self._step(tx, m.HoldRequested(self._now(), slot, ref, frame.seconds))

    def on_confirm(self, frame: Confirm) -> None:
        """A receiver's last word; answered also when the transaction has settled."""
        record = self._record(frame.ref)
        slot = None if record is None else m.admit(record, frame.ticket, frame.sender)
        if slot is None:
            self._refuse(frame, frame.stream, ErrorCode.UNKNOWN_REF, "no such ref")
            return
        origin = s.Origin(frame.sender, frame.stream)
        event = m.ConfirmRequested(
            self._now(), slot, frame.ref, origin, frame.ok, frame.nonce, frame.reason
        )
        self._apply(frame.ref, event)

    def on_cancel(self, frame: Cancel) -> None:
        """A receiver gives up, or declines before it began."""
        if Capability.CANCEL not in self._capabilities:
            return
        record = self._record(frame.ref)
        slot = None if record is None else m.admit(record, frame.ticket, frame.sender)
        if slot is not None:
            event = m.CancelRequested(self._now(), slot, frame.sender, frame.reason)
            self._apply(frame.ref, event)

    # --- chunks -----------------------------------------------------------------------------------

    async def fetch(self, tx: Transaction, effect: s.ServeRange) -> tuple[Views, Buffer | None]:
        """Get the bytes of a range: views of the source's own memory, or a pool buffer on loan."""
        source, asked = tx.sources[effect.ref], effect.range
        if not source.blocking:
            views = source.views(asked.start, asked.stop)
            if views is not None:
                return views, None
        async with self._resources.reading:  # a turn first, then a buffer: those in line hold none
            buffer = await self._resources.pool.borrow(asked.nbytes)
            try:
                view = buffer.view(asked.nbytes)
                if source.blocking:
                    await run_in_thread(_read, source, asked, view, limiter=self._resources.in_turn)
                else:
                    source.read_into(asked.start, view)
            except BaseException:
                buffer.release()
                raise
        return (view,), buffer

    def range_ended(
        self, tx: Transaction, slot: int, effect: s.ServeRange, *, served: bool
    ) -> None:
        """A queued range left its queue."""
        if served:
            self._bytes_served += effect.range.nbytes
        now = self._now()
        self._step(tx, m.RangeEnded(now, slot, effect.ref, effect.range, served))

    def source_failed(self, tx: Transaction, error: Exception) -> None:
        """The bytes cannot be had: end the transaction with the cause."""
        kind = "source_changed" if isinstance(error, SourceChangedError) else "source_failed"
        what = error.what if isinstance(error, StreamoffError) else str(error)
        self.abort(tx, clip(f"{kind}: {what}", 256))

    # --- the shell --------------------------------------------------------------------------------

    def _record(self, ref: RefId) -> m.Transaction | None:
        """The transaction of a ref, open or buried."""
        tx = self._live.get(ref)
        return self._buried.get(self._now(), ref) if tx is None else tx.record

    def _apply(self, ref: RefId, event: m.Event) -> None:
        """Step the transaction of a ref; a buried one only answers."""
        tx = self._live.get(ref)
        if tx is not None:
            self._step(tx, event)
        elif (buried := self._buried.get(self._now(), ref)) is not None:
            _, effects = m.step(buried, event)
            for effect in effects:
                self._answer(effect)

    def _bind(self, tx: Transaction, origin: s.Origin, slot: int, ref: RefId) -> None:
        """Note the stream; an older one of the same slot and ref is void, with all it has queued."""
        for old in [one for one, place in tx.streams.items() if place == (slot, ref)]:
            self._unbind(tx, old)
            for serve in [one for one in tx.queued - tx.rendering if one.effect.origin == old]:
                serve.drop()
        known = self._streams.get(origin)
        if known is not None:
            self._unbind(known, origin)
        tx.streams[origin] = (slot, ref)
        self._streams[origin] = tx

    def _unbind(self, tx: Transaction, origin: s.Origin) -> None:
        tx.streams.pop(origin, None)
        self._streams.pop(origin, None)

    def _stream(
        self, frame: Pull | Hold, stream: int
    ) -> tuple[Transaction, s.Origin, int, RefId] | None:
        origin = s.Origin(frame.sender, stream)
        tx = self._streams.get(origin)
        if tx is None:
            self._refuse(frame, stream, ErrorCode.UNKNOWN_STREAM, "open it first")
            return None
        slot, ref = tx.streams[origin]
        return tx, origin, slot, ref

    def _refuse(self, frame: Routed, stream: int, code: ErrorCode, detail: str) -> None:
        self._refused += 1
        text = "%s refused %s of %s: %s: %s"
        facts = (self.address, type(frame).__name__.lower(), frame.sender, code.value, detail)
        self._lines.tell(logger, logging.INFO, "request refused", text, *facts)
        self._send(
            Error(
                to=frame.sender,
                sender=self.address,
                of=type(frame).type,
                id=stream,
                code=code,
                detail=clip(detail),
            )
        )

    def _step(self, tx: Transaction, event: m.Event) -> None:
        before = tx.record
        try:
            tx.record, effects = m.step(before, event)
        except StreamoffError as error:
            error.story = tx.story.lines()
            raise error.located(transaction=tx.id) from None
        after = tx.record
        tx.story.tell(event.now, event, before.state, after.state, effects)
        for effect in effects:
            self._carry_out(tx, effect)
        if isinstance(event, (m.PullRequested, m.RangeEnded)) and before.state is after.state:
            return  # per chunk: clocks only move later, and nothing becomes void
        self._void(tx)
        self._wind(
            tx, event.now, again=isinstance(event, m.Ticked) or before.state is not after.state
        )

    @staticmethod
    def _wind(tx: Transaction, now: float, *, again: bool) -> None:
        """Set the clock: looking at every slot only ``again`` and again, else for what moved just now."""
        if tx.timer is None:
            return
        if again:
            tx.timer.at(m.next_tick(tx.record))
        elif tx.record.state is m.TransactionState.OPEN:
            tx.timer.at(min(tx.timer.due, now + tx.record.budgets.idle))

    @staticmethod
    def _void(tx: Transaction) -> None:
        """A slot failed: what is queued for it and not being fetched is void at once."""
        for serve in tx.queued - tx.rendering:
            if tx.record.servings[serve.slot, serve.effect.ref].final:
                serve.drop()

    def _carry_out(self, tx: Transaction, effect: m.TransactionEffect) -> None:
        match effect:
            case s.AnswerOpen():
                self._answer_open(tx, effect)
            case s.ServeRange():
                serve = _Serve(self, tx, tx.streams[effect.origin][0], effect)
                serve.queue()
                self._serve(effect.origin.address, serve)
            case s.AckConfirm() | s.AnswerGone():
                self._answer(effect)
            case m.TellCallbacks():
                self._tell(tx, effect.outcome)
            case m.ReleaseSource():
                self._release(tx)
            case m.RecordOutcome():
                self._bury(tx)
            case m.WakeWaiters():
                tx.settled.set()
                self._tell_end(tx, effect.outcome)

    def _answer_open(self, tx: Transaction, effect: s.AnswerOpen) -> None:
        layout = tx.sources[effect.ref].layout
        self._send(
            Opened(
                to=effect.origin.address,
                sender=self.address,
                stream=effect.origin.stream,
                size=layout.size,
                header_bytes=layout.data_start,
                header_digest=tx.header_digests[effect.ref],
                nonce=effect.nonce,
                capabilities=self._capabilities,
                first=0 if effect.first is None else effect.first.stop,
            )
        )

    def _answer(self, effect: m.TransactionEffect) -> None:
        """Tell a receiver how its slot ended: all that a buried transaction does."""
        match effect:
            case s.AckConfirm():
                self._ack(effect)
            case s.AnswerGone():
                self._answer_gone(effect)
            case _:
                raise InvariantError("a tombstone only answers", got=type(effect).__name__)

    def _ack(self, effect: s.AckConfirm) -> None:
        self._send(
            Ack(
                to=effect.origin.address,
                sender=self.address,
                of=AckOf.CONFIRM,
                id=effect.origin.stream,
                status=effect.verdict.verdict.value,
                reason=clip(effect.verdict.reason),
            )
        )

    def _answer_gone(self, effect: s.AnswerGone) -> None:
        verdict = effect.verdict
        why = f"{verdict.verdict.value} {verdict.reason}".strip()
        self._error(effect.origin, ErrorCode.GONE, f"the transfer ended: {why}")

    def _error(self, origin: s.Origin, code: ErrorCode, detail: str) -> None:
        self._send(
            Error(
                to=origin.address,
                sender=self.address,
                of=FrameType.PULL,
                id=origin.stream,
                code=code,
                detail=clip(detail),
            )
        )

    def _tell(self, tx: Transaction, outcome: Outcome) -> None:
        """Tell receivers that are still pulling, then whoever asked; nobody's failure skips another."""
        for origin, (slot, ref) in tx.streams.items():
            verdict = tx.record.servings[slot, ref].verdict
            if verdict.verdict is Verdict.FAILED:
                self._error(origin, _code(verdict.reason), verdict.reason)
        for callback in tx.on_settled:
            try:
                callback(outcome)
            except Exception as error:  # noqa: BLE001 - nobody's failure skips another
                self._fault("callback", "%s: a callback of %s failed", tx, error)

    def _release(self, tx: Transaction) -> None:
        for source in tx.sources.values():
            try:
                source.close()
            except Exception as error:  # noqa: BLE001 - nobody's failure skips another
                tx.source_kept = True
                self._fault("source", "%s: a source of %s failed to close", tx, error)

    def _fault(self, kind: str, text: str, tx: Transaction, error: Exception) -> None:
        self._lines.tell(logger, logging.ERROR, kind, text, self.address, tx.id, exc_info=error)

    def _tell_end(self, tx: Transaction, outcome: Outcome) -> None:
        self._statuses[outcome.status] += 1
        self._slots_failed += len(failures(outcome))
        served = sum(end.nbytes for ends in outcome.slots.values() for end in ends.values())
        completed = outcome.status is OutcomeStatus.COMPLETED
        self._endings(
            end_of_outcome(outcome),
            seconds=outcome.settled_at - tx.record.created,
            where={
                "job": tx.job,
                "site": some(outcome.slots),
                "ref": some(tx.record.refs),
            },
            cause="" if completed else cause_of(outcome),
            cleaned=f"{served} bytes served; {_let_go(tx)}",
            story=() if completed else tx.story.lines(),
        )

    def _bury(self, tx: Transaction) -> None:
        for origin in tuple(tx.streams):
            self._unbind(tx, origin)
        now, epitaph = self._now(), m.epitaph(tx.record)
        for ref in tx.record.refs:
            self._live.pop(ref, None)
            self._remembered += len(tx.record.slots)
            self._forget(self._buried.bury(now, ref, epitaph), now)
        while self._remembered > MAX_REMEMBERED and len(self._buried) > 1:
            self._forget(self._buried.drop_oldest(), now)
        if tx.timer is not None:
            tx.timer.cancel()
        tx.sources.clear()
        tx.on_settled.clear()

    def _forget(self, forgotten: tuple[m.Transaction, ...], now: float) -> None:
        for record in forgotten:
            self._remembered -= len(record.slots)
            m.step(record, m.Forgotten(now))


def _let_go(tx: Transaction) -> str:
    return "a source failed to close" if tx.source_kept else "the source was let go"


def _read(source: Source, asked: ByteRange, into: memoryview) -> None:
    source.check()
    source.read_into(asked.start, into)


def _code(reason: str) -> ErrorCode:
    for code in (ErrorCode.SOURCE_CHANGED, ErrorCode.SOURCE_FAILED):
        if reason.startswith(code.value):
            return code
    return ErrorCode.GONE
