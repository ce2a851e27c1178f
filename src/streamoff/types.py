"""The vocabulary of streamoff: small, frozen, validated where they are made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final, Self

from streamoff.errors import LimitError, UsageError

__all__ = [
    "CHUNK_BYTES",
    "MIB",
    "NO_RANGES",
    "Address",
    "Budgets",
    "ByteRange",
    "Capability",
    "Outcome",
    "OutcomeStatus",
    "RangeSet",
    "Ref",
    "RefId",
    "Slot",
    "SlotVerdict",
    "TensorSpec",
    "Verdict",
]

MIB: Final = 1024 * 1024
CHUNK_BYTES: Final = 4 * MIB
"""A range of the payload with its own digest; what one thread hop lands."""

_SEGMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

RefId = str


class Address(str):
    """Name of an endpoint: dot-joined segments; every prefix is an ancestor.

    A segment is 1 to 64 letters, digits, ``-`` or ``_`` and starts with a letter or digit; an address
    has at most 255 characters.

    Raises:
        UsageError: The text is no address.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Validate ``text`` once, where it enters."""
        given: object = text
        if type(text) is cls:
            return text
        if (
            not isinstance(given, str)
            or len(text) > 255
            or not all(_SEGMENT.fullmatch(part) for part in text.split("."))
        ):
            raise UsageError(
                "not an address",
                expected="dot-joined segments of letters, digits, '-' and '_'",
                got=text,
            )
        return super().__new__(cls, text)

    @property
    def parent(self) -> Address | None:
        """The address one segment shorter, or None at the top."""
        head, dot, _ = self.rpartition(".")
        return Address(head) if dot else None

    def child(self, segment: str) -> Address:
        """The address one segment longer."""
        return Address(f"{self}.{segment}")

    def covers(self, other: str) -> bool:
        """Whether ``other`` is this address or lies below it."""
        return other == self or other.startswith(f"{self}.")


class Capability(StrEnum):
    """What both ends of a transfer must name before either relies on it."""

    CANCEL = "cancel"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True)
class Ref:
    """The small, serialisable name of one payload.

    Args:
        source: Who serves it.
        id: Unique at the source, 1 to 64 characters.
        ticket: 16 bytes; whoever presents it may take one slot of the transaction.
        size: Payload length in bytes, header included.
    """

    source: Address
    id: RefId
    ticket: bytes = field(repr=False)
    size: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.id) <= 64 or not self.id.isascii() or not self.id.isprintable():
            raise UsageError("not a ref id", expected="1 to 64 printable characters", got=self.id)
        if len(self.ticket) != 16:
            raise UsageError("not a ticket", expected="16 bytes", got=f"{len(self.ticket)} bytes")
        if not 8 <= self.size < 2**63:
            raise UsageError("not a payload size", expected="8 to 2**63 - 1", got=self.size)


@dataclass(frozen=True, slots=True)
class Slot:
    """One receiver's place in a transaction.

    Args:
        ticket: 16 bytes, the slot's identity.
        address: The only address that may present the ticket, or None: the first one binds it.
    """

    ticket: bytes = field(repr=False)
    address: Address | None = None

    @property
    def name(self) -> str:
        """How reports name the slot: its address, or the start of its ticket."""
        return self.address or f"slot-{self.ticket[:3].hex()}"


class ByteRange(tuple[int, int]):
    """A half-open range of bytes, ``0 <= start <= stop``."""

    __slots__ = ()

    def __new__(cls, start: int, stop: int) -> Self:
        """Validate the order of the bounds."""
        if not 0 <= start <= stop:
            raise UsageError("not a byte range", expected="0 <= start <= stop", got=(start, stop))
        return super().__new__(cls, (start, stop))

    def __getnewargs__(self) -> tuple[int, int]:
        """Copy and pickle by the two bounds."""
        return self[0], self[1]

    @property
    def start(self) -> int:
        """First byte."""
        return self[0]

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self[1]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self[1] - self[0]

    def covers(self, other: ByteRange) -> bool:
        """Whether every byte of ``other`` is in this range."""
        return self[0] <= other[0] and other[1] <= self[1]


@dataclass(frozen=True, slots=True)
class RangeSet:
    """Disjoint byte ranges in order; adjacent ones are merged, empty ones vanish.

    Sequential transfers keep one range, windows a handful; every operation is linear in their number.
    """

    ranges: tuple[ByteRange, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[ByteRange]) -> RangeSet:
        """Build a set from ranges in any order; overlaps are merged."""
        merged: list[ByteRange] = []
        for item in sorted(item for item in ranges if item.nbytes):
            if merged and item.start <= merged[-1].stop:
                merged[-1] = ByteRange(merged[-1].start, max(merged[-1].stop, item.stop))
            else:
                merged.append(item)
        return cls(tuple(merged))

    def add(self, item: ByteRange) -> RangeSet:
        """Return the union with one range."""
        if not item.nbytes:
            return self
        last = self.ranges[-1] if self.ranges else None
        if last is not None and last.start <= item.start <= last.stop:  # the sequential case
            grown = ByteRange(last.start, max(last.stop, item.stop))
            return RangeSet((*self.ranges[:-1], grown))
        return RangeSet.of((*self.ranges, item))

    def covers(self, item: ByteRange) -> bool:
        """Whether every byte of ``item`` is in the set."""
        return not item.nbytes or any(mine.covers(item) for mine in self.ranges)

    def missing(self, within: RangeSet) -> RangeSet:
        """The bytes of ``within`` that are not in this set."""
        gaps: list[ByteRange] = []
        for want in within:
            at = want.start
            for mine in self.ranges:
                if mine.stop <= at:
                    continue
                if mine.start >= want.stop:
                    break
                if mine.start > at:
                    gaps.append(ByteRange(at, mine.start))
                at = max(at, mine.stop)
            if at < want.stop:
                gaps.append(ByteRange(at, want.stop))
        return RangeSet(tuple(gaps))

    @property
    def nbytes(self) -> int:
        """Number of bytes in the set."""
        return sum(item.nbytes for item in self.ranges)

    def __iter__(self) -> Iterator[ByteRange]:
        return iter(self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)


NO_RANGES: Final = RangeSet()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and place of one tensor in a safetensors payload.

    Args:
        name: Any string; never used as a file name.
        dtype: The safetensors name, e.g. ``"BF16"``.
        shape: Sizes; () for a scalar.
        start: First byte, relative to the data section.
        stop: One past the last byte, relative to the data section.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Verdict(StrEnum):
    """How one slot ended on one ref."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class OutcomeStatus(StrEnum):
    """How a transaction ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SlotVerdict:
    """The end of one slot on one ref: verdict, reason (empty on success) and bytes served."""

    verdict: Verdict
    reason: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of a transaction.

    Args:
        status: Completed only if every slot succeeded on every ref.
        reason: The first real cause, e.g. ``"all_receivers_succeeded"``, ``"idle_timeout"``.
        slots: Slot name to ref id to verdict.
        min_receivers: How many slots must succeed for :attr:`quorum`; None means all.
        settled_at: Monotonic seconds.
    """

    status: OutcomeStatus
    reason: str
    slots: Mapping[str, Mapping[RefId, SlotVerdict]]
    min_receivers: int | None = None
    settled_at: float = 0.0

    @property
    def succeeded(self) -> tuple[str, ...]:
        """Names of the slots that succeeded on every ref."""
        return tuple(
            name
            for name, refs in self.slots.items()
            if refs and all(end.verdict is Verdict.SUCCEEDED for end in refs.values())
        )

    @property
    def quorum(self) -> bool:
        """Whether ``min_receivers`` slots (all, if None) succeeded on every ref."""
        if self.min_receivers is None:
            return self.status is OutcomeStatus.COMPLETED
        return len(self.succeeded) >= self.min_receivers


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How long each wait may last, in seconds; a slow link that moves bytes never times out.

    Consistent by construction: the producer's ``idle`` must exceed the receiver's whole retry schedule,
    so that a receiver that is still trying is never given up first.

    Args:
        acquire: Producer: until a slot's first ``open``.
        idle: Producer: without progress of a slot, anywhere in the transaction.
        stall: Receiver: without a newly landed range before an attempt is given up.
        backoff: Receiver: pause before each retry; its length is the number of retries.
        hold: Both: total time a receiver may ask to wait for its own disk, quota or turn.
        reconnect_grace: Receiver: until a lost link must be back.
        settle: Producer: for serves in flight when a transaction is complete.
        confirm: Receiver: for the acknowledgement of its confirmation, per attempt.
        deadline: Both: absolute limit of one transfer, or None.

    Raises:
        UsageError: A value is not a positive finite number, or the producer would give up first.
    """

    acquire: float = 120.0
    idle: float = 150.0
    stall: float = 20.0
    backoff: tuple[float, ...] = (2.0, 4.0, 8.0)
    hold: float = 600.0
    reconnect_grace: float = 30.0
    settle: float = 60.0
    confirm: float = 5.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.name == "deadline":
                continue
            several = item.name == "backoff"
            if several is not isinstance(value, tuple):
                wanted = "a tuple of seconds" if several else "a number of seconds"
                raise UsageError(f"budget {item.name!r}", expected=wanted, got=value)
            for number in value if several else (value,):
                if isinstance(number, bool) or not isinstance(number, (int, float)):
                    raise UsageError(
                        f"budget {item.name!r}", expected="a number of seconds", got=number
                    )
                if not (math.isfinite(number) and number > 0):
                    raise UsageError(
                        f"budget {item.name!r}", expected="finite seconds above 0", got=number
                    )
        if len(self.backoff) > 16:
            raise LimitError(
                "budget 'backoff'", expected="at most 16 retries", got=len(self.backoff)
            )
        if self.idle <= self.retry_schedule:
            raise UsageError(
                "budget 'idle' must exceed the receiver's whole retry schedule",
                expected=f"more than {self.retry_schedule:g} s",
                got=f"{self.idle:g} s",
            )

    @property
    def retry_schedule(self) -> float:
        """The longest a receiver goes without progress before it gives up."""
        return (len(self.backoff) + 1) * self.stall + sum(self.backoff) + self.reconnect_grace
