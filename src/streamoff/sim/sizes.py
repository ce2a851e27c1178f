"""Byte counts and other numbers as people write and read them."""

import re
from typing import Final

from streamoff.errors import UsageError

__all__ = ["format_number", "format_size", "parse_size"]

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]{0,3})", re.ASCII)


def parse_size(text: str) -> int:
    """Read a size such as ``"512MiB"``, ``"1.5 GiB"``, ``"20MB"`` or ``"4096"``.

    Args:
        text: A decimal number and a unit; KiB, MiB, GiB, TiB are powers of 1024, kB, MB, GB, TB powers of
            1000, no unit means bytes. Case does not matter.

    Returns:
        Bytes, 1 to 2**63 - 1; a fraction of a byte is dropped.

    Raises:
        UsageError: The text is no size, or the size is out of range.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError("not a size", expected="a number and a unit, such as 512MiB", got=text)
    whole, _, fraction = match[1].partition(".")
    unit = _UNITS[match[2]]
    size = int(whole) * unit + int(fraction.ljust(9, "0")) * unit // 10**9
    if not 1 <= size < 2**63:
        raise UsageError("size out of range", expected="1 to 2**63 - 1 bytes", got=text)
    return size


def format_size(nbytes: int) -> str:
    """Write a byte count with the largest binary unit that keeps it at 1 or more.

    Args:
        nbytes: Bytes; may be negative (a difference).

    Returns:
        For example ``"0 B"``, ``"1.5 GiB"``.
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def format_number(value: float) -> str:
    """Write a metric: whole numbers without a fraction, small ones with an exponent.

    Args:
        value: Any float; NaN and infinity are written as words.

    Returns:
        For example ``"0.9833"``, ``"4096"``, ``"1.49e-08"``.
    """
    if value.is_integer():
        return f"{value:.0f}"
    return f"{value:.4g}" if abs(value) < 1e-3 else f"{value:.4f}"
