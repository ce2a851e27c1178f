"""What must hold of every record, whatever the events were; checked by tests and, cheaply, by the shell."""

from __future__ import annotations

from streamoff.errors import InvariantError
from streamoff.machines.download import Download, DownloadState
from streamoff.machines.job_root import JobRoot, JobRootState
from streamoff.machines.participation import Participation, ParticipationState
from streamoff.machines.serving import Serving, ServingState
from streamoff.machines.transaction import Transaction, TransactionState
from streamoff.types import OutcomeStatus, Verdict

__all__ = [
    "check_download",
    "check_job_root",
    "check_participation",
    "check_serving",
    "check_transaction",
]


def _require(holds: bool, what: str, record: object, story: tuple[str, ...]) -> None:
    if not holds:
        raise InvariantError(what, got=record, story=story)


def check_serving(record: Serving, story: tuple[str, ...] = ()) -> None:
    """One slot on one ref.

    Raises:
        InvariantError: A combination that cannot be.
    """
    state = record.state
    acquired = state in {ServingState.ACQUIRED, ServingState.PROVISIONAL, ServingState.SUCCEEDED}
    missing = record.served.missing(record.wanted)
    _require(not acquired or record.bound is not None, "acquired by nobody", record, story)
    _require(
        state is not ServingState.PROVISIONAL or not missing, "provisional too early", record, story
    )
    _require(
        state is not ServingState.SUCCEEDED or not missing, "success before the end", record, story
    )
    _require(
        (state is ServingState.FAILED) == bool(record.reason), "reason and state", record, story
    )


def check_transaction(record: Transaction, story: tuple[str, ...] = ()) -> None:
    """One transaction and all its slots.

    Raises:
        InvariantError: A combination that cannot be.
    """
    for serving in record.servings.values():
        check_serving(serving, story)
    settled = record.state in {TransactionState.SETTLED, TransactionState.FORGOTTEN}
    outcome = record.outcome
    _require(settled == (outcome is not None), "outcome and state", record.id, story)
    _require(record.in_flight >= 0, "more chunks ended than began", record.id, story)
    _require(
        record.state is TransactionState.OPEN or record.finished, "ended early", record.id, story
    )
    if outcome is not None:
        every = all(
            end.verdict is Verdict.SUCCEEDED
            for refs in outcome.slots.values()
            for end in refs.values()
        )
        completed = outcome.status is OutcomeStatus.COMPLETED
        _require(completed == every, "an outcome that lies", outcome, story)


def check_download(record: Download, story: tuple[str, ...] = ()) -> None:
    """One download.

    Raises:
        InvariantError: A combination that cannot be.
    """
    complete = bool(record.wanted) and not record.missing
    after = {DownloadState.FINALISING, DownloadState.CONFIRMING, DownloadState.DONE}
    bad = {DownloadState.FAILED, DownloadState.CANCELLED, DownloadState.SOURCE_LOST}
    _require(record.state not in after or complete, "done before the end", record, story)
    _require((record.state in bad) == (record.cause is not None), "a cause", record, story)
    _require(
        record.state is not DownloadState.BACKOFF
        or (record.retry_at is None) != (record.give_up_at is None),
        "one clock in backoff",
        record,
        story,
    )


def check_job_root(record: JobRoot, story: tuple[str, ...] = ()) -> None:
    """One job root.

    Raises:
        InvariantError: A combination that cannot be.
    """
    timed = {JobRootState.DRAINING, JobRootState.CUTTING, JobRootState.REMOVING}
    _require(
        record.state in timed or record.due is None, "a clock that nobody reads", record, story
    )
    _require(
        record.state is not JobRootState.STUCK or bool(record.stuck),
        "stuck on nobody",
        record,
        story,
    )


def check_participation(record: Participation, story: tuple[str, ...] = ()) -> None:
    """One site in one round.

    Raises:
        InvariantError: A combination that cannot be.
    """
    out = {ParticipationState.CUTTING, ParticipationState.FAILED, ParticipationState.LATE}
    _require((record.state in out) == bool(record.reason), "reason and state", record, story)
