"""Removing directories while others add to them, and never anything else."""

import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from streamoff.scratch.names import LEASE
from streamoff.scratch.removal import MAX_DEPTH, measure, remove

from ..disks import tmpfs
from .helpers import in_child

pytestmark = pytest.mark.core


def fill(directory: Path, files: int = 3) -> None:
    """A tree of two levels with some bytes in it."""
    for name in ("transfer-000001", "transfer-000002"):
        (directory / name).mkdir(parents=True)
        for n in range(files):
            (directory / name / f"{n}.safetensors").write_bytes(b"x" * 4096)
    (directory / LEASE).write_bytes(b"lease")


def test_a_tree_is_removed_and_accounted_for(tmp_path: Path) -> None:
    """Everything goes, and the result says how many entries and how much disk space that was."""
    tree = tmp_path / "tree"
    fill(tree)
    descriptor = os.open(tree, os.O_RDONLY)
    usage = measure(descriptor)
    os.close(descriptor)
    done = remove(tree)
    assert done.error is None
    assert not tree.exists()
    assert done.entries == usage.entries + 1 == 10
    assert done.nbytes >= 6 * 4096


def test_what_is_not_there_is_removed(tmp_path: Path) -> None:
    """A directory that somebody else removed is a success without entries."""
    done = remove(tmp_path / "absent")
    assert (done.error, done.entries, done.nbytes) == (None, 0, 0)


def test_links_in_the_tree_are_removed_and_not_followed(tmp_path: Path) -> None:
    """A symbolic link to a file or directory outside goes; what it points to stays."""
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.tex").write_text("precious")
    tree.mkdir()
    (tree / "directory").symlink_to(outside)
    (tree / "file").symlink_to(outside / "thesis.tex")
    (tree / "dangling").symlink_to("nowhere")
    (tree / LEASE).symlink_to(outside / "thesis.tex")
    assert remove(tree).error is None
    assert not tree.exists()
    assert (outside / "thesis.tex").read_text() == "precious"


def test_a_link_or_file_in_place_of_the_tree_is_left(tmp_path: Path) -> None:
    """Only a directory is removed; anything else under that name is reported and stays."""
    outside = tmp_path / "outside"
    fill(outside)
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(outside)
    file.touch()
    assert remove(link).error is not None
    assert remove(file).error is not None
    assert link.is_symlink()
    assert file.is_file()
    assert (outside / LEASE).exists()


def test_space_of_a_file_that_lives_on_elsewhere_is_not_counted(tmp_path: Path) -> None:
    """Unlinking one of two links frees nothing, and says so."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tmp_path / "kept").write_bytes(b"x" * 100_000)
    os.link(tmp_path / "kept", tree / "payload.safetensors")
    done = remove(tree)
    assert (done.error, done.entries, done.nbytes) == (None, 2, 0)
    assert (tmp_path / "kept").stat().st_size == 100_000


def test_another_file_system_inside_is_not_emptied(tmp_path: Path) -> None:
    """A mount below the tree keeps its files; the rest goes, except the lease that says whose it is."""
    tree = tmp_path / "tree"
    fill(tree)
    with tmpfs(tree / "mounted") as mount:
        (mount / "thesis.tex").touch()
        done = remove(tree)
        assert done.error is not None
        assert "mounted" in done.error
        assert sorted(entry.name for entry in tree.iterdir()) == [LEASE, "mounted"]
        assert (mount / "thesis.tex").exists()
    assert remove(tree).error is None


def test_depth_is_bounded_and_what_is_deeper_is_reported(tmp_path: Path) -> None:
    """A tree nested as deep as the bound goes; one level more is an error and not a crash."""
    tree = tmp_path / "tree"
    deep = tree
    for _ in range(MAX_DEPTH - 1):
        deep /= "d"
    deep.mkdir(parents=True)
    assert remove(tree).error is None
    (deep / "d").mkdir(parents=True)
    done = remove(tree)
    assert done.error is not None
    assert str(MAX_DEPTH) in done.error
    shutil.rmtree(tree)


def test_the_descriptors_of_a_removal_are_bounded_by_its_depth(tmp_path: Path) -> None:
    """Thousands of entries are removed with a handful of descriptors."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for n in range(1000):
        (tree / f"{n}").mkdir()

    def child() -> None:
        highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 6, highest + 6))
        assert remove(tree).error is None

    assert in_child(child) == 0
    assert not tree.exists()


def test_concurrent_additions_and_removals_are_survived(tmp_path: Path) -> None:
    """With one thread adding and one removing meanwhile, the tree is gone once they stop."""
    tree = tmp_path / "tree"
    fill(tree, files=50)
    payloads = sorted(tree.glob("*/*.safetensors"))
    started = threading.Barrier(3)

    def add() -> None:
        started.wait()
        for n in range(300):
            try:
                (tree / f"late-{n % 7}").mkdir(exist_ok=True)
                (tree / f"late-{n % 7}" / f"{n}").touch()
            except (FileExistsError, FileNotFoundError, NotADirectoryError):
                continue

    def steal() -> None:
        started.wait()
        for path in payloads:
            path.unlink(missing_ok=True)

    threads = [threading.Thread(target=add), threading.Thread(target=steal)]
    for thread in threads:
        thread.start()
    started.wait()
    remove(tree)
    for thread in threads:
        thread.join()
    assert remove(tree).error is None
    assert not tree.exists()


def test_retries_end_in_an_error_that_names_the_obstacle(tmp_path: Path) -> None:
    """A directory that stays busy is tried again a counted number of times, then reported."""
    tree, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    fill(tree)
    elsewhere.mkdir()
    busy = tree / "busy"
    busy.mkdir()
    mount = ["mount", "--bind", str(elsewhere), str(busy)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a bind mount is not allowed here")
    try:
        done = remove(tree)
    finally:
        subprocess.run(["umount", str(busy)], check=True)
    assert done.error is not None
    assert "busy" in done.error
    assert sorted(entry.name for entry in tree.iterdir()) == [LEASE, "busy"]
    assert remove(tree).error is None


def test_an_obstacle_does_not_keep_the_rest(tmp_path: Path) -> None:
    """An entry that cannot be removed is reported; everything else and its disk space go."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    tree = tmp_path / "tree"
    fill(tree)
    tmp_path.chmod(0o755)
    for path in (tree, *tree.iterdir()):
        os.chown(path, 65534, 65534)
    os.chown(tree / "transfer-000001", 0, 0)

    def child() -> None:
        os.chdir(tmp_path)
        os.setuid(65534)
        done = remove(Path("tree"))
        assert done.error is not None
        assert "ermission denied" in done.error
        assert done.entries == 4

    assert in_child(child) == 0
    assert sorted(path.name for path in tree.iterdir()) == [LEASE, "transfer-000001"]
