"""Forked children of the harness: it loads everything once, runs no thread, and forks what it kills."""

import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.crash.moments import Moment

__all__ = ["Child", "Pipe"]

PATIENCE: Final = 60.0
"""Real seconds until a child that should have ended is a failure."""


class Child:
    """A forked process that runs one call.

    Args:
        call: What it does; the process ends with 0 when it returns, and with 1 and a traceback when it raises.
        moment: When it is killed; None: it ends by itself.
        scratch: Where its operations are counted.
    """

    def __init__(
        self, call: Callable[[], object], moment: Moment | None = None, scratch: Path | None = None
    ) -> None:
        self._moment = moment
        self._begun = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                if moment is not None and scratch is not None:
                    moment.arm(scratch)
                call()
                code = 0
            except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as its parent
                traceback.print_exc()
            finally:
                os._exit(code)
        self._fd = os.pidfd_open(self.pid)

    def wait(self) -> int:
        """Wait until it has ended, killing it if it is time; its exit code, negative for a signal."""
        if self._moment is not None and not self._moment.operation:
            time.sleep(max(0.0, self._begun + self._moment.seconds - time.monotonic()))
            self.kill()
        if not select.select([self._fd], [], [], PATIENCE)[0]:
            self.kill()
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


class Pipe:
    """A pipe on which a child says something; the other end is closed when all who have it are gone."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()

    def line(self) -> str:
        """What it says, without the end of the line; empty if it is gone."""
        said = b""
        while not said.endswith(b"\n") and (more := os.read(self.out, 256)):
            said += more
        return said.decode().strip()

    def close_mine(self) -> None:
        """Leave the writing to the children."""
        os.close(self.into)

    def wait_closed(self) -> None:
        """Wait until nobody is left who could say anything."""
        while os.read(self.out, 256):
            pass
        os.close(self.out)
