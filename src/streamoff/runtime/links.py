"""The links of an endpoint: dialled and accepted, kept and replaced, and which way leads where.

One link to a peer is in service at a time. What an endpoint dials it keeps: when it is lost, it is dialled again
until the endpoint closes. What travels over the links is somebody else's; it hears of every change.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from streamoff.errors import LinkLostError, StreamoffError, UnreachableError, UsageError
from streamoff.runtime.handshake import shake_hands
from streamoff.runtime.link import Deferred, Inbound, Link, LinkDriver, Listener, Placement
from streamoff.runtime.sparing import Lines
from streamoff.runtime.timers import Timers
from streamoff.types import Address, Capability
from streamoff.wire.frames import Chunk, Hello, Routed
from streamoff.wire.handshake import Accepted, judge
from streamoff.wire.routes import choose

__all__ = ["MAX_INSTANCES", "Behind", "Links", "Traffic", "Transport"]

logger = logging.getLogger("streamoff.endpoint")

MAX_INSTANCES: Final = 16_384
"""Peers whose instance is remembered, so that a restart is noticed; the longest unseen goes first."""
REDIAL_SECONDS: Final = (0.05, 5.0)
"""First and longest pause between attempts to get a lost link back; doubled each time, with jitter."""
CLOSING: Final = "the endpoint is closing"

Behind = Callable[[Address], bool]
"""Whether the way to an address leads over the link in question."""


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


class Traffic(Protocol):
    """What travels over the links, and what they tell it. Nothing here may block."""

    def dispatch(self, driver: LinkDriver, inbound: Inbound) -> None:
        """A frame came."""
        ...

    def place(self, driver: LinkDriver, chunk: Chunk) -> Placement | None:
        """The body of a chunk is about to come; see :data:`streamoff.runtime.link.Placer`."""
        ...

    def peer_restarted(self, peer: Address) -> None:
        """A new instance of an address is there; what the old one had begun is over."""
        ...

    def link_replaced(self, behind: Behind) -> None:
        """A link makes way for a newer one to the same peer, which is found next."""
        ...

    def link_found(self, behind: Behind) -> None:
        """A link is in service."""
        ...

    def link_lost(self, behind: Behind) -> None:
        """A link is gone; to some of what was behind it there may be another way."""
        ...


class Links:
    """The links of one endpoint.

    Args:
        hello: What this end says of itself.
        transports: How others are reached, and reach this end.
        seed: Of the jitter of redials; random by default.
    """

    def __init__(
        self, hello: Hello, transports: Iterable[Transport], seed: int | None = None
    ) -> None:
        self.me = hello.address
        self.live: dict[Address, LinkDriver] = {}
        """Those in service, by peer; for reading."""
        self.uplink: Address | None = None
        """The way out, whether its link is in service or not."""
        self._hello = hello
        self._transports = tuple(transports)
        self._jitter = random.Random(seed)
        self._kept: set[Address] = set()
        self._instances: OrderedDict[Address, bytes] = OrderedDict()
        self._scopes: set[anyio.CancelScope] = set()
        self._stopped = False
        self.made = self.lost = self.refused = 0
        """Links that were put into service, that are not any more, and handshakes that failed; for reading."""

    # --- life -------------------------------------------------------------------------------------

    def open(self, tasks: TaskGroup, timers: Timers, traffic: Traffic, lines: Lines) -> None:
        """Listen on every transport.

        Args:
            tasks: Where the tasks of the links run.
            timers: The endpoint's clock.
            traffic: What travels over the links.
            lines: The endpoint's log.

        Raises:
            UsageError: The address is taken. This end listens nowhere.
        """
        self._tasks = tasks
        self._timers = timers
        self._traffic = traffic
        self._lines = lines
        try:
            for transport in self._transports:
                serve = transport.listen(self.me, self._accept)
                if serve is not None:
                    tasks.start_soon(self._serve_transport, serve)
        except BaseException:
            self._unlisten()
            raise

    def stop(self) -> None:
        """Accept nobody and dial nobody any more; links in service stay."""
        self._stopped = True
        self._unlisten()
        for scope in tuple(self._scopes):
            scope.cancel()

    async def flush(self) -> None:
        """Wait until every link has sent what waits, or is lost; the caller bounds it."""
        for driver in tuple(self.live.values()):
            await driver.flush()

    def close(self) -> None:
        """End every link. Does not block."""
        for driver in tuple(self.live.values()):
            driver.lose(LinkLostError(CLOSING))

    def _unlisten(self) -> None:
        for transport in self._transports:
            transport.unlisten(self.me)

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        """A scope that outer cancellation does not reach and that ends when the endpoint closes."""
        with anyio.CancelScope(shield=True) as scope:
            if self._stopped:
                scope.cancel()
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    # --- ways -------------------------------------------------------------------------------------

    def way(self, to: Address, came_from: Address | None = None) -> LinkDriver | None:
        """The link that leads to an address; None: there is no way, or only the one it came from."""
        uplink = self.uplink if self.uplink in self.live else None
        via = choose(to, self.live, uplink, me=self.me, came_from=came_from)
        return None if via is None else self.live[via]

    def capabilities_of(self, address: Address) -> frozenset[Capability] | None:
        """What a neighbour can do, as far as both have named it; None: it is behind others, or not there."""
        way = self.way(address)
        return way.accepted.capabilities if way is not None and way.peer == address else None

    def can_reach(self, to: Address) -> bool:
        """Whether there is a way to an address now."""
        return self.way(to) is not None

    def send(self, frame: Routed) -> None:
        """Queue a frame on the way to its address; it is lost if there is none."""
        driver = self.way(frame.to)
        if driver is not None:
            driver.send_nowait(frame)

    def serve(self, to: Address, item: Deferred) -> None:
        """Queue a chunk on the way to an address; it is dropped if there is none."""
        driver = self.way(to)
        if driver is None:
            item.drop()
        else:
            driver.serve_nowait(item)

    def crowded(self, to: Address) -> bool:
        """Whether so much waits on the way to an address that what others send has to wait where it is."""
        driver = self.way(to)
        return driver is not None and driver.crowded

    def instance(self, peer: Address) -> bytes:
        """The instance of a peer, as far as it is remembered; empty if not."""
        return self._instances.get(peer, b"")

    # --- made -------------------------------------------------------------------------------------

    async def connect(self, to: Address) -> None:
        """Dial an endpoint and keep the link; the first endpoint connected to becomes the uplink.

        Raises:
            UnreachableError: Nobody answers.
            HandshakeError: The two cannot work together.
            UsageError: It is being kept already.
        """
        if to in self._kept:
            raise UsageError("connected already", got=to)
        first = self.uplink is None
        self._kept.add(to)
        if first:
            self.uplink = to
        try:
            driver = await self._dial(to)
        except BaseException:
            self._kept.discard(to)
            if first:
                self.uplink = None
            raise
        self._put_into_service(driver)
        self._tasks.start_soon(self._keep, to, driver)

    async def _dial(self, to: Address) -> LinkDriver:
        error: StreamoffError = UnreachableError(
            "no transport", peer=to, hint="Give the endpoint a transport that reaches it"
        )
        for transport in self._transports:
            try:
                with self._guarded(to):
                    link = await transport.dial(self.me, to)
            except UnreachableError as unreachable:
                error = unreachable
                continue
            return await self._shake_hands(link, dialled=to)
        raise error

    async def _keep(self, to: Address, driver: LinkDriver) -> None:
        with self._until_stopped():
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
            if to in self.live:
                continue
            try:
                return await self._dial(to)
            except StreamoffError as error:
                logger.debug("%s cannot reach %s again: %s", self.me, to, error.what)

    async def _serve_transport(self, serve: Callable[[], Awaitable[None]]) -> None:
        with self._until_stopped():
            await serve()

    def _accept(self, link: Link) -> anyio.Event:
        settled = anyio.Event()
        self._tasks.start_soon(self._welcome, link, settled)
        return settled

    async def _welcome(self, link: Link, settled: anyio.Event) -> None:
        with self._until_stopped():
            try:
                driver = await self._shake_hands(link, dialled=None)
            except StreamoffError as error:
                self.refused += 1
                text = "%s refused a link: %s"
                self._lines.tell(logger, logging.INFO, "link refused", text, self.me, error)
                return
            finally:
                settled.set()
            driver.send_nowait(driver.mine)  # who hears it finds the link in service
            self._put_into_service(driver)
            await self._drive(driver)

    async def _shake_hands(self, link: Link, *, dialled: Address | None) -> LinkDriver:
        def verdict(theirs: Hello) -> Accepted:
            former = self.live.get(theirs.address)
            return judge(
                self._hello,
                theirs,
                self._instances.get(theirs.address),
                dialled=dialled,
                certified=link.certified,
                same_certificate=former is None or former.link.fingerprint == link.fingerprint,
            )

        with self._guarded(dialled):
            theirs, accepted = await shake_hands(link, self._hello, verdict, dialled=dialled)
        return LinkDriver(
            link,
            mine=self._hello,
            theirs=theirs,
            accepted=accepted,
            uplink=dialled is not None and dialled == self.uplink,
            timers=self._timers,
            dispatch=self._traffic.dispatch,
            place=self._traffic.place,
            lines=self._lines,
        )

    @contextmanager
    def _guarded(self, peer: Address | None) -> Iterator[None]:
        """What a transport raises that nobody foresaw is told, and costs the link that was to be and no other."""
        try:
            yield
        except StreamoffError:
            raise
        except Exception as error:
            text = "%s: a defect ends a link before it is in service"
            self._lines.tell(logger, logging.ERROR, "defect", text, self.me, exc_info=error)
            raise LinkLostError("a defect ended the link", got=repr(error), peer=peer) from error

    # --- in service -------------------------------------------------------------------------------

    async def _drive(self, driver: LinkDriver) -> None:
        """Run a link that is in service until it is lost."""
        cause = await driver.run()
        if self.live.get(driver.peer) is driver:
            self._take_out_of_service(driver)
        self.lost += 1
        if self._stopped:
            logger.debug("%s closed the link to %s", self.me, driver.peer)
            return
        text, why = "%s lost the link to %s: %s", cause.line("peer")
        self._lines.tell(logger, logging.INFO, "link lost", text, self.me, driver.peer, why)

    def _put_into_service(self, driver: LinkDriver) -> None:
        """Use a link from now on; what was under way on a former one to the same peer is lost."""
        self.made += 1
        peer = driver.peer
        former = self.live.get(peer)
        if driver.accepted.supersedes:
            self._traffic.peer_restarted(peer)
        if former is not None:
            former.lose(LinkLostError("replaced by a newer link", peer=peer))
            self._traffic.link_replaced(lambda to: self.way(to) is former)
        self._remember(peer, driver.theirs.instance)
        self.live[peer] = driver
        self._traffic.link_found(lambda to: self.way(to) is driver)
        if self._stopped:
            driver.lose(LinkLostError(CLOSING))

    def _take_out_of_service(self, driver: LinkDriver) -> None:
        peer, before = driver.peer, self.live.copy()
        uplink = self.uplink if self.uplink in before else None
        del self.live[peer]
        self._traffic.link_lost(lambda to: choose(to, before, uplink, me=self.me) == peer)

    def _remember(self, peer: Address, instance: bytes) -> None:
        self._instances[peer] = instance
        self._instances.move_to_end(peer)
        if len(self._instances) > MAX_INSTANCES:
            self._instances.popitem(last=False)
