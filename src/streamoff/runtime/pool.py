"""The buffers of one event loop: lent when bytes arrive, returned when they have landed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import anyio

from streamoff.errors import InvariantError
from streamoff.types import CHUNK_BYTES, MIB

__all__ = ["POOL_BYTES", "Buffer", "BufferPool"]

POOL_BYTES: Final = 32 * MIB


@dataclass(slots=True, eq=False)
class Buffer:
    """One chunk-sized buffer on loan; give it back exactly once."""

    pool: BufferPool
    memory: bytearray | None

    def view(self, nbytes: int) -> memoryview:
        """The first ``nbytes`` bytes, writable, format "B"."""
        if self.memory is None:
            raise InvariantError("a buffer was used after it was returned")
        return memoryview(self.memory)[:nbytes]

    def release(self) -> None:
        """Give the buffer back; a second call is a defect of ours."""
        if self.memory is None:
            raise InvariantError("a buffer was returned twice")
        memory, self.memory = self.memory, None
        self.pool._take_back(memory)  # noqa: SLF001 - the two halves of one loan


class BufferPool:
    """At most ``capacity`` bytes of buffers, made when first needed and then reused.

    Waiters are served in order. Not thread-safe: it belongs to one event loop.

    Args:
        capacity: Bytes in all; at least one buffer.
        size: Bytes of one buffer.
    """

    def __init__(self, capacity: int = POOL_BYTES, size: int = CHUNK_BYTES) -> None:
        self.size = size
        self.count = max(1, capacity // size)
        self.peak = 0
        self._free: deque[bytearray] = deque()
        self._semaphore = anyio.Semaphore(self.count, fast_acquire=True)
        self._lent = 0

    async def borrow(self) -> Buffer:
        """Wait for a buffer; its content is arbitrary. A cancelled wait takes nothing."""
        await self._semaphore.acquire()
        self._lent += 1
        self.peak = max(self.peak, self._lent)
        memory = self._free.popleft() if self._free else bytearray(self.size)
        return Buffer(self, memory)

    def _take_back(self, memory: bytearray) -> None:
        self._free.append(memory)
        self._lent -= 1
        self._semaphore.release()

    @property
    def lent(self) -> int:
        """Buffers on loan."""
        return self._lent
