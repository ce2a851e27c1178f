"""The arithmetic of one block: how values of one dtype become an average.

Each operation is one rounding of one element. Multiplying and adding are separate passes on purpose: a
kernel that fuses them rounds differently in its vector body and in its tail, so that the bits of an
element would depend on how many threads share the block. NumPy does the integers (torch has no arithmetic
for most unsigned ones), torch the floats (NumPy knows neither bfloat16 nor float8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from streamoff.errors import DtypeError, UsageError
from streamoff.fl.aggregation.policies import Policies
from streamoff.tensors.dtypes import itemsize, torch_dtype
from streamoff.types import TensorSpec

__all__ = ["COMPONENTS", "Bytes", "Method", "NonfiniteError", "Rule", "castable", "method_of"]

Bytes = NDArray[np.uint8]

_FLOATS: Final = frozenset(
    {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)
"""Not F8_E8M0: it holds the scales of other tensors' blocks, and a mean of scales scales nothing."""
_INTEGERS: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(code)
    for name, code in {
        "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
        "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
        "BOOL": "u1",
    }.items()
}  # fmt: skip
COMPONENTS: Final = {"C64": "F32"}
"""Complex dtypes and what they are pairs of: complex numbers are averaged by component."""


class Rule(StrEnum):
    """How the values of the sites become one."""

    MEAN = "mean"
    ROUNDED = "rounded mean"
    MAX = "max"
    MIN = "min"
    FIRST = "first"


_INTEGER_RULES: Final = {"average": Rule.ROUNDED, "max": Rule.MAX, "first": Rule.FIRST}
_BOOL_RULES: Final = {
    "majority": Rule.ROUNDED,
    "any": Rule.MAX,
    "all": Rule.MIN,
    "first": Rule.FIRST,
}


class NonfiniteError(Exception):
    """A NaN or an infinity; the engine knows whose. Caught inside.

    Args:
        tensor: The key, once it is known.
    """

    def __init__(self, tensor: str = "") -> None:
        super().__init__(tensor)
        self.tensor = tensor


def castable(given: str, wanted: str) -> bool:
    """Whether the ``cast`` policy takes a contribution of dtype ``given`` for ``wanted``."""
    return given == wanted or (_is_float(given) and _is_float(wanted))


@cache
def _is_float(dtype: str) -> bool:
    """Whether torch converts the dtype to float32 and back on this machine."""
    if dtype not in _FLOATS:
        return False
    try:
        one = torch.ones(1, dtype=torch.float32, device="cpu")
        one.to(torch_dtype(dtype)).to(torch.float32)
    except (RuntimeError, TypeError, ValueError, UsageError):
        return False
    return True


def method_of(spec: TensorSpec, policies: Policies, *, diff: bool) -> Method:
    """Choose the arithmetic of one key.

    Args:
        spec: Its place in the global model; the result has the same dtype.
        policies: The rules for integers and bools, and the accumulator of floats.
        diff: Whether contributions are differences to the previous model.

    Raises:
        DtypeError: The dtype has no arithmetic, or no differences.
    """
    dtype = COMPONENTS.get(spec.dtype, spec.dtype)
    if _is_float(dtype):
        wide = dtype == "F64" or policies.accumulator == "float64"
        return Method(dtype, Rule.MEAN, "F64" if wide else "F32", diff=diff)
    if dtype not in _INTEGERS:
        raise DtypeError(
            "no mean in this dtype",
            expected="integers, bools, or numbers that convert to float32 on the CPU and back",
            got=spec.dtype,
            hint="Exclude the key; it then keeps its previous value",
            tensor=spec.name,
        )
    if diff and (dtype == "BOOL" or dtype.startswith("U")):
        raise DtypeError(
            "no differences in this dtype",
            expected="a signed dtype",
            got=spec.dtype,
            hint="Exclude the key, or let sites send full models",
            tensor=spec.name,
        )
    rule = _BOOL_RULES[policies.bools] if dtype == "BOOL" else _INTEGER_RULES[policies.integers]
    return Method(dtype, rule, "F64" if rule is Rule.ROUNDED else dtype, diff=diff)


@dataclass(frozen=True, slots=True)
class Method:
    """The arithmetic of a run of elements of one dtype. Elements, not tensors: shapes play no part.

    All arrays are flat bytes, C-contiguous and aligned to 8. ``accumulator`` has room for the elements in
    the accumulator's dtype, ``scratch`` for the same and for the widest value read.

    Args:
        dtype: safetensors name of the result's elements (complex numbers are pairs of ``F32``).
        rule: How values become one.
        accumulator: safetensors name of the accumulator's elements.
        diff: Whether values are added to a base.
    """

    dtype: str
    rule: Rule
    accumulator: str
    diff: bool

    @property
    def width(self) -> int:
        """Bytes per element of the accumulator."""
        return itemsize(self.accumulator)

    @property
    def weighted(self) -> bool:
        """Whether weights matter beyond being above 0."""
        return self.rule in {Rule.MEAN, Rule.ROUNDED}

    def rounded(self, weight: float) -> float:
        """Return the weight as the accumulator sees it, so that denominators add up the same."""
        return float(np.float32(weight)) if self.accumulator == "F32" else weight

    def fold(
        self,
        accumulator: Bytes,
        values: Bytes,
        dtype: str,
        weight: float,
        scratch: Bytes,
        *,
        first: bool,
        check: bool,
    ) -> None:
        """Add one site's values.

        Args:
            accumulator: Updated in place; what it held is forgotten if ``first``.
            values: Elements of ``dtype``; bools are made 0 or 1 in place.
            dtype: safetensors name; the result's, or another floating one.
            weight: Scaled, above 0.
            scratch: Overwritten.
            first: Whether this is the first value of the block.
            check: Whether to look for NaN and infinity.

        Raises:
            NonfiniteError: One was found; the accumulator is unchanged.
        """
        if self.rule is Rule.MEAN:
            self._fold_floats(accumulator, values, dtype, weight, scratch, first=first, check=check)
            return
        given = values.view(_INTEGERS[dtype])
        if dtype == "BOOL":
            np.minimum(given, 1, out=given)  # a byte of 7 is one vote, not seven
        if self.rule is Rule.ROUNDED:
            total, part = accumulator.view(np.float64), scratch[: given.size * 8].view(np.float64)
            np.multiply(given, weight, out=total if first else part, dtype=np.float64)
            if not first:
                np.add(total, part, out=total)
            return
        kept = accumulator.view(given.dtype)
        if first or self.rule is Rule.FIRST:
            kept[:] = given
        else:
            (np.maximum if self.rule is Rule.MAX else np.minimum)(kept, given, out=kept)

    def _fold_floats(
        self,
        accumulator: Bytes,
        values: Bytes,
        dtype: str,
        weight: float,
        scratch: Bytes,
        *,
        first: bool,
        check: bool,
    ) -> None:
        total, given = _floats(accumulator, self.accumulator), _floats(values, dtype)
        part = _floats(scratch[: total.numel() * self.width], self.accumulator)
        if given.dtype != part.dtype:
            given = part.copy_(given)
        if check:
            _check(given)
        torch.mul(given, weight, out=total if first else part)
        if not first:
            total.add_(part)

    def finite(self, values: Bytes, dtype: str, scratch: Bytes) -> bool:
        """Whether no element of ``dtype`` is NaN or infinite in the accumulator's dtype."""
        if self.rule is not Rule.MEAN:
            return True
        given = _floats(values, dtype)
        if dtype != self.accumulator:
            part = scratch[: given.numel() * self.width]
            given = _floats(part, self.accumulator).copy_(given)
        try:
            _check(given)
        except NonfiniteError:
            return False
        return True

    def rescale(self, accumulator: Bytes, factor: float) -> None:
        """Multiply a weighted accumulator by a power of two, in place."""
        if self.weighted:
            _floats(accumulator, self.accumulator).mul_(factor)

    def finish(
        self, accumulator: Bytes, total: float, base: Bytes | None, scratch: Bytes, *, check: bool
    ) -> Bytes:
        """Turn an accumulator into elements of the result.

        Args:
            accumulator: Overwritten.
            total: The sum of the weights folded, as :meth:`rounded` gives them.
            base: The previous model's elements, for differences.
            scratch: Overwritten; the result lies in it.
            check: Whether to look for NaN and infinity in the result.

        Returns:
            The elements, a view of ``scratch``, valid until it is used again.

        Raises:
            NonfiniteError: The result has one although no value had.
        """
        if self.rule is Rule.MEAN:
            return self._finish_floats(accumulator, total, base, scratch, check=check)
        dtype = _INTEGERS[self.dtype]
        if self.rule is Rule.ROUNDED:
            mean = accumulator.view(np.float64)
            np.divide(mean, total, out=mean)
            np.rint(mean, out=mean)
            _clip(mean, dtype, is_bool=self.dtype == "BOOL")
            out = scratch[: mean.size * dtype.itemsize].view(dtype)
            np.copyto(out, mean, casting="unsafe")
        else:
            kept = accumulator.view(dtype)
            out = scratch[: kept.nbytes].view(dtype)
            out[:] = kept
        if base is not None:
            np.add(out, base.view(dtype), out=out)  # wraps like the subtraction at the site
        return out.view(np.uint8)

    def _finish_floats(
        self, accumulator: Bytes, total: float, base: Bytes | None, scratch: Bytes, *, check: bool
    ) -> Bytes:
        mean = _floats(accumulator, self.accumulator).div_(total)
        if base is not None:
            part = _floats(scratch[: mean.numel() * self.width], self.accumulator)
            mean.add_(part.copy_(_floats(base, self.dtype)))
        out = scratch[: mean.numel() * itemsize(self.dtype)]
        result = _floats(out, self.dtype).copy_(mean)
        if check:
            _check(result if result.dtype == mean.dtype else mean.copy_(result))
        return out


def _floats(raw: Bytes, dtype: str) -> torch.Tensor:
    """Return the bytes as a tensor that shares them."""
    return torch.from_numpy(raw).view(torch_dtype(dtype))


def _check(values: torch.Tensor) -> None:
    low, high = torch.aminmax(values)
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise NonfiniteError


def _clip(mean: NDArray[np.float64], dtype: np.dtype[Any], *, is_bool: bool) -> None:
    """Keep rounding of the last bit inside the dtype; the largest float64 below 2**63 is not 2**63 - 1."""
    bounds = np.iinfo(dtype)
    high = 1.0 if is_bool else float(bounds.max)
    if high > bounds.max:
        high = math.nextafter(high, 0.0)
    np.clip(mean, float(bounds.min), high, out=mean)
