"""Which way a frame goes, and who may speak for whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from typing import TypeVar

from streamoff.types import Address
from streamoff.wire.frames import Routed

__all__ = ["choose", "forwarded", "may_follow", "may_speak"]

R = TypeVar("R", bound=Routed)


def choose(
    to: Address,
    links: Container[Address],
    uplink: Address | None,
    *,
    me: Address,
    came_from: Address | None = None,
) -> Address | None:
    """Choose the link for an address that is not mine.

    The link with the longest address that is ``to`` or an ancestor of it; otherwise the uplink. What lies
    below me is never sent up: it has no link, so it is not there, and the uplink would send it back.

    Args:
        to: Where the frame goes.
        links: Addresses of the live links; the uplink's may be among them.
        uplink: The way out, or None: there is none, or it is down.
        me: My own address.
        came_from: The link that the frame came over, or None: it is mine. It is never sent back there.

    Returns:
        The address of a link, or None: the frame is unreachable from here.
    """
    best = _longest_prefix(to, links)
    if best is None and not me.covers(to):
        best = uplink
    return None if best == came_from else best


def _longest_prefix(to: Address, links: Container[Address]) -> Address | None:
    """``to`` or the nearest ancestor of it that has a link; one look for each segment."""
    name: str = to
    while name:
        if name in links:
            return Address(name)
        name = name.rpartition(".")[0]
    return None


def forwarded(frame: R) -> R | None:
    """The frame with one hop less, as the next endpoint gets it, or None: its hops are used up."""
    return dataclasses.replace(frame, hops=frame.hops - 1) if frame.hops else None


def may_speak(sender: Address, *, me: Address, uplink: bool, peers: Iterable[Address] = ()) -> bool:
    """Whether a link may carry frames of a sender.

    Args:
        sender: The address that the frame names as its sender.
        me: My own address.
        uplink: The link is my uplink: it may speak for everything but me and what lies below me.
        peers: Of a downlink: the addresses of its certificate, or of its hello without certificates. It may
            speak for these and what lies below them; one above me not for me and what lies below me.
    """
    if uplink:
        return not me.covers(sender)
    mine = me.covers(sender)
    return any(peer.covers(sender) and not (mine and peer.covers(me)) for peer in peers)


def may_follow(
    source: Address,
    *,
    sender: Address,
    me: Address,
    uplink: bool,
    peers: Iterable[Address] = (),
) -> bool:
    """Whether a ref that a message names is followed.

    The link must be one that may speak for the ref's source, or the sender of the message an ancestor of
    mine: it vouches for what it hands down. Arguments as in :func:`may_speak`, for the link that the
    message came over; ``sender`` has passed that check.
    """
    vouches = sender != me and sender.covers(me)
    return vouches or may_speak(source, me=me, uplink=uplink, peers=peers)
