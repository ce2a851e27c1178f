"""``streamoff scratch``: what jobs left on disk."""

import argparse
import json
import sys

from streamoff.cli.exits import ExitCode
from streamoff.scratch.reaper import RootStatus, reclaim, survey
from streamoff.sim.sizes import format_size
from streamoff.sim.tables import aligned, printable

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """List the roots in ``args.scratch``, or remove the dead ones.

    Raises:
        ScratchError: There is no such directory.
    """
    return _collect(args) if args.action == "gc" else _list(args)


def _list(args: argparse.Namespace) -> int:
    roots = survey(args.scratch)
    if args.json:
        print(json.dumps([_as_json(root) for root in roots], indent=2))
        return ExitCode.OK
    rows = [["state", "job", "age", "size", "entries", "path", "why"]] + [
        [
            root.judgement.state.value,
            printable(root.job),
            _age(root.judgement.age),
            format_size(root.usage.nbytes),
            str(root.usage.entries),
            printable(str(root.path)),
            printable(root.judgement.reason),
        ]
        for root in roots
    ]
    if roots:
        print("\n".join(aligned(rows, left=frozenset({0, 1, 5, 6}))))
    else:
        print("no job roots")
    return ExitCode.OK


def _collect(args: argparse.Namespace) -> int:
    done = reclaim(args.scratch)
    if args.json:
        result = {
            "removed": [str(path) for path in done.removed],
            "kept": [str(path) for path in done.kept],
            "failed": [{"path": str(item.path), "reason": item.reason} for item in done.failed],
            "entries": done.entries,
            "bytes": done.nbytes,
        }
        print(json.dumps(result, indent=2))
    else:
        for path in done.removed:
            print(f"removed {path}")
        print(
            f"{len(done.removed)} removed ({format_size(done.nbytes)}), {len(done.kept)} kept,"
            f" {len(done.failed)} failed"
        )
        for item in done.failed:
            sys.stderr.write(f"streamoff scratch: {item.path}: {item.reason}\n")
    return ExitCode.FAILED if done.failed else ExitCode.OK


def _as_json(root: RootStatus) -> dict[str, object]:
    owner = root.judgement.owner
    return {
        "path": str(root.path),
        "job": root.job,
        "state": root.judgement.state.value,
        "reason": root.judgement.reason,
        "pid": None if owner is None else owner.pid,
        "age_seconds": root.judgement.age,
        "entries": root.usage.entries,
        "bytes": root.usage.nbytes,
    }


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
