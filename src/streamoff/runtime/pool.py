"""The buffers of one event loop: lent when bytes arrive, returned when they have landed.

A buffer costs the pool about what it holds: many slow peers with small chunks fit beside each other. When the pool
is empty, a buffer that waits for a peer (for the rest of a chunk, or for a reader that takes it) is taken
back from whoever makes too little of it, so that a stalled peer costs the others nothing but a moment; the
chunk is asked for again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio

from streamoff.errors import InvariantError, LimitError
from streamoff.types import CHUNK_BYTES, MIB

__all__ = ["LAPSE_PARTS", "LAPSE_SECONDS", "POOL_BYTES", "Buffer", "BufferPool", "Tenure"]

POOL_BYTES: Final = 32 * MIB
SMALL_BYTES: Final = 64 * 1024
"""The least that a buffer counts for."""
LAPSE_SECONDS: Final = 0.5
"""How long a holder is watched before its buffer is taken back, while somebody waits for one."""
LAPSE_PARTS: Final = 40
"""A holder that moves less than one of so many parts in that time makes too little of its buffer: it would
take longer than the 20 s that a receiver waits without progress."""


@dataclass(frozen=True, slots=True)
class Tenure:
    """A loan that depends on a peer, and can therefore be ended.

    Args:
        moved: How many bytes have come into, or gone out of, the buffer.
        end: Returns the buffer to the pool before it returns; must not block.
    """

    moved: Callable[[], int]
    end: Callable[[], None]


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory on loan; give it back exactly once.

    While it waits for a peer its holder sets ``tenure``; while it waits for this end (a disk, a reader of a
    disk) there is none, and it is left alone.
    """

    pool: BufferPool
    nbytes: int
    memory: bytearray | None
    tenure: Tenure | None = None

    def view(self, nbytes: int) -> memoryview:
        """The first ``nbytes`` bytes, writable, format "B"."""
        if self.memory is None:
            raise InvariantError("a buffer was used after it was returned")
        return memoryview(self.memory)[:nbytes]

    def release(self) -> None:
        """Give the buffer back; a second call is a defect of ours."""
        if self.memory is None:
            raise InvariantError("a buffer was returned twice")
        memory, self.memory, self.tenure = self.memory, None, None
        self.pool._take_back(self, memory)  # noqa: SLF001 - the two halves of one loan


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    granted: anyio.Event = field(default_factory=anyio.Event)


class BufferPool:
    """At most ``capacity`` bytes of buffers, made when first needed and reused.

    Waiters are served in order. Not thread-safe: it belongs to one event loop.

    Args:
        capacity: Bytes in all; at least one buffer of the usual size.
        size: Bytes of a usual buffer.
    """

    def __init__(self, capacity: int = POOL_BYTES, size: int = CHUNK_BYTES) -> None:
        self.size = size
        self.count = max(1, capacity // size)
        self.capacity = max(capacity, size)
        self.peak = 0
        self._used = 0
        self._free: dict[int, list[bytearray]] = {}
        self._lent: dict[Buffer, None] = {}
        self._waiting: deque[_Waiter] = deque()

    @property
    def lent(self) -> int:
        """Buffers on loan."""
        return len(self._lent)

    @property
    def used(self) -> int:
        """Bytes on loan, as they count."""
        return self._used

    @property
    def kept(self) -> int:
        """Bytes that are not on loan, and kept to be lent again; with :attr:`used` at most the capacity."""
        return sum(size * len(free) for size, free in self._free.items())

    async def borrow(self, nbytes: int | None = None) -> Buffer:
        """Wait for a buffer; its content is arbitrary. A cancelled wait takes nothing.

        Args:
            nbytes: At least 1; the usual size by default.

        Raises:
            LimitError: More than the pool has.
        """
        cost = self._cost(self.size if nbytes is None else nbytes)
        if cost > self.capacity:
            raise LimitError("a buffer", expected=f"at most {self.capacity} bytes", got=nbytes)
        if self._waiting or self._used + cost > self.capacity:
            await self._wait(_Waiter(cost))
        else:
            self._used += cost
        buffer = Buffer(self, cost, self._memory(cost))
        self._lent[buffer] = None
        self.peak = max(self.peak, len(self._lent))
        return buffer

    def _cost(self, nbytes: int) -> int:
        """The next power of two, so that a buffer fits again; what is larger than usual, is as large as it is."""
        if nbytes > self.size:
            return nbytes
        return min(max(1 << (nbytes - 1).bit_length(), SMALL_BYTES), self.size)

    def _memory(self, cost: int) -> bytearray:
        """Memory that was used before, the latest first: it is in the cache. Else new memory, for which old goes."""
        free = self._free.get(cost)
        if free:
            return free.pop()
        while self._used + self.kept > self.capacity:
            next(free for free in self._free.values() if free).pop()
        return bytearray(cost)

    async def _wait(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        try:
            while not waiter.granted.is_set():
                watched = self._watch() if self._waiting[0] is waiter else []
                with anyio.move_on_after(LAPSE_SECONDS) as patience:
                    await waiter.granted.wait()
                if patience.cancelled_caught:
                    self._end_tenures(watched)
        except BaseException:
            if waiter.granted.is_set():
                self._used -= waiter.nbytes
            else:
                self._waiting.remove(waiter)
            self._grant()
            raise

    def _watch(self) -> list[tuple[Buffer, Tenure, int]]:
        return [
            (buffer, buffer.tenure, buffer.tenure.moved())
            for buffer in self._lent
            if buffer.tenure is not None
        ]

    def _end_tenures(self, watched: list[tuple[Buffer, Tenure, int]]) -> None:
        """Take back as much as is waited for from those that made too little of it, longest first."""
        for buffer, tenure, moved in watched:
            if not self._waiting:
                return
            if buffer.tenure is tenure and tenure.moved() - moved < buffer.nbytes // LAPSE_PARTS:
                tenure.end()

    def _take_back(self, buffer: Buffer, memory: bytearray) -> None:
        del self._lent[buffer]
        self._used -= buffer.nbytes
        if buffer.nbytes <= self.size:
            self._free.setdefault(buffer.nbytes, []).append(memory)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._used + self._waiting[0].nbytes <= self.capacity:
            waiter = self._waiting.popleft()
            self._used += waiter.nbytes
            waiter.granted.set()
