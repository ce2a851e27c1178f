"""One link: a reader and a writer, owned by the endpoint, shielded until its last job is gone.

Nobody else writes. Control frames go first, also between the pieces of a chunk. A chunk is fetched from its
source only when the transport can send it, so what is queued costs nothing; cancelling a transfer removes
what was not begun. The reader never waits for its own link's writer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from streamoff.errors import (
    InvariantError,
    LimitError,
    LinkLostError,
    StreamoffError,
    UnexpectedMessageError,
)
from streamoff.runtime.pool import Buffer
from streamoff.runtime.signal import Signal
from streamoff.runtime.sparing import Lines
from streamoff.runtime.timers import Timer, Timers
from streamoff.types import MIB, Address
from streamoff.wire.frames import Chunk, Frame, Hello, Message, Ping, Views
from streamoff.wire.handshake import Accepted
from streamoff.wire.limits import LinkLimits

__all__ = [
    "KEEPALIVE_SECONDS",
    "MAX_CONTROL",
    "SILENCE_SECONDS",
    "Deferred",
    "Inbound",
    "Link",
    "LinkDriver",
    "Listener",
    "Outbound",
    "Placement",
    "Placer",
]

logger = logging.getLogger("streamoff.link")

KEEPALIVE_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 15.0
MAX_CONTROL: Final = 16_384
"""Control frames that may wait for one link; a peer that reads none of them loses it."""
CROWDED_FRAMES: Final = MAX_CONTROL // 2
CROWDED_BYTES: Final = 32 * MIB
"""More control frames, or more in their bodies, and nothing of others is forwarded over the link."""


def _nothing() -> None:
    """Release a body that was handed over by reference."""


class Placement:
    """A receiver's way to take the body of a chunk while it comes.

    Args:
        came: Called with the next bytes once they are here.
        views: Memory of the receiver's that they are received in, writable, as long as the body; None: they come
            in a buffer, and are of no use after ``came``.
    """

    __slots__ = ("_came", "_over", "_stop", "error", "views")

    def __init__(self, came: Callable[[Views], object], views: Views | None = None) -> None:
        self.views: Final = views
        self.error: Exception | None = None
        """Why ``came`` failed; it is not called again."""
        self._came: Final = came
        self._stop: Callable[[], None] = _nothing
        self._over = False

    def begin(self, stop: Callable[[], None]) -> None:
        """The link is about to receive; ``stop`` makes it throw the rest away, and is called at once if it is late."""
        self._stop = stop
        if self._over:
            stop()

    def take(self, views: Views) -> None:
        """Pass bytes on. What fails is the receiver's, and no fault of the link."""
        if self.error is None:
            try:
                self._came(views)
            except Exception as error:  # noqa: BLE001 - told when the chunk is whole
                self.error = error

    def give_up(self) -> None:
        """Have nothing written to ``views``, or passed on, any more. Idempotent."""
        self._over = True
        self._stop()


@dataclass(frozen=True, slots=True)
class Inbound:
    """A frame and the way to give back its memory.

    The body of a chunk is on loan: call ``release`` exactly once. Every other frame owns its body. A chunk
    that had to be given up on the way comes without its body: whoever wants it asks again. So does a chunk whose
    body a placement has taken.

    Args:
        frame: What came, or goes.
        release: Gives the memory back.
        lent: The pool's buffer behind it, if that is what it is.
        placed: What has taken the body.
        seconds: How long its body took to come, and kept its memory waiting.
    """

    frame: Frame
    release: Callable[[], None] = _nothing
    lent: Buffer | None = None
    placed: Placement | None = None
    seconds: float = 0.0


Placer = Callable[[Chunk], Placement | None]
"""What takes the body of a chunk of which only the header is here; None: it is received into a buffer of the pool."""


class Deferred(Protocol):
    """A chunk that exists only when its turn on the wire has come.

    Exactly one of :meth:`render` and :meth:`drop` is called, once.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the body, for pacing."""
        ...

    async def render(self) -> Inbound | None:
        """Fetch the bytes; None if nobody wants them any more."""
        ...

    def drop(self) -> None:
        """The link will not send it."""
        ...


Outbound = Frame | Deferred
Urgent = Callable[[], Iterator[Frame]]


class Link(Protocol):
    """What a transport provides: an ordered, exactly-once frame stream while it lives."""

    @property
    def held_up(self) -> bool:
        """Whether :meth:`receive` waits for this end (a buffer, a disk) and not for the peer."""
        ...

    @property
    def by_reference(self) -> bool:
        """Whether bodies are handed over by reference: then no memory waits for what comes over a line."""
        ...

    @property
    def received(self) -> int:
        """Bytes that have come so far: a large frame on a slow line shows life before it is whole."""
        ...

    @property
    def certified(self) -> tuple[Address, ...] | None:
        """Addresses of the peer's certificate; None on a link without certificates."""
        ...

    @property
    def fingerprint(self) -> bytes | None:
        """Digest of the peer's certificate; None on a link without certificates."""
        ...

    def agree(self, limits: LinkLimits) -> None:
        """Send within what both ends accept from now on."""
        ...

    def place(self, placer: Placer) -> None:
        """Ask of every chunk who takes it, if bodies can be taken while they come."""
        ...

    def ready(self, item: Deferred) -> bool:
        """Whether the item can be sent as it is, without :meth:`fetch`."""
        ...

    async def fetch(self, item: Deferred) -> Deferred | None:
        """Wait for what sending the item would wait for at this end, such as a disk.

        Returns:
            What to send in its place; None: nobody wants it any more.
        """
        ...

    def send_nowait(self, frame: Frame) -> bool:
        """Send a control frame if that takes no waiting and gains nothing by it.

        Returns:
            Whether it has gone; else nothing of it has.
        """
        ...

    async def send(self, item: Outbound, urgent: Urgent) -> None:
        """Send one item; between its pieces, send what ``urgent()`` yields.

        Raises:
            LinkLostError: The link is gone; a deferred item was dropped.
        """
        ...

    async def receive(self) -> Inbound:
        """Receive the next frame.

        Raises:
            LinkLostError: The link is gone, cut or closed.
        """
        ...

    async def aclose(self) -> None:
        """Close both directions; idempotent."""
        ...


Listener = Callable[[Link], anyio.Event]
"""What a transport calls with a link that somebody opened; takes it over and must not block.

The event is set when the peer has said hello or the link was dropped; until then the transport may close it.
"""


class LinkDriver:
    """Drives one link.

    Args:
        link: The transport's half.
        mine: The hello this end sent.
        theirs: The hello of the peer.
        accepted: What both agreed on.
        uplink: Whether this end dialled it as its way out.
        timers: The endpoint's clock.
        dispatch: Called with every frame but ping, in order, without awaiting.
        place: Called with a chunk that is about to come; see :data:`Placer`.
        lines: The endpoint's log.
    """

    def __init__(
        self,
        link: Link,
        *,
        mine: Hello,
        theirs: Hello,
        accepted: Accepted,
        uplink: bool,
        timers: Timers,
        dispatch: Callable[[LinkDriver, Inbound], None],
        place: Callable[[LinkDriver, Chunk], Placement | None],
        lines: Lines,
    ) -> None:
        self.link = link
        link.place(lambda chunk: place(self, chunk))
        self.mine = mine
        self.theirs = theirs
        self.accepted = accepted
        self.uplink = uplink
        self.cause: StreamoffError | None = None
        self._dispatch = dispatch
        self._lines = lines
        self._control: deque[Frame] = deque()
        self._control_bytes = 0
        self._bulk: deque[Deferred] = deque()
        self._fetched: Deferred | None = None
        self._fetching = False
        self._departing = False
        self._sending = False
        self._tasks: TaskGroup | None = None
        self._mute = False
        self._wake = Signal()
        self._idle = Signal()
        self._now = timers.now
        self._heard = self._now()
        self._received = link.received
        self._pings = 0
        self._scope = anyio.CancelScope(shield=True)
        self._keepalive: Timer = timers.timer(self._beat)

    @property
    def peer(self) -> Address:
        """Who is at the other end."""
        return self.theirs.address

    @property
    def peers(self) -> tuple[Address, ...]:
        """Whom the other end may speak for, with what lies below: its certificate's word, or its own."""
        return (self.peer,) if self.link.certified is None else self.link.certified

    @property
    def backlog(self) -> int:
        """Items that wait for the writer, or that it has not got rid of."""
        bulk = len(self._bulk) + self._fetching + (self._fetched is not None)
        return len(self._control) + bulk + self._sending

    @property
    def _at_rest(self) -> bool:
        """Whether the writer has nothing to do."""
        busy = self._sending or self._control or self._fetched is not None
        return not busy and self._tasks is not None

    @property
    def crowded(self) -> bool:
        """Whether so much waits for the peer that what others send has to wait where it is."""
        return len(self._control) >= CROWDED_FRAMES or self._control_bytes >= CROWDED_BYTES

    def send_nowait(self, frame: Frame) -> None:
        """Queue a control frame; a link that is gone loses it silently, like a wire."""
        if self.cause is not None or self._mute:
            return
        if self._at_rest and self.link.send_nowait(frame):
            return
        if len(self._control) >= MAX_CONTROL:
            self.lose(
                LimitError(
                    "the peer reads nothing", expected=f"{MAX_CONTROL} frames waiting", got="more"
                )
            )
            return
        self._control.append(frame)
        self._control_bytes += _body_bytes(frame)
        self._wake.notify()

    def serve_nowait(self, item: Deferred) -> None:
        """Queue a chunk."""
        if self.cause is not None or self._mute:
            item.drop()
            return
        self._bulk.append(item)
        self._fetch_next()

    def lose(self, cause: StreamoffError) -> None:
        """End the link; the first cause stands."""
        if self.cause is None:
            self.cause = cause
            self._scope.cancel()

    async def run(self) -> StreamoffError:
        """Read and write until the link is lost; cancellation from outside does not reach it.

        Returns:
            Why it ended.
        """
        self._keepalive.at(self._now() + KEEPALIVE_SECONDS)
        try:
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    self._tasks.start_soon(self._guarded, self._write_out)
                    self._tasks.start_soon(self._guarded, self._read)
                    self._fetch_next()
        finally:
            self._tasks = None
            self._keepalive.cancel()
            self._drop_queues()
            with anyio.CancelScope(shield=True, deadline=self._now() + 1.0):
                await self.link.aclose()
        return self.cause or LinkLostError("the link ended", peer=self.peer)

    async def _guarded(self, work: Callable[[], object]) -> None:
        try:
            await work()  # type: ignore[misc]
        except InvariantError as error:
            self._tell_defect(error)
            self.lose(error)
        except StreamoffError as error:
            self.lose(error)
        except Exception as error:  # noqa: BLE001 - it is told, and ends this link only
            self._tell_defect(error)
            self.lose(LinkLostError("a defect ended the link", got=repr(error), peer=self.peer))

    def _tell_defect(self, error: Exception) -> None:
        text = "a defect ends the link to %s"
        self._lines.tell(logger, logging.ERROR, "defect", text, self.peer, exc_info=error)

    async def flush(self) -> None:
        """Wait until the transport has taken everything or the link is lost; the caller bounds it."""
        while self.backlog and self.cause is None:
            await self._idle.wait()

    def _drop_queues(self) -> None:
        if self._fetched is not None:
            self._fetched.drop()
            self._fetched = None
        while self._bulk:
            self._bulk.popleft().drop()
        self._control.clear()
        self._control_bytes = 0
        self._sending = False
        self._idle.notify()

    def _take_control(self) -> Iterator[Frame]:
        while self._control:
            yield self._next_control()

    def _next_control(self) -> Frame:
        frame = self._control.popleft()
        self._control_bytes -= _body_bytes(frame)
        return frame

    async def _write_out(self) -> None:
        """Write until nobody takes it; the peer's last words are still read: the reader ends the link."""
        try:
            await self._write()
        except LinkLostError:
            self._mute = True
            self._drop_queues()

    async def _write(self) -> None:
        while True:
            self._sending = True
            while self._control or self._fetched is not None:
                if self._control:
                    await self.link.send(self._next_control(), self._take_control)
                elif self._fetched is not None:
                    item, self._fetched = self._fetched, None
                    self._departing = True
                    await self.link.send(item, self._take_control)
                    self._departing = False
                    self._fetch_next()
            self._sending = False
            self._idle.notify()
            await self._wake.wait()

    def _fetch_next(self) -> None:
        """Fetch the next chunk if the last one has gone: a slow disk holds up no control frame."""
        busy = self._fetching or self._fetched is not None or self._departing
        if not self._bulk or self._tasks is None or busy:
            return
        if self.link.ready(self._bulk[0]):
            self._fetched = self._bulk.popleft()
            self._wake.notify()
        else:
            self._fetching = True
            self._tasks.start_soon(self._guarded, self._fetch)

    async def _fetch(self) -> None:
        while self._bulk and self._fetched is None:
            item = await self.link.fetch(self._bulk.popleft())
            if item is not None and self._mute:
                item.drop()
            else:
                self._fetched = item
        self._fetching = False
        self._wake.notify()
        self._idle.notify()

    async def _read(self) -> None:
        while True:
            inbound = await self.link.receive()
            self._heard = self._now()
            frame = inbound.frame
            match frame:
                case Ping(reply=False):
                    self.send_nowait(Ping(id=frame.id, reply=True))
                case Ping():
                    pass
                case Hello():
                    raise UnexpectedMessageError("a second hello", peer=self.peer)
                case _:
                    self._dispatch(self, inbound)

    def _beat(self) -> None:
        now = self._now()
        received = self.link.received
        if self.link.held_up or received != self._received:
            # what the peer says waits for us, or is a frame that takes its time
            self._heard, self._received = now, received
        if now >= self._heard + SILENCE_SECONDS:
            self.lose(
                LinkLostError(
                    "the link is silent",
                    expected=f"a frame within {SILENCE_SECONDS:g} s",
                    got=f"{now - self._heard:.1f} s of silence",
                    peer=self.peer,
                )
            )
            return
        self._pings += 1
        self.send_nowait(Ping(id=self._pings, reply=False))
        self._keepalive.at(min(now + KEEPALIVE_SECONDS, self._heard + SILENCE_SECONDS))


def _body_bytes(frame: Frame) -> int:
    return sum(map(len, frame.body)) if isinstance(frame, Message) else 0
