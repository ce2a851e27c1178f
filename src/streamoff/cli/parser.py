"""The arguments of every command."""

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

from streamoff.errors import UsageError
from streamoff.sim.config import AGGREGATIONS, BACKENDS, PAGE_CACHES, RECIPES, TASKS
from streamoff.sim.sizes import parse_size

__all__ = ["build_parser"]

_EXITS: Final = """\
exit codes: 0 done; 1 the job failed; 2 the arguments are wrong and nothing was started;
129 hung up (SIGHUP); 130 interrupted (SIGINT); 143 terminated (SIGTERM)
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each command stores what to call as ``run``."""
    parser = argparse.ArgumentParser(
        prog="streamoff",
        description="Federated aggregation in bounded memory.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamoff {version('streamoff')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_simulate(commands)
    _add_scratch(commands)
    _add_inspect(commands)
    _add_certs(commands)
    return parser


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "simulate",
        help="run a recipe with many sites in one event loop",
        description="Run a recipe with many sites in one event loop and publish its model.",
        epilog="A first SIGINT, SIGTERM or SIGHUP stops the job and cleans up; a second one leaves at once.\n"
        + _EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    job = parser.add_argument_group("job")
    job.add_argument("--recipe", choices=RECIPES, default="fedavg", help="default: %(default)s")
    job.add_argument("--sites", type=int, default=8, metavar="N", help="default: %(default)s")
    job.add_argument("--rounds", type=int, default=5, metavar="R", help="default: %(default)s")
    job.add_argument(
        "--min-responses",
        type=int,
        metavar="K",
        help="contributions that close a round; default: all",
    )
    job.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="land contributions on disk instead of in memory; default: --no-offload",
    )
    job.add_argument(
        "--aggregation", choices=AGGREGATIONS, default="columnar", help="default: %(default)s"
    )
    job.add_argument("--backend", choices=BACKENDS, default="asyncio", help="default: %(default)s")
    job.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of everything random; default: %(default)s",
    )
    _add_task(parser)
    files = parser.add_argument_group("files")
    _add_scratch_directory(files)
    files.add_argument(
        "--durable",
        action="store_true",
        help="wait until what is written is on stable storage",
    )
    files.add_argument(
        "--page-cache",
        choices=PAGE_CACHES,
        default="keep",
        help="drop: keep landed updates and models out of the page cache, for small memory limits;"
        " default: %(default)s",
    )
    files.add_argument(
        "--output",
        type=Path,
        default=Path("model.safetensors"),
        metavar="FILE",
        help="the final model, replaced in one step; default: %(default)s",
    )
    files.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, too")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.set_defaults(run=_simulate)


def _add_task(parser: argparse.ArgumentParser) -> None:
    task = parser.add_argument_group(
        "task",
        "digits trains a small network on scikit-learn's handwritten digits, unevenly spread over the"
        " sites. checkpoint moves a model of any size: each site returns it with a little noise.",
    )
    task.add_argument("--task", choices=TASKS, default="digits", help="default: %(default)s")
    task.add_argument(
        "--model", type=Path, metavar="FILE", help="checkpoint: start from this safetensors file"
    )
    task.add_argument(
        "--model-size",
        type=_checked(parse_size),
        metavar="SIZE",
        help="checkpoint: size of a synthetic float32 model, such as 512MiB",
    )
    task.add_argument(
        "--site-tensors",
        metavar="SHAPES",
        help="checkpoint: shapes of the synthetic model: a number of equal tensors (default: 1), many"
        " (1000 uneven ones) or gpt2-medium (its 292 tensors, scaled to the size)",
    )


def _add_scratch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "scratch",
        help="list or remove what jobs left in the scratch directory",
        description="List the job roots in a scratch directory, or remove those whose owner is gone.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in (
        ("ls", "list job roots: live, dead (their owner is gone) and foreign"),
        ("gc", "remove dead job roots; live and foreign ones are never touched"),
    ):
        one = actions.add_parser(action, help=text, description=text.capitalize() + ".")
        _add_scratch_directory(one)
        one.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_scratch)


def _add_inspect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "inspect",
        help="print what a safetensors file holds",
        description="Check the header of a safetensors file and print its tensors.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_inspect)


def _add_certs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "certs",
        help="make the certificates of a consortium",
        description="Make an authority, and identities of endpoints for links over TLS.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    init = actions.add_parser(
        "init",
        help="make an authority",
        description="Make an authority: a directory with its certificate and key, readable by you only.",
    )
    issue = actions.add_parser(
        "issue",
        help="make the identity of an endpoint",
        description="Make the identity of an endpoint: a directory with its certificate, its key and the"
        " authority's certificate. It may speak for its address and for what lies below.",
    )
    issue.add_argument("--address", required=True, metavar="ADDRESS", help="such as site-1")
    for one, days in ((init, "3650"), (issue, "365")):
        one.add_argument("directory", type=Path, metavar="DIR", help="the authority's directory")
        one.add_argument("--days", type=int, metavar="N", help=f"validity; default: {days}")
        one.add_argument("--force", action="store_true", help="replace what is there")
    parser.set_defaults(run=_certs)


def _add_scratch_directory(parser: "argparse._ActionsContainer") -> None:
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="where job roots are; default: the temporary directory (TMPDIR)",
    )


def _checked(read: Callable[[str], int]) -> Callable[[str], int]:
    """Return an argument type that words a refusal as argparse does."""

    def parse(text: str) -> int:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _simulate(args: argparse.Namespace) -> int:
    from streamoff.cli.simulate import run

    return run(args)


def _scratch(args: argparse.Namespace) -> int:
    from streamoff.cli.scratch import run

    return run(args)


def _inspect(args: argparse.Namespace) -> int:
    from streamoff.cli.inspect import run

    return run(args)


def _certs(args: argparse.Namespace) -> int:
    from streamoff.cli.certs import run

    return run(args)
