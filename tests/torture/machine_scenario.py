"""What one run of the machine tier is made of: a value drawn from a seed, and its smaller neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeVar

from streamoff.testing.lossy import CALM, Faults
from streamoff.types import MIB

__all__ = ["HAPPENINGS", "OF_RESULTS", "Happening", "MachineScenario", "Site", "draw", "smaller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site and what it sends.

    Args:
        refs: Of its result.
        nbytes: Of each of them.
        trainer: Whether the source is a process below the site, which may die alone.
        observers: Other sites that pull the result too.
        trains: Seconds from the model to the result.
    """

    refs: int = 1
    nbytes: int = 65
    trainer: bool = False
    observers: int = 0
    trains: float = 1.0


HAPPENINGS: Final = {
    "cut": 4,
    "silence": 3,
    "crash": 2,
    "trainer": 3,
    "server": 1,
    "cancel": 2,
    "full": 2,
    "hold": 2,
    "abort": 1,
    "again": 3,
    "twice": 2,
    "stubborn": 1,
    "finalise": 1,
    "end": 2,
}
"""What may happen besides the bad habits of the network, and how often, relative to each other."""


OF_RESULTS: Final = frozenset({"trainer", "cancel", "full", "hold", "abort", "twice"})
"""What happens to a result, and so at a time from when it was offered."""


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happens to a site, or to everybody, at a time; ``seconds`` is how long it lasts."""

    what: str
    at: float
    site: int = 0
    seconds: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineScenario:
    """One run: a server with a job root and a round, sites that pull its model and offer results.

    Args:
        seed: Of the network's dice.
        sites: At least one.
        happenings: In any order.
        faults: Of every link and landing.
        model_refs: Refs of the model.
        model_bytes: Of each of them.
        window: Pulls in flight.
        eager: Whether the first bytes come along with the answer to an open.
        capable: Whether both ends can cancel.
        deadline: Of every transfer, or none.
        tombstones: Settled transactions that an endpoint remembers.
        round_timeout: Seconds until the round closes.
        drain: The drain window.
    """

    seed: int
    sites: tuple[Site, ...]
    happenings: tuple[Happening, ...] = ()
    faults: Faults = CALM
    model_refs: int = 1
    model_bytes: int = 65
    window: int = 4
    eager: bool = False
    capable: bool = True
    deadline: float | None = None
    tombstones: int = 4096
    round_timeout: float = 600.0
    drain: float = 5.0


T = TypeVar("T")

_SIZES = (64, 65, 4 * MIB, 9 * MIB, 13 * MIB)
_LATENCIES = ((0.01, 0.01), (0.001, 0.2), (0.001, 3.0))


def draw(seed: int) -> MachineScenario:
    """The scenario of a seed."""
    random = Random(seed)
    count = random.choice((1, 1, 2, 2, 3))
    sites = tuple(
        Site(
            refs=random.choice((1, 1, 2, 3)),
            nbytes=random.choice(_SIZES),
            trainer=random.random() < 0.5,
            observers=random.choice((0, 0, 1)) if count > 1 else 0,
            trains=random.choice((0.1, 1.0, 30.0)),
        )
        for _ in range(count)
    )
    rough = random.random() < 0.7
    faults = Faults(
        drop=random.choice((0.0, 0.02, 0.1)) if rough else 0.0,
        duplicate=random.choice((0.0, 0.1, 0.3)) if rough else 0.0,
        latency=random.choice(_LATENCIES) if rough else (0.01, 0.01),
        reading=random.choice(((0.02, 0.02), (0.001, 1.0))),
        wedge=random.choice((0.0, 0.0, 0.05)) if rough else 0.0,
        cut=random.choice((0.0, 0.0, 0.02)) if rough else 0.0,
        landing=random.choice(((0.01, 0.01), (0.001, 0.5), (1.0, 30.0))),
        landing_fails=random.choice((0.0, 0.0, 0.01)) if rough else 0.0,
    )
    spread = random.choice((1.0, 20.0, 200.0))
    kinds, weights = zip(*HAPPENINGS.items(), strict=True)
    happenings = tuple(
        Happening(
            what,
            random.uniform(0.0, random.choice((0.2, 2.0)) if what in OF_RESULTS else spread),
            random.randrange(count),
            random.choice((0.5, 5.0, 20.0, 60.0, 500.0)),
        )
        for what in random.choices(kinds, weights, k=random.choice((0, 1, 1, 2, 3, 5)))
    )
    return MachineScenario(
        seed=seed,
        sites=sites,
        happenings=happenings,
        faults=faults,
        model_refs=random.choice((1, 1, 2)),
        model_bytes=random.choice(_SIZES),
        window=random.choice((1, 4, 8)),
        eager=random.random() < 0.5,
        capable=random.random() < 0.8,
        deadline=random.choice((None, None, None, 60.0)),
        tombstones=random.choice((1, 3, 4096)),
        round_timeout=random.choice((10.0, 120.0, 600.0)),
        drain=random.choice((0.0, 5.0, 5.0)),
    )


def smaller(scenario: MachineScenario) -> Iterator[MachineScenario]:
    """Neighbours with one thing less, the most telling first."""
    for index in range(len(scenario.happenings)):
        yield replace(scenario, happenings=_without(scenario.happenings, index))
    if len(scenario.sites) > 1:
        for index in range(len(scenario.sites)):
            kept = tuple(
                replace(one, site=one.site - (one.site > index))
                for one in scenario.happenings
                if one.site != index
            )
            sites = tuple(
                replace(site, observers=min(site.observers, len(scenario.sites) - 2))
                for site in _without(scenario.sites, index)
            )
            yield replace(scenario, sites=sites, happenings=kept)
    for name in (
        "drop",
        "duplicate",
        "wedge",
        "cut",
        "landing_fails",
        "latency",
        "reading",
        "landing",
    ):
        calm = _with(scenario.faults, name, getattr(CALM, name))
        if calm != scenario.faults:
            yield replace(scenario, faults=calm)
    for index, site in enumerate(scenario.sites):
        for less in (
            replace(site, refs=1),
            replace(site, nbytes=65),
            replace(site, observers=0),
            replace(site, trainer=False),
        ):
            if less != site:
                sites = (*scenario.sites[:index], less, *scenario.sites[index + 1 :])
                yield replace(scenario, sites=sites)
    plainest = MachineScenario(seed=0, sites=())
    for name in (
        "model_refs",
        "model_bytes",
        "window",
        "eager",
        "capable",
        "deadline",
        "tombstones",
    ):
        if getattr(scenario, name) != getattr(plainest, name):
            yield _with(scenario, name, getattr(plainest, name))


def _with(item: T, name: str, value: object) -> T:
    """The same but for one field."""
    changed: T = replace(item, **{name: value})  # type: ignore[type-var]
    return changed


def _without(items: tuple[T, ...], index: int) -> tuple[T, ...]:
    return (*items[:index], *items[index + 1 :])
