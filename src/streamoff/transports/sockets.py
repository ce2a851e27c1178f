"""The socket transports: TCP with or without TLS, and unix sockets."""

from __future__ import annotations

import errno
import fcntl
import functools
import ipaddress
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from streamoff.activity import working
from streamoff.errors import StreamoffError, UnreachableError, UsageError
from streamoff.runtime.link import Listener
from streamoff.runtime.resources import Resources
from streamoff.runtime.sparing import SparingLog
from streamoff.transports.stream import StreamLink
from streamoff.transports.streams import (
    ByteStream,
    PlainStream,
    shut,
    wait_readable,
    wait_writable,
)
from streamoff.transports.tls import Identity, Peer, secure
from streamoff.types import MIB, Address
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["CONNECT_SECONDS", "MAX_HANDSHAKES", "HostPort", "TcpTransport", "UnixTransport"]

logger = logging.getLogger("streamoff.transports")

CONNECT_SECONDS: Final = 10.0
MAX_HANDSHAKES: Final = 256
"""Accepted connections that have not said hello; others wait to be accepted."""
HASTE_SECONDS: Final = 2.0
"""While others wait, a handshake that takes longer than this makes room."""
PAUSE_SECONDS: Final = 0.1
"""Before the next attempt to accept, when there were no descriptors left."""
RETRY_SECONDS: Final = (0.005, 0.1)
"""First and longest pause before a full unix socket is tried again."""
BACKLOG: Final = 1024
NOTSENT_BYTES: Final = 128 * 1024
"""What the kernel may hold unsent, so that control frames overtake a chunk on a slow line."""
UNIX_BUFFER_BYTES: Final = MIB


@dataclass(frozen=True, slots=True)
class HostPort:
    """Where a TCP endpoint is found: a host name or IP address, and a port (0 to listen on any)."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port <= 65_535:
            raise UsageError("host and port", expected="a host and 0 to 65535", got=self)

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Read ``host:port`` or ``[v6]:port``.

        Raises:
            UsageError: It is neither.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not port.isascii() or not port.isdigit():
            raise UsageError("not a place", expected="host:port", got=text)
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Lobby:
    """Connections that have not said hello: bounded, and the slowest make room for others."""

    def __init__(self) -> None:
        self._inside: dict[anyio.CancelScope, float] = {}
        self._left = anyio.Event()

    async def room(self) -> None:
        """Wait until there is room for one more; who is in no hurry is sent away for it."""
        while len(self._inside) >= MAX_HANDSHAKES:
            now = anyio.current_time()
            for scope, patience in self._inside.items():
                if patience <= now:
                    scope.cancel()
            hasty = [patience for patience in self._inside.values() if patience > now]
            with anyio.CancelScope(deadline=min(hasty, default=math.inf)):
                await self._left.wait()

    @contextmanager
    def enter(self) -> Iterator[anyio.CancelScope]:
        """A scope that is cancelled when the time is over, or the room is needed."""
        with anyio.move_on_after(CONNECT_SECONDS) as scope:
            self._inside[scope] = anyio.current_time() + HASTE_SECONDS
            try:
                yield scope
            finally:
                del self._inside[scope]
                left, self._left = self._left, anyio.Event()
                left.set()


class _SocketTransport:
    """What TCP and unix sockets share: an accept loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._listening: dict[Address, socket.socket] = {}
        self._refused = SparingLog(logger, logging.INFO)
        self._full = SparingLog(logger, logging.WARNING)

    def _adopt(self, address: Address, sock: socket.socket, accept: Listener) -> Serve:
        self._listening[address] = sock

        async def serve() -> None:
            await self._serve(sock, accept)

        return serve

    def unlisten(self, address: Address) -> None:
        """Accept no more links; connections whose handshake is under way are dropped. Idempotent."""
        sock = self._listening.pop(address, None)
        if sock is not None:
            shut(sock)

    async def _serve(self, listener: socket.socket, accept: Listener) -> None:
        """Accept until the socket is closed."""
        lobby = _Lobby()
        async with anyio.create_task_group() as tasks:
            while True:
                await lobby.room()
                sock = await self._next(listener)
                if sock is None:
                    break
                tasks.start_soon(self._take, sock, accept, lobby)
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    async def _next(self, listener: socket.socket) -> socket.socket | None:
        """The next connection, or None when the listener is closed; it survives every other trouble."""
        while True:
            try:
                return listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                pass
            except OSError as error:
                if listener.fileno() < 0:
                    return None
                self._full("no connection can be accepted: %s", error.strerror)
                await anyio.sleep(PAUSE_SECONDS)
            try:
                await wait_readable(listener)
            except StreamoffError:
                return None

    async def _take(self, sock: socket.socket, accept: Listener, lobby: _Lobby) -> None:
        """Bring one connection to its hello; whatever goes wrong ends this one only."""
        link: StreamLink | None = None
        greeted = False
        why = "no handshake in time"
        try:
            with lobby.enter():
                try:
                    link = await self._accepted(sock)
                    await accept(link).wait()
                    greeted = True
                finally:
                    if not greeted:
                        await _put_away(link, sock)
        except (StreamoffError, OSError) as error:
            why = str(error)
        except Exception:
            logger.exception("a defect ends a connection")
            return
        if not greeted:
            self._refused("a connection was refused: %s", why)

    async def _accepted(self, sock: socket.socket) -> StreamLink:
        raise NotImplementedError

    def _link(self, stream: ByteStream, peer: Peer | None = None) -> StreamLink:
        return StreamLink(
            stream,
            Resources.current().pool,
            limits=self._limits,
            certified=None if peer is None else peer.addresses,
            fingerprint=None if peer is None else peer.fingerprint,
        )


Serve = Callable[[], Awaitable[None]]


class TcpTransport(_SocketTransport):
    """TCP, with TLS or, on loopback only, without.

    Args:
        listen: Where this endpoint accepts links; None: it only dials.
        peers: Where the endpoints are that this one dials.
        tls: Identity; required unless every place is on loopback.
        plain_anywhere: Allow unencrypted links to and from other machines: anybody on the way can read and
            change models. For networks that are trusted as a whole.
        limits: What links accept.

    Raises:
        UsageError: A place is not on loopback and there is neither ``tls`` nor ``plain_anywhere``.
    """

    def __init__(
        self,
        *,
        listen: HostPort | None = None,
        peers: Mapping[str, HostPort] | None = None,
        tls: Identity | None = None,
        plain_anywhere: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(limits)
        self._listen = listen
        self._peers = {Address(name): place for name, place in (peers or {}).items()}
        self._tls = tls
        if tls is None and not plain_anywhere:
            for place in (listen, *self._peers.values()):
                if place is not None and not _on_loopback(place.host):
                    raise UsageError(
                        "an unencrypted link to another machine",
                        expected="TLS, or a loopback address",
                        got=place,
                        hint="Give an Identity, or set plain_anywhere=True on a trusted network",
                    )

    @property
    def place(self) -> HostPort | None:
        """Where it listens, with the port that was chosen; None if it does not."""
        for sock in self._listening.values():
            host, port = sock.getsockname()[:2]
            return HostPort(host, port)
        return None

    def listen(self, address: Address, accept: Listener) -> Serve | None:
        """Bind; the result accepts links until it is cancelled.

        Raises:
            UsageError: The place cannot be bound.
        """
        if self._listen is None:
            return None
        try:
            sock = _bound(self._listen)
        except OSError as error:
            raise UsageError(f"cannot listen ({error.strerror})", got=self._listen) from error
        return self._adopt(address, sock, accept)

    async def _accepted(self, sock: socket.socket) -> StreamLink:
        sock.setblocking(False)
        _tune(sock)
        return await self._secured(sock, server=True)

    async def _secured(self, sock: socket.socket, *, server: bool) -> StreamLink:
        if self._tls is None:
            return self._link(PlainStream(sock))
        stream, peer = await secure(sock, self._tls, server=server)
        return self._link(stream, peer)

    async def dial(self, mine: Address, to: Address) -> StreamLink:  # noqa: ARG002 - the protocol's
        """Open a link.

        Raises:
            UnreachableError: Nobody answers there, or the place is not known.
            HandshakeError: TLS was refused.
        """
        place = self._peers.get(to)
        if place is None:
            raise UnreachableError("no place is known for the peer", peer=to)
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                sock = await _connect(place)
                return await self._secured(sock, server=False)
        except TimeoutError as error:
            raise UnreachableError("no answer in time", peer=to, place=str(place)) from error
        except OSError as error:
            raise UnreachableError(
                f"nobody answers ({error.strerror or error})", peer=to, place=str(place)
            ) from error


class UnixTransport(_SocketTransport):
    """Unix sockets: endpoints of one machine, at less than half the cost of TCP.

    Who may connect is decided by the file's mode (0600 by default: the same user).

    Args:
        listen: Path of this endpoint's socket, at most 100 bytes; None: it only dials.
        peers: Paths of the endpoints that this one dials.
        mode: Of the socket file.
        limits: What links accept.

    Raises:
        UsageError: A path is too long.
    """

    def __init__(
        self,
        *,
        listen: Path | None = None,
        peers: Mapping[str, Path] | None = None,
        mode: int = 0o600,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(limits)
        self._path = listen
        self._file: tuple[int, int] | None = None
        self._peers = {Address(name): path for name, path in (peers or {}).items()}
        self._mode = mode
        for path in (listen, *self._peers.values()):
            if path is not None and len(os.fsencode(path)) > 100:
                raise UsageError("a socket path", expected="at most 100 bytes", got=path)

    def listen(self, address: Address, accept: Listener) -> Serve | None:
        """Bind; the result accepts links until it is cancelled.

        A socket file that nobody listens on is replaced.

        Raises:
            UsageError: The path cannot be bound, or somebody listens there.
        """
        if self._path is None:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            with _alone_in(self._path.parent):
                _clear_stale(self._path)
                sock.bind(os.fspath(self._path))
                self._path.chmod(self._mode)  # until it listens nobody can connect
                sock.listen(BACKLOG)
                self._file = _identity(self._path)
        except OSError as error:
            sock.close()
            raise UsageError(f"cannot listen ({error.strerror})", path=self._path) from error
        return self._adopt(address, sock, accept)

    def unlisten(self, address: Address) -> None:
        """Accept no more links and remove the socket file, if it still is this one's. Idempotent."""
        listening = address in self._listening
        super().unlisten(address)
        if listening and self._path is not None:
            with suppress(OSError), _alone_in(self._path.parent):
                if _identity(self._path) == self._file:
                    self._path.unlink()

    async def _accepted(self, sock: socket.socket) -> StreamLink:
        sock.setblocking(False)
        _tune_unix(sock)
        await anyio.lowlevel.checkpoint()
        return self._link(PlainStream(sock))

    async def dial(self, mine: Address, to: Address) -> StreamLink:  # noqa: ARG002 - the protocol's
        """Open a link.

        Raises:
            UnreachableError: Nobody listens there, or the path is not known.
        """
        path = self._peers.get(to)
        if path is None:
            raise UnreachableError("no socket is known for the peer", peer=to)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            _tune_unix(sock)
            with anyio.fail_after(CONNECT_SECONDS):
                await _connect_unix(sock, path)
        except BaseException as error:
            shut(sock)
            if not isinstance(error, OSError):
                raise
            why = "" if isinstance(error, TimeoutError) else f" ({error.strerror or error})"
            raise UnreachableError(f"nobody answers{why}", peer=to, path=path) from error
        return self._link(PlainStream(sock))


async def _put_away(link: StreamLink | None, sock: socket.socket) -> None:
    if link is None:
        shut(sock)
    else:
        with anyio.CancelScope(shield=True):
            await link.aclose()


def _on_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_BYTES)


def _tune_unix(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Keep other processes from looking at, or replacing, socket files of a directory meanwhile."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _clear_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on any more."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return  # somebody listens, and is busy; or it is not ours to ask


def _bound(place: HostPort) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((place.host, place.port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def _look_up(place: HostPort) -> Sequence[tuple[int, int, int, tuple[object, ...]]]:
    """The addresses of a host: at once if it is a number, otherwise from a thread that may be left behind."""
    ask = functools.partial(socket.getaddrinfo, place.host, place.port, type=socket.SOCK_STREAM)
    try:
        found = ask(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        with working():
            found = await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
    return [(family, kind, protocol, target) for family, kind, protocol, _, target in found]


async def _connect(place: HostPort) -> socket.socket:
    """Try every address of a host in turn, each with its share of the time."""
    failure: OSError = OSError(errno.EHOSTUNREACH, "no address")
    found = await _look_up(place)
    for family, kind, protocol, target in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            _tune(sock)
            with anyio.fail_after(CONNECT_SECONDS / len(found)):
                await _finish_connect(sock, target)
        except OSError as error:
            failure = error
            shut(sock)
        except BaseException:
            shut(sock)
            raise
        else:
            return sock
    raise failure


async def _finish_connect(sock: socket.socket, target: tuple[object, ...]) -> None:
    try:
        sock.connect(target)
    except BlockingIOError:
        await wait_writable(sock)
    problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))


async def _connect_unix(sock: socket.socket, path: Path) -> None:
    """Connect; a listener whose queue is full says only "not now", and nobody tells when to come again."""
    pause, longest = RETRY_SECONDS
    while True:
        await anyio.lowlevel.checkpoint()
        try:
            sock.connect(os.fspath(path))
        except BlockingIOError:
            await anyio.sleep(pause)
            pause = min(2 * pause, longest)
        else:
            return
