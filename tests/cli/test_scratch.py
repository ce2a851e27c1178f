"""``streamoff scratch``."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from streamoff.cli import main
from streamoff.scratch.directory import RootDirectory


def crash(base: Path, job: str) -> None:
    """Let a process make a root with 1 MiB in it and be killed."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from streamoff.scratch.directory import RootDirectory
        root = RootDirectory.create(sys.argv[2], Path(sys.argv[1]))
        (root.new_transfer() / "payload").write_bytes(b"x" * 2**20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(base), job], check=False
    )
    assert ended.returncode == -9


def test_roots_are_listed_with_their_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The listing tells a live root from a crashed one, with job, size and reason."""
    assert main(["scratch", "ls", "--scratch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no job roots\n"
    crash(tmp_path, "crashed")
    root = RootDirectory.create("running", tmp_path)
    try:
        assert main(["scratch", "ls", "--scratch", str(tmp_path)]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.split() == ["state", "job", "age", "size", "entries", "path", "why"]
        assert sorted(line.split()[:2] for line in lines) == [
            ["dead", "crashed"],
            ["live", "running"],
        ]
        assert main(["scratch", "ls", "--json", "--scratch", str(tmp_path)]) == 0
        found = {item["job"]: item for item in json.loads(capsys.readouterr().out)}
        assert found["crashed"]["state"] == "dead"
        assert found["crashed"]["bytes"] >= 2**20
        assert found["running"]["path"] == str(root.path)
    finally:
        root.bury()


def test_only_dead_roots_are_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Collecting removes what a crash left, says how much it was, and leaves the rest alone."""
    crash(tmp_path, "crashed")
    (tmp_path / "foreign").mkdir()
    root = RootDirectory.create("running", tmp_path)
    try:
        assert main(["scratch", "gc", "--scratch", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "1 removed (1.0 MiB), 1 kept, 0 failed" in printed
        assert root.path.is_dir()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["foreign", root.path.name]
        )
        assert main(["scratch", "gc", "--json", "--scratch", str(tmp_path)]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "removed": [],
            "kept": [str(root.path)],
            "failed": [],
            "entries": 0,
            "bytes": 0,
        }
    finally:
        root.bury()


def test_a_missing_directory_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to list where there is no directory, and it is not made."""
    assert main(["scratch", "ls", "--scratch", str(tmp_path / "missing")]) == 1
    assert "no scratch directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
