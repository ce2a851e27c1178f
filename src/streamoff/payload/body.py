"""The body of a message: a payload tree as a flat run of msgpack scalars, in prefix order.

A tree is never nested msgpack: an unpacker reserves room for what a container claims, so nested claims
cost memory before anything is checked. Here every object is a scalar. An integer in the place of a value is
a tag that says what follows; everything else stands for itself. Depth, values and bytes are limited, a count
can never exceed the bytes that are left, and keys are not accepted in numbers that all have one hash.

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
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from enum import IntEnum
from typing import Any, ClassVar, Final

import msgpack
import numpy as np

from streamoff.errors import (
    LimitError,
    MalformedFrameError,
    StreamoffError,
    UnsupportedValueError,
    UsageError,
)
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.types import Address, Ref
from streamoff.wire.frames import Views
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = [
    "MAX_DEPTH",
    "MAX_REFS",
    "MAX_VALUES",
    "Body",
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

MAX_VALUES: Final = 1_000_000
"""Values of one tree, containers and keys included: a byte of a body can cost a hundred bytes of objects."""

MAX_DEPTH: Final = 256
"""Nesting of a tree whose refs are looked for; no endpoint can be set to send a deeper one."""

MAX_SAME_HASH: Final = 64
"""Keys of one dict, or items of one set, with the same hash: more of them cost quadratic time."""

_SHOWN: Final = 48
"""Characters of one step of a path in a message."""

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


_KEYS: Final = frozenset({str, int, bool, type(None), bytes})
_PLAIN: Final = frozenset({str, float, bool, type(None), bytes})
"""What stands for itself."""
_DICTS: Final = frozenset({dict, OrderedDict})
_SCALARS: Final = frozenset(
    {"|b1", "|i1", "|u1"}
    | {f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)}
    | {"<f2", "<f4", "<f8", "<c8", "<c16"}
)
"""NumPy dtypes that mean the same everywhere."""
_CONTAINERS: Final[Mapping[type, Tag]] = {
    list: Tag.LIST,
    tuple: Tag.TUPLE,
    set: Tag.SET,
    frozenset: Tag.FROZENSET,
}


def show(path: Path) -> str:
    """Render a path as one would write it."""
    return "tree" + "".join(f"[{step(one)}]" for one in path)


def step(key: object) -> str:
    """Render a key: peers choose keys, and an int of 5,000 digits has no text at all."""
    if isinstance(key, int) and key.bit_length() > 8 * _SHOWN:
        return f"an int of {key.bit_length()} bits"
    if isinstance(key, (str, bytes)) and len(key) > _SHOWN:
        return f"{key[:_SHOWN]!r}..."
    return repr(key)


def children(value: object) -> Iterable[tuple[object, object]] | None:
    """The steps and values under a container of a payload tree; None if it is none.

    The one place that says what is looked into: packing, looking for refs and replacing them agree.
    """
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind in _DICTS:
        return value.items()  # type: ignore[attr-defined, no-any-return]
    if kind in _CONTAINERS:
        return enumerate(value)  # type: ignore[call-overload, no-any-return]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorRef)):
        return [(name, getattr(value, name)) for name in _fields(kind)]
    return None


def _fields(kind: Any) -> list[str]:
    """The fields that make a dataclass; others follow from them."""
    return [item.name for item in dataclasses.fields(kind) if item.init]


def _too_deep(most: int, got: str, path: Path) -> LimitError:
    return LimitError(
        "limit 'depth' exceeded",
        expected=f"at most {most} levels",
        got=got,
        limit="depth",
        path=show(path[:8]),
    )


def _too_many_values() -> LimitError:
    return LimitError(
        "limit 'values' exceeded",
        expected=f"at most {MAX_VALUES} values in a tree",
        got="more",
        limit="values",
        hint="Send bulk as tensors or arrays; each is one value",
    )


# --- packing --------------------------------------------------------------------------------------


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
            raise _too_deep(self._limits.depth, "more, or a cycle", path)
        self._values += 1
        if self._values > MAX_VALUES:
            raise _too_many_values()
        kind = type(value)
        if value is None or kind in {bool, float}:
            self.put(value)
        elif kind is str:
            self._text(value, path)
        elif kind is int:
            self._integer(value)
        elif kind in _DICTS:
            self._dict(value, path)
        elif kind in _CONTAINERS:
            self._sequence(_CONTAINERS[kind], value, path)
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
            if type(key) not in _KEYS:
                raise UnsupportedValueError(
                    "a key that cannot travel",
                    expected="str, int, bool, None or bytes",
                    got=type(key).__qualname__,
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
        little = value.dtype.newbyteorder("<")
        if little.str not in _SCALARS:
            raise UnsupportedValueError(
                "a NumPy scalar that cannot travel", got=value.dtype, path=show(path)
            )
        self.put(Tag.SCALAR.value)
        self.put(little.str)
        self.put(np.array(value, little).tobytes())

    def _dataclass(self, value: Any, path: Path) -> None:
        names = _fields(type(value))
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


class Body:
    """A body as it came: first its refs, then its tree, whose tensors stay refs.

    Args:
        body: As it came.
        known: Dataclasses by name.
        limits: Depth.
    """

    def __init__(
        self,
        body: Views,
        known: Mapping[str, type] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.batches: list[Batch] = []
        self._size = sum(len(view) for view in body)
        self._values = 0
        self._known = known or {}
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

    def read_refs(self) -> list[Batch]:
        """Read what stands before the tree.

        Raises:
            MalformedFrameError: No refs.
            LimitError: Too many.
        """
        number = self._count((), 5)
        if number > MAX_REFS:
            raise LimitError("refs of a message", expected=f"at most {MAX_REFS}", got=number)
        for _ in range(number):
            source, name = self._expect(str, ()), self._expect(str, ())
            ticket, size = self._expect(bytes, ()), self._expect(int, ())
            partial = self._expect(bool, ())
            try:
                ref = Ref(Address(source), name, ticket, size)
            except StreamoffError as error:
                raise self._bad("a ref", ()) from error
            self.batches.append(Batch(ref, partial=partial))
        return self.batches

    def read_tree(self) -> object:
        """Read the tree; to be called once, after :meth:`read_refs`.

        Raises:
            MalformedFrameError: No tree, or a dataclass that nobody registered; says where.
            LimitError: Too deep, or too many values.
        """
        tree = self._value(())
        if self._tokens.tell() != self._size:
            raise self._bad("trailing bytes", ())
        return tree

    def _bad(
        self, what: str, path: Path, *, expected: object = None, got: object = None
    ) -> MalformedFrameError:
        return MalformedFrameError(
            f"message body: {what}", expected=expected, got=got, path=show(path)
        )

    def _token(self, path: Path) -> object:
        try:
            return self._tokens.unpack()
        except msgpack.OutOfData as error:
            raise self._bad("cut short", path) from error
        except (ValueError, TypeError) as error:
            raise self._bad("not a scalar", path) from error

    def _expect(self, kind: type, path: Path) -> Any:
        token = self._token(path)
        if type(token) is not kind:
            raise self._bad("a token", path, expected=kind.__name__, got=type(token).__name__)
        return token

    def _count(self, path: Path, each: int = 1) -> int:
        number: int = self._expect(int, path)
        left = self._size - self._tokens.tell()
        if not 0 <= number * each <= left:
            raise self._bad("a count", path, expected=f"0 to {left // each}", got=number)
        return number

    def _value(self, path: Path) -> object:
        if len(path) > self._limits.depth:
            raise _too_deep(self._limits.depth, "more", path)
        self._values += 1
        if self._values > MAX_VALUES:
            raise _too_many_values()
        token = self._token(path)
        if type(token) is not int:
            if type(token) not in _PLAIN:
                raise self._bad("a token", path, expected="a scalar", got=type(token).__name__)
            return token
        try:
            tag = Tag(token)
        except ValueError as error:
            raise self._bad("an unknown tag", path, got=token) from error
        return self._READ[tag](self, path)

    def _integer(self, path: Path) -> object:
        return self._expect(int, path)

    def _big(self, path: Path) -> object:
        return int.from_bytes(self._expect(bytes, path), "big", signed=True)

    def _list(self, path: Path) -> list[Any]:
        items: list[Any] = []
        for index in range(self._count(path)):
            items.append(self._value((*path, index)))  # noqa: PERF401 - a comprehension is a frame more
        return items

    def _tuple(self, path: Path) -> object:
        return tuple(self._list(path))

    def _set(self, path: Path) -> set[Any]:
        items: set[Any] = set()
        same = _Hashes(self, path)
        for index in range(self._count(path)):
            item = self._value((*path, index))
            try:
                same.add(item)
                known = len(items)
                items.add(item)
            except TypeError as error:
                raise self._bad("an item that no set can hold", path) from error
            if len(items) == known:
                raise self._bad("an item twice", path)
        return items

    def _frozenset(self, path: Path) -> object:
        return frozenset(self._set(path))

    def _dict(self, path: Path) -> object:
        result: dict[Any, object] = {}
        same = _Hashes(self, path)
        for _ in range(self._count(path, 2)):
            key = self._value(path)
            if type(key) not in _KEYS:
                raise self._bad("a key", path, got=type(key).__name__)
            same.add(key)
            if key in result:
                raise self._bad("a key twice", path, got=step(key))
            result[key] = self._value((*path, key))
        return result

    def _dataclass(self, path: Path) -> object:
        name = self._expect(str, path)
        kind = self._known.get(name)
        if kind is None:
            raise self._bad(
                "a dataclass",
                path,
                expected="one that Endpoint(dataclasses=...) was given",
                got=step(name),
            )
        values: dict[str, object] = {}
        wanted = _fields(kind)
        for _ in range(self._count(path, 2)):
            field: str = self._expect(str, path)
            if field in values or field not in wanted:
                raise self._bad("a field", path, expected=sorted(wanted), got=step(field))
            values[field] = self._value((*path, field))
        if len(values) != len(wanted):
            raise self._bad("fields", path, expected=sorted(wanted), got=sorted(values))
        try:
            return kind(**values)
        except Exception as error:
            raise self._bad(f"{name} refuses its fields ({error})", path) from error

    def _tensor(self, path: Path) -> object:
        return self._leaf(LeafKind.TENSOR, path)

    def _ndarray(self, path: Path) -> object:
        return self._leaf(LeafKind.NDARRAY, path)

    def _leaf(self, kind: LeafKind, path: Path) -> object:
        number, name = self._expect(int, path), self._expect(str, path)
        if not 0 <= number < len(self.batches):
            raise self._bad("a ref number", path, expected=f"below {len(self.batches)}", got=number)
        batch = self.batches[number]
        if batch.kind not in {None, kind}:
            raise self._bad("a leaf", path, expected=f"{batch.kind}, as others of its ref", got=kind)
        batch.kind = kind
        batch.names.add(name)
        return TensorRef(batch, name, kind)

    def _scalar(self, path: Path) -> object:
        text, raw = self._expect(str, path), self._expect(bytes, path)
        if text not in _SCALARS or np.dtype(text).itemsize != len(raw):
            raise self._bad("a NumPy scalar", path, got=f"{step(text)}, {len(raw)} bytes")
        return np.frombuffer(raw, text)[0]

    _READ: ClassVar[Mapping[Tag, Callable[[Body, Path], object]]] = {
        Tag.INT: _integer,
        Tag.BIG: _big,
        Tag.LIST: _list,
        Tag.TUPLE: _tuple,
        Tag.SET: _set,
        Tag.FROZENSET: _frozenset,
        Tag.DICT: _dict,
        Tag.DATACLASS: _dataclass,
        Tag.TENSOR: _tensor,
        Tag.NDARRAY: _ndarray,
        Tag.SCALAR: _scalar,
    }


class _Hashes:
    """Counts what a dict or set is given by hash: all but text has a hash that a peer can choose."""

    __slots__ = ("_body", "_found", "_path")

    def __init__(self, body: Body, path: Path) -> None:
        self._body = body
        self._path = path
        self._found: Counter[int] = Counter()

    def add(self, item: Hashable) -> None:
        if type(item) in _PLAIN:
            return
        found = hash(item)
        self._found[found] += 1
        if self._found[found] > MAX_SAME_HASH:
            raise self._body._bad(  # noqa: SLF001 - a part of it
                "keys of one hash", self._path, expected=f"at most {MAX_SAME_HASH}", got="more"
            )


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
        LimitError: Too deep, too many values, or too many refs.
    """
    reader = Body(body, known, limits)
    batches = reader.read_refs()
    return reader.read_tree(), tuple(batches)


def leaves(tree: object) -> Iterator[tuple[Path, TensorRef]]:
    """Every kept ref of a tree with its path, in order; looks into all containers and dataclasses.

    Raises:
        UnsupportedValueError: A ref in a container that no tree can have (a namedtuple, a defaultdict):
            there it would never be found again.
        UsageError: Deeper than :data:`MAX_DEPTH`, or a cycle.
    """
    todo: list[tuple[Path, object, str]] = [((), tree, "")]
    while todo:
        path, value, foreign = todo.pop()
        if isinstance(value, TensorRef):
            if foreign:
                raise UnsupportedValueError(
                    "a ref in a container that cannot travel", got=foreign, path=show(path)
                )
            yield path, value
            continue
        found = children(value)
        if found is None and type(value) not in _PLAIN:
            found = _foreign(value)
            foreign = type(value).__qualname__ if found is not None else ""
        if found is None:
            continue
        if len(path) >= MAX_DEPTH:
            raise UsageError(
                "the tree is too deep",
                expected=f"at most {MAX_DEPTH} levels",
                got="more, or a cycle",
                path=show(path[:8]),
            )
        below = [((*path, key), item, foreign) for key, item in found]
        todo.extend(reversed(below))


def _foreign(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a container of a type that trees do not have, so that no ref is passed over."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple, Set)) else None


def replaced(tree: Any, ends: Mapping[TensorRef, object]) -> Any:
    """A copy of a tree with leaves replaced; what has none is shared, not copied.

    Raises:
        UnsupportedValueError: A set cannot hold, or a dataclass refuses, what a leaf became.
    """
    return _replaced(tree, ends, ())


def _replaced(tree: Any, ends: Mapping[TensorRef, object], path: Path) -> Any:
    if isinstance(tree, TensorRef):
        return ends.get(tree, tree)
    found = children(tree)
    if found is None:
        return tree
    changed = False
    items: dict[object, object] = {}
    for key, item in found:
        items[key] = new = _replaced(item, ends, (*path, key))
        changed = changed or new is not item
    if not changed:
        return tree
    try:
        return _rebuilt(tree, items)
    except Exception as error:
        raise UnsupportedValueError(
            f"{type(tree).__qualname__} cannot hold what its refs became ({error})", path=show(path)
        ) from error


def _rebuilt(tree: Any, items: dict[object, object]) -> object:
    kind = type(tree)
    if kind in _DICTS:
        return kind(items)
    if kind in _CONTAINERS:
        return kind(items.values())
    return dataclasses.replace(tree, **items)
