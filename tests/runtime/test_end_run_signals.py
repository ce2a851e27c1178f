"""Jobs of real processes under signals: the first one ends them in order, a second one at once."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job

pytestmark = pytest.mark.real_time

BACKENDS = ("asyncio", "trio")

PROCESS = """
import signal, sys
import anyio
from streamoff.machines.job_root import JobRootState
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job

backend, scratch, where, how = sys.argv[1:]

def say(what):
    print(what, flush=True)

async def consumer(job):
    try:
        if where == "body":  # no signal before: trio may strike a task that has hardly begun
            say("in the body")
        while job.state is JobRootState.OPEN:
            await anyio.sleep(0.001)
        say("draining")
        await anyio.wait_readable(sys.stdin)  # the signal has been sent by then
        say("finished")
    except KeyboardInterrupt:  # trio raises it wherever the main thread is
        say("finished")
        raise

async def body(job):
    (job.path / "landed").write_bytes(bytes(100_000))
    job.start(consumer, job)
    if where == "body":
        await anyio.sleep_forever()

async def controller(endpoint, *, task_status):
    async with open_job("job", endpoint, scratch=scratch, drain_window=60) as job:
        await body(job)
        task_status.started()
        await job.closed.wait()

async def closing():
    async with anyio.create_task_group() as group:
        async with BaseEndpoint("owner") as endpoint:
            await group.start(controller, endpoint)

async def leaving():
    async with BaseEndpoint("owner") as endpoint, open_job("job", endpoint, scratch=scratch, drain_window=60) as job:
        await body(job)

async def stopped_by_sigterm():
    async with anyio.create_task_group() as group:
        group.start_soon(listen, group.cancel_scope)
        await leaving()
        group.cancel_scope.cancel()

async def listen(scope):
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()

main = {"closing": closing, "sigterm": stopped_by_sigterm}.get(how, leaving)
try:
    anyio.run(main, backend=backend)
except* KeyboardInterrupt:
    say("interrupted")
say("over")
"""


def names(path: Path) -> list[str]:
    """What is in a directory."""
    return [item.name for item in path.iterdir()]


@contextmanager
def started(
    backend: str, scratch: Path, where: str, how: str = "leaving"
) -> Iterator["subprocess.Popen[str]"]:
    """A process with a job in some state; it is killed at the end of the block."""
    command = [sys.executable, "-c", PROCESS, backend, str(scratch), where, how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            first = "in the body\n" if where == "body" else "draining\n"
            assert process.stdout.readline() == first
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("where", "how"), [("body", "leaving"), ("drain", "leaving"), ("drain", "closing")]
)
def test_an_interrupt_ends_a_job_in_order(
    tmp_path: Path, backend: str, where: str, how: str
) -> None:
    """Ctrl-C in the body, in the drain or while the endpoint closes: consumers finish, the root goes, then it is raised."""
    with started(backend, tmp_path, where, how) as process:
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate("go on\n")
    assert said.splitlines()[-3:] == ["finished", "interrupted", "over"]
    assert (process.returncode, errors) == (0, "")
    assert names(tmp_path) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["body", "drain"])
def test_a_handled_sigterm_ends_a_job_in_order(tmp_path: Path, backend: str, where: str) -> None:
    """SIGTERM that a program turns into a cancellation leaves the window and nothing else."""
    with started(backend, tmp_path, where, "sigterm") as process:
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate("go on\n")
    assert said.splitlines()[-2:] == ["finished", "over"]
    assert (process.returncode, errors) == (0, "")
    assert names(tmp_path) == []


def test_trio_keeps_the_window_however_often_it_is_interrupted(tmp_path: Path) -> None:
    """Where the event loop holds an interrupt back until its tasks have ended, a second one changes nothing."""
    with started("trio", tmp_path, "drain") as process:
        for _ in range(3):
            time.sleep(0.05)  # not while it says something
            process.send_signal(signal.SIGINT)
        said, errors = process.communicate("go on\n")
    assert said.splitlines()[-3:] == ["finished", "interrupted", "over"]
    assert (process.returncode, errors) == (0, "")
    assert names(tmp_path) == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)  # of the job that cleans up
@pytest.mark.parametrize(
    ("backend", "signum"),
    [("asyncio", signal.SIGINT), ("asyncio", signal.SIGTERM), ("trio", signal.SIGTERM)],
    ids=str,
)
async def test_a_process_that_ends_at_once_leaves_a_dead_root(
    tmp_path: Path, backend: str, signum: signal.Signals
) -> None:
    """A second Ctrl-C on asyncio, or a SIGTERM that nobody handles, skips the window; the next job removes what is left."""
    with started(backend, tmp_path, "drain") as process:
        process.send_signal(signum)
        while process.poll() is None:
            await anyio.sleep(0.05)
            process.send_signal(signum)
    async with (
        BaseEndpoint("next") as endpoint,
        open_job("next", endpoint, scratch=tmp_path) as job,
    ):
        with anyio.fail_after(30):
            while names(tmp_path) != [job.path.name]:  # noqa: ASYNC110 - another thread removes it
                await anyio.sleep(0.01)
    assert names(tmp_path) == []
