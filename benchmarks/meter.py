"""What a stretch of work took of the process that did it."""

import resource
import time
from dataclasses import asdict, dataclass
from typing import Any, Self

from streamoff.sim.memory import MemorySampler

__all__ = ["Meter", "Spent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What it took.

    Args:
        seconds: By the clock.
        cpu: CPU seconds of the process, all threads.
        growth: Anonymous resident bytes above the meter's floor, at most.
        faults: Page faults without input or output: fresh pages.
    """

    seconds: float
    cpu: float
    growth: int
    faults: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


class Meter:
    """Measures the process from ``with`` to the end of its block; ``spent`` is there afterwards.

    Args:
        floor: Resident bytes that growth is counted from: what the process had before its first transfer,
            so that buffers it keeps for the next one count as well.
    """

    spent: Spent

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._memory = MemorySampler()

    def __enter__(self) -> Self:
        self._memory.__enter__()
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._cpu = time.process_time()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._begun
        cpu = time.process_time() - self._cpu
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        self._memory.__exit__(None, None, None)
        self.spent = Spent(
            seconds=seconds,
            cpu=cpu,
            growth=self._memory.statistics().peak_bytes - self._floor,
            faults=faults,
        )
