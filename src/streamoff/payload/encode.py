"""From a tree to a body and the sources that serve its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np

from streamoff.errors import (
    InvariantError,
    LimitError,
    StreamoffError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from streamoff.payload.body import MAX_REFS, SCALARS
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.payload.packing import Placed, pack_tree
from streamoff.payload.tree import Path, show, step
from streamoff.tensors.lazy import LazyStateDict, LazyTensor
from streamoff.tensors.reader import FileReader
from streamoff.tensors.sources import FileSource, Source, StateDictSource
from streamoff.tensors.state import MemoryState
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    import torch

__all__ = ["Encoded", "Kept", "Own", "encode"]


@dataclass(frozen=True, slots=True)
class Own:
    """A payload of this message's own.

    Args:
        source: Serves it.
        partial: Whether the tree uses only part of it.
        path: Of the landed file that it is, if it is one.
        borrowed: Whether it serves tensors of the tree from their own memory.
    """

    source: Source
    partial: bool = False
    path: FilePath | None = None
    borrowed: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """A ref of an earlier message that is passed on.

    Args:
        batch: It, and who has it.
        partial: Whether this tree uses only part of its payload.
    """

    batch: Batch
    partial: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tree on its way out: the encoded tree, and its refs in the order of their numbers."""

    tree: bytes
    refs: tuple[Own | Kept, ...]

    @property
    def own(self) -> tuple[Own, ...]:
        """The payloads that need a transaction."""
        return tuple(one for one in self.refs if isinstance(one, Own))

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The refs that are passed on."""
        return tuple(one for one in self.refs if isinstance(one, Kept))

    def close(self) -> None:
        """Let go of everything borrowed: it is not sent after all. Idempotent."""
        for one in self.own:
            one.source.close()


class _Entry:
    """One tensor of a source that is sent as a whole state dict; no dataclass, or it would travel."""

    __slots__ = ("name", "source")

    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        self.name = name


def _expand(value: object) -> dict[str, Any] | None:
    """A whole state as a dict: lazy or in memory, or a source that serves one."""
    if isinstance(value, (LazyStateDict, MemoryState)):
        return dict(value)
    if isinstance(value, Source):
        return {name: _Entry(value, name) for name in value.layout.names}
    return None


class _Group(Enum):
    TENSORS = "tensors"
    ARRAYS = "arrays"


class _Collector:
    """Finds the tensors of a tree, groups them into payloads and names them."""

    def __init__(self) -> None:
        self.own: dict[_Group, dict[Path, torch.Tensor]] = {}
        self.files: dict[FileReader, tuple[LazyTensor, set[str]]] = {}
        self.kept: dict[Batch, set[str]] = {}
        self.numbers: dict[object, int] = {}
        self._names: dict[tuple[_Group, Path], str] = {}
        self._lent: dict[Path, str] = {}

    def place(self, value: Any, path: Path) -> Placed | None:
        """Take one leaf."""
        if isinstance(value, TensorRef):
            return self._keep(value, path)
        if isinstance(value, LazyTensor):
            _, used = self.files.setdefault(value.reader, (value, set()))
            used.add(value.name)
            return self._lend(value.reader, value.name, path, LeafKind.TENSOR)
        if isinstance(value, _Entry):
            return self._lend(value.source, value.name, path, LeafKind.TENSOR)
        if isinstance(value, np.ndarray):
            return self._take(_Group.ARRAYS, _array(value), path, LeafKind.NDARRAY)
        tensor = _tensor(value)
        return None if tensor is None else self._take(_Group.TENSORS, tensor, path, LeafKind.TENSOR)

    def _keep(self, leaf: TensorRef, path: Path) -> Placed:
        leaf.batch.check_free("passed on", leaf)
        self.kept.setdefault(leaf.batch, set()).add(leaf.name)
        return self._lend(leaf.batch, leaf.name, path, leaf.kind)

    def _lend(self, key: object, name: str, path: Path, kind: LeafKind) -> Placed:
        self.numbers.setdefault(key, len(self.numbers))
        self._lent[path] = name
        return Placed(key, path, kind)

    def _take(self, group: _Group, tensor: torch.Tensor, path: Path, kind: LeafKind) -> Placed:
        self.numbers.setdefault(group, len(self.numbers))
        self.own.setdefault(group, {})[path] = tensor
        return Placed(group, path, kind)

    def settle(self, placed: Placed) -> tuple[int, str]:
        """Number and name of a leaf."""
        if not isinstance(placed.key, _Group):
            return self.numbers[placed.key], self._lent[placed.path]
        if not self._names:
            for group, found in self.own.items():
                self._names |= {(group, path): name for path, name in _names(found).items()}
        return self.numbers[placed.key], self._names[placed.key, placed.path]

    def payload(self, key: object) -> Own | Kept:
        """What a number stands for."""
        match key:
            case Batch():
                return Kept(key, key.partial or self.kept[key] < key.names)
            case FileReader():
                lazy, used = self.files[key]
                source = FileSource(lazy)
                source.check()  # released, or its job is closed: said here, not to the receiver
                return Own(source, len(used) < len(source.layout.names), key.path)
            case _Group():
                return Own(self._borrow(key), borrowed=True)
            case Source():
                return Own(key)
            case _:
                raise InvariantError("a number of nothing", got=key)

    def _borrow(self, group: _Group) -> Source:
        paths = {self._names[group, path]: path for path in self.own[group]}
        try:
            return StateDictSource({name: self.own[group][path] for name, path in paths.items()})
        except UnsupportedTensorError as error:
            path = paths.get(str(error.where.get("tensor")))
            raise error.located(path=None if path is None else show(path)) from None


def _names(found: Mapping[Path, object]) -> dict[Path, str]:
    """Plain keys if all tensors sit in one state dict, else their paths as JSON pointers, made unique."""
    parents = {path[:-1] for path in found}
    last = [path[-1] if path else None for path in found]
    if len(parents) == 1 and all(type(key) is str and key != "__metadata__" for key in last):
        return {path: str(key) for path, key in zip(found, last, strict=True)}
    names: dict[Path, str] = {}
    taken: dict[str, int] = {"__metadata__": 1}
    for path in found:
        base = name = "/".join(map(_pointer, path)) or "tensor"
        while name in taken:
            taken[base] += 1
            name = f"{base}#{taken[base]}"
        taken[name] = 1
        names[path] = name
    return names


def _pointer(key: object) -> str:
    text = key if isinstance(key, str) else step(key)
    return text.replace("~", "~0").replace("/", "~1")


def _tensor(value: Any) -> torch.Tensor | None:
    """The tensor a value is, or makes when it is asked to materialise."""
    import torch  # noqa: PLC0415 - a tree without tensors needs no torch

    if isinstance(value, torch.Tensor):
        return value
    make = getattr(value, "materialize", None)
    if not callable(make):
        return None
    try:
        made = make()
    except StreamoffError:
        raise
    except Exception as error:
        raise UnsupportedValueError(f"materialize() failed ({error})") from error
    if not isinstance(made, torch.Tensor):
        raise UnsupportedValueError(
            "materialize() must return a tensor", got=type(made).__qualname__
        )
    return made


def _array(value: np.ndarray[Any, Any]) -> torch.Tensor:
    """An ndarray as a tensor that shares its memory; copied only if torch cannot share it."""
    import torch  # noqa: PLC0415 - as above

    if type(value) not in {np.ndarray, np.memmap}:
        raise UnsupportedValueError(
            "an array of this class cannot travel",
            got=type(value).__qualname__,
            hint="Send what it consists of: a mask, for one, would be lost",
        )
    if value.dtype.newbyteorder("<").str not in SCALARS - {"<c16"}:
        raise UnsupportedValueError("an array dtype that cannot travel", got=value.dtype)
    native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    if not _shareable(native):
        native = native.copy()
    return torch.from_numpy(native)


def _shareable(array: np.ndarray[Any, Any]) -> bool:
    """Whether torch takes the memory as it is, without a warning."""
    size = array.itemsize
    return (
        array.flags.writeable
        and array.flags.aligned
        and all(stride >= 0 and stride % size == 0 for stride in array.strides)
    )


def encode(tree: object, limits: Limits = DEFAULT_LIMITS) -> Encoded:
    """Encode a tree and make the sources of its tensors.

    A state dict on disk or in memory, or a :class:`~streamoff.tensors.sources.Source`, travels as a dict of
    its tensors; a source is closed when the message's transaction settles. Own tensors become one payload,
    ndarrays another, every landed file that lazy tensors of the tree lie in is served as it is, and kept refs
    are passed on untouched.

    Args:
        tree: See :mod:`streamoff.payload.body`. Tensors and arrays are borrowed.
        limits: Depth and size of the tree.

    Raises:
        UnsupportedValueError, UnsupportedTensorError: Something that cannot travel, with its path or name.
        SingleConsumerError: A kept ref that was already resolved.
        JobClosedError: A lazy tensor whose file was released.
        LimitError: Too deep, too large, too many tensors or refs. Nothing is borrowed any more; a source
            that was given may have been closed.
    """
    collector = _Collector()
    packed = pack_tree(tree, collector.place, _expand, collector.settle, limits)
    if len(collector.numbers) > MAX_REFS:
        raise LimitError(
            "refs of a message", expected=f"at most {MAX_REFS}", got=len(collector.numbers)
        )
    refs: list[Own | Kept] = []
    try:
        for key in collector.numbers:
            refs.append(collector.payload(key))  # noqa: PERF401 - what was made is closed on failure
    except BaseException:
        for made in refs:
            if isinstance(made, Own):
                made.source.close()
        raise
    return Encoded(packed, tuple(refs))
