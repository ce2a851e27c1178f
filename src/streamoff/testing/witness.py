"""What must hold while two machines talk, whatever the link does, and when both have ended.

A witness sees every step of both ends. It knows nothing of the tables: it keeps its own times and compares
what each end claims with what the other end has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from streamoff.errors import InvariantError, StreamoffError
from streamoff.machines import download as d, serving as s, transaction as t
from streamoff.machines.download import CONFIRM_ATTEMPTS, Download, DownloadState
from streamoff.machines.invariants import check_download, check_transaction
from streamoff.machines.story import Story
from streamoff.machines.transaction import Transaction
from streamoff.types import Budgets, RefId, Verdict

__all__ = ["Key", "Witness"]

Key = tuple[int, RefId]
"""A slot's number and a ref id: one download, and the record that serves it."""

SLACK = 1e-6
"""Seconds; sums of floating-point times differ by the order of the summands."""

ONCE = (t.TellCallbacks, t.ReleaseSource, t.RecordOutcome, t.WakeWaiters)

_WHILE_LANDING = (
    d.Exhausted,
    d.GraceExpired,
    d.Noticed,
    d.Refused,
    d.LandingFailed,
    d.CancelRequested,
)
_ENDS: Final[Mapping[DownloadState, tuple[type[d.DownloadEvent], ...]]] = {
    DownloadState.IDLE: (d.Noticed, d.CancelRequested),
    DownloadState.OPENING: _WHILE_LANDING,
    DownloadState.STREAMING: _WHILE_LANDING,
    DownloadState.BACKOFF: _WHILE_LANDING,
    DownloadState.FINALISING: (d.LandingFailed, d.CancelRequested, d.Exhausted),
}
"""What is a real cause, and when; the first one to come is the one that is reported."""


@contextmanager
def _telling(story: Story) -> Iterator[None]:
    """Let an invariant that breaks tell the story; it is written only then."""
    try:
        yield
    except InvariantError as error:
        error.story = story.lines()
        raise


class Witness:
    """Watches one transaction and its downloads.

    Args:
        keys: The downloads.
        budgets: Of both ends.
        landing: The longest that checking, landing or finalising takes, in seconds.
        began: When the transaction was opened.
    """

    def __init__(
        self, keys: Iterable[Key], budgets: Budgets, *, landing: float, began: float = 0.0
    ) -> None:
        self.story = Story("transaction")
        self.stories = {key: Story(f"{key[1]} at site-{key[0]}") for key in keys}
        self._budgets = budgets
        self._patience = budgets.retry_schedule + CONFIRM_ATTEMPTS * budgets.confirm + landing
        self._began = began
        self._served_at = dict.fromkeys((key[0] for key in self.stories), began)
        self._landed_at = dict.fromkeys(self.stories, began)
        self._cause: str | None = None

    def require(
        self, holds: bool, what: str, story: Story | None = None, got: object = None
    ) -> None:
        """Raise unless it holds.

        Raises:
            InvariantError: With the story.
        """
        if not holds:
            raise InvariantError(what, got=got, story=(story or self.story).lines())

    def served(
        self,
        event: t.Event,
        before: Transaction,
        after: Transaction,
        effects: tuple[t.TransactionEffect, ...],
        downloads: Mapping[Key, Download],
    ) -> None:
        """See one step of the producer.

        Raises:
            InvariantError: A verdict or outcome changed, the producer claims a success that the receiver
                does not have, or the source is read after it was released.
        """
        self.story.tell(event.now, event, before.state, after.state, effects)
        with _telling(self.story):
            check_transaction(after)
        for key, was in before.servings.items():
            now = after.servings[key]
            self.require(not was.final or now == was, "a verdict that changed", got=key)
            grown = now.served.nbytes - was.served.nbytes
            self.require(grown >= 0, "served ranges that shrank", got=key)
            if grown or (was.bound is None and now.bound is not None):
                self._served_at[key[0]] = event.now
            has = downloads[key].state in {DownloadState.CONFIRMING, DownloadState.DONE}
            claims = now.state is s.ServingState.SUCCEEDED
            self.require(has or not claims, "a success that nobody has", self.stories[key])
        kept = before.outcome is None or before.outcome is after.outcome
        self.require(kept, "an outcome that changed")
        reads = any(isinstance(effect, s.ServeRange) for effect in effects)
        self.require(before.outcome is None or not reads, "served after the source was released")
        self._note_cause(event, before, after)

    def _note_cause(self, event: t.Event, before: Transaction, after: Transaction) -> None:
        """Remember what first made a slot fail: that, and nothing later, is the transaction's reason."""
        failed = [
            now
            for key, now in after.servings.items()
            if now.state is s.ServingState.FAILED and not before.servings[key].final
        ]
        if not failed or self._cause is not None:
            return
        match event:
            case t.Aborted(reason=reason):
                self._cause = reason
            case t.Ticked():
                self._cause = failed[0].reason
            case _:
                self._cause = "receiver_failed"

    def received(
        self,
        event: d.DownloadEvent,
        key: Key,
        before: Download,
        after: Download,
        effects: tuple[d.DownloadEffect, ...],
    ) -> None:
        """See one step of a receiver.

        Raises:
            InvariantError: An end changed, landed ranges shrank, or it waits longer than its budgets say.
        """
        story = self.stories[key]
        story.tell(event.now, event, before.state, after.state, effects)
        with _telling(story):
            check_download(after)
        self.require(not before.ended or after == before, "an end that changed", story)
        if not before.ended:
            self._check_cause(event, key, before, after)
        self.require(not after.landed.missing(before.landed), "landed ranges that shrank", story)
        begun = before.state is DownloadState.IDLE or bool(after.wanted) > bool(before.wanted)
        if begun or after.landed.nbytes > before.landed.nbytes:
            self._landed_at[key] = event.now
        waited = event.now - self._landed_at[key]
        patient = waited <= self._patience + after.held + SLACK
        self.require(before.ended or patient, "a download that waits too long", story, got=waited)

    def _check_cause(
        self, event: d.DownloadEvent, key: Key, before: Download, after: Download
    ) -> None:
        story, real = self.stories[key], isinstance(event, _ENDS.get(before.state, ()))
        self.require(real == (after.cause is not None), "not the first real cause", story, event)
        if real and not isinstance(event, d.CancelRequested):
            same = after.cause is getattr(event, "error", None)
            self.require(same, "a cause that was not the first", story, event)

    def begun_again(self, key: Key) -> None:
        """See that the caller tries a download once more."""
        self.stories[key] = Story(f"{key[1]} at site-{key[0]}, again")

    def download_ended(
        self,
        key: Key,
        record: Download,
        reports: tuple[StreamoffError | None, ...],
        verdict: Verdict | None,
        arrived: bool,
    ) -> None:
        """See how a download ended.

        Args:
            key: Which one.
            record: As it is now.
            reports: What its caller was told.
            verdict: What the producer says; None if it died.
            arrived: Whether the whole payload is on the receiver's disk.

        Raises:
            InvariantError: It did not end, was not reported exactly once, its word and its disk differ, or
                the two ends disagree.
        """
        story = self.stories[key]
        begun = record.state is not DownloadState.IDLE
        self.require(record.ended or not begun, "a download that never ended", story)
        self.require(len(reports) == int(begun), "not exactly one report", story, got=reports)
        delivered = record.state is DownloadState.DONE
        told = (None,) if delivered else (record.cause,)
        self.require(not begun or reports == told, "a report that lies", story, got=reports)
        self.require(arrived == delivered, "a payload that is not where it should be", story)
        succeeded = verdict is Verdict.SUCCEEDED
        self.require(delivered or not succeeded, "a success that nobody has", story)

    def transaction_ended(self, record: Transaction, told: tuple[t.TransactionEffect, ...]) -> None:
        """See how the transaction ended; ``told`` are its own effects, in order.

        Raises:
            InvariantError: It did not settle exactly once, or not within its budgets.
        """
        kinds = tuple(type(effect) for effect in told)
        self.require(kinds == ONCE, "not settled exactly once, in order", got=kinds)
        assert record.outcome is not None
        reason = "all_receivers_succeeded" if self._cause is None else self._cause
        self.require(record.outcome.reason == reason, "not the first cause", got=record.outcome)
        latest = max(self._latest(record, slot) for slot in self._served_at)
        late = record.outcome.settled_at - latest - self._budgets.settle
        self.require(late <= SLACK, "a transaction that outlived its budgets", got=late)

    def _latest(self, record: Transaction, slot: int) -> float:
        """When the budgets of a slot ran out at the latest."""
        if any(serving.bound is not None for serving in record.of_slot(slot)):
            return self._served_at[slot] + record.held[slot] + self._budgets.idle
        return self._began + self._budgets.acquire
