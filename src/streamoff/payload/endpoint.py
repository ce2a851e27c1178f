"""The public endpoint: payload trees in, payload trees out."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import anyio

from streamoff.errors import (
    SingleConsumerError,
    StreamoffError,
    UnreachableError,
    UsageError,
)
from streamoff.machines.transaction import check_quorum
from streamoff.payload.body import Body, join
from streamoff.payload.context import DecodeContext
from streamoff.payload.delivery import Delivery
from streamoff.payload.encode import Encoded, Own, encode
from streamoff.payload.leaves import Batch
from streamoff.payload.resolve import Only, names_of, pull, resolve_with
from streamoff.payload.snapshot import snapshot_of
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import Job
from streamoff.runtime.links import Transport
from streamoff.runtime.messages import Parcel, Subscription
from streamoff.runtime.publishing import OutcomeCallback, Transaction
from streamoff.tensors.state import State
from streamoff.types import (
    Address,
    Budgets,
    Capability,
    Ref,
    Slot,
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

    @property
    def nonfinite(self) -> frozenset[str]:
        """Names of tensors that hold a NaN or an infinity, as far as a landing has looked."""
        return frozenset().union(*(batch.nonfinite for batch in self._batches))

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

        Refs that were pulled, or passed on, already are left alone. Does not block.
        """
        for batch in self._batches:
            if not batch.consumed:
                batch.consumed = f"declined: {reason}"
                batch.decline(reason)


class Messages:
    """Messages of one topic, in order; an async iterator that can be left at any point.

    A message that cannot be decoded is logged and its tensors are declined, as far as its refs can be read;
    the iteration goes on. ``close()`` ends the subscription.
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
                self._endpoint.lines.tell(
                    logger,
                    logging.WARNING,
                    "message dropped",
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
        snapshot: Job | None = None,
    ) -> Delivery:
        """Send a tree; its tensors stay here until they are pulled.

        Tensors and arrays are borrowed until the delivery settles: they must not change, unless there is a
        ``snapshot``. Each target's copy carries a ticket of its own. A kept ref is passed on as it is, to one
        target: from then on that is its consumer, unless the message is refused.

        Args:
            to: Who gets the message: an address or several, distinct.
            topic: What it is about; the receivers must be reading it.
            tree: Any payload tree.
            receivers: Who will pull, one per target, in order, when it is not the target itself; None for
                an unknown one: the first address that presents the ticket.
            pass_through: Ask the next endpoint to keep the refs instead of ending them.
            min_receivers: For the quorum view of the outcome.
            budgets: The producer's side counts; by default the endpoint's.
            on_settled: Called with the outcome of a message with tensors of its own, in order, in the event loop,
                before they are let go. They must not block; what they raise is logged.
            snapshot: Copy the tree's own tensors and arrays to files under this job's root first, charged to
                its quota, and serve those: what is in memory may change as soon as this returns.

        Returns:
            The delivery; ``await delivery.wait()`` for its outcome.

        Raises:
            UnsupportedValueError, UnsupportedTensorError: Something that cannot travel. Nothing was sent.
            SingleConsumerError: A kept ref that has a consumer, or that would get several. Nothing was sent.
            UnreachableError: No way to a target. Nothing was sent, to nobody.
            UsageError: No target, one twice, another number of receivers, or an impossible quorum.
            LimitError: Too deep, too large, or too many messages wait. Nothing was sent.
            SourceChangedError, TransferError: The snapshot failed. Nothing was sent, nothing is left of it.
            JobClosedError: The job of the snapshot, or of a lazy tensor, is closing. Nothing was sent.

        Cancellation: nothing was sent, nothing is left of a snapshot.
        """
        await anyio.lowlevel.checkpoint()
        targets = [Address(one) for one in ([to] if isinstance(to, str) else to)]
        if not targets or len(set(targets)) != len(targets):
            raise UsageError("targets", expected="at least one, each once", got=targets)
        slots = _slots(targets, receivers, pass_through=pass_through)
        check_quorum(min_receivers, len(slots))
        self._check_reachable(targets)
        encoded = encode(tree, self.limits)
        kept = [one.batch for one in encoded.kept]
        try:
            _check_one_target(kept, targets)
            if snapshot is not None:
                encoded = await snapshot_of(encoded, snapshot)
                self._check_reachable(targets)
                for batch in kept:
                    batch.check_free(f"passed on to {targets[0]}")
            transaction = self._publish(encoded, slots, budgets, min_receivers, on_settled)
        except BaseException:
            encoded.close()
            raise
        delivery = Delivery(
            targets,
            transaction,
            mailbox=self.mailbox,
            acquire=(budgets or self.budgets).acquire,
            min_receivers=min_receivers,
            kept=kept,
        )
        try:
            for slot, target in enumerate(targets):
                body = join(_refs(encoded, transaction, slot), encoded.tree, self.limits)
                delivery.post(target, topic, body, pass_through=pass_through)
        except BaseException:
            delivery.cancel("not sent")
            raise
        for batch in kept:
            batch.consumed = f"passed on to {targets[0]}"
        return delivery

    def _check_reachable(self, targets: Iterable[Address]) -> None:
        for target in targets:
            if not self.can_reach(target):
                raise UnreachableError("no way to the receiver", peer=target)

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
        transaction = self.publish(
            [one.source for one in own],
            slots,
            budgets=budgets,
            min_receivers=min_receivers,
            on_settled=on_settled,
        )
        try:
            for job in {job for one in own if (job := _job_of(self, one)) is not None}:
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
            MalformedFrameError, LimitError: The body is not acceptable; what refs could be read are declined.
        """
        body = Body(parcel.body, self._dataclasses, self.limits)
        batches = tuple(body.read_refs())
        for batch in batches:
            batch.via = parcel.via
            batch.tell = partial(self.decline, batch.ref)
            batch.vouched = may_follow(
                batch.ref.source,
                sender=parcel.sender,
                me=self.address,
                uplink=parcel.uplink,
                peers=parcel.via,
            )
        try:
            return Message(self, parcel, body.read_tree(), batches)
        except StreamoffError as error:
            for batch in batches:
                batch.decline(f"the message was not understood: {error.what}")
            raise

    def decline(self, ref: Ref, reason: str) -> None:
        """Tell the source of a ref that nobody here will pull it. Does not block."""
        self.links.send(
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
        names = None if only is None else names_of(only)
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


def _check_one_target(kept: Sequence[Batch], targets: Sequence[Address]) -> None:
    if kept and len(targets) > 1:
        raise SingleConsumerError(
            "a kept ref goes to one target",
            expected="one consumer",
            got=", ".join(targets),
            ref=kept[0].ref.id,
            site=kept[0].ref.source,
        )


def _refs(encoded: Encoded, transaction: Transaction | None, slot: int) -> list[tuple[Ref, bool]]:
    own = iter(transaction.refs(slot) if transaction is not None else ())
    return [
        (next(own), one.partial) if isinstance(one, Own) else (one.batch.ref, one.partial)
        for one in encoded.refs
    ]


def _job_of(endpoint: BaseEndpoint, own: Own) -> Job | None:
    """The open job under whose root a lazy payload lies, if it is one of this endpoint's."""
    path = own.path
    if path is None:
        return None
    return next(
        (job for job in endpoint.jobs if isinstance(job, Job) and path.is_relative_to(job.path)),
        None,
    )
