"""States that are not ours: mappings of tensors, and of anything with ``materialize()``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from streamoff.errors import (
    AggregationError,
    JobClosedError,
    StreamoffError,
    UnsupportedTensorError,
)
from streamoff.tensors.dtypes import dtype_name
from streamoff.tensors.layout import Layout, plan
from streamoff.tensors.state import MemoryState, State, span, within
from streamoff.types import TensorSpec

__all__ = ["ForeignState", "as_state", "materialized"]


def as_state(value: object) -> State:
    """Return a state of the tensors in ``value``.

    Args:
        value: A state; or a mapping of names to tensors or to objects with ``materialize()``.

    Raises:
        UnsupportedTensorError: It is neither, or a value of it cannot be aggregated.
    """
    if isinstance(value, State):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(leaf, torch.Tensor) for leaf in value.values()):
            return MemoryState(value)
        return ForeignState(value)
    raise UnsupportedTensorError(
        "not a model", expected="a state or a mapping of tensors", got=type(value).__name__
    )


def materialized(name: str, value: object) -> torch.Tensor:
    """Return the tensor of a leaf, on the CPU and contiguous.

    Args:
        name: For the message.
        value: A tensor, or an object whose ``materialize()`` returns one.

    Raises:
        UnsupportedTensorError: It is neither, or its dtype or layout cannot travel.
        AggregationError: ``materialize()`` raised something that is not ours.
    """
    call: Callable[[], object] | None = getattr(value, "materialize", None)
    if not isinstance(value, torch.Tensor) and callable(call):
        try:
            value = call()
        except (StreamoffError, OSError):
            raise
        except Exception as error:
            raise AggregationError(
                "materialize() failed", got=f"{type(error).__name__}: {error}", tensor=name
            ) from error
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise UnsupportedTensorError(
            "not a tensor", expected="a dense tensor", got=type(value).__name__, tensor=name
        )
    return value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


class ForeignState:
    """A mapping as a state. Keeps one materialised tensor at a time.

    Unlike a landed state, its memory is that of its largest tensor, because a foreign object can only be
    had whole.

    Args:
        tensors: Name to a tensor or an object with ``materialize()``. One that has no ``dtype`` and
            ``shape`` is materialised once to learn them. Borrowed until :meth:`release`.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.layout: Final[Layout] = plan(_entry(name, tensors[name]) for name in tensors)
        self.nonfinite: Final[frozenset[str]] = frozenset()
        self._tensors: Mapping[str, Any] = tensors
        self._starts: Final = [spec.start for spec in self.layout.specs]
        self._kept: tuple[str, memoryview] | None = None
        self._released = False

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Copy bytes of one tensor, from byte ``start`` of it."""
        spec = self.layout.spec(name)
        within(spec, start, buffer.nbytes)
        if buffer.nbytes:
            buffer[:] = self._bytes(spec)[start : start + buffer.nbytes]

    def read_span(self, start: int, stop: int, buffer: memoryview) -> None:
        """Copy bytes of the data section."""
        out = span(self.layout, start, stop, buffer)
        index = bisect_right(self._starts, start) - 1
        at = start
        while at < stop:
            spec = self.layout.specs[index]
            upto = min(stop, spec.stop)
            if at < upto:
                self.read_into(spec.name, at - spec.start, out[at - start : upto - start])
                at = upto
            index += 1

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor; the caller owns it if it was materialised for this call."""
        if self._released:
            raise JobClosedError("the state was released", tensor=name)
        return materialized(name, self._tensors[name])

    def release(self) -> None:
        """Let go of the tensors."""
        self._tensors, self._kept, self._released = {}, None, True

    def _bytes(self, spec: TensorSpec) -> memoryview:
        name = spec.name
        if self._kept is None or self._kept[0] != name:
            self._kept = None  # never two at a time
            tensor = self.tensor(name)
            raw: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
            if len(raw) != spec.nbytes or dtype_name(tensor.dtype) != spec.dtype:
                raise AggregationError(
                    "materialize() returned another tensor than announced",
                    expected=(spec.dtype, spec.shape),
                    got=(str(tensor.dtype), tuple(tensor.shape)),
                    tensor=name,
                )
            self._kept = name, raw
        return self._kept[1]


def _entry(name: str, value: Any) -> tuple[str, str, tuple[int, ...]]:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if not isinstance(dtype, torch.dtype) or shape is None:
        value = materialized(name, value)
        dtype, shape = value.dtype, value.shape
    known = dtype_name(dtype)
    if known is None:
        raise UnsupportedTensorError("tensor of this dtype cannot travel", got=dtype, tensor=name)
    return name, known, tuple(shape)
