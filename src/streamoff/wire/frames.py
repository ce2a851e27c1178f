"""The frames: everything one endpoint can say to another.

A frame is a frozen record. :mod:`streamoff.wire.codec` checks every field against its type, its range and
:class:`~streamoff.wire.limits.Limits` when a frame is encoded and again when one is decoded, so a record
that came off a link needs no further check. Sizes are bytes, ids are integers from 0 to 2**63 - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import ClassVar, Final

from streamoff.types import Address, Capability, RefId
from streamoff.wire.limits import DEFAULT_LIMITS, LinkLimits

__all__ = [
    "FRAMES",
    "PROTOCOL_VERSION",
    "Ack",
    "AckOf",
    "Cancel",
    "Chunk",
    "Confirm",
    "Error",
    "ErrorCode",
    "Frame",
    "FrameType",
    "Hello",
    "Hold",
    "Message",
    "MessageKind",
    "Notice",
    "Open",
    "Opened",
    "Ping",
    "Pull",
    "Routed",
    "Unreachable",
    "Views",
]

PROTOCOL_VERSION: Final = 1

Views = tuple[memoryview, ...]
"""A body: contiguous views of format "B", in order. Never joined, never passed through msgpack."""


class FrameType(IntEnum):
    """The number of a frame on the wire (0 and 15 are continuation and abandon, which carry no record)."""

    HELLO = 1
    PING = 2
    MESSAGE = 3
    OPEN = 4
    OPENED = 5
    PULL = 6
    CHUNK = 7
    HOLD = 8
    CONFIRM = 9
    CANCEL = 10
    ACK = 11
    NOTICE = 12
    UNREACHABLE = 13
    ERROR = 14


class MessageKind(StrEnum):
    """How a message is answered."""

    REQUEST = "request"
    REPLY = "reply"
    NOTIFY = "notify"


class AckOf(StrEnum):
    """What an acknowledgement is about, and so what its id counts: stream, notice or message."""

    CONFIRM = "confirm"
    NOTICE = "notice"
    MESSAGE = "message"


class ErrorCode(StrEnum):
    """Why a request was refused."""

    GONE = "gone"
    UNKNOWN_REF = "unknown_ref"
    UNKNOWN_STREAM = "unknown_stream"
    BAD_TICKET = "bad_ticket"
    BAD_RANGE = "bad_range"
    UNKNOWN_TENSOR = "unknown_tensor"
    SOURCE_CHANGED = "source_changed"
    SOURCE_FAILED = "source_failed"
    REFUSED = "refused"
    UNKNOWN_TOPIC = "unknown_topic"
    LIMIT = "limit"
    BUSY = "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Root of all frames."""

    type: ClassVar[FrameType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed(Frame):
    """A frame that endpoints forward.

    Args:
        to: Who it is for.
        sender: Who sent it first; forwarders keep it.
        hops: How many endpoints may still forward it.
    """

    to: Address
    sender: Address
    hops: int = DEFAULT_LIMITS.hops


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Frame):
    """The first frame on a link, in both directions; its fields are the same in every version.

    Args:
        version: Protocol version, from 1.
        address: Who speaks.
        instance: 16 random bytes, drawn when the endpoint started.
        capabilities: What the speaker can do.
        limits: What the speaker accepts.
    """

    type: ClassVar = FrameType.HELLO
    version: int = PROTOCOL_VERSION
    address: Address
    instance: bytes
    capabilities: frozenset[Capability]
    limits: LinkLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Frame):
    """Keep-alive of one link; ``reply`` answers the ping of the same id."""

    type: ClassVar = FrameType.PING
    id: int
    reply: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Routed):
    """A payload tree on its way.

    Args:
        kind: Request, reply or notify.
        topic: 1 to 256 characters; a reply repeats the topic of its request.
        id: Of the message; a reply repeats the id of its request.
        pass_through: Keep the refs at the next endpoint; it clears the mark.
        body: The encoded tree.
    """

    type: ClassVar = FrameType.MESSAGE
    kind: MessageKind
    topic: str
    id: int
    pass_through: bool = False
    body: Views = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Routed):
    """Ask for a payload.

    Args:
        stream: Chosen by the receiver; names the download in everything that follows.
        ref: What is asked for.
        ticket: 16 bytes that entitle to one slot.
        names: The wanted tensors, distinct; None for all. They travel in the body.
        capabilities: What the receiver can do.
        first: Bytes from the front that may follow the answer unpulled, in one chunk; 0: none. A relay sets
            it to 0: what nobody pulls it cannot hold back.
    """

    type: ClassVar = FrameType.OPEN
    stream: int
    ref: RefId
    ticket: bytes = field(repr=False)
    names: tuple[str, ...] | None = None
    capabilities: frozenset[Capability] = frozenset()
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Routed):
    """The answer to an open.

    Args:
        stream: Of the open.
        size: Of the whole payload, at least 8.
        header_bytes: Of the safetensors header, its 8-byte length included; 8 to ``size``.
        header_digest: XXH3-128 of these bytes, 16 bytes.
        nonce: 8 bytes that the confirmation must repeat.
        capabilities: What the source can do.
        first: Bytes from the front that follow in one chunk without a pull; what the open offered, or 0.
    """

    type: ClassVar = FrameType.OPENED
    stream: int
    size: int
    header_bytes: int
    header_digest: bytes
    nonce: bytes = field(repr=False)
    capabilities: frozenset[Capability] = frozenset()
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Routed):
    """Ask for bytes ``start`` to ``stop`` of the payload; ``start < stop``."""

    type: ClassVar = FrameType.PULL
    stream: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(Routed):
    """Bytes ``start`` to ``stop`` of the payload.

    Args:
        stream: Of the open.
        start: First byte.
        stop: One past the last byte, above ``start``.
        digest: Of the bytes, 16 bytes: XXH3-128 over the XXH3-64 (big-endian) of each piece, where a piece ends at every
            multiple of 256 KiB of the payload.
        body: ``stop - start`` bytes.
    """

    type: ClassVar = FrameType.CHUNK
    stream: int
    start: int
    stop: int
    digest: bytes
    body: Views = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Routed):
    """The receiver waits for its own disk, quota or turn: ``seconds`` of patience, above 0, at most 600."""

    type: ClassVar = FrameType.HOLD
    stream: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm(Routed):
    """The receiver's word on how its slot ended.

    Args:
        stream: Of the open.
        ref: What was received.
        ticket: Of the slot, 16 bytes.
        nonce: Of the opened, 8 bytes.
        ok: Whether the payload is where it should be.
        reason: Why not; empty on success.
    """

    type: ClassVar = FrameType.CONFIRM
    stream: int
    ref: RefId
    ticket: bytes = field(repr=False)
    nonce: bytes = field(repr=False)
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Routed):
    """The receiver gives up an acquired slot."""

    type: ClassVar = FrameType.CANCEL
    stream: int
    ref: RefId
    ticket: bytes = field(repr=False)
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(Routed):
    """A confirmation, notice or message arrived; ``status`` is the verdict in one word."""

    type: ClassVar = FrameType.ACK
    of: AckOf
    id: int
    status: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Routed):
    """The owner of ``source`` says that it is dead.

    Args:
        id: Of the notice, for its acknowledgement.
        source: Who served the refs.
        refs: What is lost, 1 to 256.
        reason: Why.
    """

    type: ClassVar = FrameType.NOTICE
    id: int
    source: Address
    refs: tuple[RefId, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable(Routed):
    """The last hop had no way to ``address`` for the frame of type ``of`` with the id ``about``."""

    type: ClassVar = FrameType.UNREACHABLE
    address: Address
    about: int
    of: FrameType


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Routed):
    """A request was refused.

    Args:
        of: Type of the frame that is refused.
        id: Its stream or message id.
        code: Why, for programs.
        detail: Why, for people.
    """

    type: ClassVar = FrameType.ERROR
    of: FrameType
    id: int
    code: ErrorCode
    detail: str = ""


FRAMES: Final[tuple[type[Frame], ...]] = (
    Hello,
    Ping,
    Message,
    Open,
    Opened,
    Pull,
    Chunk,
    Hold,
    Confirm,
    Cancel,
    Ack,
    Notice,
    Unreachable,
    Error,
)
"""Every frame, in the order of its number."""
