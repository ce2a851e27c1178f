"""Real faults of disks: small file systems, images behind loop devices, memory limits, and the page cache as it is."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = [
    "break_down",
    "cached_bytes",
    "crumbled",
    "fill",
    "image",
    "memory_limit",
    "read_only",
    "tmpfs",
]


@contextmanager
def tmpfs(point: Path, options: str = "size=1m", kind: str = "tmpfs") -> Iterator[Path]:
    """Mount a small file system in RAM, or skip where that is not allowed."""
    point.mkdir()
    _mount("-t", kind, "-o", options, kind, str(point))
    try:
        yield point.resolve()
    finally:
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)


@contextmanager
def image(point: Path, backing: Path, kind: str = "ext4", mebibytes: int = 16) -> Iterator[Path]:
    """Mount a small file system on a real block device, or skip where that is not allowed.

    Args:
        point: Where; is made.
        backing: The file behind the device; is made, without its space. To take space from it is to damage
            the disk.
        kind: ``"ext4"``, or ``"ext2"``, which cannot reserve space.
        mebibytes: Size of the device.
    """
    point.mkdir()
    with backing.open("wb") as file:
        file.truncate(mebibytes << 20)
    make = [f"mkfs.{kind}", "-q", "-m", "0", "-e", "remount-ro", "-E", "nodiscard", str(backing)]
    try:
        subprocess.run(make, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no {kind} can be made here: {error}")
    _mount("-o", "loop", str(backing), str(point))
    try:
        yield point.resolve()
    finally:
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")


def break_down(mount: Path) -> None:
    """Have an image find itself damaged: it is read-only from then on, also for files that are open."""
    loop = os.minor(mount.stat().st_dev)
    try:
        Path(f"/sys/fs/ext4/loop{loop}/trigger_fs_error").write_text("a test", encoding="ascii")
    except OSError as error:
        pytest.skip(f"a file system cannot be told to fail here: {error}")


@contextmanager
def read_only(mount: Path) -> Iterator[None]:
    """Make a mounted file system read-only for a while; no file of it may be open for writing."""
    _mount("-o", "remount,ro", str(mount))
    try:
        yield
    finally:
        _mount("-o", "remount,rw", str(mount))


def fill(directory: Path, *, but: int = 0) -> Path:
    """Take all space of a file system except for ``but`` bytes; returns the file that has it."""
    hog = directory / "somebody else's"
    room = os.statvfs(directory)
    with hog.open("wb") as file:
        left = room.f_bavail * room.f_frsize - but
        piece = bytes(1 << 16)
        try:
            while left > 0:
                left -= os.write(file.fileno(), piece[:left])
        except OSError:
            pass
    return hog


@dataclass(frozen=True)
class MemoryLimit:
    """A memory cgroup; a process joins it by writing its id to ``procs``."""

    directory: Path
    version: int

    @property
    def procs(self) -> Path:
        """Where processes join."""
        return self.directory / "cgroup.procs"

    @property
    def peak(self) -> int:
        """The most that was in use at once, page cache included, in bytes."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.directory / name).read_text())

    @property
    def hits(self) -> int:
        """How often the limit was hit, so that memory had to be reclaimed."""
        if self.version == 1:
            return int((self.directory / "memory.failcnt").read_text())
        events = (self.directory / "memory.events").read_text().split()
        return int(events[events.index("max") + 1])


@contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryLimit]:
    """Make a memory cgroup, of whichever version this machine has, or skip where that is not allowed."""
    name = f"streamoff-test-{os.getpid()}"
    for version, top, setting in (
        (1, Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (2, Path("/sys/fs/cgroup"), "memory.max"),
    ):
        directory = top / name
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            if (directory / setting).exists():
                (directory / setting).write_text(str(nbytes))
                yield MemoryLimit(directory, version)
                return
        finally:
            directory.rmdir()
    pytest.skip("no memory cgroup can be made here")


def crumbled(directory: Path) -> list[Path]:
    """Take all inodes of a small file system; returns the files that have them."""
    crumbs: list[Path] = []
    try:
        while True:
            crumb = directory / f"crumb-{len(crumbs)}"
            crumb.touch()
            crumbs.append(crumb)
    except OSError:
        return crumbs


def cached_bytes(path: Path) -> int:
    """How many bytes of a file are in the page cache, in whole pages."""
    size = path.stat().st_size
    states = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with (
        path.open("rb") as file,
        # private, because ctypes wants to be able to write where it takes an address; no page is touched
        mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapped,
    ):
        start = (ctypes.c_char * size).from_buffer(mapped)
        refused = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states
        )
        del start
    assert refused == 0
    return sum(state & 1 for state in states.raw) * mmap.PAGESIZE
