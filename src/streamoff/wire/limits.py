"""Every bound of the wire, in one place; an excess is a :class:`LimitError` that names the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from streamoff.errors import LimitError, UsageError
from streamoff.types import MIB

__all__ = ["DEFAULT_LIMITS", "MIN_PIECE", "Limits", "LinkLimits", "check_limit", "clip"]

MIN_PIECE: Final = 4096
"""Bytes that every frame of a body carries at least, the last one excepted; bounds fragmentation."""


class _Span(NamedTuple):
    """What a configured limit may be, both ends included."""

    low: int
    high: int


_U32: Final = 2**32 - 1

_SPANS: Final[Mapping[str, _Span]] = {
    "frame": _Span(128 * 1024, 16 * MIB),
    "message": _Span(64 * 1024, _U32),
    "chunk": _Span(64 * 1024, _U32),
    "names": _Span(64 * 1024, _U32),
    "channels": _Span(1, 1024),
    "header": _Span(4096, 65_535),
    "depth": _Span(1, 256),
    "tensor_header": _Span(1024, 2**31 - 1),
    "tensors": _Span(1, 10_000_000),
    "name": _Span(1, 32 * MIB),
    "topic": _Span(1, 4096),
    "reason": _Span(1, 4096),
    "refs": _Span(1, 256),
    "capabilities": _Span(1, 256),
    "hops": _Span(1, 64),
    "hold": _Span(1, 86_400),
}


def _validate(limits: object, names: tuple[str, ...]) -> None:
    for name in names:
        value, span = getattr(limits, name), _SPANS[name]
        if type(value) is not int or not span.low <= value <= span.high:
            raise UsageError(
                f"limit {name!r}", expected=f"an integer from {span.low} to {span.high}", got=value
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """What one end of a link accepts, told in its hello; each end sends within both.

    Args:
        frame: Bytes of one frame: prefix, header and its piece of a body.
        message: Bytes of the body of a message.
        chunk: Bytes of the body of a chunk.
        names: Bytes of the body of an open: the names of the wanted tensors.
        channels: Bodies that are begun and not finished at the same time.

    Raises:
        UsageError: A value is outside the span that the protocol allows.
    """

    frame: int = 2 * MIB
    message: int = 16 * MIB
    chunk: int = 8 * MIB
    names: int = 32 * MIB
    channels: int = 4

    def __post_init__(self) -> None:
        _validate(self, LINK_LIMIT_NAMES)

    def agree(self, other: LinkLimits) -> LinkLimits:
        """The smaller of each pair: what both ends accept."""
        return LinkLimits(
            frame=min(self.frame, other.frame),
            message=min(self.message, other.message),
            chunk=min(self.chunk, other.chunk),
            names=min(self.names, other.names),
            channels=min(self.channels, other.channels),
        )


LINK_LIMIT_NAMES: Final = tuple(item.name for item in fields(LinkLimits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this endpoint sends and accepts at most.

    Args:
        link: The part that hello announces to a peer.
        header: Bytes of the msgpack header of a frame.
        depth: Nesting of a payload tree.
        tensor_header: Bytes of a safetensors header, its 8-byte length included.
        tensors: Tensors of one payload; also names in one open.
        name: Characters of a tensor name; a payload's header bounds its bytes by the same number.
        topic: Characters of a topic.
        reason: Characters of a reason, a detail or a status.
        refs: Refs of one failure notice.
        capabilities: Capabilities in one hello, open or opened, unknown ones included.
        hops: Endpoints that forward a frame.
        hold: Seconds that one hold asks for.

    Raises:
        UsageError: A value is outside the span that the protocol allows.
    """

    link: LinkLimits = LinkLimits()
    header: int = 65_535
    depth: int = 64
    tensor_header: int = 32 * MIB
    tensors: int = 200_000
    name: int = MIB
    topic: int = 256
    reason: int = 1024
    refs: int = 256
    capabilities: int = 32
    hops: int = 8
    hold: int = 600

    def __post_init__(self) -> None:
        _validate(self, _OWN_LIMIT_NAMES)


_OWN_LIMIT_NAMES: Final = tuple(item.name for item in fields(Limits) if item.name != "link")

DEFAULT_LIMITS: Final = Limits()


def check_limit(name: str, most: int, got: float, unit: str) -> None:
    """Refuse an excess.

    Args:
        name: The attribute of :class:`Limits` or :class:`LinkLimits`.
        most: Its value.
        got: What came or would be sent.
        unit: What is counted, in the plural.

    Raises:
        LimitError: ``got`` is above ``most``; the error has ``limit``, ``expected`` and ``got``.
    """
    if got > most:
        raise LimitError(
            f"limit {name!r} exceeded",
            expected=f"at most {most} {unit}",
            got=str(got),
            limit=name,
        )


def clip(text: str, most: int = DEFAULT_LIMITS.reason) -> str:
    """Make any text fit for a reason: at most ``most`` characters, no lone surrogates.

    A reason often quotes an error of the operating system or a path, which nobody bounds; the report of a
    failure must not fail for its length.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 3]}..."
