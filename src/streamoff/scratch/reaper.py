"""Finding and reclaiming the roots of owners that are gone.

A crash runs no cleanup: what it leaves is found by name and judged by its lease. Several reapers
may be at work in one place: the one that holds the lease's lock renames the root to its gone name,
and what has such a name may be removed by all of them at once.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamoff.scratch.directory import scratch_base
from streamoff.scratch.lease import Claim, Judgement, State, claim
from streamoff.scratch.names import RootName, Stage
from streamoff.scratch.removal import Usage, measure, remove

__all__ = ["Failure", "ReclaimReport", "RootStatus", "reclaim", "survey"]

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootStatus:
    """One directory that has the name of a root.

    Args:
        path: Where it is (or was, if it was reclaimed).
        job: The job id as its owner gave it; the sanitised one of the name if the lease does not
            tell.
        judgement: Live, dead or foreign, with the reason, the owner and the age.
        usage: Files, directories and disk space in it; zeros for what may not be read.
    """

    path: Path
    job: str
    judgement: Judgement
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failure:
    """A dead root that could not be removed whole, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimReport:
    """What one pass did.

    Args:
        removed: The dead roots that are gone, under the names they were found by.
        kept: Live and foreign ones, which were not touched.
        failed: Dead ones that resisted; the next pass tries again.
        entries: Files and directories that this pass unlinked.
        nbytes: Disk space that this pass freed.
    """

    removed: tuple[Path, ...]
    kept: tuple[Path, ...]
    failed: tuple[Failure, ...]
    entries: int
    nbytes: int


def survey(base: Path | str | None = None) -> tuple[RootStatus, ...]:
    """Look at every root in a scratch directory; blocks, changes nothing.

    Args:
        base: See `scratch_base`.

    Returns:
        By path. What vanishes meanwhile is left out or counted in part.

    Raises:
        ScratchError: There is no such directory.
    """
    statuses = []
    for path, name in _candidates(scratch_base(base)):
        with claim(path, exclusive=False) as found:
            readable = found.judgement.state is not State.FOREIGN
            usage = measure(found.directory) if readable else Usage(0, 0)
        if _vanished(found, path):
            continue
        owner = found.judgement.owner
        job = owner.job if owner is not None else name.slug
        statuses.append(RootStatus(path=path, job=job, judgement=found.judgement, usage=usage))
    return tuple(statuses)


def reclaim(base: Path | str | None = None) -> ReclaimReport:
    """Remove every dead root in a scratch directory, and nothing else; blocks.

    Safe at any time, in any number of processes: a live root is never touched, nor is a directory
    that merely has the name of one. No symbolic link is followed.

    Args:
        base: See `scratch_base`.

    Returns:
        What was removed, kept, and could not be removed.

    Raises:
        ScratchError: There is no such directory.
    """
    removed: list[Path] = []
    kept: list[Path] = []
    failed: list[Failure] = []
    entries = nbytes = 0
    for path, name in _candidates(scratch_base(base)):
        with claim(path) as found:
            if found.judgement.state is not State.DEAD:
                if not _vanished(found, path):
                    kept.append(path)
                continue
            try:
                gone = _bury(path, name, found.directory)
            except FileNotFoundError:  # another reaper was faster, where locks are not shared
                continue
            except OSError as error:
                failed.append(Failure(path, str(error)))
                continue
        # After the claim: over NFS an open lease would keep the directory from being removed.
        removal = remove(gone)
        entries += removal.entries
        nbytes += removal.nbytes
        if removal.error is None:
            removed.append(path)
            _log.info("reclaimed %s: %s", path, found.judgement.reason)
        else:
            failed.append(Failure(gone, removal.error))
    return ReclaimReport(
        removed=tuple(removed),
        kept=tuple(kept),
        failed=tuple(failed),
        entries=entries,
        nbytes=nbytes,
    )


def _candidates(base: Path) -> Iterator[tuple[Path, RootName]]:
    """Entries with the name of a root, listed once, in order."""
    with suppress(FileNotFoundError):
        for entry in sorted(os.listdir(base)):  # noqa: PTH208  a plain list of names, sorted
            name = RootName.parse(entry)
            if name is not None:
                yield base / entry, name


def _vanished(found: Claim, path: Path) -> bool:
    """Whether somebody removed or renamed it after it was listed."""
    return found.judgement.state is State.FOREIGN and not os.path.lexists(path)


def _bury(path: Path, name: RootName, directory: int) -> Path:
    """Rename a dead root to its gone name, so that a crash of the reaper leaves something plain.

    Raises:
        OSError: Somebody else was faster, or put another directory in its place.
    """
    if name.stage is Stage.GONE:
        return path
    mine, there = os.fstat(directory), path.lstat()
    if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
        raise OSError(errno.ESTALE, "another directory took its place", str(path))
    gone = path.with_name(str(name.at(Stage.GONE)))
    path.rename(gone)
    return gone
