"""What a run of the shell tier is watched for: every transaction, every transfer, and what each came to.

The watching endpoint is the endpoint itself; it notes what it publishes and pulls, and counts how often sources
are closed.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from streamoff.errors import (
    GoneError,
    InvariantError,
    LandingError,
    NoSpaceError,
    PeerError,
    PeerRefusedError,
    QuotaExceededError,
    SourceChangedError,
    SourceFailedError,
    SourceLostError,
    StreamoffError,
    TransferTimeoutError,
    UnreachableError,
)
from streamoff.machines.download import DownloadState
from streamoff.payload.endpoint import Endpoint
from streamoff.runtime.downloading import Transfer
from streamoff.runtime.publishing import Transaction
from streamoff.tensors.layout import Layout
from streamoff.tensors.sources import Source
from streamoff.tensors.views import Views
from streamoff.types import Address, OutcomeStatus, Verdict

from .shell_scenario import ShellScenario
from .tier import ViolationError

__all__ = ["Watch", "WatchedEndpoint", "only_expected_logs"]


class CountedSource:
    """A source that counts how often it is closed, and is otherwise the one it wraps."""

    def __init__(self, source: Source) -> None:
        self.closed = 0
        self._source = source

    @property
    def layout(self) -> Layout:
        """See :class:`~streamoff.tensors.sources.Source`."""
        return self._source.layout

    @property
    def blocking(self) -> bool:
        """See :class:`~streamoff.tensors.sources.Source`."""
        return self._source.blocking

    def views(self, start: int, stop: int) -> Views | None:
        """See :class:`~streamoff.tensors.sources.Source`."""
        self._check_open()
        return self._source.views(start, stop)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See :class:`~streamoff.tensors.sources.Source`."""
        self._check_open()
        self._source.read_into(start, buffer)

    def check(self) -> None:
        """See :class:`~streamoff.tensors.sources.Source`."""
        self._source.check()

    def close(self) -> None:
        """See :class:`~streamoff.tensors.sources.Source`."""
        self.closed += 1
        self._source.close()

    def _check_open(self) -> None:
        if self.closed:
            raise InvariantError("a source is read after it was released")


@dataclass(slots=True)
class Published:
    """One transaction and its sources."""

    endpoint: Address
    transaction: Transaction
    sources: list[CountedSource]


@dataclass(slots=True)
class Pulled:
    """One transfer and who pulls."""

    endpoint: Address
    transfer: Transfer


@dataclass(slots=True)
class Watch:
    """Everything that was published and pulled in a run."""

    published: list[Published] = field(default_factory=list)
    pulled: list[Pulled] = field(default_factory=list)
    foreign: dict[tuple[str, bytes], bool] = field(default_factory=dict)
    """What other processes say of their transfers: by ref and ticket, whether the payload is there."""
    silent: set[str] = field(default_factory=set)
    """Endpoints of other processes that were killed: nobody knows what they have."""

    def look_at_the_end(self, scenario: ShellScenario, injected: Iterable[str]) -> Counter[str]:
        """Compare what producers and receivers say.

        Args:
            scenario: What was run.
            injected: Kinds of faults that really happened.

        Returns:
            How often things ended in which way.

        Raises:
            ViolationError: Something is open, was released twice or never, or is not true.
        """
        happened = {*injected, *(one.what for one in scenario.endings)}
        happened |= {"left" for move in scenario.moves if move.below}
        for pulled in self.pulled:
            _check_transfer(pulled, scenario, happened)
        for published in self.published:
            self._check_transaction(published)
        ends = Counter(_end_of(pulled.transfer) for pulled in self.pulled)
        ends.update(
            one.transaction.outcome.reason.partition(":")[0]
            for one in self.published
            if one.transaction.outcome is not None
        )
        return ends

    def delivered(self, ref: str, ticket: bytes) -> bool:
        """Whether a receiver of a slot has its payload."""
        here = any(
            pulled.transfer.record.state is DownloadState.DONE
            for pulled in self.pulled
            if (pulled.transfer.ref.id, pulled.transfer.ref.ticket) == (ref, ticket)
        )
        return here or self.foreign.get((ref, ticket), False)

    def _check_transaction(self, published: Published) -> None:
        tx = published.transaction
        outcome, story = tx.outcome, tx.story.lines()
        if outcome is None:
            raise ViolationError("a transaction that never settled", tx.id, *story)
        closed = [source.closed for source in published.sources]
        if set(closed) != {1}:
            raise ViolationError("a source that is not released exactly once", closed, *story)
        ends = [end for refs in outcome.slots.values() for end in refs.values()]
        for slot, refs in zip(tx.record.slots, outcome.slots.values(), strict=True):
            for ref, end in refs.items():
                if end.verdict is Verdict.PENDING:
                    raise ViolationError("a slot without a verdict", ref, *story)
                known = slot.address not in self.silent
                succeeded = end.verdict is Verdict.SUCCEEDED
                if succeeded and known and not self.delivered(ref, slot.ticket):
                    raise ViolationError("a success that nobody has", ref, end, *story)
        completed = all(end.verdict is Verdict.SUCCEEDED for end in ends)
        if completed != (outcome.status is OutcomeStatus.COMPLETED):
            raise ViolationError("an outcome that lies", outcome, *story)
        reasons = {_kind(end.reason) for end in ends if end.verdict is Verdict.FAILED}
        if _kind(outcome.reason) not in (reasons or {"all_receivers_succeeded"}):
            raise ViolationError("a reason that is nobody's", outcome, *story)


def _end_of(transfer: Transfer) -> str:
    cause = transfer.record.cause
    state = transfer.record.state.value
    return state if cause is None else f"{state}: {type(cause).__name__}"


def _kind(reason: str) -> str:
    """The reason of a slot as its transaction would give it."""
    head = reason.partition(":")[0]
    return "receiver_failed" if head in {"receiver", "cancelled", "declined"} else head


_ROUGH: Final = frozenset({"loss", "duplication", "reordering", "corruption", "cut", "slow"})
_APART: Final = _ROUGH | {"partition", "kill", "close", "left"}
CAUSES: Final[dict[type[StreamoffError], frozenset[str]]] = {
    SourceLostError: _APART,
    TransferTimeoutError: _APART,
    UnreachableError: _APART,
    PeerRefusedError: _APART,
    SourceFailedError: frozenset({"kill"}),
    PeerError: _ROUGH,
}
"""What must have happened for a transfer to end with an error; any one of it will do."""


def _check_transfer(pulled: Pulled, scenario: ShellScenario, happened: set[str]) -> None:
    transfer, record = pulled.transfer, pulled.transfer.record
    story = transfer.story.lines()
    if transfer.defect is not None:
        raise ViolationError("a defect in a transfer", repr(transfer.defect), *story)
    if not record.ended or not transfer.closed.is_set():
        raise ViolationError("a transfer that never ended", transfer.ref.id, *story)
    if (record.cause is None) != (record.state is DownloadState.DONE):
        raise ViolationError("an end without a cause", record.state, *story)
    if record.cause is None:
        return
    bounds = ((QuotaExceededError, scenario.quota), (NoSpaceError, scenario.disk))
    for full, bound in bounds:
        if isinstance(record.cause, full):
            if bound is None:
                raise ViolationError("a full disk, or quota, that was not", record.cause, *story)
            return
    if scenario.deadline is not None and isinstance(record.cause, TransferTimeoutError):
        return
    for kind, needed in CAUSES.items():
        if type(record.cause) is kind and not needed & happened:
            raise ViolationError(f"{kind.__name__} without anything that explains it", *story)
    unexpected = (InvariantError, SourceChangedError, LandingError)
    if isinstance(record.cause, unexpected) and not isinstance(record.cause, GoneError):
        raise ViolationError("a cause that nothing explains", repr(record.cause), *story)


class WatchedEndpoint(Endpoint):
    """An endpoint that notes what it publishes and pulls."""

    def __init__(self, address: str, watch: Watch, **options: Any) -> None:
        super().__init__(address, **options)
        self._watch = watch

    def publish(self, sources: Iterable[Source], *args: Any, **options: Any) -> Transaction:
        """Offer payloads, and note it."""
        counted = [CountedSource(source) for source in sources]
        tx = super().publish(counted, *args, **options)
        self._watch.published.append(Published(self.address, tx, counted))
        return tx

    def transfer(self, *args: Any, **options: Any) -> Transfer:
        """Prepare a download, and note it."""
        transfer = super().transfer(*args, **options)
        self._watch.pulled.append(Pulled(self.address, transfer))
        return transfer


class _Errors(logging.Handler):
    """Keeps what is logged as an error: in this library that is a defect, and in a loop it is one too."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it with its traceback."""
        formatter = logging.Formatter("%(name)s: %(message)s")
        self.found.append(formatter.format(record))


@contextmanager
def only_expected_logs() -> Iterator[None]:
    """Raise afterwards if anything was logged as an error, or raised where nobody could catch it.

    Raises:
        ViolationError: With the first of it.
    """
    handler, root, former = _Errors(), logging.getLogger(), sys.unraisablehook
    ours = logging.getLogger("streamoff")
    level, propagates = ours.level, ours.propagate
    root.addHandler(handler)
    ours.setLevel(logging.ERROR)
    sys.unraisablehook = lambda found: handler.found.append(f"unraisable: {found.exc_value!r}")
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(level)
        ours.propagate = propagates
        sys.unraisablehook = former
    if handler.found:
        raise ViolationError("an error that was only logged", *handler.found[:2])
