"""``python -m tests.crash [--kills N] [--seed N] [--json FILE]``: the summary as JSON, progress on stderr."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.crash.harness import Harness


def main() -> int:
    """Run the harness in a temporary directory.

    Returns:
        0, or 1 if something was left.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="processes to kill (300)")
    parser.add_argument("--seed", type=int, default=0, help="of what, when and how (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamoff-crash-") as place:
        summary = Harness(Path(place), args.kills, args.seed, _tell).run()
    text = json.dumps(summary.to_json(), indent=2)
    print(text)  # noqa: T201 - a program's output
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0 if summary.clean else 1


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
