"""Who owns a root, and whether that owner is still there."""

import dataclasses
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamoff.scratch import space
from streamoff.scratch.directory import RootDirectory
from streamoff.scratch.lease import EXPIRY, Lease, Owner, State, claim, judge
from streamoff.scratch.names import LEASE, LEASE_PART, RootName, Stage

from ..disks import tmpfs
from .helpers import in_child, line, process

pytestmark = pytest.mark.core

OWNER = """
import sys
from streamoff.scratch.directory import RootDirectory
root = RootDirectory.create("job", sys.argv[1])
print(root.path, flush=True)
sys.stdin.read()
"""

OWNER_WITH_CHILD = """
import os, sys
from streamoff.scratch.directory import RootDirectory
root = RootDirectory.create("job", sys.argv[1])
reading, writing = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(writing)
    os.setsid()
    print(root.path, os.getpid(), flush=True)
    os.close(1)
    sys.stdin.read()
    os._exit(0)
sys.stdin.close()
os.waitpid(pid, 0)
"""

OWNER_WHOSE_CHILD_UNLOCKS = """
import fcntl, os, sys
from streamoff.scratch.directory import RootDirectory
root = RootDirectory.create("job", sys.argv[1])
if (pid := os.fork()) == 0:
    fcntl.flock(root._lease._fd, fcntl.LOCK_UN)
    os._exit(0)
os.waitpid(pid, 0)
print(root.path, flush=True)
sys.stdin.read()
"""


def lay_root(base: Path, owner: Owner, *, untouched: float = 0.0) -> Path:
    """A root on disk with this owner in its lease, which nobody holds."""
    path = base / str(RootName.fresh("job").at(Stage.PLACED))
    path.mkdir()
    (path / LEASE).write_bytes(owner.record())
    age(path / LEASE, untouched)
    return path


def age(path: Path, seconds: float) -> None:
    """Make a file look untouched for so long."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def gone_owner() -> Owner:
    """The owner of a process that has ended and was waited for."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    pid = child.pid
    child.wait()
    return dataclasses.replace(Owner.current("job"), pid=pid, started=1)


def test_a_root_lives_while_its_owner_does_and_dies_with_it(tmp_path: Path) -> None:
    """Seen from another process, a root is live until its owner is killed, and dead at once then."""
    with process(OWNER, str(tmp_path)) as owner:
        path = Path(line(owner))
        assert judge(path).state is State.LIVE
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        judgement = judge(path)
        assert judgement.state is State.DEAD
        assert judgement.owner is not None
        assert judgement.owner.pid == owner.pid
        assert str(owner.pid) in judgement.reason


def test_an_owner_that_was_killed_and_not_waited_for_is_dead(tmp_path: Path) -> None:
    """A zombie still has its pid and start time, and owns nothing any more."""
    with process(OWNER, str(tmp_path)) as owner:
        path = Path(line(owner))
        os.kill(owner.pid, signal.SIGKILL)
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        assert judge(path).state is State.DEAD


def test_a_forked_child_that_outlives_the_owner_keeps_the_root(tmp_path: Path) -> None:
    """While a child that inherited the lock lives, it may still read the root: nothing is reclaimed."""
    with process(OWNER_WITH_CHILD, str(tmp_path)) as owner:
        path, child = line(owner).rsplit(" ", 1)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert judge(Path(path)).state is State.LIVE
        watch = os.pidfd_open(int(child))
        os.kill(int(child), signal.SIGKILL)
        select.select([watch], [], [])
        os.close(watch)
        assert judge(Path(path)).state is State.DEAD


def test_a_child_that_frees_the_lock_does_not_free_the_root(tmp_path: Path) -> None:
    """With its lock undone by a forked child, a root lives on as long as its owner's process."""
    with process(OWNER_WHOSE_CHILD_UNLOCKS, str(tmp_path)) as owner:
        path = Path(line(owner))
        with (path / LEASE).open("rb") as lease:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        judgement = judge(path)
        assert judgement.state is State.LIVE
        assert "alive" in judgement.reason
        owner.kill()
        owner.wait()
        assert judge(path).state is State.DEAD


def test_a_program_started_by_the_owner_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The lease is closed on exec: a child program that outlives its parent holds no root."""
    lease = Lease.take(tmp_path, "job")
    with subprocess.Popen(["sleep", "60"], close_fds=False) as sleeper:
        lease.release()
        with (tmp_path / LEASE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sleeper.kill()


def test_a_recycled_pid_is_not_the_owner(tmp_path: Path) -> None:
    """A live process with the owner's pid but another start time does not keep the root."""
    me = Owner.current("job")
    assert judge(lay_root(tmp_path, me)).state is State.LIVE
    recycled = dataclasses.replace(me, started=me.started - 1)
    assert judge(lay_root(tmp_path, recycled)).state is State.DEAD


@pytest.mark.parametrize("pid", [2**31 - 1, 2**31, 2**62])
def test_a_pid_that_no_process_can_have_is_gone(tmp_path: Path, pid: int) -> None:
    """Absurd process ids in a lease are dead owners, not errors."""
    owner = dataclasses.replace(Owner.current("job"), pid=pid)
    assert judge(lay_root(tmp_path, owner)).state is State.DEAD


@pytest.mark.parametrize(
    "stranger",
    [
        dataclasses.replace(Owner.current("job"), boot="elsewhere"),
        dataclasses.replace(Owner.current("job"), namespace="elsewhere"),
    ],
)
def test_an_owner_of_another_boot_or_namespace_dies_of_silence_only(
    tmp_path: Path, stranger: Owner
) -> None:
    """Who cannot be asked lives until untouched for ten minutes, whatever its pid means here."""
    assert judge(lay_root(tmp_path, stranger, untouched=EXPIRY - 60)).state is State.LIVE
    silent = judge(lay_root(tmp_path, stranger, untouched=EXPIRY + 60))
    assert silent.state is State.DEAD
    assert silent.age is not None
    assert silent.age > EXPIRY
    ahead = judge(lay_root(tmp_path, stranger, untouched=-3600))
    assert ahead.state is State.LIVE


def test_where_nobody_can_be_asked_silence_decides(tmp_path: Path) -> None:
    """Without a boot id or namespace (no procfs), even equal empty ones, only the touch counts."""
    nowhere = dataclasses.replace(gone_owner(), boot="", namespace="")
    assert judge(lay_root(tmp_path, nowhere)).state is State.LIVE
    assert judge(lay_root(tmp_path, nowhere, untouched=EXPIRY + 60)).state is State.DEAD


def test_a_held_lock_outweighs_every_other_sign(tmp_path: Path) -> None:
    """On a file system that shares locks, a held lease is live however old and strange its record."""
    stranger = dataclasses.replace(gone_owner(), boot="elsewhere")
    path = lay_root(tmp_path, stranger, untouched=10 * EXPIRY)
    with (path / LEASE).open("rb") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        assert judge(path).state is State.LIVE
    assert judge(path).state is State.DEAD


def test_a_lock_that_is_not_shared_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the mount table says network file system, process and touch decide, not the lock."""
    where = space.filesystem(tmp_path)
    table = tmp_path / "mountinfo"
    table.write_bytes(
        Path("/proc/self/mountinfo").read_bytes().replace(f" - {where.kind} ".encode(), b" - nfs4 ")
    )
    monkeypatch.setattr(space, "_TABLE", table)
    assert not space.filesystem(tmp_path).shares_flock
    dead = lay_root(tmp_path, gone_owner())
    stranger = dataclasses.replace(gone_owner(), boot="elsewhere")
    silent = lay_root(tmp_path, stranger, untouched=EXPIRY + 60)
    recent = lay_root(tmp_path, stranger, untouched=EXPIRY - 60)
    mine = lay_root(tmp_path, Owner.current("job"), untouched=EXPIRY + 60)
    for path, state in (
        (dead, State.DEAD),
        (silent, State.DEAD),
        (recent, State.LIVE),
        (mine, State.LIVE),
    ):
        with (path / LEASE).open("rb") as lease:
            fcntl.flock(lease, fcntl.LOCK_EX)
            assert judge(path).state is state


def test_touching_renews_a_lease_through_renames(tmp_path: Path) -> None:
    """A touch reaches the lease after the root was moved."""
    root = RootDirectory.create("job", tmp_path)
    age(root.path / LEASE, 5000)
    root.touch()
    assert time.time() - (root.path / LEASE).stat().st_mtime < 1000
    root.bury()
    root.touch()


def test_a_forked_child_cannot_renew_the_lease(tmp_path: Path) -> None:
    """Only the owner's own touch is a sign of its life."""
    root = RootDirectory.create("job", tmp_path)
    age(root.path / LEASE, 5000)
    assert in_child(root.touch) == 0
    assert time.time() - (root.path / LEASE).stat().st_mtime > 4000
    root.bury()


def test_a_lease_appears_only_locked_and_whole(tmp_path: Path) -> None:
    """Until a lease is held and written it has another name, and a second one is refused."""
    lease = Lease.take(tmp_path, "job ü \U0001f600" * 20)
    owner = Owner.parse((tmp_path / LEASE).read_bytes())
    assert owner == lease.owner == Owner.current("job ü \U0001f600" * 20)
    assert not (tmp_path / LEASE_PART).exists()
    lease.release()
    lease.release()


def test_the_longest_record_fits(tmp_path: Path) -> None:
    """A job id of 255 characters of the widest kind survives the round trip through the lease."""
    root = RootDirectory.create("\U0001f600" * 255, tmp_path)
    owner = judge(root.path).owner
    assert owner is not None
    assert owner.job == root.job
    root.bury()


@pytest.mark.parametrize(
    "record",
    [
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 4096,
        b'{"streamoff": 2, "boot": "b", "namespace": "n", "pid": 1, "started": 1, "job": "j"}',
        b'{"streamoff": 1, "boot": "b", "namespace": "n", "pid": 1, "started": 1}',
        b'{"streamoff": 1, "boot": "b", "namespace": "n", "pid": 0, "started": 1, "job": "j"}',
        b'{"streamoff": 1, "boot": "b", "namespace": "n", "pid": true, "started": 1, "job": "j"}',
        b'{"streamoff": 1, "boot": "b", "namespace": "n", "pid": -9, "started": 1, "job": "j"}',
        b'{"streamoff": 1, "boot": 1, "namespace": "n", "pid": 1, "started": 1, "job": "j"}',
        b'{"streamoff": 1, "boot": "b", "namespace": "n", "pid": 1, "started": 1, "job": "\\u001b["}',
        b'{"streamoff": 1, "boot": "b", "namespace": "n", "pid": 1, "started": 1, "job": "j", "x": 1}',
    ],
)
def test_a_lease_of_another_make_is_foreign(tmp_path: Path, record: bytes) -> None:
    """A directory whose lease says something else, or nothing we understand, is not ours to judge."""
    path = lay_root(tmp_path, gone_owner())
    (path / LEASE).write_bytes(record)
    age(path / LEASE, 10 * EXPIRY)
    assert judge(path).state is State.FOREIGN


@pytest.mark.parametrize("record", [b"", b"\0" * 200])
def test_a_lease_that_a_power_cut_emptied_goes_by_its_age(tmp_path: Path, record: bytes) -> None:
    """An empty or zeroed record is what a machine crash leaves: dead after ten minutes of silence."""
    path = lay_root(tmp_path, gone_owner())
    (path / LEASE).write_bytes(record)
    assert judge(path).state is State.LIVE
    age(path / LEASE, EXPIRY + 60)
    assert judge(path).state is State.DEAD


def test_what_only_looks_like_a_root_is_foreign(tmp_path: Path) -> None:
    """Wrong names, files, links, missing leases and leases that are no files are all not ours."""
    dead = lay_root(tmp_path, gone_owner())
    name = str(RootName.fresh("job").at(Stage.PLACED))

    other = tmp_path / "nvflare_tensor_offload_job_1"
    shutil.copytree(dead, other)
    link = tmp_path / name
    link.symlink_to(dead)
    file = tmp_path / str(RootName.fresh("file").at(Stage.PLACED))
    file.touch()
    bare = tmp_path / str(RootName.fresh("bare").at(Stage.PLACED))
    bare.mkdir()
    for path in (other, link, file, bare, tmp_path / str(RootName.fresh("absent"))):
        assert judge(path).state is State.FOREIGN, path

    lease = dead / LEASE
    elsewhere = tmp_path / "elsewhere"
    lease.rename(elsewhere)
    lease.symlink_to(elsewhere)
    assert judge(dead).state is State.FOREIGN
    lease.unlink()
    os.mkfifo(lease)
    assert judge(dead).state is State.FOREIGN
    lease.unlink()
    lease.mkdir()
    assert judge(dead).state is State.FOREIGN


def test_hidden_roots_without_a_lease_are_judged_by_what_a_crash_can_leave(tmp_path: Path) -> None:
    """Half made or half removed directories are reclaimed, but only ones that hold nothing else."""
    new = tmp_path / str(RootName.fresh("job"))
    new.mkdir()
    (new / LEASE_PART).touch()
    assert judge(new).state is State.LIVE
    age(new, EXPIRY + 60)
    assert judge(new).state is State.DEAD
    gone = tmp_path / str(RootName.fresh("job").at(Stage.GONE))
    gone.mkdir()
    assert judge(gone).state is State.DEAD
    for path in (new, gone):
        (path / "thesis.tex").touch()
        age(path, EXPIRY + 60)
        assert judge(path).state is State.FOREIGN


@pytest.mark.parametrize("part", ["file", "link", "directory"])
def test_a_root_whose_maker_died_is_dead_as_soon_as_it_says_so(tmp_path: Path, part: str) -> None:
    """A half made root tells its maker as soon as that is written: gone, it is dead; alive, or not told, it has time."""
    told = tmp_path / "told"
    for owner, state in ((gone_owner(), State.DEAD), (Owner.current("job"), State.LIVE)):
        new = tmp_path / str(RootName.fresh("job"))
        new.mkdir()
        if part == "file":
            (new / LEASE_PART).write_bytes(owner.record())
        elif part == "link":
            told.write_bytes(owner.record())
            (new / LEASE_PART).symlink_to(told)
        else:
            (new / LEASE_PART).mkdir()
        assert judge(new).state is (state if part == "file" else State.LIVE)
        age(new, EXPIRY + 60)
        assert judge(new).state is State.DEAD


def test_a_buried_root_is_dead_whoever_holds_or_owns_it(tmp_path: Path) -> None:
    """The gone name is the owner's own word: neither its lock nor its life keeps the root."""
    path = lay_root(tmp_path, Owner.current("job"))
    gone = path.rename(path.with_name(f".gone-{path.name}"))
    with (gone / LEASE).open("rb") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        assert judge(gone).state is State.DEAD


def test_claims_exclude_each_other_and_looking_excludes_nobody_who_looks(tmp_path: Path) -> None:
    """One exclusive claim at a time finds a dead root dead; any number of shared ones do."""
    path = lay_root(tmp_path, gone_owner())
    with claim(path) as first:
        assert first.judgement.state is State.DEAD
        assert judge(path).state is State.LIVE
    with claim(path, exclusive=False) as looker:
        assert looker.judgement.state is State.DEAD
        assert judge(path).state is State.DEAD


def test_a_root_of_another_user_is_foreign(tmp_path: Path) -> None:
    """An unprivileged user neither judges nor claims what belongs to somebody else."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    path = lay_root(tmp_path, gone_owner())
    path.chmod(0o755)
    tmp_path.chmod(0o755)

    def child() -> None:
        os.chdir(tmp_path)  # so that the directories above need not be open to everybody
        os.setuid(65534)
        assert judge(Path(path.name)).state is State.FOREIGN

    assert in_child(child) == 0
    assert judge(path).state is State.DEAD


def test_another_pid_namespace_does_not_take_a_dead_pid_for_a_dead_owner(tmp_path: Path) -> None:
    """Inside a container that shares the directory, a live root outside stays live, lock or not."""
    path = lay_root(tmp_path, Owner.current("job"))
    script = (
        "import sys; from pathlib import Path; from streamoff.scratch.lease import judge;"
        "print(judge(Path(sys.argv[1])).state)"
    )
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script]
    inside = subprocess.run([*unshare, str(path)], capture_output=True, text=True, check=False)
    if "unshare" in inside.stderr:
        pytest.skip("a pid namespace is not allowed here")
    assert inside.stdout.strip() == "live"


def test_a_full_disk_still_judges(tmp_path: Path) -> None:
    """Reading the file system's clock needs no room: silence is judged on a full disk, too."""
    stranger = dataclasses.replace(gone_owner(), boot="elsewhere")
    with tmpfs(tmp_path / "ram", "size=16k,nr_inodes=4") as mount:
        path = lay_root(mount, stranger, untouched=EXPIRY + 60)
        (mount / "ballast").touch()
        assert space.free_inodes(mount) == 0
        assert judge(path).state is State.DEAD
