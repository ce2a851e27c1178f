"""The example programs run as they stand, each in a process of its own, and say what they promise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(scratch: Path, *arguments: str) -> str:
    """Run Python with warnings as errors, scratch in a directory of the test; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=scratch,
        env=os.environ | {"TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr  # a round that is cut may say so in the log
    return done.stdout


def test_there_is_a_test_for_every_example() -> None:
    """An example that nothing runs would rot."""
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["asyncio_controller.py", "test_timeout_and_abort.py", "trio_program.py"]


def test_the_asyncio_controller_runs_its_orders(tmp_path: Path) -> None:
    """One job ends when it is good enough, the other when its time is up, and nothing is left on disk."""
    said = run(tmp_path, str(EXAMPLES / "asyncio_controller.py")).splitlines()
    assert said[:4] == [
        f"good-enough: round {number}, loss {0.5**number:.3f}" for number in range(1, 5)
    ]
    assert "in-time: no time left" in said
    assert "good-enough: weight is near one: True" in said
    assert [path for path in tmp_path.iterdir() if "streamoff" in path.name] == []


def test_the_trio_program_averages_what_it_pulled(tmp_path: Path) -> None:
    """Three of four updates are pulled and averaged by samples; the fourth is declined and never moves."""
    said = run(tmp_path, str(EXAMPLES / "trio_program.py")).splitlines()
    assert sorted(said[:4]) == ["site-0: failed", *(f"site-{n}: completed" for n in (1, 2, 3))]
    assert f"mean {(1 * 10 + 2 * 20 + 3 * 30) / 60:.4f} of 60 samples" in said
    assert "nothing left on disk: True" in said


def test_the_example_tests_pass(tmp_path: Path) -> None:
    """Minutes of timeouts pass on both backends, in a project without any configuration."""
    shutil.copy(EXAMPLES / "test_timeout_and_abort.py", tmp_path)
    said = run(tmp_path, "-m", "pytest", "-q", "--rootdir=.", "-p", "no:asyncio")
    assert "6 passed" in said
