"""The memory transport: frames between endpoints of one event loop, with a network's bad habits.

It speaks the wire: every head is encoded, checked and decoded. Bodies are handed over by reference, and a
chunk is fetched from its source only when the receiving end takes it, so a slow or partitioned link holds
no memory. Latency, bandwidth, partitions and cuts can be set per direction and while frames travel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel

from streamoff.errors import LinkLostError, UnreachableError, UsageError
from streamoff.runtime.link import Deferred, Inbound, Listener, Outbound, Placer, Urgent
from streamoff.runtime.signal import Signal
from streamoff.types import Address
from streamoff.wire.codec import Encoded, decode, encode
from streamoff.wire.frames import Frame
from streamoff.wire.limits import LinkLimits

__all__ = ["Conditions", "MemoryLink", "MemoryNetwork", "Pipe"]

PIPE_ITEMS: Final = 64
"""Items that one direction of a link holds; a sender waits for room."""
PIECE_BYTES: Final = 256 * 1024
"""Between pieces of this size control frames overtake a chunk."""
PIECE_SECONDS: Final = 1.0
"""On a slow line pieces are smaller: what takes no longer than this."""


@dataclass(slots=True)
class Conditions:
    """How one direction of a link behaves; change it at any time.

    Args:
        latency: Seconds from sent to received.
        bandwidth: Bytes per second; infinite by default.
        partitioned: Nothing arrives and nothing is lost: the peers see silence.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    partitioned: bool = False
    _listeners: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def set(
        self,
        *,
        latency: float | None = None,
        bandwidth: float | None = None,
        partitioned: bool | None = None,
    ) -> None:
        """Change some of it; whoever waits looks again.

        Raises:
            UsageError: A negative latency or a bandwidth that is not above 0.
        """
        if latency is not None:
            if not latency >= 0:
                raise UsageError("latency", expected="seconds, 0 or more", got=latency)
            self.latency = latency
        if bandwidth is not None:
            if not bandwidth > 0:
                raise UsageError("bandwidth", expected="bytes per second above 0", got=bandwidth)
            self.bandwidth = bandwidth
        if partitioned is not None:
            self.partitioned = partitioned
        for listener in self._listeners:
            listener()

    def watch(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at every change, until :meth:`unwatch`."""
        self._listeners.append(listener)

    def unwatch(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``; no-op if it is not called."""
        if listener in self._listeners:
            self._listeners.remove(listener)


@dataclass(slots=True)
class _Parcel:
    due: float
    item: Encoded | Outbound


class Pipe:
    """One direction: a bounded queue of parcels with the time each may be taken."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.ended: LinkLostError | None = None
        self.rendering = False
        self._cut = False
        self._parcels: deque[_Parcel] = deque()
        self._moved = Signal()
        conditions.watch(self._moved.notify)

    @property
    def _silent(self) -> bool:
        """Whether the two ends learn nothing of each other, not even that one of them has closed."""
        return self.conditions.partitioned and not self._cut

    def end(self, error: LinkLostError, *, keep_control: bool, cut: bool = False) -> None:
        """Take no more; what is queued is lost, except, if asked, the control frames."""
        self._cut = self._cut or cut
        if self.ended is None:
            self.ended = error
            queued, self._parcels = self._parcels, deque()
            for parcel in queued:
                if keep_control and isinstance(parcel.item, Encoded):
                    self._parcels.append(parcel)
                else:
                    _drop(parcel.item)
        else:  # both ends have closed: nobody is left who would look
            self.conditions.unwatch(self._moved.notify)
        self._moved.notify()

    async def send(self, item: Outbound, urgent: Urgent) -> None:
        """Pace the item over the wire, then queue it; control frames overtake between pieces."""
        try:
            if not isinstance(item, Frame):
                await self._pace(item, urgent)
            while len(self._parcels) >= PIPE_ITEMS and self.ended is None:
                await self._moved.wait()
        except BaseException:
            _drop(item)
            raise
        if self.ended is None:
            self._put(item)
            return
        _drop(item)
        if not self._silent:
            raise self.ended

    def send_nowait(self, frame: Frame) -> bool:
        """Queue a frame; False: there is no room, or an end has closed."""
        if self.ended is not None or len(self._parcels) >= PIPE_ITEMS:
            return False
        self._put(frame)
        return True

    async def _pace(self, item: Deferred, urgent: Urgent) -> None:
        """Take the time that the bytes take; a chunk that nobody wants any more is abandoned."""
        sent = 0
        while sent < item.nbytes and self.ended is None:
            for frame in urgent():
                self._put(frame)
            bandwidth = self.conditions.bandwidth
            affordable = PIECE_BYTES if math.isinf(bandwidth) else int(bandwidth * PIECE_SECONDS)
            piece = min(item.nbytes - sent, PIECE_BYTES, max(1, affordable))
            sent += piece
            if not math.isinf(bandwidth):
                await anyio.sleep(piece / bandwidth)

    def _put(self, item: Outbound) -> None:
        parcel = encode(item) if isinstance(item, Frame) else item
        latency = self.conditions.latency
        self._parcels.append(_Parcel(anyio.current_time() + latency if latency else 0.0, parcel))
        self._moved.notify()

    async def receive(self) -> Inbound:
        """Take the next parcel when it is due and the direction is not partitioned."""
        while True:
            await self._wait_due()
            item = self._parcels.popleft().item
            self._moved.notify()
            if isinstance(item, Encoded):
                return Inbound(decode(item.head, item.body))
            assert not isinstance(item, Frame)
            self.rendering = True
            try:
                rendered = await item.render()
            finally:
                self.rendering = False
            if rendered is None:
                continue
            if self.ended is not None:
                rendered.release()
                raise self.ended
            return self._through_the_wire(rendered)

    async def _wait_due(self) -> None:
        while True:
            if self._silent:
                await self._moved.wait()
            elif self.ended is not None and not self._parcels:
                raise self.ended
            elif not self._parcels:
                await self._moved.wait()
            elif (due := self._parcels[0].due) and due > anyio.current_time():
                with anyio.CancelScope(deadline=due):
                    await self._moved.wait()
            else:
                return

    @staticmethod
    def _through_the_wire(rendered: Inbound) -> Inbound:
        try:
            encoded = encode(rendered.frame)
            return Inbound(decode(encoded.head, encoded.body), rendered.release, rendered.lent)
        except BaseException:
            rendered.release()
            raise


def _drop(item: Encoded | Outbound) -> None:
    if not isinstance(item, (Encoded, Frame)):
        item.drop()


class MemoryLink:
    """One end of a link: the pipe it writes and the pipe it reads."""

    def __init__(self, out: Pipe, into: Pipe) -> None:
        self._out = out
        self._into = into

    @property
    def held_up(self) -> bool:
        """Whether a chunk is being fetched for this end. See :class:`streamoff.runtime.link.Link`."""
        return self._into.rendering

    @property
    def by_reference(self) -> bool:
        """See :class:`streamoff.runtime.link.Link`."""
        return True

    @property
    def received(self) -> int:
        """Nothing arrives in parts here: pings overtake every piece of a chunk."""
        return 0

    @property
    def certified(self) -> None:
        """There are no certificates within one event loop."""
        return

    @property
    def fingerprint(self) -> None:
        """There are no certificates within one event loop."""
        return

    def agree(self, limits: LinkLimits) -> None:
        """Frames are not cut into pieces here."""

    def place(self, placer: Placer) -> None:
        """Bodies are handed over by reference: they are where they are."""

    def ready(self, item: Deferred) -> bool:  # noqa: ARG002 - the protocol's
        """The far end fetches a chunk, when it takes it. See :class:`streamoff.runtime.link.Link`."""
        return True

    async def fetch(self, item: Deferred) -> Deferred:
        """Nothing to do. See :class:`streamoff.runtime.link.Link`."""
        return item

    def send_nowait(self, frame: Frame) -> bool:
        """Send a frame if there is room. See :class:`streamoff.runtime.link.Link`."""
        return self._out.send_nowait(frame)

    async def send(self, item: Outbound, urgent: Urgent) -> None:
        """Send one item. See :class:`streamoff.runtime.link.Link`."""
        await self._out.send(item, urgent)

    async def receive(self) -> Inbound:
        """Receive the next frame. See :class:`streamoff.runtime.link.Link`."""
        return await self._into.receive()

    async def aclose(self) -> None:
        """Close both directions; control frames already sent still arrive, then the peer sees the end."""
        error = LinkLostError("the link was closed by its owner")
        self._out.end(error, keep_control=True)
        self._into.end(error, keep_control=False)
        await anyio.lowlevel.checkpoint()

    def cut(self) -> None:
        """Reset both directions at once; frames under way are lost."""
        error = LinkLostError("the link was cut")
        self._out.end(error, keep_control=False, cut=True)
        self._into.end(error, keep_control=False, cut=True)


class MemoryNetwork:
    """A network inside one event loop: endpoints listen under their address and dial others.

    Args:
        latency: Seconds, the default of new links.
        bandwidth: Bytes per second, the default of new links.
    """

    def __init__(self, *, latency: float = 0.0, bandwidth: float = math.inf) -> None:
        self._latency = latency
        self._bandwidth = bandwidth
        self._listeners: dict[Address, Listener] = {}
        self._conditions: dict[tuple[Address, Address], Conditions] = {}
        self._links: dict[frozenset[Address], WeakKeyDictionary[MemoryLink, None]] = {}
        self._refusing: set[frozenset[Address]] = set()

    def listen(self, address: Address, accept: Listener) -> None:
        """Accept links under an address.

        Raises:
            UsageError: Somebody listens there already.
        """
        if address in self._listeners:
            raise UsageError("the address is taken", got=address)
        self._listeners[address] = accept

    def unlisten(self, address: Address) -> None:
        """Accept no more links."""
        self._listeners.pop(address, None)

    def conditions(self, sender: str, receiver: str) -> Conditions:
        """The conditions from one endpoint to another, now and for later links."""
        key = (Address(sender), Address(receiver))
        if key not in self._conditions:
            self._conditions[key] = Conditions(self._latency, self._bandwidth)
        return self._conditions[key]

    async def dial(self, mine: Address, to: Address) -> MemoryLink:
        """Open a link; a partitioned network lets it open, and nothing arrives.

        Raises:
            UnreachableError: Nobody listens there, or the cable is cut.
        """
        await anyio.lowlevel.checkpoint()
        pair = frozenset((mine, to))
        accept = self._listeners.get(to)
        if accept is None or pair in self._refusing:
            raise UnreachableError("nobody answers", peer=to)
        there, back = Pipe(self.conditions(mine, to)), Pipe(self.conditions(to, mine))
        near, far = self._end(there, back, mine, to), self._end(back, there, to, mine)
        self._links.setdefault(pair, WeakKeyDictionary()).update({near: None, far: None})
        accept(far)
        return near

    def _end(self, out: Pipe, into: Pipe, mine: Address, peer: Address) -> MemoryLink:  # noqa: ARG002 - for networks that treat their lines differently
        """One end of a new link."""
        return MemoryLink(out, into)

    def _both(self, one: str, other: str) -> Iterator[Conditions]:
        yield self.conditions(one, other)
        yield self.conditions(other, one)

    def partition(self, one: str, other: str) -> None:
        """Let nothing pass between two endpoints; both only see silence."""
        for conditions in self._both(one, other):
            conditions.set(partitioned=True)

    def heal(self, one: str, other: str) -> None:
        """End a partition; what was under way arrives."""
        for conditions in self._both(one, other):
            conditions.set(partitioned=False)

    def cut(self, one: str, other: str) -> None:
        """Reset every link between two endpoints and refuse new ones until :meth:`mend`."""
        pair = frozenset((Address(one), Address(other)))
        self._refusing.add(pair)
        for link in tuple(self._links.pop(pair, ())):
            link.cut()

    def mend(self, one: str, other: str) -> None:
        """Let two endpoints dial each other again."""
        self._refusing.discard(frozenset((Address(one), Address(other))))
