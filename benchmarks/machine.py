"""The machine that measures: what it is, and what it has left."""

import os
import platform
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self

from streamoff.scratch.space import filesystem, free_space
from streamoff.sim.sizes import format_size

__all__ = ["Machine", "Room"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a reader must know to compare figures.

    Args:
        processor: The kernel's name of it.
        cores: That this process may use.
        ram_bytes: In all; None if the kernel does not say.
        system: Kernel and release.
        scratch: Kind of the file system that is written to.
        software: Package to version.
    """

    processor: str
    cores: int
    ram_bytes: int | None
    system: str
    scratch: str
    software: dict[str, str]

    @classmethod
    def here(cls, scratch: Path) -> Self:
        """Describe this machine, and the file system of an existing directory."""
        return cls(
            processor=_processor(),
            cores=_cores(),
            ram_bytes=_meminfo("MemTotal"),
            system=f"{platform.system()} {platform.release()}",
            scratch=filesystem(scratch).kind,
            software={
                "python": platform.python_version(),
                **{name: version(name) for name in ("streamoff", "torch", "safetensors", "anyio")},
            },
        )

    def to_text(self) -> str:
        """Return two lines."""
        ram = "" if self.ram_bytes is None else f", {format_size(self.ram_bytes)} RAM"
        software = ", ".join(f"{name} {number}" for name, number in self.software.items())
        return (
            f"{self.processor}, {self.cores} cores{ram}, {self.system}, scratch on {self.scratch}\n"
            f"{software}"
        )

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free now, in bytes; None where nobody knows.

    Args:
        ram: That a new process may use.
        disk: On the scratch file system.
        disk_is_ram: Whether what is written there uses up RAM.
    """

    ram: int | None
    disk: int | None
    disk_is_ram: bool

    @classmethod
    def at(cls, scratch: Path) -> Self:
        """Look at the machine and at an existing directory."""
        known = [left for left in (_meminfo("MemAvailable"), _cgroup_left()) if left is not None]
        return cls(
            ram=min(known, default=None),
            disk=free_space(scratch),
            disk_is_ram=filesystem(scratch).ram_backed,
        )

    def lacks(self, *, ram: int, disk: int) -> str | None:
        """Say what is missing for a run that needs so many bytes, or None if it fits or nobody knows."""
        if self.disk is not None and disk > self.disk:
            return f"needs {format_size(disk)} of disk, {format_size(self.disk)} are free"
        wanted = ram + disk if self.disk_is_ram else ram
        if self.ram is not None and wanted > self.ram:
            return f"needs {format_size(wanted)} of RAM, {format_size(self.ram)} are free"
        return None


def _processor() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
        if found is not None:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _meminfo(field: str) -> int | None:
    with suppress(OSError):
        found = re.search(rf"^{field}:\s*(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    return None


def _cgroup_left() -> int | None:
    """What a container's limit leaves; cached pages in it can be taken back and are not counted as used."""
    group = "/sys/fs/cgroup/memory"
    with suppress(OSError, ValueError):
        limit, used = int(_text(f"{group}.max")), int(_text(f"{group}.current"))
        cached = re.search(r"^file (\d+)$", _text(f"{group}.stat"), re.MULTILINE)
        return limit - used + (int(cached[1]) if cached is not None else 0)
    return None  # no limit, or another layout


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
