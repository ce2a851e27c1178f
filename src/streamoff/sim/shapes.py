"""Shapes of synthetic models: one giant tensor, many uneven ones, or a transformer's."""

import math
from collections.abc import Iterator
from typing import Final

from streamoff.errors import UsageError

__all__ = ["ELEMENT_BYTES", "check_shapes", "shapes_of"]

ELEMENT_BYTES: Final = 4
"""Synthetic models are float32."""

_MANY: Final = 1000
_MAX_TENSORS: Final = 100_000
_VOCABULARY, _CONTEXT, _BLOCKS = 50_257, 1024, 24  # GPT-2 medium; its width is 1024


def check_shapes(kind: str, nbytes: int) -> None:
    """Refuse what :func:`shapes_of` cannot make.

    Args:
        kind: As there.
        nbytes: As there.

    Raises:
        UsageError: ``kind`` is unknown, or ``nbytes`` is too small for it.
    """
    if kind == "many":
        least = _MANY * (_MANY + 1) // 2
    elif kind == "gpt2-medium":
        least = _transformer_elements(1)
    elif kind.isascii() and kind.isdigit() and len(kind) <= 6 and 1 <= int(kind) <= _MAX_TENSORS:
        least = int(kind)
    else:
        raise UsageError(
            "site_tensors is unknown",
            expected=f"a number of tensors up to {_MAX_TENSORS}, many or gpt2-medium",
            got=kind,
        )
    if nbytes < least * ELEMENT_BYTES:
        raise UsageError(
            f"model_size is too small for site_tensors {kind}",
            expected=f"at least {least * ELEMENT_BYTES} bytes",
            got=nbytes,
        )


def shapes_of(kind: str, nbytes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape every tensor of a synthetic float32 model.

    Args:
        kind: ``"1"`` is one tensor with everything in it, ``"N"`` (a number) N equal vectors. ``"many"`` is
            1000 vectors whose lengths are as 1 : 2 : ... : 1000. ``"gpt2-medium"`` has the 292 tensors of
            GPT-2 medium with the width that comes closest to ``nbytes`` from below: 1354 MiB give the
            original width of 1024.
        nbytes: Size of all tensors together in bytes. Numbers and ``many`` meet it up to the last whole
            element; ``gpt2-medium`` stays below it by less than one step of the width.

    Returns:
        Pairs of name and shape in a fixed order; names are distinct.

    Raises:
        UsageError: As :func:`check_shapes`.
    """
    check_shapes(kind, nbytes)
    elements = nbytes // ELEMENT_BYTES
    if kind == "gpt2-medium":
        return list(_transformer(_width(elements)))
    if kind == "many":
        parts = [elements * weight // (_MANY * (_MANY + 1) // 2) for weight in range(1, _MANY + 1)]
    else:
        parts = [elements // int(kind)] * int(kind)
    parts[-1] += elements - sum(parts)
    digits = len(str(len(parts) - 1))
    return [(f"tensor.{index:0{digits}}", (numel,)) for index, numel in enumerate(parts)]


def _transformer(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (_VOCABULARY, width)
    yield "wpe.weight", (_CONTEXT, width)
    for block in range(_BLOCKS):
        for name, shape in (
            ("ln_1", (width,)),
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("ln_2", (width,)),
            ("mlp.c_fc", (width, 4 * width)),
            ("mlp.c_proj", (4 * width, width)),
        ):
            yield f"h.{block}.{name}.weight", shape
            yield f"h.{block}.{name}.bias", shape[-1:]
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


def _transformer_elements(width: int) -> int:
    return sum(math.prod(shape) for _, shape in _transformer(width))


def _width(elements: int) -> int:
    """Return the largest width that does not need more than ``elements``."""
    low, high = 1, 2
    while _transformer_elements(high) <= elements:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _transformer_elements(middle) <= elements else (low, middle)
    return low
