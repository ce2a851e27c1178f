"""Write the diagrams, tables and bounds of the machines into their pages, from the machines themselves.

A page holds marked regions, ``<!-- generated: diagram -->`` to ``<!-- end generated -->``. Everything between the
marks belongs to this script; everything else is written by hand.

    python docs/render_tables.py            writes what is stale
    python docs/render_tables.py --check    writes nothing; exits 1 and shows the difference if anything is stale
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from streamoff.machines import (  # noqa: E402 - the tree beside this script comes first
    download,
    job_root,
    notice,
    participation,
    serving,
    tombstones,
    transaction,
)
from streamoff.machines.cells import Blame, Go, Ignore, Machine, Refuse  # noqa: E402
from streamoff.types import Budgets  # noqa: E402

PAGES = ROOT / "docs" / "explanation" / "machines"
REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)

AnyMachine = Machine[Any, Any, Any, Any]
Grid = Mapping[Enum, Mapping[type, object]]


@dataclass(frozen=True)
class Subject:
    """What a page is about.

    Args:
        machine: The machine, if the page has one.
        effects: Its effect types.
        bounds: Meaning and value of each bound.
    """

    machine: AnyMachine | None
    effects: tuple[type, ...]
    bounds: Mapping[str, str]


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:g} s"


def _budgets(*names: str) -> dict[str, str]:
    """Defaults of some budgets, described by the class's own docstring."""
    text = re.sub(r"\s+", " ", Budgets.__doc__ or "")
    defaults = {item.name: item.default for item in fields(Budgets) if item.default is not MISSING}
    rows = {}
    for name in names:
        found = re.search(rf" {name}: (?:[A-Z][a-z]+: )?(.*?)\.(?= \w+: | Raises)", text)
        if found is None:
            raise SystemExit(f"the budget {name!r} is not described in the docstring of Budgets")
        value = defaults[name]
        shown = (
            ", ".join(f"{part:g}" for part in value) + " s"
            if isinstance(value, tuple)
            else _seconds(value)
        )
        rows[f"`{name}`: {found[1]}"] = shown
    return rows


SUBJECTS: dict[str, Subject] = {
    "serving": Subject(
        serving.SERVING,
        get_args(serving.ServingEffect),
        _budgets("acquire", "idle", "hold"),
    ),
    "transaction": Subject(
        transaction.TRANSACTION,
        (
            transaction.TellCallbacks,
            transaction.ReleaseSource,
            transaction.RecordOutcome,
            transaction.WakeWaiters,
        ),
        {
            "receivers of one transaction": f"{transaction.MAX_SLOTS}",
            **_budgets("acquire", "idle", "hold", "settle", "deadline"),
        },
    ),
    "tombstones": Subject(
        None,
        (),
        {
            "entries of one book": f"{tombstones.TOMBSTONES}",
            "life of an entry": _seconds(tombstones.TOMBSTONE_SECONDS),
        },
    ),
    "download": Subject(
        download.DOWNLOAD,
        get_args(download.DownloadEffect),
        {
            **_budgets("stall", "backoff", "reconnect_grace", "hold", "confirm", "deadline"),
            "confirmations sent in all": f"{download.CONFIRM_ATTEMPTS}",
            "longest without a new range, holds apart": _seconds(Budgets().retry_schedule),
        },
    ),
    "failure-notice": Subject(
        notice.NOTICE,
        get_args(notice.NoticeEffect),
        {
            "attempts per receiver": f"{notice.NOTICE_ATTEMPTS}",
            "wait for one answer": _seconds(notice.NOTICE_WAIT_SECONDS),
            "pauses between attempts": ", ".join(f"{pause:g}" for pause in notice.NOTICE_PAUSES)
            + " s",
            "everything, for all receivers": _seconds(notice.NOTICE_TOTAL_SECONDS),
            "refs in one notice": f"{notice.NOTICE_REFS}",
            "characters of the reason that are kept": f"{notice.REASON_CHARACTERS}",
            "refs remembered as dead": f"{tombstones.TOMBSTONES}",
            "for how long": _seconds(tombstones.TOMBSTONE_SECONDS),
        },
    ),
    "job-root": Subject(
        job_root.JOB_ROOT,
        get_args(job_root.JobRootEffect),
        {
            "time to stop after being cut": _seconds(job_root.CUT_GRACE_SECONDS),
            "removal of an empty root": _seconds(job_root.removal_seconds(0)),
            "removal, for each GiB in it, on top": _seconds(
                job_root.removal_seconds(2**30) - job_root.removal_seconds(0)
            ),
        },
    ),
    "participation": Subject(
        participation.PARTICIPATION, get_args(participation.ParticipationEffect), {}
    ),
}


# --- diagram --------------------------------------------------------------------------------------

Move = tuple[Enum, Enum]
CROWDED = 12
"""Moves that one picture shows; more are shown as two: the way, and its ends."""


def diagram(subject: Subject) -> str:
    """Every move to another state, with the events that cause it."""
    machine = _machine(subject)
    moves: dict[Move, list[str]] = {}
    for state in _states(machine):
        for kind in machine.events:
            cell = machine.cell(state, kind)
            if isinstance(cell, Go) and cell.target is not state:
                moves.setdefault((state, cell.target), []).append(kind.__name__)
    if len(moves) <= CROWDED:
        return _picture(machine, moves)
    way = {move: names for move, names in moves.items() if move[1] not in machine.final}
    ends = {move: names for move, names in moves.items() if move[1] in machine.final}
    return f"{_picture(machine, way)}\n\nAnd how it ends:\n\n{_endings(ends)}"


def _picture(machine: AnyMachine, moves: Mapping[Move, list[str]]) -> str:
    states = dict.fromkeys(state for move in moves for state in move)
    return _mermaid(
        "TB",
        *(f'state "{state.value}" as {state.name}' for state in states),
        f"[*] --> {machine.initial.name}",
        *(f"{source.name} --> {to.name}: {_label(names)}" for (source, to), names in moves.items()),
        *(f"{state.name} --> [*]" for state in states if state in machine.final),
    )


def _endings(moves: Mapping[Move, list[str]]) -> str:
    """One box for all states that reach an end by the same events."""
    boxes: dict[tuple[Enum, str], list[str]] = {}
    for (source, target), names in moves.items():
        boxes.setdefault((target, _label(names)), []).append(str(source.value))
    lines = []
    for number, ((target, label), sources) in enumerate(boxes.items()):
        lines.append(f'state "{", ".join(sources)}" as FROM_{number}')
        lines.append(f'state "{target.value}" as {target.name}')
        lines.append(f"FROM_{number} --> {target.name}: {label}")
    return _mermaid("LR", *dict.fromkeys(lines))


def _label(names: list[str]) -> str:
    return "<br/>".join(names)


def _mermaid(direction: str, *lines: str) -> str:
    indented = [f"    {line}" for line in (f"direction {direction}", *lines)]
    return "\n".join(["```mermaid", "stateDiagram-v2", *indented, "```"])


# --- cells ----------------------------------------------------------------------------------------


NARROW = "\N{NO-BREAK SPACE}"
LEGEND = (
    "*→ state*: it moves there. *stays*: it acts or counts, and stays. *(n)*: nothing happens, for the reason below. "
    "*peer*: nonsense from the other side, refused. *no*: cannot happen; a defect of ours if it does."
)


def cells(subject: Subject) -> str:
    """The whole grid, states with equal columns side by side, and why silence is right."""
    machine = _machine(subject)
    reasons: dict[str, int] = {}
    columns: dict[tuple[str, ...], list[Enum]] = {}
    for state in _states(machine):
        shown = tuple(_show(machine.cell(state, kind), state, reasons) for kind in machine.events)
        columns.setdefault(shown, []).append(state)
    heads = [", ".join(str(state.value) for state in states) for states in columns.values()]
    rows = [
        [f"`{kind.__name__}`", *(shown[index] for shown in columns)]
        for index, kind in enumerate(machine.events)
    ]
    legend = [f"{number}. {why}" for why, number in reasons.items()]
    return "\n".join([LEGEND, "", *_table(["", *heads], rows), "", "Nothing happens:", "", *legend])


def _show(cell: object, state: Enum, reasons: dict[str, int]) -> str:
    match cell:
        case Go(target=target):
            return "stays" if target is state else f"→{NARROW}**{target.value}**"
        case Ignore(why=why):
            return f"({reasons.setdefault(why, len(reasons) + 1)})"
        case Refuse(blame=Blame.PEER):
            return "*peer*"
        case _:
            return "no"


# --- events, effects, bounds ----------------------------------------------------------------------


def events(subject: Subject) -> str:
    """What each event means, in the words of its class."""
    return _glossary("event", _machine(subject).events)


def effects(subject: Subject) -> str:
    """What each effect asks for, in the words of its class."""
    return _glossary("effect", subject.effects)


def bounds(subject: Subject) -> str:
    """Every bound, with its default."""
    return "\n".join(_table(["bound", "value"], [list(row) for row in subject.bounds.items()]))


def _glossary(what: str, kinds: tuple[type, ...]) -> str:
    rows = [[f"`{kind.__name__}`", _first_line(kind)] for kind in kinds]
    return "\n".join(_table([what, "meaning"], rows))


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().split("\n", 1)[0].replace("``", "`")


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    ]


def _machine(subject: Subject) -> AnyMachine:
    if subject.machine is None:
        raise SystemExit("a page without a machine asks for its diagram or table")
    return subject.machine


def _states(machine: AnyMachine) -> tuple[Enum, ...]:
    states: type[Enum] = machine.states
    return tuple(states)


# --- pages ----------------------------------------------------------------------------------------

REGIONS: dict[str, Callable[[Subject], str]] = {
    "diagram": diagram,
    "cells": cells,
    "events": events,
    "effects": effects,
    "bounds": bounds,
}


def render(text: str, subject: Subject) -> str:
    """The page with every region as it should be."""

    def fill(region: re.Match[str]) -> str:
        head, name, tail = region.groups()
        if name not in REGIONS:
            raise SystemExit(f"unknown region {name!r}: expected one of {', '.join(REGIONS)}")
        return f"{head}\n{REGIONS[name](subject)}\n\n{tail}"

    return REGION.sub(fill, text)


def main(arguments: list[str] | None = None, pages: Path = PAGES) -> int:
    """Write or check every page; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    check = parser.parse_args(arguments).check
    stale = False
    for name, subject in SUBJECTS.items():
        page = pages / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        fresh = render(text, subject)
        if fresh == text:
            continue
        stale = True
        if check:
            lines = difflib.unified_diff(
                text.splitlines(),
                fresh.splitlines(),
                f"{page.name} (now)",
                "(from the tables)",
                lineterm="",
                n=1,
            )
            print("\n".join(lines))
        else:
            page.write_text(fresh, encoding="utf-8")
            print(f"wrote {page.name}")
    if stale and check:
        print(
            "\nThe pages differ from the tables: run  python docs/render_tables.py  and read them again."
        )
    return int(stale and check)


if __name__ == "__main__":
    sys.exit(main())
