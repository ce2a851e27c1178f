"""TLS for links: mutual, 1.3 only, beside a non-blocking socket, and the identity in a certificate.

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

from streamoff.errors import (
    HandshakeError,
    LimitError,
    LinkLostError,
    StreamoffError,
    UsageError,
)
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
BURST_BYTES: Final = 48 * 1024
"""Three records: what is taken from the kernel, or encrypted for it, at a time. With a record more, it is what may lie
encrypted in memory each way."""
ANSWER_BYTES: Final = 2 * BURST_BYTES
"""What may wait for a peer that asks for new keys; what is encrypted for it otherwise included."""


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
        stream = TlsStream(sock, identity.context(server=server), server=server)
        await stream.shake_hands()
        return stream, stream.peer()
    except HandshakeError:
        with anyio.CancelScope(shield=True):
            await linger(sock)  # the peer shall read why
        raise
    except BaseException as error:
        shut(sock)
        if isinstance(error, OSError) and not isinstance(error, StreamoffError):
            raise lost(error) from error
        raise


def _reason(error: ssl.SSLError) -> str:
    """What OpenSSL says, in a few words: of a certificate that it does not believe also why not."""
    return str(getattr(error, "verify_message", None) or error.reason or error)


class TlsStream:
    """An encrypted stream socket; owned from here on. See :class:`~streamoff.transports.streams.ByteStream`.

    Records pass through memory, at most :data:`BURST_BYTES` of them each way: so one call brings, or takes, several.
    An ``SSLSocket`` asks the kernel twice for each record that comes and once for each that goes.

    Args:
        sock: Connected; made non-blocking.
        context: Of this end.
        server: Whether the other end dialled.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        sock.setblocking(False)
        self.marks = Watermarks(sock)
        self._sock = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._unsent = memoryview(b"")
        self._taken = 0
        self._closed = False

    async def shake_hands(self) -> None:
        """Agree on keys and believe each other; the caller bounds the time.

        Raises:
            HandshakeError: The peer is not believed; it has been told why, if it takes that at once.
            OSError, LinkLostError: It went away.
        """
        done = False
        while not done:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                with suppress(OSError):
                    self._flush()
                raise HandshakeError(f"TLS refused ({_reason(error)})") from error
            while not self._flush():
                await wait_writable(self._sock)
            while not done and not self._feed():
                await wait_readable(self._sock)

    def peer(self) -> Peer:
        """Whom the peer's certificate names."""
        whole = self._tls.getpeercert(binary_form=True)
        assert whole is not None  # it is required
        return Peer(addresses_of(self._tls.getpeercert()), hashlib.sha256(whole).digest())

    def receive_nowait(self, views: Sequence[memoryview]) -> int:
        """See :class:`~streamoff.transports.streams.ByteStream`."""
        self._check_open()
        view, got, ended = views[0], 0, False
        try:
            while got < len(view) and not ended:
                try:
                    record = int(self._tls.read(len(view) - got, view[got:]))
                    ended = not record
                    got += record
                except ssl.SSLWantReadError:
                    if not self._feed():
                        break
        except OSError as error:
            if not got:  # else it is met again
                raise _lost(error) from error
        if ended and not got:
            raise LinkLostError("the other end closed the link")
        return got

    async def receivable(self) -> None:
        """See :class:`~streamoff.transports.streams.ByteStream`."""
        await wait_readable(self._sock)

    def send_nowait(self, views: Sequence[memoryview]) -> int:
        """See :class:`~streamoff.transports.streams.ByteStream`.

        What is encrypted counts as sent when the kernel has all of it; until then the same bytes are offered again.
        """
        self._check_open()
        try:
            if not self._taken:
                self._taken = self._encrypt(views)
            if not self._flush():
                return 0
        except OSError as error:
            raise _lost(error) from error
        taken, self._taken = self._taken, 0
        return taken

    async def sendable(self) -> None:
        """See :class:`~streamoff.transports.streams.ByteStream`."""
        await wait_writable(self._sock)

    def _encrypt(self, views: Sequence[memoryview]) -> int:
        """Encrypt from the front of the views: small ones joined to a record, a large one from where it lies."""
        view = views[0]
        if len(views) > 1 and len(view) < RECORD_BYTES:
            return self._tls.write(_joined(views))
        return self._tls.write(view[:BURST_BYTES])

    def _flush(self) -> bool:
        """Send what is encrypted; whether all of it has gone."""
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except (BlockingIOError, InterruptedError):
                return False
        return True

    def _feed(self) -> bool:
        """Take what the kernel has; whether there was something, if only the end.

        What the peer has been answered with so far, when it asked for new keys, goes out first.

        Raises:
            LimitError: It asks on and on, and takes no answer.
            OSError: The socket is of no use any more.
        """
        if self._outgoing.pending and not self._flush() and self._outgoing.pending > ANSWER_BYTES:
            raise LimitError(
                "new keys are asked for, and the answers not read",
                expected=f"at most {ANSWER_BYTES} bytes waiting",
                got=self._outgoing.pending,
            )
        try:
            records = self._sock.recv(BURST_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        if records:
            self._incoming.write(records)
        else:
            self._incoming.write_eof()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise LinkLostError("the link was closed")

    async def aclose(self) -> None:
        """See :class:`~streamoff.transports.streams.ByteStream`."""
        if not self._closed:
            self._closed = True
            with suppress(OSError, ValueError):
                self._tls.unwrap()  # says goodbye; does not wait for the answer
            with suppress(OSError):
                self._flush()
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
