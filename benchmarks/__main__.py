"""``python -m benchmarks SUITE [--quick] [--json FILE]``."""

import argparse
import json
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from benchmarks.others import Others

SUITES: Final = {
    "memory": "resident memory of a whole simulation, by engine, shapes and sites",
    "transfer": "a model of 292 tensors between two processes, against a raw copy",
    "giant": "the same bytes as one tensor",
    "tls": "the same model over TLS 1.3, against a blocking TLS copy",
    "relay": "through one relay, beside a slow stream, against a direct link",
    "fanout": "one source to eight receivers at once, against raw copies",
    "line": "control messages beside a model on a slow line, between network namespaces",
    "lines": "many sites at once, each on a slow line of its own, between network namespaces",
    "drain": "giving up 64 downloads under way: abort, cancel, notice, SIGKILL, cut link, end of the job",
    "control": "what a transfer costs besides its bytes: 10,000 refs of 4 KiB",
    "sites": "1,000 sites of 1 MiB in one event loop",
    "storage": "files on stable storage, and files kept out of the page cache",
}
"""Name of a module of this package, with a function ``measure``, to what it measures."""
PEERED: Final = ("transfer", "giant")
"""Suites that can compare with another program, too."""


class Report(Protocol):
    """What a suite returns."""

    @property
    def passed(self) -> bool:
        """Whether every row was measured without a failure and every check that could be made holds."""
        ...

    def to_text(self) -> str:
        """Return the report for people, without a trailing newline."""
        ...

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        ...


class Suite(Protocol):
    """A module of this package."""

    def measure(self, *, quick: bool, **more: str | None) -> Report:
        """Run the suite; ``quick`` makes everything smaller and proves less, ``more`` is of some suites."""
        ...


def main() -> int:
    """Run a suite and print its report.

    Returns:
        0, or 1 if a check or a measurement failed.
    """
    listing = "\n".join(f"  {name:10} {what}" for name, what in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what streamoff costs on this machine.",
        epilog=f"suites:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--quick", action="store_true", help="small sizes: minutes become seconds")
    parser.add_argument(
        "--peer-python",
        metavar="PATH",
        help=f"with {' and '.join(PEERED)}: an interpreter with NVFlare to compare with",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, too")
    args = parser.parse_args()
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"no such directory: {args.json.absolute().parent}")
    if args.peer_python is not None and args.suite not in PEERED:
        parser.error(f"--peer-python goes with {' and '.join(PEERED)}")
    more = {"peer_python": args.peer_python} if args.suite in PEERED else {}
    suite: Suite = import_module(f"benchmarks.{args.suite}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # files are removed
    with Others() as others:
        report = suite.measure(quick=args.quick, **more)
    print(f"{report.to_text()}\n{others.to_text()}")
    if args.json is not None:
        found = {**report.to_json(), "meanwhile": others.to_json()}
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
