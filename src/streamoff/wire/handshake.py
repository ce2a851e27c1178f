"""The decision that follows an exchange of hellos."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamoff.errors import HandshakeError
from streamoff.types import Address, Capability
from streamoff.wire.frames import Hello
from streamoff.wire.limits import LinkLimits

__all__ = ["Accepted", "common", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What two endpoints agreed on.

    Args:
        capabilities: What both name.
        limits: What both accept.
        supersedes: The peer started anew: every transaction and download of its former instance ends.
    """

    capabilities: frozenset[Capability]
    limits: LinkLimits
    supersedes: bool


def common(mine: Iterable[Capability], theirs: Iterable[Capability]) -> frozenset[Capability]:
    """The capabilities that both name; neither end may rely on any other."""
    return frozenset(mine) & frozenset(theirs)


def judge(
    mine: Hello,
    theirs: Hello,
    known_instance: bytes | None = None,
    *,
    dialled: Address | None = None,
    certified: Iterable[Address] | None = None,
    same_certificate: bool = True,
) -> Accepted:
    """Decide whether a link may live.

    Args:
        mine: What this end sent.
        theirs: What came.
        known_instance: The instance of that address that this end knows, alive or lost; None if none.
        dialled: Who was to answer; None on the accepting side.
        certified: Addresses of the peer's certificate; None on a link without certificates.
        same_certificate: Whether the known instance showed the certificate that this one shows. Pass
            True when the known instance has no link any more, or without certificates.

    Raises:
        HandshakeError: Versions differ, the peer is myself, is not who was dialled, is not covered by its
            certificate, or claims the address of a live instance with another certificate. Close the link.
    """
    peer = theirs.address
    if theirs.version != mine.version:
        raise HandshakeError(
            "protocol version",
            expected=mine.version,
            got=theirs.version,
            peer=peer,
            hint="Run the same release of streamoff on both ends",
        )
    if theirs.instance == mine.instance or peer == mine.address:
        raise HandshakeError(
            "the peer has my own address",
            expected=f"another than {mine.address}",
            got=peer,
            hint="Give each endpoint its own address, and dial another one",
        )
    if dialled is not None and peer != dialled:
        raise HandshakeError("another endpoint answered", expected=dialled, got=peer)
    if certified is not None:
        _check_certificate(peer, tuple(certified))
    supersedes = known_instance is not None and known_instance != theirs.instance
    if supersedes and not same_certificate:
        raise HandshakeError(
            "the address is taken by a live endpoint",
            expected="the certificate of that endpoint",
            got="another certificate",
            peer=peer,
        )
    return Accepted(
        capabilities=common(mine.capabilities, theirs.capabilities),
        limits=mine.limits.agree(theirs.limits),
        supersedes=supersedes,
    )


def _check_certificate(peer: Address, certified: tuple[Address, ...]) -> None:
    if not any(address.covers(peer) for address in certified):
        raise HandshakeError(
            "the certificate does not cover the address",
            expected=f"an address of {', '.join(certified) or 'none'} or below",
            got=peer,
            hint="The address of an endpoint is a URI among its certificate's alternative names",
        )
