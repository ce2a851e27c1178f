"""Running a job under real signals."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from streamoff.cli.exits import explain
from streamoff.cli.supervise import supervised
from streamoff.errors import InvariantError, QuorumLostError, UsageError

BACKENDS = ("asyncio", "trio")

SCRIPT = """
    import signal
    import sys
    import time
    import anyio
    from streamoff.cli.exits import StoppedError
    from streamoff.cli.supervise import supervised, terminable

    async def job():
        try:
            print("ready", flush=True)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                {cleanup}
            print("clean", flush=True)

    if sys.argv[2:] == ["nohup"]:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminable():
        try:
            supervised(job, backend=sys.argv[1], stopping=lambda: print("stopping", flush=True))
        except StoppedError as stopped:
            sys.exit(128 + stopped.signum)
        except KeyboardInterrupt:
            sys.exit(130)
"""


@contextmanager
def started(backend: str, cleanup: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a job that waits for ever, and go on when it does."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).format(cleanup=cleanup), *backend.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=("SIGHUP", "SIGINT", "SIGTERM"),
)
def test_a_signal_cancels_the_job_and_it_cleans_up(
    backend: str, signum: signal.Signals, code: int
) -> None:
    """The first signal is a cancellation: cleaning up ends before the process does."""
    with started(backend, "await anyio.sleep(0.05)") as process:
        process.send_signal(signum)
        said, _ = process.communicate()
    assert said == "stopping\nclean\n"
    assert process.returncode == code


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=("SIGHUP", "SIGINT", "SIGTERM"),
)
def test_a_second_signal_ends_a_cleanup_that_hangs(
    backend: str, signum: signal.Signals, code: int
) -> None:
    """Whoever does not want to wait for the cleanup says so with a second signal."""
    with started(backend, "print('hanging', flush=True); time.sleep(3600)") as process:
        process.send_signal(signum)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signum)
        process.communicate()
    assert process.returncode == code


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_under_nohup_survives_the_terminal(backend: str) -> None:
    """Whoever ignores SIGHUP before the start, as nohup does, is not stopped by it."""
    with started(f"{backend} nohup", "await anyio.sleep(0)") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_terminal_that_is_gone_does_not_keep_the_job(backend: str) -> None:
    """Saying that the job stops may fail; the job still stops and cleans up."""
    with started(backend, "sys.stderr.write('cleaned')") as process:
        assert process.stdout is not None
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        assert process.stderr.read().startswith("cleaned")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_comes_back(backend: str) -> None:
    """Without a signal the job's result is returned, and its signal handlers are gone."""
    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]

    async def job() -> int:
        return 5

    assert supervised(job, backend=backend, stopping=lambda: None) == 5
    assert [signal.getsignal(number) for number in signals] == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_job_raises_comes_out_as_it_was(backend: str) -> None:
    """A failure is not wrapped into a group of one."""

    async def job() -> int:
        raise QuorumLostError("too few")

    with pytest.raises(QuorumLostError, match="too few"):
        supervised(job, backend=backend, stopping=lambda: None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signal_does_not_hide_that_the_cleanup_failed(backend: str) -> None:
    """A job that fails while it is being stopped has failed."""
    with started(backend, "raise OSError('no')") as process:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 1


def test_sigterm_before_the_loop_runs_ends_with_its_code() -> None:
    """While torch is loading, SIGTERM ends the command with 143 as it does later."""
    script = """
        import os, signal, sys, time
        from streamoff.cli.exits import StoppedError
        from streamoff.cli.supervise import terminable
        try:
            with terminable():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
        except StoppedError as stopped:
            sys.exit(128 + stopped.signum)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert ended.returncode == 143


def test_causes_are_told_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A group is told as its causes; it is a usage error only if all of them are."""
    usage, failed = UsageError("bad", site="site-1"), QuorumLostError("too few")
    assert explain(usage, command="simulate") == 2
    assert capsys.readouterr().err == "streamoff simulate: error: bad [site=site-1]\n"
    group = ExceptionGroup("several", [usage, ExceptionGroup("inner", [failed])])
    assert explain(group, command="simulate") == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("error", [KeyError("x"), InvariantError("impossible")])
def test_a_defect_is_shown_whole(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """What should never happen is told with everything that helps to find it."""
    assert explain(error, command="simulate") == 1
    said = capsys.readouterr().err
    assert type(error).__name__ in said
    assert "error: " not in said.splitlines()[0]
