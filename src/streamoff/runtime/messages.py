"""The mailbox: messages sent until they are acknowledged, and messages that wait for their reader.

A message is repeated over a new link until the receiver has acknowledged it; the receiver remembers what it
has seen and delivers it once. Every queue and every memory here is bounded.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final, Self

import anyio
import anyio.lowlevel

from streamoff.errors import LimitError, StreamoffError, UnreachableError, UsageError
from streamoff.runtime.sparing import Lines
from streamoff.runtime.timers import Timers
from streamoff.tensors.views import nbytes
from streamoff.types import MIB, Address
from streamoff.wire.codec import encode
from streamoff.wire.frames import (
    Ack,
    AckOf,
    Error,
    ErrorCode,
    FrameType,
    Message,
    MessageKind,
    Routed,
    Views,
)
from streamoff.wire.limits import Limits, clip

__all__ = [
    "MAX_DEDUPLICATED",
    "MAX_QUEUED",
    "MAX_QUEUED_BYTES",
    "MAX_TOPICS",
    "MAX_UNACKED",
    "UNACKED_SECONDS",
    "Mailbox",
    "MailboxStatistics",
    "Parcel",
    "Subscription",
]

logger = logging.getLogger("streamoff.messages")

MAX_QUEUED: Final = 1024
"""Messages of one topic that wait for their reader; more are answered ``busy``."""
MAX_TOPICS: Final = 256
MAX_UNACKED: Final = 4096
"""Messages sent and not acknowledged; one more is refused."""
MAX_QUEUED_BYTES: Final = 256 * MIB
"""Bodies of all messages that wait for their readers; more are answered ``busy``."""
UNACKED_SECONDS: Final = 600.0
"""How long a message is repeated to a receiver that does not come back."""
MAX_DEDUPLICATED: Final = 65_536
"""Message ids remembered, so that a message repeated over a new link is delivered once."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message as it came: not decoded, sender checked.

    Args:
        sender: Who sent it.
        topic: What it is about.
        id: The sender's number.
        pass_through: Whether refs are to be kept here.
        body: The encoded tree.
        via: Whom the neighbour it came from may speak for.
        uplink: Whether that neighbour is the uplink.
    """

    sender: Address
    topic: str
    id: int
    pass_through: bool
    body: Views
    via: tuple[Address, ...]
    uplink: bool


class Subscription:
    """Messages of one topic, in order; an async iterator that can be left at any point.

    At most :data:`MAX_QUEUED` messages wait; senders of more are told ``busy``.
    """

    def __init__(self, topic: str, close: Callable[[Subscription], None]) -> None:
        self.topic = topic
        self.nbytes = 0
        self._close = close
        self._queue: deque[Parcel] = deque()
        self._ready = anyio.Semaphore(0)  # one for each message, and one for the end
        self._open = True

    def put(self, parcel: Parcel) -> bool:
        """Queue a message; False if there is no room."""
        if len(self._queue) >= MAX_QUEUED:
            return False
        self._queue.append(parcel)
        self.nbytes += nbytes(parcel.body)
        self._ready.release()
        return True

    def __len__(self) -> int:
        return len(self._queue)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Parcel:
        """Wait for the next message; a cancelled wait loses none. Several readers share the messages."""
        await self._ready.acquire()
        if not self._queue:
            self._ready.release()  # the other readers see the end, too
            raise StopAsyncIteration
        parcel = self._queue.popleft()
        self.nbytes -= nbytes(parcel.body)
        return parcel

    def close(self) -> None:
        """Take no more messages; what is queued can still be read. Idempotent."""
        if self._open:
            self._open = False
            self._close(self)
            self._ready.release()


@dataclass(slots=True)
class _Unacked:
    frame: Message
    give_up_at: float
    on_answer: Callable[[StreamoffError | None], None] | None


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """A snapshot; counters since the endpoint started.

    Args:
        subscriptions: Topics that have a reader.
        queued: Messages that wait for their readers.
        queued_bytes: Their bodies.
        unacked: Messages sent and not answered.
        repeated: Messages that were sent again over a new link.
        undelivered: Messages that were refused, or not acknowledged in time.
        refused: Messages of others that were refused: nobody reads their topic, or too many wait.
        remembered: Message ids by which a repeated one is known.
    """

    subscriptions: int
    queued: int
    queued_bytes: int
    unacked: int
    repeated: int
    undelivered: int
    refused: int
    remembered: int


class Mailbox:
    """The messages of one endpoint.

    Args:
        address: Whose it is.
        send: Queues a frame on the way to its address; loses it if there is none.
        can_reach: Whether there is a way to an address now.
        limits: Of topics.
        timers: The endpoint's clock.
        lines: The endpoint's log.
    """

    def __init__(
        self,
        *,
        address: Address,
        send: Callable[[Routed], None],
        can_reach: Callable[[Address], bool],
        limits: Limits,
        timers: Timers,
        lines: Lines,
    ) -> None:
        self._address = address
        self._send = send
        self._can_reach = can_reach
        self._limits = limits
        self._lines = lines
        self._timer = timers.timer(self._give_up_late)
        self._repeated = self._undelivered = self._refused = 0
        self._subscriptions: dict[str, Subscription] = {}
        self._unacked: OrderedDict[int, _Unacked] = OrderedDict()
        self._seen: OrderedDict[tuple[Address, bytes, int], None] = OrderedDict()
        self._ids = count(
            secrets.randbits(48)
        )  # a restarted sender repeats no id of its former life

    def statistics(self) -> MailboxStatistics:
        """A snapshot."""
        return MailboxStatistics(
            subscriptions=len(self._subscriptions),
            queued=sum(len(one) for one in self._subscriptions.values()),
            queued_bytes=self._queued_bytes(),
            unacked=len(self._unacked),
            repeated=self._repeated,
            undelivered=self._undelivered,
            refused=self._refused,
            remembered=len(self._seen),
        )

    def _queued_bytes(self) -> int:
        return sum(one.nbytes for one in self._subscriptions.values())

    # --- receiving --------------------------------------------------------------------------------

    def subscribe(self, topic: str) -> Subscription:
        """Take the messages of a topic; one reader at a time.

        Raises:
            UsageError: Somebody reads the topic already, or it is no topic.
            LimitError: Too many topics.
        """
        if not 1 <= len(topic) <= self._limits.topic:
            limit = f"1 to {self._limits.topic} characters"
            raise UsageError("not a topic", expected=limit, got=topic)
        if topic in self._subscriptions:
            raise UsageError("the topic has a reader already", got=topic)
        if len(self._subscriptions) >= MAX_TOPICS:
            raise LimitError(
                "limit 'topics' exceeded", expected=f"at most {MAX_TOPICS}", got=MAX_TOPICS + 1
            )
        subscription = Subscription(topic, self._unsubscribe)
        self._subscriptions[topic] = subscription
        return subscription

    def _unsubscribe(self, subscription: Subscription) -> None:
        if self._subscriptions.get(subscription.topic) is subscription:
            del self._subscriptions[subscription.topic]

    def on_message(
        self, frame: Message, instance: bytes, via: tuple[Address, ...], *, uplink: bool
    ) -> None:
        """A message came; ``instance`` is the sender's life, as far as it is known."""
        key = (frame.sender, instance, frame.id)
        if key not in self._seen:
            subscription = self._subscriptions.get(frame.topic)
            if subscription is None:
                self._refuse(frame, ErrorCode.UNKNOWN_TOPIC, f"nobody reads {frame.topic!r}")
                return
            parcel = Parcel(
                frame.sender,
                frame.topic,
                frame.id,
                frame.pass_through,
                frame.body,
                via,
                uplink,
            )
            too_large = self._queued_bytes() + nbytes(frame.body) > MAX_QUEUED_BYTES
            if too_large or not subscription.put(parcel):
                self._refuse(frame, ErrorCode.BUSY, "too many messages wait already")
                return
            self._seen[key] = None
            if len(self._seen) > MAX_DEDUPLICATED:
                self._seen.popitem(last=False)
        self._send(Ack(to=frame.sender, sender=self._address, of=AckOf.MESSAGE, id=frame.id))

    def _refuse(self, frame: Message, code: ErrorCode, detail: str) -> None:
        self._refused += 1
        text = "%s refused a message of %s on %r: %s"
        self._tell("refused", text, frame.sender, frame.topic, detail)
        self._send(
            Error(
                to=frame.sender,
                sender=self._address,
                of=FrameType.MESSAGE,
                id=frame.id,
                code=code,
                detail=clip(detail),
            )
        )

    # --- sending ----------------------------------------------------------------------------------

    def post(
        self,
        to: Address,
        topic: str,
        body: Views,
        *,
        pass_through: bool = False,
        on_answer: Callable[[StreamoffError | None], None] | None = None,
    ) -> int:
        """Send a message; it is repeated over a new link until it is acknowledged.

        Args:
            to: Who gets it.
            topic: What it is about.
            body: The encoded tree.
            pass_through: Keep refs at the next endpoint.
            on_answer: Called once: with None when the receiver has it, with an error if it refuses.

        Returns:
            Its id.

        Raises:
            UnreachableError: No way to the receiver now.
            LimitError: Too many messages are unacknowledged, or the message is too large.
            UsageError: Not a topic. Nothing was sent.
        """
        self._give_up_late()
        if not self._can_reach(to):
            raise UnreachableError("no way to the receiver", peer=to)
        if len(self._unacked) >= MAX_UNACKED:
            raise LimitError(
                "unacknowledged messages", expected=f"at most {MAX_UNACKED}", got=MAX_UNACKED + 1
            )
        frame = Message(
            to=to,
            sender=self._address,
            kind=MessageKind.REQUEST,
            topic=topic,
            id=next(self._ids),
            pass_through=pass_through,
            body=body,
        )
        encode(frame, self._limits)  # refused here, and not by the link, which would not survive it
        give_up_at = anyio.current_time() + UNACKED_SECONDS
        self._unacked[frame.id] = _Unacked(frame, give_up_at, on_answer)
        self._timer.at(min(self._timer.due, give_up_at))
        self._send(frame)
        return frame.id

    def forget(self, message: int) -> None:
        """Stop repeating a message."""
        self._unacked.pop(message, None)

    def repeat(self, along: Callable[[Address], bool]) -> None:
        """A new way: send again what has not been acknowledged and goes that way."""
        for waiting in tuple(self._unacked.values()):
            if along(waiting.frame.to) and self._can_reach(waiting.frame.to):
                self._repeated += 1
                self._send(waiting.frame)

    def _give_up_late(self) -> None:
        """Repeat no more what was sent too long ago."""
        now = anyio.current_time()
        while self._unacked and (first := next(iter(self._unacked.values()))).give_up_at <= now:
            seconds = f"within {UNACKED_SECONDS:g} s"
            self._answered(
                first.frame.to,
                first.frame.id,
                UnreachableError(
                    "a message was not acknowledged", expected=seconds, peer=first.frame.to
                ),
            )
        self._timer.at(next((one.give_up_at for one in self._unacked.values()), None))

    def on_acked(self, sender: Address, message: int) -> None:
        """The receiver has it."""
        self._answered(sender, message, None)

    def on_refused(self, sender: Address, message: int, why: str) -> None:
        """The receiver will not have it, or is not there."""
        error = UnreachableError("the message was refused", got=why, peer=sender)
        self._answered(sender, message, error)

    def _answered(self, sender: Address, message: int, error: StreamoffError | None) -> None:
        waiting = self._unacked.get(message)
        if waiting is None or waiting.frame.to != sender:
            return
        del self._unacked[message]
        if error is not None:
            self._undelivered += 1
            text = "%s: a message to %s on %r was not delivered: %s"
            why = error.line("peer")
            self._tell("not delivered", text, waiting.frame.to, waiting.frame.topic, why)
        if waiting.on_answer is not None:
            try:
                waiting.on_answer(error)
            except Exception as failure:  # noqa: BLE001 - whoever wrote it must act, not this
                text = "%s: a callback of message %d failed"
                facts = (self._address, waiting.frame.id)
                self._lines.tell(logger, logging.ERROR, "callback", text, *facts, exc_info=failure)

    def _tell(self, kind: str, text: str, *args: object) -> None:
        self._lines.tell(logger, logging.INFO, kind, text, self._address, *args)

    # --- the way out ------------------------------------------------------------------------------

    def close(self) -> None:
        """End every subscription; what was sent can still be acknowledged."""
        for subscription in tuple(self._subscriptions.values()):
            subscription.close()

    def give_up(self, why: str) -> None:
        """Wait for no acknowledgement any more: there will be none."""
        for message, waiting in tuple(self._unacked.items()):
            error = UnreachableError("a message was not acknowledged", got=why)
            self._answered(waiting.frame.to, message, error)
        self._timer.cancel()
