"""Removing a directory for good, while others may still add to it or remove from it.

Everything is done relative to open directories and no symbolic link is followed, so nobody can lead
a removal out of its tree. It does not cross into another file system. What changes under it is
tried again, a bounded number of times.
"""

import errno
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamoff.scratch.names import LEASE

__all__ = ["MAX_DEPTH", "PAUSES", "Removal", "Usage", "measure", "remove"]

PAUSES: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
"""Seconds between attempts; their number is the number of retries."""

MAX_DEPTH: Final = 64
"""Nested directories that a removal descends; each level holds two descriptors."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRANSIENT: Final = frozenset(
    # Added to, or an entry became another kind of entry, between listing and removing it.
    {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}
)
_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tree takes on disk: entries below its top, and bytes of disk space."""

    entries: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """How one removal ended.

    Args:
        path: The directory.
        entries: Files and directories that this removal unlinked.
        nbytes: Disk space of the files among them whose last link it was.
        error: Why the directory is still there; None if it is gone.
    """

    path: Path
    entries: int
    nbytes: int
    error: str | None


class _Sweep:
    """One removal under way: what was unlinked so far and what stands in the way."""

    def __init__(self) -> None:
        self.entries = 0
        self.nbytes = 0
        self.obstacle: OSError | None = None

    def sweep(self, path: Path) -> None:
        """Try once; obstacles inside are noted and passed by, so that one does not keep all."""
        self.obstacle = None
        directory = os.open(path, _DIRECTORY)
        try:
            device = os.fstat(directory).st_dev
            self._empty(directory, device, depth=1, keep=LEASE)
            if self.obstacle is None:
                # Until here a crash leaves a directory that still says whose it is.
                self._unlink(directory, LEASE)
        finally:
            os.close(directory)
        if self.obstacle is not None:
            raise self.obstacle
        path.rmdir()
        self.entries += 1

    def _empty(self, directory: int, device: int, *, depth: int, keep: str | None = None) -> None:
        with os.scandir(directory) as listing:
            for entry in listing:
                if entry.name == keep:
                    continue
                try:
                    if entry.is_dir(follow_symlinks=False):
                        self._remove_child(directory, entry.name, device, depth)
                    else:
                        self._unlink(directory, entry.name)
                except FileNotFoundError:
                    continue  # somebody else removed it
                except OSError as error:
                    self.obstacle = self.obstacle or error

    def _remove_child(self, parent: int, name: str, device: int, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise OSError(errno.EMLINK, f"nested deeper than {MAX_DEPTH} directories", name)
        child = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            if os.fstat(child).st_dev != device:
                raise OSError(errno.EXDEV, "another file system is mounted here", name)
            self._empty(child, device, depth=depth + 1)
        finally:
            os.close(child)
        os.rmdir(name, dir_fd=parent)
        self.entries += 1

    def _unlink(self, directory: int, name: str) -> None:
        try:
            facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            return
        self.entries += 1
        if facts.st_nlink == 1:
            self.nbytes += facts.st_blocks * _BLOCK


def remove(path: Path) -> Removal:
    """Remove a directory and all that is in it; blocks, and is meant for a thread.

    A file called ``.lease`` at its top goes last. A directory that is not there is a removal that
    is done. A symbolic link or a file in the place of the directory is left as it is.

    Args:
        path: A directory of ours. Its parents are trusted.

    Returns:
        What was removed, and why it stopped if it did. Never raises for what the file system does.
    """
    sweep = _Sweep()
    error: OSError | None = None
    for pause in (*PAUSES, None):
        try:
            sweep.sweep(path)
        except FileNotFoundError:
            error = None
        except OSError as caught:
            error = caught
            if caught.errno in _TRANSIENT and pause is not None and not _misplaced(path):
                time.sleep(pause)
                continue
        else:
            error = None
        break
    return Removal(
        path=path,
        entries=sweep.entries,
        nbytes=sweep.nbytes,
        error=None if error is None else str(error),
    )


def _misplaced(path: Path) -> bool:
    """Whether what stands at the path is no directory, which waiting does not change."""
    return path.is_symlink() or not path.is_dir()


def measure(directory: int) -> Usage:
    """Add up what is in an open directory, without following links or leaving its file system.

    Args:
        directory: Borrowed descriptor.

    Returns:
        The sum; what vanishes meanwhile, may not be read or is nested deeper than 64 is not in it.
    """
    return _measure(directory, os.fstat(directory).st_dev, depth=1)


def _measure(directory: int, device: int, *, depth: int) -> Usage:
    entries = nbytes = 0
    with os.scandir(directory) as listing:
        for entry in listing:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                entries += 1
                nbytes += facts.st_blocks * _BLOCK
                if stat.S_ISDIR(facts.st_mode) and facts.st_dev == device and depth < MAX_DEPTH:
                    child = os.open(entry.name, _DIRECTORY, dir_fd=directory)
                    try:
                        below = _measure(child, device, depth=depth + 1)
                    finally:
                        os.close(child)
                    entries += below.entries
                    nbytes += below.nbytes
    return Usage(entries, nbytes)
