"""A tier whose seeds do what their number says, for the tests of what runs them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator

from .tier import Tally, Tier, ViolationError

__all__ = ["DIES", "FAILS", "HANGS", "fragile"]

FAILS, DIES, HANGS = 3, 5, 8


class Fragile:
    """Seed 3 fails, seed 5 takes its process with it, seed 8 never ends."""

    name = "fragile"
    attempts = 1
    most_shrinks = 50
    patience = 2.0

    def draw(self, seed: int) -> tuple[int, ...]:
        """A scenario of three parts, of which the first counts."""
        return (seed, 1, 2)

    def run(self, scenario: tuple[int, ...]) -> Tally:
        """Do it."""
        if FAILS in scenario:
            raise ViolationError("three", scenario)
        if DIES in scenario:
            os._exit(7)
        if HANGS in scenario:
            time.sleep(60)
        return Tally(1, Counter(parts=len(scenario)), Counter(end=1))

    def smaller(self, scenario: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Without one of its parts."""
        for index in range(len(scenario)):
            yield (*scenario[:index], *scenario[index + 1 :])


def fragile() -> Tier:
    """Make it."""
    return Fragile()
