"""A clock and a network for machines alone: messages are calls, and every bad habit comes from a seed.

No event loop, no sockets, no files. Whoever has a record to step joins as a party; the network asks the parties
when their clocks are due and tells them when a link comes or goes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from streamoff.errors import InvariantError

__all__ = ["CALM", "ROUGH", "Faults", "LossyNetwork", "Party"]

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What the links and the landings do wrong; chances are 0 to 1, spans are seconds, drawn evenly.

    Args:
        drop: Chance that a message is lost.
        duplicate: Chance that a message arrives twice.
        latency: Time on the way; a wide span reorders.
        reading: Time for which the link reads a chunk of the source.
        wedge: Chance that the link hangs on to a chunk for ``wedged`` seconds.
        wedged: How long such a chunk is held.
        cut: Chance, per message, that the link breaks.
        down: How long a broken link stays away.
        landing: Time to check a header, to land a chunk, to finalise.
        landing_fails: Chance that any of these fails.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    latency: Span = (0.01, 0.01)
    reading: Span = (0.02, 0.02)
    wedge: float = 0.0
    wedged: float = 100.0
    cut: float = 0.0
    down: Span = (0.1, 40.0)
    landing: Span = (0.01, 0.01)
    landing_fails: float = 0.0


CALM: Final = Faults()
"""An ordered link that loses nothing."""

ROUGH: Final = Faults(
    drop=0.05,
    duplicate=0.1,
    latency=(0.001, 3.0),
    reading=(0.001, 1.0),
    wedge=0.02,
    cut=0.01,
    landing=(0.001, 0.5),
    landing_fails=0.002,
)
"""A link on which everything goes wrong now and then."""


class Party(Protocol):
    """Somebody with clocks and links."""

    def next_due(self) -> float | None:
        """When :meth:`tick` has something to do; None: no clock runs."""
        ...

    def tick(self) -> None:
        """Do what is due now; afterwards nothing is due any more."""
        ...

    def link_lost(self, one: str, other: str) -> None:
        """The link between two names is gone."""
        ...

    def link_restored(self, one: str, other: str) -> None:
        """It is back."""
        ...


@dataclass(slots=True)
class _Link:
    """Up or down; what was on its way when it broke is lost."""

    up: bool = True
    life: int = 0


class LossyNetwork:
    """The clock, the links between any two names, and what goes wrong on them.

    Args:
        faults: What goes wrong.
        seed: Makes it go wrong the same way again.
    """

    def __init__(self, *, faults: Faults = CALM, seed: int = 0) -> None:
        self.now = 0.0
        self.faults = faults
        self.random = Random(seed)
        self.injected: Counter[str] = Counter()
        """How often each kind of fault was injected so far."""
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._links: dict[tuple[str, str], _Link] = {}
        self._parties: list[Party] = []

    def join(self, party: Party) -> None:
        """Ask a party for its clocks, and tell it about links, from now on."""
        self._parties.append(party)

    # --- time -----------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at an instant; what is delivered at that instant comes in its order."""
        heapq.heappush(self._agenda, (max(when, self.now), next(self._order), action))

    def after(self, span: Span, action: Callable[[], None]) -> None:
        """Do something after a time drawn from a span."""
        self.at(self.now + self.draw(span), action)

    def draw(self, span: Span) -> float:
        """Seconds from a span."""
        return self.random.uniform(*span)

    def strikes(self, kind: str, chance: float) -> bool:
        """Throw the dice for a fault, and count it if it is to be."""
        if self.random.random() >= chance:
            return False
        self.injected[kind] += 1
        return True

    def next_due(self) -> float:
        """When something happens next; infinity if nothing ever will."""
        coming = self._agenda[0][0] if self._agenda else math.inf
        return min(coming, self._next_clock())

    def _next_clock(self) -> float:
        clocks = (party.next_due() for party in self._parties)
        return min((clock for clock in clocks if clock is not None), default=math.inf)

    def step(self) -> bool:
        """Do what comes next: a message or action, or else the clocks that are due.

        Returns:
            False if nothing will ever happen again.

        Raises:
            InvariantError: A clock stands still: what was due is still due.
        """
        clock = self._next_clock()
        coming = self._agenda[0][0] if self._agenda else math.inf
        if min(clock, coming) == math.inf:
            return False
        if coming <= clock:  # truth beats clocks
            self.now, _, action = heapq.heappop(self._agenda)
            action()
            return True
        self.now = clock
        for party in self._parties:
            due = party.next_due()
            if due is not None and due <= self.now:
                party.tick()
                due = party.next_due()
                if due is not None and due <= self.now:
                    raise InvariantError("a clock that stands still", got=party)
        return True

    # --- links ----------------------------------------------------------------------------------

    def link(self, one: str, other: str) -> _Link:
        """The link between two names, whatever their order."""
        key = (one, other) if one <= other else (other, one)
        if key not in self._links:
            self._links[key] = _Link()
        return self._links[key]

    def send(self, sender: str, receiver: str, deliver: Callable[[], None]) -> None:
        """Carry a message, badly: ``deliver`` is called when it arrives, never, or twice."""
        link, faults = self.link(sender, receiver), self.faults
        if not link.up:
            return
        if self.strikes("cut", faults.cut):
            seconds = self.draw(faults.down)
            self.at(self.now, lambda: self.cut(sender, receiver, seconds))
        copies = 1 + self.strikes("duplicate", faults.duplicate)
        life = link.life

        def arrive() -> None:
            if link.up and link.life == life:
                deliver()

        for _ in range(copies):
            if not self.strikes("drop", faults.drop):
                self.after(faults.latency, arrive)

    def cut(
        self, one: str, other: str, seconds: float = math.inf, *, unnoticed: float = 0.0
    ) -> None:
        """Break a link; it comes back after ``seconds``, or never; no-op on one that is down.

        Args:
            one: One end.
            other: The other end.
            seconds: Until it is back.
            unnoticed: Seconds of silence before the ends take it for lost, if it is not back by then.
        """
        link = self.link(one, other)
        if not link.up:
            return
        link.up, link.life = False, link.life + 1
        noticed = unnoticed < seconds

        def notice() -> None:
            for party in self._parties:
                party.link_lost(one, other)

        def restore() -> None:
            link.up = True
            for party in self._parties if noticed else ():
                party.link_restored(one, other)

        if not unnoticed:
            notice()
        elif noticed:
            self.at(self.now + unnoticed, notice)
        if seconds < math.inf:
            self.at(self.now + seconds, restore)
