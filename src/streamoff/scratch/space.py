"""What kind of file system a path is on, and how much room it has.

The mount table is read from ``/proc/self/mountinfo``. Where there is none (macOS) the kind is
unknown, and what is unknown is neither taken for RAM nor trusted to share its locks.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "UNKNOWN",
    "Filesystem",
    "Mount",
    "capacity",
    "filesystem",
    "free_inodes",
    "free_space",
    "mounts",
]

UNKNOWN: Final = "unknown"
"""The kind of a file system that the mount table does not tell."""

_IN_RAM: Final = frozenset({"devtmpfs", "hugetlbfs", "ramfs", "rootfs", "tmpfs"})
_SHARES_FLOCK: Final = _IN_RAM | {
    # Local file systems, where flock(2) is one table in one kernel. The rest (nfs, cifs, 9p, fuse,
    # virtiofs, cluster file systems and whatever is invented next) may keep locks to one client.
    *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay"),
    *("reiserfs", "xfs", "zfs"),
}
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
_TABLE: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filesystem:
    """Where a path lives.

    Args:
        kind: The kernel's name, e.g. ``"ext4"``, ``"fuse.sshfs"``; ``"unknown"`` without a mount
            table.
        mount: The mount point.
        ram_backed: Whether its bytes are memory, so that landing there saves nothing.
        shares_flock: Whether every process that sees the file also sees its lock.
    """

    kind: str
    mount: Path
    ram_backed: bool
    shares_flock: bool


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table, unescaped."""

    id: int
    point: str
    kind: str
    options: tuple[str, ...]


def mounts(table: bytes) -> tuple[Mount, ...]:
    """Parse the text of a ``mountinfo`` file; lines that make no sense are left out.

    Args:
        table: The file's bytes; spaces, tabs, newlines and backslashes are octal escapes in it.

    Returns:
        The mounts in table order: of two on the same point the later one hides the earlier.
    """
    return tuple(mount for line in table.splitlines() if (mount := _mount(line)) is not None)


def _mount(line: bytes) -> Mount | None:
    head, dash, tail = line.partition(b" - ")
    fields, kind_source_options = head.split(b" "), tail.split(b" ")
    if not dash or len(fields) < 6 or len(kind_source_options) < 2 or not fields[0].isdigit():
        return None
    options = kind_source_options[2] if len(kind_source_options) > 2 else b""
    return Mount(
        int(fields[0]),
        _text(fields[4]),
        _text(kind_source_options[0]),
        tuple(_text(option) for option in options.split(b",")),
    )


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field))


def filesystem(path: Path) -> Filesystem:
    """Find the file system of an existing path.

    Args:
        path: A file or directory; symbolic links are followed.

    Returns:
        Its file system. Never fails: what cannot be found out is ``unknown``, not in RAM and not
        trusted with locks.
    """
    real = os.path.realpath(path)
    try:
        table = mounts(_TABLE.read_bytes())
    except OSError:
        table = ()
    mount = _find(table, real, _mount_id(real))
    if mount is None:
        return Filesystem(
            kind=UNKNOWN, mount=_mount_point(real), ram_backed=False, shares_flock=False
        )
    return Filesystem(
        kind=mount.kind,
        mount=Path(mount.point),
        ram_backed=mount.kind in _IN_RAM or _upper_in_ram(mount, table),
        shares_flock=mount.kind in _SHARES_FLOCK,
    )


def _find(table: Iterable[Mount], real: str, mount_id: int | None) -> Mount | None:
    """The mount with this id; without one the longest point above ``real``, the last of equals."""
    best: Mount | None = None
    for mount in table:
        if mount.id == mount_id:
            return mount
        above = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _mount_id(real: str) -> int | None:
    """The kernel's own answer, which holds also where a later mount hides a deeper one."""
    with suppress(OSError, ValueError, AttributeError):
        fd = os.open(real, os.O_PATH | os.O_CLOEXEC)
        try:
            info = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
        finally:
            os.close(fd)
        for line in info.splitlines():
            if line.startswith("mnt_id:"):
                return int(line.removeprefix("mnt_id:"))
    return None


def _upper_in_ram(mount: Mount, table: tuple[Mount, ...]) -> bool:
    """Whether an overlay writes to RAM, if its upper layer can be seen from here."""
    if mount.kind != "overlay":
        return False
    for option in mount.options:
        key, _, upper = option.partition("=")
        if key == "upperdir" and os.path.isdir(upper):  # noqa: PTH112  a str from the mount table
            below = _find(table, os.path.realpath(upper), _mount_id(upper))
            return below is not None and below.kind in _IN_RAM
    return False


def _mount_point(real: str) -> Path:
    point = Path(real)
    while not point.is_mount() and point != point.parent:
        point = point.parent
    return point


def free_space(path: Path) -> int | None:
    """How many bytes an ordinary user may still write to the file system of ``path``.

    Returns:
        Bytes; None if that is unknown: the file system reports no size at all (ramfs, some network
        file systems) or does not answer. Unknown is not zero.
    """
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize if room.f_blocks else None


def capacity(path: Path) -> int | None:
    """How many bytes the file system of ``path`` has in all: more than that never fits.

    Returns:
        Bytes; None if that is unknown, see `free_space`.
    """
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_blocks * room.f_frsize or None


def free_inodes(path: Path) -> int | None:
    """How many more files fit on the file system of ``path``.

    Returns:
        A number; None if there is no fixed limit or it is unknown (btrfs, ramfs).
    """
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_favail if room.f_files else None
