"""The bytes of tensor objects: borrowed, gathered piece by piece, never copied whole.

A tensor has no buffer protocol; ``view(uint8).numpy()`` of a flat contiguous one shares its memory. What
has no such view (strided, expanded, conjugate, negative, 0 bytes are no problem, other devices) is
copied element range by element range, straight into the caller's buffer.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch

from streamoff.errors import HeaderError, SourceChangedError, UnsupportedTensorError, UsageError
from streamoff.tensors.dtypes import dtype_name, torch_dtype
from streamoff.tensors.layout import (
    DEFAULT_LIMITS,
    HeaderLimits,
    Layout,
    check_metadata,
    check_name,
    plan,
    with_aliases,
)
from streamoff.tensors.views import Views, as_bytes, clip, nbytes, scatter
from streamoff.types import TensorSpec

__all__ = [
    "TensorBytes",
    "allocate",
    "borrow",
    "byte_view",
    "empty",
    "plain",
    "prefault",
    "read_bytes",
]

_POPULATE_WRITE: Final = 23
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PREFAULT_BYTES: Final = 256 * 1024
"""Less is not worth a system call."""
_MAX_VIEWS: Final = 256
"""More pieces than this and one copy into a buffer is cheaper than handing the pieces on."""


def plain(name: str, tensor: object) -> tuple[torch.Tensor, str]:
    """Return a borrowed, graph-free alias of a tensor that can travel, and its dtype's name.

    Args:
        name: For the message.
        tensor: A dense, strided tensor or parameter on any device with data.

    Raises:
        UnsupportedTensorError: It cannot travel, and why.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(name, "class", type(tensor).__qualname__)
    assert isinstance(tensor, torch.Tensor)
    if tensor.is_quantized:
        raise _refused(name, "dtype", tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _refused(name, "layout", "nested" if tensor.is_nested else tensor.layout)
    if tensor.device.type == "meta":
        raise _refused(name, "device", "meta")
    dtype = dtype_name(tensor.dtype)
    if dtype is None:
        raise _refused(name, "dtype", tensor.dtype)
    return tensor.detach(), dtype


def _refused(name: str, what: str, got: object) -> UnsupportedTensorError:
    return UnsupportedTensorError(f"tensor of this {what} cannot travel", got=got, tensor=name)


def tie_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what tied tensors have in common, or None: an empty tensor is tied to nothing."""
    if tensor.numel() == 0:
        return None
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its bytes in order."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a direct tensor: format "B", one dimension, writable, shared."""
    # Not reshape(-1): one element of stride 2 is contiguous, but keeps a stride that bytes cannot have.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def empty(spec: TensorSpec) -> torch.Tensor:
    """Allocate a contiguous CPU tensor for a spec; its content is undefined.

    Raises:
        MemoryError: There is no room for it.
    """
    dtype = torch_dtype(spec.dtype)
    try:
        return torch.empty(spec.shape, dtype=dtype)
    except RuntimeError as error:  # torch says so in words only
        raise MemoryError(f"cannot allocate {spec.nbytes} bytes for a tensor") from error


def read_bytes(tensor: torch.Tensor, start: int, out: memoryview) -> None:
    """Copy bytes of a tensor, in row-major order, into a buffer.

    Args:
        tensor: Any strided tensor on any device; not modified.
        start: First byte; the range lies inside the tensor.
        out: Writable, format "B". No larger temporary than this is made, and for CPU tensors none.
    """
    if not out:
        return
    if is_direct(tensor):
        out[:] = byte_view(tensor)[start : start + len(out)]
        return
    size = tensor.element_size()
    head = min(-start % size, len(out))
    whole = (len(out) - head) // size * size
    if head:
        _read_element(tensor, start, out[:head])
    if whole:
        first = (start + head) // size
        target = torch.frombuffer(out[head : head + whole], dtype=tensor.dtype)
        _gather(tensor, first, target)
    if head + whole < len(out):
        _read_element(tensor, start + head + whole, out[head + whole :])


def _read_element(tensor: torch.Tensor, start: int, out: memoryview) -> None:
    """Copy a part of one element: a range need not respect element boundaries."""
    size = tensor.element_size()
    element = torch.empty(1, dtype=tensor.dtype)
    _gather(tensor, start // size, element)
    out[:] = byte_view(element)[start % size : start % size + len(out)]


def _gather(tensor: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """Copy elements ``first ...`` in row-major order into the flat ``out``.

    Rows that are wanted whole are copied in one go; a row wanted in part is entered.
    """
    if tensor.ndim == 0:
        out.copy_(tensor)
        return
    if tensor.ndim == 1:
        out.copy_(tensor[first : first + out.numel()])
        return
    row = tensor[0].numel()
    done = 0
    while done < out.numel():
        index, skip = divmod(first + done, row)
        rows = (out.numel() - done) // row
        if skip or not rows:
            step = min(row - skip, out.numel() - done)
            _gather(tensor[index], skip, out[done : done + step])
        else:
            step = rows * row
            part = tensor[index : index + rows]
            out[done : done + step].view(part.shape).copy_(part)
        done += step


class _Borrowed:
    """One tensor that belongs to somebody else, and how to tell that it changed."""

    __slots__ = ("_storage", "_version", "direct", "name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.direct = is_direct(tensor)
        self._version = _version(tensor)
        self._storage = tensor.untyped_storage().nbytes()

    def check(self) -> None:
        """Compare the version counter, which every in-place operation moves, and the storage's size."""
        now = _version(self.tensor), self.tensor.untyped_storage().nbytes()
        if now != (self._version, self._storage):
            raise SourceChangedError(
                "tensor changed while it is borrowed",
                expected=f"version {self._version}, {self._storage} bytes",
                got=f"version {now[0]}, {now[1]} bytes",
                tensor=self.name,
                hint="Wait for the transaction before training goes on, or send a snapshot",
            )


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 -- torch's documented way


class TensorBytes:
    """The payload that tensors in memory are: ranges of it, read and written in place.

    Args:
        layout: Of the payload.
        tensors: Entry name to tensor of the dtype and shape that the layout says; borrowed.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout: Final = layout
        self._borrowed = [_Borrowed(spec.name, tensors[spec.name]) for spec in layout.specs]
        self._starts: Final = [spec.start for spec in layout.specs]
        self.direct: Final = all(item.direct for item in self._borrowed)

    def views(self, start: int, stop: int) -> Views | None:
        """Return a payload range in the tensors' own memory, or None: it must be copied.

        Raises:
            UsageError: The range is not inside the payload.
        """
        self._inside(start, stop)
        found: list[memoryview] = []
        if start < self.layout.data_start:
            found.append(memoryview(self.layout.header)[start:stop])
        for item, low, high in self._pieces(start, stop):
            if not item.direct or len(found) == _MAX_VIEWS:
                return None
            found.append(byte_view(item.tensor)[low:high])
        return tuple(found)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with payload bytes from ``start`` on.

        Raises:
            UsageError: The range is not inside the payload.
        """
        out = as_bytes(buffer)
        self._inside(start, start + len(out))
        header = self.layout.header[start : start + len(out)]
        out[: len(header)] = header
        done = len(header)
        for item, low, high in self._pieces(start, start + len(out)):
            read_bytes(item.tensor, low, out[done : done + high - low])
            done += high - low

    def write(self, start: int, views: Views) -> None:
        """Copy a run of bytes to payload offset ``start``; header bytes are passed over."""
        stop = start + nbytes(views)
        self._inside(start, stop)
        data = clip(views, self.layout.data_start - start, stop - start)
        pieces = self._pieces(start, stop)
        scatter(data, (byte_view(item.tensor)[low:high] for item, low, high in pieces))

    def check(self, start: int, stop: int) -> None:
        """Look at the tensors that a payload range touches.

        Raises:
            SourceChangedError: One changed since it was borrowed.
        """
        for item, _, _ in self._pieces(start, stop):
            item.check()

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[_Borrowed, int, int]]:
        """Yield each tensor that a payload range touches, with the range inside the tensor."""
        start = max(start - self.layout.data_start, 0)
        stop -= self.layout.data_start
        specs = self.layout.specs
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(specs) and specs[index].start < stop:
            spec = specs[index]
            low, high = max(start, spec.start), min(stop, spec.stop)
            if low < high:
                yield self._borrowed[index], low - spec.start, high - spec.start
            index += 1

    def _inside(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.layout.size:
            raise UsageError(
                "range outside the payload", expected=f"0 to {self.layout.size}", got=(start, stop)
            )


def borrow(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    limits: HeaderLimits = DEFAULT_LIMITS,
) -> TensorBytes:
    """Lay out a state dict as a payload; nothing is copied.

    Tied tensors (the same memory seen the same way) become one entry and aliases.

    Raises:
        UnsupportedTensorError: A tensor or a name that cannot travel; every one is looked at first.
        LimitError: More tensors, or a larger header, than a receiver accepts.
        UsageError: Metadata that is not the caller's to set.
        HeaderError: Metadata that is not text.
    """
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    kept: dict[str, torch.Tensor] = {}
    holders: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, given in tensors.items():
        try:
            check_name(name, limits)
        except HeaderError as error:
            raise UnsupportedTensorError(
                "tensor of this name cannot travel", got=name, hint="Rename it"
            ) from error
        tensor, dtype = plain(name, given)
        key = tie_key(tensor)
        if key is not None and (holder := holders.setdefault(key, name)) != name:
            aliases[name] = holder
            continue
        kept[name] = tensor
        entries.append((name, dtype, tuple(tensor.shape)))
    free = check_metadata(metadata or {})
    return TensorBytes(plan(entries, with_aliases(free, aliases), limits), kept)


def prefault(views: Views) -> None:
    """Have the kernel find pages for memory that is about to be filled: all at once is quicker than one by one.

    Without effect where the system has no such call (Linux before 5.14, macOS).
    """
    call = _madvise()
    if call is None:
        return
    for view in views:
        if len(view) >= _PREFAULT_BYTES:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            start = -(-address // _PAGE_BYTES) * _PAGE_BYTES
            call(start, (address + len(view)) // _PAGE_BYTES * _PAGE_BYTES - start, _POPULATE_WRITE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None:
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call if sys.platform == "linux" else None


def allocate(layout: Layout) -> dict[str, torch.Tensor]:
    """Allocate every tensor of a layout once, contiguous, on the CPU, content undefined.

    Raises:
        MemoryError: There is no room; what had been allocated is freed.
    """
    return {spec.name: empty(spec) for spec in layout.specs}
