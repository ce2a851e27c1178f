"""The body of a message: a payload tree as a flat run of msgpack scalars, in prefix order.

A tree is never nested msgpack: an unpacker reserves room for what a container claims, so nested claims
cost memory before anything is checked. Here every object is a scalar. An integer in the place of a value is
a tag that says what follows; everything else stands for itself. Depth, names and sizes are limited, and a
count can never exceed the bytes that are left.

=====  =========================================  =====  ==================================
tag    what follows                               tag    what follows
=====  =========================================  =====  ==================================
0      an int of up to 64 bits                    6      class name, n, then n (field, value)
1      an int as two's complement bytes           7      ref number, name: a tensor
2      n, then n values: a list                   8      ref number, name: an ndarray
3      n, then n values: a tuple                  9      dtype, bytes: a NumPy scalar
4      n, then n values: a set                    10     n, then n values: a frozenset
5      n, then n (key, value): a dict
=====  =========================================  =====  ==================================

Before the tree stand the refs: their number, and for each source, id, ticket, size and whether the message
uses only part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Final

import msgpack
import numpy as np

from streamoff.errors import (
    LimitError,
    MalformedFrameError,
    StreamoffError,
    UnsupportedValueError,
)
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.types import Address, Ref
from streamoff.wire.frames import Views
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = [
    "MAX_REFS",
    "Path",
    "Placed",
    "Tag",
    "join",
    "leaves",
    "pack_tree",
    "replaced",
    "show",
    "unpack",
]

MAX_REFS: Final = 4096
"""Refs of one message."""

Path = tuple[object, ...]
"""Keys and indices from the root of a tree to one of its values."""


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


class Tag(IntEnum):
    """What an integer in the place of a value announces."""

    INT = 0
    BIG = 1
    LIST = 2
    TUPLE = 3
    SET = 4
    DICT = 5
    DATACLASS = 6
    TENSOR = 7
    NDARRAY = 8
    SCALAR = 9
    FROZENSET = 10


_KEYS: Final = (str, int, bool, type(None), bytes)
_CONTAINERS: Final[Mapping[type, Tag]] = {
    list: Tag.LIST,
    tuple: Tag.TUPLE,
    set: Tag.SET,
    frozenset: Tag.FROZENSET,
}
_BUILD: Final[Mapping[Tag, Callable[[list[Any]], object]]] = {
    Tag.LIST: list,
    Tag.TUPLE: tuple,
    Tag.SET: set,
    Tag.FROZENSET: frozenset,
}
_LEAVES: Final[Mapping[Tag, LeafKind]] = {
    Tag.TENSOR: LeafKind.TENSOR,
    Tag.NDARRAY: LeafKind.NDARRAY,
}


def show(path: Path) -> str:
    """Render a path as one would write it."""
    return "tree" + "".join(f"[{step!r}]" for step in path)


# --- packing --------------------------------------------------------------------------------------


class _Packer:
    def __init__(self, place: Place, expand: Expand, limits: Limits) -> None:
        self._place = place
        self._expand = expand
        self._limits = limits
        self._pack = msgpack.Packer(use_bin_type=True, strict_types=True).pack
        self._parts: list[bytes] = []
        self._size = 0
        self._leaves: list[tuple[int, Placed]] = []

    def put(self, token: object) -> None:
        self._add(self._pack(token))

    def _add(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._limits.link.message:
            raise LimitError(
                "limit 'message' exceeded",
                expected=f"at most {self._limits.link.message} bytes",
                got="a larger tree",
                limit="message",
                hint="Send bulk as tensors or arrays; they do not count",
            )

    def value(self, value: object, path: Path) -> None:
        if len(path) > self._limits.depth:
            raise LimitError(
                "limit 'depth' exceeded",
                expected=f"at most {self._limits.depth} levels",
                got="more, or a cycle",
                limit="depth",
                path=show(path[:8]),
            )
        kind = type(value)
        if value is None or kind in {bool, float, bytes}:
            self.put(value)
        elif kind is str:
            self._text(value, path)
        elif kind is int:
            self._integer(value)
        elif kind is dict:
            self._dict(value, path)
        elif kind in _CONTAINERS:
            self._sequence(_CONTAINERS[kind], value, path)
        elif isinstance(value, np.generic):
            self._scalar(value, path)
        elif dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorRef)):
            self._dataclass(value, path)
        elif (state := self._expand(value)) is not None:
            self._dict(state, path)
        else:
            self._leaf(value, path)

    def _text(self, value: Any, path: Path) -> None:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedValueError("text that is not Unicode", path=show(path)) from error
        self.put(value)

    def _integer(self, value: Any) -> None:
        if -(2**63) <= value < 2**64:
            self.put(Tag.INT.value)
            self.put(value)
        else:
            self.put(Tag.BIG.value)
            self.put(value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))

    def _dict(self, value: Any, path: Path) -> None:
        self.put(Tag.DICT.value)
        self.put(len(value))
        for key, item in value.items():
            if type(key) not in _KEYS:
                raise UnsupportedValueError(
                    "a key that cannot travel",
                    expected="str, int, bool, None or bytes",
                    got=f"{key!r} of {type(key).__qualname__}",
                    path=show(path),
                )
            self.value(key, (*path, key))
            self.value(item, (*path, key))

    def _sequence(self, tag: Tag, value: Any, path: Path) -> None:
        self.put(tag.value)
        self.put(len(value))
        for index, item in enumerate(value):
            self.value(item, (*path, index))

    def _scalar(self, value: Any, path: Path) -> None:
        if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16:
            raise UnsupportedValueError(
                "a NumPy scalar that cannot travel", got=value.dtype, path=show(path)
            )
        self.put(Tag.SCALAR.value)
        little = value.dtype.newbyteorder("<")
        self.put(little.str)
        self.put(value.astype(little).tobytes())

    def _dataclass(self, value: Any, path: Path) -> None:
        names = [item.name for item in dataclasses.fields(value) if item.init]
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
            self._parts[position] = self._pack(number) + self._pack(name)
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


def join(refs: Iterable[tuple[Ref, bool]], tree: bytes, limits: Limits = DEFAULT_LIMITS) -> Views:
    """Put the refs, as one receiver gets them, before an encoded tree.

    Raises:
        LimitError: Too many refs, or the body is too large.
    """
    refs = tuple(refs)
    if len(refs) > MAX_REFS:
        raise LimitError("refs of a message", expected=f"at most {MAX_REFS}", got=len(refs))
    pack = msgpack.Packer(use_bin_type=True).pack
    head = bytearray(pack(len(refs)))
    for ref, partial in refs:
        for token in (str(ref.source), ref.id, ref.ticket, ref.size, partial):
            head += pack(token)
    if len(head) + len(tree) > limits.link.message:
        raise LimitError(
            "limit 'message' exceeded",
            expected=f"at most {limits.link.message} bytes",
            got=len(head) + len(tree),
            limit="message",
        )
    return (memoryview(bytes(head)), memoryview(tree))


# --- unpacking ------------------------------------------------------------------------------------


class _Unpacker:
    def __init__(self, body: Views, dataclasses_known: Mapping[str, type], limits: Limits) -> None:
        self._size = sum(len(view) for view in body)
        self._known = dataclasses_known
        self._limits = limits
        self._tokens = msgpack.Unpacker(
            max_buffer_size=max(1, self._size),
            max_array_len=0,
            max_map_len=0,
            max_ext_len=0,
            max_str_len=self._size,
            max_bin_len=self._size,
        )
        for view in body:
            self._tokens.feed(view)
        self.batches: list[Batch] = []

    def bad(
        self, what: str, path: Path, *, expected: object = None, got: object = None
    ) -> MalformedFrameError:
        return MalformedFrameError(
            f"message body: {what}", expected=expected, got=got, path=show(path)
        )

    def token(self, path: Path) -> object:
        try:
            return self._tokens.unpack()
        except msgpack.OutOfData as error:
            raise self.bad("cut short", path) from error
        except (ValueError, TypeError) as error:
            raise self.bad("not a scalar", path) from error

    def expect(self, kind: type, path: Path) -> Any:
        token = self.token(path)
        if type(token) is not kind:
            raise self.bad("a token", path, expected=kind.__name__, got=type(token).__name__)
        return token

    def count(self, path: Path, each: int = 1) -> int:
        number: int = self.expect(int, path)
        left = self._size - self._tokens.tell()
        if not 0 <= number * each <= left:
            raise self.bad("a count", path, expected=f"0 to {left // each}", got=number)
        return number

    def refs(self) -> None:
        number = self.count((), 5)
        if number > MAX_REFS:
            raise LimitError("refs of a message", expected=f"at most {MAX_REFS}", got=number)
        for _ in range(number):
            source, name = self.expect(str, ()), self.expect(str, ())
            ticket, size = self.expect(bytes, ()), self.expect(int, ())
            partial = self.expect(bool, ())
            try:
                ref = Ref(Address(source), name, ticket, size)
            except StreamoffError as error:
                raise self.bad("a ref", ()) from error
            self.batches.append(Batch(ref, partial=partial))

    def value(self, path: Path) -> object:
        if len(path) > self._limits.depth:
            raise LimitError(
                "limit 'depth' exceeded",
                expected=f"at most {self._limits.depth} levels",
                got="more",
                limit="depth",
            )
        token = self.token(path)
        if type(token) is not int:
            return token
        try:
            tag = Tag(token)
        except ValueError as error:
            raise self.bad("an unknown tag", path, got=token) from error
        return self._tagged(tag, path)

    def _tagged(self, tag: Tag, path: Path) -> object:
        if tag in _BUILD:
            items = [self.value((*path, index)) for index in range(self.count(path))]
            return self._built(_BUILD[tag], items, path)
        if tag in _LEAVES:
            return self._leaf(_LEAVES[tag], path)
        read = {
            Tag.INT: self._integer,
            Tag.BIG: self._big,
            Tag.DICT: self._dict,
            Tag.DATACLASS: self._dataclass,
            Tag.SCALAR: self._scalar,
        }
        return read[tag](path)

    def _integer(self, path: Path) -> object:
        return self.expect(int, path)

    def _big(self, path: Path) -> object:
        return int.from_bytes(self.expect(bytes, path), "big", signed=True)

    def _built(self, build: Callable[[list[Any]], object], items: list[Any], path: Path) -> object:
        try:
            return build(items)
        except TypeError as error:
            raise self.bad("an item that no set can hold", path) from error

    def _dict(self, path: Path) -> object:
        result: dict[Any, object] = {}
        for _ in range(self.count(path, 2)):
            key = self.value(path)
            if type(key) not in _KEYS:
                raise self.bad("a key", path, got=type(key).__name__)
            if key in result:
                raise self.bad("a key twice", path, got=repr(key))
            result[key] = self.value((*path, key))
        return result

    def _dataclass(self, path: Path) -> object:
        name = self.expect(str, path)
        kind = self._known.get(name)
        if kind is None:
            raise self.bad(
                "a dataclass",
                path,
                expected="one that Endpoint(dataclasses=...) was given",
                got=name,
            )
        values: dict[str, object] = {}
        for _ in range(self.count(path, 2)):
            field: str = self.expect(str, path)
            values[field] = self.value((*path, field))
        wanted = {item.name for item in dataclasses.fields(kind) if item.init}
        if set(values) != wanted:
            raise self.bad("fields", path, expected=sorted(wanted), got=sorted(values))
        try:
            return kind(**values)
        except Exception as error:
            raise self.bad(f"{name} refuses its fields ({error})", path) from error

    def _leaf(self, kind: LeafKind, path: Path) -> object:
        number, name = self.expect(int, path), self.expect(str, path)
        if not 0 <= number < len(self.batches):
            raise self.bad("a ref number", path, expected=f"below {len(self.batches)}", got=number)
        return TensorRef(self.batches[number], name, kind)

    def _scalar(self, path: Path) -> object:
        text, raw = self.expect(str, path), self.expect(bytes, path)
        try:
            dtype = np.dtype(text)
        except TypeError as error:
            raise self.bad("a dtype", path, got=text) from error
        if dtype.kind not in "biufc" or dtype.itemsize != len(raw) or dtype.itemsize > 16:
            raise self.bad("a NumPy scalar", path, got=text)
        return np.frombuffer(raw, dtype)[0]

    def done(self) -> None:
        if self._tokens.tell() != self._size:
            raise self.bad("trailing bytes", ())


def unpack(
    body: Views,
    known: Mapping[str, type] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[object, tuple[Batch, ...]]:
    """Decode a body; tensors stay refs.

    Args:
        body: As it came.
        known: Dataclasses by name.
        limits: Depth.

    Returns:
        The tree with :class:`~streamoff.payload.leaves.TensorRef` leaves, and its batches.

    Raises:
        MalformedFrameError: Not a body; says where.
        LimitError: Too deep, or too many refs.
    """
    unpacker = _Unpacker(body, known or {}, limits)
    unpacker.refs()
    tree = unpacker.value(())
    unpacker.done()
    return tree, tuple(unpacker.batches)


def leaves(tree: object) -> Iterator[tuple[Path, TensorRef]]:
    """Every kept ref of a tree with its path, in order; looks into all containers and dataclasses."""
    yield from _leaves(tree, ())


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, TensorRef]]:
    if isinstance(value, TensorRef):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _leaves(getattr(value, item.name), (*path, item.name))


def replaced(tree: Any, ends: Mapping[TensorRef, object]) -> Any:
    """A copy of a tree with leaves replaced; what has none is shared, not copied."""
    if isinstance(tree, TensorRef):
        return ends.get(tree, tree)
    if type(tree) is dict:
        items = {key: replaced(item, ends) for key, item in tree.items()}
        return items if any(items[key] is not tree[key] for key in tree) else tree
    if type(tree) in _CONTAINERS:
        parts = [replaced(item, ends) for item in tree]
        same = all(new is old for new, old in zip(parts, tree, strict=True))
        return tree if same else type(tree)(parts)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {
            item.name: replaced(getattr(tree, item.name), ends)
            for item in dataclasses.fields(tree)
            if item.init
        }
        same = all(values[name] is getattr(tree, name) for name in values)
        return tree if same else dataclasses.replace(tree, **values)
    return tree
