"""Every table, cell by cell, against grids that were written down apart from the code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, fields
from enum import Enum
from typing import Any

import pytest

from streamoff.errors import InvariantError, UnexpectedMessageError
from streamoff.machines.cells import Blame, Go, Ignore, Machine, Refuse
from streamoff.machines.download import DOWNLOAD
from streamoff.machines.job_root import JOB_ROOT
from streamoff.machines.notice import NOTICE
from streamoff.machines.participation import PARTICIPATION
from streamoff.machines.serving import SERVING
from streamoff.machines.transaction import TRANSACTION

from . import samples

pytestmark = pytest.mark.core

# A cell says where the event leads (`.` means nothing happens, `PEER` and `OURS` that it is refused and
# who is to blame) and, after a slash, which effects come out, in order, by their initials (CONFIRM and CANCEL share theirs).

SERVING_GRID = """
                  UNSEEN       ACQUIRED       PROVISIONAL    SUCCEEDED     FAILED
Opened            ACQUIRED/AO  ACQUIRED/AO    PROVISIONAL/AO SUCCEEDED/AG  FAILED/AG
Pulled            PEER         ACQUIRED/SR    PROVISIONAL/SR SUCCEEDED/AG  FAILED/AG
ServedMore        OURS         ACQUIRED       PROVISIONAL    .             .
ServedAll         OURS         PROVISIONAL    PROVISIONAL    .             .
Held              PEER         ACQUIRED       PROVISIONAL    .             .
ConfirmedSuccess  PEER         PEER           SUCCEEDED/AC   SUCCEEDED/AC  FAILED/AC
ConfirmedFailure  PEER         FAILED/AC      FAILED/AC      SUCCEEDED/AC  FAILED/AC
ConfirmedStale    .            .              .              .             .
Cancelled         .            FAILED         FAILED         .             .
Declined          FAILED       .              .              .             .
SlotExpired       FAILED       FAILED         FAILED         .             .
Dropped           FAILED       FAILED         FAILED         .             .
"""

TRANSACTION_GRID = """
                  OPEN                SETTLING            SETTLED     FORGOTTEN
Advanced          OPEN                SETTLING            SETTLED     .
Finished          SETTLING            .                   .           .
Drained           SETTLED/TC,RS,RO,WW SETTLED/TC,RS,RO,WW SETTLED     .
Aborted           SETTLING            .                   .           .
SettleExpired     OURS                SETTLED/TC,RS,RO,WW .           .
Forgotten         OURS                OURS                FORGOTTEN   .
"""

DOWNLOAD_GRID = """
                 IDLE           OPENING               STREAMING             BACKOFF               FINALISING            CONFIRMING          DONE  FAILED  CANCELLED  SOURCE_LOST
Started          OPENING/SO     OURS                  OURS                  OURS                  OURS                  OURS                OURS  OURS    OURS       OURS
Accepted         PEER           STREAMING/PM          .                     .                     .                     .                   .     .       .          .
Planned          OURS           OPENING               STREAMING/PM          BACKOFF               OURS                  OURS                .     .       .          .
LandedMore       OURS           OPENING               STREAMING/PM          BACKOFF               .                     .                   .     .       .          .
LandedAll        OURS           FINALISING/F          FINALISING/F          FINALISING/F          .                     .                   .     .       .          .
HoldAsked        OURS           .                     STREAMING/SH          .                     FINALISING/SH         .                   .     .       .          .
Stalled          OURS           BACKOFF               BACKOFF               OURS                  OURS                  OURS                .     .       .          .
Exhausted        OURS           FAILED/CANCEL,D,R     FAILED/CANCEL,D,R     FAILED/CANCEL,D,R     FAILED/CANCEL,D,R     OURS                .     .       .          .
RetryDue         OURS           OURS                  OURS                  OPENING/SO            OURS                  OURS                .     .       .          .
LinkLost         .              BACKOFF               BACKOFF               BACKOFF               .                     .                   .     .       .          .
LinkRestored     .              .                     .                     OPENING/SO            .                     CONFIRMING/CONFIRM  .     .       .          .
GraceExpired     OURS           OURS                  OURS                  SOURCE_LOST/D,R       OURS                  OURS                .     .       .          .
Noticed          SOURCE_LOST/R  SOURCE_LOST/D,R       SOURCE_LOST/D,R       SOURCE_LOST/D,R       .                     DONE/R              .     .       .          .
Refused          PEER           FAILED/D,R            FAILED/D,R            FAILED/D,R            .                     DONE/R              .     .       .          .
LandingFailed    OURS           FAILED/CANCEL,D,R     FAILED/CANCEL,D,R     FAILED/CANCEL,D,R     FAILED/CONFIRM,D,R    OURS                .     .       .          .
CancelRequested  CANCELLED/R    CANCELLED/CANCEL,D,R  CANCELLED/CANCEL,D,R  CANCELLED/CANCEL,D,R  CANCELLED/CANCEL,D,R  DONE/R              .     .       .          .
Finalised        OURS           OURS                  OURS                  OURS                  CONFIRMING/CONFIRM    OURS                .     .       .          .
ConfirmDue       OURS           OURS                  OURS                  OURS                  OURS                  CONFIRMING/CONFIRM  .     .       .          .
ConfirmAcked     PEER           PEER                  PEER                  PEER                  PEER                  DONE/R              .     .       .          .
ConfirmGivenUp   OURS           OURS                  OURS                  OURS                  OURS                  DONE/R              .     .       .          .
"""

NOTICE_GRID = """
                PENDING  SENT         BACKOFF      ACKED  GIVEN_UP
Started         SENT/SN  OURS         OURS         OURS   OURS
Acked           PEER     ACKED/RN     ACKED/RN     .      .
Rejected        PEER     GIVEN_UP/RN  GIVEN_UP/RN  .      .
AttemptExpired  OURS     BACKOFF      OURS         OURS   OURS
RetryDue        OURS     OURS         SENT/SN      OURS   OURS
TotalExpired    OURS     GIVEN_UP/RN  GIVEN_UP/RN  OURS   OURS
"""

JOB_ROOT_GRID = """
                OPEN          FINALISING    DRAINING       CUTTING        REMOVING  GONE  STUCK
Finalised       FINALISING/A  .             .              .              .         .     .
Closed          DRAINING/A,CD DRAINING/A,CD .              .              .         .     .
ConsumersEnded  .             .             REMOVING/BR    REMOVING/BR    OURS      .     REMOVING/BR
WindowClosed    OURS          OURS          CUTTING/CC,AS  OURS           OURS      .     .
GraceClosed     OURS          OURS          OURS           STUCK/HO,RR    OURS      .     .
Removed         OURS          OURS          OURS           OURS           GONE/RR   .     .
RemovalExpired  OURS          OURS          OURS           OURS           GONE/RR   .     .
"""

PARTICIPATION_GRID = """
           AWAITED    LANDING     CUTTING    ACCEPTED    FAILED    LATE
Offered    LANDING/P  LANDING/D   CUTTING/D  ACCEPTED/D  FAILED/D  LATE/D
Forfeited  FAILED     .           .          .           .         .
Counted    OURS       ACCEPTED    ACCEPTED   OURS        OURS      OURS
Failed     OURS       FAILED      LATE       FAILED      .         .
Closed     LATE       CUTTING/CP  .          .           .         .
"""


@dataclass(frozen=True)
class Subject:
    """A machine with its written grid, a record per state and an event per column."""

    machine: Machine[Any, Any, Any, Any]
    grid: str
    record: Callable[[Any], Any]
    events: tuple[Any, ...]

    def states(self) -> tuple[Enum, ...]:
        """The rows of the table."""
        states: type[Enum] = self.machine.states
        return tuple(states)

    def expected(self) -> Iterator[tuple[Enum, object, str]]:
        """Every (state, event, written cell)."""
        header, *rows = [line.split() for line in self.grid.strip().splitlines()]
        kinds = {type(event).__name__: event for event in self.events}
        for name, *cells in rows:
            for state, cell in zip(header, cells, strict=True):
                yield self.machine.states[state], kinds[name], cell


SUBJECTS = {
    "serving": Subject(SERVING, SERVING_GRID, samples.serving, samples.SERVING_EVENTS),
    "transaction": Subject(
        TRANSACTION, TRANSACTION_GRID, samples.transaction, samples.TRANSACTION_EVENTS
    ),
    "download": Subject(DOWNLOAD, DOWNLOAD_GRID, samples.download, samples.DOWNLOAD_EVENTS),
    "notice": Subject(NOTICE, NOTICE_GRID, samples.notice, samples.NOTICE_EVENTS),
    "participation": Subject(
        PARTICIPATION, PARTICIPATION_GRID, samples.participation, samples.PARTICIPATION_EVENTS
    ),
    "job-root": Subject(JOB_ROOT, JOB_ROOT_GRID, samples.job_root, samples.JOB_ROOT_EVENTS),
}
each_machine = pytest.mark.parametrize("name", SUBJECTS)
each_cell = pytest.mark.parametrize(
    ("name", "state", "event", "cell"),
    [
        pytest.param(name, state, event, cell, id=f"{name}-{state.name}-{type(event).__name__}")
        for name, subject in SUBJECTS.items()
        for state, event, cell in subject.expected()
    ],
)


SPELLED = {"SendConfirm": "CONFIRM", "SendCancel": "CANCEL"}


def initials(effects: tuple[object, ...]) -> str:
    """Effect names by their capital letters."""
    names = [type(effect).__name__ for effect in effects]
    return ",".join(SPELLED.get(name, "".join(filter(str.isupper, name))) for name in names)


@each_machine
def test_every_state_and_event_is_written_down_once(name: str) -> None:
    """The grids of this file cover the whole product of states and events, and nothing else."""
    subject = SUBJECTS[name]
    written = [(state, type(event)) for state, event, _ in subject.expected()]
    assert len(written) == len(set(written))
    assert set(written) == {
        (state, kind) for state in subject.states() for kind in subject.machine.events
    }


@each_cell
def test_each_cell_does_what_is_written(name: str, state: Enum, event: Any, cell: str) -> None:
    """An event in a state leads where the grid says, with exactly these effects in this order."""
    subject = SUBJECTS[name]
    record = subject.record(state)
    before = copy.copy(record)
    target, _, effects = cell.partition("/")
    assert record.state is state
    if target in {"PEER", "OURS"}:
        error = UnexpectedMessageError if target == "PEER" else InvariantError
        with pytest.raises(error, match=f"{type(event).__name__}.*{state.value}"):
            subject.machine.step(record, event)
        assert record == before
        return
    moved, told = subject.machine.step(record, event)
    assert record == before, "the old record is never touched"
    assert initials(told) == effects
    if target == ".":
        assert moved is record
    else:
        assert moved.state is subject.machine.states[target]


@each_cell
def test_each_cell_declares_what_it_does(name: str, state: Enum, event: Any, cell: str) -> None:
    """The kind and target of every cell, from which the manual is drawn, are the written ones."""
    declared = SUBJECTS[name].machine.cell(state, type(event))
    target = cell.partition("/")[0]
    match declared:
        case Go():
            assert target == declared.target.name
        case Ignore():
            assert target == "."
            assert len(declared.why) > 8, "silence has a reason"
        case Refuse():
            assert target == {Blame.PEER: "PEER", Blame.LOCAL: "OURS"}[declared.blame]


@each_machine
def test_every_state_is_reached_from_the_start(name: str) -> None:
    """No row of a table is dead: a walk along its cells from the first state visits all of them."""
    machine = SUBJECTS[name].machine
    seen, todo = {machine.initial}, [machine.initial]
    while todo:
        state = todo.pop()
        for kind in machine.events:
            cell = machine.cell(state, kind)
            if isinstance(cell, Go) and cell.target not in seen:
                seen.add(cell.target)
                todo.append(cell.target)
    assert seen == set(SUBJECTS[name].states())


@each_machine
def test_final_states_absorb(name: str) -> None:
    """No event leaves a final state, and every other state can still be left."""
    machine = SUBJECTS[name].machine
    targets = {
        state: {
            cell.target
            for kind in machine.events
            if isinstance(cell := machine.cell(state, kind), Go)
        }
        for state in machine.states
    }
    for state, reached in targets.items():
        assert (reached <= {state}) == (state in machine.final), state


@each_machine
def test_records_and_events_are_frozen(name: str) -> None:
    """Nobody can change a record or an event in place."""
    subject = SUBJECTS[name]
    for thing in (*map(subject.record, subject.states()), *subject.events):
        for field in fields(thing):
            with pytest.raises(FrozenInstanceError):
                setattr(thing, field.name, None)


@each_machine
def test_there_is_an_event_for_each_column(name: str) -> None:
    """The samples of this suite exercise the columns in their order."""
    subject = SUBJECTS[name]
    assert tuple(map(type, subject.events)) == subject.machine.events
