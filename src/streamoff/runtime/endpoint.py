"""The endpoint: what one participant consists of, and its life.

An endpoint is an async context manager. Its tasks are its own: a link's reader and writer, one timer task,
and the supervisors of its jobs are shielded, so that a controller that is being cancelled still gets its
cancels out. On the way out everything it serves is aborted, everything it downloads is cancelled, and the
links are flushed and closed, bounded by ``close_timeout``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
from anyio.abc import TaskGroup

from streamoff.errors import UsageError
from streamoff.runtime.dispatch import Dispatcher
from streamoff.runtime.downloading import Terms, Transfer
from streamoff.runtime.downloads import Downloads, DownloadStatistics
from streamoff.runtime.links import Links, Transport
from streamoff.runtime.messages import Mailbox, MailboxStatistics
from streamoff.runtime.notices import Notifier, NotifierStatistics
from streamoff.runtime.publishing import (
    OutcomeCallback,
    Publisher,
    PublisherStatistics,
    Transaction,
)
from streamoff.runtime.relay import Relay, RelayStatistics
from streamoff.runtime.resources import Resources
from streamoff.runtime.sparing import Lines
from streamoff.runtime.timers import Timers
from streamoff.tensors.sources import Source
from streamoff.tensors.state import State
from streamoff.types import Address, Budgets, Capability, Ref, Slot
from streamoff.wire.frames import Hello
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["BaseEndpoint", "ClosesWithEndpoint", "EndpointStatistics"]


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """A snapshot of one endpoint; counters since it was entered, those of links since it was made.

    Args:
        links: In service.
        links_made: Put into service.
        links_lost: Taken out of it.
        links_refused: Handshakes that failed here.
        downloads: What it pulls.
        publisher: What it serves.
        mailbox: Messages.
        notifier: Failure notices that it sends.
        relay: What it forwards.
        frames_ignored: Of endpoints that are no neighbours, and made no sense.
        lines_left_out: Of the log: counted, not told.
        timers: Set.
    """

    links: int
    links_made: int
    links_lost: int
    links_refused: int
    downloads: DownloadStatistics
    publisher: PublisherStatistics
    mailbox: MailboxStatistics
    notifier: NotifierStatistics
    relay: RelayStatistics
    frames_ignored: int
    lines_left_out: int
    timers: int


class ClosesWithEndpoint(Protocol):
    """Something with a life of its own that must end before the links do."""

    closed: anyio.Event

    def close(self) -> None:
        """Begin to end; must not block."""
        ...

    def serves(self, tx: Transaction) -> bool:
        """Whether a transaction has until the end of this."""
        ...


class BaseEndpoint:
    """A named participant that moves opaque messages and payloads; the payload layer adds trees.

    Args:
        address: Its name.
        transports: How it can be reached and reach others; it listens on all of them.
        limits: What it accepts.
        budgets: Defaults of its transactions and downloads.
        capabilities: What it names to its peers.
        close_timeout: Seconds that cancels and last frames get on the way out.
        seed: Of the jitter of redials; random by default.
    """

    def __init__(
        self,
        address: str,
        *,
        transports: Iterable[Transport] = (),
        limits: Limits = DEFAULT_LIMITS,
        budgets: Budgets | None = None,
        capabilities: Iterable[Capability] = tuple(Capability),
        close_timeout: float = 5.0,
        seed: int | None = None,
    ) -> None:
        self.address = Address(address)
        self.limits = limits
        self.budgets = budgets if budgets is not None else Budgets()
        self.capabilities = frozenset(capabilities)
        self.close_timeout = close_timeout
        self.instance = secrets.token_bytes(16)
        hello = Hello(
            address=self.address,
            instance=self.instance,
            capabilities=self.capabilities,
            limits=limits.link,
        )
        self.links = Links(hello, transports, seed)
        self.jobs: set[ClosesWithEndpoint] = set()
        self.open_jobs: set[str] = set()
        self.warned_no_job = False
        self._closing = False

    # --- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._dispatcher = self._assemble()
        self._own = anyio.CancelScope(shield=True)
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._keep_time)
        try:
            self.links.open(self._tasks, self.timers, self._dispatcher, self.lines)
        except BaseException:
            self._own.cancel()
            await self._tasks.__aexit__(None, None, None)
            raise
        return self

    def _assemble(self) -> Dispatcher:
        """Make the parts of this life, and what takes frames to them."""
        self.resources = Resources.current()
        self.timers = Timers()
        self.lines = Lines(self.timers)
        links = self.links
        self.mailbox = Mailbox(
            address=self.address,
            send=links.send,
            can_reach=links.can_reach,
            limits=self.limits,
            timers=self.timers,
            lines=self.lines,
        )
        self.publisher = Publisher(
            address=self.address,
            capabilities=self.capabilities,
            timers=self.timers,
            send=links.send,
            serve=links.serve,
            resources=self.resources,
            lines=self.lines,
        )
        self.downloads = Downloads(
            links=links,
            capabilities=self.capabilities,
            limits=self.limits,
            resources=self.resources,
            timers=self.timers,
            lines=self.lines,
        )
        self.relay = Relay(
            address=self.address,
            capacity=self.resources.pool.capacity,
            timers=self.timers,
            send=links.send,
            serve=links.serve,
            crowded=links.crowded,
            lines=self.lines,
        )
        self.notifier = Notifier(
            address=self.address,
            capabilities=self.capabilities,
            capabilities_of=links.capabilities_of,
            timers=self.timers,
            send=links.send,
            lines=self.lines,
        )
        return Dispatcher(
            links=links,
            publisher=self.publisher,
            downloads=self.downloads,
            mailbox=self.mailbox,
            notifier=self.notifier,
            relay=self.relay,
            lines=self.lines,
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        # in a task of its own: what strikes the leaving one, an interrupt or asyncio's own cancellation, ends
        # neither the way out nor the waiting for it
        self._tasks.start_soon(self._close)
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if error is not None and group.exceptions == (error,):
                return False  # the body's own error is not wrapped
            raise
        finally:
            self.lines.close()

    async def _close(self) -> None:
        """End everything, jobs within their windows, then let the last frames out and close the links."""
        why = "the endpoint is closing"
        self._closing = True
        try:
            self.links.stop()
            self.downloads.cancel(why)
            jobs = tuple(self.jobs)
            for job in jobs:
                job.close()
            for tx in self.publisher.open:
                if not any(job.serves(tx) for job in jobs):
                    tx.cancel(why)
            self.mailbox.close()
            with anyio.CancelScope(shield=True):
                for job in jobs:
                    await job.closed.wait()
                self.publisher.close(why)
                with anyio.move_on_after(self.close_timeout):
                    await self.downloads.ended()
                    await self.links.flush()
                    await self.publisher.settled()
        finally:
            self.links.close()
            self.publisher.give_up(why)
            self.mailbox.give_up(why)
            self.notifier.close()
            self._own.cancel()

    async def _keep_time(self) -> None:
        with self._own:
            await self.timers.run()

    def statistics(self) -> EndpointStatistics:
        """A snapshot."""
        return EndpointStatistics(
            links=len(self.links.live),
            links_made=self.links.made,
            links_lost=self.links.lost,
            links_refused=self.links.refused,
            downloads=self.downloads.statistics(),
            publisher=self.publisher.statistics(),
            mailbox=self.mailbox.statistics(),
            notifier=self.notifier.statistics(),
            relay=self.relay.statistics(),
            frames_ignored=self._dispatcher.ignored,
            lines_left_out=self.lines.left_out,
            timers=len(self.timers),
        )

    # --- links ------------------------------------------------------------------------------------

    async def connect(self, to: str) -> None:
        """Dial an endpoint and keep the link: when it is lost, it is dialled again until we close.

        The first endpoint connected to becomes the uplink.

        Raises:
            UnreachableError: Nobody answers.
            HandshakeError: The two cannot work together.
            UsageError: It is being kept already.
        """
        await self.links.connect(Address(to))

    def can_reach(self, to: Address) -> bool:
        """Whether there is a way to an address now."""
        return self.links.can_reach(to)

    # --- payloads ---------------------------------------------------------------------------------

    def publish(
        self,
        sources: Iterable[Source],
        slots: Iterable[Slot],
        *,
        budgets: Budgets | None = None,
        min_receivers: int | None = None,
        on_settled: tuple[OutcomeCallback, ...] = (),
    ) -> Transaction:
        """Offer payloads; see :meth:`streamoff.runtime.publishing.Publisher.publish`."""
        return self.publisher.publish(
            sources,
            slots,
            budgets=budgets or self.budgets,
            min_receivers=min_receivers,
            on_settled=on_settled,
        )

    def transfer(self, ref: Ref, terms: Terms, job: str | None = None) -> Transfer:
        """Prepare a download, for a job or for nobody in particular; :meth:`run_transfer` runs it.

        Raises:
            SourceFailedError: The owner of the source has said that it is dead. Nothing was sent.
            UnreachableError: There is no way to the source.
            LimitError, UsageError: The names wanted cannot be asked for, or the endpoint is closing.
        """
        if self._closing:
            raise UsageError("the endpoint is closing", got=self.address)
        return self.downloads.prepare(ref, terms, job)

    async def notify_failure(
        self, receivers: Iterable[str], source: str, refs: Iterable[str], reason: str
    ) -> dict[Address, str]:
        """Tell receivers that a source of mine, or below me, is dead; see :class:`Notifier`.

        Downloads that pull from it end at once, and those that start within half an hour fail before their
        first request.

        Args:
            receivers: Who might pull.
            source: Address of the dead source: mine or below mine.
            refs: Ids of the refs that are lost.
            reason: Why, for the receivers' errors.

        Returns:
            Receiver to why it does not know; empty text if it does. Takes 10 s at most.

        Raises:
            UsageError: Not mine to declare dead. Nothing was sent.
        """
        targets = [Address(receiver) for receiver in receivers]
        return await self.notifier.notify(targets, Address(source), refs, reason)

    def start_job(
        self, job: ClosesWithEndpoint, supervise: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Start the supervisor of a job; it lives as long as it needs to, and no cancellation reaches it.

        Raises:
            UsageError: The endpoint is closing. Nothing was started.
        """
        if self._closing:
            raise UsageError("the endpoint is closing", got=self.address)
        self.jobs.add(job)
        self._tasks.start_soon(supervise)

    async def run_transfer(
        self, transfer: Transfer, spawn: Callable[..., object] | None = None
    ) -> State:
        """Run a transfer in a task of ``spawn`` (the endpoint's own by default) and wait for it.

        Raises:
            TransferError: How it ended, if it did not bring the payload.

        Cancellation: cancels the transfer, waits until nothing of it is left, then goes on.
        """
        return await self.downloads.run(transfer, spawn or self._tasks.start_soon)
