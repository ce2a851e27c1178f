"""Element types: the safetensors name, the torch dtype, the size.

A dtype is listed if both safetensors and torch know it and an element is a whole number of bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from streamoff.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["FLOATING", "ITEMSIZE", "dtype_name", "itemsize", "torch_dtype"]

_TORCH_NAMES: Final[Mapping[str, tuple[str, int]]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "C64": ("complex64", 8),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
}

ITEMSIZE: Final[Mapping[str, int]] = MappingProxyType(
    {name: size for name, (_, size) in _TORCH_NAMES.items()}
)
"""Safetensors name to bytes per element."""

FLOATING: Final[frozenset[str]] = frozenset(
    name for name in _TORCH_NAMES if name.startswith(("F", "BF", "C"))
)
"""The dtypes that can hold a NaN or an infinity; complex numbers count."""


def itemsize(name: str) -> int:
    """Return the bytes per element of a safetensors dtype.

    Raises:
        UsageError: No such dtype.
    """
    try:
        return ITEMSIZE[name]
    except KeyError:
        raise UsageError("not a dtype", expected=sorted(ITEMSIZE), got=name) from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors name; imports torch.

    Raises:
        UsageError: The name is unknown, or this torch is too old to have the dtype.
    """
    itemsize(name)
    found = _by_name().get(name)
    if found is None:
        raise UsageError("this torch lacks the dtype", got=name, hint="Update torch")
    return found


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the safetensors name of a torch dtype, or None: it cannot travel."""
    return _by_dtype().get(dtype)


@functools.cache
def _by_name() -> dict[str, torch.dtype]:
    import torch  # noqa: PLC0415 -- the module serves callers that never need torch

    names = ((ours, theirs) for ours, (theirs, _) in _TORCH_NAMES.items())
    return {ours: getattr(torch, theirs) for ours, theirs in names if hasattr(torch, theirs)}


@functools.cache
def _by_dtype() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _by_name().items()}
