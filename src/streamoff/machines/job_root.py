"""Job root: the nursery of everything that uses one job's landed bytes, and the end of both.

Whatever the reason for leaving, the steps come in one order, each bounded: nothing new is admitted,
downloads are cancelled, the rest gets the drain window, what is left is cut, and only when nothing reads
any more the directory goes. What ignores being cut leaves the root STUCK: nothing is removed under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from streamoff.machines.cells import Blame, Cell, Go, Ignore, Machine, Refuse
from streamoff.machines.records import replace

__all__ = [
    "CUT_GRACE_SECONDS",
    "JOB_ROOT",
    "AbortServes",
    "Admission",
    "Admit",
    "BuryRoot",
    "CancelDownloads",
    "Closed",
    "ConsumersEnded",
    "CutConsumers",
    "Finalised",
    "GraceClosed",
    "HandOver",
    "JobRoot",
    "JobRootEffect",
    "JobRootEvent",
    "JobRootState",
    "RemovalExpired",
    "Removed",
    "ReportRoot",
    "WindowClosed",
    "classify_tick",
    "next_tick",
    "removal_seconds",
]

CUT_GRACE_SECONDS: Final = 0.2
"""What a consumer gets to stop after it was cut."""


class JobRootState(StrEnum):
    """The life of a job root."""

    OPEN = "open"
    FINALISING = "finalising"
    DRAINING = "draining"
    CUTTING = "cutting"
    REMOVING = "removing"
    GONE = "gone"
    STUCK = "stuck"


J = JobRootState


class Admission(StrEnum):
    """What a job root still lets in."""

    ALL = "all"
    SERVES = "serves"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class JobRoot:
    """One job root.

    Args:
        job: Its name.
        window: Drain window, seconds.
        state: The row of the table.
        due: When the current step's time ends; None when it has no clock.
        cut: Consumers that were cut when the window closed.
        stuck: Consumers that ignored it.
    """

    job: str
    window: float
    state: JobRootState = JobRootState.OPEN
    due: float | None = None
    cut: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finalised:
    """No new rounds or downloads; what the job serves goes on."""

    now: float


@dataclass(frozen=True, slots=True)
class Closed:
    """The body was left: normally, by an error, or because it was cancelled."""

    now: float


@dataclass(frozen=True, slots=True)
class ConsumersEnded:
    """Nothing uses the root any more; ``nbytes`` is what lies in it."""

    now: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class WindowClosed:
    """The drain window ran out on ``left``."""

    now: float
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GraceClosed:
    """The cut grace ran out on ``left``."""

    now: float
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """The janitor is done with the directory."""

    now: float


@dataclass(frozen=True, slots=True)
class RemovalExpired:
    """The janitor is not done in time; it goes on by itself."""

    now: float


JobRootEvent = (
    Finalised | Closed | ConsumersEnded | WindowClosed | GraceClosed | Removed | RemovalExpired
)


@dataclass(frozen=True, slots=True)
class Admit:
    """From now on, admit no more than this."""

    admission: Admission


@dataclass(frozen=True, slots=True)
class CancelDownloads:
    """Cancel every download that lands under the root; each tells its producer."""


@dataclass(frozen=True, slots=True)
class CutConsumers:
    """Cancel what is left."""


@dataclass(frozen=True, slots=True)
class AbortServes:
    """End the transactions that serve files of the root: aborted, deleted."""


@dataclass(frozen=True, slots=True)
class BuryRoot:
    """Rename the root out of the way and give it to the janitor; comes back as Removed."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let the last of the stuck consumers hand the root to the janitor when it ends."""


@dataclass(frozen=True, slots=True)
class ReportRoot:
    """Say how it ended."""


JobRootEffect = (
    Admit | CancelDownloads | CutConsumers | AbortServes | BuryRoot | HandOver | ReportRoot
)
Step = tuple[JobRoot, tuple[JobRootEffect, ...]]


def removal_seconds(nbytes: int) -> float:
    """How long removal may take: 1 s, and half a second per GiB."""
    return 1.0 + 0.5 * nbytes / 2**30


def _finalise(record: JobRoot, event: Finalised) -> Step:  # noqa: ARG001 - the fact is enough
    return record, (Admit(Admission.SERVES),)


def _drain(record: JobRoot, event: Closed) -> Step:
    return replace(record, due=event.now + record.window), (
        Admit(Admission.NOTHING),
        CancelDownloads(),
    )


def _cut(record: JobRoot, event: WindowClosed) -> Step:
    record = replace(record, due=event.now + CUT_GRACE_SECONDS, cut=event.left)
    return record, (CutConsumers(), AbortServes())


def _bury(record: JobRoot, event: ConsumersEnded) -> Step:
    return replace(record, due=event.now + removal_seconds(event.nbytes)), (BuryRoot(),)


def _strand(record: JobRoot, event: GraceClosed) -> Step:
    return replace(record, due=None, stuck=event.left), (HandOver(), ReportRoot())


def _end(record: JobRoot, event: Removed | RemovalExpired) -> Step:  # noqa: ARG001 - as above
    return replace(record, due=None), (ReportRoot(),)


def _freed(record: JobRoot, event: ConsumersEnded) -> Step:  # noqa: ARG001 - as above
    return record, (BuryRoot(),)


class Cells(NamedTuple):
    """One row: a cell per event."""

    finalised: Cell[J, JobRoot, JobRootEffect, Finalised]
    closed: Cell[J, JobRoot, JobRootEffect, Closed]
    consumers_ended: Cell[J, JobRoot, JobRootEffect, ConsumersEnded]
    window_closed: Cell[J, JobRoot, JobRootEffect, WindowClosed]
    grace_closed: Cell[J, JobRoot, JobRootEffect, GraceClosed]
    removed: Cell[J, JobRoot, JobRootEffect, Removed]
    removal_expired: Cell[J, JobRoot, JobRootEffect, RemovalExpired]


finalise = Go(J.FINALISING, _finalise)
drain = Go(J.DRAINING, _drain)
cut = Go(J.CUTTING, _cut)
bury = Go(J.REMOVING, _bury)
strand = Go(J.STUCK, _strand)
end = Go(J.GONE, _end)
freed = Go(J.REMOVING, _freed)
more = Ignore("consumers come and go while the job is open")
again = Ignore("already so")
done = Ignore("it has ended")
ours = Refuse(Blame.LOCAL)

# fmt: off
TABLE: Final[dict[J, Cells]] = {
    #                   Finalised Closed ConsumersEnded WindowClosed GraceClosed Removed RemovalExpired
    J.OPEN:       Cells(finalise, drain, more,          ours,        ours,       ours,   ours),
    J.FINALISING: Cells(again,    drain, more,          ours,        ours,       ours,   ours),
    J.DRAINING:   Cells(again,    again, bury,          cut,         ours,       ours,   ours),
    J.CUTTING:    Cells(again,    again, bury,          ours,        strand,     ours,   ours),
    J.REMOVING:   Cells(again,    again, ours,          ours,        ours,       end,    end ),
    J.GONE:       Cells(done,     done,  done,          done,        done,       done,   done),
    J.STUCK:      Cells(done,     done,  freed,         done,        done,       done,   done),
}
# fmt: on

JOB_ROOT: Final = Machine[J, JobRoot, JobRootEffect, JobRootEvent](
    "job root",
    TABLE,
    (Finalised, Closed, ConsumersEnded, WindowClosed, GraceClosed, Removed, RemovalExpired),
    initial=J.OPEN,
    final=frozenset({J.GONE}),
)


def next_tick(record: JobRoot) -> float | None:
    """When :func:`classify_tick` may have something; None: no clock runs."""
    return record.due


def classify_tick(
    record: JobRoot, now: float, left: tuple[str, ...]
) -> WindowClosed | GraceClosed | RemovalExpired | None:
    """What the passing of time means now; ``left`` names what still uses the root."""
    if record.due is None or now < record.due:
        return None
    match record.state:
        case J.DRAINING:
            return WindowClosed(now, left)
        case J.CUTTING:
            return GraceClosed(now, left)
        case J.REMOVING:
            return RemovalExpired(now)
        case _:
            return None
