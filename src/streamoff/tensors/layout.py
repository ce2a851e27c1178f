"""The safetensors header: planned from names, dtypes and shapes, or parsed from a stranger's bytes.

Format: 8 bytes header length N (little-endian), N bytes of JSON that start with ``{``, then the data
section. Nothing is believed: a header that parses describes tensors that fill the data section without
hole or overlap, and every refusal happens before anything is allocated for the tensors.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias
from weakref import WeakValueDictionary

from streamoff.errors import HeaderError, LimitError, UsageError
from streamoff.tensors.dtypes import ITEMSIZE, itemsize
from streamoff.types import MIB, ByteRange, RangeSet, TensorSpec

__all__ = [
    "ALIASES",
    "Entry",
    "HeaderLimits",
    "Layout",
    "check_name",
    "header_length",
    "parse",
    "plan",
    "subset",
]

RESERVED: Final = "__metadata__"
"""The one name that no tensor can have in a safetensors file."""

ALIASES: Final = "streamoff.aliases"
"""Metadata key: a JSON object, name of a tied tensor to the name of the entry that holds its bytes."""

_MAX_SIZE: Final = 2**63 - 1

Entry: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype, shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderLimits:
    """What a header may ask for; an excess is refused naming the limit.

    Args:
        header: Bytes of JSON. (safetensors itself stops at 100 MB.)
        tensors: Entries.
        name: Bytes of one name in UTF-8.
        dimensions: Dimensions of one tensor; torch stops at 64.
    """

    header: int = 32 * MIB
    tensors: int = 200_000
    name: int = MIB
    dimensions: int = 64


DEFAULT_LIMITS: Final = HeaderLimits()


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a payload.

    Args:
        header: The first bytes of the payload as they stand in the file: length, JSON, padding.
        specs: The entries in file order; offsets are relative to the data section.
        metadata: The free strings of the header, aliases included.
    """

    header: bytes = field(repr=False)
    specs: tuple[TensorSpec, ...]
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def data_start(self) -> int:
        """Offset of the data section in the payload."""
        return len(self.header)

    @property
    def data_nbytes(self) -> int:
        """Length of the data section."""
        return self.specs[-1].stop if self.specs else 0

    @property
    def size(self) -> int:
        """Length of the payload, header included."""
        return len(self.header) + self.data_nbytes

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """Entry name to spec, in file order; aliases are not in it."""
        return MappingProxyType({spec.name: spec for spec in self.specs})

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Name of each tied tensor to the entry that holds its bytes."""
        text = self.metadata.get(ALIASES)
        return MappingProxyType({} if text is None else _read_aliases(text, self.by_name))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name a receiver may ask for: entries in file order, then aliases."""
        return (*self.by_name, *self.aliases)

    def spec(self, name: str) -> TensorSpec:
        """Return the entry of a name or alias.

        Raises:
            KeyError: Neither an entry nor an alias.
        """
        return self.by_name[self.aliases.get(name, name)]

    def ranges(self, names: Iterable[str] | None = None) -> RangeSet:
        """Return the payload-relative bytes of some tensors (None: of all), without the header.

        Raises:
            KeyError: A name is neither an entry nor an alias.
        """
        if names is None:
            return RangeSet.of([ByteRange(self.data_start, self.size)])
        at = self.data_start
        found = {spec.name: spec for spec in map(self.spec, names)}
        return RangeSet.of(ByteRange(at + s.start, at + s.stop) for s in found.values())


def check_name(name: object, limits: HeaderLimits = DEFAULT_LIMITS) -> str:
    """Return ``name`` if a safetensors file can hold a tensor of that name.

    Raises:
        HeaderError: Not text, not encodable, or reserved.
        LimitError: Longer than the limit.
    """
    if not isinstance(name, str):
        raise HeaderError("tensor name", expected="a string", got=type(name).__name__)
    if name == RESERVED:
        raise HeaderError("tensor name is reserved by the format", tensor=name)
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise HeaderError("tensor name is not encodable as UTF-8", tensor=name) from error
    if length > limits.name:
        raise LimitError(
            "limit 'name'", expected=f"at most {limits.name} bytes", got=length, tensor=name
        )
    return name


def plan(
    entries: Iterable[Entry],
    metadata: Mapping[str, str] | None = None,
    limits: HeaderLimits = DEFAULT_LIMITS,
) -> Layout:
    """Lay out tensors by item size, largest first, then name; no element straddles an aligned chunk.

    Args:
        entries: Name, safetensors dtype and shape of each tensor, in any order.
        metadata: Free strings to carry along.
        limits: What the receiver will accept.

    Raises:
        HeaderError: A name cannot be in a file or comes twice, or metadata is not text.
        LimitError: Too many tensors, too long a name, or too large a header.
        UsageError: An unknown dtype.
    """
    ordered = sorted(entries, key=lambda entry: (-itemsize(entry[1]), entry[0]))
    _within("tensors", len(ordered), limits.tensors)
    tree: dict[str, Any] = {RESERVED: _check_metadata(dict(metadata))} if metadata else {}
    specs: list[TensorSpec] = []
    at = 0
    for name, dtype, shape in ordered:
        check_name(name, limits)
        if name in tree:
            raise HeaderError("duplicate tensor name", tensor=name)
        _within("dimensions", len(shape), limits.dimensions, name)
        stop = at + _checked_nbytes(name, dtype, tuple(shape))
        specs.append(TensorSpec(name, dtype, tuple(shape), at, stop))
        tree[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _within("header", len(text), limits.header)
    return Layout(
        len(text).to_bytes(8, "little") + text, tuple(specs), MappingProxyType(dict(metadata or {}))
    )


def subset(layout: Layout, names: Iterable[str], limits: HeaderLimits = DEFAULT_LIMITS) -> Layout:
    """Return the layout of a payload that holds only ``names``.

    An alias whose entry is not wanted becomes an entry itself.

    Raises:
        KeyError: A name is neither an entry nor an alias.
    """
    holders: dict[str, str] = {}
    aliases: dict[str, str] = {}
    entries: list[Entry] = []
    # An entry's own name first, so that it keeps holding the bytes.
    for name in sorted(dict.fromkeys(names), key=lambda name: name in layout.aliases):
        spec = layout.spec(name)
        if spec.name in holders:
            aliases[name] = holders[spec.name]
        else:
            holders[spec.name] = name
            entries.append((name, spec.dtype, spec.shape))
    metadata = {key: value for key, value in layout.metadata.items() if key != ALIASES}
    return plan(entries, with_aliases(metadata, aliases), limits)


def with_aliases(metadata: Mapping[str, str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return ``metadata`` with the tied names added to it."""
    if not aliases:
        return dict(metadata)
    text = json.dumps(dict(aliases), ensure_ascii=False, separators=(",", ":"))
    return {**metadata, ALIASES: text}


def header_length(first: bytes | memoryview, limits: HeaderLimits = DEFAULT_LIMITS) -> int:
    """Return the length of the JSON that follows the first 8 bytes of a payload.

    Raises:
        HeaderError: Not 8 bytes, or a length that no header has.
        LimitError: A header longer than the limit; nothing was allocated for it.
    """
    if len(first) != 8:
        raise HeaderError("payload too short for a header", expected="8 bytes", got=len(first))
    length = int.from_bytes(first, "little")
    _within("header", length, limits.header)
    if length < 2:
        raise HeaderError("header length", expected="at least 2 bytes", got=length)
    return length


def parse(
    header: bytes, *, size: int | None = None, limits: HeaderLimits = DEFAULT_LIMITS
) -> Layout:
    """Read a header, believing nothing.

    Args:
        header: Length, JSON and padding: exactly the bytes before the data section.
        size: Length of the whole payload, if known: the data section must end there.
        limits: What is acceptable.

    Raises:
        HeaderError: Not a header, or one whose tensors do not fill the data section exactly.
        LimitError: A header above a limit.

    Equal headers give one layout as long as somebody keeps it: a thousand sites with one model share it.
    A header of 20 MiB holds the GIL for half a second: parse large ones in a thread.
    """
    layout = _KNOWN.get(header) if limits is DEFAULT_LIMITS else None
    if layout is None:
        layout = _parse(header, limits)
        if limits is DEFAULT_LIMITS:
            layout = _KNOWN.setdefault(header, layout)
    if size is not None and layout.size != size:
        what = "tensors reach past the end" if layout.size > size else "trailing bytes"
        raise HeaderError(what, expected=layout.size, got=size)
    return layout


_KNOWN: Final[WeakValueDictionary[bytes, Layout]] = WeakValueDictionary()
"""Layouts that somebody holds, by their header, as checked against the default limits."""


def _parse(header: bytes, limits: HeaderLimits) -> Layout:
    length = header_length(header[:8], limits)
    if len(header) != 8 + length:
        raise HeaderError("header length", expected=8 + length, got=len(header))
    tree = _load(header[8:])
    metadata = MappingProxyType(_check_metadata(tree.pop(RESERVED, {})))
    _within("tensors", len(tree), limits.tensors)
    specs = sorted(
        (_entry(name, item, limits) for name, item in tree.items()),
        key=lambda spec: (spec.start, spec.stop),
    )
    at = 0
    for spec in specs:
        if spec.start != at:
            what = "hole in the data section" if spec.start > at else "tensors overlap"
            raise HeaderError(what, expected=at, got=spec.start, tensor=spec.name)
        at = spec.stop
    layout = Layout(header, tuple(specs), metadata)
    len(layout.aliases)  # a malformed alias is refused here, not where it is used
    return layout


def _load(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise HeaderError("header JSON", expected="an object", got=text[:16])
    try:
        tree = json.loads(
            text.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants
        )
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError("header is not JSON", got=str(error)) from error
    assert isinstance(tree, dict)
    return tree


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise HeaderError("duplicate key in the header", tensor=key)
            seen.add(key)
    return found


def _no_constants(text: str) -> NoReturn:
    raise HeaderError("header is not JSON", got=text)


def _entry(name: str, item: object, limits: HeaderLimits) -> TensorSpec:
    check_name(name, limits)
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
        got = sorted(item) if isinstance(item, dict) else type(item).__name__
        raise HeaderError("entry", expected="dtype, shape, data_offsets", got=got, tensor=name)
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise HeaderError("dtype", expected="one that torch knows", got=dtype, tensor=name)
    if not _naturals(shape):
        raise HeaderError("shape", expected="a list of sizes", got=shape, tensor=name)
    _within("dimensions", len(shape), limits.dimensions, name)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError("data_offsets", expected="[start, stop]", got=offsets, tensor=name)
    spec = TensorSpec(sys.intern(name), sys.intern(dtype), tuple(shape), *offsets)
    needed = _checked_nbytes(name, dtype, spec.shape)
    if spec.nbytes != needed:
        raise HeaderError(
            "dtype and shape disagree with the length",
            expected=needed,
            got=spec.nbytes,
            tensor=name,
        )
    return spec


def _naturals(value: object) -> bool:
    """Whether ``value`` is a list of integers from 0 to 2**63 - 1; a bool is no integer."""
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number <= _MAX_SIZE for number in value
    )


def _checked_nbytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    # Strides overflow although a zero elsewhere makes the tensor empty.
    if math.prod(max(number, 1) for number in shape) * itemsize(dtype) > _MAX_SIZE:
        raise HeaderError("shape overflows", expected="below 2**63 bytes", got=shape, tensor=name)
    return math.prod(shape) * itemsize(dtype)


def _check_metadata(metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise HeaderError("metadata", expected="an object", got=type(metadata).__name__)
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise HeaderError(
                "metadata", expected="text to text (the name is reserved)", got=(key, value)
            )
        try:
            (key + value).encode()
        except UnicodeEncodeError as error:
            raise HeaderError("metadata is not encodable as UTF-8", got=key) from error
    return metadata


def _read_aliases(text: str, entries: Mapping[str, TensorSpec]) -> dict[str, str]:
    try:
        aliases = json.loads(text, object_pairs_hook=_no_duplicates)
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError("aliases are not JSON", got=str(error)) from error
    if not isinstance(aliases, dict):
        raise HeaderError("aliases", expected="an object", got=type(aliases).__name__)
    for name, target in aliases.items():
        check_name(name)
        if not isinstance(target, str) or target not in entries:
            raise HeaderError("alias of an unknown tensor", got=target, tensor=name)
        if name in entries:
            raise HeaderError("alias is also an entry", tensor=name)
    return aliases


def _within(limit: str, got: int, allowed: int, tensor: str | None = None) -> None:
    if got > allowed:
        raise LimitError(f"limit {limit!r}", expected=f"at most {allowed}", got=got, tensor=tensor)


def check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of a caller's metadata.

    Raises:
        UsageError: It holds the key that is streamoff's own.
        HeaderError: It is not text to text.
    """
    if ALIASES in metadata:
        raise UsageError("metadata key is reserved for tied tensors", got=ALIASES)
    return _check_metadata(dict(metadata))
