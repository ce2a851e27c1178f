"""The yardstick: the same bytes between the same two processes, with blocking sockets and nothing else.

The receiver asks with one byte when it is ready, as ours does with its first pull, and answers with one byte
when it has everything: both sides' clocks cover the same stretch.
"""

from __future__ import annotations

import mmap
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from streamoff.tensors.files import allocate
from streamoff.tensors.sources import StateDictSource
from streamoff.types import MIB

__all__ = ["BUFFER_BYTES", "WHOLE", "ToFile", "ToMemory", "accept", "dial", "send", "views_of"]

BUFFER_BYTES: Final = 4 * MIB
"""What the receiver writes at a time; the same as a chunk."""
WHOLE: Final = 0
"""Hand each tensor to the socket as one piece."""
_TOKEN: Final = b"!"


def views_of(tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """A payload's header and the very memory of its tensors, in the payload's order."""
    source = StateDictSource(tensors)
    layout = source.layout
    views = [memoryview(layout.header)]
    for spec in layout.specs:
        found = source.views(layout.data_start + spec.start, layout.data_start + spec.stop)
        assert found is not None  # contiguous, on the CPU
        views += found
    return views


def dial(host: str, port: int, context: ssl.SSLContext | None) -> socket.socket:
    """Connect, with TLS if there is a context."""
    return _ready(socket.create_connection((host, port)), context, server=False)


def accept(listener: socket.socket, context: ssl.SSLContext | None) -> socket.socket:
    """Accept one connection, with TLS if there is a context."""
    return _ready(listener.accept()[0], context, server=True)


def _ready(sock: socket.socket, context: ssl.SSLContext | None, *, server: bool) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if context is None else context.wrap_socket(sock, server_side=server)


def send(sock: socket.socket, views: Sequence[memoryview], piece: int) -> None:
    """Wait until the other end asks, send everything, and wait until it has it.

    Args:
        sock: Connected; stays open.
        views: Bytes to send.
        piece: How many are handed to the socket at a time, or :data:`WHOLE`.
    """
    _expect(sock)
    for view in views:
        for start in range(0, len(view), piece or len(view)):
            sock.sendall(view[start : start + (piece or len(view))])
    _expect(sock)


class ToFile:
    """Receives into a buffer and writes it at its place in an allocated file, again and again.

    Args:
        sock: Connected; stays open.
        nbytes: How many come.
        path: Made, and removed by ``free``.
    """

    def __init__(self, sock: socket.socket, nbytes: int, path: Path) -> None:
        self._sock = sock
        self._nbytes = nbytes
        self._path = path
        self._buffer = memoryview(bytearray(b"\1") * BUFFER_BYTES)  # touched before it is needed

    def run(self) -> None:
        """Ask, receive everything, and say so."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            allocate(fd, self._nbytes)
            self._sock.sendall(_TOKEN)
            for start in range(0, self._nbytes, BUFFER_BYTES):
                part = self._buffer[: self._nbytes - start]
                _fill(self._sock, part)
                os.pwrite(fd, part, start)
        finally:
            os.close(fd)
        self._sock.sendall(_TOKEN)

    def free(self) -> None:
        """Remove the file."""
        self._path.unlink()


class ToMemory:
    """Receives into private memory that was never touched.

    Args:
        sock: Connected; stays open.
        nbytes: How many come.
    """

    def __init__(self, sock: socket.socket, nbytes: int) -> None:
        self._sock = sock
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def run(self) -> None:
        """Ask, receive everything, and say so."""
        self._sock.sendall(_TOKEN)
        with memoryview(self.memory) as view:
            for start in range(0, len(view), BUFFER_BYTES):
                _fill(self._sock, view[start : start + BUFFER_BYTES])
        self._sock.sendall(_TOKEN)

    def free(self) -> None:
        """Return the memory."""
        self.memory.close()


def _expect(sock: socket.socket) -> None:
    if sock.recv(1) != _TOKEN:
        raise EOFError("the receiver went away")


def _fill(sock: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:])
        if not got:
            raise EOFError("the sender went away")
        at += got
