"""From a tree to the bytes of a body's tree; see :mod:`streamoff.payload.body` for the format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack
import numpy as np

from streamoff.errors import LimitError, StreamoffError, UnsupportedValueError
from streamoff.payload.body import MAX_VALUES, SCALARS, Tag, too_deep, too_many_values
from streamoff.payload.leaves import LeafKind, TensorRef
from streamoff.payload.tree import DICTS, KEYS, Path, fields_of, show
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["Placed", "pack_tree"]

_SEQUENCES: Final[Mapping[type, Tag]] = {
    list: Tag.LIST,
    tuple: Tag.TUPLE,
    set: Tag.SET,
    frozenset: Tag.FROZENSET,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor-like value was put: under which key of the collector, as what."""

    key: object
    path: Path
    kind: LeafKind


Place = Callable[[object, Path], Placed | None]
"""Takes a tensor-like value; None if it is no tensor."""

Expand = Callable[[object], dict[str, Any] | None]
"""Turns a whole state (a mapping of tensors that is no plain dict) into one; None if it is none."""

Settle = Callable[[Placed], tuple[int, str]]
"""Gives what was placed its ref number and name, once the whole tree has been seen."""


class _Packer:
    def __init__(self, place: Place, expand: Expand, limits: Limits) -> None:
        self._place = place
        self._expand = expand
        self._limits = limits
        self._pack = msgpack.Packer(use_bin_type=True, strict_types=True).pack
        self._parts: list[bytes] = []
        self._size = self._values = 0
        self._leaves: list[tuple[int, Placed]] = []

    def put(self, token: object) -> None:
        self._add(self._pack(token))

    def _add(self, part: bytes) -> None:
        self._room(len(part))
        self._parts.append(part)
        self._size += len(part)

    def _room(self, nbytes: int) -> None:
        """Refuse what is too large before it is copied."""
        most = self._limits.link.message
        if self._size + nbytes > most:
            raise LimitError(
                "limit 'message' exceeded",
                expected=f"at most {most} bytes",
                got=f"{self._size + nbytes} or more",
                limit="message",
                hint="Send bulk as tensors or arrays; they do not count",
            )

    def value(self, value: object, path: Path) -> None:
        if len(path) > self._limits.depth:
            raise too_deep(self._limits.depth, "more, or a cycle", path)
        self._values += 1
        if self._values > MAX_VALUES:
            raise too_many_values()
        kind = type(value)
        if value is None or kind in {bool, float}:
            self.put(value)
        elif kind is str:
            self._text(value, path)
        elif kind is int:
            self._integer(value)
        elif kind in DICTS:
            self._dict(value, path)
        elif kind in _SEQUENCES:
            self._sequence(_SEQUENCES[kind], value, path)
        elif kind is bytes:
            self._room(len(value))  # type: ignore[arg-type]
            self.put(value)
        elif isinstance(value, np.generic):
            self._scalar(value, path)
        elif dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorRef)):
            self._dataclass(value, path)
        else:
            self._leaf(value, path)

    def _text(self, value: Any, path: Path) -> None:
        self._room(len(value))
        try:
            self.put(value)
        except UnicodeEncodeError as error:
            raise UnsupportedValueError("text that is not Unicode", path=show(path)) from error

    def _integer(self, value: Any) -> None:
        if -(2**63) <= value < 2**64:
            self.put(Tag.INT.value)
            self.put(value)
        else:
            self._room(value.bit_length() // 8)
            self.put(Tag.BIG.value)
            self.put(value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))

    def _dict(self, value: Any, path: Path) -> None:
        self.put(Tag.DICT.value)
        self.put(len(value))
        for key, item in value.items():
            if type(key) not in KEYS:
                raise UnsupportedValueError(
                    "a key that cannot travel",
                    expected="str, int, bool, None or bytes",
                    got=type(key).__qualname__,
                    path=show(path),
                )
            self._key(key, path)
            self.value(item, (*path, key))

    def _key(self, key: Any, path: Path) -> None:
        if type(key) is int:
            self._integer(key)
        elif type(key) is str:
            self._text(key, (*path, key))
        else:
            self._room(len(key) if type(key) is bytes else 1)
            self.put(key)

    def _sequence(self, tag: Tag, value: Any, path: Path) -> None:
        self.put(tag.value)
        self.put(len(value))
        for index, item in enumerate(value):
            self.value(item, (*path, index))

    def _scalar(self, value: Any, path: Path) -> None:
        little = value.dtype.newbyteorder("<")
        if little.str not in SCALARS:
            raise UnsupportedValueError(
                "a NumPy scalar that cannot travel", got=value.dtype, path=show(path)
            )
        self.put(Tag.SCALAR.value)
        self.put(little.str)
        self.put(np.array(value, little).tobytes())

    def _dataclass(self, value: Any, path: Path) -> None:
        names = fields_of(type(value))
        self.put(Tag.DATACLASS.value)
        self.put(type(value).__name__)
        self.put(len(names))
        for name in names:
            self.put(name)
            self.value(getattr(value, name), (*path, name))

    def _leaf(self, value: object, path: Path) -> None:
        try:
            placed = self._place(value, path)
        except StreamoffError as error:
            raise error.located(path=show(path)) from None
        if placed is None:
            state = self._expand(value)
            if state is not None:
                self._dict(state, path)
                return
            raise UnsupportedValueError(
                "a value that cannot travel",
                got=f"{type(value).__module__}.{type(value).__qualname__}",
                path=show(path),
                hint="Send plain values, tensors, arrays and dataclasses that the receiver registered",
            )
        self.put((Tag.TENSOR if placed.kind is LeafKind.TENSOR else Tag.NDARRAY).value)
        self._leaves.append((len(self._parts), placed))
        self._add(b"")

    def settled(self, settle: Settle) -> bytes:
        """The whole, with the numbers and names of its leaves."""
        for position, placed in self._leaves:
            number, name = settle(placed)
            part = self._pack(number) + self._pack(name)
            self._room(len(part))
            self._parts[position] = part
            self._size += len(part)
        return b"".join(self._parts)


def pack_tree(
    tree: object,
    place: Place,
    expand: Expand,
    settle: Settle,
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """Encode a tree without its refs.

    Args:
        tree: The values that a tree may have; anything else is refused with its path.
        place: Takes tensors, arrays, lazy tensors and kept refs.
        expand: Turns states into dicts of these.
        settle: Gives them their numbers and names in the end.
        limits: Depth and size.

    Raises:
        UnsupportedValueError: A value or key that cannot travel.
        LimitError: Too deep (a cycle, for one) or too large.
    """
    packer = _Packer(place, expand, limits)
    packer.value(tree, ())
    return packer.settled(settle)
