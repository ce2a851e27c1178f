"""Real faults for the scratch tests: child processes."""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def in_child(function: Callable[[], None]) -> int:
    """Run a function in a forked child and return its exit code: 0 if it returned."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:  # noqa: BLE001  whatever it is, the child must not run the tests
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def process(script: str, *args: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a Python script as a child with pipes; it is killed at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: "subprocess.Popen[str]") -> str:
    """The next line that a child prints; an error if it ended instead."""
    assert child.stdout is not None
    text = child.stdout.readline()
    assert text, "the child ended early"
    return text.strip()
