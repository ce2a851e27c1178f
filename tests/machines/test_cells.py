"""The engine under the tables, on a small table of its own."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import streamoff.machines
from streamoff.errors import InvariantError, UnexpectedMessageError
from streamoff.machines.cells import Blame, Cell, Go, Ignore, Machine, Refuse

pytestmark = pytest.mark.core


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"


@dataclass(frozen=True)
class Leaf:
    state: Door = Door.OPEN
    slams: int = 0


@dataclass(frozen=True)
class Slammed:
    pass


@dataclass(frozen=True)
class Knocked:
    pass


def _slam(record: Leaf, event: Slammed) -> tuple[Leaf, tuple[str, ...]]:
    return Leaf(record.state, record.slams + 1), ("bang", "echo")


class Cells(NamedTuple):
    slammed: Cell[Door, Leaf, str, Slammed]
    knocked: Cell[Door, Leaf, str, Knocked]


TABLE = {
    Door.OPEN: Cells(Go(Door.SHUT, _slam), Ignore("come in")),
    Door.SHUT: Cells(Refuse(Blame.LOCAL), Refuse(Blame.PEER)),
}


def door(table: Mapping[Door, Any] = TABLE) -> Machine[Door, Leaf, str, Slammed | Knocked]:
    """The machine of a door."""
    return Machine("door", table, (Slammed, Knocked), initial=Door.OPEN, final=frozenset())


def test_a_cell_sets_the_state_and_the_handler_does_not() -> None:
    """The handler returned the old state; the table's target is what counts."""
    moved, effects = door().step(Leaf(), Slammed())
    assert moved == Leaf(Door.SHUT, 1)
    assert effects == ("bang", "echo")


def test_an_ignored_event_returns_the_very_same_record() -> None:
    """Nothing happened, and the caller can tell by identity."""
    leaf = Leaf()
    assert door().step(leaf, Knocked()) == (leaf, ())
    assert door().step(leaf, Knocked())[0] is leaf


def test_a_refusal_says_whose_mistake_it_is() -> None:
    """The peer's nonsense and our own are different errors; both name machine, event and state."""
    with pytest.raises(UnexpectedMessageError, match="door: Knocked makes no sense while shut"):
        door().step(Leaf(Door.SHUT), Knocked())
    with pytest.raises(InvariantError, match="door: Slammed cannot happen while shut"):
        door().step(Leaf(Door.SHUT), Slammed())


@pytest.mark.parametrize(
    "table",
    [
        {Door.OPEN: TABLE[Door.OPEN]},
        {Door.OPEN: TABLE[Door.OPEN], Door.SHUT: (Ignore("one cell only"),)},
        {},
    ],
    ids=["no-row", "no-column", "empty"],
)
def test_a_table_with_a_hole_cannot_be_made(table: Mapping[Door, Any]) -> None:
    """A missing row or column is found when the module is imported, not when the event comes."""
    with pytest.raises(InvariantError, match="a table must be total"):
        door(table)


def _sources() -> list[Path]:
    return sorted(Path(next(iter(streamoff.machines.__path__))).glob("*.py"))


@pytest.mark.parametrize("path", _sources(), ids=lambda path: path.stem)
def test_machines_know_neither_clock_nor_loop_nor_file(path: Path) -> None:
    """Time and identity come in with the event: no wall clock can stretch or cut a budget."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    allowed = {
        "__future__",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hmac",
        "itertools",
    } | {"operator"}
    assert names <= allowed | {"streamoff", "types", "typing"}
