"""A message on its way out, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import anyio

from streamoff.errors import StreamoffError, TransferTimeoutError
from streamoff.payload.leaves import Batch
from streamoff.runtime.messages import Mailbox
from streamoff.runtime.publishing import Transaction
from streamoff.types import Address, Outcome, OutcomeStatus, SlotVerdict, Verdict
from streamoff.wire.frames import Views

__all__ = ["Delivery"]


class Delivery:
    """A message on its way to its receivers, and what became of it.

    With tensors it is a transaction: it is settled when every receiver has, or will not have, all of them.
    Without, it is settled when every target has acknowledged or refused the message. A message is repeated
    over a new link until then, and not after.
    """

    def __init__(
        self,
        targets: Sequence[Address],
        transaction: Transaction | None,
        *,
        mailbox: Mailbox,
        acquire: float,
        min_receivers: int | None = None,
        kept: Sequence[Batch] = (),
    ) -> None:
        self.targets = tuple(targets)
        self.transaction = transaction
        self._mailbox = mailbox
        self._acquire = acquire
        self._min_receivers = min_receivers
        self._kept = tuple(kept)
        self._posted: dict[Address, int] = {}
        self._answers: dict[Address, StreamoffError | None] = {}
        self._answered = anyio.Event()
        self._outcome: Outcome | None = None
        if transaction is not None:
            transaction.on_settled.append(lambda _outcome: self._withdraw())

    @property
    def outcome(self) -> Outcome | None:
        """The verdict, or None while it is open."""
        return self._outcome if self.transaction is None else self.transaction.outcome

    async def wait(self) -> Outcome:
        """Wait for the verdict; bounded by the budgets.

        Raises:
            TransferTimeoutError: A message without tensors was not acknowledged within ``acquire``; it is
                withdrawn.

        Cancellation: leaves the delivery as it is.
        """
        if self.transaction is not None:
            return await self.transaction.wait()
        with anyio.move_on_after(self._acquire):
            await self._answered.wait()
        if self._outcome is not None:
            return self._outcome
        missing = [target for target in self.targets if target not in self._answers]
        error = TransferTimeoutError(
            "a message was not acknowledged",
            expected=f"within {self._acquire:g} s",
            got=f"nothing from {', '.join(missing)}",
        )
        self._withdraw()
        for target in missing:
            self._answer(target, error)
        raise error

    def cancel(self, reason: str = "") -> None:
        """End it: whoever has not got it, or its tensors, will not; no-op when it has settled."""
        self._withdraw()
        if self.transaction is not None:
            self.transaction.cancel(reason)
        elif self._outcome is None:
            self._settle(OutcomeStatus.ABORTED, f"deleted: {reason}" if reason else "deleted")

    def post(self, target: Address, topic: str, body: Views, *, pass_through: bool) -> None:
        """Send one target its copy."""
        slot = self.targets.index(target)
        self._posted[target] = self._mailbox.post(
            target,
            topic,
            body,
            pass_through=pass_through,
            on_answer=partial(self._answered_by, slot, target),
        )

    def _withdraw(self) -> None:
        for message in self._posted.values():
            self._mailbox.forget(message)

    def _answered_by(self, slot: int, target: Address, error: StreamoffError | None) -> None:
        if error is not None:
            for batch in self._kept:
                batch.give_back()
            if self.transaction is not None:
                self.transaction.decline(slot, f"{error.what}: {error.got}")
        self._answer(target, error)

    def _answer(self, target: Address, error: StreamoffError | None) -> None:
        self._answers[target] = error
        if self.transaction is None and len(self._answers) == len(self.targets):
            failed = any(self._answers.values())
            self._settle(
                OutcomeStatus.FAILED if failed else OutcomeStatus.COMPLETED,
                "receiver_failed" if failed else "all_receivers_succeeded",
            )

    def _settle(self, status: OutcomeStatus, reason: str) -> None:
        ends: dict[str, Mapping[str, SlotVerdict]] = {}
        for target in self.targets:
            error = self._answers.get(target)
            good = target in self._answers and error is None
            why = "" if good else str(error or reason)
            verdict = SlotVerdict(Verdict.SUCCEEDED if good else Verdict.FAILED, why)
            ends[target] = MappingProxyType({"message": verdict})
        self._outcome = Outcome(
            status, reason, MappingProxyType(ends), self._min_receivers, anyio.current_time()
        )
        self._answered.set()
