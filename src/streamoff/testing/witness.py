"""What must hold while two machines talk, whatever the link does, and when both have ended.

A witness sees every step of both ends. It knows nothing of the tables: it keeps its own times and compares
what each end claims with what the other end has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


class Witness:
    """Watches one transaction and its downloads.

    Args:
        keys: The downloads.
        budgets: Of both ends.
        landing: The longest that checking, landing or finalising takes, in seconds.
    """

    def __init__(self, keys: Iterable[Key], budgets: Budgets, *, landing: float) -> None:
        self.story = Story("transaction")
        self.stories = {key: Story(f"{key[1]} at site-{key[0]}") for key in keys}
        self._budgets = budgets
        self._patience = budgets.retry_schedule + CONFIRM_ATTEMPTS * budgets.confirm + landing
        self._served_at = dict.fromkeys((key[0] for key in self.stories), 0.0)
        self._landed_at = dict.fromkeys(self.stories, 0.0)

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
        check_transaction(after, self.story.lines())
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
        check_download(after, story.lines())
        self.require(not before.ended or after == before, "an end that changed", story)
        self.require(not after.landed.missing(before.landed), "landed ranges that shrank", story)
        begun = before.state is DownloadState.IDLE or bool(after.wanted) > bool(before.wanted)
        if begun or after.landed.nbytes > before.landed.nbytes:
            self._landed_at[key] = event.now
        waited = event.now - self._landed_at[key]
        patient = waited <= self._patience + after.held + SLACK
        self.require(before.ended or patient, "a download that waits too long", story, got=waited)

    def download_ended(
        self,
        key: Key,
        record: Download,
        reports: tuple[StreamoffError | None, ...],
        verdict: Verdict | None,
    ) -> None:
        """See how a download ended; ``verdict`` is what the producer says, None if it died.

        Raises:
            InvariantError: It did not end, was not reported exactly once, or the two ends disagree.
        """
        story = self.stories[key]
        begun = record.state is not DownloadState.IDLE
        self.require(record.ended or not begun, "a download that never ended", story)
        self.require(len(reports) == int(begun), "not exactly one report", story, got=reports)
        delivered = record.state is DownloadState.DONE
        self.require((reports == (None,)) == delivered, "a report that lies", story, got=reports)
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
        latest = max(self._latest(record, slot) for slot in self._served_at)
        late = record.outcome.settled_at - latest - self._budgets.settle
        self.require(late <= SLACK, "a transaction that outlived its budgets", got=late)

    def _latest(self, record: Transaction, slot: int) -> float:
        """When the budgets of a slot ran out at the latest."""
        if any(serving.bound is not None for serving in record.of_slot(slot)):
            return self._served_at[slot] + record.held[slot] + self._budgets.idle
        return self._budgets.acquire
