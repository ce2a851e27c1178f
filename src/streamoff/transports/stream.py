"""A link over a byte stream: frames on a non-blocking socket, without a copy of a chunk in user space.

The syscall comes first and the wait only when it would block. A chunk is taken by its receiver while it comes, in
memory of its own or from a small buffer, or else received whole into a buffer of the pool; and the same call brings the
prefix of the next frame along. A chunk is sent
from where it lies, piece by piece, and control frames overtake it in between, in their own order: so pieces are as
large as the line is fast, and a large piece tells the other end that it need not wake for a few bytes. A frame that
was begun is finished or the link is lost; a chunk that was begun may be abandoned between two frames.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Final

import anyio
import anyio.lowlevel

from streamoff.errors import LimitError
from streamoff.runtime.link import Deferred, Inbound, Outbound, Placement, Placer, Urgent
from streamoff.runtime.pool import Buffer, BufferPool, Tenure
from streamoff.tensors.views import scatter
from streamoff.transports.streams import ByteStream, consume
from streamoff.types import MIB, Address
from streamoff.wire.assembly import Abandoned, Assembler, Pieces, abandon, split
from streamoff.wire.codec import PREFIX_BYTES, Prefix, encode
from streamoff.wire.frames import Chunk, Frame, Views
from streamoff.wire.limits import DEFAULT_LIMITS, Limits, LinkLimits

__all__ = ["StreamLink"]

YIELD_BYTES: Final = 2 * MIB
"""Bytes after which a busy reader or writer lets others run."""
HEAD_COST: Final = 8 * 1024
"""What a prefix or a header counts for, in bytes: frames cost time, too."""
CONTROL_AHEAD: Final = 64 * 1024
RECORD_AHEAD: Final = 64 * 1024
"""What TLS may have taken from the kernel and not given out; and the end of a body is not worth waiting for."""
BULK_AHEAD: Final = 512
"""Bytes read beyond a body: the head of the next frame, never the body behind it."""
SLOW_PIECE: Final = 32 * 1024
"""Bytes of a frame of a chunk, and what the kernel may hold unsent, until a line has shown that it is fast."""
PAGE_BYTES: Final = 4096
"""What the size of a frame is a multiple of, so that cuts split no element of a tensor."""
PIECE_SECONDS: Final = 0.02
"""What a frame of a chunk may take at the speed of the chunk before."""
FAST_PIECE: Final = 512 * 1024
"""A body of at least this size comes over a fast line: the reader wakes for a good part of it, not for each packet."""
WAKE_BYTES: Final = 256 * 1024
BATCH_BYTES: Final = 64 * 1024
"""Control frames that go out in one call."""
CHUNK_CHANNEL: Final = 1
CONTROL_CHANNEL: Final = 2
"""One chunk and one large control frame are unfinished at most."""


class _Filling:
    """A piece of a body that is being received; ``rest`` is what is still to be filled, and may be exchanged."""

    __slots__ = ("have", "rest", "size")

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.rest = list(views)
        self.size = sum(map(len, self.rest))
        self.have = 0

    def put(self, content: memoryview) -> None:
        """Take bytes that were read ahead, at most what is missing."""
        scatter((content,), self.rest)
        self.filled(len(content))

    def filled(self, nbytes: int) -> None:
        """So many more bytes are there."""
        self.have += nbytes
        consume(self.rest, nbytes)


class _Intake:
    """Bytes from a stream: heads through a small buffer, bodies straight to where they belong."""

    def __init__(self, stream: ByteStream) -> None:
        self.received = 0
        self._stream = stream
        self._ahead = memoryview(bytearray(CONTROL_AHEAD + PREFIX_BYTES))
        self._start = 0
        self._stop = 0
        self._bulk = False
        self._busy = 0

    async def _rest(self) -> None:
        self._busy = 0
        await anyio.lowlevel.checkpoint()

    async def _receivable(self, nbytes: int = 1) -> None:
        """Wait for bytes; for a good part of ``nbytes`` that are sure to come, over a line that is fast."""
        self._busy = 0
        self._stream.marks.readable(nbytes)
        await self._stream.receivable()

    async def head(self, size: int) -> memoryview:
        """Exactly ``size`` bytes, at most 64 KiB; valid until the next call."""
        self._busy += HEAD_COST
        if self._busy >= YIELD_BYTES:
            await self._rest()
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._start + size > len(self._ahead):
            kept = self._stop - self._start
            self._ahead[:kept] = bytes(self._ahead[self._start : self._stop])
            self._start, self._stop = 0, kept
        while self._stop - self._start < size:
            missing = size - (self._stop - self._start)
            room = BULK_AHEAD if self._bulk else CONTROL_AHEAD
            end = min(len(self._ahead), self._stop + max(missing, room))
            got = self._stream.receive_nowait([self._ahead[self._stop : end]])
            if got:
                self._stop += got
                self.received += got
            else:
                await self._receivable()
        self._start += size
        return self._ahead[self._start - size : self._start]

    async def body(self, filling: _Filling, *, more: bool) -> None:
        """Fill a piece; ``more``: the body goes on in the next frame, so only its prefix is read along."""
        size = filling.size
        self._bulk = size >= CONTROL_AHEAD
        have = min(self._stop - self._start, size)
        filling.put(self._ahead[self._start : self._start + have])
        self._start += have
        if have == size:
            return
        self._start = self._stop = 0
        ahead = self._ahead[: PREFIX_BYTES if more else BULK_AHEAD]
        while filling.have < size:
            got = self._stream.receive_nowait([*filling.rest, ahead])
            if not got:
                left = size - filling.have - RECORD_AHEAD
                await self._receivable(
                    min(left, WAKE_BYTES) if size >= FAST_PIECE and left > 0 else 1
                )
                continue
            self.received += got
            self._stop = max(0, filling.have + got - size)
            filling.filled(got - self._stop)
            self._busy += got
            if self._busy >= YIELD_BYTES:
                await self._rest()


def _nobody(_chunk: Chunk) -> None:
    """Nobody takes a chunk while it comes."""


@functools.cache
def _blank(nbytes: int) -> memoryview:
    """Zeros that nobody looks at: the assembler counts the bytes of a chunk, its buffer holds them."""
    return memoryview(bytes(nbytes))


class _Arriving:
    """The chunk that is being received: whole into a buffer of the pool, or for a placement, part by part.

    Args:
        channel: Of its frames.
        nbytes: Of its body.
        buffer: On loan; None: the placement has memory of its own.
        placement: What takes the body; None: nothing does.
        part: Bytes that it takes at a time, if pieces are not larger.
    """

    __slots__ = (
        "_buffer",
        "_memory",
        "_part",
        "_pieces",
        "_placement",
        "_received",
        "_since",
        "_untaken",
        "_waste",
        "channel",
        "filling",
    )

    def __init__(
        self,
        channel: int,
        nbytes: int,
        buffer: Buffer | None,
        placement: Placement | None,
        part: int,
    ) -> None:
        self.channel = channel
        self.filling = _Filling(())
        self._buffer = buffer
        self._placement = placement
        self._part = part
        self._received = 0
        self._since = anyio.current_time()
        self._untaken: list[memoryview] = []
        self._waste = memoryview(b"")
        if buffer is not None:
            self._memory: Views = (buffer.view(nbytes if placement is None else part),)
            buffer.tenure = Tenure(lambda: self._received + self.filling.have, self.give_up)
        elif placement is not None:
            self._memory = placement.views or ()
        self._pieces = Pieces(self._memory)
        if placement is not None:
            placement.begin(self.give_up)

    def piece(self, nbytes: int) -> _Filling:
        """Where the next piece goes."""
        self._received += self.filling.have
        if not self._memory:
            views: Views = (self._wasted(nbytes),)
        else:
            if self._placement is not None:
                self._pass_on(self._placement, unless=self._part - nbytes)
            views = self._pieces.take(nbytes)
            self._untaken += views
        self.filling = _Filling(views)
        return self.filling

    def _pass_on(self, placement: Placement, *, unless: int) -> None:
        """Show the placement what it has not seen, unless that is little; a buffer is then filled from its front again."""
        if sum(map(len, self._untaken)) <= unless:
            return
        placement.take(tuple(self._untaken))
        self._untaken.clear()
        if self._buffer is not None:
            self._pieces = Pieces(self._memory)

    def give_up(self) -> None:
        """Let go of the memory; what is still to come is received and forgotten."""
        if self._memory:
            self.filling.rest = [self._wasted(self.filling.size - self.filling.have)]
        self._memory, self._placement = (), None
        self._untaken.clear()
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.release()

    def _wasted(self, nbytes: int) -> memoryview:
        if len(self._waste) < nbytes:
            self._waste = memoryview(bytearray(nbytes))
        return self._waste[:nbytes]

    def whole(self, chunk: Chunk) -> Inbound:
        """What comes out: the chunk with its buffer, or with what has taken its body, or, given up, without either."""
        placement = self._placement
        if placement is not None:
            self._pass_on(placement, unless=0)
            self.give_up()
        whole = dataclasses.replace(chunk, body=self._memory)
        buffer, self._buffer, self._memory = self._buffer, None, ()
        seconds = anyio.current_time() - self._since
        if buffer is None:
            return Inbound(whole, placed=placement, seconds=seconds)
        buffer.tenure = None
        return Inbound(whole, buffer.release, buffer, seconds=seconds)


class _Departing:
    """A chunk that has been fetched and is being sent, piece by piece.

    Args:
        inbound: The chunk; on loan until the last piece has gone.
        pieces: Heads and views of its frames; at least one.
    """

    __slots__ = ("_given_up", "_inbound", "_pieces", "piece")

    def __init__(self, inbound: Inbound, pieces: Iterator[tuple[bytes, Views]]) -> None:
        self._inbound = inbound
        self._pieces = pieces
        self._given_up = False
        self.piece: list[memoryview] = []
        self.next()

    @property
    def nbytes(self) -> int:
        """See :class:`~streamoff.runtime.link.Deferred`."""
        return sum(map(len, self.piece))

    async def render(self) -> Inbound:
        """See :class:`~streamoff.runtime.link.Deferred`."""
        return self._inbound

    def drop(self) -> None:
        """Return the memory, once."""
        if not self._given_up:
            self._inbound.release()

    def next(self) -> bool:
        """Go on to the next piece, if there is one; of a chunk that was given up it says that there is no more."""
        head, views = next(self._pieces, (b"", ()))
        if head and self._given_up:
            head, views, self._pieces = abandon(CHUNK_CHANNEL), (), iter(())
        self.piece = [memoryview(head), *views] if head else []
        return bool(head)

    def give_up(self) -> None:
        """Return the memory; what is left of the piece at hand is kept, so that its frame is finished."""
        self._given_up = True
        self.piece[:] = [memoryview(bytes(view)) for view in self.piece]
        self._inbound.release()


class StreamLink:
    """A :class:`~streamoff.runtime.link.Link` over a byte stream.

    At most one chunk is received at a time, into one buffer of the pool or the receiver's memory, whatever the
    peer does; bodies of messages are kept piece by piece as they come, so a length that is only claimed costs nothing.

    Args:
        stream: Connected; owned from here on.
        pool: Lends the buffers that chunks are received into.
        limits: What may come.
        certified: Addresses of the peer's certificate; None without certificates.
        fingerprint: Digest of the peer's certificate; None without certificates.
    """

    def __init__(
        self,
        stream: ByteStream,
        pool: BufferPool,
        *,
        limits: Limits = DEFAULT_LIMITS,
        certified: tuple[Address, ...] | None = None,
        fingerprint: bytes | None = None,
    ) -> None:
        self.certified = certified
        self.fingerprint = fingerprint
        self._stream = stream
        self._pool = pool
        self._limits = limits
        self._frame = limits.link.frame
        self._piece = SLOW_PIECE
        stream.marks.unsent(SLOW_PIECE)
        self._intake = _Intake(stream)
        self._assembler = Assembler(limits)
        self._arriving: _Arriving | None = None
        self._placer: Placer = _nobody
        self._sent = 0
        self._waiting = False

    @property
    def held_up(self) -> bool:
        """Whether reading waits for a buffer of ours."""
        return self._waiting

    @property
    def by_reference(self) -> bool:
        """See :class:`~streamoff.runtime.link.Link`."""
        return False

    @property
    def received(self) -> int:
        """Bytes that have come so far, read or not."""
        return self._intake.received + self._stream.marks.arrived()

    def agree(self, limits: LinkLimits) -> None:
        """Cut what is sent to what both ends accept."""
        self._frame = limits.frame
        self._piece = min(self._piece, limits.frame)

    def place(self, placer: Placer) -> None:
        """Give bodies of chunks, while they come, to who takes them; see :class:`~streamoff.runtime.link.Link`."""
        self._placer = placer

    # --- sending ----------------------------------------------------------------------------------

    def ready(self, item: Deferred) -> bool:
        """Whether a chunk has been fetched; see :class:`~streamoff.runtime.link.Link`."""
        return isinstance(item, _Departing)

    def send_nowait(self, frame: Frame) -> bool:  # noqa: ARG002 - the protocol's
        """Frames that wait for the writer go out together, in one call; see :class:`~streamoff.runtime.link.Link`."""
        return False

    async def fetch(self, item: Deferred) -> Deferred | None:
        """Fetch a chunk; see :class:`~streamoff.runtime.link.Link`."""
        inbound = await item.render()
        if inbound is None:
            return None
        try:
            encoded = encode(inbound.frame, self._limits)
            departing = _Departing(inbound, split(encoded, CHUNK_CHANNEL, self._piece))
        except BaseException:
            inbound.release()
            raise
        if inbound.lent is not None:
            inbound.lent.tenure = Tenure(lambda: self._sent, departing.give_up)
        return departing

    async def send(self, item: Outbound, urgent: Urgent) -> None:
        """Send one item; see :class:`~streamoff.runtime.link.Link`."""
        if isinstance(item, Frame):
            await self._send_control(itertools.chain((item,), urgent()))
        else:
            departing = item if isinstance(item, _Departing) else await self.fetch(item)
            if isinstance(departing, _Departing):
                await self._send_chunk(departing, urgent)
        await anyio.lowlevel.checkpoint()

    async def _send_control(self, frames: Iterable[Frame]) -> None:
        """Send frames whole and in order, as many as fit into one call."""
        batch: list[memoryview] = []
        nbytes = 0
        for frame in frames:
            encoded = encode(frame, self._limits)
            for head, views in split(encoded, CONTROL_CHANNEL, self._frame):
                batch += (memoryview(head), *views)
                nbytes += len(head) + sum(map(len, views))
                if nbytes >= BATCH_BYTES:
                    await self._put(batch)
                    await anyio.lowlevel.checkpoint()
                    nbytes = 0
        await self._put(batch)

    async def _send_chunk(self, departing: _Departing, urgent: Urgent) -> None:
        begun, sent, since_rest = anyio.current_time(), self._sent, 0
        try:
            await self._put(departing.piece)
            while departing.next():
                await self._send_control(urgent())
                since_rest += departing.nbytes
                await self._put(departing.piece)
                if since_rest >= YIELD_BYTES:
                    since_rest = 0
                    await anyio.lowlevel.checkpoint()
        finally:
            departing.drop()
        self._set_pace(self._sent - sent, anyio.current_time() - begun)

    def _set_pace(self, nbytes: int, seconds: float) -> None:
        """Cut the next chunk to what the line has shown it can carry in :data:`PIECE_SECONDS`."""
        if nbytes < MIB:
            return  # says more of the kernel's buffers than of the line
        affordable = nbytes * PIECE_SECONDS / max(seconds, 1e-6)
        pages = int(affordable) // PAGE_BYTES * PAGE_BYTES
        self._piece = min(max(pages, SLOW_PIECE), self._frame)
        self._stream.marks.unsent(max(SLOW_PIECE, self._piece // 2))

    async def _put(self, views: list[memoryview]) -> None:
        """Send every byte; the list is emptied from the front."""
        views[:] = filter(None, views)
        while views:
            sent = self._stream.send_nowait(views)
            if sent:
                self._sent += sent
                consume(views, sent)
            else:
                await self._stream.sendable()

    # --- receiving --------------------------------------------------------------------------------

    async def receive(self) -> Inbound:
        """Receive the next frame; see :class:`~streamoff.runtime.link.Link`."""
        while True:
            prefix = self._assembler.prefix(await self._intake.head(PREFIX_BYTES))
            outline: Frame | None = None
            if prefix.header_bytes:
                header = await self._intake.head(prefix.header_bytes)
                outline = self._assembler.header(prefix, header)
            views = await self._body(prefix, outline)
            done = self._assembler.body(prefix, views)
            if done is not None and (inbound := self._whole(done)) is not None:
                return inbound

    async def _body(self, prefix: Prefix, outline: Frame | None) -> Views:
        """Receive a piece of a body: of a chunk into its buffer, of anything else into memory of its own."""
        if not prefix.body_bytes:
            return ()
        if isinstance(outline, Chunk):
            await self._begin_chunk(prefix, outline)
        chunk = self._arriving
        if chunk is not None and chunk.channel == prefix.channel:
            await self._intake.body(chunk.piece(prefix.body_bytes), more=prefix.rest > 0)
            return (_blank(self._limits.link.frame)[: prefix.body_bytes],)
        view = memoryview(bytearray(prefix.body_bytes))
        await self._intake.body(_Filling((view,)), more=prefix.rest > 0)
        return (view,)

    async def _begin_chunk(self, prefix: Prefix, outline: Chunk) -> None:
        if self._arriving is not None:
            raise LimitError("chunks at a time", expected="1", got="another one")
        nbytes = prefix.body_bytes + prefix.rest
        placement, buffer = self._placer(outline), None
        part = min(self._limits.link.frame, nbytes)
        if placement is None or placement.views is None:
            self._waiting = True
            try:
                buffer = await self._pool.borrow(nbytes if placement is None else part)
            finally:
                self._waiting = False
        self._arriving = _Arriving(prefix.channel, nbytes, buffer, placement, part)

    def _whole(self, done: Frame | Abandoned) -> Inbound | None:
        """A finished frame, or a chunk that was given up at the other end; other abandoned bodies are nothing."""
        frame = done.frame if isinstance(done, Abandoned) else done
        if not isinstance(frame, Chunk):
            return None if isinstance(done, Abandoned) else Inbound(frame)
        chunk, self._arriving = self._arriving, None
        assert chunk is not None
        if isinstance(done, Abandoned):
            chunk.give_up()
        return chunk.whole(frame)

    async def aclose(self) -> None:
        """Close; the buffer of an unfinished chunk goes back. Idempotent."""
        self._assembler.close()
        chunk, self._arriving = self._arriving, None
        if chunk is not None:
            chunk.give_up()
        await self._stream.aclose()
