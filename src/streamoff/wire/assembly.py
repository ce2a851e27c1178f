"""Bodies cut into frames for a link, and joined again on its other end; bytes are never copied.

A frame that is too big for a link is sent as one headed frame and continuation frames, which have the
prefix only. All of them carry a channel, so that several bodies and any number of whole frames interleave.
Each states how much of its body is still to come, so a missing, a repeated and a surplus byte are refused
where they happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from streamoff.errors import MalformedFrameError, UsageError
from streamoff.wire.codec import (
    ABANDON,
    CONTINUATION,
    PREFIX_BYTES,
    Encoded,
    Prefix,
    make_frame,
    make_outline,
    read_header,
)
from streamoff.wire.frames import Frame, Views
from streamoff.wire.limits import DEFAULT_LIMITS, MIN_PIECE, Limits, check_limit
from streamoff.wire.shapes import SHAPES, Shape, Values

__all__ = ["Abandoned", "Assembler", "Pieces", "abandon", "fits", "split"]

_CHANNELS: Final = range(1, 2**32)


def fits(encoded: Encoded, max_frame: int = DEFAULT_LIMITS.link.frame) -> bool:
    """Whether a frame goes out whole and needs no channel."""
    return len(encoded.head) + sum(map(len, encoded.body)) <= max_frame


def split(
    encoded: Encoded, channel: int, max_frame: int = DEFAULT_LIMITS.link.frame
) -> Iterator[tuple[bytes, Views]]:
    """Cut a frame into what is sent at a time.

    Args:
        encoded: A whole frame.
        channel: From 1, not in use for another unfinished body; ignored if the frame fits.
        max_frame: Bytes of one frame at most, prefix and header included.

    Yields:
        Head and views of each frame, in order; slices of the body's views.

    Raises:
        UsageError: The channel is no channel, or the header leaves no room for a piece.
    """
    if fits(encoded, max_frame):
        yield encoded
        return
    if channel not in _CHANNELS:
        raise UsageError("channel of a split frame", expected="1 to 2**32 - 1", got=channel)
    whole = Prefix.unpack(encoded.head[:PREFIX_BYTES])
    rest, room = whole.body_bytes, max_frame - len(encoded.head)
    if room < MIN_PIECE:
        raise UsageError(
            "max_frame", expected=f"{len(encoded.head) + MIN_PIECE} bytes or more", got=max_frame
        )
    rest -= room
    head = Prefix(whole.type, whole.header_bytes, channel, room, rest).pack()
    head += encoded.head[PREFIX_BYTES:]
    pieces = Pieces(encoded.body)
    yield head, pieces.take(room)
    while rest:
        size = min(rest, max_frame - PREFIX_BYTES)
        rest -= size
        yield Prefix(CONTINUATION, 0, channel, size, rest).pack(), pieces.take(size)


def abandon(channel: int) -> bytes:
    """The frame that says: the body begun on this channel will not be finished."""
    return Prefix(ABANDON, 0, channel, 0, 0).pack()


class Pieces:
    """Takes views from the front of a body."""

    def __init__(self, body: Views) -> None:
        self._views = iter(body)
        self._left = memoryview(b"")

    def take(self, size: int) -> Views:
        """The next ``size`` bytes; the body has as many."""
        taken: list[memoryview] = []
        while size:
            if not self._left:
                self._left = next(self._views)
            view, self._left = self._left[:size], self._left[size:]
            size -= len(view)
            if view:
                taken.append(view)
        return tuple(taken)


class Abandoned(NamedTuple):
    """A body that will not be finished.

    Args:
        frame: As returned by :meth:`Assembler.header`: without its body.
        body: What had arrived, so that its buffers can be returned.
    """

    frame: Frame
    body: Views


class _Partial:
    """A frame whose body is on its way."""

    __slots__ = ("rest", "shape", "values", "views")

    def __init__(self, shape: Shape, values: Values, rest: int) -> None:
        self.shape = shape
        self.values = values
        self.rest = rest
        self.views: list[memoryview] = []


class Assembler:
    """The receiving end of one link: pieces in, frames out.

    For each frame on the wire the reader calls :meth:`prefix` with 16 bytes, :meth:`header` with
    ``header_bytes`` more if there are any, and :meth:`body` with ``body_bytes`` more, also if there are none.
    Views are kept as they are given and belong to the frame (or :class:`Abandoned`) that comes out.

    At most ``limits.link.channels`` bodies are unfinished, and each has at most the bytes that the limit of
    its type allows. An error ends the link: the assembler then only serves :meth:`close`. Not thread-safe.

    Args:
        limits: What may come; ``limits.link`` as this end announced it.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._open: dict[int, _Partial] = {}
        self._now: _Partial | None = None

    @property
    def unfinished(self) -> int:
        """How many bodies are begun and not finished."""
        return len(self._open)

    def prefix(self, data: bytes | memoryview) -> Prefix:
        """Read and check the 16 bytes that every frame starts with.

        Raises:
            LimitError: The frame, or the number of unfinished bodies, is above its limit.
            MalformedFrameError: No frame, or none that may come now on its channel.
        """
        prefix = Prefix.unpack(data)
        length = PREFIX_BYTES + prefix.header_bytes + prefix.body_bytes
        check_limit("frame", self._limits.link.frame, length, "bytes")
        if prefix.rest and prefix.body_bytes < MIN_PIECE:
            raise _malformed(prefix, "body_bytes", f"{MIN_PIECE} or more before the last piece")
        if prefix.type == CONTINUATION:
            self._check_continuation(prefix)
        elif prefix.type == ABANDON:
            self._check_abandon(prefix)
        else:
            self._check_headed(prefix)
        return prefix

    def header(self, prefix: Prefix, data: bytes | memoryview) -> Frame:
        """Read and check the header of a frame, before any of its body is here.

        Returns:
            The frame without its body (an open without its names): enough to refuse it early.

        Raises:
            LimitError: A named limit is exceeded, the length of the whole body included.
            MalformedFrameError: A wrong field.
        """
        shape = SHAPES[prefix.type]
        if len(data) != prefix.header_bytes:
            raise UsageError(
                "header of a frame", expected=f"{prefix.header_bytes} bytes", got=len(data)
            )
        values = read_header(shape, data, prefix.body_bytes + prefix.rest, self._limits)
        self._now = _Partial(shape, values, prefix.rest)
        if prefix.rest:
            self._open[prefix.channel] = self._now
        return make_outline(shape, values)

    def body(self, prefix: Prefix, views: Views = ()) -> Frame | Abandoned | None:
        """Take the body of the frame, or a piece of it.

        Returns:
            The finished frame, what was abandoned, or None: there is more to come on this channel.

        Raises:
            LimitError: An open names too many tensors, or too long ones.
            MalformedFrameError: An open with a body that is no array of distinct strings.
        """
        if sum(map(len, views)) != prefix.body_bytes:
            raise UsageError(
                "body of a frame",
                expected=f"{prefix.body_bytes} bytes",
                got=sum(map(len, views)),
            )
        partial = self._open.get(prefix.channel) if prefix.channel else self._now
        self._now = None
        if partial is None:
            raise UsageError("body of a frame", expected="its header before", got="none")
        partial.views.extend(views)
        partial.rest = prefix.rest
        if prefix.rest:
            return None
        self._open.pop(prefix.channel, None)
        if prefix.type == ABANDON:
            return _abandoned(partial)
        return make_frame(partial.shape, partial.values, tuple(partial.views), self._limits)

    def close(self) -> tuple[Abandoned, ...]:
        """Give up every unfinished body: the link is gone. Idempotent."""
        left = tuple(map(_abandoned, self._open.values()))
        self._open.clear()
        return left

    def _check_continuation(self, prefix: Prefix) -> None:
        partial = self._open.get(prefix.channel)
        if partial is None:
            raise _malformed(prefix, "channel", "one with an unfinished body")
        if prefix.header_bytes:
            raise _malformed(prefix, "header_bytes", "0")
        if not prefix.body_bytes or prefix.body_bytes + prefix.rest != partial.rest:
            raise _malformed(prefix, "rest", f"{partial.rest} bytes of body with what follows")

    def _check_abandon(self, prefix: Prefix) -> None:
        if prefix.channel not in self._open:
            raise _malformed(prefix, "channel", "one with an unfinished body")
        if prefix.header_bytes or prefix.body_bytes or prefix.rest:
            raise _malformed(prefix, "body_bytes", "a prefix only")

    def _check_headed(self, prefix: Prefix) -> None:
        check_limit("header", self._limits.header, prefix.header_bytes, "bytes")
        if not prefix.header_bytes:
            raise _malformed(prefix, "header_bytes", "1 or more")
        if not prefix.rest:
            if prefix.channel:
                raise _malformed(prefix, "channel", "0 for a frame that is whole")
            return
        if not prefix.channel or prefix.channel in self._open:
            raise _malformed(prefix, "channel", "one from 1 without an unfinished body")
        check_limit("channels", self._limits.link.channels, len(self._open) + 1, "bodies")


def _abandoned(partial: _Partial) -> Abandoned:
    return Abandoned(make_outline(partial.shape, partial.values), tuple(partial.views))


def _malformed(prefix: Prefix, field: str, expected: str) -> MalformedFrameError:
    return MalformedFrameError(
        f"frame prefix: field {field!r}", expected=expected, got=prefix, field=field
    )
