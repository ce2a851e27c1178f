"""A small certificate authority for one consortium: who may speak for which address.

It is a directory. Whoever holds it can admit endpoints and nobody else can; it belongs on a machine that no
site reaches. What an endpoint gets is a directory of its own, made by :func:`issue`, and
:meth:`~streamoff.transports.tls.Identity.load` reads it.

It needs the package ``cryptography`` (the extra ``certs``), and nothing else imports it.
"""

from __future__ import annotations

import datetime as dt
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from streamoff.errors import UsageError
from streamoff.transports.tls import AUTHORITY, CERTIFICATE, KEY, URI_SCHEME, Identity
from streamoff.types import Address

__all__ = ["AUTHORITY_DAYS", "ENDPOINT_DAYS", "MAX_DAYS", "Issued", "create", "issue"]

AUTHORITY_DAYS: Final = 3650
ENDPOINT_DAYS: Final = 365
MAX_DAYS: Final = 36_500
CLOCKS_APART: Final = dt.timedelta(hours=1)
"""A certificate is valid from this long ago, for machines whose clock is behind."""
ISSUED: Final = "issued"
"""Directory, in the authority's, of what endpoints get."""
AUTHORITY_KEY: Final = "authority.key"
_NAME_CHARACTERS: Final = 64  # of a common name, by X.509


@dataclass(frozen=True, slots=True)
class Issued:
    """What was made.

    Args:
        directory: Where it is.
        until: When its certificate ends; aware, UTC.
    """

    directory: Path
    until: dt.datetime


def create(
    directory: Path,
    *,
    days: int = AUTHORITY_DAYS,
    force: bool = False,
    now: dt.datetime | None = None,
) -> Issued:
    """Make an authority.

    Args:
        directory: Made with mode 0700; may exist if it is empty.
        days: From now, 1 to 36,500.
        force: Replace the authority that is there; what it has issued is worth nothing from then on.
        now: Aware; the present by default.

    Returns:
        The directory and the end.

    Raises:
        UsageError: Something is there already, or ``days`` is out of range. Nothing was
            written.
        OSError: The directory cannot be written.
    """
    now, until = _validity(days, now)
    if not force and directory.exists() and any(directory.iterdir()):
        raise UsageError(
            "the directory is not empty", path=directory, hint="Choose another one, or use --force"
        )
    if force and directory.exists() and not (directory / AUTHORITY_KEY).exists():
        raise UsageError("there is no authority to replace", path=directory)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"streamoff authority {secrets.token_hex(4)}")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.chmod(0o700)
    _write(directory / AUTHORITY_KEY, _key_pem(key), mode=0o600)
    _write(directory / AUTHORITY, _pem(certificate), mode=0o644)
    return Issued(directory, until)


def issue(
    directory: Path,
    address: Address,
    *,
    days: int = ENDPOINT_DAYS,
    force: bool = False,
    now: dt.datetime | None = None,
) -> Issued:
    """Make the identity of an endpoint: it may speak for an address and for what lies below it.

    Args:
        directory: Of the authority.
        address: Whose identity it is.
        days: From now, 1 to 36,500; it ends with the authority's at the latest.
        force: Replace the identity that is there. The former certificate stays valid until it ends.
        now: Aware; the present by default.

    Returns:
        A directory of mode 0700 with ``certificate.pem``, ``key.pem`` (mode 0600) and ``authority.pem``,
        to be moved to the endpoint's machine as a whole.

    Raises:
        UsageError: It has been issued already, ``days`` is out of range, or there is no authority or
            its time is over. Nothing was written.
        OSError: The directory cannot be written.
    """
    now, until = _validity(days, now)
    authority, authority_key = _open(directory)
    until = min(until, authority.not_valid_after_utc)
    if until <= now:
        raise UsageError("the authority's time is over", got=until, path=directory)
    place = directory / ISSUED / address
    if place.exists() and not force:
        raise UsageError(
            "it has been issued already", path=place, hint="Use --force to issue it anew"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(address))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{URI_SCHEME}{address}")]),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    files = {
        KEY: (_key_pem(key), 0o600),
        CERTIFICATE: (_pem(certificate), 0o644),
        AUTHORITY: (_pem(authority), 0o644),
    }
    _replace(place, files)
    return Issued(place, until)


def _validity(days: int, now: dt.datetime | None) -> tuple[dt.datetime, dt.datetime]:
    if not 1 <= days <= MAX_DAYS:
        raise UsageError("days of a certificate", expected=f"1 to {MAX_DAYS}", got=days)
    now = (now or dt.datetime.now(dt.UTC)).replace(microsecond=0)
    return now, now + dt.timedelta(days=days)


def _open(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((directory / AUTHORITY).read_bytes())
        pem = (directory / AUTHORITY_KEY).read_bytes()
        key = serialization.load_pem_private_key(pem, password=None)
    except FileNotFoundError as error:
        raise UsageError(
            "there is no authority here",
            path=directory,
            hint="Make one with: streamoff certs init",
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"the authority cannot be read ({error})", path=directory) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError("the authority's key", expected="an elliptic curve", path=directory)
    return certificate, key


def _name(text: str) -> x509.Name:
    """For people: what counts is the alternative name."""
    short = text if len(text) <= _NAME_CHARACTERS else f"{text[: _NAME_CHARACTERS - 3]}..."
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, short)])


def _usage(*, sign: bool) -> x509.KeyUsage:
    """An endpoint signs handshakes and nothing else, the authority certificates and nothing else."""
    return x509.KeyUsage(
        digital_signature=sign,
        key_cert_sign=not sign,
        crl_sign=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file that appears whole and never has a wider mode; replaces what is there."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _replace(place: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """Make a directory that appears whole; one that is there goes when the new one is complete."""
    place.parent.mkdir(mode=0o700, exist_ok=True)
    new = place.with_name(f".{secrets.token_hex(4)}")
    new.mkdir(mode=0o700)
    try:
        for name, (data, mode) in files.items():
            _write(new / name, data, mode=mode)
        Identity.load(new)  # what is handed out works
        if place.exists():
            old = place.with_name(f".{secrets.token_hex(4)}")
            place.rename(old)
            new.rename(place)
            shutil.rmtree(old)
        else:
            new.rename(place)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
