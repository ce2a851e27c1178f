"""The receiver's shell: one transfer, from the first open to the confirmation.

A transfer is a machine record, a landing and one task. Frames, timers and link changes step the record at
once; what blocks (checking a header, landing a chunk on a disk, finishing) happens in the task, one thread hop
per chunk, and small payloads in one hop in all. Where nothing blocks, a chunk is landed while it comes.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar, TypeVarTuple, Unpack

import anyio
import xxhash

from streamoff.errors import (
    GoneError,
    IntegrityError,
    InvariantError,
    LandingError,
    LimitError,
    NoSpaceError,
    PeerRefusedError,
    QuotaExceededError,
    SourceChangedError,
    SourceFailedError,
    StreamoffError,
    UsageError,
)
from streamoff.machines import download as m
from streamoff.machines.download import DOWNLOAD, Download, DownloadState
from streamoff.machines.story import Story
from streamoff.runtime.link import Inbound, Placement
from streamoff.runtime.pace import FIRST_BYTES, RELAYED_BYTES, Pace
from streamoff.runtime.resources import Resources
from streamoff.runtime.signal import Signal
from streamoff.runtime.space import SpaceQueue, Turn
from streamoff.runtime.sparing import Lines
from streamoff.runtime.threads import run_in_thread
from streamoff.runtime.timers import Timer, Timers
from streamoff.tensors.digests import chunk_digest
from streamoff.tensors.landing import Landing
from streamoff.tensors.layout import Layout, parse
from streamoff.tensors.places import Place
from streamoff.tensors.state import State
from streamoff.types import CHUNK_BYTES, Address, Budgets, ByteRange, Capability, RangeSet, Ref
from streamoff.wire.frames import (
    Cancel,
    Chunk,
    Confirm,
    Error,
    ErrorCode,
    Hold,
    Open,
    Opened,
    Pull,
    Routed,
)
from streamoff.wire.limits import DEFAULT_LIMITS, clip

__all__ = ["Progress", "Terms", "Transfer"]

logger = logging.getLogger("streamoff.downloading")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PROBE_SECONDS: Final = 1.0
"""How often an endpoint behind a relay is asked for again while the relay cannot reach it."""
INLINE_BYTES: Final = 64 * 1024
"""A payload for memory up to this size is landed on the event loop: a thread hop would take longer."""
GAP_BYTES: Final = 64 * 1024
"""Unwanted bytes that are pulled along rather than asking twice."""

Progress = Callable[[int, int], object]
"""Called with (bytes landed, bytes wanted) after every landed range; must not block."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the receiver of one transfer wants.

    Args:
        landing: Makes the landing, in a worker thread, once the header has been accepted; charges quota.
        names: The tensors wanted; None for all.
        budgets: The receiver's side counts.
        accept: Checks the layout before anything is allocated, in a worker thread; raises to refuse.
        progress: Told about landed ranges.
        in_memory: Whether the landing only copies in memory: a small payload then needs no thread.
        space: Where it waits if there is no room for the landing; None: it fails.
    """

    landing: Callable[[Layout], Landing]
    names: Collection[str] | None = None
    budgets: Budgets = Budgets()  # noqa: RUF009 - frozen
    accept: Callable[[Layout], object] | None = None
    progress: Progress | None = None
    in_memory: bool = False
    space: SpaceQueue | None = None


class Wire:
    """The endpoint's half of its transfers: stream ids and the way to the links.

    Args:
        address: The endpoint's own.
        send: Queues a routed frame; loses it if there is no way.
        can_reach: Whether there is a way to an address now.
        lines: The endpoint's log.
    """

    def __init__(
        self,
        address: Address,
        send: Callable[[Routed], None],
        can_reach: Callable[[Address], bool],
        lines: Lines,
    ) -> None:
        self.address = address
        self.send = send
        self.can_reach = can_reach
        self.lines = lines
        self.streams: dict[int, Transfer] = {}

    def new_stream(self, transfer: Transfer) -> int:
        """A stream id of the transfer's next attempt; the former one is void.

        Only who is on the way to the source can know it, so nobody else can end the transfer.
        """
        self.streams.pop(transfer.stream, None)
        stream = secrets.randbits(62)
        self.streams[stream] = transfer
        return stream

    def forget(self, transfer: Transfer) -> None:
        """The transfer has ended."""
        self.streams.pop(transfer.stream, None)


class Transfer:
    """One download on its way; started by :meth:`run` in a task of its owner's nursery.

    Args:
        ref: What is pulled.
        terms: What is wanted.
        mine: What this end can do.
        theirs: What the link already knows of the source; None if it is behind others, and is asked for less
            at a time.
        resources: Of this event loop.
        timers: The endpoint's clock.
        wire: The endpoint's half: queues frames and knows stream ids.
        job: Whose it is, for errors and the log.
        chunk: Bytes of the largest chunk that the link carries.
        by_reference: Whether it brings chunks without memory of this end waiting for them.
    """

    def __init__(
        self,
        ref: Ref,
        terms: Terms,
        *,
        mine: frozenset[Capability],
        theirs: frozenset[Capability] | None,
        resources: Resources,
        timers: Timers,
        wire: Wire,
        chunk: int = CHUNK_BYTES,
        by_reference: bool = True,
        job: str | None = None,
    ) -> None:
        self.ref = ref
        self.job = job
        self.terms = terms
        self.record = Download(ref=ref, budgets=terms.budgets, mine=mine)
        self.story = Story(f"download {ref.id} from {ref.source}")
        self.closed = anyio.Event()
        self.stream = 0
        self.attempts = 0
        self.began = timers.now()
        self.farewell = ""
        self.left_behind = False
        self._theirs = theirs
        self._resources = resources
        self._wire = wire
        self._now = timers.now
        self._timer: Timer = timers.timer(self._tick)
        self._probe: Timer = timers.timer(self._ask_again)
        self._unreachable_since: float | None = None
        self._wake = Signal()
        self._inbox: deque[Inbound] = deque()
        self._asked: dict[int, int] = {}
        self._first = 0
        most = min(CHUNK_BYTES if theirs is not None else RELAYED_BYTES, chunk)
        first = most if by_reference else min(resources.share, FIRST_BYTES)
        self._pace = Pace(most=most, first=first, stall=terms.budgets.stall)
        self._header: bytearray | None = None
        self._header_digest = b""
        self._accepted: Layout | None = None
        self._layout: Layout | None = None
        self._landing: Landing | None = None
        self._landing_now: ByteRange | None = None
        self._arriving: _Arrival | None = None
        self._lack: _Lack | None = None
        self._state: State | None = None
        self._fault: StreamoffError | None = None
        self.defect: BaseException | None = None

    # --- for the owner ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Present the ticket, so that whoever gives up from now on has something to give up. Idempotent."""
        if self.record.state is DownloadState.IDLE:
            self._step(m.Started(self._now(), self._theirs))

    def cancel(self, reason: str) -> None:
        """Give up; no-op when it has ended. Never blocks."""
        self._step(m.CancelRequested(self._now(), reason))

    def fail(self, error: StreamoffError) -> None:
        """The source is known to be dead."""
        self._step(m.Noticed(self._now(), error))

    @property
    def cause(self) -> BaseException | None:
        """Why it brought nothing; None if it did, or has not ended.

        A landing whose thread had to be waited for when the transfer was cancelled may have failed for a
        reason of its own: then that is the cause, and not the cancellation.
        """
        return self.defect or self._fault or self.record.cause

    def result(self) -> State:
        """The payload.

        Raises:
            StreamoffError: The first real cause, with the story of the transfer.
            BaseException: A defect of ours, or an interrupt that struck it.
        """
        if self.cause is not None:
            raise self.cause
        if self._state is None:
            raise InvariantError("ended without a payload", story=self.story.lines())
        return self._state

    def release(self) -> None:
        """Let go of the payload, if it came: nobody will take it."""
        if self._state is not None:
            self._state.release()
            self._state = None

    async def run(self) -> None:
        """Drive the transfer to its end; ends by events only, never by cancellation.

        The machine's budgets bound it; a blocking disk call is waited for. A defect ends this transfer and
        nothing else: :meth:`result` raises it. So does an interrupt, which trio raises wherever the main
        thread is, and it goes on from here as well.
        """
        self._resources.active += 1
        try:
            with anyio.CancelScope(shield=True):
                try:
                    await self._to_the_end()
                except BaseException as error:
                    self._struck(error)
                    if not isinstance(error, Exception):
                        raise
                finally:
                    self._wire.forget(self)
                    await self._clean_up()
        finally:
            self._resources.active -= 1
            self._timer.cancel()
            self._probe.cancel()
            self.closed.set()

    def _struck(self, error: BaseException) -> None:
        """Tell the source that nobody will come, and keep what is to be raised."""
        if not isinstance(error, anyio.get_cancelled_exc_class()):
            self.defect = error
        self.cancel(f"{type(error).__name__} at the receiver")

    async def _to_the_end(self) -> None:
        self.begin()
        while not self.record.ended:
            await self._work()

    # --- events from the endpoint -----------------------------------------------------------------

    def on_opened(self, frame: Opened) -> None:
        """The source answered; only the first answer to an open counts."""
        if self.record.state is not DownloadState.OPENING:
            return
        now = self._now()
        error = self._judge(frame)
        if error is not None:
            self._step(m.LandingFailed(now, self._located(error)))
            return
        self._header_digest = frame.header_digest
        self._unreachable_since = None
        if frame.first:
            self._asked[0] = frame.first
            self._pace.begin(now)
        header = ByteRange(0, frame.header_bytes)
        self._step(m.Accepted(now, frame.nonce, header, frame.capabilities))

    def _judge(self, frame: Opened) -> StreamoffError | None:
        if frame.size != self.ref.size:
            return IntegrityError("another payload", expected=self.ref.size, got=frame.size)
        if frame.header_bytes > DEFAULT_LIMITS.tensor_header:
            limit = f"at most {DEFAULT_LIMITS.tensor_header} bytes"
            return LimitError("safetensors header", expected=limit, got=frame.header_bytes)
        if frame.first not in {0, self._first}:
            return LimitError("bytes unasked", expected=f"{self._first}, or none", got=frame.first)
        if self._header_digest not in {b"", frame.header_digest}:
            return IntegrityError("the payload changed between two attempts")
        return None

    def place(self, chunk: Chunk) -> Placement | None:
        """What takes the body of a chunk while it comes: the landing, if it can and the chunk was asked for.

        A chunk that bridges what has landed is verified first: nothing is written over bytes that count.
        """
        if any(one.start < chunk.stop and chunk.start < one.stop for one in self.record.landed):
            return None
        asked = self.record.state in _LANDING and self._asked.get(chunk.start) == chunk.stop
        if not asked or self._layout is None or self._landing is None:
            return None
        place = self._landing.place(chunk.start, chunk.stop)
        if place is None:
            return None
        self._take_back()
        self._arriving = _Arrival(place, Placement(place.came, place.views))
        return self._arriving.placement

    def _take_back(self) -> None:
        """Have nothing received for the landing any more."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.placement.give_up()

    def on_chunk(self, inbound: Inbound) -> None:
        """Bytes came; what was not asked for is dropped."""
        chunk = inbound.frame
        assert isinstance(chunk, Chunk)
        if self.record.state not in _LANDING or self._asked.get(chunk.start) != chunk.stop:
            inbound.release()
            return
        arrival = self._arriving
        del self._asked[chunk.start]
        if arrival is not None and arrival.placement is inbound.placed:
            self._arriving = None
            self._pace.came(self._now(), chunk.stop - chunk.start, inbound.seconds)
            self._count(chunk, arrival)
        elif not chunk.body:
            self._ask_for_less(inbound)
        else:
            self._pace.came(self._now(), chunk.stop - chunk.start, inbound.seconds)
            self._inbox.append(inbound)
            self._wake.notify()

    def _count(self, chunk: Chunk, arrival: _Arrival) -> None:
        """A chunk that was landed while it came is whole."""
        event: m.DownloadEvent | None
        error = arrival.placement.error
        if error is None:
            try:
                arrival.place.done(chunk.digest)
            except Exception as raised:  # noqa: BLE001 - whatever a landing raises ends its own transfer
                error = raised
        if error is None:
            event = m.classify_landed(self.record, self._now(), ByteRange(chunk.start, chunk.stop))
        else:
            event = self._cannot_land(error)
        if event is not None:
            self._take(event)

    def _ask_for_less(self, inbound: Inbound) -> None:
        """The chunk took so long that its memory went to others: smaller ones are quicker."""
        inbound.release()
        self._pace.slow_down()
        if self.record.state is DownloadState.STREAMING:
            self._pull()

    def on_error(self, frame: Error) -> None:
        """The source refuses."""
        error = self._located(_refusal(frame.code, frame.detail))
        self._step(m.Refused(self._now(), error, waits=frame.code in _STILL_WAITS))

    def on_acked(self) -> None:
        """The source knows that we have it."""
        self.farewell = "the source has acknowledged it"
        self._step(m.ConfirmAcked(self._now()))

    def link_lost(self) -> None:
        """There is no way to the source any more."""
        self._step(m.LinkLost(self._now()))

    def link_restored(self) -> None:
        """There is a way to the source again."""
        self._step(m.LinkRestored(self._now()))

    def unreachable(self) -> None:
        """Somebody on the way has no way on; nobody will tell when there is one, so ask again."""
        now = self._now()
        if self._unreachable_since is None:
            self._unreachable_since = now
        self._step(m.LinkLost(self._unreachable_since))  # the grace counts from the first time
        self._probe.at(now + PROBE_SECONDS)

    def _ask_again(self) -> None:
        if self.record.state is DownloadState.BACKOFF:
            self.link_restored()

    # --- the machine ------------------------------------------------------------------------------

    def _step(self, event: m.DownloadEvent) -> None:
        before = self.record
        self.record, effects = DOWNLOAD.step(before, event)
        after = self.record
        self.story.tell(event.now, event, before.state, after.state, effects)
        self._timer.at(m.next_tick(after))
        for effect in effects:
            self._carry_out(effect)
        if before.state is not after.state and self._at_work:
            self._wake.notify()
        if after.ended and self._lack is not None:
            self._lack.pause.cancel()

    def _carry_out(self, effect: m.DownloadEffect) -> None:
        match effect:
            case m.SendOpen():
                self._open()
            case m.PullMissing():
                self._pull()
            case m.SendHold():
                self._wire.send(
                    Hold(
                        to=self.ref.source,
                        sender=self._wire.address,
                        stream=self.stream,
                        seconds=min(effect.seconds, DEFAULT_LIMITS.hold),
                    )
                )
            case m.SendConfirm():
                self._confirm(effect)
            case m.SendCancel():
                self._note_farewell()
                self._wire.send(
                    Cancel(
                        to=self.ref.source,
                        sender=self._wire.address,
                        stream=self.stream,
                        ref=self.ref.id,
                        ticket=self.ref.ticket,
                        reason=clip(effect.reason),
                    )
                )
            case m.Report():
                if effect.error is not None:
                    effect.error.story = self.story.lines()
            case m.Finalise() | m.Discard():
                pass  # the task does it

    def _open(self) -> None:
        """Every attempt is a stream of its own: what an earlier one still brings is not mistaken for this."""
        self._asked.clear()
        self._take_back()
        self.attempts += 1
        self.stream = self._wire.new_stream(self)
        names = None if self.terms.names is None else tuple(self.terms.names)
        here = self.record.landed or self._inbox or self._landing_now is not None
        whole = self.ref.size <= min(2 * self._pace.nbytes, self._pace.most)
        first = self.ref.size if whole else self._pace.nbytes
        self._first = 0 if here or names is not None else first
        self._wire.send(
            Open(
                to=self.ref.source,
                sender=self._wire.address,
                stream=self.stream,
                ref=self.ref.id,
                ticket=self.ref.ticket,
                names=names,
                capabilities=self.record.mine,
                first=self._first,
            )
        )

    def _note_farewell(self) -> None:
        told = self._wire.can_reach(self.ref.source)
        self.farewell = "the source was told" if told else "no way to tell the source"

    def _confirm(self, effect: m.SendConfirm) -> None:
        self._note_farewell()
        self._wire.send(
            Confirm(
                to=self.ref.source,
                sender=self._wire.address,
                stream=self.stream,
                ref=self.ref.id,
                ticket=self.ref.ticket,
                nonce=self.record.nonce,
                ok=effect.ok,
                reason=clip(effect.reason),
            )
        )

    def _pull(self) -> None:
        """Ask for missing ranges up to the window; bytes asked for cost nothing until they come."""
        window = self._resources.window
        if not self._asked:
            self._pace.begin(self._now())
        if self._asked.get(0) == self.ref.size:
            return  # all of it comes with the answer to the open
        for start, stop in self._ranges():
            if len(self._asked) + len(self._inbox) >= window:
                return
            self._asked[start] = stop
            self._wire.send(
                Pull(
                    to=self.ref.source,
                    sender=self._wire.address,
                    stream=self.stream,
                    start=start,
                    stop=stop,
                )
            )

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges to ask for next: missing, not asked for, cut to the pull size on a fixed grid."""
        missing = self.record.missing
        if self._layout is None and self.terms.names is None and missing and not self.record.landed:
            missing = missing.add(ByteRange(0, min(self.ref.size, self._pace.nbytes)))
        under_way = RangeSet.of(
            [
                *(ByteRange(start, stop) for start, stop in self._asked.items()),
                *(_range_of(inbound) for inbound in self._inbox),
                *([] if self._landing_now is None else [self._landing_now]),
            ]
        )
        for item in _join(under_way.missing(missing), under_way):
            start = item.start
            while start < item.stop:
                edge = (start // self._pace.nbytes + 1) * self._pace.nbytes
                yield start, min(edge, item.stop)
                start = edge

    def _tick(self) -> None:
        event = m.classify_tick(self.record, self._now())
        if isinstance(event, (m.Stalled, m.Exhausted)):
            event = self._explained(event)
        if isinstance(event, m.Stalled):
            self._pace.slow_down()
        if event is None:
            self._timer.at(m.next_tick(self.record))
        else:
            self._step(event)

    def _explained(self, event: m.Stalled | m.Exhausted) -> m.DownloadEvent:
        """What no progress comes to where the wait is ours: a hold while there are any, then the true reason."""
        if self._own_fault(event.now):
            budgets = self.record.budgets
            seconds = min(budgets.hold - self.record.held, budgets.stall)
            if seconds > 0:
                return m.HoldAsked(event.now, seconds)
        if self._lack is not None and self.record.state is DownloadState.STREAMING:
            return m.LandingFailed(event.now, self._located(self._lack.error))
        return event

    def _own_fault(self, now: float) -> bool:
        """Whether the wait is for our own disk: then the producer is asked to be patient."""
        deadline = self.record.deadline
        return (
            self.record.state is DownloadState.STREAMING
            and (self._landing_now is not None or bool(self._inbox))
            and (deadline is None or now < deadline)
        )

    # --- the task ---------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Do one blocking thing, or wait for something to do."""
        if self.record.state is DownloadState.FINALISING:
            await self._finalise()
        elif self._lack is not None and self.record.state in _LANDING:
            await self._wait_for_space(self._lack)
        elif self._inbox and self.record.state in _LANDING:
            await self._land(self._inbox.popleft())
        elif not self.record.ended:
            await self._wake.wait()

    @property
    def _at_work(self) -> bool:
        """Whether the task has something to do, if only to end."""
        state = self.record.state
        return (
            state is DownloadState.FINALISING
            or (bool(self._inbox) and state in _LANDING)
            or self.record.ended
        )

    async def _land(self, inbound: Inbound) -> None:
        chunk = inbound.frame
        assert isinstance(chunk, Chunk)
        self._landing_now = _range_of(inbound)
        event: m.DownloadEvent | None
        try:
            event = await self._landed(chunk)
        except Exception as error:  # noqa: BLE001 - whatever a landing raises ends its own transfer
            event = self._cannot_land(error)
        finally:
            self._landing_now = None
            inbound.release()
        if event is not None:
            self._take(event)

    def _take(self, event: m.DownloadEvent) -> None:
        """Take what became of a piece of work."""
        cancelled = self.record.state is DownloadState.CANCELLED
        self._step(event)
        if isinstance(event, m.LandingFailed) and cancelled:
            self._fault = event.error
            event.error.story = self.story.lines()
        if isinstance(event, m.Planned) and not self.record.missing and not self.record.ended:
            self._step(m.LandedAll(self._now(), ByteRange(0, 0)))
        if not isinstance(event, m.LandingFailed):
            self._tell_progress()

    def _tell_progress(self) -> None:
        if self.terms.progress is None:
            return
        try:
            self.terms.progress(self.record.landed.nbytes, self.record.wanted.nbytes)
        except Exception as error:  # noqa: BLE001 - whoever wrote it must act, not this
            self._tell_fault("progress", "%s: a progress callback of %s failed", error)

    async def _off_loop(self, fn: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Call what blocks in a landing thread; what is over sooner than a hop takes, here."""
        if self.terms.in_memory and self.ref.size <= INLINE_BYTES:
            await anyio.lowlevel.checkpoint()
            return fn(*args)
        return await run_in_thread(fn, *args, limiter=self._resources.landing)

    async def _landed(self, chunk: Chunk) -> m.DownloadEvent:
        if self._layout is None:
            return await self._head(chunk)
        assert self._landing is not None
        await self._off_loop(self._landing.write, chunk.start, chunk.body, chunk.digest)
        return m.classify_landed(self.record, self._now(), ByteRange(chunk.start, chunk.stop))

    async def _head(self, chunk: Chunk) -> m.DownloadEvent:
        """The first bytes: with the whole header, plan; else keep them and go on."""
        size = self.record.wanted.ranges[0].stop
        if self._header is None:
            self._header = bytearray()
        landed = ByteRange(min(chunk.start, size), min(chunk.stop, size))
        _copy_into(self._header, chunk, landed.stop)
        if self.record.landed.add(landed).nbytes < size:
            if chunk_digest(chunk.body, chunk.start) != chunk.digest:
                raise IntegrityError("chunk damaged on the way", start=chunk.start, stop=chunk.stop)
            return m.LandedMore(self._now(), landed)
        header = bytes(self._header)
        self._header = None
        if xxhash.xxh3_128_digest(header) != self._header_digest:
            raise IntegrityError("the header is not the one that was announced")
        ranges = await self._off_loop(self._plan, header, chunk)
        head = ByteRange(0, size)
        done = RangeSet((head,))
        if chunk.stop > size:
            done = done.add(ByteRange(chunk.start, chunk.stop))
        return m.Planned(self._now(), ranges.add(head), done)

    def _plan(self, header: bytes, chunk: Chunk) -> RangeSet:
        """Check the header, make a place, and land what came along with it; in a worker thread."""
        layout = parse(header, size=self.ref.size)
        if self.terms.accept is not None:
            self.terms.accept(layout)
        names = self.terms.names
        unknown = [] if names is None else sorted(set(names).difference(layout.names))
        if unknown:
            raise UsageError("tensors that the payload does not have", got=unknown[:8])
        self._accepted = layout
        landing, ranges = self._make_place(layout)
        if chunk.stop > len(header):
            landing.write(chunk.start, chunk.body, chunk.digest)
        head = ByteRange(0, len(header))
        landed = RangeSet((head,)).add(ByteRange(chunk.start, chunk.stop))
        if not landed.missing(ranges):
            self._state = landing.finish()
        return ranges

    def _make_place(self, layout: Layout) -> tuple[Landing, RangeSet]:
        """Make and open the landing; in a worker thread. From then on the payload is planned."""
        landing = self.terms.landing(layout)
        self._landing = landing
        ranges = landing.open(layout, self.terms.names)
        self._layout = layout
        return landing, ranges

    # --- waiting for space ------------------------------------------------------------------------

    def _cannot_land(self, error: Exception) -> m.LandingFailed | None:
        """What a landing that raised comes to: the end, or None if it only lacks space and may wait for it."""
        space, accepted = self.terms.space, self._accepted
        lacks = isinstance(error, QuotaExceededError | NoSpaceError) and self._layout is None
        if not lacks or space is None or accepted is None:
            return m.LandingFailed(self._now(), self._landing_error(error))
        assert isinstance(error, QuotaExceededError | NoSpaceError)
        if self._lack is None:
            logger.info("%s from %s waits for space: %s", self.ref.id, self.ref.source, error.what)
            self._lack = _Lack(accepted, space.turn(), error)
        self._lack.error = error
        return None

    async def _wait_for_space(self, lack: _Lack) -> None:
        """Wait without a buffer, a thread or a file of ours, then try again.

        Meanwhile the ticks of the machine ask the producer to be patient; they, too, end this.
        """
        self._asked.clear()
        self._drop_inbox()
        self._landing_now = ByteRange(0, self.ref.size)  # nothing is pulled meanwhile
        self._resources.active -= 1
        event: m.DownloadEvent | None = None
        try:
            with anyio.CancelScope() as lack.pause:
                await self._discard()
                await lack.turn.wait(lack.error)
            if not self.record.ended:
                event = await self._try_again(lack.layout)
        except Exception as error:  # noqa: BLE001 - it was waited for long enough, or in vain
            event = m.LandingFailed(self._now(), self._landing_error(error))
        finally:
            self._resources.active += 1
            self._landing_now = None
        if event is not None:
            self._take(event)

    async def _try_again(self, layout: Layout) -> m.DownloadEvent | None:
        try:
            _, ranges = await self._off_loop(self._make_place, layout)
        except Exception as error:  # noqa: BLE001 - whatever a landing raises ends its own transfer
            return self._cannot_land(error)
        self._lack = None
        head = ByteRange(0, layout.data_start)
        return m.Planned(self._now(), ranges.add(head), RangeSet((head,)))

    async def _finalise(self) -> None:
        try:
            if self._state is None:
                assert self._landing is not None
                self._state = await self._off_loop(self._landing.finish)
        except Exception as error:  # noqa: BLE001 - whatever a landing raises ends its own transfer
            self._take(m.LandingFailed(self._now(), self._landing_error(error)))
        else:
            self._step(m.Finalised(self._now()))

    async def _clean_up(self) -> None:
        self._drop_inbox()
        self._take_back()
        self._header = None
        if self.record.state is DownloadState.DONE and self.defect is None:
            self._landing = None
        elif self._state is not None:
            self._landing = None
            self.release()
        else:
            await self._discard()

    def _drop_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft().release()

    async def _discard(self) -> None:
        """Leave nothing of the landing, if one was made."""
        landing, self._landing = self._landing, None
        if landing is not None:
            try:
                if landing.hands_over:
                    landing.discard()
                else:
                    await self._off_loop(landing.discard)
            except Exception as error:  # noqa: BLE001 - the transfer has its own cause
                self.left_behind = True
                self._tell_fault("discard", "%s: what %s left cannot be discarded", error)

    def _tell_fault(self, kind: str, text: str, error: Exception) -> None:
        facts = (self._wire.address, self.ref.id)
        self._wire.lines.tell(logger, logging.ERROR, kind, text, *facts, exc_info=error)

    def _landing_error(self, error: Exception) -> StreamoffError:
        if not isinstance(error, StreamoffError):
            why, path = f"{type(error).__name__}: {error}", None
            if isinstance(error, OSError):
                why, path = str(error.strerror), error.filename
            mapped = LandingError(f"landing failed ({why})", path=path)
            mapped.__cause__ = error
            error = mapped
        return self._located(error)

    def _located(self, error: StreamoffError) -> StreamoffError:
        return error.located(site=self.ref.source, ref=self.ref.id, job=self.job)


class _Arrival(NamedTuple):
    """The chunk that is being landed while it comes."""

    place: Place
    placement: Placement


@dataclass(slots=True)
class _Lack:
    """What a payload waits for: its layout was accepted, and its landing has no room."""

    layout: Layout
    turn: Turn
    error: QuotaExceededError | NoSpaceError
    pause: anyio.CancelScope = field(default_factory=anyio.CancelScope)


_LANDING: Final = frozenset({DownloadState.OPENING, DownloadState.STREAMING, DownloadState.BACKOFF})
"""While bytes that were asked for are still wanted."""


def _range_of(inbound: Inbound) -> ByteRange:
    chunk = inbound.frame
    assert isinstance(chunk, Chunk)
    return ByteRange(chunk.start, chunk.stop)


def _join(ranges: RangeSet, taken: RangeSet) -> RangeSet:
    """Bridge gaps of at most :data:`GAP_BYTES`, unless what lies between is under way."""
    joined: list[ByteRange] = []
    for item in ranges:
        if joined and item.start - joined[-1].stop <= GAP_BYTES:
            gap = ByteRange(joined[-1].stop, item.start)
            if not taken.ranges or not any(
                one.start < gap.stop and gap.start < one.stop for one in taken
            ):
                joined[-1] = ByteRange(joined[-1].start, item.stop)
                continue
        joined.append(item)
    return RangeSet(tuple(joined))


def _copy_into(header: bytearray, chunk: Chunk, stop: int) -> None:
    """Put a chunk's bytes up to ``stop`` in their place; the header grows with what is here."""
    header.extend(bytes(max(0, stop - len(header))))
    at = chunk.start
    for view in chunk.body:
        take = min(len(view), stop - at)
        if take <= 0:
            return
        header[at : at + take] = view[:take]
        at += take


_REFUSALS: Final[dict[ErrorCode, type[StreamoffError]]] = {
    ErrorCode.GONE: GoneError,
    ErrorCode.SOURCE_CHANGED: SourceChangedError,
    ErrorCode.SOURCE_FAILED: SourceFailedError,
}


_STILL_WAITS: Final = frozenset({ErrorCode.BAD_RANGE, ErrorCode.LIMIT, ErrorCode.UNKNOWN_STREAM})
"""Refusals of a request of a slot that was taken: the source waits for the next one."""


def _refusal(code: ErrorCode, detail: str) -> StreamoffError:
    kind = _REFUSALS.get(code, PeerRefusedError)
    return kind(f"the source refused ({code.value}): {detail.removeprefix(f'{code.value}: ')}")
