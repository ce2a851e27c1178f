"""Owners that are killed: the next start, or the command, removes what they left, and nothing else."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamoff.scratch.lease import EXPIRY

REPOSITORY = Path(__file__).parents[2]

OWNER = """
import os, sys, anyio
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job

async def main():
    async with BaseEndpoint("owner") as endpoint, open_job("dead", endpoint, scratch=sys.argv[1]) as job:
        (job.path / "landed").write_bytes(bytes(100_000))
        print(os.getpid(), flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@contextmanager
def owner(
    scratch: Path, *wrapped: str, code: str = OWNER
) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A process with an open job, and the process id that it knows itself by; killed at the end."""
    command = [*wrapped, sys.executable, "-c", code, str(scratch)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if wrapped and not said:
                pytest.skip(f"{wrapped[0]} is not allowed here")
            yield process, int(said)
        finally:
            process.kill()


def scratch_command(action: str, scratch: Path) -> list[dict[str, str]] | dict[str, list[str]]:
    """What ``streamoff scratch`` says as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "streamoff", "scratch", action, "--json", "--scratch", str(scratch)],
        capture_output=True,
        text=True,
        check=True,
    )
    said: list[dict[str, str]] | dict[str, list[str]] = json.loads(done.stdout)
    return said


def states(scratch: Path) -> list[str]:
    """How the roots of a directory are listed."""
    listed = scratch_command("ls", scratch)
    assert isinstance(listed, list)
    return [root["state"] for root in listed]


def collect(scratch: Path) -> int:
    """How many roots the command removes."""
    report = scratch_command("gc", scratch)
    assert isinstance(report, dict)
    return len(report["removed"])


def test_real_jobs_killed_at_random_moments_leave_nothing() -> None:
    """Jobs, reapers and owners of forked children die at drawn moments; after each next start not a byte is left."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash", "--kills", "6", "--seed", "4"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["kills"] >= 6
    assert summary["roots"] > 0
    assert (summary["left_bytes"], summary["left_entries"]) == (0, 0)


@contextmanager
def process_with(pid: int) -> Iterator[None]:
    """Another process that has a certain id, as if the kernel had come round to it."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(50):
        try:
            last.write_text(str(pid - 1), encoding="ascii")
        except OSError:
            break
        with subprocess.Popen(["sleep", "60"]) as other:
            try:
                if other.pid == pid:  # nobody else was faster
                    yield
                    return
            finally:
                other.kill()
    pytest.skip("process ids cannot be chosen here")


def test_a_recycled_pid_does_not_keep_a_dead_root(tmp_path: Path) -> None:
    """When another process has got the process id of a killed owner, the root is dead all the same."""
    with owner(tmp_path) as (process, pid):
        process.kill()
        process.wait()
    with process_with(pid):
        assert states(tmp_path) == ["dead"]
        assert collect(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_owners_in_another_container_are_told_by_their_silence(tmp_path: Path) -> None:
    """A root of another pid namespace is live while its owner lives, and ten minutes longer when it was killed."""
    with owner(tmp_path, "unshare", "--pid", "--fork", "--kill-child") as (process, pid):
        assert pid == 1  # which is somebody else here
        assert states(tmp_path) == ["live"]
        assert collect(tmp_path) == 0
        process.kill()
        process.wait()
    [root] = tmp_path.iterdir()
    assert collect(tmp_path) == 0
    then = time.time() - EXPIRY - 1
    os.utime(root / ".lease", (then, then))
    assert collect(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
