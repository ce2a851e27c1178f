"""The yardstick: the same bytes between two processes with blocking sockets and nothing else."""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from streamoff.tensors.files import allocate
from streamoff.types import MIB

__all__ = ["BUFFER_BYTES", "accept", "dial", "receive_to_file", "receive_to_memory", "send"]

BUFFER_BYTES: Final = 4 * MIB
"""The same as a chunk."""
SEND_BYTES: Final = MIB


def dial(host: str, port: int, context: ssl.SSLContext | None) -> socket.socket:
    """Connect, with TLS if there is a context."""
    sock = socket.create_connection((host, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if context is None else context.wrap_socket(sock)


def accept(listener: socket.socket, context: ssl.SSLContext | None) -> socket.socket:
    """Accept one connection, with TLS if there is a context."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if context is None else context.wrap_socket(sock, server_side=True)


def send(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Send everything and wait until the other end has it."""
    with sock:
        for view in views:
            for start in range(0, len(view), SEND_BYTES):
                sock.sendall(view[start : start + SEND_BYTES])
        sock.recv(1)


def receive_to_file(sock: socket.socket, nbytes: int, path: Path) -> float:
    """Receive into one buffer and write it at its place in an allocated file.

    Returns:
        Seconds from the first wait for bytes to the last byte written.
    """
    buffer = memoryview(bytearray(BUFFER_BYTES))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        begun = time.perf_counter()
        allocate(fd, nbytes)
        at = 0
        while at < nbytes:
            part = buffer[: min(BUFFER_BYTES, nbytes - at)]
            _fill(sock, part)
            os.pwrite(fd, part, at)
            at += len(part)
        seconds = time.perf_counter() - begun
    finally:
        os.close(fd)
        path.unlink()
    _finish(sock)
    return seconds


def receive_to_memory(sock: socket.socket, nbytes: int) -> float:
    """Receive into memory that was never touched.

    Returns:
        Seconds from the first wait for bytes to the last byte.
    """
    fresh = mmap.mmap(-1, nbytes)
    view = memoryview(fresh)
    begun = time.perf_counter()
    for start in range(0, nbytes, BUFFER_BYTES):
        _fill(sock, view[start : start + BUFFER_BYTES])
    seconds = time.perf_counter() - begun
    view.release()
    fresh.close()
    _finish(sock)
    return seconds


def _finish(sock: socket.socket) -> None:
    with sock:
        sock.sendall(b"!")


def _fill(sock: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:])
        if not got:
            raise EOFError("the sender went away")
        at += got
