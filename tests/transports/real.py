"""What the tests of this package share: loops, certificates, links over real sockets, and a cable that can be cut."""

from __future__ import annotations

import datetime as dt
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.link import Inbound, Outbound
from streamoff.runtime.pool import BufferPool
from streamoff.transports import authority
from streamoff.transports.sockets import HostPort, TcpTransport, UnixTransport
from streamoff.transports.stream import StreamLink
from streamoff.transports.streams import PlainStream
from streamoff.transports.tls import Identity, secure
from streamoff.types import Address
from streamoff.wire.frames import Frame

KINDS = ("unix", "tcp", "tls")


HAS_UVLOOP = find_spec("uvloop") is not None
if HAS_UVLOOP:  # its first loop opens descriptors that stay, and are no leak of a test
    anyio.run(anyio.sleep, 0, backend_options={"use_uvloop": True})


@pytest.fixture(name="anyio_backend", params=["asyncio", "uvloop", "trio"])
def every_loop(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run an async test in real time on each event loop that streamoff runs on."""
    match request.param:
        case "asyncio":
            return "asyncio", {"debug": True}
        case "uvloop":
            if not HAS_UVLOOP:
                pytest.skip("uvloop is an extra, and is not installed here")
            return "asyncio", {"use_uvloop": True, "debug": True}
        case _:
            return "trio", {}


# --- certificates -------------------------------------------------------------------------------


class Consortium:
    """An authority and the identities it has issued, each made when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        authority.create(directory)

    def identity(self, address: str, **options: Any) -> Identity:
        """The identity of an address; with options, a new one in its place."""
        place = self.directory / authority.ISSUED / address
        if options or not place.exists():
            authority.issue(self.directory, Address(address), **{"force": True, **options})
        return Identity.load(place)

    def expired(self, address: str) -> Identity:
        """An identity whose time is over since yesterday."""
        long_ago = dt.datetime.now(dt.UTC) - dt.timedelta(days=11)
        return self.identity(address, days=10, now=long_ago)


# --- links --------------------------------------------------------------------------------------


def socket_pair(
    family: socket.AddressFamily = socket.AF_UNIX, buffer: int | None = None
) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; ``buffer``: what the kernel holds in each direction, roughly.

    A TCP receiver keeps room for two segments: with less, every byte waits for a timer.
    """
    room = None if buffer is None else max(buffer, 0 if family is socket.AF_UNIX else 128 * 1024)
    if family is socket.AF_UNIX:
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            ends = (near, listener.accept()[0])
    for end in ends:
        if buffer is not None and room is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        end.setblocking(False)
    return ends


@asynccontextmanager
async def link_pair(
    kind: str = "unix",
    consortium: Consortium | None = None,
    *,
    buffer: int | None = None,
    pool: BufferPool | None = None,
    **options: Any,
) -> AsyncIterator[tuple[StreamLink, StreamLink]]:
    """Two ends of a link over real sockets; closed at the end."""
    pool = pool or BufferPool()
    one, other = socket_pair(socket.AF_UNIX if kind == "unix" else socket.AF_INET, buffer)
    links: list[StreamLink] = []
    if kind == "tls":
        assert consortium is not None
        ends: dict[bool, StreamLink] = {}

        async def shake(sock: socket.socket, identity: Identity, *, server: bool) -> None:
            stream, peer = await secure(sock, identity, server=server)
            ends[server] = StreamLink(
                stream, pool, certified=peer.addresses, fingerprint=peer.fingerprint, **options
            )

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: shake(one, consortium.identity("site-1"), server=False))
            group.start_soon(lambda: shake(other, consortium.identity("server"), server=True))
        links = [ends[False], ends[True]]
    else:
        links = [StreamLink(PlainStream(end), pool, **options) for end in (one, other)]
    try:
        yield links[0], links[1]
    finally:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for link in links:
                    group.start_soon(link.aclose)


async def send(link: StreamLink, item: Outbound, *urgent: Frame) -> None:
    """Send one item; ``urgent`` comes up as soon as it has begun."""
    waiting = list(urgent)

    def take() -> Iterator[Frame]:
        while waiting:
            yield waiting.pop(0)

    await link.send(item, take)


class Ready:
    """A chunk that is there already. See :class:`streamoff.runtime.link.Deferred`."""

    def __init__(self, inbound: Inbound, nbytes: int) -> None:
        self.inbound = inbound
        self.nbytes = nbytes

    async def render(self) -> Inbound:
        return self.inbound

    def drop(self) -> None:
        self.inbound.release()


# --- endpoints ----------------------------------------------------------------------------------


class Net:
    """Places of endpoints for one kind of transport.

    Args:
        kind: One of :data:`KINDS`.
        directory: Of unix sockets; short.
        consortium: Of TLS.
    """

    def __init__(self, kind: str, directory: Path, consortium: Consortium) -> None:
        self.kind = kind
        self.directory = directory
        self.consortium = consortium
        self.places: dict[str, Any] = {}

    def server(self, address: str) -> UnixTransport | TcpTransport:
        """A transport that listens, on a place of its own."""
        if self.kind == "unix":
            self.places[address] = self.directory / address
            return UnixTransport(listen=self.places[address])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.places[address] = HostPort("127.0.0.1", port)
        return TcpTransport(listen=self.places[address], tls=self._identity(address))

    def client(
        self, address: str, *, instead: Mapping[str, Any] | None = None
    ) -> UnixTransport | TcpTransport:
        """A transport that reaches every place known by now; ``instead``: other places for some."""
        peers = {**self.places, **(instead or {})}
        if self.kind == "unix":
            return UnixTransport(peers=peers)
        return TcpTransport(peers=peers, tls=self._identity(address))

    def _identity(self, address: str) -> Identity | None:
        return self.consortium.identity(address) if self.kind == "tls" else None


@asynccontextmanager
async def connected(
    net: Net, *sites: str, server: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[BaseEndpoint, ...]]:
    """A server and its connected sites (``site-1`` by default)."""
    async with AsyncExitStack() as stack:
        hub = BaseEndpoint("server", transports=[net.server("server")], **(server or {}))
        ends = [await stack.enter_async_context(hub)]
        for name in sites or ("site-1",):
            end = BaseEndpoint(name, transports=[net.client(name)], seed=1, **options)
            ends.append(await stack.enter_async_context(end))
            await end.connect("server")
        await settled(lambda: hub.statistics().links == len(ends) - 1)
        yield tuple(ends)


async def settled(condition: Callable[[], object], patience: float = 30.0) -> None:
    """Wait until something is so that no event tells; it is a defect if it does not come."""
    with anyio.fail_after(patience):
        while not condition():  # noqa: ASYNC110 - there is no event
            await anyio.sleep(0.002)


class Cable:
    """A TCP or unix proxy between two endpoints: it counts, stalls, and can be cut and mended.

    Use :attr:`place` instead of the place it leads to.
    """

    def __init__(self, target: Path | HostPort, directory: Path) -> None:
        self.carried = 0
        self.connections = 0
        self._target = target
        self._family = socket.AF_UNIX if isinstance(target, Path) else socket.AF_INET
        self._listener = socket.socket(self._family)
        if isinstance(target, Path):
            self.place: Path | HostPort = directory / f"cable-{target.name}"
            self._listener.bind(str(self.place))
        else:
            self._listener.bind(("127.0.0.1", 0))
            self.place = HostPort("127.0.0.1", self._listener.getsockname()[1])
        self._listener.setblocking(False)
        self._listener.listen(16)
        self._open: set[socket.socket] = set()
        self._whole = True
        self._limit: int | None = None
        self._at_limit = self.cut
        self._moves = anyio.Event()
        self._moves.set()
        self.reached = anyio.Event()

    def cut(self) -> None:
        """Reset every connection and refuse new ones until :meth:`mend`."""
        self._whole = False
        for sock in tuple(self._open):
            self._reset(sock)

    def mend(self) -> None:
        """Let connections through again, without a limit."""
        self._whole = True
        self._limit = None

    def cut_after(self, nbytes: int) -> None:
        """Cut when so many bytes more have been carried; sets :attr:`reached`."""
        self._limit, self._at_limit = self.carried + nbytes, self.cut

    def stall_after(self, nbytes: int) -> None:
        """Stall when so many bytes more have been carried; sets :attr:`reached`."""
        self._limit, self._at_limit = self.carried + nbytes, self.stall

    def stall(self) -> None:
        """Carry nothing, and lose nothing."""
        self._moves = anyio.Event()

    def go_on(self) -> None:
        """End a stall; there is no limit any more."""
        self._limit = None
        self._moves.set()

    def _reset(self, sock: socket.socket) -> None:
        self._open.discard(sock)
        if sock.fileno() >= 0:
            if self._family == socket.AF_INET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            anyio.notify_closing(sock)
            sock.close()

    async def run(self) -> None:
        """Carry until cancelled."""
        try:
            async with anyio.create_task_group() as group:
                while True:
                    await anyio.wait_readable(self._listener)
                    near, _ = self._listener.accept()
                    if not self._whole:
                        near.close()
                        continue
                    self.connections += 1
                    far = socket.socket(self._family)
                    place = self._target
                    far.connect(str(place) if isinstance(place, Path) else (place.host, place.port))
                    for sock in (near, far):
                        sock.setblocking(False)
                        self._open.add(sock)
                    group.start_soon(self._carry, near, far)
                    group.start_soon(self._carry, far, near)
        finally:
            self.cut()
            self._listener.close()

    async def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while True:
                await self._moves.wait()
                try:
                    data = source.recv(64 * 1024)
                except BlockingIOError:
                    await anyio.wait_readable(source)
                    continue
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                await self._moves.wait()
                left = memoryview(data)
                while left:
                    try:
                        left = left[target.send(left) :]
                    except BlockingIOError:
                        await anyio.wait_writable(target)
                self.carried += len(data)
                if self._limit is not None and self.carried >= self._limit:
                    self.reached.set()
                    self._at_limit()
                await anyio.lowlevel.checkpoint()
        except (OSError, ValueError, anyio.ClosedResourceError):
            self._reset(source)
            self._reset(target)


@asynccontextmanager
async def cable(target: Path | HostPort, directory: Path) -> AsyncIterator[Cable]:
    """A cable that carries meanwhile."""
    one = Cable(target, directory)
    async with anyio.create_task_group() as group:
        group.start_soon(one.run)
        try:
            yield one
        finally:
            group.cancel_scope.cancel()


@contextmanager
def closing(*sockets: socket.socket) -> Iterator[None]:
    """Close sockets at the end."""
    try:
        yield
    finally:
        for sock in sockets:
            sock.close()
