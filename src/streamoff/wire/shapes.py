"""How each frame travels: which fields, which kinds, which body. The wire format as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from streamoff.wire import fields as kind
from streamoff.wire.fields import BadValueError, Kind
from streamoff.wire.frames import FRAMES, Frame, FrameType
from streamoff.wire.limits import Limits, check_limit

__all__ = ["SHAPES", "Shape", "Values"]

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """How one type of frame travels.

    Args:
        number: Its type on the wire.
        name: Its type in errors.
        make: Its class.
        fields: Name and kind of every header field.
        keys: The names.
        body: Name of the limit of its body, or None if it has none.
        whole: A check over several fields and the length of the body, or None.
    """

    number: FrameType
    name: str
    make: Callable[..., Frame]
    fields: tuple[tuple[str, Kind], ...]
    keys: frozenset[str]
    body: str | None
    whole: Callable[[Values, int], None] | None

    def check(self, values: Values, nbytes: int, limits: Limits) -> None:
        """Check what spans fields, and the length of the body against the limit of the type.

        Raises:
            BadValueError: A body where none belongs, or fields that contradict each other.
            LimitError: The body is too long.
        """
        if self.body is not None:
            check_limit(self.body, getattr(limits.link, self.body), nbytes, "bytes")
        elif nbytes:
            raise BadValueError("no body", f"{nbytes} bytes")
        if self.whole is not None:
            self.whole(values, nbytes)


def _check_range(values: Values, _nbytes: int) -> None:
    if values["start"] >= values["stop"]:
        raise BadValueError("start below stop", (values["start"], values["stop"]))


def _check_chunk(values: Values, nbytes: int) -> None:
    _check_range(values, nbytes)
    if values["stop"] - values["start"] != nbytes:
        raise BadValueError(
            f"a body of {values['stop'] - values['start']} bytes", f"{nbytes} bytes"
        )


def _check_opened(values: Values, _nbytes: int) -> None:
    if not 8 <= values["header_bytes"] <= values["size"]:
        raise BadValueError(f"header_bytes from 8 to size {values['size']}", values["header_bytes"])
    if values["first"] > values["size"]:
        raise BadValueError(f"first at most size {values['size']}", values["first"])


_Check = Callable[[Values, int], None]

_ROUTE: Final = {"to": kind.ADDRESS, "sender": kind.ADDRESS, "hops": kind.HOPS}
_CLAIM: Final = {"stream": kind.ID, "ref": kind.REF, "ticket": kind.DIGEST}
_RANGE: Final = {"stream": kind.ID, "start": kind.ID, "stop": kind.ID}

_FIELDS: Final[dict[FrameType, dict[str, Kind]]] = {
    FrameType.HELLO: {
        "version": kind.VERSION,
        "address": kind.ADDRESS,
        "instance": kind.DIGEST,
        "capabilities": kind.CAPABILITIES,
        "limits": kind.LINK_LIMITS,
    },
    FrameType.PING: {"id": kind.ID, "reply": kind.FLAG},
    FrameType.MESSAGE: {
        **_ROUTE,
        "kind": kind.MESSAGE_KIND,
        "topic": kind.TOPIC,
        "id": kind.ID,
        "pass_through": kind.FLAG,
    },
    FrameType.OPEN: {
        **_ROUTE,
        **_CLAIM,
        "capabilities": kind.CAPABILITIES,
        "first": kind.ID,
    },
    FrameType.OPENED: {
        **_ROUTE,
        "stream": kind.ID,
        "size": kind.SIZE,
        "header_bytes": kind.SIZE,
        "header_digest": kind.DIGEST,
        "nonce": kind.NONCE,
        "capabilities": kind.CAPABILITIES,
        "first": kind.ID,
    },
    FrameType.PULL: {**_ROUTE, **_RANGE},
    FrameType.CHUNK: {**_ROUTE, **_RANGE, "digest": kind.DIGEST},
    FrameType.HOLD: {**_ROUTE, "stream": kind.ID, "seconds": kind.SECONDS},
    FrameType.CONFIRM: {
        **_ROUTE,
        **_CLAIM,
        "nonce": kind.NONCE,
        "ok": kind.FLAG,
        "reason": kind.PROSE,
    },
    FrameType.CANCEL: {**_ROUTE, **_CLAIM, "reason": kind.PROSE},
    FrameType.ACK: {
        **_ROUTE,
        "of": kind.ACK_OF,
        "id": kind.ID,
        "status": kind.PROSE,
        "reason": kind.PROSE,
    },
    FrameType.NOTICE: {
        **_ROUTE,
        "id": kind.ID,
        "source": kind.ADDRESS,
        "refs": kind.REFS,
        "reason": kind.PROSE,
    },
    FrameType.UNREACHABLE: {
        **_ROUTE,
        "address": kind.ADDRESS,
        "about": kind.ID,
        "of": kind.FRAME_TYPE,
    },
    FrameType.ERROR: {
        **_ROUTE,
        "of": kind.FRAME_TYPE,
        "id": kind.ID,
        "code": kind.ERROR_CODE,
        "detail": kind.PROSE,
    },
}
_BODIES: Final = {
    FrameType.MESSAGE: "message",
    FrameType.OPEN: "names",
    FrameType.CHUNK: "chunk",
}
_CHECKS: Final[dict[FrameType, _Check]] = {
    FrameType.OPENED: _check_opened,
    FrameType.PULL: _check_range,
    FrameType.CHUNK: _check_chunk,
}

SHAPES: Final[dict[int, Shape]] = {
    make.type: Shape(
        number=make.type,
        name=make.type.name.lower(),
        make=make,
        fields=tuple(_FIELDS[make.type].items()),
        keys=frozenset(_FIELDS[make.type]),
        body=_BODIES.get(make.type),
        whole=_CHECKS.get(make.type),
    )
    for make in FRAMES
}
