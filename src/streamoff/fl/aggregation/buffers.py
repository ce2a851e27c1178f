"""Memory for blocks that goes back to the system when it is dropped.

Blocks are allocated round after round, in whatever worker thread is at hand. An allocator with an arena per
thread keeps such blocks in every one of them (glibc: 16 MiB a round, until each thread has had its turn).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Final

import numpy as np

from streamoff.fl.aggregation.arithmetic import Bytes

__all__ = ["reserve", "reserve_all"]

_ALIGNED: Final = 64


def reserve(nbytes: int) -> Bytes:
    """Reserve zeroed, private memory.

    Args:
        nbytes: 0 or more; pages cost nothing until they are written.

    Returns:
        Shape (nbytes,), aligned to a page; unmapped when the last view of it is gone.

    Raises:
        MemoryError: There is no room.
    """
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot reserve {nbytes} bytes") from error
    return np.frombuffer(memory, dtype=np.uint8, count=nbytes)


def reserve_all(sizes: Iterable[int]) -> list[Bytes]:
    """Reserve several pieces at once, each aligned to 64 bytes; they are unmapped together.

    Raises:
        MemoryError: There is no room for all of them.
    """
    wanted = list(sizes)
    rooms = [-(-size // _ALIGNED) * _ALIGNED for size in wanted]
    whole, at = reserve(sum(rooms)), 0
    pieces: list[Bytes] = []
    for size, room in zip(wanted, rooms, strict=True):
        pieces.append(whole[at : at + size])
        at += room
    return pieces
