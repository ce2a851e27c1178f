"""Reclaiming what crashed owners left, and nothing else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamoff.errors import ScratchError
from streamoff.scratch.directory import RootDirectory
from streamoff.scratch.lease import State, judge
from streamoff.scratch.names import LEASE, RootName, Stage
from streamoff.scratch.reaper import reclaim, survey

from ..disks import tmpfs
from .helpers import line, process

pytestmark = pytest.mark.core

OWNER = """
import sys
from streamoff.scratch.directory import RootDirectory
for n in range(int(sys.argv[2])):
    root = RootDirectory.create(f"job-{n}", sys.argv[1])
    for m in range(3):
        (root.new_transfer() / "payload.safetensors").write_bytes(b"x" * 65536)
    print(root.path, flush=True)
sys.stdin.read()
"""

REAPER = """
import sys
from streamoff.scratch.reaper import reclaim
print("ready", flush=True)
sys.stdin.readline()
report = reclaim(sys.argv[1])
print(report.entries, len(report.kept), len(report.failed), flush=True)
"""


def crash(base: Path, roots: int = 1) -> list[Path]:
    """Roots with files in them, whose owner was killed."""
    with process(OWNER, str(base), str(roots)) as owner:
        paths = [Path(line(owner)) for _ in range(roots)]
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    return paths


def test_what_a_killed_owner_left_is_reclaimed_and_its_neighbours_are_not(tmp_path: Path) -> None:
    """One pass removes the roots of a killed process and touches no live one, here or elsewhere."""
    dead = crash(tmp_path, 3)
    mine = RootDirectory.create("mine", tmp_path)
    transfer = mine.new_transfer()
    with process(OWNER, str(tmp_path), "1") as neighbour:
        live = Path(line(neighbour))
        before = sorted(live.rglob("*"))
        report = reclaim(tmp_path)
        assert sorted(live.rglob("*")) == before
    assert sorted(report.removed) == sorted(dead)
    assert sorted(report.kept) == sorted([live, mine.path])
    assert report.failed == ()
    assert report.entries == 3 * (3 * 2 + 2)
    assert report.nbytes >= 3 * 3 * 65536
    assert transfer.is_dir()
    assert not any(path.exists() for path in dead)
    mine.bury()


def test_a_survey_says_what_there_is_and_changes_nothing(tmp_path: Path) -> None:
    """Each root is listed with its job, owner, state and disk space; the directory stays as it was."""
    (dead,) = crash(tmp_path)
    mine = RootDirectory.create("job/ü", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = {status.path: status for status in survey(tmp_path)}
    assert sorted(tmp_path.rglob("*")) == before
    assert list(found) == sorted([dead, mine.path])
    assert found[dead].judgement.state is State.DEAD
    assert found[dead].job == "job-0"
    assert found[dead].usage.entries == 7
    assert found[dead].usage.nbytes >= 3 * 65536
    assert found[mine.path].judgement.state is State.LIVE
    assert found[mine.path].job == "job/ü"
    owner = found[mine.path].judgement.owner
    assert owner is not None
    assert owner.pid == os.getpid()
    mine.bury()


def test_two_reapers_at_once_remove_everything_once(tmp_path: Path) -> None:
    """Two processes reclaiming the same place at the same time both succeed and count nothing twice."""
    dead = crash(tmp_path, 30)
    with process(REAPER, str(tmp_path)) as one, process(REAPER, str(tmp_path)) as two:
        for reaper in (one, two):
            assert line(reaper) == "ready"
        for reaper in (one, two):
            assert reaper.stdin is not None
            reaper.stdin.write("\n")
            reaper.stdin.flush()
        results = [[int(number) for number in line(reaper).split()] for reaper in (one, two)]
    assert list(tmp_path.iterdir()) == []
    assert sum(entries for entries, _, _ in results) == len(dead) * (3 * 2 + 2)
    assert [failed for _, _, failed in results] == [0, 0]


def test_a_reaper_that_was_killed_half_way_is_no_obstacle(tmp_path: Path) -> None:
    """What is already at its gone name, with or without its lease, the next pass finishes."""
    first, second = crash(tmp_path, 2)
    gone = [path.rename(path.with_name(f".gone-{path.name}")) for path in (first, second)]
    for transfer in list(gone[1].glob("transfer-*")):
        (transfer / "payload.safetensors").unlink()
        transfer.rmdir()
    (gone[1] / LEASE).unlink()
    assert sorted(reclaim(tmp_path).removed) == sorted(gone)
    assert list(tmp_path.iterdir()) == []


def test_foreign_directories_and_traps_are_left_untouched(tmp_path: Path) -> None:
    """Other programs' directories, roots without a lease, and links dressed as roots all stay."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.tex").write_text("precious")
    base = tmp_path / "base"
    base.mkdir()
    (dead,) = crash(base)
    (dead / "trap").symlink_to(outside)
    (dead / "transfer-000001" / "trap").symlink_to(outside / "thesis.tex")
    (base / "nvflare_tensor_offload_job_x").mkdir()
    (base / "streamoff_tensor_offload_notes").mkdir()
    leaseless = base / str(RootName.fresh("bare").at(Stage.PLACED))
    leaseless.mkdir()
    (leaseless / "data").touch()
    link = base / str(RootName.fresh("link").at(Stage.GONE))
    link.symlink_to(outside)
    (base / str(RootName.fresh("file").at(Stage.GONE))).touch()
    before = {path for path in base.rglob("*") if dead not in (path, *path.parents)}
    report = reclaim(base)
    assert report.removed == (dead,)
    assert set(base.rglob("*")) == before
    assert (outside / "thesis.tex").read_text() == "precious"
    assert {link, leaseless} <= set(report.kept)


def test_a_lease_swapped_for_a_link_makes_a_root_foreign(tmp_path: Path) -> None:
    """A lease that points elsewhere is not read, and nothing is removed on its word."""
    one, two = crash(tmp_path, 2)
    (one / LEASE).unlink()
    (one / LEASE).symlink_to(two / LEASE)
    report = reclaim(tmp_path)
    assert report.removed == (two,)
    assert report.kept == (one,)


def test_what_resists_is_reported_and_tried_again(tmp_path: Path) -> None:
    """A dead root with a mount in it fails with the reason, under its gone name; later it goes."""
    (dead,) = crash(tmp_path)
    with tmpfs(dead / "mounted") as mount:
        (mount / "thesis.tex").touch()
        report = reclaim(tmp_path)
        assert report.removed == ()
        (failure,) = report.failed
        assert failure.path == dead.with_name(f".gone-{dead.name}")
        assert "mounted" in failure.reason
        assert judge(failure.path).state is State.DEAD
        assert (failure.path / "mounted" / "thesis.tex").exists()
        subprocess.run(["umount", str(failure.path / "mounted")], check=True)
        assert reclaim(tmp_path).removed == (failure.path,)


def test_a_base_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """Surveying or reclaiming a directory that does not exist says so."""
    for work in (survey, reclaim):
        with pytest.raises(ScratchError, match="absent"):
            work(tmp_path / "absent")


def test_an_empty_base_is_an_empty_report(tmp_path: Path) -> None:
    """With nothing to do, nothing is reported and no error raised."""
    assert survey(tmp_path) == ()
    report = reclaim(tmp_path)
    assert (report.removed, report.kept, report.failed) == ((), (), ())
    assert (report.entries, report.nbytes) == (0, 0)


def test_a_base_that_cannot_be_changed_is_reported_and_survives(tmp_path: Path) -> None:
    """On a file system that became read-only, dead roots are failures and not exceptions."""
    with tmpfs(tmp_path / "ram") as mount:
        (dead,) = crash(mount)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        report = reclaim(mount)
        assert [failure.path for failure in report.failed] == [dead]
        assert "Read-only" in report.failed[0].reason
        assert survey(mount)[0].judgement.state is State.DEAD


def test_an_owner_is_not_reaped_while_it_makes_its_root(tmp_path: Path) -> None:
    """A reaper that runs all the while owners make, fill and bury roots never breaks one."""
    script = (
        "import sys; from streamoff.scratch.directory import RootDirectory\n"
        "from streamoff.scratch.janitor import JANITOR\n"
        "for n in range(60):\n"
        "    root = RootDirectory.create(f'job-{n}', sys.argv[1])\n"
        "    (root.new_transfer() / 'payload.safetensors').write_bytes(b'x' * 100)\n"
        "    root.touch()\n"
        "    assert root.path.is_dir()\n"
        "    JANITOR.reclaim(root.bury())\n"
        "assert JANITOR.idle(60)\n"
        "print(JANITOR.statistics().failed)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        while owner.poll() is None:
            assert reclaim(tmp_path).failed == ()
        assert owner.stdout is not None
        assert owner.stdout.read().strip() == "0"
        assert owner.returncode == 0
    assert list(tmp_path.iterdir()) == []
