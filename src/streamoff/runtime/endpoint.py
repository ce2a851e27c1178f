"""The endpoint: links, and what travels over them.

An endpoint is an async context manager. Its tasks are its own: a link's reader and writer, one timer task,
and the supervisors of its jobs are shielded, so that a controller that is being cancelled still gets its
cancels out. On the way out everything it serves is aborted, everything it downloads is cancelled, and the
links are flushed and closed, bounded by ``close_timeout``.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

import anyio
from anyio.abc import TaskGroup

from streamoff.errors import (
    HandshakeError,
    LinkLostError,
    PeerError,
    SourceFailedError,
    StreamoffError,
    UnexpectedMessageError,
    UnreachableError,
    UsageError,
)
from streamoff.machines.notice import NoticeBook
from streamoff.runtime.downloading import Terms, Transfer, Wire
from streamoff.runtime.link import Deferred, Inbound, Link, LinkDriver, Listener
from streamoff.runtime.messages import Mailbox, MailboxStatistics
from streamoff.runtime.notices import Notifier
from streamoff.runtime.publishing import (
    OutcomeCallback,
    Publisher,
    PublisherStatistics,
    Transaction,
)
from streamoff.runtime.relay import Relay, RelayStatistics
from streamoff.runtime.resources import Resources
from streamoff.runtime.sparing import SparingLog
from streamoff.runtime.timers import Timers
from streamoff.tensors.sources import Source
from streamoff.tensors.state import State
from streamoff.types import Address, Budgets, Capability, Ref, Slot
from streamoff.wire.codec import encode
from streamoff.wire.frames import (
    Ack,
    AckOf,
    Cancel,
    Chunk,
    Confirm,
    Error,
    ErrorCode,
    Frame,
    FrameType,
    Hello,
    Hold,
    Message,
    Notice,
    Open,
    Opened,
    Pull,
    Routed,
    Unreachable,
)
from streamoff.wire.handshake import Accepted, judge
from streamoff.wire.limits import DEFAULT_LIMITS, Limits, clip
from streamoff.wire.routes import choose, forwarded, may_speak

__all__ = [
    "HANDSHAKE_SECONDS",
    "MAX_INSTANCES",
    "BaseEndpoint",
    "ClosesWithEndpoint",
    "EndpointStatistics",
    "Transport",
]

logger = logging.getLogger("streamoff.endpoint")

HANDSHAKE_SECONDS: Final = 10.0
MAX_INSTANCES: Final = 16_384
"""Peers whose instance is remembered, so that a restart is noticed; the longest unseen goes first."""
REDIAL_SECONDS: Final = (0.05, 5.0)
"""First and longest pause between attempts to get a lost uplink back; doubled each time, with jitter."""


class Transport(Protocol):
    """How links are made."""

    def listen(self, address: Address, accept: Listener) -> Callable[[], Awaitable[None]] | None:
        """Accept links under an address from now on.

        Returns:
            What must run for that until :meth:`unlisten`, or None.
        """
        ...

    def unlisten(self, address: Address) -> None:
        """Accept no more links."""
        ...

    async def dial(self, mine: Address, to: Address) -> Link:
        """Open a link.

        Raises:
            UnreachableError: Nobody answers.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """A snapshot of one endpoint."""

    links: int
    downloads: int
    mailbox: MailboxStatistics
    notices: int
    timers: int
    relay: RelayStatistics
    publisher: PublisherStatistics


class ClosesWithEndpoint(Protocol):
    """Something with a life of its own that must end before the links do."""

    closed: anyio.Event

    def close(self) -> None:
        """Begin to end; must not block."""
        ...

    def serves(self, tx: Transaction) -> bool:
        """Whether a transaction has until the end of this."""
        ...


def _check_names(ref: Ref, names: Collection[str], me: Address, limits: Limits) -> None:
    """Refuse here what the link would refuse to carry."""
    encode(
        Open(to=ref.source, sender=me, stream=0, ref=ref.id, ticket=ref.ticket, names=tuple(names)),
        limits,
    )


def _expect_hello(inbound: Inbound) -> Hello:
    frame = inbound.frame
    inbound.release()
    if isinstance(frame, Error) and frame.of is FrameType.HELLO:
        raise HandshakeError(f"refused by the peer: {frame.detail}", peer=frame.sender)
    if not isinstance(frame, Hello):
        raise HandshakeError("the first frame", expected="hello", got=type(frame).__name__)
    return frame


def _refusal(mine: Hello, theirs: Hello, error: HandshakeError) -> Error:
    return Error(
        to=theirs.address,
        sender=mine.address,
        of=FrameType.HELLO,
        id=0,
        code=ErrorCode.REFUSED,
        detail=clip(str(error)),
    )


async def _say(link: Link, frame: Frame) -> None:
    await link.send(frame, lambda: iter(()))


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
        self._transports = tuple(transports)
        self._jitter = random.Random(seed)
        self._links: dict[Address, LinkDriver] = {}
        self._uplink: Address | None = None
        self._instances: OrderedDict[Address, bytes] = OrderedDict()
        self._transfers: set[Transfer] = set()
        self._notices = NoticeBook()
        self.jobs: set[ClosesWithEndpoint] = set()
        self.open_jobs: set[str] = set()
        self.warned_no_job = False
        self._scopes: set[anyio.CancelScope] = set()
        self._log_refused = SparingLog(logger, logging.INFO)
        self._log_lost = SparingLog(logger, logging.INFO)
        self._log_ignored = SparingLog(logger, logging.WARNING)
        self._log_dropped = SparingLog(logger, logging.WARNING)
        self._kept: set[Address] = set()
        self._closing = False

    # --- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.resources = Resources.current()
        self.timers = Timers()
        self._wire = Wire(self.address, self._send)
        self.mailbox = Mailbox(self.address, self._send, self.can_reach, self.limits)
        self.publisher = Publisher(
            address=self.address,
            capabilities=self.capabilities,
            timers=self.timers,
            send=self._send,
            serve=self._serve,
            resources=self.resources,
        )
        self.relay = Relay(
            address=self.address,
            capacity=self.resources.pool.capacity,
            timers=self.timers,
            send=self._send,
            serve=self._serve,
            crowded=self._crowded,
        )
        self.notifier = Notifier(address=self.address, timers=self.timers, send=self._send)
        self._own = anyio.CancelScope(shield=True)
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._keep_time)
        try:
            for transport in self._transports:
                serve = transport.listen(self.address, self._accept)
                if serve is not None:
                    self._tasks.start_soon(self._serve_transport, serve)
        except BaseException:
            self._unlisten()
            self._own.cancel()
            await self._tasks.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        with anyio.CancelScope(shield=True):
            await self._close()
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if error is not None and group.exceptions == (error,):
                return False  # the body's own error is not wrapped
            raise

    async def _close(self) -> None:
        """End everything, jobs within their windows, then let the last frames out and close the links."""
        why = "the endpoint is closing"
        self._closing = True
        self._unlisten()
        for scope in tuple(self._scopes):
            scope.cancel()
        for transfer in tuple(self._transfers):
            transfer.cancel(why)
        jobs = tuple(self.jobs)
        for job in jobs:
            job.close()
        for tx in self.publisher.open:
            if not any(job.serves(tx) for job in jobs):
                tx.cancel(why)
        self.mailbox.close()
        for job in jobs:
            await job.closed.wait()
        self.publisher.close(why)
        with anyio.move_on_after(self.close_timeout):
            for transfer in tuple(self._transfers):
                await transfer.closed.wait()
            for driver in tuple(self._links.values()):
                await driver.flush()
        for driver in tuple(self._links.values()):
            driver.lose(LinkLostError(why))
        self.notifier.close()
        self._own.cancel()

    def _unlisten(self) -> None:
        for transport in self._transports:
            transport.unlisten(self.address)

    async def _keep_time(self) -> None:
        with self._own:
            await self.timers.run()

    def statistics(self) -> EndpointStatistics:
        """A snapshot."""
        return EndpointStatistics(
            links=len(self._links),
            downloads=len(self._transfers),
            mailbox=self.mailbox.statistics(),
            notices=len(self._notices),
            timers=len(self.timers),
            relay=self.relay.statistics(),
            publisher=self.publisher.statistics(),
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
        address = Address(to)
        if address in self._kept:
            raise UsageError("connected already", got=address)
        first = self._uplink is None
        self._kept.add(address)
        if first:
            self._uplink = address
        try:
            driver = await self._dial(address)
        except BaseException:
            self._kept.discard(address)
            if first:
                self._uplink = None
            raise
        self._put_into_service(driver)
        self._tasks.start_soon(self._keep_link, address, driver)

    async def _dial(self, to: Address) -> LinkDriver:
        error: StreamoffError = UnreachableError(
            "no transport", peer=to, hint="Give the endpoint a transport that reaches it"
        )
        for transport in self._transports:
            try:
                link = await transport.dial(self.address, to)
            except UnreachableError as unreachable:
                error = unreachable
                continue
            return await self._shake_hands(link, dialled=to)
        raise error

    async def _keep_link(self, to: Address, driver: LinkDriver) -> None:
        with self._until_closed():
            while True:
                await self._drive(driver)
                driver = await self._redial(to)
                self._put_into_service(driver)

    async def _redial(self, to: Address) -> LinkDriver:
        """Dial until somebody answers; while the other end's own link is there, there is no need to."""
        pause, longest = REDIAL_SECONDS
        while True:
            await anyio.sleep(pause * self._jitter.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)
            if to in self._links:
                continue
            try:
                return await self._dial(to)
            except StreamoffError as error:
                logger.debug("%s cannot reach %s again: %s", self.address, to, error.what)

    async def _serve_transport(self, serve: Callable[[], Awaitable[None]]) -> None:
        with self._until_closed():
            await serve()

    def _accept(self, link: Link) -> anyio.Event:
        settled = anyio.Event()
        self._tasks.start_soon(self._welcome, link, settled)
        return settled

    async def _welcome(self, link: Link, settled: anyio.Event) -> None:
        with self._until_closed():
            try:
                driver = await self._shake_hands(link, dialled=None)
            except StreamoffError as error:
                self._log_refused("%s refused a link: %s", self.address, error)
                return
            finally:
                settled.set()
            driver.send_nowait(driver.mine)  # who hears it finds the link in service
            self._put_into_service(driver)
            await self._drive(driver)

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """A scope that outer cancellation does not reach and that ends when the endpoint closes."""
        with anyio.CancelScope(shield=True) as scope:
            if self._closing:
                scope.cancel()
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    async def _shake_hands(self, link: Link, *, dialled: Address | None) -> LinkDriver:
        mine = Hello(
            address=self.address,
            instance=self.instance,
            capabilities=self.capabilities,
            limits=self.limits.link,
        )
        try:
            with anyio.fail_after(HANDSHAKE_SECONDS):
                if dialled is not None:
                    await _say(link, mine)
                hello = _expect_hello(await link.receive())
                accepted = await self._judge(link, mine, hello, dialled)
        except TimeoutError as error:
            await self._drop_link(link)
            raise HandshakeError(
                "no hello", expected=f"one within {HANDSHAKE_SECONDS:g} s", peer=dialled
            ) from error
        except BaseException:
            await self._drop_link(link)
            raise
        link.agree(accepted.limits)
        return LinkDriver(
            link,
            mine=mine,
            theirs=hello,
            accepted=accepted,
            uplink=dialled is not None and dialled == self._uplink,
            timers=self.timers,
            dispatch=self._dispatch,
        )

    async def _judge(
        self, link: Link, mine: Hello, theirs: Hello, dialled: Address | None
    ) -> Accepted:
        """Decide whether the link may live; who dialled is told why not."""
        try:
            return judge(
                mine,
                theirs,
                self._instances.get(theirs.address),
                dialled=dialled,
                certified=link.certified,
                same_certificate=self._same_certificate(theirs.address, link),
            )
        except HandshakeError as error:
            if dialled is None:
                other_version = theirs.version != mine.version  # which knows my hello, if anything
                await _say(link, mine if other_version else _refusal(mine, theirs, error))
            raise

    def _same_certificate(self, peer: Address, link: Link) -> bool:
        """Of two live instances of an address the newer wins only with the same certificate."""
        former = self._links.get(peer)
        return former is None or former.link.fingerprint == link.fingerprint

    @staticmethod
    async def _drop_link(link: Link) -> None:
        with anyio.CancelScope(shield=True):
            await link.aclose()

    async def _drive(self, driver: LinkDriver) -> None:
        """Run a link that is in service until it is lost."""
        cause = await driver.run()
        if self._links.get(driver.peer) is driver:
            self._take_out_of_service(driver)
        self._log_lost("%s lost the link to %s: %s", self.address, driver.peer, cause.what)

    def _put_into_service(self, driver: LinkDriver) -> None:
        """Use a link from now on; what was under way on a former one to the same peer is lost."""
        peer = driver.peer
        former = self._links.get(peer)
        if driver.accepted.supersedes:
            self._peer_restarted(peer)
        if former is not None:
            former.lose(LinkLostError("replaced by a newer link", peer=peer))
            for transfer in self._transfers_along(former):
                transfer.link_lost()
            self.relay.lost(lambda address: self._way(address) is former)
        self._instances[peer] = driver.theirs.instance
        self._instances.move_to_end(peer)
        if len(self._instances) > MAX_INSTANCES:
            self._instances.popitem(last=False)
        self._links[peer] = driver
        self.mailbox.repeat(lambda to: self._way(to) is driver)
        for transfer in self._transfers_along(driver):
            transfer.link_restored()
        if self._closing:
            driver.lose(LinkLostError("the endpoint is closing"))

    def _take_out_of_service(self, driver: LinkDriver) -> None:
        """A link is lost, and what was under way on it; some of it may have another way."""
        cut_off = self._transfers_along(driver)
        del self._links[driver.peer]
        self.relay.lost(lambda address: self._way(address) is None)
        for transfer in cut_off:
            transfer.link_lost()
            if self.can_reach(transfer.ref.source):
                transfer.link_restored()
        self.mailbox.repeat(
            lambda to: driver.peer.covers(to) or (driver.uplink and not self.address.covers(to))
        )

    def _transfers_along(self, driver: LinkDriver) -> tuple[Transfer, ...]:
        return tuple(one for one in self._transfers if self._way(one.ref.source) is driver)

    def _peer_restarted(self, peer: Address) -> None:
        self.publisher.peer_restarted(peer)
        for transfer in tuple(self._transfers):
            if transfer.ref.source == peer:
                transfer.fail(SourceFailedError("the source restarted", site=peer))

    def _way(self, to: Address, came_from: Address | None = None) -> LinkDriver | None:
        uplink = self._uplink if self._uplink in self._links else None
        via = choose(to, self._links, uplink, me=self.address, came_from=came_from)
        return None if via is None else self._links[via]

    def _send(self, frame: Routed) -> None:
        driver = self._way(frame.to)
        if driver is not None:
            driver.send_nowait(frame)

    def _crowded(self, to: Address) -> bool:
        driver = self._way(to)
        return driver is not None and driver.crowded

    def can_reach(self, to: Address) -> bool:
        """Whether there is a way to an address now."""
        return self._way(to) is not None

    def _serve(self, to: Address, item: Deferred) -> None:
        driver = self._way(to)
        if driver is None:
            item.drop()
        else:
            driver.serve_nowait(item)

    # --- frames -----------------------------------------------------------------------------------

    def _dispatch(self, driver: LinkDriver, inbound: Inbound) -> None:
        """Take one frame. A neighbour that talks nonsense loses its link; one behind it is not heard."""
        frame = inbound.frame
        assert isinstance(frame, Routed)
        try:
            self._check_sender(driver, frame)
        except UnexpectedMessageError as error:
            inbound.release()
            self._drop(driver, error)
            return
        if frame.to != self.address:
            self._forward(driver, frame, inbound)
            return
        try:
            self._handle(driver, frame, inbound)
        except PeerError as error:
            if frame.sender == driver.peer:
                self._drop(driver, error)
            else:
                self._log_ignored("%s ignores %s: %s", self.address, frame.sender, error)

    def _forward(self, driver: LinkDriver, frame: Routed, inbound: Inbound) -> None:
        """Send a frame of others on its way, or say that there is none."""
        onward = forwarded(frame)
        if onward is None or self._way(frame.to, came_from=driver.peer) is None:
            inbound.release()
            self.relay.unreachable(frame)
        else:
            self.relay.forward(onward, inbound, driver.peer)

    def _check_sender(self, driver: LinkDriver, frame: Routed) -> None:
        uplink, peers = driver.uplink, driver.peers
        if not may_speak(frame.sender, me=self.address, uplink=uplink, peers=peers):
            raise UnexpectedMessageError(
                "a link spoke for somebody else", expected=driver.peer, got=frame.sender
            )

    def _drop(self, driver: LinkDriver, error: StreamoffError) -> None:
        self._log_dropped("%s drops the link to %s: %s", self.address, driver.peer, error)
        driver.lose(error)

    def _handle(self, driver: LinkDriver, frame: Routed, inbound: Inbound) -> None:  # noqa: C901, PLR0912 - a dispatch
        match frame:
            case Chunk():
                transfer = self._transfer_of(frame.stream, frame.sender)
                if transfer is None:
                    inbound.release()
                else:
                    transfer.on_chunk(inbound)
            case Open():
                self.publisher.on_open(frame)
            case Pull():
                self.publisher.on_pull(frame)
            case Hold():
                self.publisher.on_hold(frame)
            case Confirm():
                self.publisher.on_confirm(frame)
            case Cancel():
                self.publisher.on_cancel(frame)
            case Opened():
                if transfer := self._transfer_of(frame.stream, frame.sender):
                    transfer.on_opened(frame)
            case Message():
                instance = self._instances.get(frame.sender, b"")
                self.mailbox.on_message(frame, instance, driver.peers, uplink=driver.uplink)
            case Ack():
                self._on_ack(frame)
            case Error():
                self._on_error(frame)
            case Unreachable():
                self._on_unreachable(driver, frame)
            case Notice():
                self._on_notice(frame)
            case _:
                raise UnexpectedMessageError("a frame nobody handles", got=type(frame).__name__)

    def _on_ack(self, frame: Ack) -> None:
        if frame.of is AckOf.MESSAGE:
            self.mailbox.on_acked(frame.sender, frame.id)
        elif frame.of is AckOf.NOTICE:
            self.notifier.on_acked(frame.sender, frame.id)
        elif transfer := self._transfer_of(frame.id, frame.sender):
            transfer.on_acked()

    def _on_error(self, frame: Error) -> None:
        if frame.of is FrameType.MESSAGE:
            why = f"{frame.code.value}: {frame.detail}"
            self.mailbox.on_refused(frame.sender, frame.id, why)
        elif frame.of is FrameType.NOTICE:
            self.notifier.on_rejected(frame.sender, frame.id, frame.detail)
        elif transfer := self._transfer_of(frame.id, frame.sender):
            transfer.on_error(frame)

    def _on_unreachable(self, driver: LinkDriver, frame: Unreachable) -> None:
        """The way ends somewhere; only who is on it can know."""
        if self._way(frame.address) is not driver:
            return
        if frame.of is FrameType.MESSAGE:
            self.mailbox.on_refused(frame.address, frame.about, f"{frame.address} is unreachable")
        elif transfer := self._transfer_of(frame.about, frame.address):
            transfer.unreachable()

    def _transfer_of(self, stream: int, source: Address) -> Transfer | None:
        """The transfer of a stream, if it is the source who speaks."""
        transfer = self._wire.streams.get(stream)
        return transfer if transfer is not None and transfer.ref.source == source else None

    def _on_notice(self, frame: Notice) -> None:
        now = anyio.current_time()
        dead = set(self._notices.enter(now, frame.sender, frame.source, frame.refs, frame.reason))
        for transfer in tuple(self._transfers):
            if (transfer.ref.source, transfer.ref.id) in dead:
                transfer.fail(self._source_failed(transfer.ref, frame.reason))
        self._send(Ack(to=frame.sender, sender=self.address, of=AckOf.NOTICE, id=frame.id))

    @staticmethod
    def _source_failed(ref: Ref, reason: str) -> SourceFailedError:
        return SourceFailedError(f"the source failed: {reason}", site=ref.source, ref=ref.id)

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

    def transfer(self, ref: Ref, terms: Terms) -> Transfer:
        """Prepare a download; :meth:`run_transfer` runs it.

        Raises:
            SourceFailedError: The owner of the source has said that it is dead. Nothing was sent.
            UnreachableError: There is no way to the source.
            LimitError, UsageError: The names wanted cannot be asked for, or the endpoint is closing.
        """
        if self._closing:
            raise UsageError("the endpoint is closing", got=self.address)
        reason = self._notices.reason(anyio.current_time(), ref.source, ref.id)
        if reason is not None:
            raise self._source_failed(ref, reason)
        way = self._way(ref.source)
        if way is None:
            raise UnreachableError("no way to the source", site=ref.source, ref=ref.id)
        if terms.names is not None:
            _check_names(ref, terms.names, self.address, self.limits)
        direct = way.peer == ref.source
        return Transfer(
            ref,
            terms,
            mine=self.capabilities,
            theirs=way.accepted.capabilities if direct else frozenset(),
            resources=self.resources,
            timers=self.timers,
            wire=self._wire,
            chunk=way.accepted.limits.chunk,
        )

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

    async def start_job(self, supervise: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Start the supervisor of a job; it lives as long as it needs to.

        Raises:
            UsageError: The endpoint is closing. Nothing was started.

        Cancellation: does not reach it; it takes no time.
        """
        if self._closing:
            raise UsageError("the endpoint is closing", got=self.address)
        with anyio.CancelScope(shield=True):
            await self._tasks.start(supervise)

    async def run_transfer(
        self, transfer: Transfer, spawn: Callable[..., object] | None = None
    ) -> State:
        """Run a transfer in a task of ``spawn`` (the endpoint's own by default) and wait for it.

        Raises:
            TransferError: How it ended, if it did not bring the payload.

        Cancellation: cancels the transfer, waits until nothing of it is left, then goes on.
        """
        (spawn or self._tasks.start_soon)(self._run_transfer, transfer)
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

    async def _run_transfer(self, transfer: Transfer) -> None:
        try:
            await transfer.run()
        finally:
            self._transfers.discard(transfer)
