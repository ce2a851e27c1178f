"""Forwarding: what an endpoint does with frames that are not for it.

A relay never stops reading. It holds back pulls instead: a stream has at most two chunks under way through
it, all streams together no more than its pool has buffers, and the next pull goes on when a chunk has left.
So a slow receiver delays itself, and memory does not grow with what is forwarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio

from streamoff.runtime.link import Deferred, Inbound
from streamoff.runtime.timers import Timers
from streamoff.types import Address
from streamoff.wire.frames import (
    Cancel,
    Chunk,
    Confirm,
    Error,
    ErrorCode,
    FrameType,
    Open,
    Pull,
    Routed,
    Unreachable,
)

__all__ = ["HELD_SECONDS", "MAX_HELD", "STREAM_PULLS", "Relay", "RelayStatistics"]

STREAM_PULLS: Final = 2
"""Chunks of one stream under way through a relay."""
MAX_HELD: Final = 4096
"""Pulls that a relay holds back; more are answered ``busy``."""
HELD_SECONDS: Final = 30.0
"""After this long without its chunk, a forwarded pull no longer counts: the stream was given up."""

Key = tuple[Address, Address, int]
"""Receiver, source and stream id."""


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """A snapshot: streams with something under way, chunks under way, pulls held back, bytes forwarded."""

    streams: int
    under_way: int
    held: int
    bytes_forwarded: int


@dataclass(slots=True)
class _Stream:
    under_way: dict[int, float] = field(default_factory=dict)
    held: deque[Pull] = field(default_factory=deque)


class _Relayed:
    """A chunk on its way through; its buffer goes back when it has left or cannot leave."""

    __slots__ = ("_done", "_inbound", "nbytes")

    def __init__(self, inbound: Inbound, nbytes: int, done: Callable[[], None]) -> None:
        self._inbound = inbound
        self._done = done
        self.nbytes = nbytes

    def drop(self) -> None:
        self._inbound.release()
        self._done()

    async def render(self) -> Inbound:
        return Inbound(self._inbound.frame, self._gone)

    def _gone(self) -> None:
        self._inbound.release()
        self._done()


class Relay:
    """The forwarding of one endpoint.

    Args:
        address: Whose it is.
        chunks: Chunks under way in all.
        timers: The endpoint's clock.
        send: Queues a frame towards its address; loses it if there is no way.
        serve: Queues a chunk towards an address; drops it if there is no way.
    """

    def __init__(
        self,
        *,
        address: Address,
        chunks: int,
        timers: Timers,
        send: Callable[[Routed], None],
        serve: Callable[[Address, Deferred], None],
    ) -> None:
        self._address = address
        self._chunks = chunks
        self._send = send
        self._serve = serve
        self._streams: dict[Key, _Stream] = {}
        self._turns: deque[Key] = deque()
        self._under_way = 0
        self._held = 0
        self._bytes = 0
        self._timer = timers.timer(self._expire)

    def statistics(self) -> RelayStatistics:
        """A snapshot."""
        return RelayStatistics(len(self._streams), self._under_way, self._held, self._bytes)

    def forward(self, frame: Routed, inbound: Inbound) -> None:
        """Send a frame on, or hold it back; ``frame`` has one hop less than it came with."""
        match frame:
            case Pull():
                self._hold(frame)
                inbound.release()
            case Chunk():
                self._pass_on(frame, inbound)
            case _:
                self._note_end(frame)
                self._send(frame)
                inbound.release()

    def lost(self, cut_off: Callable[[Address], bool]) -> None:
        """A link is gone: streams from or to what was behind it are over; receivers are told."""
        for key in [key for key in self._streams if cut_off(key[0]) or cut_off(key[1])]:
            self._forget(key)
            receiver, source, stream = key
            if cut_off(source):
                self._send(
                    Unreachable(
                        to=receiver,
                        sender=self._address,
                        address=source,
                        about=stream,
                        of=FrameType.PULL,
                    )
                )
        self._let_go()

    def _hold(self, pull: Pull) -> None:
        key = (pull.sender, pull.to, pull.stream)
        if self._held >= MAX_HELD:
            self._send(
                Error(
                    to=pull.sender,
                    sender=self._address,
                    of=FrameType.PULL,
                    id=pull.stream,
                    code=ErrorCode.BUSY,
                    detail=f"{MAX_HELD} pulls wait here already",
                )
            )
            return
        self._streams.setdefault(key, _Stream()).held.append(pull)
        self._turns.append(key)
        self._held += 1
        self._let_go()

    def _let_go(self) -> None:
        """Forward held pulls in turn, as far as the bounds allow."""
        for _ in range(len(self._turns)):
            if self._under_way >= self._chunks:
                return
            key = self._turns.popleft()
            stream = self._streams.get(key)
            if stream is None or not stream.held:
                continue
            if len(stream.under_way) >= STREAM_PULLS:
                self._turns.append(key)
                continue
            pull = stream.held.popleft()
            self._held -= 1
            if pull.start not in stream.under_way:
                self._under_way += 1
            now = anyio.current_time()
            stream.under_way[pull.start] = now
            self._timer.at(min(self._timer.due, now + HELD_SECONDS))
            self._send(pull)

    def _pass_on(self, chunk: Chunk, inbound: Inbound) -> None:
        key = (chunk.to, chunk.sender, chunk.stream)
        stream = self._streams.get(key)
        if stream is None or chunk.start not in stream.under_way:
            inbound.release()  # nobody on this way asked for it, or not any more
            return
        nbytes = chunk.stop - chunk.start
        self._bytes += nbytes
        start = chunk.start
        self._serve(
            chunk.to,
            _Relayed(Inbound(chunk, inbound.release), nbytes, lambda: self._left(key, start)),
        )

    def _left(self, key: Key, start: int) -> None:
        stream = self._streams.get(key)
        if stream is not None and stream.under_way.pop(start, None) is not None:
            self._under_way -= 1
            if not stream.under_way and not stream.held:
                del self._streams[key]
        self._let_go()

    def _note_end(self, frame: Routed) -> None:
        """The receiver opens anew, confirms or cancels, or the source refuses: the stream is over."""
        if isinstance(frame, (Cancel, Confirm, Open)):
            self._forget((frame.sender, frame.to, frame.stream))
        elif isinstance(frame, Error):
            self._forget((frame.to, frame.sender, frame.id))

    def _forget(self, key: Key) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            self._under_way -= len(stream.under_way)
            self._held -= len(stream.held)

    def _expire(self) -> None:
        now = anyio.current_time()
        oldest = now
        for key, stream in tuple(self._streams.items()):
            for start, since in tuple(stream.under_way.items()):
                if now - since >= HELD_SECONDS:
                    del stream.under_way[start]
                    self._under_way -= 1
                else:
                    oldest = min(oldest, since)
            if not stream.under_way and not stream.held:
                del self._streams[key]
        self._timer.at(oldest + HELD_SECONDS if self._streams else None)
        self._let_go()
