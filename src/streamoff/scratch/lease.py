"""Who owns a job root, and whether that owner is still there.

A lock alone does not tell: a forked child keeps the lock of a dead owner, and can free the lock of
a live one. So a root is dead only when its lock is free **and** its owner is gone: on the same boot
and in the same pid namespace when that process is gone (same pid *and* start time, since pids are
recycled), otherwise when the lease was not touched for ten minutes. Where locks are not shared
between the processes that see the file (network, FUSE, 9p) only the second half counts. A doubt is
always decided for the owner.
"""

import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from streamoff.scratch.names import LEASE, LEASE_PART, MAX_JOB, RootName, Stage
from streamoff.scratch.space import filesystem

__all__ = [
    "EXPIRY",
    "TOUCH_EVERY",
    "Claim",
    "Judgement",
    "Lease",
    "Owner",
    "State",
    "claim",
    "judge",
]

TOUCH_EVERY: Final = 30.0
"""Seconds between two touches of a lease by its owner."""

EXPIRY: Final = 600.0
"""Seconds without a touch after which an owner that cannot be asked is taken for gone."""

_RECORD_LIMIT: Final = 4096
_VERSION: Final = 1
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class State(StrEnum):
    """What may be done with a directory: nothing, remove it, or nothing because it is not ours."""

    LIVE = "live"
    DEAD = "dead"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that made a root.

    Args:
        boot: The kernel's boot id; empty where there is none.
        namespace: The pid namespace, as ``/proc/self/ns/pid`` names it; empty where there is none.
        pid: Process id in that namespace.
        started: Start time of the process in clock ticks since boot; 0 if unknown.
        job: The job id, as given.
    """

    boot: str
    namespace: str
    pid: int
    started: int
    job: str

    @classmethod
    def current(cls, job: str) -> Self:
        """This process, as the owner of a root of ``job``."""
        pid = os.getpid()
        process = _process(pid)
        return cls(_boot_id(), _pid_namespace(), pid, process[1] if process else 0, job)

    @classmethod
    def parse(cls, record: bytes) -> Self | None:
        """Read a lease's record; None if it is not one."""
        try:
            fields = json.loads(record)
            if fields.pop("streamoff") != _VERSION:
                return None
            owner = cls(**fields)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None
        texts, numbers = (owner.boot, owner.namespace, owner.job), (owner.pid, owner.started)
        if not all(type(text) is str and len(text) <= MAX_JOB for text in texts):
            return None
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            return None
        return owner if owner.pid and owner.job.isprintable() else None

    def record(self) -> bytes:
        """The bytes of the lease file, at most 4 KiB."""
        return json.dumps({"streamoff": _VERSION, **asdict(self)}).encode() + b"\n"

    @property
    def askable(self) -> bool:
        """Whether this process can find out if the owner lives: same boot and pid namespace."""
        here = (_boot_id(), _pid_namespace())
        return all(here) and here == (self.boot, self.namespace)

    @property
    def alive(self) -> bool:
        """Whether the owner's process exists; only meaningful if :attr:`askable`."""
        try:
            os.kill(self.pid, 0)  # nothing is sent; existence is checked
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:
            pass  # it exists and is not ours to signal
        process = _process(self.pid)
        if process is None:  # hidden from us: it exists, so it is taken for the owner
            return True
        state, started = process
        return state not in "ZX" and self.started in (0, started)


def _process(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process, or None if the system does not tell."""
    try:
        # The command name may hold spaces and parentheses; what follows the last one is fixed.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode("ascii"), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


class Lease:
    """The lock and the record that keep a root alive; held by the process that made it.

    The descriptor is closed on exec, so programs that the owner starts do not keep the lock. Forked
    children do, until they end.
    """

    def __init__(self, fd: int, owner: Owner) -> None:
        self._fd = fd
        self.owner = owner

    @classmethod
    def take(cls, directory: Path, job: str) -> Self:
        """Put a lease of this process into a directory that nobody else uses yet.

        The file appears under its name only when it is locked and whole, so that who reads it never
        sees a lease without its owner.

        Raises:
            OSError: It cannot be written or is there already. A part of it may be left in the
                directory.
        """
        owner = Owner.current(job)
        part, name = directory / LEASE_PART, directory / LEASE
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _try_lock(fd, fcntl.LOCK_EX)
            os.write(fd, owner.record())
            part.rename(name)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, owner)

    def touch(self) -> None:
        """Say that the owner is still there; owed every 30 s. Does nothing in a forked child.

        Raises:
            OSError: The file system refuses; the lease ages.
        """
        if self._fd >= 0 and self.owner.pid == os.getpid():
            os.utime(self._fd)

    def release(self) -> None:
        """Close the lease; a second call does nothing.

        The lock is not undone explicitly: that would undo it for every process that shares it.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _try_lock(fd: int, how: int) -> bool:
    """Whether the lock is ours now; True as well where the file system has no locks at all."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is known about one directory.

    Args:
        state: Live, dead or foreign.
        reason: Why, in one clause.
        owner: Who made it; None if its lease does not tell.
        age: Seconds since the lease (or, without one, the directory) was touched; None if unknown.
    """

    state: State
    reason: str
    owner: Owner | None = None
    age: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A judgement and, while the claim lasts, the lock that keeps it true.

    Args:
        judgement: What was found.
        directory: Open descriptor of the directory, valid while the claim lasts; -1 if it is
            foreign.
    """

    judgement: Judgement
    directory: int


def judge(path: Path) -> Judgement:
    """Decide whether a directory is a live root, a dead one, or not ours.

    Args:
        path: Any path; the last component is not followed if it is a symbolic link.

    Returns:
        The judgement; it may be out of date a moment later. Nothing on disk is changed, except that
        for an owner that cannot be asked an unnamed file is made beside the root, to read the file
        system's clock.
    """
    with claim(path, exclusive=False) as claimed:
        return claimed.judgement


@contextmanager
def claim(path: Path, *, exclusive: bool = True) -> Iterator[Claim]:
    """Judge a directory and keep its lock, if it was free, while the block lasts.

    Args:
        path: Any path.
        exclusive: Shut out other claims (for who removes) or only removers (for who looks).

    Yields:
        The claim. Another one at the same time finds the lock held and calls the root live.
    """
    name = RootName.parse(path.name)
    if name is None:
        yield Claim(_foreign("not the name of a job root"), -1)
        return
    try:
        directory = os.open(path, _DIRECTORY)
    except OSError as error:
        yield Claim(_foreign(f"not a directory of ours ({os.strerror(error.errno or 0)})"), -1)
        return
    try:
        with _lease(directory) as lease:
            how = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
            yield Claim(_judge(path, name, directory, lease, how), directory)
    finally:
        os.close(directory)


@contextmanager
def _lease(directory: int, name: str = LEASE) -> Iterator[int | None]:
    """The open lease of a directory, or None if it has none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        yield None
        return
    except OSError:  # a symbolic link, a socket, not ours to read: judged as nonsense
        yield -1
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _judge(path: Path, name: RootName, directory: int, lease: int | None, how: int) -> Judgement:
    if os.geteuid() not in (0, os.fstat(directory).st_uid):
        return _foreign("belongs to another user")
    if lease is None:
        return _judge_leaseless(path, name, directory)
    if lease < 0 or not stat.S_ISREG(os.fstat(lease).st_mode):
        return _foreign("its lease is not a file of ours")
    record = os.pread(lease, _RECORD_LIMIT, 0)
    owner = Owner.parse(record)
    if owner is None and record.strip(b"\0"):  # a crash of the machine leaves it empty or zeroed
        return _foreign("its lease is not one of ours")
    return _judge_owner(path, name, lease, owner, _try_lock(lease, how))


def _judge_owner(
    path: Path, name: RootName, lease: int, owner: Owner | None, free: bool
) -> Judgement:
    facts = os.fstat(lease)
    age = time.time() - facts.st_mtime
    if not facts.st_nlink:
        return _live("another process is removing it", owner, age)
    if name.stage is Stage.GONE:
        return _dead("buried", owner, age)
    if not free and filesystem(path).shares_flock:
        return _live("its lease is held", owner, age)
    if owner is None or not owner.askable:
        return _judge_age(path, facts.st_mtime, owner)
    if owner.alive:
        return _live(f"process {owner.pid} is alive", owner, age)
    return _dead(f"process {owner.pid} is gone", owner, age)


def _judge_leaseless(path: Path, name: RootName, directory: int) -> Judgement:
    """What a crash can leave before the lease is in place, or after it is removed."""
    if name.stage is Stage.PLACED or not set(os.listdir(directory)) <= {LEASE_PART}:
        return _foreign("has no lease")
    if name.stage is Stage.GONE:
        return _dead("buried", None, None)
    touched, maker = os.fstat(directory).st_mtime, _maker(directory)
    if maker is not None and maker.askable and not maker.alive:
        return _dead(f"process {maker.pid} is gone", maker, time.time() - touched)
    return _judge_age(path, touched, maker)


def _maker(directory: int) -> Owner | None:
    """Who was making a root, if it came as far as writing its lease."""
    with _lease(directory, LEASE_PART) as part:
        if part is None or part < 0 or not stat.S_ISREG(os.fstat(part).st_mode):
            return None
        return Owner.parse(os.pread(part, _RECORD_LIMIT, 0))


def _judge_age(path: Path, touched: float, owner: Owner | None) -> Judgement:
    """By the clock of the file system, which on a network is not the clock of this machine."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            now = os.fstat(probe.fileno()).st_mtime
    except OSError:  # read-only or full
        now = time.time()
    age = now - touched
    if age < EXPIRY:
        return _live("its owner cannot be asked and touched it recently", owner, age)
    return _dead(f"untouched for {age:.0f} s", owner, age)


def _live(reason: str, owner: Owner | None, age: float | None) -> Judgement:
    return Judgement(state=State.LIVE, reason=reason, owner=owner, age=age)


def _dead(reason: str, owner: Owner | None, age: float | None) -> Judgement:
    return Judgement(state=State.DEAD, reason=reason, owner=owner, age=age)


def _foreign(reason: str) -> Judgement:
    return Judgement(state=State.FOREIGN, reason=reason)
