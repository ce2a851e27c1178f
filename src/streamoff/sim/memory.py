"""What a simulation costs in memory and on disk, sampled by threads.

Memory is ``RssAnon`` of ``/proc/self/status``: the pages that belong to the process alone. Pages of mapped
files and the page cache of the landings are not in it, because the kernel takes them back when it needs
them. Where the kernel does not report ``RssAnon`` it is ``VmRSS``, which counts mapped files too; without
``/proc`` it is the high-water mark of ``getrusage``, which never falls. :attr:`MemorySampler.field` says
which one it was.

A sampler sees what is there when it looks: a peak shorter than its interval may be missed.
"""

import ctypes
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from streamoff.scratch.names import RootName
from streamoff.scratch.removal import Usage, measure
from streamoff.sim.report import MemoryUse, ScratchUse

__all__ = [
    "MemorySampler",
    "ScratchSampler",
    "keep_large_blocks_mapped",
    "resident_bytes",
    "warm_torch",
]

_M_MMAP_THRESHOLD: Final = -3  # malloc.h
MEMORY_INTERVAL: Final = 0.02
SCRATCH_INTERVAL: Final = 0.1
SCRATCH_DUTY: Final = 20
"""The scratch sampler rests so many times as long as it looked, so it costs at most 5 % of a core."""

_STATUS: Final = Path("/proc/self/status")
_FIELDS: Final = ("RssAnon", "VmRSS")


def resident_bytes() -> tuple[str, int]:
    """Read the resident memory of the process.

    Returns:
        The field it was read from (``"RssAnon"``, ``"VmRSS"`` or ``"ru_maxrss"``) and bytes.
    """
    try:
        status = _STATUS.read_bytes()
    except OSError:
        status = b""
    for field in _FIELDS:
        match = re.search(rb"^%s:\s+(\d+) kB$" % field.encode(), status, re.MULTILINE)
        if match is not None:
            return field, int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return "ru_maxrss", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_large_blocks_mapped() -> None:
    """Have glibc give every block above 128 KiB back to the system when it is freed.

    It does so at first, but raises the bound to the size of what was freed, up to 32 MiB, and then keeps such
    blocks in the arena of each thread: megabytes that nobody uses, more with every thread. The bound is the
    whole process's, so this is for our own commands and not for a library. Elsewhere than on glibc, nothing
    happens.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)


def warm_torch() -> None:
    """Load torch and let it allocate what it keeps for good, so that a baseline contains it.

    Effects: draws no random number and leaves every setting of torch alone.
    """
    import torch  # noqa: PLC0415  the module is imported by commands that never load torch

    left = torch.linspace(-1.0, 1.0, 512 * 512).reshape(512, 512)
    (left @ left.T).relu().sum().item()
    left.to(torch.bfloat16).float().aminmax()


class _Periodic:
    """A thread that takes a sample, rests, and repeats until it is stopped.

    The first sample is taken in the caller's thread by ``start``, the last one by ``stop``; a sampler is
    used once.
    """

    def __init__(self, sample: Callable[[], object], *, interval: float, duty: int = 0) -> None:
        self._sample = sample
        self._interval = interval
        self._duty = duty
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streamoff-sampler", daemon=True)

    def start(self) -> None:
        self._sample()
        self._thread.start()

    def stop(self) -> None:
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._sample()

    def _run(self) -> None:
        rest = self._interval
        while not self._over.wait(rest):
            began = time.monotonic()
            self._sample()
            rest = max(self._interval, self._duty * (time.monotonic() - began))


class MemorySampler:
    """Samples the resident memory of the process from ``with`` to the end of its block.

    The baseline is read on entry: call :func:`warm_torch` before. Statistics may be read at any time, from
    any thread, also after the block.

    Args:
        interval: Seconds between samples, > 0.
    """

    def __init__(self, *, interval: float = MEMORY_INTERVAL) -> None:
        self._periodic = _Periodic(self._sample, interval=interval)
        self._baseline: int | None = None
        self._peak = 0
        self.field = ""
        """Which of the kernel's numbers was sampled."""

    def __enter__(self) -> Self:
        self._periodic.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._periodic.stop()

    def statistics(self) -> MemoryUse:
        """Return baseline and peak so far; zeros before the block was entered."""
        return MemoryUse(baseline_bytes=self._baseline or 0, peak_bytes=self._peak)

    def _sample(self) -> None:
        self.field, now = resident_bytes()
        if self._baseline is None:
            self._baseline = now
        self._peak = max(self._peak, now)


class ScratchSampler:
    """Samples the disk space of a job's roots from ``with`` to the end of its block.

    The thread rests :data:`SCRATCH_DUTY` times as long as it looked, however much there is to see.

    Args:
        base: The scratch directory; roots of other jobs and foreign files in it are not counted.
        job: The job id; one that no other job in ``base`` has.
        interval: Least number of seconds between samples, > 0.
    """

    def __init__(self, base: Path, job: str, *, interval: float = SCRATCH_INTERVAL) -> None:
        self._base = base
        self._slug = RootName.fresh(job).slug
        self._peak = 0
        self._periodic = _Periodic(self._sample, interval=interval, duty=SCRATCH_DUTY)

    def __enter__(self) -> Self:
        self._periodic.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._periodic.stop()

    def statistics(self) -> ScratchUse:
        """Return the peak so far and what is there now, roots included; looks again."""
        now = self._sample()
        return ScratchUse(peak_bytes=self._peak, left_bytes=now.nbytes, left_entries=now.entries)

    def _sample(self) -> Usage:
        entries = nbytes = 0
        for found in os.listdir(self._base):  # noqa: PTH208  a plain list of names
            name = RootName.parse(found)
            if name is None or name.slug != self._slug:
                continue
            with suppress(FileNotFoundError), _directory(self._base / found) as root:
                below = measure(root)
                entries += 1 + below.entries
                nbytes += below.nbytes
        self._peak = max(self._peak, nbytes)
        return Usage(entries, nbytes)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
