"""Tombstones: the bounded memory that answers late requests.

Bounded in number and in time; at either, the oldest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from streamoff.errors import UsageError

__all__ = ["TOMBSTONES", "TOMBSTONE_SECONDS", "Tombstones"]

TOMBSTONES: Final = 4096
TOMBSTONE_SECONDS: Final = 1800.0

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Tombstones(Generic[K, V]):
    """A mapping that forgets.

    Args:
        capacity: Entries kept, at least 1; one more drops the oldest.
        lifetime: Seconds an entry is kept, from its burial; looking at it does not extend it.
    """

    __slots__ = ("_entries", "capacity", "lifetime")

    def __init__(self, *, capacity: int = TOMBSTONES, lifetime: float = TOMBSTONE_SECONDS) -> None:
        if capacity < 1 or lifetime <= 0:
            raise UsageError("tombstones", expected="capacity >= 1, lifetime > 0", got=capacity)
        self.capacity = capacity
        self.lifetime = lifetime
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def bury(self, now: float, key: K, value: V) -> tuple[V, ...]:
        """Remember ``value``; burying a key again makes it the newest.

        Returns:
            What was forgotten to make room, oldest first.
        """
        forgotten = list(self.expire(now))
        old = self._entries.pop(key, None)
        if old is not None:
            forgotten.append(old[1])
        self._entries[key] = (now + self.lifetime, value)
        while len(self._entries) > self.capacity:
            forgotten.append(self._entries.popitem(last=False)[1][1])
        return tuple(forgotten)

    def drop_oldest(self) -> tuple[V, ...]:
        """Forget the oldest entry; returns it, or nothing if there is none."""
        return (self._entries.popitem(last=False)[1][1],) if self._entries else ()

    def get(self, now: float, key: K) -> V | None:
        """What is remembered of ``key``, or None."""
        entry = self._entries.get(key)
        return None if entry is None or now >= entry[0] else entry[1]

    def age(self, now: float, key: K) -> float | None:
        """Seconds since the burial of ``key``, or None if it is not remembered."""
        entry = self._entries.get(key)
        return None if entry is None or now >= entry[0] else now - entry[0] + self.lifetime

    def expire(self, now: float) -> tuple[V, ...]:
        """Forget what is past its time; returns it, oldest first."""
        forgotten: list[V] = []
        while self._entries:
            due, value = next(iter(self._entries.values()))
            if now < due:
                break
            self._entries.popitem(last=False)
            forgotten.append(value)
        return tuple(forgotten)

    def next_expiry(self) -> float | None:
        """When the oldest entry is due, or None if there is none."""
        return next(iter(self._entries.values()))[0] if self._entries else None

    def __len__(self) -> int:
        return len(self._entries)
