"""Forwarding: what an endpoint does with frames that are not for it.

A relay never stops reading. It holds back pulls instead: a stream has at most two chunks under way through
it, and all streams together no more than its pool holds, so that memory does not grow with what is forwarded.
A pull that takes long counts for its own stream only: who is slow, or does not read at all, delays itself.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import anyio

from streamoff.runtime.endings import some
from streamoff.runtime.link import Deferred, Inbound
from streamoff.runtime.pool import Buffer, Tenure
from streamoff.runtime.sparing import Lines
from streamoff.runtime.timers import Timers
from streamoff.types import Address
from streamoff.wire.frames import (
    Cancel,
    Chunk,
    Confirm,
    Error,
    FrameType,
    Message,
    Notice,
    Open,
    Opened,
    Pull,
    Routed,
    Unreachable,
)
from streamoff.wire.limits import DEFAULT_LIMITS

__all__ = [
    "FORGOTTEN_SECONDS",
    "MAX_ENTRIES",
    "SLOW_SECONDS",
    "STREAM_PULLS",
    "Relay",
    "RelayStatistics",
]

logger = logging.getLogger("streamoff.relay")

STREAM_PULLS: Final = 2
"""Chunks of one stream under way through a relay."""
MAX_ENTRIES: Final = 1024
"""Streams and held pulls of one link; more are answered ``unreachable``, and asked for again later."""
SLOW_SECONDS: Final = 2.0
"""After this long a pull under way counts for its own stream only, not for all of them."""
FORGOTTEN_SECONDS: Final = 30.0
"""After this long without its chunk, a forwarded pull was given up by its stream."""

MAX_CHUNK: Final = DEFAULT_LIMITS.link.chunk
"""What a pull counts for at most: no link brings more for it."""

Key = tuple[Address, Address, int]
"""Receiver, source and stream id."""


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """A snapshot; counters since the endpoint started.

    Args:
        streams: Known.
        under_way: Chunks that were asked for and have not left.
        held: Pulls that wait for their turn.
        bytes_forwarded: Of chunks.
        lost: Streams that ended because a link did.
        unreachable: Frames that went no further, and whose senders were told.
    """

    streams: int
    under_way: int
    held: int
    bytes_forwarded: int
    lost: int
    unreachable: int


@dataclass(slots=True)
class _UnderWay:
    """A pull that went on; ``counted`` is what it counts for in all, ``here`` whether its chunk has come."""

    since: float
    stop: int
    counted: int
    here: bool = False


@dataclass(slots=True)
class _Stream:
    via: Address
    asked: float
    under_way: dict[int, _UnderWay] = field(default_factory=dict)
    held: deque[Pull] = field(default_factory=deque)

    @property
    def ready(self) -> bool:
        return bool(self.held) and len(self.under_way) < STREAM_PULLS


class _Relayed:
    """A chunk on its way through; its buffer goes back when it has left or cannot leave."""

    __slots__ = ("_given_up", "_inbound", "_left", "_lost", "nbytes")

    def __init__(
        self, inbound: Inbound, nbytes: int, left: Callable[[], None], lost: Callable[[], None]
    ) -> None:
        self._inbound = inbound
        self._left = left
        self._lost = lost
        self._given_up = False
        self.nbytes = nbytes
        if inbound.lent is not None:
            inbound.lent.tenure = Tenure(lambda: 0, self._give_up)

    def drop(self) -> None:
        if not self._given_up:
            self._gone()

    async def render(self) -> Inbound | None:
        if self._given_up:
            return None
        lent: Buffer | None = self._inbound.lent
        if lent is not None:
            lent.tenure = None
        return Inbound(self._inbound.frame, self._gone, lent)

    def _gone(self) -> None:
        self._inbound.release()
        self._left()

    def _give_up(self) -> None:
        """Nobody takes it and others need the buffer: it is pulled again when its turn comes."""
        self._given_up = True
        self.nbytes = 0
        self._inbound.release()
        self._lost()


class Relay:
    """The forwarding of one endpoint.

    Args:
        address: Whose it is.
        capacity: Bytes of chunks under way in all.
        timers: The endpoint's clock.
        send: Queues a frame towards its address; loses it if there is no way.
        serve: Queues a chunk towards an address; drops it if there is no way.
        crowded: Whether too much waits already for the link towards an address.
        lines: The endpoint's log.
    """

    def __init__(
        self,
        *,
        address: Address,
        capacity: int,
        timers: Timers,
        send: Callable[[Routed], None],
        serve: Callable[[Address, Deferred], None],
        crowded: Callable[[Address], bool],
        lines: Lines,
    ) -> None:
        self._address = address
        self._capacity = capacity
        self._send = send
        self._serve = serve
        self._crowded = crowded
        self._lines = lines
        self._lost = self._unreachable = 0
        self._streams: dict[Key, _Stream] = {}
        self._turns: dict[Key, None] = {}
        self._entries: Counter[Address] = Counter()
        self._counted = 0
        self._bytes = 0
        self._timer = timers.timer(self._look)

    def statistics(self) -> RelayStatistics:
        """A snapshot."""
        return RelayStatistics(
            streams=len(self._streams),
            under_way=sum(len(one.under_way) for one in self._streams.values()),
            held=sum(len(one.held) for one in self._streams.values()),
            bytes_forwarded=self._bytes,
            lost=self._lost,
            unreachable=self._unreachable,
        )

    def forward(self, frame: Routed, inbound: Inbound, via: Address) -> None:
        """Send a frame on, or hold it back.

        Args:
            frame: With one hop less than it came with.
            inbound: As it came.
            via: The link it came over.
        """
        if isinstance(frame, Chunk):
            self._pass_on(frame, inbound)
            return
        inbound.release()
        if isinstance(frame, Pull):
            self._hold(frame, via)
        elif self._crowded(frame.to) or (isinstance(frame, Open) and not self._begin(frame, via)):
            self.unreachable(frame)
        else:
            self._note_end(frame)
            self._send(replace(frame, first=0) if isinstance(frame, Open) else frame)

    def unreachable(self, frame: Routed) -> None:
        """Tell the sender of a frame that it goes no further; answers of others are dropped in silence."""
        if isinstance(frame, (Message, Notice)):
            about = frame.id
        elif isinstance(frame, (Open, Opened, Pull, Chunk, Confirm, Cancel)):
            about = frame.stream
        else:
            return
        self._unreachable += 1
        text = "%s has no way to %s for %s of %s"
        facts = (frame.to, type(frame).__name__.lower(), frame.sender)
        self._lines.tell(logger, logging.INFO, "no way", text, self._address, *facts)
        self._tell(frame.sender, frame.to, about, type(frame).type)

    def lost(self, cut_off: Callable[[Address], bool]) -> None:
        """A link is gone: streams from or to what was behind it are over; receivers are told."""
        over = [key for key in self._streams if cut_off(key[0]) or cut_off(key[1])]
        if over:
            self._lost += len(over)
            text = "%s: %d streams through here end with their link: %s"
            ways = some(f"{receiver} from {source}" for receiver, source, _ in over)
            self._lines.tell(
                logger, logging.INFO, "streams lost", text, self._address, len(over), ways
            )
        for key in over:
            self._forget(key)
            receiver, source, stream = key
            if cut_off(source):
                self._tell(receiver, source, stream, FrameType.PULL)
        self._let_go()

    def _tell(self, to: Address, address: Address, about: int, of: FrameType) -> None:
        self._send(Unreachable(to=to, sender=self._address, address=address, about=about, of=of))

    # --- streams ----------------------------------------------------------------------------------

    def _begin(self, frame: Open, via: Address) -> bool:
        key = (frame.sender, frame.to, frame.stream)
        self._forget(key)
        return self._stream(key, via) is not None

    def _stream(self, key: Key, via: Address) -> _Stream | None:
        """The stream of a key, new if need be; None: the link has too many."""
        stream = self._streams.get(key)
        if stream is None and self._entries[via] < MAX_ENTRIES:
            stream = self._streams[key] = _Stream(via, anyio.current_time())
            self._entries[via] += 1
            self._look_at(stream.asked + FORGOTTEN_SECONDS)
        return stream

    def _note_end(self, frame: Routed) -> None:
        """The receiver confirms or cancels, or the source refuses: the stream is over."""
        if isinstance(frame, (Cancel, Confirm)):
            self._forget((frame.sender, frame.to, frame.stream))
        elif isinstance(frame, Error):
            self._forget((frame.to, frame.sender, frame.id))

    def _forget(self, key: Key) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            self._turns.pop(key, None)
            self._counted -= sum(one.counted for one in stream.under_way.values())
            self._uncount(stream.via, 1 + len(stream.held))

    def _uncount(self, via: Address, entries: int) -> None:
        self._entries[via] -= entries
        if not self._entries[via]:
            del self._entries[via]

    # --- pulls ------------------------------------------------------------------------------------

    def _hold(self, pull: Pull, via: Address) -> None:
        key = (pull.sender, pull.to, pull.stream)
        stream = self._stream(key, via)
        if stream is None or self._entries[stream.via] >= MAX_ENTRIES:
            self.unreachable(pull)
            return
        stream.held.append(pull)
        self._entries[stream.via] += 1
        self._line_up(key, stream)
        self._let_go()

    def _line_up(self, key: Key, stream: _Stream) -> None:
        if stream.ready:
            self._turns.setdefault(key)

    def _let_go(self) -> None:
        """Forward held pulls in turn, as far as the bounds allow."""
        while self._turns and self._counted < self._capacity:
            key = next(iter(self._turns))
            del self._turns[key]
            stream = self._streams[key]
            pull = stream.held.popleft()
            self._uncount(stream.via, 1)
            now = stream.asked = anyio.current_time()
            former = stream.under_way.get(pull.start)
            counted = min(pull.stop - pull.start, MAX_CHUNK)
            self._counted += counted - (0 if former is None else former.counted)
            stream.under_way[pull.start] = _UnderWay(now, pull.stop, counted)
            self._look_at(now + SLOW_SECONDS)
            self._line_up(key, stream)
            self._send(pull)

    # --- chunks -----------------------------------------------------------------------------------

    def _pass_on(self, chunk: Chunk, inbound: Inbound) -> None:
        key = (chunk.to, chunk.sender, chunk.stream)
        stream = self._streams.get(key)
        under_way = None if stream is None else stream.under_way.get(chunk.start)
        if under_way is None or under_way.here or under_way.stop != chunk.stop:
            inbound.release()  # nobody on this way asked for it, or not any more
            return
        if not chunk.body:
            inbound.release()
            self._ask_again(key, chunk)
            return
        under_way.here = True
        nbytes = chunk.stop - chunk.start
        self._bytes += nbytes
        relayed = _Relayed(
            Inbound(chunk, inbound.release, inbound.lent),
            nbytes,
            left=lambda: self._left(key, chunk.start, under_way),
            lost=lambda: self._ask_again(key, chunk),
        )
        self._serve(chunk.to, relayed)

    def _left(self, key: Key, start: int, under_way: _UnderWay) -> None:
        stream = self._streams.get(key)
        if stream is not None and stream.under_way.get(start) is under_way:
            del stream.under_way[start]
            self._counted -= under_way.counted
            stream.asked = anyio.current_time()
            self._line_up(key, stream)
        self._let_go()

    def _ask_again(self, key: Key, chunk: Chunk) -> None:
        """A chunk was given up on the way: its pull waits for its next turn, before the others."""
        stream = self._streams.get(key)
        if stream is None:
            return
        self._counted -= stream.under_way.pop(chunk.start).counted
        stream.held.appendleft(
            Pull(
                to=chunk.sender,
                sender=chunk.to,
                stream=chunk.stream,
                start=chunk.start,
                stop=chunk.stop,
            )
        )
        self._entries[stream.via] += 1
        self._line_up(key, stream)
        self._let_go()

    # --- time -------------------------------------------------------------------------------------

    def _look_at(self, due: float) -> None:
        self._timer.at(min(self._timer.due, due))

    def _look(self) -> None:
        """See what is slow and what is over; look again when the next can be.

        Due times are sums here as where they are set: a difference rounds otherwise, and would be due for ever.
        """
        now = anyio.current_time()
        dues = [now + FORGOTTEN_SECONDS]
        for key, stream in tuple(self._streams.items()):
            for start, one in tuple(stream.under_way.items()):
                if one.counted and one.since + SLOW_SECONDS <= now:
                    self._counted -= one.counted
                    one.counted = 0
                if one.counted:
                    dues.append(one.since + SLOW_SECONDS)
                elif one.here:
                    continue
                elif one.since + FORGOTTEN_SECONDS <= now:
                    del stream.under_way[start]
                    self._line_up(key, stream)
                else:
                    dues.append(one.since + FORGOTTEN_SECONDS)
            if stream.under_way or stream.held:
                continue
            if stream.asked + FORGOTTEN_SECONDS <= now:
                self._forget(key)
            else:
                dues.append(stream.asked + FORGOTTEN_SECONDS)
        self._timer.at(min(dues) if self._streams else None)
        self._let_go()
