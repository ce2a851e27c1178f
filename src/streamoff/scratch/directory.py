"""The directory of one job: made, leased, used and buried."""

import errno
import functools
import itertools
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Self

from streamoff.errors import JobClosedError, NoSpaceError, ScratchError, UsageError
from streamoff.scratch.janitor import JANITOR
from streamoff.scratch.lease import EXPIRY, Lease
from streamoff.scratch.names import RootName, Stage
from streamoff.scratch.removal import remove
from streamoff.scratch.space import Filesystem, filesystem, free_inodes, free_space

__all__ = ["RamBacked", "RootDirectory", "scratch_base"]

RamBacked = Literal["warn", "refuse", "allow"]
"""What to do about scratch space that is memory."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

_log: Final = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    """Say something about a mount the first time it matters in this process."""
    _log.warning("%s", message)


def scratch_base(base: Path | str | None = None) -> Path:
    """Where job roots are made: an existing directory, resolved.

    Args:
        base: The directory; None for the rules of :mod:`tempfile` (``TMPDIR``, then ``/tmp`` and so
            on).

    Raises:
        ScratchError: It is not a directory. It is not made on demand: a mount that is missing would
            silently become a directory on the wrong disk.
    """
    path = Path(tempfile.gettempdir() if base is None else base)
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ScratchError(
            f"no scratch directory ({error})", path=path, hint="Make it, or name another one"
        ) from error
    if not real.is_dir():
        raise ScratchError("the scratch directory is not a directory", path=path)
    return real


class RootDirectory:
    """One job's scratch directory, owned by the process that made it.

    Attributes:
        job: The job id, as given.
        path: Where it is now; changes once, when it is buried.
        filesystem: Where that is.
    """

    def __init__(self, job: str, path: Path, lease: Lease, where: Filesystem) -> None:
        self.job = job
        self.path = path
        self.filesystem = where
        self._lease = lease
        self._pid = os.getpid()
        self._buried = False
        self._numbers = itertools.count(1)

    @classmethod
    def create(
        cls, job: str, base: Path | str | None = None, *, ram_backed: RamBacked = "warn"
    ) -> Self:
        """Make a root: under a hidden name, leased, then renamed into place; blocks.

        Also starts the janitor of this process.

        Args:
            job: The job id; recorded in the lease as it is, sanitised in the name.
            base: See `scratch_base`.
            ram_backed: What to do if the file system is memory: log a warning (once per mount),
                refuse, or nothing.

        Raises:
            UsageError: Not a job id, or not one of the three settings.
            ScratchError: The directory cannot be made, or is memory and that is refused. Nothing is
                left.
            NoSpaceError: The disk is full. Nothing is left.
        """
        if ram_backed not in ("warn", "refuse", "allow"):
            raise UsageError("ram_backed", expected="'warn', 'refuse' or 'allow'", got=ram_backed)
        name = RootName.fresh(job)
        parent = scratch_base(base)
        where = filesystem(parent)
        _check_ram(where, parent, ram_backed)
        if not where.shares_flock:
            _warn_once(
                f"scratch directory {parent} is on {where.kind} (mounted at {where.mount}), where "
                f"locks may not be shared: roots of other machines count as dead after "
                f"{EXPIRY:.0f} s without a sign of life"
            )
        hidden, path = parent / str(name), parent / str(name.at(Stage.PLACED))
        try:
            hidden.mkdir(mode=0o700)
            lease = Lease.take(hidden, job)
        except OSError as error:
            remove(hidden)
            raise _refused(error, "cannot make a job root", hidden) from error
        try:
            hidden.rename(path)
        except OSError as error:
            lease.release()
            remove(hidden)
            raise _refused(error, "cannot make a job root", path) from error
        JANITOR.start()
        return cls(job, path, lease, where)

    def new_transfer(self) -> Path:
        """Make an empty directory for one landing; blocks.

        Returns:
            Its path, unique for the life of the root. Whoever lands there owns it and gives it to
            :meth:`reclaim` in the end.

        Raises:
            JobClosedError: The root was buried, or somebody removed it.
            NoSpaceError: No space or no inodes left.
            ScratchError: The file system refuses.
        """
        self._check_owner()
        if self._buried:
            raise JobClosedError("the job root is closed", job=self.job, path=self.path)
        path = self.path / f"transfer-{next(self._numbers):06d}"
        try:
            path.mkdir(mode=0o700)
        except FileNotFoundError as error:
            raise JobClosedError("the job root is gone", job=self.job, path=self.path) from error
        except OSError as error:
            raise _refused(error, "cannot make a transfer directory", path) from error
        return path

    def reclaim(self, path: Path, freed: Callable[[], object] | None = None) -> None:
        """Hand a transfer directory to the janitor; safe in finalisers, nothing in a forked child.

        Args:
            path: A directory made by :meth:`new_transfer`.
            freed: Called in the janitor's thread once it is gone, e.g. to release a charge.
        """
        if self._pid == os.getpid():
            JANITOR.reclaim(path, freed)

    def touch(self) -> None:
        """Say that the owner is alive; owed every 30 s (`TOUCH_EVERY`).

        Raises:
            OSError: The file system refuses; where locks are not shared, ten minutes of that are
                death.
        """
        self._lease.touch()

    def bury(self) -> Path:
        """Take the root out of use: rename it to ``.gone-*`` and let go of the lease.

        From then on anybody may remove it, whatever becomes of this process. A second call changes
        nothing.

        Returns:
            The path to give to the janitor. It may not exist, if somebody removed the root.

        Raises:
            UsageError: Called in a forked child.
            ScratchError: It cannot be renamed; root and lease are as before.
        """
        self._check_owner()
        if self._buried:
            return self.path
        name = RootName.parse(self.path.name)
        assert name is not None
        gone = self.path.with_name(str(name.at(Stage.GONE)))
        try:
            self.path.rename(gone)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _refused(error, "cannot bury the job root", self.path) from error
        self._buried = True
        self.path = gone
        self._lease.release()
        return gone

    def _check_owner(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                "a job root belongs to the process that made it",
                expected=f"process {self._pid}",
                got=f"process {os.getpid()}",
                job=self.job,
            )


def _check_ram(where: Filesystem, parent: Path, setting: RamBacked) -> None:
    if not where.ram_backed or setting == "allow":
        return
    what = f"scratch directory {parent} is in RAM ({where.kind} mounted at {where.mount})"
    hint = "Set TMPDIR or the scratch directory to a disk"
    if setting == "refuse":
        raise ScratchError(what, path=parent, mount=where.mount, kind=where.kind, hint=hint)
    _warn_once(f"{what}: what is offloaded there still uses memory. {hint}")


def _refused(error: OSError, what: str, path: Path) -> ScratchError | NoSpaceError:
    free, code = free_space(path.parent), errno.errorcode.get(error.errno or 0, "unknown")
    if error.errno not in _FULL:
        return ScratchError(f"{what} ({error.strerror})", free=free, code=code, path=path)
    inodes = free_inodes(path.parent)
    text = f"{what}: no inodes left" if inodes == 0 else f"{what} ({error.strerror})"
    return NoSpaceError(text, free=free, inodes=inodes, code=code, path=path)
