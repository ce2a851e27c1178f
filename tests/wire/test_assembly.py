"""Bodies survive being cut, interleaved, abandoned and attacked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from streamoff.errors import LimitError, MalformedFrameError, PeerError, UsageError
from streamoff.types import MIB
from streamoff.wire.assembly import Abandoned, Assembler, abandon, fits, split
from streamoff.wire.codec import ABANDON, CONTINUATION, PREFIX_BYTES, Prefix, encode
from streamoff.wire.frames import (
    Cancel,
    Chunk,
    Frame,
    FrameType,
    Message,
    MessageKind,
    Open,
    Ping,
    Views,
)
from streamoff.wire.limits import MIN_PIECE, Limits, LinkLimits

from .samples import BOTH, ROUTE, SAMPLES, TICKET, calm, frames, views

pytestmark = pytest.mark.core

Wire = tuple[bytes, Views]
SMALLEST = 128 * 1024


def take(assembler: Assembler, wire: Wire) -> Frame | Abandoned | None:
    """Read one frame off the wire as a link does."""
    head, body = wire
    prefix = assembler.prefix(head[:PREFIX_BYTES])
    if prefix.header_bytes:
        assembler.header(prefix, head[PREFIX_BYTES:])
    return assembler.body(prefix, body)


def take_all(assembler: Assembler, wire: Iterable[Wire]) -> list[Frame | Abandoned]:
    """Read many frames; what comes out, in order."""
    return [out for item in wire if (out := take(assembler, item)) is not None]


def joined(frame: Frame) -> bytes:
    """The bytes of a body, for comparison."""
    return b"".join(getattr(frame, "body", ()))


def message(nbytes: int, fill: int = 7, number: int = 0) -> Message:
    """A message with a body of so many bytes."""
    body = views(bytes([fill]) * nbytes) if nbytes else ()
    return Message(**ROUTE, kind=MessageKind.NOTIFY, topic="bulk", id=number, body=body)


def chunk(nbytes: int, parts: int = 1) -> Chunk:
    """A chunk of different bytes in several views."""
    data = memoryview(bytes(index % 251 for index in range(nbytes)))
    step = -(-nbytes // parts)
    body = tuple(data[at : at + step] for at in range(0, nbytes, step))
    return Chunk(**ROUTE, stream=1, start=0, stop=nbytes, digest=TICKET, body=body)


@pytest.mark.parametrize("frame", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_small_frames_go_whole(frame: Frame) -> None:
    """A frame that fits is sent as it was encoded, without a channel, and arrives equal."""
    encoded = encode(frame)
    assert fits(encoded)
    (wire,) = split(encoded, 5)
    assert wire == encoded
    assert Prefix.unpack(wire[0][:16]).channel == 0
    assert take_all(Assembler(), [wire]) == [frame]


@calm
@given(frame=frames)
def test_any_frame_passes_an_assembler(frame: Frame) -> None:
    """Whatever may be sent comes out of an assembler as it went in."""
    assert take_all(Assembler(), split(encode(frame), 1)) == [frame]


@pytest.mark.parametrize("parts", [1, 2, 3, 1000])
@pytest.mark.parametrize("max_frame", [SMALLEST, 200_001, 256 * 1024])
def test_a_chunk_is_cut_into_bounded_frames(parts: int, max_frame: int) -> None:
    """No frame on the wire exceeds the limit, and the bytes of the chunk are the same and uncopied."""
    sent = chunk(MIB + 12_345, parts)
    wire = list(split(encode(sent), 3, max_frame))
    sizes = [len(head) + sum(map(len, body)) for head, body in wire]
    assert max(sizes) <= max_frame
    assert len(sizes) == -(-sum(sizes) // max_frame)
    assert all(len(head) == PREFIX_BYTES for head, _ in wire[1:])
    owners = {id(view.obj) for _, body in wire for view in body}
    assert owners == {id(sent.body[0].obj)}
    (got,) = take_all(Assembler(), wire)
    assert isinstance(got, Chunk)
    assert joined(got) == joined(sent)
    assert got.stop == sent.stop


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_edge_between_whole_and_cut(extra: int) -> None:
    """A frame of exactly the limit goes whole; one byte more takes a second frame of one byte."""
    overhead = len(encode(message(65_536)).head)
    sent = message(SMALLEST - overhead + extra)
    wire = list(split(encode(sent), 1, SMALLEST))
    assert fits(encode(sent), SMALLEST) == (extra <= 0)
    assert [sum(map(len, body)) for _, body in wire[1:]] == [1] * (extra > 0)
    (got,) = take_all(Assembler(), wire)
    assert joined(got) == joined(sent)  # type: ignore[arg-type]


def test_empty_views_vanish_from_a_cut_body() -> None:
    """A body with empty views in it is cut like one without."""
    half = bytes(SMALLEST)
    sent = Message(
        **ROUTE, kind=MessageKind.REPLY, topic="t", id=1, body=views(b"", half, b"", half, b"")
    )
    wire = list(split(encode(sent), 1, SMALLEST))
    assert all(view for _, body in wire for view in body)
    (got,) = take_all(Assembler(), wire)
    assert joined(got) == half + half  # type: ignore[arg-type]


def test_names_of_an_open_are_cut_too() -> None:
    """A selection of many tensors travels in continuation frames like any body."""
    names = tuple(f"block.{index}.attention.weight" for index in range(30_000))
    sent = Open(**ROUTE, stream=1, ref="r", ticket=TICKET, names=names, capabilities=BOTH)
    wire = list(split(encode(sent), 1, 256 * 1024))
    assert len(wire) > 2
    assert take_all(Assembler(), wire) == [sent]


@settings(calm, max_examples=40)
@given(data=st.data())
def test_interleaving_never_mixes(data: st.DataObject) -> None:
    """Bodies on several channels and whole frames between their pieces all arrive, each intact."""
    count = data.draw(st.integers(1, LinkLimits().channels))
    sizes = st.integers(SMALLEST, 4 * SMALLEST)
    sent = [message(data.draw(sizes), fill=index, number=index) for index in range(count)]
    queues = [list(split(encode(item), index + 1, SMALLEST)) for index, item in enumerate(sent)]
    pings = 0
    wire: list[Wire] = []
    while any(queues):
        index = data.draw(st.sampled_from([at for at, queue in enumerate(queues) if queue]))
        wire.append(queues[index].pop(0))
        if data.draw(st.booleans()):
            wire.append(encode(Ping(id=pings, reply=False)))
            pings += 1
    assembler = Assembler()
    got = take_all(assembler, wire)
    assert [item.id for item in got if isinstance(item, Ping)] == list(range(pings))
    arrived = {item.id: joined(item) for item in got if isinstance(item, Message)}
    assert arrived == {item.id: joined(item) for item in sent}
    assert assembler.unfinished == 0


def test_a_header_can_be_judged_before_its_body() -> None:
    """The reader sees what is coming before any of it is here, and so can refuse what nobody asked for."""
    names = Open(**ROUTE, stream=9, ref="r", ticket=TICKET, names=("a",), capabilities=BOTH)
    cancel = Cancel(**ROUTE, stream=9, ref="r", ticket=TICKET)
    for sent, expected in (
        (chunk(SMALLEST), "body"),
        (message(SMALLEST), "body"),
        (names, "names"),
        (cancel, None),
    ):
        head, _ = next(split(encode(sent), 1, SMALLEST))
        assembler = Assembler()
        outline = assembler.header(assembler.prefix(head[:16]), head[16:])
        assert type(outline) is type(sent)
        if expected:
            assert not getattr(outline, expected)
        for name in ("stream", "id", "start", "stop"):
            assert getattr(outline, name, None) == getattr(sent, name, None)


def test_views_are_kept_not_copied() -> None:
    """A finished frame holds the very views that the reader handed in, in order."""
    wire = list(split(encode(message(3 * SMALLEST)), 1, SMALLEST))
    (got,) = take_all(Assembler(), wire)
    assert isinstance(got, Message)
    flat = [view for _, body in wire for view in body]
    assert all(out is put for out, put in zip(got.body, flat, strict=True))


def test_an_abandoned_body_gives_its_views_back() -> None:
    """A sender that gives up in the middle says so; what had arrived is returned and the channel is free."""
    sent = message(3 * SMALLEST, number=4)
    wire = list(split(encode(sent), 1, SMALLEST))
    assembler = Assembler()
    assert take_all(assembler, wire[:2]) == []
    assert assembler.unfinished == 1
    (gone,) = take_all(assembler, [(abandon(1), ())])
    assert isinstance(gone, Abandoned)
    assert isinstance(gone.frame, Message)
    assert (gone.frame.id, gone.frame.body) == (4, ())
    assert gone.body == wire[0][1] + wire[1][1]
    assert assembler.unfinished == 0
    (got,) = take_all(assembler, wire)
    assert joined(got) == joined(sent)  # type: ignore[arg-type]


def test_a_lost_link_gives_everything_back() -> None:
    """Closing returns the views of every unfinished body, once."""
    assembler = Assembler()
    for channel in (1, 2):
        take(assembler, next(split(encode(chunk(2 * SMALLEST)), channel, SMALLEST)))
    left = assembler.close()
    assert [type(item.frame) for item in left] == [Chunk, Chunk]
    assert all(sum(map(len, item.body)) > MIN_PIECE for item in left)
    assert assembler.close() == ()


def raw(kind: int, header: int, channel: int, body: int, rest: int) -> bytes:
    """A prefix of any numbers."""
    return Prefix(kind, header, channel, body, rest).pack()


def begun(rest: int = 3 * SMALLEST) -> Assembler:
    """An assembler in the middle of a body on channel 1, with so many bytes to come."""
    sent = message(rest + MIN_PIECE)
    encoded = encode(sent)
    assembler = Assembler(Limits())
    (head, body), *_ = split(encoded, 1, len(encoded.head) + MIN_PIECE)
    assert take(assembler, (head, body)) is None
    return assembler


@pytest.mark.parametrize(
    ("prefix", "field"),
    [
        (raw(CONTINUATION, 0, 2, 5000, 0), "channel"),
        (raw(CONTINUATION, 0, 0, 5000, 0), "channel"),
        (raw(CONTINUATION, 1, 1, 5000, 5000), "header_bytes"),
        (raw(CONTINUATION, 0, 1, 10_001, 0), "rest"),
        (raw(CONTINUATION, 0, 1, 9999, 0), "rest"),
        (raw(CONTINUATION, 0, 1, 5000, 4999), "rest"),
        (raw(CONTINUATION, 0, 1, 0, 0), "rest"),
        (raw(CONTINUATION, 0, 1, 0, 10_000), "body_bytes"),
        (raw(CONTINUATION, 0, 1, MIN_PIECE - 1, 10_001 - MIN_PIECE), "body_bytes"),
        (raw(ABANDON, 0, 2, 0, 0), "channel"),
        (raw(ABANDON, 0, 0, 0, 0), "channel"),
        (raw(ABANDON, 1, 1, 0, 0), "body_bytes"),
        (raw(ABANDON, 0, 1, 5000, 0), "body_bytes"),
        (raw(ABANDON, 0, 1, 5000, 5000), "body_bytes"),
        (raw(FrameType.MESSAGE, 0, 0, 1, 0), "header_bytes"),
        (raw(FrameType.MESSAGE, 9, 1, 1, 0), "channel"),
        (raw(FrameType.MESSAGE, 9, 0, 5000, 1), "channel"),
        (raw(FrameType.MESSAGE, 9, 1, 5000, 1), "channel"),
    ],
)
def test_nonsense_on_a_channel_is_refused(prefix: bytes, field: str) -> None:
    """A missing, repeated, short, surplus or misplaced piece is refused at its prefix, by field."""
    with pytest.raises(MalformedFrameError) as caught:
        begun(10_000).prefix(prefix)
    assert caught.value.field == field


def test_one_byte_short_long_or_repeated() -> None:
    """A body that loses, gains or repeats a piece never comes out."""
    wire = list(split(encode(chunk(3 * SMALLEST)), 1, SMALLEST))
    for damaged in (
        [wire[0], wire[2]],
        [wire[0], wire[1], wire[1]],
        [wire[0], wire[0]],
        wire[1:],
        [*wire, wire[-1]],
    ):
        assembler = Assembler()
        with pytest.raises(PeerError):
            take_all(assembler, damaged)


def test_unfinished_bodies_are_bounded() -> None:
    """A peer cannot begin more bodies than agreed; finishing one makes room."""
    assembler = Assembler(Limits(link=LinkLimits(channels=2)))
    queues = [list(split(encode(message(2 * SMALLEST)), at, SMALLEST)) for at in (1, 2, 3)]
    take(assembler, queues[0][0])
    take(assembler, queues[1][0])
    with pytest.raises(LimitError, match="'channels' exceeded: expected at most 2 bodies, got 3"):
        assembler.prefix(queues[2][0][0][:16])
    assert len(take_all(assembler, queues[0][1:])) == 1
    assert take(assembler, queues[2][0]) is None


@pytest.mark.parametrize(
    ("prefix", "limit"),
    [
        (raw(FrameType.MESSAGE, 100, 0, 2 * MIB, 0), "frame"),
        (raw(FrameType.MESSAGE, 100, 0, 2**32 - 1, 0), "frame"),
        (raw(FrameType.MESSAGE, 5000, 0, 0, 0), "header"),
    ],
)
def test_a_prefix_cannot_ask_for_memory(prefix: bytes, limit: str) -> None:
    """Lengths above a limit are refused before a buffer is made for them."""
    with pytest.raises(LimitError) as caught:
        Assembler(Limits(header=4096)).prefix(prefix)
    assert caught.value.limit == limit


@pytest.mark.parametrize("rest", [16 * MIB, 2**31, 2**32 - 1])
def test_a_body_too_long_is_refused_at_its_header(rest: int) -> None:
    """A body that will exceed its limit is refused with its first frame, not with its last."""
    head, _ = next(split(encode(message(2 * SMALLEST)), 1, SMALLEST))
    assembler = Assembler()
    prefix = Prefix.unpack(head[:16])._replace(rest=rest)
    with pytest.raises(LimitError) as caught:
        assembler.header(assembler.prefix(prefix.pack()), head[16:])
    assert caught.value.limit == "message"
    assert caught.value.got == str(prefix.body_bytes + rest)


@settings(calm, max_examples=200)
@given(
    numbers=st.lists(
        st.tuples(
            st.integers(0, 15),
            st.sampled_from([0, 1, 100]),
            st.sampled_from([0, 1, 2]),
            st.sampled_from([0, 1, 5000, 10_000]),
            st.sampled_from([0, 1, 5000, 2**32 - 1]),
        ),
        max_size=4,
    )
)
def test_any_sequence_of_prefixes_is_typed(numbers: list[tuple[int, int, int, int, int]]) -> None:
    """Whatever prefixes come in whatever order, the assembler goes on or raises a typed refusal."""
    assembler = begun(10_000)
    try:
        for values in numbers:
            prefix = Prefix(*values)
            take(
                assembler,
                (prefix.pack() + bytes(prefix.header_bytes), views(bytes(prefix.body_bytes))),
            )
    except PeerError:
        pass
    assert assembler.unfinished <= 1


@pytest.mark.parametrize(
    ("channel", "max_frame", "match"),
    [(0, SMALLEST, "channel"), (2**32, SMALLEST, "channel"), (1, 200, "max_frame")],
)
def test_a_split_needs_a_channel_and_room(channel: int, max_frame: int, match: str) -> None:
    """A channel is 1 to 2**32 - 1, and a frame must hold its header and a piece of body."""
    with pytest.raises(UsageError, match=match):
        list(split(encode(message(2 * SMALLEST)), channel, max_frame))


def test_steps_out_of_order_are_our_own_mistake() -> None:
    """A reader that hands in other bytes than the prefix announced is told so, as a usage error."""
    assembler = Assembler()
    head, body = encode(message(10))
    prefix = assembler.prefix(head[:16])
    calls: list[tuple[Any, ...]] = [(assembler.header, head[17:]), (assembler.body, body)]
    for call, data in calls:
        with pytest.raises(UsageError):
            call(prefix, data)
    assembler.header(prefix, head[16:])
    with pytest.raises(UsageError, match="expected 10 bytes, got 9"):
        assembler.body(prefix, views(b"123456789"))
    assert assembler.body(prefix, body) == message(10)
    head, body = next(split(encode(message(2 * SMALLEST)), 1, SMALLEST))
    with pytest.raises(UsageError, match="its header before"):
        assembler.body(assembler.prefix(head[:16]), body)
