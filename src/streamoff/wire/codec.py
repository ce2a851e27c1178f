"""Frames to bytes and back; whole frames only (:mod:`streamoff.wire.assembly` cuts and joins bodies).

A frame is a 16-byte prefix, a msgpack map and a raw body. The map has exactly the keys of the frame's
fields; one table per frame says how each is checked, in both directions, so nothing can be sent that would
be refused on arrival.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import msgpack

from streamoff.errors import LimitError, MalformedFrameError, UsageError
from streamoff.wire import fields as kind
from streamoff.wire.fields import BadValueError
from streamoff.wire.frames import Frame, FrameType, Open, Views
from streamoff.wire.limits import DEFAULT_LIMITS, Limits, check_limit
from streamoff.wire.shapes import SHAPES, Shape, Values

__all__ = [
    "ABANDON",
    "CONTINUATION",
    "MAGIC",
    "PREFIX_BYTES",
    "Encoded",
    "Prefix",
    "decode",
    "encode",
]

MAGIC: Final = 0xF5
"""First byte of every frame; no TLS record and no UTF-8 text starts with it."""

CONTINUATION: Final = 0
ABANDON: Final = 15

PREFIX_BYTES: Final = 16
_PREFIX: Final = struct.Struct(">BBHIII")


class Prefix(NamedTuple):
    """The fixed part of a frame.

    Args:
        type: A :class:`FrameType`, ``CONTINUATION`` or ``ABANDON``.
        header_bytes: Length of the header; 0 for continuation and abandon.
        channel: Which unfinished body a piece belongs to, from 1; 0 for a frame that is whole.
        body_bytes: Length of the piece of a body in this frame.
        rest: Bytes of the body that follow in continuation frames.
    """

    type: int
    header_bytes: int
    channel: int
    body_bytes: int
    rest: int

    def pack(self) -> bytes:
        """The 16 bytes."""
        return _PREFIX.pack(MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Prefix:
        """Read the 16 bytes.

        Raises:
            MalformedFrameError: Not 16 bytes, a wrong first byte or an unknown type.
        """
        if len(data) != PREFIX_BYTES:
            raise MalformedFrameError(
                "frame prefix", expected=f"{PREFIX_BYTES} bytes", got=f"{len(data)} bytes"
            )
        magic, *values = _PREFIX.unpack(data)
        if magic != MAGIC:
            raise MalformedFrameError(
                "not a frame",
                expected=f"first byte {MAGIC:#04x}",
                got=f"{magic:#04x}",
                hint="Check that the peer speaks this protocol, with TLS on both sides or on none",
            )
        if not CONTINUATION <= values[0] <= ABANDON:
            raise MalformedFrameError(
                "frame prefix: field 'type'",
                expected=f"0 to {ABANDON}",
                got=values[0],
                field="type",
            )
        return cls(*values)


class Encoded(NamedTuple):
    """A whole frame, ready to be sent or cut.

    Args:
        head: Prefix (channel 0, nothing to follow) and header.
        body: As in the frame: the same views.
    """

    head: bytes
    body: Views


def encode(frame: Frame, limits: Limits = DEFAULT_LIMITS) -> Encoded:
    """Check a frame and make its bytes.

    Args:
        frame: Any frame. The views of its body are borrowed until they are sent, never copied.
        limits: What may be sent; ``limits.link`` should be what both ends of the link agreed on.

    Raises:
        LimitError: A named limit is exceeded. Nothing was made.
        UsageError: A field has the wrong type or range. Nothing was made.
    """
    shape = SHAPES[frame.type]
    values: Values = {}
    name = "header"
    try:
        for name, field in shape.fields:
            values[name] = field.write(getattr(frame, name), limits)
        name = "body"
        body = _write_body(frame, shape, limits)
        nbytes = sum(map(len, body))
        shape.check(values, nbytes, limits)
        name = "header"
        header = _pack(values)
        check_limit("header", limits.header, len(header), "bytes")
    except LimitError as error:
        raise error.located(frame=shape.name, field=name) from None
    except BadValueError as error:
        raise UsageError(
            f"{shape.name} frame: field {name!r}",
            expected=error.expected,
            got=error.got,
            frame=shape.name,
            field=name,
        ) from None
    return Encoded(Prefix(shape.number, len(header), 0, nbytes, 0).pack() + header, body)


def decode(head: bytes | memoryview, body: Views = (), limits: Limits = DEFAULT_LIMITS) -> Frame:
    """Read a whole frame.

    Args:
        head: Prefix and header, as :func:`encode` made them.
        body: The body, in any number of views; they are kept in the frame, not copied.
        limits: What may come.

    Raises:
        LimitError: A named limit is exceeded.
        MalformedFrameError: Anything else that :func:`encode` would not have made; names frame type,
            field, what was expected and what came.
    """
    prefix = Prefix.unpack(head[:PREFIX_BYTES])
    shape = SHAPES.get(prefix.type)
    if shape is None or prefix.rest or prefix.channel:
        raise MalformedFrameError(
            "a piece of a frame", expected="a whole frame", got=prefix, frame=prefix.type
        )
    for name, stated, came in (
        ("header", prefix.header_bytes, len(head) - PREFIX_BYTES),
        ("body", prefix.body_bytes, sum(map(len, body))),
    ):
        if stated != came:
            raise MalformedFrameError(
                f"{shape.name} frame: field {name!r}",
                expected=f"{stated} bytes",
                got=f"{came} bytes",
                frame=shape.name,
                field=name,
            )
    values = read_header(shape, head[PREFIX_BYTES:], prefix.body_bytes, limits)
    return make_frame(shape, values, body, limits)


def read_header(shape: Shape, header: bytes | memoryview, nbytes: int, limits: Limits) -> Values:
    """Read and check the header of a frame whose body has ``nbytes`` bytes in all.

    Raises:
        LimitError: A named limit is exceeded.
        MalformedFrameError: The bytes are not a map of exactly the frame's fields, each as it should be.
    """
    name = "header"
    try:
        check_limit("header", limits.header, len(header), "bytes")
        values = _read_map(shape, header)
        for name, field in shape.fields:
            values[name] = field.read(values[name], limits)
        name = "body"
        shape.check(values, nbytes, limits)
    except LimitError as error:
        raise error.located(frame=shape.name, field=name) from None
    except BadValueError as error:
        raise _malformed(shape, name, error) from None
    return values


def make_frame(shape: Shape, values: Values, body: Views, limits: Limits) -> Frame:
    """Make the record from a checked header and the whole body.

    Raises:
        LimitError: The body of an open has too many or too long names.
        MalformedFrameError: The body of an open is no array of distinct strings.
    """
    if shape.body is None:
        return shape.make(**values)
    if shape.number is not FrameType.OPEN:
        return shape.make(**values, body=body)
    try:
        return shape.make(**values, names=_read_names(body, limits))
    except LimitError as error:
        raise error.located(frame=shape.name, field="names") from None
    except BadValueError as error:
        raise _malformed(shape, "names", error) from None


def make_outline(shape: Shape, values: Values) -> Frame:
    """Make the record from a checked header alone: without a body, an open without its names."""
    if shape.body is None or shape.number is FrameType.OPEN:
        return shape.make(**values)
    return shape.make(**values, body=())


def _read_map(shape: Shape, header: bytes | memoryview) -> Values:
    values: Values = _unpack(header)
    if type(values) is not dict:
        raise BadValueError("a map", values)
    if values.keys() != shape.keys:
        missing, unknown = shape.keys - values.keys(), values.keys() - shape.keys
        raise BadValueError(
            f"the keys {', '.join(name for name, _ in shape.fields)}",
            f"missing: {sorted(missing)}, unknown: {sorted(map(str, unknown))}",
        )
    return values


def _malformed(shape: Shape, name: str, error: BadValueError) -> MalformedFrameError:
    return MalformedFrameError(
        f"{shape.name} frame: field {name!r}",
        expected=error.expected,
        got=error.got,
        frame=shape.name,
        field=name,
    )


def _write_body(frame: Frame, shape: Shape, limits: Limits) -> Views:
    if shape.body is None:
        return ()
    if isinstance(frame, Open):
        if frame.names is None:
            return ()
        return (memoryview(_pack(kind.tensor_names(frame.names, limits))),)
    body: Any = getattr(frame, "body")  # noqa: B009  # message and chunk have one, by the table
    if type(body) is not tuple or not all(map(_is_plain, body)):
        raise BadValueError('a tuple of contiguous memoryviews of format "B"', body)
    return body


def _is_plain(view: Any) -> bool:
    return type(view) is memoryview and view.format == "B" and view.ndim == 1 and view.c_contiguous


def _read_names(body: Views, limits: Limits) -> tuple[str, ...] | None:
    """Read the array of names item by item, with no container in it: a body costs what it holds."""
    data = b"".join(body)  # names, not tensor bytes
    if not data:
        return None
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(data), max_array_len=0, max_map_len=0, max_ext_len=0, use_list=False
    )
    unpacker.feed(data)
    try:
        length = unpacker.read_array_header()
        check_limit("tensors", limits.tensors, length, "names")
        names = kind.tensor_names(tuple(unpacker), limits)
    except LimitError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise BadValueError("an array of strings", f"{type(error).__name__}: {error}") from None
    if len(names) != length or unpacker.tell() != len(data):
        raise BadValueError(f"an array of {length} strings", f"{len(names)} in {len(data)} bytes")
    return names


def _pack(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except UnicodeEncodeError as error:
        raise BadValueError("text that is valid Unicode", ascii(error.object)) from None
    return packed


def _unpack(data: bytes | memoryview) -> Any:
    """Unpack a header; whatever msgpack cannot read is a bad value, never its own error.

    msgpack makes room for what a container claims before its items are there, once per level of nesting,
    so the claims are bounded well below what fits in a header.
    """
    try:
        return msgpack.unpackb(
            data,
            use_list=False,
            max_array_len=1024,
            max_map_len=64,
            object_pairs_hook=_unique,
            ext_hook=_no_extension,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise BadValueError("one msgpack value", f"{type(error).__name__}: {error}") from None


def _unique(pairs: list[tuple[Any, Any]]) -> Values:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise BadValueError("distinct keys", "a repeated one")
    return values


def _no_extension(code: int, _data: bytes) -> Any:
    raise BadValueError("no extension types", f"extension type {code}")
