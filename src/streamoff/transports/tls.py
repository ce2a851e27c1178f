"""TLS for links: mutual, 1.3 only, on a non-blocking socket, and the identity in a certificate.

An address is a URI among the certificate's alternative names: ``streamoff:site-1``. Session tickets are off
and a missing close is never taken for an end: with Python's defaults the last few per cent of a stream can
vanish behind a clean end of file.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from streamoff.errors import HandshakeError, LinkLostError, StreamoffError, UsageError
from streamoff.transports.streams import (
    Watermarks,
    linger,
    lost,
    shut,
    wait_readable,
    wait_writable,
)
from streamoff.types import Address

__all__ = [
    "AUTHORITY",
    "CERTIFICATE",
    "KEY",
    "URI_SCHEME",
    "Identity",
    "Peer",
    "TlsStream",
    "addresses_of",
    "secure",
]

URI_SCHEME: Final = "streamoff:"
CERTIFICATE: Final = "certificate.pem"
KEY: Final = "key.pem"
AUTHORITY: Final = "authority.pem"
RECORD_BYTES: Final = 16 * 1024
"""A head is sent in one record with the first bytes behind it."""
RETRY_SECONDS: Final = 0.01
"""Pause of a reader that has to write, or the other way round, while the other half waits for just that."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an endpoint is on TLS links, and whom it believes.

    The files are read again when they change, so that a renewed certificate counts from the next link on.

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
    _made: dict[bool, tuple[object, ssl.SSLContext]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.context(server=False)

    @classmethod
    def load(cls, directory: Path) -> Identity:
        """Read what ``streamoff certs issue`` has made.

        Args:
            directory: With ``certificate.pem``, ``key.pem`` and ``authority.pem``.

        Raises:
            UsageError: A file is missing or is not what it should be.
        """
        return cls(directory / CERTIFICATE, directory / KEY, directory / AUTHORITY)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """A context for one side of a link.

        Raises:
            UsageError: A file is missing or is not what it should be.
        """
        files = (self.certificate, self.key, self.authority)
        try:
            version = [(stat.st_ino, stat.st_mtime_ns) for stat in (path.stat() for path in files)]
            known = self._made.get(server)
            if known is None or known[0] != version:
                known = self._made[server] = (version, self._make(server=server))
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"TLS files cannot be used ({error})",
                certificate=self.certificate,
                key=self.key,
                authority=self.authority,
            ) from error
        return known[1]

    def _make(self, *, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the address in the certificate counts, not the host's name
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0
        # without a password of our own a protected key would ask for one at the terminal
        context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        context.load_verify_locations(self.authority)
        return context


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom a certificate names.

    Args:
        addresses: Whom it may speak for, with what lies below them.
        fingerprint: SHA-256 of the certificate.
    """

    addresses: tuple[Address, ...]
    fingerprint: bytes


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
) -> tuple[TlsStream, Peer]:
    """Shake hands on a connected socket; the caller bounds the time.

    Returns:
        The stream, and whom the peer's certificate names.

    Raises:
        HandshakeError: The peer is not believed. The socket is closed.
        LinkLostError: It went away. The socket is closed.
        UsageError: Our own files cannot be used any more. The socket is closed.
    """
    try:
        sock.setblocking(False)
        tls = identity.context(server=server).wrap_socket(
            sock,
            server_side=server,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
    except BaseException as error:
        shut(sock)
        if isinstance(error, OSError):
            raise lost(error) from error
        raise
    try:
        await _shake_hands(tls)
        whole = tls.getpeercert(binary_form=True)
        assert whole is not None  # it is required
        peer = Peer(addresses_of(tls.getpeercert()), hashlib.sha256(whole).digest())
        return TlsStream(tls), peer
    except HandshakeError:
        with anyio.CancelScope(shield=True):
            await linger(tls)  # the peer shall read why
        raise
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
            raise HandshakeError(f"TLS refused ({_reason(error)})") from error
        except OSError as error:
            raise lost(error) from error
        else:
            return


def _reason(error: ssl.SSLError) -> str:
    """What OpenSSL says, in a few words: of a certificate that it does not believe also why not."""
    return str(getattr(error, "verify_message", None) or error.reason or error)


class TlsStream:
    """An encrypted stream socket; owned from here on. See :class:`~streamoff.transports.streams.ByteStream`.

    A read can need the socket to be writable and a write to be readable (keys are renewed in between), so
    either half remembers what it has to wait for.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.marks = Watermarks(sock)
        self._sock = sock
        self._closed = False
        self._read_waits_to_write = False
        self._write_waits_to_read = False
        self._record = b""

    def receive_nowait(self, views: Sequence[memoryview]) -> int:
        """See :class:`~streamoff.transports.streams.ByteStream`.

        Whoever waits has been told 0 before: select(2) does not see bytes that are decrypted already.
        """
        self._check_open()
        try:
            got = self._sock.recv_into(views[0])
        except ssl.SSLWantReadError:
            self._read_waits_to_write = False
            return 0
        except ssl.SSLWantWriteError:
            self._read_waits_to_write = True
            return 0
        except OSError as error:
            raise _lost(error) from error
        if not got:
            raise LinkLostError("the other end closed the link")
        return got

    async def receivable(self) -> None:
        """See :class:`~streamoff.transports.streams.ByteStream`."""
        if self._read_waits_to_write:
            await self._in_turn(writing=True)
        else:
            await wait_readable(self._sock)

    def send_nowait(self, views: Sequence[memoryview]) -> int:
        """See :class:`~streamoff.transports.streams.ByteStream`.

        Small views are joined to one record and large ones sent from where they lie, so bytes that were
        refused once are offered again unchanged, as OpenSSL requires.
        """
        self._check_open()
        large = len(views) == 1 or len(views[0]) >= RECORD_BYTES
        if not large and not self._record:
            self._record = _joined(views)
        try:
            sent = self._sock.send(views[0] if large else self._record)
        except ssl.SSLWantWriteError:
            self._write_waits_to_read = False
            return 0
        except ssl.SSLWantReadError:
            self._write_waits_to_read = True
            return 0
        except OSError as error:
            raise _lost(error) from error
        self._record = b""
        return sent

    async def sendable(self) -> None:
        """See :class:`~streamoff.transports.streams.ByteStream`."""
        if self._write_waits_to_read:
            await self._in_turn(writing=False)
        else:
            await wait_writable(self._sock)

    async def _in_turn(self, *, writing: bool) -> None:
        """Wait for what the other half waits for as well, perhaps: then it does what is due."""
        try:
            await (wait_writable if writing else wait_readable)(self._sock)
        except anyio.BusyResourceError:
            await anyio.sleep(RETRY_SECONDS)

    def _check_open(self) -> None:
        """A closed TLS socket would read and write in the clear."""
        if self._closed:
            raise LinkLostError("the link was closed")

    async def aclose(self) -> None:
        """See :class:`~streamoff.transports.streams.ByteStream`."""
        if not self._closed:
            self._closed = True
            with suppress(OSError, ValueError):
                self._sock.unwrap()  # says goodbye; does not wait for the answer
            await linger(self._sock)


def _lost(error: OSError) -> StreamoffError:
    """The end of a link: with TLS 1.3 a client hears only here that its certificate was refused."""
    if not isinstance(error, ssl.SSLError):
        return lost(error)
    why = _reason(error)
    if "ALERT" in why:
        return HandshakeError(f"TLS refused by the peer ({why})")
    return LinkLostError(f"the link ended without a goodbye ({why})")


def _joined(views: Sequence[memoryview]) -> bytes:
    joined = bytearray()
    for view in views:
        joined += view[: RECORD_BYTES - len(joined)]
        if len(joined) == RECORD_BYTES:
            break
    return bytes(joined)
