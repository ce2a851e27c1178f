"""Dialling: every address of a host in turn, and unix sockets whose listener is busy."""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from streamoff.activity import working
from streamoff.transports.streams import shut, wait_writable

__all__ = ["CONNECT_SECONDS", "connect", "connect_unix"]

CONNECT_SECONDS: Final = 10.0
"""From dialling to the end of a TLS handshake, and from accepting to hello."""
RETRY_SECONDS: Final = (0.005, 0.1)
"""First and longest pause before a full unix socket is tried again."""


async def _look_up(host: str, port: int) -> Sequence[tuple[int, int, int, tuple[object, ...]]]:
    """The addresses of a host: at once if it is a number, otherwise from a thread that may be left behind."""
    ask = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = ask(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        with working():
            found = await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
    return [(family, kind, protocol, target) for family, kind, protocol, _, target in found]


async def connect(host: str, port: int, tune: Callable[[socket.socket], None]) -> socket.socket:
    """Try every address of a host in turn, each with its share of the time.

    Args:
        host: Name or number.
        port: Of the listener.
        tune: Called with each socket before it is connected.

    Raises:
        OSError: Why the last one failed.
    """
    failure: OSError = OSError(errno.EHOSTUNREACH, "no address")
    found = await _look_up(host, port)
    for family, kind, protocol, target in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            tune(sock)
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


async def connect_unix(sock: socket.socket, path: Path) -> None:
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
