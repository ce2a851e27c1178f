"""Accepting links: a bounded number of connections that have not said hello, and an accept loop that survives."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import anyio.lowlevel

from streamoff.errors import StreamoffError
from streamoff.runtime.link import Listener
from streamoff.runtime.resources import Resources
from streamoff.runtime.sparing import SparingLog
from streamoff.transports.dialling import CONNECT_SECONDS
from streamoff.transports.stream import StreamLink
from streamoff.transports.streams import ByteStream, shut, wait_readable
from streamoff.transports.tls import Peer
from streamoff.types import Address
from streamoff.wire.limits import Limits

__all__ = ["BACKLOG", "HASTE_SECONDS", "MAX_HANDSHAKES", "Serve", "SocketTransport"]

logger = logging.getLogger("streamoff.transports")

MAX_HANDSHAKES: Final = 256
"""Accepted connections that have not said hello; others wait to be accepted."""
HASTE_SECONDS: Final = 2.0
"""While others wait, a handshake that takes longer than this makes room."""
BACKLOG: Final = 1024
PAUSE_SECONDS: Final = 0.1
"""Before the next attempt to accept, when there were no descriptors left."""

Serve = Callable[[], Awaitable[None]]
"""What must run for links to be accepted; ends when the transport listens no more."""


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


class SocketTransport:
    """What TCP and unix sockets share: an accept loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.listening: dict[Address, socket.socket] = {}
        self._refused = SparingLog(logger, logging.INFO)
        self._full = SparingLog(logger, logging.WARNING)
        self._defect = SparingLog(logger, logging.ERROR)

    def adopt(self, address: Address, sock: socket.socket, accept: Listener) -> Serve:
        """Accept from a socket that listens, under an address, until :meth:`unlisten`."""
        self.listening[address] = sock

        async def serve() -> None:
            await self._serve(sock, accept)

        return serve

    def unlisten(self, address: Address) -> None:
        """Accept no more links; connections whose handshake is under way are dropped. Idempotent."""
        sock = self.listening.pop(address, None)
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
        for line in (self._refused, self._full, self._defect):
            line.close()

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
                    link = await self.accepted(sock)
                    await accept(link).wait()
                    greeted = True
                finally:
                    if not greeted:
                        await _put_away(link, sock)
        except (StreamoffError, OSError) as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - it is told, and ends nothing else
            self._defect("a defect ends a connection", exc_info=error)
            return
        if not greeted:
            self._refused("a connection was refused: %s", why)

    async def accepted(self, sock: socket.socket) -> StreamLink:
        """Make a link of a connection; may shake hands, and is cancelled when that takes too long."""
        raise NotImplementedError

    def link(self, stream: ByteStream, peer: Peer | None = None) -> StreamLink:
        """A link over a stream, with what is known of its other end."""
        return StreamLink(
            stream,
            Resources.current().pool,
            limits=self._limits,
            certified=None if peer is None else peer.addresses,
            fingerprint=None if peer is None else peer.fingerprint,
        )


async def _put_away(link: StreamLink | None, sock: socket.socket) -> None:
    if link is None:
        shut(sock)
    else:
        with anyio.CancelScope(shield=True):
            await link.aclose()
