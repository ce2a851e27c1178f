"""What kind of file system a path is on, and how much room it has."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from streamoff.scratch import space
from streamoff.scratch.space import capacity, filesystem, free_inodes, free_space, mounts

from ..disks import tmpfs

pytestmark = pytest.mark.core

TABLE = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 22 0:25 / /dev/shm rw,nosuid shared:4 master:2 propagate_from:7 - tmpfs tmpfs rw,size=24684092k
31 22 0:31 / /mnt/with\040space\011and\134more rw - nfs4 server:/export rw,vers=4.2
32 22 0:32 / /mnt/nine rw - 9p share rw
33 22 0:33 / /mnt/nine/inner rw - fuse.sshfs host: rw
34 22 0:34 / /mnt/twice rw - ext4 /dev/vdb rw
35 22 0:35 / /mnt/twice rw - ramfs none rw
this line makes no sense
36 22 0:36 / /mnt/nothing rw
x 22 0:36 / /mnt/nothing rw - tmpfs tmpfs rw
37 22 0:37 / /mnt/bare rw - xfs /dev/vdc
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount table of our own making, where no kernel tells the mount id."""
    path = tmp_path / "mountinfo"
    path.write_bytes(TABLE)
    monkeypatch.setattr(space, "_TABLE", path)
    monkeypatch.setattr(space, "_mount_id", lambda real: None)
    return path


@pytest.mark.parametrize(
    ("path", "kind", "mount", "traits"),
    [
        ("/", "ext4", "/", (False, True)),
        ("/home", "ext4", "/", (False, True)),
        ("/dev/shm", "tmpfs", "/dev/shm", (True, True)),
        ("/dev/shm/deep/er", "tmpfs", "/dev/shm", (True, True)),
        ("/dev/shmoo", "ext4", "/", (False, True)),
        ("/mnt/with space\tand\\more/x", "nfs4", "/mnt/with space\tand\\more", (False, False)),
        ("/mnt/nine/x", "9p", "/mnt/nine", (False, False)),
        ("/mnt/nine/inner/x", "fuse.sshfs", "/mnt/nine/inner", (False, False)),
        ("/mnt/nine/innermost", "9p", "/mnt/nine", (False, False)),
        ("/mnt/twice/x", "ramfs", "/mnt/twice", (True, True)),
        ("/mnt/nothing", "ext4", "/", (False, True)),
        ("/mnt/bare", "xfs", "/mnt/bare", (False, True)),
    ],
)
def test_the_longest_and_last_mount_point_above_decides(
    table: Path, path: str, kind: str, mount: str, traits: tuple[bool, bool]
) -> None:
    """Kind, mount point and the traits (in RAM, shares locks) follow the table, with its escapes and its disorder."""
    found = filesystem(Path(path))
    assert (found.kind, found.mount) == (kind, Path(mount))
    assert (found.ram_backed, found.shares_flock) == traits


def test_an_overlay_that_writes_to_ram_is_ram(table: Path, tmp_path: Path) -> None:
    """The upper layer of an overlay decides, if it can be seen; an overlay on disk is a disk."""
    upper = tmp_path / "upper"
    upper.mkdir()
    line = f"40 22 0:40 / /merged rw - overlay overlay rw,lowerdir=/l,upperdir={upper},workdir=/w\n"
    for backing, ram in (("tmpfs", True), ("ext4", False)):
        table.write_bytes(f"39 22 0:39 / {tmp_path} rw - {backing} x rw\n{line}".encode())
        assert filesystem(Path("/merged/x")).ram_backed is ram
    table.write_bytes(line.replace(str(upper), "/not/to/be/seen").encode())
    assert not filesystem(Path("/merged/x")).ram_backed


@pytest.mark.parametrize("content", [None, b"", b"\xff\0\n - \n"])
def test_without_a_usable_table_the_kind_is_unknown_and_not_trusted(
    table: Path, content: bytes | None
) -> None:
    """No table, an empty one or nonsense: neither RAM nor sharing locks, and a mount point all the same."""
    if content is None:
        table.unlink()
    else:
        table.write_bytes(content)
    found = filesystem(Path("/proc/self"))
    assert (found.kind, found.mount) == ("unknown", Path("/proc"))
    assert (found.ram_backed, found.shares_flock) == (False, False)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_mount_table(data: bytes) -> None:
    """Whatever the table holds, parsing it never fails."""
    assert len(mounts(data)) <= len(data.splitlines())


def test_a_name_that_is_no_text_survives_the_table() -> None:
    """A mount point in another encoding is the same path after parsing."""
    (mount,) = mounts(b"5 1 0:5 / /mnt/\xff\\040x rw - xfs /dev/x rw")
    assert os.fsencode(mount.point) == b"/mnt/\xff x"


def test_a_real_mount_is_found_through_a_space_and_a_link(tmp_path: Path) -> None:
    """A tmpfs with a space in its name is RAM, also when it is reached by a symbolic link."""
    with tmpfs(tmp_path / "a b") as mount:
        link = tmp_path / "link"
        link.symlink_to(mount)
        for path in (mount, link):
            found = filesystem(path)
            assert (found.kind, found.mount, found.ram_backed) == ("tmpfs", mount, True)


def test_a_mount_that_hides_a_deeper_one_is_what_counts(tmp_path: Path) -> None:
    """Bytes go to the file system on top, though the table still lists a longer mount point below."""
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    outer = tmp_path / "outer"
    outer.mkdir()
    with tmpfs(outer / "inner"):
        subprocess.run(["mount", "--bind", str(source), str(outer)], check=True)
        try:
            found = filesystem(outer / "inner")
        finally:
            subprocess.run(["umount", str(outer)], check=True)
    assert (found.kind, found.mount) == (filesystem(tmp_path).kind, outer.resolve())


def test_room_is_what_an_ordinary_user_may_use(tmp_path: Path) -> None:
    """Free bytes and inodes are those of the file system, and sink as it fills."""
    with tmpfs(tmp_path / "ram", "size=64k,nr_inodes=8") as mount:
        assert free_space(mount) == 65536
        before = free_inodes(mount)
        (mount / "file").write_bytes(b"x" * 4096)
        assert free_space(mount) == 61440
        assert before is not None
        assert free_inodes(mount) == before - 1


def test_a_file_system_without_a_size_has_unknown_room(tmp_path: Path) -> None:
    """The ramfs reports no blocks and no inodes: unknown, not zero."""
    with tmpfs(tmp_path / "ram", kind="ramfs") as mount:
        assert free_space(mount) is None
        assert free_inodes(mount) is None
        assert capacity(mount) is None
        assert filesystem(mount).ram_backed


def test_capacity_is_the_whole_disk(tmp_path: Path) -> None:
    """What never fits is what exceeds the file system as a whole, however full it is."""
    with tmpfs(tmp_path / "ram", "size=64k") as mount:
        (mount / "full").write_bytes(bytes(65536))
        assert (capacity(mount), free_space(mount)) == (65536, 0)


def test_a_path_that_does_not_answer_has_unknown_room(tmp_path: Path) -> None:
    """If the file system cannot be asked, the room is unknown and nothing is raised."""
    assert free_space(tmp_path / "absent") is None
    assert free_inodes(tmp_path / "absent") is None
    assert capacity(tmp_path / "absent") is None
