"""Whatever a peer sends is a frame or a typed refusal that names the place."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from hypothesis import given, strategies as st

from streamoff.errors import LimitError, MalformedFrameError, PeerError
from streamoff.types import MIB, Capability
from streamoff.wire.codec import PREFIX_BYTES, Prefix, decode, encode
from streamoff.wire.frames import Chunk, Frame, FrameType, Hello, Message, Open
from streamoff.wire.limits import DEFAULT_LIMITS, Limits, LinkLimits

from .hostile import body_of, forged, header_of, name_of
from .samples import BOTH, ROUTE, SAMPLES, TICKET, calm, views

pytestmark = pytest.mark.core

BY_TYPE = {sample.type: sample for sample in SAMPLES}

# A value of every msgpack type, and what no field takes at all.
WRONG: tuple[object, ...] = (
    None,
    True,
    -1,
    2**63,
    2**64 - 1,
    1.5,
    float("nan"),
    float("inf"),
    -1.0,
    0.0,
    "",
    "no such thing\x00",
    "x" * 5000,
    b"",
    b"\xff" * 15,
    b"\xff" * 17,
    [],
    ["a", "a"],
    ["a", 1],
    [[]],
    ["x" * 65],
    {},
    {"a": 1},
    {1: 2},
)

# What is a good value all the same, by the kind of field.
GOOD: dict[str, tuple[object, ...]] = {
    "reply": (True,),
    "pass_through": (True,),
    "ok": (True,),
    "seconds": (1.5,),
    "topic": ("no such thing\x00",),
    "reason": ("", "no such thing\x00"),
    "detail": ("", "no such thing\x00"),
    "status": ("", "no such thing\x00"),
    "capabilities": ([],),
}


def _same(left: object, right: object) -> bool:
    return type(left) is type(right) and left == right


def _cases(sample: Frame) -> Iterator[tuple[str, object]]:
    for key in header_of(sample):
        for value in WRONG:
            if not any(_same(value, good) for good in GOOD.get(key, ())):
                yield key, value


@contextmanager
def peak_below(nbytes: int) -> Iterator[None]:
    """Fail if more memory than that is in use at any moment inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_every_field_is_checked(sample: Frame) -> None:
    """A field of a wrong type or out of range is refused, and the error names frame and field."""
    for key, value in _cases(sample):
        packed = msgpack.packb({**header_of(sample), key: value})
        with pytest.raises(PeerError) as caught:
            decode(*forged(sample.type, None, body_of(sample), packed=packed))
        assert caught.value.frame == name_of(sample.type), (key, value)
        assert caught.value.field in {key, "header"}, (key, value)
        assert caught.value.expected is not None


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_good_values_of_the_wrong_list_pass(sample: Frame) -> None:
    """The exceptions of the test above are real: these values are accepted where they stand."""
    header = header_of(sample)
    for key in header.keys() & GOOD.keys():
        for value in GOOD[key]:
            decode(*forged(sample.type, {**header, key: value}, body_of(sample)))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_missing_and_extra_keys_are_refused(sample: Frame) -> None:
    """A header has exactly the keys of its frame; the error says which is missing or unknown."""
    header = header_of(sample)
    for key in header:
        less = {name: value for name, value in header.items() if name != key}
        with pytest.raises(MalformedFrameError, match=f"missing: \\['{key}'\\]"):
            decode(*forged(sample.type, less, body_of(sample)))
    with pytest.raises(MalformedFrameError, match="unknown: \\['surplus'\\]"):
        decode(*forged(sample.type, {**header, "surplus": 1}, body_of(sample)))
    bytes_keys = {key.encode(): value for key, value in header.items()}
    with pytest.raises(MalformedFrameError, match="missing"):
        decode(*forged(sample.type, bytes_keys, body_of(sample)))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_truncation_at_each_byte(sample: Frame) -> None:
    """A frame cut anywhere is refused, never read as something shorter."""
    head, body = encode(sample)
    for cut in range(len(head)):
        with pytest.raises(MalformedFrameError):
            decode(head[:cut], body)
    for cut in range(PREFIX_BYTES, len(head)):  # with a prefix that agrees
        packed = head[PREFIX_BYTES:cut]
        with pytest.raises(MalformedFrameError):
            decode(*forged(sample.type, None, body, packed=packed))
    with pytest.raises(MalformedFrameError, match="body"):
        decode(head, (*body, memoryview(b"x")))
    with pytest.raises(MalformedFrameError, match="header"):
        decode(head + b"x", body)


@calm
@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_flipped_bits_never_escape(sample: Frame, data: st.DataObject) -> None:
    """A frame with any bit flipped is another frame of ours or a typed refusal."""
    head, body = encode(sample)
    bit = data.draw(st.integers(0, len(head) * 8 - 1))
    damaged = bytearray(head)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        frame = decode(bytes(damaged), body)
    except PeerError:
        return
    assert decode(*encode(frame)) == frame


@calm
@given(kind=st.integers(1, 14), packed=st.binary(max_size=200), body=st.binary(max_size=20))
def test_garbage_never_escapes(kind: int, packed: bytes, body: bytes) -> None:
    """Random bytes under a correct prefix raise nothing but a typed refusal."""
    with pytest.raises(PeerError):
        decode(*forged(kind, None, views(body), packed=packed))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x80\x80",
        b"\x91" * 3000 + b"\xc0",
        b"\xd4\x01a",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\x90\xc0",
        b"\x81\xa2\xff\xfe\xc0",
        b"\x82\xa2id\x01\xa2id\x02",
        b"\xc0",
    ],
    ids=[
        "nothing",
        "never-used code",
        "two values",
        "deep nesting",
        "extension",
        "timestamp",
        "bad timestamp",
        "array of 2**32-1",
        "map of 2**32-1",
        "string of 2**32-1",
        "array as key",
        "invalid UTF-8",
        "a key twice",
        "not a map",
    ],
)
def test_bad_msgpack_is_refused(packed: bytes) -> None:
    """Extensions, repeated keys, nesting, false lengths and broken text are malformed frames."""
    with pytest.raises(MalformedFrameError, match="ping frame: field 'header'"):
        decode(*forged(FrameType.PING, None, packed=packed))


def test_foreign_protocols_are_named() -> None:
    """A peer that speaks TLS or HTTP is told apart from a damaged frame, with a hint."""
    for first in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET / HTTP/1.1\r\n"):
        with pytest.raises(MalformedFrameError, match="TLS on both sides"):
            Prefix.unpack(first.ljust(16, b"\0")[:16])


def test_prefix_of_another_length_or_type() -> None:
    """A prefix has 16 bytes and a type that exists."""
    with pytest.raises(MalformedFrameError, match="16 bytes, got 15 bytes"):
        Prefix.unpack(b"\xf5" * 15)
    with pytest.raises(MalformedFrameError, match="'type': expected 0 to 15, got 16"):
        Prefix.unpack(b"\xf5\x10" + bytes(14))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [(0, {}), (15, {}), (2, {"rest": 1}), (2, {"channel": 1})],
    ids=["continuation", "abandon", "more to come", "on a channel"],
)
def test_pieces_are_no_whole_frames(kind: int, changes: dict[str, Any]) -> None:
    """Only a whole frame is decoded alone; pieces belong to an assembler."""
    with pytest.raises(MalformedFrameError, match="a piece of a frame"):
        decode(*forged(kind, {"id": 1, "reply": False}, **changes))


def test_frames_without_a_body_refuse_one() -> None:
    """A body where none belongs is refused."""
    with pytest.raises(MalformedFrameError, match="no body, got 1 bytes"):
        decode(*forged(FrameType.PING, {"id": 1, "reply": False}, views(b"x")))


@pytest.mark.parametrize("start", [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 5])
def test_ranges_hold_across_integer_boundaries(start: int) -> None:
    """Offsets around 2**31, 2**32 and 2**63 arrive exactly, and the chunk must be as long as it says."""
    chunk = Chunk(
        **ROUTE, stream=1, start=start, stop=start + 4, digest=TICKET, body=views(b"abcd")
    )
    assert decode(*encode(chunk)) == chunk
    header = header_of(chunk)
    for start_now, stop_now in ((start, start + 3), (start + 4, start + 4), (start + 4, start)):
        with pytest.raises(MalformedFrameError, match="chunk frame: field 'body'"):
            decode(
                *forged(chunk.type, {**header, "start": start_now, "stop": stop_now}, chunk.body)
            )


def test_ids_beyond_63_bits_are_refused() -> None:
    """An offset never wraps: 2**63 and above is no integer of ours."""
    for value in (2**63, 2**64 - 1):
        header = {**header_of(BY_TYPE[FrameType.PULL]), "stop": value}
        with pytest.raises(MalformedFrameError, match="0 to 2\\*\\*63 - 1"):
            decode(*forged(FrameType.PULL, header))


@pytest.mark.parametrize(("header_bytes", "size"), [(9, 8), (7, 100), (2**63 - 1, 2**63 - 2)])
def test_header_larger_than_its_payload(header_bytes: int, size: int) -> None:
    """A safetensors header has 8 bytes at least and fits in the payload."""
    header = {**header_of(BY_TYPE[FrameType.OPENED]), "size": size, "header_bytes": header_bytes}
    with pytest.raises(MalformedFrameError, match="header_bytes"):
        decode(*forged(FrameType.OPENED, header))


def test_more_is_promised_with_an_answer_than_there_is() -> None:
    """What follows an answer unasked lies within the payload."""
    header = {**header_of(BY_TYPE[FrameType.OPENED]), "size": 600, "first": 601}
    with pytest.raises(MalformedFrameError, match="first at most size 600"):
        decode(*forged(FrameType.OPENED, header))


SMALL = Limits(
    link=LinkLimits(message=64 * 1024, chunk=64 * 1024, names=64 * 1024),
    tensors=3,
    name=4,
    topic=5,
    reason=6,
    refs=2,
    capabilities=1,
    hops=2,
    hold=10,
)

EXCESSES: tuple[tuple[FrameType, dict[str, object], str, str, str], ...] = (
    (FrameType.MESSAGE, {"topic": "rounds"}, "topic", "5 characters", "6"),
    (FrameType.CANCEL, {"reason": "a" * 7}, "reason", "6 characters", "7"),
    (FrameType.NOTICE, {"refs": ["a", "b", "c"]}, "refs", "2 refs", "3"),
    (FrameType.OPEN, {"capabilities": ["a", "b"]}, "capabilities", "1 names", "2"),
    (FrameType.PULL, {"hops": 3}, "hops", "2 hops", "3"),
    (FrameType.HOLD, {"seconds": 10.5}, "hold", "10 seconds", "10.5"),
)


@pytest.mark.parametrize(("kind", "changes", "limit", "most", "got"), EXCESSES)
def test_an_excess_names_its_limit(
    kind: FrameType, changes: dict[str, object], limit: str, most: str, got: str
) -> None:
    """A peer that exceeds a limit is told which, what is allowed and what came."""
    header = {**header_of(BY_TYPE[kind]), "hops": 2, "reason": "", "capabilities": [], **changes}
    known = header_of(BY_TYPE[kind])
    header = {key: value for key, value in header.items() if key in known}
    with pytest.raises(LimitError) as caught:
        decode(*forged(kind, header, body_of(BY_TYPE[kind])), limits=SMALL)
    assert caught.value.limit == limit
    assert (caught.value.expected, caught.value.got) == (f"at most {most}", got)
    assert caught.value.frame == name_of(kind)
    assert caught.value.field == next(iter(changes))


@pytest.mark.parametrize(
    ("names", "limit"),
    [(["a", "b", "c", "d"], "tensors"), (["abcde"], "name")],
)
def test_names_of_an_open_are_bounded(names: list[str], limit: str) -> None:
    """An open cannot name more tensors, or longer ones, than a payload may have."""
    header = {**header_of(BY_TYPE[FrameType.OPEN]), "hops": 0, "capabilities": []}
    with pytest.raises(LimitError) as caught:
        decode(*forged(FrameType.OPEN, header, views(msgpack.packb(names))), limits=SMALL)
    assert (caught.value.limit, caught.value.field) == (limit, "names")


@pytest.mark.parametrize(
    "packed",
    [
        b"\xc0",
        b"\x91\x01",
        b"\x92\xa1a\xa1a",
        b"\x92\xa1a",
        b"\x91\xa1a\xc0",
        b"\xdd\xff",
        b"\x91\x90",
    ],
    ids=["nil", "integer", "repeated", "short", "long", "cut", "nested"],
)
def test_bad_names_are_refused(packed: bytes) -> None:
    """The body of an open is one array of distinct strings and nothing else."""
    header = header_of(BY_TYPE[FrameType.OPEN])
    with pytest.raises(MalformedFrameError, match="open frame: field 'names'"):
        decode(*forged(FrameType.OPEN, header, views(packed)))


def test_names_may_exceed_the_header() -> None:
    """The names of a large selection travel in the body, far beyond what a header holds."""
    names = tuple(f"model.layers.{index}.weight" for index in range(20_000))
    frame = Open(**ROUTE, stream=1, ref="r", ticket=TICKET, names=names, capabilities=BOTH)
    head, body = encode(frame)
    assert len(head) < 300
    assert sum(map(len, body)) > DEFAULT_LIMITS.header
    assert decode(head, body) == frame


@pytest.mark.parametrize(
    "level", [b"\xdc\xff\xff", b"\xdc\x04\x00", b"\xde\x7f\xff\x01", b"\xde\x00\x40\x01"]
)
def test_nested_claims_in_a_header_cost_little(level: bytes) -> None:
    """Containers that claim many items and nest a thousand deep do not multiply the memory of a header."""
    frame = forged(FrameType.PING, None, packed=(level * 1000).ljust(65_535, b"\0"))
    with peak_below(16 * MIB), pytest.raises(MalformedFrameError):
        decode(*frame)


@pytest.mark.parametrize(
    "packed",
    [
        b"\xdd\xff\xff\xff\xff" + b"\xa0" * 100,
        b"\xdd\x00\x03\x0d\x41" + b"\xa0" * 100,
        b"\xdd\x00\x03\x0d\x40" * 1000,
        b"\x9f" + b"\xdd\x00\x01\x00\x00" + b"\xc0" * 65_536,
    ],
    ids=["2**32-1", "one above the limit", "nested claims", "nested items"],
)
def test_false_claims_of_names_cost_nothing(packed: bytes) -> None:
    """A name list that claims billions of items, or nests them, allocates next to nothing."""
    frame = forged(FrameType.OPEN, header_of(BY_TYPE[FrameType.OPEN]), views(packed))
    with peak_below(MIB), pytest.raises(PeerError):
        decode(*frame)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(FrameType.MESSAGE, "message"), (FrameType.CHUNK, "chunk"), (FrameType.OPEN, "names")],
)
def test_bodies_are_bounded(kind: FrameType, limit: str) -> None:
    """A body above the limit of its type is refused by the name of that limit."""
    header = {**header_of(BY_TYPE[kind]), "capabilities": [], "start": 0, "stop": 65_537, "hops": 1}
    known = header_of(BY_TYPE[kind])
    header = {key: value for key, value in header.items() if key in known}
    with pytest.raises(LimitError) as caught:
        decode(*forged(kind, header, views(bytes(65_537))), limits=SMALL)
    assert (caught.value.limit, caught.value.got, caught.value.field) == (limit, "65537", "body")


def test_header_above_its_limit() -> None:
    """A header longer than agreed is refused before it is parsed."""
    limits = Limits(header=4096)
    with pytest.raises(
        LimitError, match="'header' exceeded: expected at most 4096 bytes, got 4097"
    ):
        decode(*forged(FrameType.PING, None, packed=b"\xc1" * 4097), limits=limits)


def test_unknown_capabilities_are_dropped() -> None:
    """A newer peer may name more than we know; what we do not know is not agreed on."""
    header = {**header_of(BY_TYPE[FrameType.HELLO]), "capabilities": ["cancel", "teleport"]}
    frame = decode(*forged(FrameType.HELLO, header))
    assert isinstance(frame, Hello)
    assert frame.capabilities == {Capability.CANCEL}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("frame", 1024),
        ("chunk", 0),
        ("channels", 0),
        ("channels", 2**40),
        ("message", True),
        ("names", "1"),
    ],
)
def test_absurd_link_limits_are_refused(key: str, value: object) -> None:
    """A peer cannot announce limits under which nothing could be sent."""
    header = header_of(BY_TYPE[FrameType.HELLO])
    header["limits"] = {**header["limits"], key: value}
    with pytest.raises(MalformedFrameError, match=f"limit '{key}'"):
        decode(*forged(FrameType.HELLO, header))


def test_bodies_are_not_copied() -> None:
    """The views of a body are the very objects that came in, on both ways."""
    body = views(b"left", b"right")
    message = BY_TYPE[FrameType.MESSAGE]
    assert isinstance(message, Message)
    encoded = encode(message)
    assert all(out is put for out, put in zip(encoded.body, message.body, strict=True))
    frame = decode(*forged(FrameType.MESSAGE, header_of(message), body))
    assert isinstance(frame, Message)
    assert all(out is put for out, put in zip(frame.body, body, strict=True))


def test_prefix_layout() -> None:
    """The fixed prefix is 16 big-endian bytes: magic, type, header, channel, body, rest."""
    packed = Prefix(7, 0x0102, 0x03040506, 0x0708090A, 0x0B0C0D0E).pack()
    assert packed == bytes([0xF5, 7, *range(1, 15)])
    assert struct.calcsize(">BBHIII") == PREFIX_BYTES
