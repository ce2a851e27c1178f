"""What a network does wrong, as data: chances per frame, and faults at given times.

A plan is a value: it can be compared, printed, drawn by hypothesis and shortened while a test still fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, TypeAlias

from streamoff.errors import UsageError
from streamoff.types import Address

__all__ = [
    "NO_FAULTS",
    "Cut",
    "Fault",
    "FaultPlan",
    "Kill",
    "LinkFaults",
    "Partition",
    "Slow",
    "Span",
]

Span: TypeAlias = tuple[float, float]
"""Seconds, drawn evenly from the first to the second."""

CHANCES: Final = ("loss", "duplication", "reordering", "corruption", "cut")
MOST_SECONDS: Final = 1e9


def _check(name: str, value: object, expected: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UsageError(name, expected=expected, got=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """What one direction of a link does wrong. Chances are per frame, 0 to 1.

    The handshake is spared: what a network does to it, a plan says. A link of this library is ordered and loses
    nothing while it lives, so ``loss``, ``duplication`` and ``reordering`` are faults that TCP never shows; an
    endpoint must end in good order all the same.

    Args:
        loss: The frame is lost.
        duplication: It arrives twice.
        reordering: It arrives after the one behind it.
        corruption: One bit of it flips: in the body of a chunk, or in the prefix of any other frame.
        cut: The link breaks, and everything under way is lost.
        down: How long a link that broke by chance stays away.
        delay: From sent to received; the order is kept.
        bandwidth: Bytes per second, above 0.

    Raises:
        UsageError: A value of the wrong type or range.
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    corruption: float = 0.0
    cut: float = 0.0
    down: Span = (0.1, 5.0)
    delay: Span = (0.0, 0.0)
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        for name in CHANCES:
            _check(name, getattr(self, name), "a chance from 0 to 1", 0.0, 1.0)
        for name in ("down", "delay"):
            span = getattr(self, name)
            if not isinstance(span, tuple) or len(span) != 2 or span[0] > span[1]:
                raise UsageError(name, expected="two numbers in order", got=span)
            for seconds in span:
                _check(name, seconds, "finite seconds, 0 or more", 0.0, MOST_SECONDS)
        if not self.bandwidth > 0:
            raise UsageError("bandwidth", expected="bytes per second above 0", got=self.bandwidth)


NO_FAULTS: Final = LinkFaults()
"""An ordered link that loses nothing and takes no time."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Reset the links between two endpoints at a time; new ones are refused for ``seconds``."""

    at: float
    one: str
    other: str
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Partition:
    """Let nothing pass between two endpoints for ``seconds``; nothing is lost, both only see silence."""

    at: float
    one: str
    other: str
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Slow:
    """Slow a line down in both directions for ``seconds``: bytes per second, and seconds of delay."""

    at: float
    one: str
    other: str
    seconds: float = 1.0
    bandwidth: float = math.inf
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    """End an endpoint without a word: its links are reset, nobody reaches it, and its ``life`` is cancelled."""

    at: float
    address: str


Fault: TypeAlias = Cut | Partition | Slow | Kill


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Everything that a network does wrong.

    Args:
        faults: Of every link that ``links`` does not name.
        links: Of single directions, by sender and receiver.
        events: Faults at given times, in seconds from when the network was entered; in any order.

    Raises:
        UsageError: Not an address, or a time that is none.
    """

    faults: LinkFaults = NO_FAULTS
    links: Mapping[tuple[str, str], LinkFaults] = field(default_factory=dict)
    events: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        for pair in self.links:
            for address in pair:
                Address(address)
        for event in self.events:
            _check_event(event)

    def between(self, sender: str, receiver: str) -> LinkFaults:
        """What the direction from one endpoint to another does wrong."""
        return self.links.get((sender, receiver), self.faults)


def _check_event(event: Fault) -> None:
    for item in fields(event):
        value = getattr(event, item.name)
        if item.name in {"one", "other", "address"}:
            Address(value)
        elif item.name == "bandwidth":
            LinkFaults(bandwidth=value)
        elif item.name == "seconds" and value == math.inf:
            continue
        else:
            _check(item.name, value, "seconds, 0 or more", 0.0, MOST_SECONDS)
