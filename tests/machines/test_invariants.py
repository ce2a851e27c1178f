"""Invariants: each impossible combination is recognised, and carries the story it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from streamoff.errors import InvariantError, TransferError
from streamoff.machines import invariants
from streamoff.machines.download import DownloadState as D
from streamoff.machines.job_root import JobRootState as J
from streamoff.machines.serving import ServingState as P
from streamoff.machines.transaction import TransactionState as T
from streamoff.types import NO_RANGES, OutcomeStatus

from . import samples
from .desk import Desk

pytestmark = pytest.mark.core


def _lying() -> Any:
    desk = Desk()
    desk.abort()
    return replace(desk.record, outcome=replace(desk.outcome, status=OutcomeStatus.COMPLETED))


BROKEN: dict[str, tuple[Callable[[Any, tuple[str, ...]], None], object]] = {
    "acquired by nobody": (
        invariants.check_serving,
        replace(samples.serving(P.ACQUIRED), bound=None),
    ),
    "provisional too early": (
        invariants.check_serving,
        replace(samples.serving(P.PROVISIONAL), served=NO_RANGES),
    ),
    "success before the end": (
        invariants.check_serving,
        replace(samples.serving(P.SUCCEEDED), served=NO_RANGES),
    ),
    "reason and state": (invariants.check_serving, replace(samples.serving(P.FAILED), reason="")),
    "outcome and state": (
        invariants.check_transaction,
        replace(samples.transaction(T.SETTLED), outcome=None),
    ),
    "more chunks ended than began": (
        invariants.check_transaction,
        replace(samples.transaction(T.OPEN), in_flight=-1),
    ),
    "ended early": (
        invariants.check_transaction,
        replace(samples.transaction(T.OPEN), state=T.SETTLING),
    ),
    "an outcome that lies": (invariants.check_transaction, _lying()),
    "done before the end": (
        invariants.check_download,
        replace(samples.download(D.DONE), landed=NO_RANGES),
    ),
    "a cause": (
        invariants.check_download,
        replace(samples.download(D.STREAMING), cause=TransferError("early")),
    ),
    "one clock in backoff": (
        invariants.check_download,
        replace(samples.download(D.BACKOFF), give_up_at=1.0),
    ),
    "a clock that nobody reads": (
        invariants.check_job_root,
        replace(samples.job_root(J.OPEN), due=1.0),
    ),
    "stuck on nobody": (invariants.check_job_root, replace(samples.job_root(J.STUCK), stuck=())),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_impossible_record_is_recognised(what: str) -> None:
    """Each invariant can fail, names itself and tells the story."""
    check, record = BROKEN[what]
    with pytest.raises(InvariantError, match=what) as caught:
        check(record, ("t=1.000 it began",))
    assert caught.value.story == ("t=1.000 it began",)


@pytest.mark.parametrize("state", P)
def test_sound_servings_pass(state: P) -> None:
    """A record that the machine made is never objected to."""
    invariants.check_serving(samples.serving(state))


@pytest.mark.parametrize("state", D)
def test_sound_downloads_pass(state: D) -> None:
    """A record that the machine made is never objected to."""
    invariants.check_download(samples.download(state))


@pytest.mark.parametrize("state", J)
def test_sound_job_roots_pass(state: J) -> None:
    """A record that the machine made is never objected to."""
    invariants.check_job_root(samples.job_root(state))
