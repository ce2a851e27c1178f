"""What the exit code says, and what is said before."""

import signal
import sys
import traceback
from collections.abc import Iterator
from enum import IntEnum

from streamoff.errors import InvariantError, StreamoffError, UsageError

__all__ = ["ExitCode", "StoppedError", "explain"]


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    """The job failed, or a file is not what it should be."""
    USAGE = 2
    """The arguments are wrong; nothing was started."""
    HUNG_UP = 128 + signal.SIGHUP
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


class StoppedError(Exception):
    """A signal stopped the command after everything was cleaned up.

    Args:
        signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def explain(error: Exception, *, command: str) -> ExitCode:
    """Say on stderr why a command failed, one line per cause, and choose its exit code.

    What is expected to go wrong is said in words; anything else is a defect and shows its traceback.
    """
    causes = list(_leaves(error))
    for cause in causes:
        if isinstance(cause, InvariantError) or not isinstance(cause, (StreamoffError, OSError)):
            traceback.print_exception(cause, file=sys.stderr)
        else:
            sys.stderr.write(f"streamoff {command}: error: {cause}\n")
    usage = all(isinstance(cause, UsageError) for cause in causes)
    return ExitCode.USAGE if usage else ExitCode.FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
