"""How much a download asks for at once: what its line brings before others need the buffer."""

from __future__ import annotations

from typing import Final

from streamoff.types import CHUNK_BYTES

__all__ = ["CHUNK_SECONDS", "FIRST_BYTES", "MIN_PULL_BYTES", "RELAYED_BYTES", "Pace"]

MIN_PULL_BYTES: Final = 64 * 1024
"""What is pulled at once on the slowest line; a line that does not bring it within ``stall`` is no line."""
RELAYED_BYTES: Final = CHUNK_BYTES // 2
"""What is pulled at once from a source behind others, where several chunks wait on the way."""
FIRST_BYTES: Final = CHUNK_BYTES // 4
"""What is pulled at once before it is known how fast a line is."""
CHUNK_SECONDS: Final = 0.25
"""What a chunk may take to come: its buffer waits for it, and others for the buffer. A pool of 32 MiB is then enough
for 128 MiB/s over any number of lines."""


class Pace:
    """The pull size of one download, between :data:`MIN_PULL_BYTES` and ``most``.

    Args:
        most: Bytes of a pull on a fast line.
        first: Bytes of the first one.
        stall: Seconds without progress that the receiver allows.
    """

    def __init__(self, *, most: int, first: int, stall: float) -> None:
        self.most: Final = most
        self._least: Final = min(MIN_PULL_BYTES, most)
        self._stall: Final = stall
        self._since = 0.0
        self.nbytes = self._bounded(first)
        """What to ask for at once."""

    def begin(self, now: float) -> None:
        """Something is asked for, and nothing was before: the wait counts from here."""
        self._since = now

    def came(self, now: float, nbytes: int, seconds: float) -> None:
        """A chunk came: ask for what comes in :data:`CHUNK_SECONDS`, and for less where chunks take a good part of the stall budget.

        Args:
            now: The time.
            nbytes: Of the chunk.
            seconds: How long its buffer waited for it.
        """
        took, self._since = now - self._since, now
        if took > self._stall / 4:
            self.nbytes = self._bounded(self.nbytes // 2)
            return
        most = 2 * self.nbytes if took < self._stall / 16 else self.nbytes
        in_time = nbytes * CHUNK_SECONDS / max(seconds, 1e-6)
        self.nbytes = self._bounded(min(int(in_time), most))

    def slow_down(self) -> None:
        """A chunk took too long: ask for a quarter."""
        self.nbytes = self._bounded(self.nbytes // 4)

    def _bounded(self, nbytes: int) -> int:
        """The next power of two below: pulls of one size fit together, and into buffers."""
        power = 1 << (max(nbytes, 1).bit_length() - 1)
        return min(max(power, self._least), self.most)
