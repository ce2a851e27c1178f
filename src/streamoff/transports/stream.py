"""A link over a byte stream: frames on a non-blocking socket, without a copy of a chunk in user space.

The syscall comes first and the wait only when it would block. A body is received into the pool's buffer, and
the same call brings the prefix of the next frame along. A chunk is sent from where it lies, 256 KiB at a
time, and control frames overtake it in between. A frame that was begun is finished or the link is lost.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import anyio
import anyio.lowlevel

from streamoff.errors import LimitError, LinkLostError
from streamoff.runtime.link import Inbound, Outbound, Urgent
from streamoff.runtime.pool import Buffer, BufferPool
from streamoff.types import MIB, Address
from streamoff.wire.assembly import Abandoned, Assembler, fits, split
from streamoff.wire.codec import PREFIX_BYTES, Encoded, Prefix, encode
from streamoff.wire.frames import Chunk, Frame, Views
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["LINGER_SECONDS", "ByteStream", "PlainStream", "StreamLink"]

LINGER_SECONDS: Final = 0.5
"""What a closing end waits for the other one to take the last frames."""
YIELD_BYTES: Final = MIB
"""Bytes after which a busy reader or writer lets others run."""
CONTROL_AHEAD: Final = 64 * 1024
BULK_AHEAD: Final = 512
"""Bytes read beyond a body: the head of the next frame, never the body behind it."""
MAX_VIEWS: Final = 512
"""Views handed to one sendmsg(2); the kernel takes 1024."""


class ByteStream(Protocol):
    """A non-blocking, ordered byte stream; one reader and one writer at a time."""

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        """Fill the views in order with at least one byte; as many as are here.

        Raises:
            LinkLostError: The other end is gone.
        """
        ...

    async def send_all(self, views: Sequence[memoryview]) -> None:
        """Send every byte.

        Raises:
            LinkLostError: The other end is gone.
        """
        ...

    async def aclose(self) -> None:
        """Send what is left, wait briefly for the other end, close. Idempotent."""
        ...


class PlainStream:
    """A connected stream socket, made non-blocking; owned from here on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._closed = False

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        """See :class:`ByteStream`."""
        while True:
            try:
                got = self._sock.recvmsg_into(views)[0]
            except (BlockingIOError, InterruptedError):
                await wait_readable(self._sock)
                continue
            except OSError as error:
                raise lost(error) from error
            if not got:
                raise LinkLostError("the other end closed the link")
            return got

    async def send_all(self, views: Sequence[memoryview]) -> None:
        """See :class:`ByteStream`."""
        left = [view for view in views if view]
        while left:
            try:
                sent = self._sock.sendmsg(left[:MAX_VIEWS])
            except (BlockingIOError, InterruptedError):
                await wait_writable(self._sock)
                continue
            except OSError as error:
                raise lost(error) from error
            _consume(left, sent)

    async def aclose(self) -> None:
        """See :class:`ByteStream`."""
        if not self._closed:
            self._closed = True
            try:
                await linger(self._sock, self._sock)
            finally:
                shut(self._sock)


def _consume(views: list[memoryview], sent: int) -> None:
    """Drop what was sent from the front."""
    done = 0
    while done < len(views) and sent >= len(views[done]):
        sent -= len(views[done])
        done += 1
    del views[:done]
    if sent:
        views[0] = views[0][sent:]


async def wait_readable(sock: socket.socket) -> None:
    """Wait until a read would not block.

    Raises:
        LinkLostError: The socket was closed meanwhile.
    """
    try:
        await anyio.wait_readable(sock)
    except (anyio.ClosedResourceError, ValueError, OSError) as error:
        raise LinkLostError("the link was closed") from error


async def wait_writable(sock: socket.socket) -> None:
    """Wait until a write would not block; raises as :func:`wait_readable`."""
    try:
        await anyio.wait_writable(sock)
    except (anyio.ClosedResourceError, ValueError, OSError) as error:
        raise LinkLostError("the link was closed") from error


def lost(error: OSError) -> LinkLostError:
    """The end of a link as an error of ours."""
    return LinkLostError(f"the link was reset ({error.strerror or error})")


async def linger(sock: socket.socket, raw: socket.socket) -> None:
    """Say that no more will be sent and read until the other end says so too, bounded.

    Closing at once would reset the connection if unread bytes are left, and the last frames with it.
    """
    try:
        raw.shutdown(socket.SHUT_WR)
    except OSError:
        return
    rest = memoryview(bytearray(CONTROL_AHEAD))
    with anyio.move_on_after(LINGER_SECONDS):
        while True:
            try:
                if not sock.recv_into(rest):
                    return
            except (BlockingIOError, InterruptedError):
                await wait_readable(raw)
            except (OSError, LinkLostError):
                return
            await anyio.lowlevel.checkpoint()


def shut(sock: socket.socket) -> None:
    """Close a socket, waking whoever waits for it. Idempotent."""
    if sock.fileno() >= 0:
        anyio.notify_closing(sock)
        sock.close()


class _Intake:
    """Bytes from a stream: heads through a small buffer, bodies straight to where they belong."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._ahead = memoryview(bytearray(CONTROL_AHEAD + PREFIX_BYTES))
        self._start = 0
        self._stop = 0
        self._bulk = False
        self._since_yield = 0

    async def _receive(self, views: Sequence[memoryview]) -> int:
        got = await self._stream.receive_into(views)
        self._since_yield += got
        if self._since_yield >= YIELD_BYTES:
            self._since_yield = 0
            await anyio.lowlevel.checkpoint()
        return got

    async def head(self, size: int) -> memoryview:
        """Exactly ``size`` bytes, at most 64 KiB; valid until the next call."""
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
            self._stop += await self._receive([self._ahead[self._stop : end]])
        self._start += size
        return self._ahead[self._start - size : self._start]

    async def body(self, view: memoryview, *, more: bool) -> None:
        """Fill ``view``; ``more``: the next frame goes on with this body, so only its prefix is read along."""
        self._bulk = len(view) >= CONTROL_AHEAD
        have = min(self._stop - self._start, len(view))
        view[:have] = self._ahead[self._start : self._start + have]
        self._start += have
        if have == len(view):
            return
        self._start = self._stop = 0
        ahead = PREFIX_BYTES if more else BULK_AHEAD
        while have < len(view):
            got = await self._receive([view[have:], self._ahead[self._stop : self._stop + ahead]])
            over = have + got - len(view)
            have = min(have + got, len(view))
            self._stop += max(0, over)


class StreamLink:
    """A :class:`~streamoff.runtime.link.Link` over a byte stream.

    At most one pool buffer per unfinished chunk is held; a peer can have
    :attr:`~streamoff.wire.limits.LinkLimits.channels` of them. Bodies of messages are kept piece by piece as
    they come, so a length that is only claimed costs nothing.

    Args:
        stream: Connected; owned from here on.
        pool: Lends the buffers that chunks are received into.
        limits: What may come.
        certified: Addresses of the peer's certificate; None without certificates.
    """

    def __init__(
        self,
        stream: ByteStream,
        pool: BufferPool,
        *,
        limits: Limits = DEFAULT_LIMITS,
        certified: tuple[Address, ...] | None = None,
    ) -> None:
        self.certified = certified
        self._stream = stream
        self._pool = pool
        self._limits = limits
        self._intake = _Intake(stream)
        self._assembler = Assembler(limits)
        self._buffers: dict[int, tuple[Buffer, int]] = {}
        self._channel = 0
        self._waiting = False

    @property
    def held_up(self) -> bool:
        """Whether reading waits for a buffer of ours."""
        return self._waiting

    # --- sending ----------------------------------------------------------------------------------

    async def send(self, item: Outbound, urgent: Urgent) -> None:
        """Send one item; see :class:`~streamoff.runtime.link.Link`."""
        if isinstance(item, Frame):
            await self._send_control([item, *urgent()], urgent)
            return
        inbound = await item.render()
        if inbound is None:
            await anyio.lowlevel.checkpoint()
            return
        try:
            await self._send_frame(encode(inbound.frame, self._limits), urgent)
        finally:
            inbound.release()

    async def _send_control(self, frames: list[Frame], urgent: Urgent) -> None:
        """Small frames go out together, large ones in pieces."""
        batch: list[memoryview] = []
        for frame in frames:
            encoded = encode(frame, self._limits)
            if fits(encoded, self._limits.link.frame):
                batch += (memoryview(encoded.head), *encoded.body)
                continue
            await self._flush(batch)
            await self._send_frame(encoded, urgent)
        await self._flush(batch)
        await anyio.lowlevel.checkpoint()

    async def _flush(self, batch: list[memoryview]) -> None:
        if batch:
            await self._stream.send_all(batch)
            batch.clear()

    async def _send_frame(self, encoded: Encoded, urgent: Urgent) -> None:
        self._channel = self._channel % 0xFFFF + 1
        since_yield = 0
        for head, views in split(encoded, self._channel, self._limits.link.frame):
            overtaking = [memoryview(part) for frame in urgent() for part in self._whole(frame)]
            await self._stream.send_all([*overtaking, memoryview(head), *views])
            since_yield += sum(map(len, views))
            if since_yield >= YIELD_BYTES:
                since_yield = 0
                await anyio.lowlevel.checkpoint()

    def _whole(self, frame: Frame) -> Iterator[bytes | memoryview]:
        """A control frame as bytes; one with a large body takes a channel of its own."""
        encoded = encode(frame, self._limits)
        self._channel = self._channel % 0xFFFF + 1
        for head, views in split(encoded, self._channel, self._limits.link.frame):
            yield head
            yield from views

    # --- receiving --------------------------------------------------------------------------------

    async def receive(self) -> Inbound:
        """Receive the next frame; see :class:`~streamoff.runtime.link.Link`."""
        while True:
            prefix = self._assembler.prefix(await self._intake.head(PREFIX_BYTES))
            outline: Frame | None = None
            if prefix.header_bytes:
                outline = self._assembler.header(
                    prefix, await self._intake.head(prefix.header_bytes)
                )
            views = await self._body(prefix, outline)
            done = self._assembler.body(prefix, views)
            if done is None:
                continue
            buffer = self._buffers.pop(prefix.channel, None)
            if isinstance(done, Abandoned):
                if buffer is not None:
                    buffer[0].release()
                continue
            return Inbound(done) if buffer is None else Inbound(done, buffer[0].release)

    async def _body(self, prefix: Prefix, outline: Frame | None) -> Views:
        """Receive a piece of a body: of a chunk into its buffer, of anything else into memory of its own."""
        if not prefix.body_bytes:
            return ()
        if isinstance(outline, Chunk):
            await self._lend(prefix.channel, prefix.body_bytes + prefix.rest)
        lent = self._buffers.get(prefix.channel)
        if lent is None or (outline is not None and not isinstance(outline, Chunk)):
            view = memoryview(bytearray(prefix.body_bytes))
        else:
            buffer, used = lent
            view = buffer.view(used + prefix.body_bytes)[used:]
            self._buffers[prefix.channel] = (buffer, used + prefix.body_bytes)
        await self._intake.body(view, more=prefix.rest > 0)
        return (view,)

    async def _lend(self, channel: int, nbytes: int) -> None:
        if nbytes > self._pool.size:
            raise LimitError(
                "a chunk larger than was pulled", expected=f"at most {self._pool.size}", got=nbytes
            )
        self._waiting = True
        try:
            self._buffers[channel] = (await self._pool.borrow(), 0)
        finally:
            self._waiting = False

    async def aclose(self) -> None:
        """Close; buffers of unfinished chunks go back. Idempotent."""
        self._assembler.close()
        while self._buffers:
            self._buffers.popitem()[1][0].release()
        await self._stream.aclose()
