"""Whole frames to bytes and back."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from streamoff.errors import LimitError, UsageError
from streamoff.types import Address, Capability
from streamoff.wire.codec import decode, encode
from streamoff.wire.frames import (
    FRAMES,
    Chunk,
    Frame,
    FrameType,
    Hold,
    Message,
    MessageKind,
    Notice,
    Open,
    Pull,
)
from streamoff.wire.limits import Limits, LinkLimits, clip

from .samples import ROUTE, SAMPLES, TICKET, calm, frames, views

pytestmark = pytest.mark.core


def test_samples_cover_every_type() -> None:
    """There is a sample of every frame, so that no type escapes the tests below."""
    assert tuple(type(sample) for sample in SAMPLES) == FRAMES


@pytest.mark.parametrize("frame", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_sample_survives(frame: Frame) -> None:
    """Each type of frame arrives as it was sent."""
    assert decode(*encode(frame)) == frame


@calm
@given(frame=frames)
def test_any_frame_survives(frame: Frame) -> None:
    """Whatever may be sent arrives equal, field by field, across every integer boundary."""
    assert decode(*encode(frame)) == frame


BY_TYPE = {sample.type: sample for sample in SAMPLES}


def changed(kind: FrameType, /, **changes: Any) -> Frame:
    """The sample of a type with some fields changed, to anything at all."""
    return dataclasses.replace(BY_TYPE[kind], **changes)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (FrameType.PULL, "to", "server"),
        (FrameType.PULL, "hops", -1),
        (FrameType.PULL, "stream", 2**63),
        (FrameType.PULL, "stream", True),
        (FrameType.PULL, "start", -1),
        (FrameType.HELLO, "version", 0),
        (FrameType.HELLO, "instance", b"short"),
        (FrameType.HELLO, "instance", bytearray(16)),
        (FrameType.HELLO, "capabilities", {Capability.CANCEL}),
        (FrameType.HELLO, "capabilities", frozenset({"cancel"})),
        (FrameType.HELLO, "limits", {"frame": 1}),
        (FrameType.PING, "reply", 1),
        (FrameType.MESSAGE, "kind", "request"),
        (FrameType.MESSAGE, "topic", ""),
        (FrameType.MESSAGE, "topic", b"round"),
        (FrameType.MESSAGE, "body", b"bytes"),
        (FrameType.MESSAGE, "body", (b"bytes",)),
        (FrameType.MESSAGE, "body", (memoryview(b"12345678").cast("I"),)),
        (FrameType.MESSAGE, "body", (memoryview(b"1234").cast("B", (2, 2)),)),
        (FrameType.MESSAGE, "body", (memoryview(b"1234")[::2],)),
        (FrameType.OPEN, "ref", ""),
        (FrameType.OPEN, "ref", "x" * 65),
        (FrameType.OPEN, "ref", "r\u00e9f"),
        (FrameType.HOLD, "seconds", "5"),
        (FrameType.HOLD, "seconds", True),
        (FrameType.HOLD, "seconds", float("nan")),
        (FrameType.HOLD, "seconds", 0),
        (FrameType.NOTICE, "refs", ()),
        (FrameType.NOTICE, "refs", ["r"]),
        (FrameType.NOTICE, "refs", ("r", "r")),
        (FrameType.ERROR, "of", 4),
        (FrameType.ERROR, "code", "gone"),
    ],
)
def test_nothing_is_sent_that_would_be_refused(kind: FrameType, field: str, value: object) -> None:
    """A field of a wrong type or range is the caller's mistake, named before a byte is made."""
    with pytest.raises(UsageError, match=f"{kind.name.lower()} frame: field '{field}'") as caught:
        encode(changed(kind, **{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize("names", [["a"], ("a", 1), ("a", "a")])
def test_names_to_send_are_distinct_strings(names: Any) -> None:
    """The names of an open are a tuple of distinct strings."""
    with pytest.raises(UsageError, match="open frame"):
        encode(changed(FrameType.OPEN, names=names))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (FrameType.CANCEL, {"reason": "\ud800"}),
        (FrameType.OPEN, {"names": ("\udcff",)}),
    ],
)
def test_lone_surrogates_are_refused(kind: FrameType, changes: dict[str, Any]) -> None:
    """Text that is no Unicode (a path of the operating system) is refused, not a codec error."""
    with pytest.raises(UsageError, match="valid Unicode"):
        encode(changed(kind, **changes))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (FrameType.PULL, {"start": 5, "stop": 5}),
        (FrameType.CHUNK, {"stop": 111}),
        (FrameType.CHUNK, {"start": 0, "stop": 0, "body": ()}),
        (FrameType.OPENED, {"header_bytes": 4097}),
    ],
)
def test_fields_must_agree(kind: FrameType, changes: dict[str, Any]) -> None:
    """A range is not empty, a chunk is as long as its range, a header fits in its payload."""
    with pytest.raises(UsageError, match=f"{kind.name.lower()} frame"):
        encode(changed(kind, **changes))


SMALL = Limits(
    link=LinkLimits(message=64 * 1024, chunk=64 * 1024, names=64 * 1024),
    header=4096,
    tensors=2,
    name=3,
    topic=4,
    reason=4096,
    refs=64,
    hold=6,
    hops=7,
)


def _big(nbytes: int) -> Any:
    return views(bytes(nbytes))


@pytest.mark.parametrize(
    ("limit", "at", "above"),
    [
        (
            "message",
            lambda: changed(FrameType.MESSAGE, topic="t", hops=1, body=_big(65_536)),
            lambda: changed(FrameType.MESSAGE, topic="t", hops=1, body=_big(65_537)),
        ),
        (
            "chunk",
            lambda: Chunk(
                **ROUTE, hops=1, stream=1, start=0, stop=65_536, digest=TICKET, body=_big(65_536)
            ),
            lambda: Chunk(
                **ROUTE, hops=1, stream=1, start=0, stop=65_537, digest=TICKET, body=_big(65_537)
            ),
        ),
        (
            "tensors",
            lambda: changed(FrameType.OPEN, hops=1, names=("a", "b")),
            lambda: changed(FrameType.OPEN, hops=1, names=("a", "b", "c")),
        ),
        (
            "name",
            lambda: changed(FrameType.OPEN, hops=1, names=("abc",)),
            lambda: changed(FrameType.OPEN, hops=1, names=("abcd",)),
        ),
        (
            "topic",
            lambda: changed(FrameType.MESSAGE, hops=1, topic="abcd"),
            lambda: changed(FrameType.MESSAGE, hops=1, topic="abcde"),
        ),
        (
            "hold",
            lambda: Hold(**ROUTE, hops=1, stream=1, seconds=6),
            lambda: Hold(**ROUTE, hops=1, stream=1, seconds=6.001),
        ),
        (
            "hops",
            lambda: Pull(**ROUTE, hops=7, stream=1, start=0, stop=1),
            lambda: Pull(**ROUTE, hops=8, stream=1, start=0, stop=1),
        ),
        (
            "refs",
            lambda: changed(FrameType.NOTICE, hops=1, refs=tuple(map(str, range(64)))),
            lambda: changed(FrameType.NOTICE, hops=1, refs=tuple(map(str, range(65)))),
        ),
        (
            "reason",
            lambda: changed(FrameType.CANCEL, hops=1, reason="x" * 3900),
            lambda: changed(FrameType.CANCEL, hops=1, reason="x" * 4097),
        ),
        (
            "header",
            lambda: changed(FrameType.CANCEL, hops=1, reason="x" * 3900),
            lambda: changed(FrameType.CANCEL, hops=1, reason="x" * 4090),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_sender_refuses_an_excess(
    limit: str, at: Callable[[], Frame], above: Callable[[], Frame]
) -> None:
    """What is at its limit is sent; one more is refused by the sender, by the name of the limit."""
    frame = at()
    assert decode(*encode(frame, SMALL), limits=SMALL) == frame
    with pytest.raises(LimitError) as caught:
        encode(above(), SMALL)
    assert caught.value.limit == limit
    assert caught.value.frame == type(frame).type.name.lower()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


def test_the_largest_notice_fits_its_header() -> None:
    """A notice at all of its limits at once is not stopped by the limit of the header."""
    notice = Notice(
        to=Address("a" * 64),
        sender=Address("b" * 64),
        id=2**63 - 1,
        source=Address("c" * 64),
        refs=tuple(f"{index:064}" for index in range(256)),
        reason="\N{SNOWMAN}" * 1024,
    )
    assert decode(*encode(notice)) == notice


def test_no_names_is_not_all_names() -> None:
    """An open of no tensor and an open of every tensor are different requests."""
    for names in (None, ()):
        frame = changed(FrameType.OPEN, names=names)
        received = decode(*encode(frame))
        assert isinstance(received, Open)
        assert received.names == names
        assert type(received.names) is type(names)


def test_whole_seconds_may_be_an_integer() -> None:
    """A hold of 5 seconds and one of 5.0 are the same on the wire."""
    assert encode(changed(FrameType.HOLD, seconds=5)) == encode(
        changed(FrameType.HOLD, seconds=5.0)
    )


def test_tickets_are_not_shown() -> None:
    """The text of a frame, which ends up in logs, does not reveal what entitles to a slot."""
    for kind in (FrameType.OPEN, FrameType.CONFIRM, FrameType.CANCEL):
        assert repr(TICKET) not in repr(BY_TYPE[kind])


def test_a_message_needs_no_body() -> None:
    """A request may consist of its topic alone."""
    frame = Message(**ROUTE, kind=MessageKind.NOTIFY, topic="hello", id=1)
    encoded = encode(frame)
    assert encoded.body == ()
    assert decode(encoded.head) == frame


def test_any_text_can_be_clipped_into_a_reason() -> None:
    """The report of a failure never fails for its own length or for a path that is no Unicode."""
    for text in ("x" * 2000, "\udcff" * 2000, "/tmp/caf\udce9", "", "short"):
        reason = clip(text)
        assert len(reason) <= 1024
        encode(changed(FrameType.CANCEL, reason=reason))
    assert clip("short") == "short"
    assert clip("abcdef", 5) == "ab..."
    assert clip("/caf\udce9") == "/caf\\udce9"
