"""How each kind of header field is checked on its way out and on its way in.

A check returns the value in the form of the other side (a record's or msgpack's), so encoding and decoding
are the same walk over a table. Types are exact: True is no integer, an integer is no float.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from streamoff.errors import UsageError
from streamoff.types import Address, Capability
from streamoff.wire.frames import AckOf, ErrorCode, FrameType, MessageKind
from streamoff.wire.limits import LINK_LIMIT_NAMES, Limits, LinkLimits, check_limit

__all__ = ["BadValueError", "Kind"]


class BadValueError(Exception):
    """A value that a field does not take; the codec adds frame and field and raises its own error."""

    def __init__(self, expected: str, got: object) -> None:
        super().__init__(expected, got)
        self.expected = expected
        self.got = got


Check = Callable[[Any, Limits], Any]


class Kind(NamedTuple):
    """A kind of field: record to msgpack, and msgpack to record."""

    write: Check
    read: Check


def _same(check: Check) -> Kind:
    return Kind(check, check)


def _integer(low: int, high: int, text: str) -> Check:
    def check(value: Any, _limits: Limits) -> int:
        if type(value) is int and low <= value <= high:
            return value
        raise BadValueError(text, value)

    return check


def _octets(length: int) -> Check:
    def check(value: Any, _limits: Limits) -> bytes:
        if type(value) is bytes and len(value) == length:
            return value
        raise BadValueError(
            f"{length} bytes", f"{len(value)} bytes" if type(value) is bytes else value
        )

    return check


def _flag(value: Any, _limits: Limits) -> bool:
    if type(value) is bool:
        return value
    raise BadValueError("true or false", value)


def _string(value: Any) -> str:
    if type(value) is str:
        return value
    raise BadValueError("a string", value)


def _topic(value: Any, limits: Limits) -> str:
    text = _string(value)
    check_limit("topic", limits.topic, len(text), "characters")
    if not text:
        raise BadValueError("at least one character", value)
    return text


def _prose(value: Any, limits: Limits) -> str:
    text = _string(value)
    check_limit("reason", limits.reason, len(text), "characters")
    return text


def _ref(value: Any, _limits: Limits) -> str:
    text = _string(value)
    if 1 <= len(text) <= 64 and text.isascii() and text.isprintable():
        return text
    raise BadValueError("1 to 64 printable ASCII characters", value)


def _sequence(value: Any) -> tuple[Any, ...]:
    if type(value) is tuple:
        return value
    raise BadValueError("an array", value)


def _distinct(items: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(items)) == len(items):
        return items
    raise BadValueError("distinct items", "a repeated one")


def _refs(value: Any, limits: Limits) -> tuple[str, ...]:
    items = _sequence(value)
    check_limit("refs", limits.refs, len(items), "refs")
    if not items:
        raise BadValueError("at least one ref", value)
    return _distinct(tuple(_ref(item, limits) for item in items))


def tensor_names(value: Any, limits: Limits) -> tuple[str, ...]:
    """Check the names of an open: a tuple of distinct strings within ``tensors`` and ``name``."""
    items = _sequence(value)
    check_limit("tensors", limits.tensors, len(items), "names")
    for item in items:
        check_limit("name", limits.name, len(_string(item)), "characters")
    return _distinct(items)


@lru_cache(maxsize=4096)
def _parse_address(text: str) -> Address:
    return Address(text)


def _read_address(value: Any, _limits: Limits) -> Address:
    try:
        return _parse_address(_string(value))
    except UsageError as error:
        raise BadValueError(str(error.expected), value) from None


def _write_address(value: Any, _limits: Limits) -> str:
    if type(value) is Address:
        return value
    raise BadValueError("an Address", value)


def _hops(value: Any, limits: Limits) -> int:
    if type(value) is int and value >= 0:
        check_limit("hops", limits.hops, value, "hops")
        return value
    raise BadValueError("an integer from 0", value)


def _seconds(value: float, limits: Limits) -> float:
    if math.isfinite(value) and value > 0:
        check_limit("hold", limits.hold, value, "seconds")
        return value
    raise BadValueError("finite seconds above 0", value)


def _read_seconds(value: Any, limits: Limits) -> float:
    if type(value) is float:
        return _seconds(value, limits)
    raise BadValueError("a float", value)


def _write_seconds(value: Any, limits: Limits) -> float:
    if type(value) is float or type(value) is int:
        return float(_seconds(value, limits))
    raise BadValueError("a number", value)


def _choice(enum: type[IntEnum | StrEnum]) -> Kind:
    members = {item.value: item for item in enum}
    plain = str if issubclass(enum, StrEnum) else int
    expected = f"one of {', '.join(str(item.value) for item in enum)}"

    def write(value: Any, _limits: Limits) -> Any:
        if type(value) is enum:
            return value.value
        raise BadValueError(f"a member of {enum.__name__}", value)

    def read(value: Any, _limits: Limits) -> Any:
        member = members.get(value) if type(value) is plain else None
        if member is None:
            raise BadValueError(expected, value)
        return member

    return Kind(write, read)


_CAPABILITIES: Final = {item.value: item for item in Capability}


def _write_capabilities(value: Any, _limits: Limits) -> list[str]:
    if type(value) is frozenset and all(type(item) is Capability for item in value):
        return sorted(item.value for item in value)
    raise BadValueError("a frozenset of Capability", value)


def _read_capabilities(value: Any, limits: Limits) -> frozenset[Capability]:
    """Unknown names are dropped: a newer peer may know more, and only what both name counts."""
    items = _sequence(value)
    check_limit("capabilities", limits.capabilities, len(items), "names")
    for item in items:
        if not 1 <= len(_string(item)) <= 64:
            raise BadValueError("names of 1 to 64 characters", item)
    return frozenset(_CAPABILITIES[item] for item in _distinct(items) if item in _CAPABILITIES)


def _write_link_limits(value: Any, _limits: Limits) -> dict[str, int]:
    if type(value) is LinkLimits:
        return {name: getattr(value, name) for name in LINK_LIMIT_NAMES}
    raise BadValueError("LinkLimits", value)


def _read_link_limits(value: Any, _limits: Limits) -> LinkLimits:
    if type(value) is not dict or tuple(sorted(value)) != tuple(sorted(LINK_LIMIT_NAMES)):
        raise BadValueError(f"a map of {', '.join(LINK_LIMIT_NAMES)}", value)
    try:
        return LinkLimits(**value)
    except UsageError as error:
        raise BadValueError(f"{error.what}: {error.expected}", error.got) from None


ID: Final = _same(_integer(0, 2**63 - 1, "an integer from 0 to 2**63 - 1"))
SIZE: Final = _same(_integer(8, 2**63 - 1, "an integer from 8 to 2**63 - 1"))
VERSION: Final = _same(_integer(1, 65_535, "an integer from 1 to 65535"))
DIGEST: Final = _same(_octets(16))
NONCE: Final = _same(_octets(8))
FLAG: Final = _same(_flag)
TOPIC: Final = _same(_topic)
PROSE: Final = _same(_prose)
REF: Final = _same(_ref)
REFS: Final = _same(_refs)
HOPS: Final = _same(_hops)
ADDRESS: Final = Kind(_write_address, _read_address)
SECONDS: Final = Kind(_write_seconds, _read_seconds)
CAPABILITIES: Final = Kind(_write_capabilities, _read_capabilities)
LINK_LIMITS: Final = Kind(_write_link_limits, _read_link_limits)
FRAME_TYPE: Final = _choice(FrameType)
MESSAGE_KIND: Final = _choice(MessageKind)
ACK_OF: Final = _choice(AckOf)
ERROR_CODE: Final = _choice(ErrorCode)
