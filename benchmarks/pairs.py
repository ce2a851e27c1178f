"""Samples of ways to do the same thing, taken in turns, so that a slow moment of the machine meets all of them."""

import mmap
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from benchmarks.meter import Spent
from streamoff.types import MIB

__all__ = ["PAIRS", "QUICK_PAIRS", "Sample", "Series", "in_turns", "ratios", "spread"]

PAIRS: Final = 7
QUICK_PAIRS: Final = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer, as both ends saw it; its time is the receiver's."""

    receiver: Spent
    source: Spent

    @classmethod
    def of(cls, receiver: Mapping[str, Any], source: Mapping[str, Any]) -> Self:
        """Read what two peers said."""
        return cls(Spent(**receiver), Spent(**source))

    @property
    def cpu(self) -> float:
        """CPU seconds of both processes."""
        return self.receiver.cpu + self.source.cpu

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {"receiver": self.receiver.to_json(), "source": self.source.to_json()}


@dataclass(frozen=True, slots=True)
class Series:
    """All samples of one way, in the order of the turns.

    Args:
        nbytes: Of one transfer.
        samples: At least one.
    """

    nbytes: int
    samples: Sequence[Sample]

    @property
    def seconds(self) -> list[float]:
        """Of each sample."""
        return [sample.receiver.seconds for sample in self.samples]

    @property
    def throughput(self) -> list[float]:
        """MiB per second of each sample."""
        return [self.nbytes / MIB / seconds for seconds in self.seconds]

    @property
    def cpu(self) -> float:
        """CPU seconds of both ends per GiB, median."""
        return statistics.median(one.cpu for one in self.samples) / (self.nbytes / 2**30)

    @property
    def faults(self) -> float:
        """Page faults at the receiver per MiB, median."""
        return statistics.median(one.receiver.faults for one in self.samples) / (self.nbytes / MIB)

    @property
    def receiver_growth_mib(self) -> float:
        """The largest of all samples."""
        return max(sample.receiver.growth for sample in self.samples) / MIB

    @property
    def source_growth_mib(self) -> float:
        """The largest of all samples."""
        return max(sample.source.growth for sample in self.samples) / MIB

    def to_json(self) -> list[dict[str, object]]:
        """Return plain JSON values."""
        return [sample.to_json() for sample in self.samples]


def in_turns(
    times: int, nbytes: int, ways: Mapping[str, Callable[[], Sample]]
) -> dict[str, Series]:
    """Do every way once to warm up unless once is all, then ``times`` times: forwards in even turns and backwards in odd ones.

    Args:
        times: At least one.
        nbytes: Of one transfer.
        ways: By name.
    """
    found: dict[str, list[Sample]] = {name: [] for name in ways}
    for turn in range(-1 if times > 1 else 0, times):
        for name in reversed(list(ways)) if turn % 2 else ways:
            touch_free_memory(nbytes + nbytes // 4)
            sample = ways[name]()
            if turn >= 0:
                found[name].append(sample)
    return {name: Series(nbytes, samples) for name, samples in found.items()}


def touch_free_memory(nbytes: int) -> None:
    """Take and return memory, so that what is measured next finds free pages of one kind.

    A virtual machine's free pages may have been given back to its host: the first touch of such a page costs
    nine times what it costs otherwise, and who comes first would pay for both.
    """
    mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def ratios(found: Mapping[str, Series], ours: str = "ours", theirs: str = "theirs") -> list[float]:
    """The throughput of one way to that of another, turn by turn."""
    return [b / a for a, b in zip(found[ours].seconds, found[theirs].seconds, strict=True)]


def spread(values: Iterable[float], digits: int) -> str:
    """Median, and the lowest and highest in brackets."""
    found = sorted(values)
    middle = statistics.median(found)
    return f"{middle:.{digits}f} ({found[0]:.{digits}f}-{found[-1]:.{digits}f})"
