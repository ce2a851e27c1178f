"""TLS for links: mutual, 1.3 only, on a non-blocking socket, and the identity in a certificate.

An address is a URI among the certificate's alternative names: ``streamoff:site-1``. Session tickets are off
and a missing close is never taken for an end: with Python's defaults the last few per cent of a stream can
vanish behind a clean end of file.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from streamoff.errors import HandshakeError, LinkLostError, StreamoffError, UsageError
from streamoff.transports.stream import linger, lost, shut, wait_readable, wait_writable
from streamoff.types import Address

__all__ = ["URI_SCHEME", "Identity", "TlsStream", "addresses_of", "secure"]

URI_SCHEME: Final = "streamoff:"
RECORD_BYTES: Final = 16 * 1024
"""A head is sent in one record with the first bytes behind it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an endpoint is on TLS links, and whom it believes.

    Args:
        certificate: PEM file with the endpoint's certificate and what leads from it to the authority.
        key: PEM file with its private key.
        authority: PEM file with the certificates of the consortium's authority; nothing else is believed.

    Raises:
        UsageError: A file is missing or is not what it should be.
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, server: bool) -> ssl.SSLContext:
        """A context for one side of a link.

        Raises:
            UsageError: A file is missing or is not what it should be.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the address in the certificate counts, not the host's name
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"TLS files cannot be used ({error})",
                certificate=self.certificate,
                key=self.key,
                authority=self.authority,
            ) from error
        return context


def addresses_of(certificate: object) -> tuple[Address, ...]:
    """The addresses that a peer's certificate names.

    Raises:
        HandshakeError: It names none, or something that is no address.
    """
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    uris = [value for kind, value in names if kind == "URI" and value.startswith(URI_SCHEME)]
    try:
        addresses = tuple(Address(uri.removeprefix(URI_SCHEME)) for uri in uris)
    except StreamoffError as error:
        raise HandshakeError("the certificate names no address", got=uris) from error
    if not addresses:
        raise HandshakeError(
            "the certificate names no address", expected=f"a URI {URI_SCHEME}...", got=names
        )
    return addresses


async def secure(
    sock: socket.socket, identity: Identity, *, server: bool
) -> tuple[TlsStream, tuple[Address, ...]]:
    """Shake hands on a connected socket; the caller bounds the time.

    Returns:
        The stream, and the addresses of the peer's certificate.

    Raises:
        HandshakeError: The peer is not believed, or does not believe us. The socket is closed.
        LinkLostError: It went away. The socket is closed.
    """
    sock.setblocking(False)
    try:
        tls = identity.context(server=server).wrap_socket(
            sock,
            server_side=server,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
    except BaseException:
        shut(sock)
        raise
    try:
        await _shake_hands(tls)
        return TlsStream(tls), addresses_of(tls.getpeercert())
    except BaseException:
        shut(tls)
        raise


async def _shake_hands(tls: ssl.SSLSocket) -> None:
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            await wait_readable(tls)
        except ssl.SSLWantWriteError:
            await wait_writable(tls)
        except ssl.SSLError as error:
            raise HandshakeError(f"TLS refused ({error.reason or error})") from error
        except OSError as error:
            raise lost(error) from error
        else:
            return


class TlsStream:
    """An encrypted stream socket; owned from here on. See :class:`~streamoff.transports.stream.ByteStream`."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._closed = False

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        """Read until nothing is pending before waiting: select(2) does not see decrypted bytes."""
        while True:
            try:
                got = self._sock.recv_into(views[0] or views[1])
            except ssl.SSLWantReadError:
                await wait_readable(self._sock)
                continue
            except ssl.SSLWantWriteError:
                await anyio.sleep(
                    0.001
                )  # the writer waits for the socket; it sends what is due first
                continue
            except ssl.SSLError as error:
                raise LinkLostError(f"the link ended without a goodbye ({error.reason})") from error
            except OSError as error:
                raise lost(error) from error
            if not got:
                raise LinkLostError("the other end closed the link")
            return got

    async def send_all(self, views: Sequence[memoryview]) -> None:
        """Send in order; bytes that were refused once are offered again unchanged before any others."""
        for view in _records(views):
            left = view
            while left:
                try:
                    left = left[self._sock.send(left) :]
                except ssl.SSLWantWriteError:
                    await wait_writable(self._sock)
                except ssl.SSLWantReadError:
                    await anyio.sleep(
                        0.001
                    )  # the reader waits for the socket; it takes what is due first
                except (OSError, ssl.SSLError) as error:
                    raise lost(error) from error

    async def aclose(self) -> None:
        """Send what is left, wait briefly for the other end, close. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                await linger(self._sock, self._sock)
            finally:
                shut(self._sock)


def _records(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """Small views are joined up to one record; large ones go out from where they lie."""
    out: list[memoryview] = []
    small = bytearray()
    for view in views:
        if len(small) + len(view) <= RECORD_BYTES:
            small += view
            continue
        if small:
            room = RECORD_BYTES - len(small)
            small += view[:room]
            out.append(memoryview(bytes(small)))
            small.clear()
            view = view[room:]  # noqa: PLW2901 - the rest of it
        if len(view) <= RECORD_BYTES:
            small += view
        else:
            out.append(view)
    if small:
        out.append(memoryview(bytes(small)))
    return out
