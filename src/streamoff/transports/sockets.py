"""The socket transports: TCP with or without TLS, and unix sockets."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel

from streamoff.errors import UnreachableError, UsageError
from streamoff.runtime.link import Listener
from streamoff.transports.accepting import BACKLOG, Serve, SocketTransport
from streamoff.transports.dialling import CONNECT_SECONDS, connect, connect_unix
from streamoff.transports.stream import StreamLink
from streamoff.transports.streams import PlainStream, shut
from streamoff.transports.tls import Identity, secure
from streamoff.types import MIB, Address
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["HostPort", "TcpTransport", "UnixTransport"]

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


class TcpTransport(SocketTransport):
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
        for sock in self.listening.values():
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
        return self.adopt(address, sock, accept)

    async def accepted(self, sock: socket.socket) -> StreamLink:
        """Shake hands, with TLS; see :class:`~streamoff.transports.accepting.SocketTransport`."""
        sock.setblocking(False)
        _tune(sock)
        return await self._secured(sock, server=True)

    async def _secured(self, sock: socket.socket, *, server: bool) -> StreamLink:
        if self._tls is None:
            return self.link(PlainStream(sock))
        stream, peer = await secure(sock, self._tls, server=server)
        return self.link(stream, peer)

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
                sock = await connect(place.host, place.port, _tune)
                return await self._secured(sock, server=False)
        except TimeoutError as error:
            raise UnreachableError("no answer in time", peer=to, place=str(place)) from error
        except OSError as error:
            raise UnreachableError(
                f"nobody answers ({error.strerror or error})", peer=to, place=str(place)
            ) from error


class UnixTransport(SocketTransport):
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
        return self.adopt(address, sock, accept)

    def unlisten(self, address: Address) -> None:
        """Accept no more links and remove the socket file, if it still is this one's. Idempotent."""
        listening = address in self.listening
        super().unlisten(address)
        if listening and self._path is not None:
            with suppress(OSError), _alone_in(self._path.parent):
                if _identity(self._path) == self._file:
                    self._path.unlink()

    async def accepted(self, sock: socket.socket) -> StreamLink:
        """Nothing to shake; see :class:`~streamoff.transports.accepting.SocketTransport`."""
        sock.setblocking(False)
        _tune_unix(sock)
        await anyio.lowlevel.checkpoint()
        return self.link(PlainStream(sock))

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
                await connect_unix(sock, path)
        except BaseException as error:
            shut(sock)
            if not isinstance(error, OSError):
                raise
            why = "" if isinstance(error, TimeoutError) else f" ({error.strerror or error})"
            raise UnreachableError(f"nobody answers{why}", peer=to, path=path) from error
        return self.link(PlainStream(sock))


def _on_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
