"""The socket transports: TCP with or without TLS, and unix sockets."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from streamoff.errors import StreamoffError, UnreachableError, UsageError
from streamoff.runtime.link import Listener
from streamoff.runtime.resources import Resources
from streamoff.transports.stream import PlainStream, StreamLink, shut, wait_readable, wait_writable
from streamoff.transports.tls import Identity, secure
from streamoff.types import MIB, Address
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["CONNECT_SECONDS", "MAX_HANDSHAKES", "HostPort", "TcpTransport", "UnixTransport"]

logger = logging.getLogger("streamoff.transports")

CONNECT_SECONDS: Final = 10.0
MAX_HANDSHAKES: Final = 256
"""Accepted connections that have not finished their TLS handshake; more are closed at once."""
BACKLOG: Final = 1024
NOTSENT_BYTES: Final = 128 * 1024
"""What the kernel may hold unsent, so that control frames overtake a chunk on a slow line."""
UNIX_BUFFER_BYTES: Final = MIB
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


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


class _SocketTransport:
    """What TCP and unix sockets share: an accept loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._listening: dict[Address, socket.socket] = {}

    def _adopt(self, address: Address, sock: socket.socket, accept: Listener) -> Serve:
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._listening[address] = sock

        async def serve() -> None:
            await self._serve(sock, accept)

        return serve

    def unlisten(self, address: Address) -> None:
        """Accept no more links."""
        sock = self._listening.pop(address, None)
        if sock is not None:
            shut(sock)

    async def _serve(self, listener: socket.socket, accept: Listener) -> None:
        """Accept until the socket is closed."""
        shaking = anyio.Semaphore(MAX_HANDSHAKES)
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    sock, _ = listener.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    try:
                        await wait_readable(listener)
                    except StreamoffError:
                        break
                    continue
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        break
                    logger.warning("no room for another connection: %s", error.strerror)
                    await anyio.sleep(0.1)
                    continue
                try:
                    shaking.acquire_nowait()
                except anyio.WouldBlock:
                    shut(sock)
                    continue
                tasks.start_soon(self._take, sock, accept, shaking)
            tasks.cancel_scope.cancel()

    async def _take(self, sock: socket.socket, accept: Listener, shaking: anyio.Semaphore) -> None:
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                link = await self._accepted(sock)
        except (StreamoffError, TimeoutError) as error:
            logger.info("a connection was refused: %s", str(error) or "no handshake in time")
            shut(sock)
            return
        except BaseException:
            shut(sock)
            raise
        finally:
            shaking.release()
        accept(link)

    async def _accepted(self, sock: socket.socket) -> StreamLink:
        raise NotImplementedError

    def _link(self, sock: socket.socket) -> StreamLink:
        return StreamLink(PlainStream(sock), Resources.current().pool, limits=self._limits)


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
        if tls is not None:
            tls.context(server=False)

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
        family = socket.AF_INET6 if ":" in self._listen.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._listen.host, self._listen.port))
            return self._adopt(address, sock, accept)
        except OSError as error:
            sock.close()
            raise UsageError(f"cannot listen ({error.strerror})", got=self._listen) from error

    async def _accepted(self, sock: socket.socket) -> StreamLink:
        _tune(sock)
        if self._tls is None:
            return self._link(sock)
        stream, addresses = await secure(sock, self._tls, server=True)
        pool = Resources.current().pool
        return StreamLink(stream, pool, limits=self._limits, certified=addresses)

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
                _tune(sock)
                if self._tls is None:
                    return self._link(sock)
                stream, addresses = await secure(sock, self._tls, server=False)
        except TimeoutError as error:
            raise UnreachableError("no answer in time", peer=to, place=str(place)) from error
        except OSError as error:
            raise UnreachableError(
                f"nobody answers ({error.strerror or error})", peer=to, place=str(place)
            ) from error
        pool = Resources.current().pool
        return StreamLink(stream, pool, limits=self._limits, certified=addresses)


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
            _clear_stale(self._path)
            mask = os.umask(0o777 & ~self._mode)
            try:
                sock.bind(os.fspath(self._path))
            finally:
                os.umask(mask)
            return self._adopt(address, sock, accept)
        except OSError as error:
            sock.close()
            raise UsageError(f"cannot listen ({error.strerror})", path=self._path) from error

    def unlisten(self, address: Address) -> None:
        """Accept no more links and remove the socket file."""
        listening = address in self._listening
        super().unlisten(address)
        if listening and self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _accepted(self, sock: socket.socket) -> StreamLink:
        _tune_unix(sock)
        await anyio.lowlevel.checkpoint()
        return self._link(sock)

    async def dial(self, mine: Address, to: Address) -> StreamLink:  # noqa: ARG002 - the protocol's
        """Open a link.

        Raises:
            UnreachableError: Nobody listens there, or the path is not known.
        """
        path = self._peers.get(to)
        if path is None:
            raise UnreachableError("no socket is known for the peer", peer=to)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        _tune_unix(sock)
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                await _finish_connect(sock, os.fspath(path))
        except TimeoutError as error:
            shut(sock)
            raise UnreachableError("no answer in time", peer=to, path=path) from error
        except OSError as error:
            shut(sock)
            raise UnreachableError(
                f"nobody answers ({error.strerror or error})", peer=to, path=path
            ) from error
        except BaseException:
            shut(sock)
            raise
        return self._link(sock)


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


def _clear_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on any more."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


async def _connect(place: HostPort) -> socket.socket:
    """Try every address of a host in turn."""
    failure: OSError = OSError(errno.EHOSTUNREACH, "no address")
    found = await anyio.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, target in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
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


async def _finish_connect(sock: socket.socket, target: str | tuple[object, ...]) -> None:
    try:
        sock.connect(target)
    except BlockingIOError:
        await wait_writable(sock)
    except InterruptedError:
        await wait_writable(sock)
    problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))
