"""What both tiers have in common: a scenario is drawn from a seed, run, and made smaller while it still fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamoff.errors import StreamoffError

__all__ = ["Failure", "Tally", "Tier", "ViolationError", "leaves", "run_seeds", "shrink"]


class ViolationError(AssertionError):
    """Something that must hold after a run does not.

    Args:
        what: The promise that is broken, without numbers: two runs that break it the same way say the same.
        facts: What was found.
    """

    def __init__(self, what: str, *facts: object) -> None:
        super().__init__(what, *facts)
        self.what = what
        self.facts = facts

    def __str__(self) -> str:
        return "\n  ".join((self.what, *(str(fact) for fact in self.facts)))


@dataclass(slots=True)
class Tally:
    """What happened in runs: seeds, faults injected by kind, and ends by kind."""

    seeds: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Count another one in."""
        self.seeds += other.seeds
        self.injected.update(other.injected)
        self.ends.update(other.ends)


class Tier(Protocol):
    """One way to torture.

    Args:
        name: On the command line.
        attempts: How often a scenario is run before it is believed not to fail: threads end when they end.
        most_shrinks: Runs that making a scenario smaller may take.
        patience: Real seconds after which a run hangs.
    """

    name: str
    attempts: int
    most_shrinks: int
    patience: float

    def draw(self, seed: int) -> Any:
        """The scenario of a seed."""
        ...

    def run(self, scenario: Any) -> Tally:
        """Run it to its end and look at everything.

        Raises:
            Exception: Whatever it is, it is a violation.
        """
        ...

    def smaller(self, scenario: Any) -> Iterator[Any]:
        """Neighbours with one thing less."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that fails, and the least that was found to fail in the same way.

    Args:
        tier: Where.
        seed: Which.
        what: The promise that is broken.
        scenario: The smallest scenario, as Python.
        error: What it raises, with its story.
        runs: How many runs it took to make it smaller.
    """

    tier: str
    seed: int
    what: str
    scenario: str
    error: str
    runs: int = 0

    def __str__(self) -> str:
        error = self.error.replace("\n", "\n    ")
        return (
            f"VIOLATION in seed {self.seed}: {self.what}\n"
            f"  the least that fails so, found in {self.runs} runs:\n    {self.scenario}\n"
            f"  it says:\n    {error}\n"
            f"  again: python -m tests.torture --tier {self.tier} --seeds {self.seed}-{self.seed}"
        )


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def what_of(error: BaseException) -> str:
    """How to tell whether two runs fail in the same way."""
    inner = next(leaves(error))
    if isinstance(inner, (StreamoffError, ViolationError)):
        return f"{type(inner).__name__}: {inner.what}"
    return type(inner).__name__


def shrink(tier: Tier, seed: int, scenario: Any, error: Exception) -> Failure:
    """Take away from a scenario while it still fails in the same way."""
    what, runs = what_of(error), 0
    candidates = tier.smaller(scenario)
    while runs < tier.most_shrinks and (candidate := next(candidates, None)) is not None:
        runs += 1
        again = _fails(tier, candidate, what)
        if again is not None:
            scenario, error = candidate, again
            candidates = tier.smaller(scenario)
    return Failure(tier.name, seed, what, repr(scenario), _told(error), runs)


def _fails(tier: Tier, scenario: Any, what: str) -> Exception | None:
    """The error of a scenario, if one of its runs fails in a given way."""
    for _ in range(tier.attempts):
        try:
            tier.run(scenario)
        except Exception as error:  # noqa: BLE001 - whatever it is
            if what_of(error) == what:
                return error
    return None


def _told(error: BaseException) -> str:
    inner = next(leaves(error))
    place = ""
    trace = inner.__traceback__
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(inner).__name__}: {inner}\n  at {place}"


def run_seeds(tier: Tier, seeds: Iterable[int]) -> Iterator[tuple[int, Tally | Failure]]:
    """Run seeds one after the other; a failing one is made smaller and does not stop the others."""
    for seed in seeds:
        scenario = tier.draw(seed)
        try:
            tally = tier.run(scenario)
        except Exception as error:  # noqa: BLE001 - whatever it is
            yield seed, shrink(tier, seed, scenario, error)
        else:
            yield seed, tally
