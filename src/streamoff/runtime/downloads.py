"""The downloads of an endpoint: begun, found again by what comes for them, and told what befalls their source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import anyio

from streamoff.errors import (
    GoneError,
    PeerRefusedError,
    SourceChangedError,
    SourceFailedError,
    SourceLostError,
    StreamoffError,
    UnreachableError,
)
from streamoff.machines.download import Download, DownloadState
from streamoff.machines.notice import NoticeBook
from streamoff.runtime.downloading import Terms, Transfer, Wire
from streamoff.runtime.endings import End, Endings, end_of_error
from streamoff.runtime.links import Behind, Links
from streamoff.runtime.resources import Resources
from streamoff.runtime.sparing import Lines
from streamoff.runtime.timers import Timers
from streamoff.tensors.state import State
from streamoff.types import Address, Capability, Ref
from streamoff.wire.codec import encode
from streamoff.wire.frames import Ack, AckOf, Error, ErrorCode, FrameType, Notice, Open
from streamoff.wire.limits import Limits

__all__ = ["DownloadStatistics", "Downloads"]

logger = logging.getLogger("streamoff.downloading")
notices = logging.getLogger("streamoff.notices")


@dataclass(frozen=True, slots=True)
class DownloadStatistics:
    """A snapshot of an endpoint's downloads; counters since it started.

    Args:
        active: Under way.
        ended: How many ended how; those that failed before their first request count.
        retries: Times that a download asked its source again.
        bytes_landed: Of downloads that have ended, whole or not.
        known_dead: Refs remembered because their owner has said that the source is dead.
    """

    active: int
    ended: Mapping[End, int]
    retries: int
    bytes_landed: int
    known_dead: int


class Downloads:
    """What one endpoint pulls, and the sources of which it has heard that they are dead.

    Args:
        links: The ways to the sources.
        capabilities: What this end names to them.
        limits: Of what it sends.
        resources: Of this event loop.
        timers: The endpoint's clock.
        lines: The endpoint's log.
    """

    def __init__(
        self,
        *,
        links: Links,
        capabilities: frozenset[Capability],
        limits: Limits,
        resources: Resources,
        timers: Timers,
        lines: Lines,
    ) -> None:
        self.wire = Wire(links.me, links.send, links.can_reach, lines)
        self.notices = NoticeBook()
        self._links = links
        self._capabilities = capabilities
        self._limits = limits
        self._resources = resources
        self._timers = timers
        self._transfers: set[Transfer] = set()
        self._lines = lines
        self._endings = Endings("download", logger, links.me, lines)
        self._retries = 0
        self._bytes_landed = 0

    def statistics(self) -> DownloadStatistics:
        """A snapshot."""
        return DownloadStatistics(
            active=len(self._transfers),
            ended=self._endings.snapshot(),
            retries=self._retries + sum(max(0, one.attempts - 1) for one in self._transfers),
            bytes_landed=self._bytes_landed,
            known_dead=len(self.notices),
        )

    def prepare(self, ref: Ref, terms: Terms, job: str | None = None) -> Transfer:
        """Prepare a download, for a job or for nobody in particular; :meth:`run` runs it.

        Raises:
            SourceFailedError: The owner of the source has said that it is dead. Nothing was sent.
            UnreachableError: There is no way to the source.
            LimitError, UsageError: The names wanted cannot be asked for.
        """
        reason = self.notices.reason(anyio.current_time(), ref.source, ref.id)
        if reason is not None:
            raise self._not_begun(ref, job, _source_failed(ref, reason))
        way = self._links.way(ref.source)
        if way is None:
            error = UnreachableError("no way to the source", site=ref.source, ref=ref.id)
            raise self._not_begun(ref, job, error)
        if terms.names is not None:
            self._check_names(ref, tuple(terms.names))
        return Transfer(
            ref,
            terms,
            mine=self._capabilities,
            theirs=self._links.capabilities_of(ref.source),
            resources=self._resources,
            timers=self._timers,
            wire=self.wire,
            chunk=way.accepted.limits.chunk,
            by_reference=way.link.by_reference,
            job=job,
        )

    def _not_begun(self, ref: Ref, job: str | None, error: StreamoffError) -> StreamoffError:
        self._endings(
            end_of_error(error),
            seconds=0.0,
            where={"job": job, "site": ref.source, "ref": ref.id},
            cause=error.line("site", "ref"),
            cleaned="nothing was sent",
        )
        return error.located(job=job)

    def _check_names(self, ref: Ref, names: tuple[str, ...]) -> None:
        """Refuse here what the link would refuse to carry."""
        request = Open(
            to=ref.source,
            sender=self._links.me,
            stream=0,
            ref=ref.id,
            ticket=ref.ticket,
            names=names,
        )
        encode(request, self._limits)

    async def run(self, transfer: Transfer, spawn: Callable[..., object]) -> State:
        """Run a transfer in a task of ``spawn`` and wait for it.

        Raises:
            TransferError: How it ended, if it did not bring the payload.

        Cancellation: cancels the transfer, waits until nothing of it is left, then goes on.
        """
        spawn(self._run, transfer)
        self._transfers.add(transfer)
        transfer.begin()
        try:
            await transfer.closed.wait()
        except BaseException:
            transfer.cancel("the receiver was cancelled")
            with anyio.CancelScope(shield=True):
                await transfer.closed.wait()
            transfer.release()
            raise
        return transfer.result()

    async def _run(self, transfer: Transfer) -> None:
        try:
            await transfer.run()
        finally:
            self._transfers.discard(transfer)
            self._tell_end(transfer)

    def _tell_end(self, transfer: Transfer) -> None:
        self._retries += max(0, transfer.attempts - 1)
        self._bytes_landed += transfer.record.landed.nbytes
        end, why = _end(transfer)
        self._endings(
            end,
            seconds=anyio.current_time() - transfer.began,
            where={"job": transfer.job, "site": transfer.ref.source, "ref": transfer.ref.id},
            cause=why,
            cleaned=_cleaned(transfer),
            story=() if end is End.COMPLETED else transfer.story.lines(),
            exc_info=transfer.defect if end is End.DEFECT else None,
        )

    def of(self, stream: int, source: Address) -> Transfer | None:
        """The transfer of a stream, if it is the source who speaks."""
        transfer = self.wire.streams.get(stream)
        return transfer if transfer is not None and transfer.ref.source == source else None

    # --- what befalls their sources ---------------------------------------------------------------

    def on_notice(self, frame: Notice) -> None:
        """The owner of sources says that they are dead: their downloads end, and later ones do not begin."""
        me, to = self._links.me, frame.sender
        if Capability.NOTICE not in self._capabilities:
            why = ErrorCode.REFUSED
            self._links.send(Error(to=to, sender=me, of=FrameType.NOTICE, id=frame.id, code=why))
            return
        now = anyio.current_time()
        dead = set(self.notices.enter(now, frame.sender, frame.source, frame.refs, frame.reason))
        ended = [one for one in self._transfers if (one.ref.source, one.ref.id) in dead]
        for transfer in ended:
            transfer.fail(_source_failed(transfer.ref, frame.reason))
        self._links.send(Ack(to=to, sender=me, of=AckOf.NOTICE, id=frame.id))
        text = "%s: %s says that %s is dead (%s); downloads ended: %d, refs remembered: %d"
        facts = (to, frame.source, frame.reason, len(ended), len(dead))
        self._lines.tell(notices, logging.INFO, "heard", text, me, *facts)

    def source_restarted(self, source: Address) -> None:
        """A new instance of the address knows nothing of what the old one served."""
        for transfer in tuple(self._transfers):
            if transfer.ref.source == source:
                transfer.fail(SourceFailedError("the source restarted", site=source))

    def link_lost(self, behind: Behind) -> None:
        """What is pulled from behind a link waits for a way."""
        for transfer in self._from(behind):
            transfer.link_lost()

    def link_restored(self, behind: Behind) -> None:
        """There is a way to what is pulled from behind a link."""
        for transfer in self._from(behind):
            transfer.link_restored()

    def _from(self, behind: Behind) -> Iterable[Transfer]:
        return tuple(one for one in self._transfers if behind(one.ref.source))

    # --- the way out ------------------------------------------------------------------------------

    def cancel(self, why: str) -> None:
        """Give all of them up. Does not block."""
        for transfer in tuple(self._transfers):
            transfer.cancel(why)

    async def ended(self) -> None:
        """Wait until nothing is left of any of them; the caller bounds it."""
        for transfer in tuple(self._transfers):
            await transfer.closed.wait()


def _end(transfer: Transfer) -> tuple[End, str]:
    """How a transfer ended, and why."""
    cause, cancelled = transfer.cause, transfer.record.state is DownloadState.CANCELLED
    if cause is None:
        return End.COMPLETED, f"{transfer.record.landed.nbytes} bytes"
    if not isinstance(cause, StreamoffError):
        return End.DEFECT if isinstance(cause, Exception) else End.CANCELLED, repr(cause)
    given_up = cancelled and cause is transfer.record.cause
    why = cause.line("site", "ref", "job")
    return End.CANCELLED if given_up else end_of_error(cause), why


def _cleaned(transfer: Transfer) -> str:
    """What an end meant to the source, and what became of what had landed."""
    record = transfer.record
    told = transfer.farewell or _untold(record)
    if transfer.cause is None:
        return told
    landed = f"{record.landed.nbytes} of {transfer.ref.size} bytes"
    left = "cannot be discarded" if transfer.left_behind else "discarded"
    return f"{told}; {landed} {left}"


def _untold(record: Download) -> str:
    """Why there was nothing to say to the source."""
    if isinstance(record.cause, SourceLostError):
        return "no way to tell the source"
    if isinstance(record.cause, _SAID_BY_THE_SOURCE):
        return "the source knows"
    return "the source knows no cancel"


_SAID_BY_THE_SOURCE: Final = (
    GoneError,
    PeerRefusedError,
    SourceChangedError,
    SourceFailedError,
)


def _source_failed(ref: Ref, reason: str) -> SourceFailedError:
    return SourceFailedError(f"the source failed: {reason}", site=ref.source, ref=ref.id)
