"""Frames that no encoder of ours would make, built field by field."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from streamoff.wire.codec import PREFIX_BYTES, encode
from streamoff.wire.frames import Frame, FrameType, Views


def header_of(frame: Frame) -> dict[str, Any]:
    """The header map of a frame as it travels."""
    header: dict[str, Any] = msgpack.unpackb(encode(frame).head[PREFIX_BYTES:])
    return header


def forged(
    kind: int,
    header: object,
    body: Views = (),
    *,
    packed: bytes | None = None,
    magic: int = 0xF5,
    channel: int = 0,
    rest: int = 0,
) -> tuple[bytes, Views]:
    """A frame of any header; lengths fit."""
    raw = msgpack.packb(header) if packed is None else packed
    nbytes = sum(map(len, body))
    prefix = struct.pack(">BBHIII", magic, kind, len(raw), channel, nbytes, rest)
    return prefix + raw, body


def body_of(frame: Frame) -> Views:
    """The body of a frame as it travels."""
    return encode(frame).body


def name_of(kind: FrameType) -> str:
    """How errors name the type."""
    return kind.name.lower()
