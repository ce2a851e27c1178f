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

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import IntEnum
from typing import Any, ClassVar, Final

import msgpack
import numpy as np

from streamoff.errors import LimitError, MalformedFrameError, StreamoffError
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.payload.tree import KEYS, PLAIN, Path, fields_of, show, step
from streamoff.types import Address, Ref
from streamoff.wire.frames import Views
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = [
    "MAX_REFS",
    "MAX_SAME_HASH",
    "MAX_VALUES",
    "SCALARS",
    "Body",
    "Tag",
    "join",
    "too_deep",
    "too_many_values",
    "unpack",
]

MAX_REFS: Final = 4096
"""Refs of one message."""

MAX_VALUES: Final = 1_000_000
"""Values of one tree, containers included, keys not: a byte of a body can cost a hundred bytes of objects."""

MAX_SAME_HASH: Final = 64
"""Keys of one dict, or items of one set, with the same hash: more of them cost quadratic time."""

SCALARS: Final = frozenset(
    {"|b1", "|i1", "|u1"}
    | {f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)}
    | {"<f2", "<f4", "<f8", "<c8", "<c16"}
)
"""NumPy dtypes that mean the same everywhere."""


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


def too_deep(most: int, got: str, path: Path) -> LimitError:
    """Make the error of a tree with too many levels."""
    return LimitError(
        "limit 'depth' exceeded",
        expected=f"at most {most} levels",
        got=got,
        limit="depth",
        path=show(path[:8]),
    )


def too_many_values() -> LimitError:
    """Make the error of a tree with more than :data:`MAX_VALUES` values."""
    return LimitError(
        "limit 'values' exceeded",
        expected=f"at most {MAX_VALUES} values in a tree",
        got="more",
        limit="values",
        hint="Send bulk as tensors or arrays; each is one value",
    )


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
            raise too_deep(self._limits.depth, "more", path)
        self._values += 1
        if self._values > MAX_VALUES:
            raise too_many_values()
        token = self._token(path)
        if type(token) is not int:
            if type(token) not in PLAIN:
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
        same: dict[int, int] = {}
        for index in range(self._count(path)):
            item = self._value((*path, index))
            try:
                self._count_hash(item, same, path)
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
        same: dict[int, int] = {}
        for _ in range(self._count(path, 2)):
            key = self._key(path)
            self._count_hash(key, same, path)
            if key in result:
                raise self._bad("a key twice", path, got=step(key))
            result[key] = self._value((*path, key))
        return result

    def _count_hash(self, item: Hashable, same: dict[int, int], path: Path) -> None:
        """Refuse many items of one hash: a peer can choose that of all but text, and each looks at the others."""
        if type(item) in PLAIN:
            return
        found = hash(item)
        same[found] = same.get(found, 0) + 1
        if same[found] > MAX_SAME_HASH:
            raise self._bad(
                "keys of one hash", path, expected=f"at most {MAX_SAME_HASH}", got="more"
            )

    def _key(self, path: Path) -> Any:
        token = self._token(path)
        if token in {Tag.INT, Tag.BIG} and type(token) is int:
            return self._integer(path) if token == Tag.INT else self._big(path)
        if type(token) not in KEYS - {int}:
            raise self._bad("a key", path, got=type(token).__name__)
        return token

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
        wanted = fields_of(kind)
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
        number, name = self._expect(int, path), sys.intern(self._expect(str, path))
        if not 0 <= number < len(self.batches):
            raise self._bad("a ref number", path, expected=f"below {len(self.batches)}", got=number)
        batch = self.batches[number]
        if batch.kind not in {None, kind}:
            raise self._bad(
                "a leaf", path, expected=f"{batch.kind}, as others of its ref", got=kind
            )
        batch.kind = kind
        batch.names.add(name)
        return TensorRef(batch, name, kind)

    def _scalar(self, path: Path) -> object:
        text, raw = self._expect(str, path), self._expect(bytes, path)
        if text not in SCALARS or np.dtype(text).itemsize != len(raw):
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
