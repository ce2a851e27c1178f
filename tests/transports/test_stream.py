"""Links over byte streams: every byte, in order, or a typed end; and memory that always comes back."""

from __future__ import annotations

import gc
import select
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from streamoff.errors import LandingError, LimitError, LinkLostError, MalformedFrameError
from streamoff.runtime.link import Inbound, Placement
from streamoff.runtime.pool import BufferPool
from streamoff.tensors.digests import chunk_digest
from streamoff.transports.stream import StreamLink
from streamoff.transports.streams import PlainStream, Watermarks
from streamoff.types import MIB, Address
from streamoff.wire.assembly import abandon, split
from streamoff.wire.codec import PREFIX_BYTES, Prefix, encode
from streamoff.wire.frames import (
    Chunk,
    Error,
    ErrorCode,
    Frame,
    FrameType,
    Message,
    MessageKind,
    Ping,
    Views,
)
from streamoff.wire.limits import LinkLimits

from ..runtime.world import pattern
from .real import (  # noqa: F401 - a fixture among them
    KINDS,
    Consortium,
    Ready,
    closing,
    every_loop,
    link_pair,
    send,
    settled,
    socket_pair,
)

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_leaks")]

ROUTE: dict[str, Any] = {"to": Address("server"), "sender": Address("site-1")}


def chunk(nbytes: int, start: int = 0, stream: int = 1) -> Chunk:
    """A chunk of bytes that are different everywhere."""
    body = memoryview(pattern(start, start + nbytes).tobytes())
    return Chunk(
        **ROUTE,
        stream=stream,
        start=start,
        stop=start + nbytes,
        digest=chunk_digest((body,), start),
        body=(body,),
    )


def message(nbytes: int, number: int = 1, topic: str = "t") -> Message:
    """A message with a body."""
    body = memoryview(pattern(0, nbytes).tobytes())
    return Message(**ROUTE, kind=MessageKind.NOTIFY, topic=topic, id=number, body=(body,))


def ping(number: int) -> Ping:
    """A ping."""
    return Ping(id=number, reply=False)


def ready(frame: Chunk) -> Ready:
    """The chunk as something that a driver would queue."""
    return Ready(Inbound(frame), frame.stop - frame.start)


async def lent(pool: BufferPool, frame: Chunk) -> Ready:
    """The chunk in a buffer of a pool, as a source on disk has it."""
    buffer = await pool.borrow(frame.stop - frame.start)
    view = buffer.view(frame.stop - frame.start)
    view[:] = frame.body[0]
    copy = Chunk(
        **ROUTE,
        stream=frame.stream,
        start=frame.start,
        stop=frame.stop,
        digest=frame.digest,
        body=(view,),
    )
    return Ready(Inbound(copy, buffer.release, buffer), frame.stop - frame.start)


class Taker:
    """A receiver that takes the body of a chunk while it comes.

    Args:
        frame: The chunk.
        memory: Whether it is received in memory of the receiver's: in four places, one of them empty.
        fails: After how many parts the receiver can take no more.
    """

    def __init__(self, frame: Chunk, *, memory: bool, fails: int = -1) -> None:
        size = frame.stop - frame.start
        sizes = (size // 3, 0, size // 2, size - size // 3 - size // 2)
        self.memory = tuple(memoryview(bytearray(one)) for one in sizes)
        self.placement = Placement(self._came, self.memory if memory else None)
        self.parts: list[bytes] = []
        self._fails = fails

    def _came(self, views: Views) -> None:
        if len(self.parts) == self._fails:
            raise LandingError("full")
        self.parts.append(b"".join(views))


def assert_equal(arrived: Frame, sent: Frame, body: Sequence[bytes] | None = None) -> None:
    """Compare two frames with their bodies, however these are cut, or with what has taken the body."""
    assert type(arrived) is type(sent)
    for name in sent.__dataclass_fields__:
        if name == "body":
            came = arrived.body if body is None else body  # type: ignore[attr-defined]
            assert b"".join(came) == b"".join(sent.body)  # type: ignore[attr-defined]
        else:
            assert getattr(arrived, name) == getattr(sent, name)


def raw(frame: Frame, channel: int = 7) -> bytes:
    """The bytes of a frame on a link."""
    parts: list[bytes | memoryview] = []
    for head, views in split(encode(frame), channel, 256 * 1024):
        parts += [head, *views]
    return b"".join(parts)


@asynccontextmanager
async def listening(pool: BufferPool | None = None) -> AsyncIterator[tuple[StreamLink, Any]]:
    """A link and a bare socket at its other end."""
    near, far = socket_pair(buffer=MIB)
    link = StreamLink(PlainStream(near), pool or BufferPool())
    with closing(far):
        try:
            yield link, far
        finally:
            far.close()
            with anyio.CancelScope(shield=True):
                await link.aclose()


# --- every byte ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_sent_arrives(kind, consortium: Consortium):
    """Frames of every size arrive whole and in order where the kernel takes a few bytes at a time."""
    sent: list[Frame] = [
        ping(1),
        chunk(1, start=5),
        message(100_000, 1),
        chunk(256 * 1024),
        message(700_000, 2),
        ping(2),
        chunk(4 * MIB, start=12345),
        message(0, 3),
        chunk(4 * MIB - 1, start=99),
    ]
    pool = BufferPool()
    buffer = 16 * 1024 if kind == "tcp" else 2048  # with less, TCP waits for its timers
    async with link_pair(kind, consortium, buffer=buffer, pool=pool) as (near, far):

        async def write() -> None:
            for frame in sent:
                await send(near, ready(frame) if isinstance(frame, Chunk) else frame)

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            for frame in sent:
                inbound = await far.receive()
                assert_equal(inbound.frame, frame)
                inbound.release()
    assert pool.lent == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_both_directions_at_once(kind, consortium: Consortium):
    """A link whose two ends send large chunks at the same time, with full buffers, does not lock up."""
    count = 6
    async with link_pair(kind, consortium, buffer=8192) as ends:

        async def write(link: StreamLink) -> None:
            for number in range(count):
                await send(link, ready(chunk(MIB, start=number)))

        async def read(link: StreamLink) -> None:
            for number in range(count):
                inbound = await link.receive()
                assert_equal(inbound.frame, chunk(MIB, start=number))
                inbound.release()

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for end in ends:
                    group.start_soon(write, end)
                    group.start_soon(read, end)


class _Script:
    """A byte stream that brings given bytes in given portions."""

    def __init__(self, data: bytes, cuts: Sequence[int]) -> None:
        bounds = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
        with socket.socket(socket.AF_UNIX) as nowhere:
            self.marks = Watermarks(nowhere)
        self._portions = [data[a:b] for a, b in pairwise(bounds) if a < b]
        self._blocked = False

    def receive_nowait(self, views: Sequence[memoryview]) -> int:
        self._blocked = not self._blocked
        if self._blocked:
            return 0
        if not self._portions:
            raise LinkLostError("the end")
        data, got = self._portions.pop(0), 0
        for view in views:
            take = min(len(view), len(data) - got)
            view[:take] = data[got : got + take]
            got += take
        if got < len(data):
            self._portions.insert(0, data[got:])
        return got

    async def receivable(self) -> None:
        await anyio.lowlevel.checkpoint()

    def send_nowait(self, views: Sequence[memoryview]) -> int:
        raise AssertionError

    async def sendable(self) -> None:
        raise AssertionError

    async def aclose(self) -> None:
        pass


FRAMES = st.one_of(
    st.integers(0, 99).map(ping),
    st.sampled_from([0, 1, 5000, 65_536, 262_000, 262_144, 600_000]).map(message),
    st.sampled_from([1, 4095, 65_535, 65_536, 262_000, 262_144, 600_000]).map(chunk),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sent=st.lists(FRAMES, min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 2**21), max_size=40),
)
async def test_any_cut_of_the_bytes_gives_the_same_frames(sent, cuts):
    """However the bytes of frames are cut on their way, the same frames come out, and then the end.

    Every third chunk has no place of its own, every third is received in its receiver's memory, and the rest is
    copied there.
    """
    pool, takers = BufferPool(), dict[int, Taker]()

    def placer(frame: Chunk) -> Placement | None:
        if frame.stop % 3 == 0:
            return None
        taker = Taker(frame, memory=frame.stop % 3 == 1)
        takers[id(taker.placement)] = taker
        return taker.placement

    data = b"".join(raw(frame, 1 if isinstance(frame, Chunk) else 2) for frame in sent)
    link = StreamLink(_Script(data, cuts), pool)
    link.place(placer)
    for frame in sent:
        inbound = await link.receive()
        taken = None if inbound.placed is None else takers[id(inbound.placed)].parts
        assert_equal(inbound.frame, frame, taken)
        inbound.release()
    with pytest.raises(LinkLostError):
        await link.receive()
    assert pool.lent == 0
    assert link.received == len(data)


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_chunk_is_taken_while_it_comes(kind, memory: bool, consortium: Consortium):
    """Whoever wants a chunk sees it in parts, in its own memory or in one small buffer, and gets it without a body."""
    pool, sent, takers = BufferPool(), chunk(5 * MIB + 1, start=5), list[Taker]()

    def placer(outline: Chunk) -> Placement:
        assert (outline.start, outline.stop, outline.body) == (sent.start, sent.stop, ())
        takers.append(Taker(outline, memory=memory))
        return takers[-1].placement

    async with link_pair(kind, consortium, pool=pool) as (near, far):
        far.place(placer)
        async with anyio.create_task_group() as group:
            group.start_soon(send, near, ready(sent))
            inbound = await far.receive()
        [taker] = takers
        assert inbound.placed is taker.placement
        assert isinstance(inbound.frame, Chunk)
        assert inbound.frame.body == ()
        assert_equal(inbound.frame, sent, taker.parts)
        assert pool.lent == 0
        inbound.release()
        taker.placement.give_up()  # too late: it is all there
        if memory:
            assert b"".join(taker.memory) == sent.body[0]
    most = LinkLimits().frame
    assert [most // 2 < len(part) <= most for part in taker.parts[:-1]] == [True] * 2
    assert pool.peak == (0 if memory else 1)


@pytest.mark.parametrize("memory", [True, False])
async def test_small_frames_are_taken_together(memory: bool):
    """However small the frames of a chunk are, whoever takes it is called for large parts."""
    sent = chunk(5 * MIB)
    encoded = split(encode(sent), 1, 40_000)
    async with listening() as (link, far):
        taker = Taker(sent, memory=memory)
        link.place(lambda _outline: taker.placement)
        async with anyio.create_task_group() as group:
            data = b"".join(bytes(part) for head, views in encoded for part in (head, *views))
            far.setblocking(False)
            group.start_soon(_feed, far, data)
            inbound = await link.receive()
        assert_equal(inbound.frame, sent, taker.parts)
    assert len(taker.parts) == 3


async def test_what_fails_while_a_chunk_is_taken_is_told_with_it():
    """A receiver that fails is not called again, the link goes on, and the error comes with the chunk."""
    sent, pool = chunk(5 * MIB), BufferPool()
    async with link_pair(pool=pool) as (near, far):
        taker = Taker(sent, memory=False, fails=1)
        far.place(lambda _outline: taker.placement)
        async with anyio.create_task_group() as group:
            group.start_soon(send, near, ready(sent))
            inbound = await far.receive()
            group.start_soon(send, near, ping(7))
            assert (await far.receive()).frame == ping(7)
        assert inbound.placed is taker.placement
        assert isinstance(taker.placement.error, LandingError)
        assert len(taker.parts) == 1
    assert pool.lent == 0


@pytest.mark.parametrize("memory", [True, False])
async def test_what_is_wanted_back_is_written_no_more(memory: bool):
    """A receiver that takes its place back in the middle of a chunk gets the chunk without a body, and the link lives."""
    sent, pool = chunk(MIB), BufferPool()
    data = raw(sent) + raw(ping(7))
    async with listening(pool) as (link, far):
        taker = Taker(sent, memory=memory)
        link.place(lambda _outline: taker.placement)
        got: list[Inbound] = []

        async def read() -> None:
            while len(got) < 2:
                got.append(await link.receive())

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            far.send(data[:300_000])
            await settled(lambda: any(taker.memory[0]) if memory else pool.lent == 1)
            await settled(lambda: link.received == 300_000)
            taker.placement.give_up()
            before = b"".join(taker.memory)
            assert pool.lent == 0
            group.start_soon(_feed, far, data[300_000:])
            far.setblocking(False)
        lapsed, after = got
        assert isinstance(lapsed.frame, Chunk)
        assert (lapsed.frame.start, lapsed.frame.stop, lapsed.frame.body) == (0, MIB, ())
        assert lapsed.placed is None
        assert after.frame == ping(7)
        assert b"".join(taker.memory) == before
        assert taker.parts == []


async def test_what_is_wanted_back_before_there_is_a_buffer_is_never_written():
    """A receiver that takes its place back while the link waits for a buffer is shown nothing, and the link lives."""
    sent, pool = chunk(MIB), BufferPool(MIB, MIB)
    held = await pool.borrow()

    async def send_both(link: StreamLink) -> None:
        await send(link, ready(sent))
        await send(link, ping(7))

    async with link_pair(pool=pool) as (near, far):
        taker = Taker(sent, memory=False)
        far.place(lambda _outline: taker.placement)
        async with anyio.create_task_group() as group:
            group.start_soon(send_both, near)

            async def let_go() -> None:
                await settled(lambda: far.held_up)
                taker.placement.give_up()
                held.release()

            group.start_soon(let_go)
            lapsed = await far.receive()
            assert (await far.receive()).frame == ping(7)
    assert isinstance(lapsed.frame, Chunk)
    assert (lapsed.frame.body, lapsed.placed, taker.parts) == ((), None, [])
    assert pool.lent == 0


# --- order --------------------------------------------------------------------------------------


async def test_control_overtakes_a_chunk_between_its_pieces():
    """Frames that come up while a chunk is being sent go out before its next piece, in their order."""
    async with link_pair(buffer=16 * 1024) as (near, far):
        urgent = [message(300_000, 1), ping(1), ping(2)]
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: send(near, ready(chunk(4 * MIB)), *urgent))
            for frame in [*urgent, chunk(4 * MIB)]:
                inbound = await far.receive()
                assert_equal(inbound.frame, frame)
                inbound.release()


async def test_control_keeps_its_order():
    """A large message is not overtaken by what was queued after it: messages of a topic stay in order."""
    async with link_pair(buffer=16 * 1024) as (near, far):
        later = [ping(1), message(10, 2), message(900_000, 3), ping(2)]
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: send(near, message(2 * MIB, 1), *later))
            for frame in [message(2 * MIB, 1), *later]:
                assert_equal((await far.receive()).frame, frame)


async def test_a_peer_with_smaller_frames_gets_smaller_frames():
    """What is sent is cut to what both ends have agreed on, not to what this end would accept."""
    small = LinkLimits(frame=128 * 1024)
    near, far = socket_pair(buffer=8 * MIB)
    link = StreamLink(PlainStream(near), BufferPool())
    with closing(far):
        link.agree(LinkLimits().agree(small))
        await send(link, message(300_000))
        head = far.recv(16)
        header, body = int.from_bytes(head[2:4], "big"), int.from_bytes(head[8:12], "big")
        assert 16 + header + body == 128 * 1024
        far.close()
        await link.aclose()


# --- the end ------------------------------------------------------------------------------------

WHOLE = raw(ping(1)) + raw(chunk(600_000)) + raw(message(600_000))
CUTS = [0, 7, 16, len(raw(ping(1))), len(raw(ping(1))) + 9, 100_000, 262_200, 500_000, 650_000]


async def test_an_end_in_the_middle_is_never_taken_for_an_end():
    """Wherever a peer's bytes stop, what was not whole is not delivered, and the end has a type."""
    pool = BufferPool()
    for kept in [*CUTS, len(WHOLE) - 1]:
        async with listening(pool) as (link, far):
            far.send(WHOLE[:kept])
            far.close()
            whole = 0
            with pytest.raises(LinkLostError):  # noqa: PT012 - up to the end
                while True:
                    inbound = await link.receive()
                    inbound.release()
                    whole += len(raw(inbound.frame))
            assert whole <= kept < whole + len(raw(chunk(600_000)))
            await link.aclose()
        assert pool.lent == 0


NONSENSE = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", MalformedFrameError),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32), MalformedFrameError),
    "zeros in a chunk": (raw(chunk(600_000))[:262_144] + bytes(16), MalformedFrameError),
    "two chunks": (raw(chunk(600_000), 1)[:262_144] + raw(chunk(600_000), 2), LimitError),
    "a chunk in a chunk": (raw(chunk(600_000), 1)[:262_144] + raw(chunk(10)), LimitError),
    "a stray abandon": (raw(chunk(600_000), 1)[:262_144] + abandon(2), MalformedFrameError),
}


async def test_nonsense_is_refused_and_its_buffer_comes_back():
    """What is no frame, or more chunks at a time than one, ends the link with a typed error."""
    pool = BufferPool()
    for name, (nonsense, error) in NONSENSE.items():
        async with listening(pool) as (link, far):
            far.send(nonsense)
            with pytest.raises(error):  # noqa: PT012 - the first may be well formed
                while True:
                    (await link.receive()).release()
            far.close()
            await link.aclose()
            assert pool.lent == 0, name


async def test_a_chunk_that_no_pool_can_hold_is_refused():
    """A chunk larger than the whole pool is refused when it is announced, not when it is there."""
    async with listening(BufferPool(MIB, MIB)) as (link, far):
        far.send(raw(chunk(2 * MIB))[:1000])
        with pytest.raises(LimitError, match="at most 1048576 bytes"):
            await link.receive()


@pytest.mark.parametrize("kind", KINDS)
async def test_closing_wakes_whoever_waits(kind, consortium: Consortium):
    """A reader and a writer that wait for the peer are woken with a typed error when the link is closed."""
    async with link_pair(kind, consortium, buffer=8192) as (near, far):
        ended: list[str] = []

        async def wait(work: Callable[[], Any], name: str) -> None:
            with pytest.raises(LinkLostError):
                await work()
            ended.append(name)

        async with anyio.create_task_group() as group:
            group.start_soon(wait, near.receive, "reader")
            group.start_soon(wait, lambda: send(near, ready(chunk(4 * MIB))), "writer")
            await settled(lambda: near._sent > 0)
            await anyio.sleep(0.02)
            async with anyio.create_task_group() as closers:
                closers.start_soon(near.aclose)
                closers.start_soon(near.aclose)
        assert sorted(ended) == ["reader", "writer"]
        await far.aclose()
        with pytest.raises(LinkLostError):
            await far.receive()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_last_frames_arrive_although_the_peers_were_not_read(
    kind, consortium: Consortium
):
    """An end that sends, reads nothing and closes loses nothing of what it sent."""
    async with link_pair(kind, consortium) as (near, far):
        got: list[Frame] = []

        async def read() -> None:
            with pytest.raises(LinkLostError):  # noqa: PT012 - up to the end
                while True:
                    inbound = await far.receive()
                    got.append(inbound.frame)
                    inbound.release()
            await far.aclose()

        for number in range(100):
            await send(far, ping(number))  # never read
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            for number in range(6):
                await send(near, ready(chunk(MIB, start=number)))
            await send(near, ping(99))
            await near.aclose()
        assert [type(frame) for frame in got] == [Chunk] * 6 + [Ping]


# --- memory -------------------------------------------------------------------------------------


async def test_a_reader_that_stops_holds_a_bounded_amount():
    """However much a sender has, what it gets rid of while nobody reads is what the kernel holds."""
    async with link_pair(buffer=64 * 1024) as (near, _far):
        with anyio.move_on_after(0.3) as scope:
            while True:
                await send(near, ready(chunk(4 * MIB)))
        assert scope.cancelled_caught
        assert near._sent < MIB


async def test_pieces_grow_on_a_line_that_carries_them():
    """A link begins with small pieces, and cuts larger ones, up to its limit, once a line has shown that it is fast."""
    near, far = socket_pair(buffer=MIB)
    far.settimeout(60)
    link = StreamLink(PlainStream(near), BufferPool())
    pieces: list[int] = []
    chunks = 4

    def read() -> None:
        with far.makefile("rb") as wire:
            ended = 0
            while ended < chunks:
                prefix = Prefix.unpack(wire.read(PREFIX_BYTES))
                assert len(wire.read(prefix.header_bytes + prefix.body_bytes)) >= prefix.body_bytes
                pieces.append(prefix.body_bytes)
                ended += not prefix.rest

    async def write() -> None:
        for _ in range(chunks):
            await send(link, ready(chunk(4 * MIB)))

    with closing(far):
        async with anyio.create_task_group() as group:
            group.start_soon(write)
            await anyio.to_thread.run_sync(read)
        await link.aclose()
    assert pieces[0] <= 32 * 1024 < max(pieces) <= LinkLimits().frame


def test_a_socket_wakes_its_reader_for_as_much_as_it_was_told():
    """Below the mark a TCP socket does not count as readable; at it, or with the mark back at one byte, it does."""
    near, far = socket_pair(socket.AF_INET)
    with near, far:
        marks = Watermarks(near)
        marks.readable(1000)
        far.sendall(bytes(999))
        while marks.arrived() < 999:
            pass
        assert select.select([near], [], [], 0)[0] == []
        far.sendall(bytes(1))
        assert select.select([near], [], [], 10)[0] == [near]
        assert len(near.recv(999)) == 999
        assert select.select([near], [], [], 0)[0] == []
        marks.readable(1)
        assert select.select([near], [], [], 10)[0] == [near]


async def test_what_a_peer_sends_unasked_is_not_read_ahead():
    """A link that nobody reads takes nothing from its socket: the peer's kernel stops the peer."""
    async with listening() as (link, far):
        far.setblocking(False)
        with pytest.raises(BlockingIOError):  # noqa: PT012 - until it is full
            while True:
                far.send(raw(ping(1)) * 1000)
        await anyio.sleep(0.02)
        with pytest.raises(BlockingIOError):
            far.send(raw(ping(1)) * 1000)
        assert link.received > 0  # it has come, as far as the kernel


async def test_a_flood_of_small_frames_leaves_others_their_turn():
    """A reader that always finds another frame lets other tasks run in between."""
    near, far = socket_pair(buffer=8 * MIB)
    link = StreamLink(PlainStream(near), BufferPool())
    with closing(far):
        data = raw(ping(1)) * 20_000
        sent = far.send(data)
        frames = sent // len(raw(ping(1)))
        turns = 0
        done = anyio.Event()

        async def others() -> None:
            nonlocal turns
            while not done.is_set():
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(others)
            for _ in range(frames):
                await link.receive()
            done.set()
        assert frames > 1000
        assert turns > frames // 200
        far.close()
        await link.aclose()


# --- a pool under pressure ----------------------------------------------------------------------


async def test_a_stalled_sender_loses_its_buffer_to_who_waits():
    """A peer that stops in the middle of a chunk holds up nobody; its chunk comes without a body, the link lives."""
    pool = BufferPool(MIB, MIB)
    data = raw(chunk(MIB)) + raw(ping(7)) + raw(chunk(MIB, start=5))
    async with listening(pool) as (slow, slow_far), listening(pool) as (quick, quick_far):
        got: list[Inbound] = []

        async def read() -> None:
            for _ in range(3):
                inbound = await slow.receive()
                inbound.release()
                got.append(inbound)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            slow_far.send(data[:300_000])
            await settled(lambda: slow.received == 300_000 and pool.lent == 1)
            quick_far.setblocking(False)
            group.start_soon(_feed, quick_far, raw(chunk(MIB, start=9)))
            inbound = await quick.receive()
            assert_equal(inbound.frame, chunk(MIB, start=9))
            inbound.release()
            group.start_soon(_feed, slow_far, data[300_000:])
        lapsed, between, whole = (one.frame for one in got)
        assert isinstance(lapsed, Chunk)
        assert (lapsed.start, lapsed.stop, lapsed.body) == (0, MIB, ())
        assert between == ping(7)
        assert isinstance(whole, Chunk)
        assert whole.start == 5
    assert pool.lent == 0


async def _feed(sock: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[sock.send(left) :]
        except BlockingIOError:
            await anyio.wait_writable(sock)


async def test_a_sender_that_moves_keeps_its_buffer():
    """While others wait, a peer that brings its chunk steadily keeps its buffer to the end."""
    pool = BufferPool(256 * 1024, 256 * 1024)
    frame = chunk(200_000)
    data = raw(frame)
    async with listening(pool) as (slow, slow_far), listening(pool) as (quick, quick_far):
        got: list[Frame] = []

        async def read(link: StreamLink) -> None:
            inbound = await link.receive()
            got.append(inbound.frame)
            assert_equal(inbound.frame, frame)
            inbound.release()

        async with anyio.create_task_group() as group:
            group.start_soon(read, slow)
            slow_far.send(data[:1000])
            await settled(lambda: slow.received == 1000)
            group.start_soon(_feed, quick_far, data)
            group.start_soon(read, quick)
            for start in range(1000, len(data), 12_000):  # about a second and a half in all
                await anyio.sleep(0.08)
                await _feed(slow_far, data[start : start + 12_000])
        assert len(got) == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_receiver_that_stops_loses_the_senders_buffer(kind, consortium: Consortium):
    """A chunk whose receiver stops reading is abandoned for others; the link goes on behind it, intact."""
    pool = BufferPool(4 * MIB, 4 * MIB)
    async with link_pair(kind, consortium, buffer=16 * 1024) as (near, far):

        async def write() -> None:
            await send(near, await lent(pool, chunk(4 * MIB)))
            await send(near, ready(chunk(MIB, start=3)))

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            await settled(lambda: near._sent > 0)
            (await pool.borrow()).release()  # comes although nobody reads
            inbound = await far.receive()
            assert isinstance(inbound.frame, Chunk)
            assert (inbound.frame.start, inbound.frame.body) == (0, ())
            inbound.release()
            inbound = await far.receive()
            assert_equal(inbound.frame, chunk(MIB, start=3))
            inbound.release()
        assert pool.lent == 0


async def test_a_chunk_abandoned_by_its_sender_gives_its_buffer_back():
    """A chunk that the peer gives up in the middle comes out without a body, and costs nothing."""
    pool = BufferPool()
    async with listening(pool) as (link, far):
        far.send(raw(chunk(600_000), 1)[:262_144] + abandon(1) + raw(ping(2)))
        inbound = await link.receive()
        assert isinstance(inbound.frame, Chunk)
        assert inbound.frame.body == ()
        inbound.release()
        assert pool.lent == 0
        assert (await link.receive()).frame == ping(2)


async def test_memory_of_a_lost_link_is_let_go():
    """When a link is lost in the middle of a chunk and a message, nothing of it stays."""
    pool = BufferPool()
    async with listening(pool) as (link, far):
        far.send(raw(message(600_000), 2)[:300_000])
        far.send(raw(chunk(600_000), 1)[:262_144])
        far.close()
        with pytest.raises((LinkLostError, MalformedFrameError)):
            await link.receive()
        await link.aclose()
        assert pool.lent == 0
    del link
    gc.collect()


async def test_errors_say_what_came():
    """A frame that is refused on arrival names its type and its field."""
    async with listening() as (link, far):
        frame = Error(**ROUTE, of=FrameType.PULL, id=1, code=ErrorCode.GONE)
        far.send(raw(frame).replace(b"gone", b"gong"))
        with pytest.raises(MalformedFrameError, match="error frame: field 'code'"):
            await link.receive()
