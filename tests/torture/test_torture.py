"""A part of the torture for every change: the same seeds each time, so that what fails here fails everywhere."""

from __future__ import annotations

from typing import Literal

import pytest

from .machines import Machines
from .shell import Shell
from .tier import Failure, Tally, Tier, run_seeds

MACHINE_SEEDS = 10_000
MACHINE_BLOCK = 500
SHELL_SEEDS = 200
SHELL_BLOCK = 10


def survive(tier: Tier, seeds: range) -> Tally:
    """Run seeds; the first violation, made smaller, is the message."""
    tally = Tally()
    for _, found in run_seeds(tier, seeds):
        assert not isinstance(found, Failure), f"\n{found}"
        tally.add(found)
    return tally


@pytest.mark.parametrize("first", range(0, MACHINE_SEEDS, MACHINE_BLOCK))
def test_machines_survive(first: int) -> None:
    """Whatever the network, the disks and the processes do: every end comes, in time, once, and is true."""
    tally = survive(Machines(), range(first, first + MACHINE_BLOCK))
    assert set(tally.injected) > {"drop", "duplicate", "cut", "silence", "crash", "trainer", "end"}
    assert set(tally.ends) > {"done", "failed", "cancelled", "source lost", "site accepted"}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("first", range(0, SHELL_SEEDS, SHELL_BLOCK))
def test_endpoints_survive(backend: Literal["asyncio", "trio"], first: int) -> None:
    """Rounds, moves and sites in processes of their own end in order; means are exact and nothing is left."""
    tally = survive(Shell(backend), range(first, first + SHELL_BLOCK))
    assert {"done", "all_receivers_succeeded"} <= set(tally.ends)


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_a_seed_is_a_story(seed: int) -> None:
    """The same seed goes wrong in the same way and ends in the same way, so that a failure can be found again."""
    tier = Machines()
    one, two = tier.run(tier.draw(seed)), tier.run(tier.draw(seed))
    assert (one.injected, one.ends) == (two.injected, two.ends)
