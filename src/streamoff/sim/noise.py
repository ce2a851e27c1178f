"""Noise that is a function of a key and an index, so that any range of it can be had alone.

Each element's index goes through a 32-bit integer hash, into which two halves of the mixed key enter:
one before the first multiplication, one before the second. It is fast and looks random; it is no
cryptography.

Source: the hash is "lowbias32" of Chris Wellons, "Prospecting for Hash Functions", 2018; the key is mixed
by the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
2014).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "uniform"]

BLOCK: Final = 32_768
"""Elements that are made at a time: they stay in the cache, and torch does not split so few over threads."""

_WORD: Final = 2**32
_LONG: Final = 2**64
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15


def uniform(key: int, first: int, count: int, *, scale: float) -> NDArray[np.float32]:
    """Make noise for the elements ``first`` to ``first + count``.

    Args:
        key: 0 to 2**64 - 1; different keys give unrelated noise.
        first: Index of the first element, 0 to 2**63 - 1.
        count: 0 to :data:`BLOCK`.
        scale: A power of two, so that every value is exact in float32.

    Returns:
        Fresh array of shape (count,): multiples of ``scale * 2**-23`` in ``[-scale, scale)``.
    """
    upper, lower = divmod(first, _WORD)
    before = min(count, _WORD - lower)
    out = np.empty(count, dtype=np.float32)
    _fill(out[:before], key + upper * _GOLDEN, lower)
    _fill(out[before:], key + (upper + 1) * _GOLDEN, 0)
    out *= np.float32(scale)
    return out


def _fill(out: NDArray[np.float32], key: int, lower: int) -> None:
    """Fill with multiples of 2**-23 in [-1, 1); the indices share their upper 32 bits."""
    early, late = divmod(_mixed(key), _WORD)
    bits = np.arange(lower, lower + len(out), dtype=np.uint32)
    shifted = np.empty_like(bits)
    for mask, shift, factor in (
        (early, 16, 0x7FEB_352D),
        (late, 15, 0x846C_A68B),
    ):
        bits ^= np.uint32(mask)
        np.right_shift(bits, np.uint32(shift), out=shifted)
        bits ^= shifted
        bits *= np.uint32(factor)
    np.right_shift(bits, np.uint32(16), out=shifted)
    bits ^= shifted
    bits >>= np.uint32(8)
    np.multiply(
        bits.view(np.int32), np.float32(2**-23), out=out, dtype=np.float32, casting="unsafe"
    )
    out -= np.float32(1)


def _mixed(key: int) -> int:
    """Spread every bit of a key over 64 bits."""
    key = (key + _GOLDEN) % _LONG
    key = (key ^ key >> 30) * 0xBF58_476D_1CE4_E5B9 % _LONG
    key = (key ^ key >> 27) * 0x94D0_49BB_1331_11EB % _LONG
    return key ^ key >> 31
