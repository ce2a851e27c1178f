"""A received state dict as its readers see it, on disk or in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from streamoff.errors import JobClosedError, UsageError
from streamoff.tensors.layout import Layout
from streamoff.tensors.views import as_bytes
from streamoff.types import TensorSpec

if TYPE_CHECKING:
    import torch

    from streamoff.tensors import memory

__all__ = ["MemoryState", "State", "span", "within"]


@runtime_checkable
class State(Protocol):
    """The tensors of one payload, readable in any cut; safe to read from several threads."""

    @property
    def layout(self) -> Layout:
        """Names, dtypes, shapes and places."""
        ...

    @property
    def nonfinite(self) -> frozenset[str]:
        """Names of tensors that hold a NaN or an infinity, if the landing looked; else empty."""
        ...

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of one tensor (row-major), from byte ``start`` of it on.

        Raises:
            KeyError: No such tensor.
            UsageError: The range is not inside the tensor.
            TransferError: The bytes cannot be had, or are not those that landed.
        """
        ...

    def read_span(self, start: int, stop: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes ``start`` to ``stop`` of the data section, across tensors.

        Raises:
            UsageError: The range is not inside the data section, or the buffer has another length.
            TransferError: The bytes cannot be had, or are not those that landed.
        """
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return one whole tensor on the CPU; a new one if the state is on disk.

        Raises:
            KeyError: No such tensor.
            TransferError: The bytes cannot be had, or are not those that landed.
        """
        ...

    def release(self) -> None:
        """Give up the bytes; reads raise JobClosedError from here on. Idempotent, does not block."""
        ...


def within(spec: TensorSpec, start: int, length: int) -> None:
    """Make sure that a range lies inside a tensor.

    Raises:
        UsageError: It does not.
    """
    if not 0 <= start <= start + length <= spec.nbytes:
        raise UsageError(
            "range outside the tensor",
            expected=f"0 to {spec.nbytes}",
            got=(start, start + length),
            tensor=spec.name,
        )


def span(layout: Layout, start: int, stop: int, buffer: memoryview) -> memoryview:
    """Return ``buffer`` as bytes if it fits the span and the span fits the data section.

    Raises:
        UsageError: It does not fit.
    """
    out = as_bytes(buffer)
    if not 0 <= start <= stop <= layout.data_nbytes or len(out) != stop - start:
        raise UsageError(
            "span outside the data section, or a buffer of another length",
            expected=f"0 to {layout.data_nbytes}, buffer of {stop - start} bytes",
            got=(start, stop, len(out)),
        )
    return out


class MemoryState(Mapping[str, "torch.Tensor"]):
    """A state dict in memory: name to tensor, tied names to the same tensor.

    Args:
        tensors: Name to dense tensor; kept, not copied.
        metadata: Free strings of its layout.
        nonfinite: Names of tensors known to hold a NaN or an infinity.
        layout: Its layout if known (then ``tensors`` are its entries, contiguous); else planned.

    Raises:
        UnsupportedTensorError: A tensor or a name that has no place in a safetensors payload.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        nonfinite: frozenset[str] = frozenset(),
        layout: Layout | None = None,
    ) -> None:
        from streamoff.tensors.memory import TensorBytes, borrow  # noqa: PLC0415 -- imports torch

        payload = borrow(tensors, metadata) if layout is None else TensorBytes(layout, tensors)
        self._bytes: memory.TensorBytes | None = payload
        self._layout = payload.layout
        self._nonfinite = nonfinite
        self._tensors = dict(tensors)
        for name, target in self._layout.aliases.items():
            self._tensors.setdefault(name, self._tensors[target])

    @property
    def layout(self) -> Layout:
        """Names, dtypes, shapes and places."""
        return self._layout

    @property
    def nonfinite(self) -> frozenset[str]:
        """Names of tensors that hold a NaN or an infinity, if the landing looked; else empty."""
        return self._nonfinite

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of one tensor; see :meth:`State.read_into`."""
        spec = self._layout.spec(name)
        within(spec, start, as_bytes(buffer).nbytes)
        self._open().read_into(self._layout.data_start + spec.start + start, buffer)

    def read_span(self, start: int, stop: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of the data section; see :meth:`State.read_span`."""
        out = span(self._layout, start, stop, buffer)
        self._open().read_into(self._layout.data_start + start, out)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor itself, not a copy."""
        return self[name]

    def release(self) -> None:
        """Drop the tensors."""
        self._bytes = None
        self._tensors = {}

    __eq__ = object.__eq__  # a mapping's way would ask tensors for one truth value
    __hash__ = object.__hash__

    def _open(self) -> memory.TensorBytes:
        if self._bytes is None:
            raise JobClosedError("the state was released")
        return self._bytes

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._bytes is None:
            raise JobClosedError("the state was released", tensor=name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
