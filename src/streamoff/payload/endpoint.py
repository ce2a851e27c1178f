"""The public endpoint: payload trees in, payload trees out."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import anyio

from streamoff.errors import StreamoffError, TransferTimeoutError, UsageError
from streamoff.payload.body import join, unpack
from streamoff.payload.context import DecodeContext
from streamoff.payload.encode import Encoded, Own, encode
from streamoff.payload.leaves import Batch
from streamoff.payload.resolve import Only, pull, resolve_with
from streamoff.runtime.endpoint import BaseEndpoint, Transport
from streamoff.runtime.jobs import Job
from streamoff.runtime.messages import Parcel, Subscription
from streamoff.runtime.publishing import OutcomeCallback, Transaction
from streamoff.tensors.state import State
from streamoff.types import (
    Address,
    Budgets,
    Capability,
    Outcome,
    OutcomeStatus,
    Ref,
    Slot,
    SlotVerdict,
    Verdict,
)
from streamoff.wire.frames import Cancel
from streamoff.wire.limits import DEFAULT_LIMITS, Limits, clip
from streamoff.wire.routes import may_follow

__all__ = ["Delivery", "Endpoint", "Message", "Messages"]

logger = logging.getLogger("streamoff.payload")


class Message:
    """A message that arrived: its tree, with tensors still at their source.

    Args:
        endpoint: Who received it.
        parcel: As it came.
        tree: Decoded; tensor leaves are kept refs.
        batches: Its refs.
    """

    def __init__(
        self, endpoint: Endpoint, parcel: Parcel, tree: Any, batches: tuple[Batch, ...]
    ) -> None:
        self.tree = tree
        self._endpoint = endpoint
        self._parcel = parcel
        self._batches = batches

    @property
    def sender(self) -> Address:
        """Who sent it."""
        return self._parcel.sender

    @property
    def topic(self) -> str:
        """What it is about."""
        return self._parcel.topic

    @property
    def pass_through(self) -> bool:
        """Whether the sender asked this endpoint to keep the refs; the mark ends here."""
        return self._parcel.pass_through

    async def decode(
        self, context: DecodeContext | None = None, *, only: Only | None = None
    ) -> Any:
        """The tree with its refs ended, unless the sender asked to keep them.

        Args:
            context: Where tensors land; in memory by default.
            only: Which leaves; see :func:`streamoff.resolve`.

        Raises:
            SingleConsumerError, TransferError, UsageError: See :func:`streamoff.resolve`.
        """
        if self.pass_through:
            return self.tree
        return await self.resolve(context or DecodeContext(), only=only)

    async def resolve(self, context: DecodeContext, *, only: Only | None = None) -> Any:
        """End the refs whatever the sender asked."""
        return await resolve_with(self.tree, context, self._endpoint, only)

    def decline(self, reason: str) -> None:
        """Say that nobody here will pull its tensors: the sender's slots fail at once, with the reason.

        Refs that were pulled already are left alone. Does not block.
        """
        for batch in self._batches:
            if not batch.consumed:
                batch.consumed = f"declined: {reason}"
                self._endpoint.decline(batch.ref, reason)


class Messages:
    """Messages of one topic, in order; an async iterator that can be left at any point.

    A message that cannot be decoded is logged, its tensors stay unclaimed until the sender's budgets end
    them, and the iteration goes on. ``close()`` ends the subscription.
    """

    def __init__(self, endpoint: Endpoint, subscription: Subscription) -> None:
        self._endpoint = endpoint
        self._subscription = subscription

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Wait for the next message; a cancelled wait loses none."""
        while True:
            parcel = await anext(self._subscription)
            try:
                return self._endpoint.open_parcel(parcel)
            except StreamoffError as error:
                logger.warning(
                    "%s: a message of %s on %r was dropped: %s",
                    self._endpoint.address,
                    parcel.sender,
                    parcel.topic,
                    error,
                )

    def close(self) -> None:
        """Take no more messages. Idempotent."""
        self._subscription.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Delivery:
    """A message on its way to its receivers, and what became of it.

    With tensors it is a transaction: it is settled when every receiver has, or will not have, all of them.
    Without, it is settled when every target has acknowledged or refused the message.
    """

    def __init__(self, targets: Sequence[Address], transaction: Transaction | None) -> None:
        self.targets = tuple(targets)
        self.transaction = transaction
        self._answers: dict[Address, StreamoffError | None] = {}
        self._answered = anyio.Event()
        self._acquire = 0.0

    @property
    def outcome(self) -> Outcome | None:
        """The verdict, or None while it is open."""
        if self.transaction is not None:
            return self.transaction.outcome
        return self._told() if len(self._answers) == len(self.targets) else None

    async def wait(self) -> Outcome:
        """Wait for the verdict; bounded by the budgets.

        Raises:
            TransferTimeoutError: A message without tensors was not acknowledged within ``acquire``.

        Cancellation: leaves the delivery as it is.
        """
        if self.transaction is not None:
            return await self.transaction.wait()
        with anyio.move_on_after(self._acquire):
            await self._answered.wait()
            return self._told()
        missing = [target for target in self.targets if target not in self._answers]
        raise TransferTimeoutError(
            "a message was not acknowledged",
            expected=f"within {self._acquire:g} s",
            got=f"nothing from {', '.join(missing)}",
        )

    def cancel(self, reason: str = "") -> None:
        """End it: whoever has not got the tensors will not; no-op when it has settled."""
        if self.transaction is not None:
            self.transaction.cancel(reason)

    def _answer(self, slot: int, target: Address, error: StreamoffError | None) -> None:
        self._answers[target] = error
        if self.transaction is not None and error is not None:
            self.transaction.decline(slot, f"{error.what}: {error.got}")
        if len(self._answers) == len(self.targets):
            self._answered.set()

    def _told(self) -> Outcome:
        failed = [error for error in self._answers.values() if error is not None]
        return Outcome(
            OutcomeStatus.FAILED if failed else OutcomeStatus.COMPLETED,
            "receiver_failed" if failed else "all_receivers_succeeded",
            {
                target: {
                    "message": SlotVerdict(
                        Verdict.SUCCEEDED if error is None else Verdict.FAILED,
                        "" if error is None else str(error),
                    )
                }
                for target, error in self._answers.items()
            },
            settled_at=anyio.current_time(),
        )


class Endpoint(BaseEndpoint):
    """A named participant: sends payload trees by reference, and pulls those it is sent.

    Args:
        address: Its name, e.g. ``"server"`` or ``"site-1.job-7.trainer"``.
        transports: How it can be reached and reach others.
        limits: What it accepts.
        budgets: Defaults of its transactions and downloads.
        dataclasses: Classes that messages may contain, by their name.
        capabilities: What it names to its peers.
        close_timeout: Seconds that cancels and last frames get on the way out.
        seed: Of the jitter of redials; random by default.

    Raises:
        UsageError: Not an address, or something that is no dataclass, or two of one name.
    """

    def __init__(
        self,
        address: str,
        *,
        transports: Iterable[Transport] = (),
        limits: Limits = DEFAULT_LIMITS,
        budgets: Budgets | None = None,
        dataclasses: Iterable[type] = (),
        capabilities: Iterable[Capability] = tuple(Capability),
        close_timeout: float = 5.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            address,
            transports=transports,
            limits=limits,
            budgets=budgets,
            capabilities=capabilities,
            close_timeout=close_timeout,
            seed=seed,
        )
        self._dataclasses = _registry(dataclasses)

    # --- sending ----------------------------------------------------------------------------------

    async def send(
        self,
        to: str | Iterable[str],
        topic: str,
        tree: Any,
        *,
        receivers: Iterable[str | None] | None = None,
        pass_through: bool = False,
        min_receivers: int | None = None,
        budgets: Budgets | None = None,
        on_settled: tuple[OutcomeCallback, ...] = (),
    ) -> Delivery:
        """Send a tree; its tensors stay here until they are pulled.

        Tensors and arrays are borrowed until the delivery settles: they must not change. Each target's copy
        carries a ticket of its own.

        Args:
            to: Who gets the message: an address or several, distinct.
            topic: What it is about; the receivers must be reading it.
            tree: Any payload tree.
            receivers: Who will pull, one per target, in order, when it is not the target itself; None for
                an unknown one: the first address that presents the ticket.
            pass_through: Ask the next endpoint to keep the refs instead of ending them.
            min_receivers: For the quorum view of the outcome.
            budgets: The producer's side counts; by default the endpoint's.
            on_settled: Called with the outcome of a message with tensors.

        Returns:
            The delivery; ``await delivery.wait()`` for its outcome.

        Raises:
            UnsupportedValueError, UnsupportedTensorError: Something that cannot travel. Nothing was sent.
            SingleConsumerError: A kept ref that was already resolved. Nothing was sent.
            UnreachableError: No way to a target. Nothing is left open.
            UsageError: No target, one twice, or another number of receivers.

        Cancellation: a checkpoint before anything is sent.
        """
        await anyio.lowlevel.checkpoint()
        targets = [Address(one) for one in ([to] if isinstance(to, str) else to)]
        if not targets or len(set(targets)) != len(targets):
            raise UsageError("targets", expected="at least one, each once", got=targets)
        slots = _slots(targets, receivers, pass_through=pass_through)
        encoded = encode(tree, self.limits)
        transaction = self._publish(encoded, slots, budgets, min_receivers, on_settled)
        delivery = Delivery(targets, transaction)
        delivery._acquire = (budgets or self.budgets).acquire  # noqa: SLF001 - made here
        try:
            for slot, target in enumerate(targets):
                body = join(_refs(encoded, transaction, slot), encoded.tree, self.limits)
                self.mailbox.post(
                    target,
                    topic,
                    body,
                    pass_through=pass_through,
                    on_answer=partial(delivery._answer, slot, target),  # noqa: SLF001
                )
        except BaseException:
            delivery.cancel("not sent")
            raise
        return delivery

    def _publish(
        self,
        encoded: Encoded,
        slots: list[Slot],
        budgets: Budgets | None,
        min_receivers: int | None,
        on_settled: tuple[OutcomeCallback, ...],
    ) -> Transaction | None:
        own = encoded.own
        if not own:
            return None
        try:
            transaction = self.publish(
                [one.source for one in own],
                slots,
                budgets=budgets,
                min_receivers=min_receivers,
                on_settled=on_settled,
            )
        except BaseException:
            for one in own:
                one.source.close()
            raise
        try:
            for one in own:
                job = _job_of(self, one)
                if job is not None:
                    job.attach(transaction)
        except BaseException:
            transaction.cancel("not sent")
            raise
        return transaction

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, topic: str) -> Messages:
        """Read the messages of a topic, from this moment on.

        Raises:
            UsageError: Somebody reads the topic already, or it is no topic.
            LimitError: Too many topics.
        """
        return Messages(self, self.mailbox.subscribe(topic))

    def open_parcel(self, parcel: Parcel) -> Message:
        """Decode a message; its tensors stay refs.

        Raises:
            MalformedFrameError, LimitError: The body is not acceptable.
        """
        tree, batches = unpack(parcel.body, self._dataclasses, self.limits)
        for batch in batches:
            batch.via = parcel.via
            batch.vouched = may_follow(
                batch.ref.source,
                sender=parcel.sender,
                me=self.address,
                uplink=parcel.uplink,
                peers=(parcel.via,),
            )
        return Message(self, parcel, tree, batches)

    def decline(self, ref: Ref, reason: str) -> None:
        """Tell the source of a ref that nobody here will pull it. Does not block."""
        self._send(
            Cancel(
                to=ref.source,
                sender=self.address,
                stream=0,
                ref=ref.id,
                ticket=ref.ticket,
                reason=clip(reason),
            )
        )

    async def download(
        self,
        ref: Ref,
        context: DecodeContext | None = None,
        *,
        only: Iterable[str] | None = None,
    ) -> State:
        """Pull one payload.

        Args:
            ref: What to pull.
            context: Where it lands; in memory by default.
            only: Names of the tensors wanted; all by default.

        Returns:
            A :class:`~streamoff.LazyStateDict` on disk, or a mapping of tensors in memory.

        Raises:
            TransferError: How the transfer ended; nothing of it is left.
            JobClosedError: The job admits no more downloads.

        Cancellation: cancels the transfer at its source and removes what had landed.
        """
        puller, context = (context or DecodeContext()).settled(self)
        names = None if only is None else frozenset(only)
        return await pull(puller, ref, context, names=names)


def _registry(classes: Iterable[type]) -> Mapping[str, type]:
    known: dict[str, type] = {}
    for kind in classes:
        if not dataclasses.is_dataclass(kind):
            raise UsageError("not a dataclass", got=kind)
        if kind.__name__ in known:
            raise UsageError("two dataclasses of one name", got=kind.__name__)
        known[kind.__name__] = kind
    return known


def _slots(
    targets: list[Address], receivers: Iterable[str | None] | None, *, pass_through: bool
) -> list[Slot]:
    """A ticket of its own for every target's copy."""
    owners: list[Address | None]
    if receivers is not None:
        owners = [None if one is None else Address(one) for one in receivers]
    else:
        owners = [None] * len(targets) if pass_through else list(targets)
    if len(owners) != len(targets):
        raise UsageError("receivers", expected=f"{len(targets)}, one per target", got=len(owners))
    return [Slot(secrets.token_bytes(16), owner) for owner in owners]


def _refs(encoded: Encoded, transaction: Transaction | None, slot: int) -> list[tuple[Ref, bool]]:
    own = iter(transaction.refs(slot) if transaction is not None else ())
    return [
        (next(own), one.partial) if isinstance(one, Own) else (one.ref, one.partial)
        for one in encoded.refs
    ]


def _job_of(endpoint: BaseEndpoint, own: Own) -> Job | None:
    """The open job under whose root a lazy payload lies, if it is one of this endpoint's."""
    if own.lazy is None:
        return None
    path = own.lazy.reader.path
    return next(
        (job for job in endpoint.jobs if isinstance(job, Job) and path.is_relative_to(job.path)),
        None,
    )
