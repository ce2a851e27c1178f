"""Byte streams: a non-blocking socket, tried first and waited for only when it would block."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

import anyio
import anyio.lowlevel

from streamoff.errors import LinkLostError

__all__ = [
    "LINGER_SECONDS",
    "ByteStream",
    "PlainStream",
    "Watermarks",
    "consume",
    "linger",
    "lost",
    "shut",
    "wait_readable",
    "wait_writable",
]

LINGER_SECONDS: Final = 0.5
"""What a closing end waits for the other one to take the last frames."""
LINGER_READ: Final = 64 * 1024
MAX_VIEWS: Final = 512
"""Views handed to one sendmsg(2); the kernel takes 1024."""


class Watermarks:
    """When the kernel says that a socket can be read or written; only TCP has a choice.

    A wake costs more than copying what it brings, so on a fast line few of them should bring much each.

    Args:
        sock: Stays its owner's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tcp = sock.family in {socket.AF_INET, socket.AF_INET6}
        self._readable = 1
        self._unsent = 0

    def readable(self, nbytes: int) -> None:
        """Let the socket count as readable from so many bytes on, or at its end; they must be on their way."""
        if self._tcp and nbytes != self._readable:
            self._readable = nbytes
            self._set(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def unsent(self, nbytes: int) -> None:
        """Let the kernel hold so many bytes that have not been sent: what comes after waits for them."""
        if self._tcp and nbytes != self._unsent and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._unsent = nbytes
            self._set(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)

    def _set(self, level: int, option: int, value: int) -> None:
        with suppress(OSError):  # the link is gone, and whoever reads or writes hears of it
            self._sock.setsockopt(level, option, value)

    def arrived(self) -> int:
        """Bytes that have come and were not read; 0 if nobody can say."""
        try:
            return int.from_bytes(
                fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4)), sys.byteorder
            )
        except (OSError, ValueError):
            return 0


class ByteStream(Protocol):
    """A non-blocking, ordered byte stream; one reader and one writer at a time."""

    @property
    def marks(self) -> Watermarks:
        """Of its socket."""
        ...

    def receive_nowait(self, views: Sequence[memoryview]) -> int:
        """Fill the views in order with what is here.

        Returns:
            The number of bytes; 0: there are none, wait for :meth:`receivable`.

        Raises:
            LinkLostError: The other end is gone, or this one was closed.
        """
        ...

    async def receivable(self) -> None:
        """Wait until there may be something to receive; raises as :meth:`receive_nowait`."""
        ...

    def send_nowait(self, views: Sequence[memoryview]) -> int:
        """Send from the front of the views.

        Returns:
            The number of bytes taken; 0: none, wait for :meth:`sendable` and offer the same bytes again.

        Raises:
            LinkLostError: The other end is gone, or this one was closed.
        """
        ...

    async def sendable(self) -> None:
        """Wait until there may be room to send; raises as :meth:`send_nowait`."""
        ...

    async def aclose(self) -> None:
        """Wake whoever waits, let the other end take what was sent, for a moment, and close. Idempotent."""
        ...


class PlainStream:
    """A connected stream socket, made non-blocking; owned from here on. See :class:`ByteStream`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.marks = Watermarks(sock)
        self._sock = sock
        self._closed = False

    def receive_nowait(self, views: Sequence[memoryview]) -> int:
        """See :class:`ByteStream`."""
        if self._closed:
            raise _closed_here()
        try:
            got = self._sock.recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise lost(error) from error
        if not got:
            raise LinkLostError("the other end closed the link")
        return got

    async def receivable(self) -> None:
        """See :class:`ByteStream`."""
        await wait_readable(self._sock)

    def send_nowait(self, views: Sequence[memoryview]) -> int:
        """See :class:`ByteStream`."""
        if self._closed:
            raise _closed_here()
        try:
            return self._sock.sendmsg(views if len(views) <= MAX_VIEWS else views[:MAX_VIEWS])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise lost(error) from error

    async def sendable(self) -> None:
        """See :class:`ByteStream`."""
        await wait_writable(self._sock)

    async def aclose(self) -> None:
        """See :class:`ByteStream`."""
        if not self._closed:
            self._closed = True
            await linger(self._sock)


def _closed_here() -> LinkLostError:
    return LinkLostError("the link was closed")


def lost(error: OSError) -> LinkLostError:
    """The end of a link as an error of ours."""
    return LinkLostError(f"the link was reset ({error.strerror or error})")


def consume(views: list[memoryview], sent: int) -> None:
    """Drop what was sent from the front; empty views go, too."""
    done = 0
    while done < len(views) and sent >= len(views[done]):
        sent -= len(views[done])
        done += 1
    del views[:done]
    if sent:
        views[0] = views[0][sent:]


async def wait_readable(sock: socket.socket) -> None:
    """Wait until a read would not block.

    Raises:
        LinkLostError: The socket was closed, before or meanwhile.
    """
    try:
        await anyio.wait_readable(sock)
    except (anyio.ClosedResourceError, ValueError, OSError) as error:
        raise _closed_here() from error


async def wait_writable(sock: socket.socket) -> None:
    """Wait until a write would not block; raises as :func:`wait_readable`."""
    try:
        await anyio.wait_writable(sock)
    except (anyio.ClosedResourceError, ValueError, OSError) as error:
        raise _closed_here() from error


async def linger(sock: socket.socket) -> None:
    """Say that no more will be sent, read until the other end says so too, bounded, and close.

    Whoever waits for the socket is woken first. Closing at once would reset the connection if unread bytes
    are left, and the last frames with it.
    """
    try:
        anyio.notify_closing(sock)
        with anyio.move_on_after(LINGER_SECONDS):
            await _read_to_the_end(sock)
    finally:
        shut(sock)


async def _read_to_the_end(sock: socket.socket) -> None:
    rest = memoryview(bytearray(LINGER_READ))
    try:
        sock.shutdown(socket.SHUT_WR)
        while True:
            await anyio.lowlevel.checkpoint()
            try:
                if not sock.recv_into(rest):
                    return
            except (BlockingIOError, InterruptedError):
                await wait_readable(sock)
    except (OSError, LinkLostError):
        return


def shut(sock: socket.socket) -> None:
    """Close a socket, waking whoever waits for it. Idempotent."""
    if sock.fileno() >= 0:
        anyio.notify_closing(sock)
        sock.close()
