"""Making, using and burying one job's directory."""

import logging
import stat
import subprocess
from pathlib import Path

import pytest

from streamoff.errors import JobClosedError, NoSpaceError, ScratchError, UsageError
from streamoff.scratch import space
from streamoff.scratch.directory import RootDirectory, scratch_base
from streamoff.scratch.janitor import JANITOR
from streamoff.scratch.lease import State, judge
from streamoff.scratch.names import RootName, Stage
from streamoff.scratch.space import filesystem

from ..disks import tmpfs
from .helpers import in_child

pytestmark = pytest.mark.core


def test_a_root_is_private_leased_and_named_after_its_job(tmp_path: Path) -> None:
    """A new root has mode 0700, a random name with the sanitised job id, and a lease that is held."""
    root = RootDirectory.create("job/../7 ü", tmp_path)
    name = RootName.parse(root.path.name)
    assert name is not None
    assert name.stage is Stage.PLACED
    assert name.slug == "job----7--"
    assert stat.S_IMODE(root.path.stat().st_mode) == 0o700
    assert root.path.parent == tmp_path.resolve()
    assert judge(root.path).state is State.LIVE
    assert [entry.name for entry in tmp_path.iterdir()] == [root.path.name]
    root.bury()


def test_roots_of_one_job_do_not_collide(tmp_path: Path) -> None:
    """Two roots of the same job are two directories, also when the job id is cut."""
    roots = [RootDirectory.create("x" * 255, tmp_path) for _ in range(2)]
    assert roots[0].path != roots[1].path
    for root in roots:
        root.bury()


@pytest.mark.parametrize("job", ["", "x" * 256, "a\nb", "nul\0"])
def test_what_is_no_job_id_makes_no_directory(tmp_path: Path, job: str) -> None:
    """An empty, overlong or unprintable job id is refused before anything is on disk."""
    with pytest.raises(UsageError, match="job id"):
        RootDirectory.create(job, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_default_place_follows_the_rules_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an explicit directory, roots are made where TMPDIR points."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert scratch_base() == tmp_path.resolve()


def test_a_missing_base_is_an_error_and_not_made(tmp_path: Path) -> None:
    """A base that is absent or a file is refused with its path: a lost mount must not be replaced."""
    with pytest.raises(ScratchError, match="absent"):
        RootDirectory.create("job", tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ScratchError, match="not a directory"):
        RootDirectory.create("job", tmp_path / "file")
    assert not (tmp_path / "absent").exists()


def test_a_base_behind_a_symbolic_link_is_resolved_once(tmp_path: Path) -> None:
    """Later changes of a link to the base do not move the root."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    root = RootDirectory.create("job", link)
    link.unlink()
    assert root.path.parent == real.resolve()
    assert root.new_transfer().is_dir()
    root.bury()


def test_transfers_are_separate_private_directories(tmp_path: Path) -> None:
    """Each landing gets a directory of its own in the root."""
    root = RootDirectory.create("job", tmp_path)
    first, second = root.new_transfer(), root.new_transfer()
    assert first != second
    assert first.parent == second.parent == root.path
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    root.bury()


def test_burying_renames_and_ends_admission(tmp_path: Path) -> None:
    """A buried root is at its gone name, may be removed by anyone, and admits no transfer."""
    root = RootDirectory.create("job", tmp_path)
    root.new_transfer()
    before = root.path
    gone = root.bury()
    assert gone.name == f".gone-{before.name}"
    assert not before.exists()
    assert (gone / "transfer-000001").is_dir()
    assert judge(gone).state is State.DEAD
    with pytest.raises(JobClosedError):
        root.new_transfer()
    assert root.bury() == gone == root.path


def test_a_root_that_somebody_removed_closes_and_buries_quietly(tmp_path: Path) -> None:
    """If the directory is gone, transfers raise a closed-job error and burying does not fail."""
    root = RootDirectory.create("job", tmp_path)
    (root.path / ".lease").unlink()
    root.path.rmdir()
    with pytest.raises(JobClosedError, match="gone"):
        root.new_transfer()
    root.bury()


def test_reclaimed_transfers_leave_the_disk_and_give_their_charge_back(tmp_path: Path) -> None:
    """A transfer handed to the janitor vanishes, and only then its callback is called."""
    root = RootDirectory.create("job", tmp_path)
    transfer = root.new_transfer()
    (transfer / "payload.safetensors").write_bytes(b"x" * 5000)
    seen: list[bool] = []
    root.reclaim(transfer, lambda: seen.append(transfer.exists()))
    assert JANITOR.wait(transfer, 30)
    assert seen == [False]
    assert root.path.is_dir()
    root.bury()


def test_a_forked_child_neither_frees_nor_buries(tmp_path: Path) -> None:
    """What a child inherits it cannot remove, rename or fill; the parent's root stays whole."""
    root = RootDirectory.create("job", tmp_path)
    transfer = root.new_transfer()

    def child() -> None:
        root.reclaim(transfer)
        root.touch()
        assert JANITOR.statistics().pending == 0
        assert JANITOR.idle(30)
        for forbidden in (root.bury, root.new_transfer):
            with pytest.raises(UsageError, match="process"):
                forbidden()

    assert in_child(child) == 0
    assert transfer.is_dir()
    assert judge(root.path).state is State.LIVE
    root.bury()


def test_ram_is_refused_warned_about_or_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On tmpfs the setting decides, and both the refusal and the warning name the mount."""
    with tmpfs(tmp_path / "ram") as mount:
        with pytest.raises(ScratchError, match="RAM") as refused:
            RootDirectory.create("job", mount, ram_backed="refuse")
        assert str(mount) in str(refused.value)
        assert list(mount.iterdir()) == []
        with caplog.at_level(logging.WARNING):
            RootDirectory.create("job", mount, ram_backed="allow").bury()
            assert caplog.records == []
            RootDirectory.create("job", mount).bury()
            RootDirectory.create("job", mount).bury()
        assert [str(mount) in record.getMessage() for record in caplog.records] == [True]


def test_a_disk_is_used_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A local disk-backed base logs nothing."""
    root = RootDirectory.create("job", tmp_path)
    if root.filesystem.ram_backed or not root.filesystem.shares_flock:
        root.bury()
        pytest.skip("the temporary directory of this machine is not a local disk")
    root.bury()
    assert caplog.records == []


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    """A typing error in the setting does not count as any of the three."""
    with pytest.raises(UsageError, match="ram_backed"):
        RootDirectory.create("job", tmp_path, ram_backed="warm")  # type: ignore[arg-type]


def test_without_inodes_the_error_says_so_and_nothing_is_left(tmp_path: Path) -> None:
    """A file system out of inodes fails with NoSpaceError naming inodes, for roots and transfers."""
    with tmpfs(tmp_path / "ram", "nr_inodes=4") as mount:
        root = RootDirectory.create("job", mount, ram_backed="allow")
        root.new_transfer()
        with pytest.raises(NoSpaceError, match="inodes") as full:
            root.new_transfer()
        assert full.value.inodes == 0
        before = sorted(mount.iterdir())
        with pytest.raises(NoSpaceError, match="inodes"):
            RootDirectory.create("other", mount, ram_backed="allow")
        assert sorted(mount.iterdir()) == before
        root.bury()


def test_a_full_disk_leaves_no_half_made_root(tmp_path: Path) -> None:
    """If the lease cannot be written, the hidden directory goes away again."""
    with tmpfs(tmp_path / "ram", "size=16k") as mount:
        with (mount / "ballast").open("wb", buffering=0) as ballast:
            assert ballast.write(b"x" * 65536) < 65536
        with pytest.raises(NoSpaceError):
            RootDirectory.create("job", mount, ram_backed="allow")
        assert [entry.name for entry in mount.iterdir()] == ["ballast"]


def test_a_base_that_became_immutable_is_reported_and_keeps_the_root(tmp_path: Path) -> None:
    """Neither making nor burying succeeds; the errors say why, and the root stays live and whole."""
    root = RootDirectory.create("job", tmp_path)
    if subprocess.run(["chattr", "+i", tmp_path], capture_output=True, check=False).returncode:
        root.bury()
        pytest.skip("immutable directories are not possible here")
    try:
        with pytest.raises(ScratchError, match="not permitted"):
            RootDirectory.create("other", tmp_path)
        with pytest.raises(ScratchError, match="not permitted"):
            root.bury()
        assert judge(root.path).state is State.LIVE
        assert root.new_transfer().is_dir()
    finally:
        subprocess.run(["chattr", "-i", tmp_path], check=True)
    assert judge(root.bury()).state is State.DEAD


def test_locks_that_are_not_shared_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a network file system the first root warns that only silence tells the dead; later ones do not."""
    table = tmp_path / "mountinfo"
    kind = f" - {filesystem(tmp_path).kind} ".encode()
    table.write_bytes(Path("/proc/self/mountinfo").read_bytes().replace(kind, b" - nfs4 "))
    monkeypatch.setattr(space, "_TABLE", table)
    base = tmp_path / "share"
    base.mkdir()
    for _ in range(2):
        RootDirectory.create("job", base).bury()
    (record,) = caplog.records
    assert "nfs4" in record.getMessage()
    assert "600 s" in record.getMessage()
