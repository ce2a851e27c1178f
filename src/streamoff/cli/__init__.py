"""The command ``streamoff``.

Only ``streamoff simulate`` loads torch, and only when its arguments are right: the parser, ``scratch`` and
``inspect`` answer at once.
"""

import os
import signal
import sys
from collections.abc import Sequence

from streamoff.cli.exits import ExitCode, StoppedError, explain
from streamoff.cli.parser import build_parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        An :class:`~streamoff.cli.exits.ExitCode`, or 128 and the number of a signal that stopped it.

    Raises:
        SystemExit: The arguments do not parse (2), or only help or the version was wanted (0).
    """
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be said, also not at the last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except StoppedError as stopped:
        return 128 + stopped.signum
    except Exception as error:  # noqa: BLE001  the last word about any failure
        return explain(error, command=args.command)
    return code
