"""The engine under every table: a transition is a cell, a cell returns effects.

A table is a grid with one row per state and one named column per event. Every pair has a cell:

* ``Go(target, handler)`` moves to ``target``; the handler computes the new record and the effects.
* ``Ignore(why)`` changes nothing; the reason is printed in the documentation.
* ``Refuse(blame)`` raises and leaves no trace; the blame says whose mistake it is.

Handlers never choose the state. Where the next state depends on data, the event is classified first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, assert_never, cast

from streamoff.errors import InvariantError, UnexpectedMessageError
from streamoff.machines.records import replace

__all__ = ["Blame", "Cell", "Go", "Ignore", "Machine", "Record", "Refuse"]


class Blame(StrEnum):
    """Whose mistake a refused event is."""

    PEER = "peer"
    LOCAL = "local"


class Record(Protocol):
    """What a machine steps: a frozen dataclass with a state."""

    @property
    def state(self) -> Enum:
        """The row of the table."""
        ...


S = TypeVar("S", bound=Enum)
R = TypeVar("R", bound=Record)
F = TypeVar("F")
E_contra = TypeVar("E_contra", contravariant=True)
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Go(Generic[S, R, F, E_contra]):
    """Move to ``target``; ``handler(record, event)`` returns the new record and the effects in order."""

    target: S
    handler: Callable[[R, E_contra], tuple[R, tuple[F, ...]]]


@dataclass(frozen=True, slots=True)
class Ignore:
    """Nothing happens, and ``why`` says why that is right."""

    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nonsense: raise, and leave no trace."""

    blame: Blame


Cell = Go[S, R, F, E] | Ignore | Refuse


class Machine(Generic[S, R, F, E]):
    """One table with its columns, ready to step.

    Args:
        name: How documentation and stories call it.
        table: A row of cells for every state.
        events: The event type of each column, in the order of the cells.
        initial: Where records start.
        final: States that no event leaves.

    Raises:
        InvariantError: A row or a column is missing.
    """

    def __init__(
        self,
        name: str,
        table: Mapping[S, NamedTuple],
        events: tuple[type[E], ...],
        *,
        initial: S,
        final: frozenset[S],
    ) -> None:
        self.name = name
        self.states: type[S] = type(initial)
        self.initial = initial
        self.final = final
        self.events = events
        rows = {state: len(table.get(state, ())) for state in self.states}
        if set(rows.values()) != {len(events)}:
            raise InvariantError("a table must be total", expected=len(events), got=rows)
        self._grid = {
            (state, kind): cast("Cell[S, R, F, E]", cell)
            for state, row in table.items()
            for kind, cell in zip(events, row, strict=True)
        }

    def cell(self, state: S, kind: type[E]) -> Cell[S, R, F, E]:
        """The cell of one state and one event type."""
        return self._grid[state, kind]

    def step(self, record: R, event: E) -> tuple[R, tuple[F, ...]]:
        """Apply one event.

        Args:
            record: Frozen; never changed.
            event: One of the machine's event types, already classified.

        Returns:
            The new record and the effects, in the order in which they must be carried out.

        Raises:
            UnexpectedMessageError: The peer sent nonsense. Nothing happened.
            InvariantError: We did. Nothing happened.
        """
        cell = self._grid[cast("S", record.state), type(event)]
        match cell:
            case Go():
                moved, effects = cell.handler(record, event)
                if moved.state is cell.target:
                    return moved, effects
                if moved is record:
                    moved = replace(cast("Any", moved), state=cell.target)
                else:  # the handler's own copy, which nobody else has seen
                    object.__setattr__(moved, "state", cell.target)
                return moved, effects
            case Ignore():
                return record, ()
            case Refuse(blame=Blame.PEER):
                raise UnexpectedMessageError(
                    f"{self.name}: {type(event).__name__} makes no sense while {record.state.value}"
                )
            case Refuse():
                raise InvariantError(
                    f"{self.name}: {type(event).__name__} cannot happen while {record.state.value}"
                )
            case never:
                assert_never(never)
