"""What one run of the shell tier is made of: a value drawn from a seed, and its smaller neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, Literal, TypeVar

from streamoff.testing.faults import (
    NO_FAULTS,
    Cut,
    Fault,
    FaultPlan,
    Kill,
    LinkFaults,
    Partition,
    Slow,
)

__all__ = ["Ending", "Move", "ShellScenario", "Site", "draw", "smaller"]

T = TypeVar("T")

SERVER: Final = "server"
REGION: Final = "region"

MOODS: Final = ("fails", "slow", "leaves", "silent", "nan", "shape", "twice")
"""What a site may do instead of its work: raise, take very long, leave in the middle, never answer, send a
value that is no number, send another shape, or send a second result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site.

    Args:
        behind: Whether it is reached through the relay.
        weight: Of its contributions.
        trains: Seconds.
        mood: One of :data:`MOODS`, or empty: it does its work.
        disk: Whether models land on its disk.
        arrays: Whether a part of its result travels as an array, with a ref of its own.
        snapshot: Whether its results are copied before they are sent.
        restarts: Seconds after which it comes back when it was killed; None: never.
        mute: Whether it names no capabilities: nobody cancels at it, and it cancels nowhere.
    """

    behind: bool = False
    weight: int = 1
    trains: float = 1.0
    mood: str = ""
    disk: bool = False
    arrays: bool = False
    snapshot: bool = False
    restarts: float | None = None
    mute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One message with tensors from one endpoint to another, in a run that only moves them.

    Args:
        sender: Index of a site, or -1: the server.
        receiver: The same.
        others: More receivers of the same message.
        tensors: How many.
        elements: Of each of them.
        starts: Seconds until it is sent.
        how: What becomes of it: a receiver takes all of it, or some, declines it, never looks at it, or gives
            up in the middle; ``pass``: it goes to the server, which passes it on to the receiver unseen;
            ``again``: a receiver lands it on disk and sends it back from there.
        disk: Whether it lands on disk.
        after: Seconds until the receiver gives up, or looks.
        withdrawn: Seconds after which the sender withdraws it; None: never.
        snapshot: Whether the sender has it copied first, and changes what it sent at once.
        below: Whether it comes from an endpoint of its own below the sender.
        dies: Seconds after which that endpoint dies, and the sender tells the receivers; None: it does not.
    """

    sender: int
    receiver: int
    others: tuple[int, ...] = ()
    tensors: int = 2
    elements: int = 200
    starts: float = 0.0
    how: Literal["take", "some", "decline", "ignore", "give up", "pass", "again"] = "take"
    disk: bool = False
    after: float = 0.5
    withdrawn: float | None = None
    snapshot: bool = False
    below: bool = False
    dies: float | None = None

    @property
    def receivers(self) -> tuple[int, ...]:
        """All of them."""
        return (self.receiver, *self.others)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the job ends before its time: its body is cancelled, left or raises, it is finalised, or the endpoint closes."""

    what: Literal["cancel", "leave", "raise", "finalise", "close"]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellScenario:
    """One run of full endpoints.

    Args:
        seed: Of the network's dice.
        kind: Rounds of federated averaging, tensors that are only moved, or sites in processes of their own.
        sites: At least one.
        plan: Of the network.
        endings: In any order.
        elements: Of the model's largest tensor.
        rounds: How many.
        min_responses: Of a round.
        cut_off: Of a round.
        round_timeout: Of a round.
        engine: Of the aggregation.
        offload: Whether contributions land on disk.
        moves: What is moved.
        chunk: Bytes of a chunk.
        quota: Of the server's job, as a multiple of the model; None: none.
        disk: What the disk of all job roots holds, as a multiple of the model; None: as much as there is.
        deadline: Of every transfer; None: none.
        drain: The drain window.
        signals: In a run with processes: seconds, site, and what it gets.
        transport: In a run with processes.
    """

    seed: int
    kind: Literal["rounds", "moves", "processes"]
    sites: tuple[Site, ...]
    plan: FaultPlan = field(default_factory=FaultPlan)
    endings: tuple[Ending, ...] = ()
    elements: int = 200
    rounds: int = 1
    min_responses: int = 1
    cut_off: float | None = None
    round_timeout: float = 3600.0
    engine: Literal["auto", "columnar", "in_time"] = "auto"
    offload: bool = True
    moves: tuple[Move, ...] = ()
    chunk: int = 64 * 1024
    quota: float | None = None
    disk: float | None = None
    deadline: float | None = None
    drain: float = 5.0
    signals: tuple[Signal, ...] = ()
    transport: Literal["unix", "tcp", "tls"] = "unix"

    def name(self, index: int) -> str:
        """The address of a site, or of the server."""
        if index < 0:
            return SERVER
        name = f"site-{index}"
        return f"{REGION}.{name}" if self.sites[index].behind else name

    @property
    def names(self) -> tuple[str, ...]:
        """The addresses of the sites."""
        return tuple(self.name(index) for index in range(len(self.sites)))

    def uplink(self, index: int) -> str:
        """Whom a site dials."""
        return REGION if self.sites[index].behind else SERVER

    @property
    def relayed(self) -> bool:
        """Whether there is a relay."""
        return any(site.behind for site in self.sites)

    def touched(self, index: int) -> bool:
        """Whether anything happens to a site, to its way to the server, or to everybody."""
        mine = {self.name(index)} | ({REGION} if self.sites[index].behind else set())
        signalled = any(one.site == index for one in self.signals)
        events = any(mine & _places(event) for event in self.plan.events)
        return self.troubled or signalled or events

    @property
    def troubled(self) -> bool:
        """Whether anything happens to everybody."""
        bounds = (self.quota, self.disk, self.deadline)
        killed = any(
            isinstance(event, Kill) and event.address == SERVER for event in self.plan.events
        )
        bounded = any(bound is not None for bound in bounds)
        return bool(self.endings) or bounded or killed or self.plan.faults != NO_FAULTS


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal for the process of a site; a stopped one goes on after ``seconds``."""

    at: float
    site: int
    kind: Literal["kill", "stop"]
    seconds: float = 0.5


def _places(event: Fault) -> set[str]:
    return {event.address} if isinstance(event, Kill) else {event.one, event.other} - {SERVER}


# --- drawing ------------------------------------------------------------------------------------

_SLOW: Final = 64 * 1024.0
_RATES: Final = (
    LinkFaults(),
    LinkFaults(),
    LinkFaults(bandwidth=_SLOW),
    LinkFaults(bandwidth=_SLOW),
    LinkFaults(bandwidth=8 * _SLOW, delay=(0.0, 0.3)),
    LinkFaults(bandwidth=_SLOW, delay=(0.05, 0.05)),
    LinkFaults(cut=0.01, down=(0.1, 20.0), bandwidth=_SLOW),
    LinkFaults(corruption=0.01),
    LinkFaults(loss=0.02, duplication=0.02, reordering=0.02, delay=(0.0, 0.1)),
    LinkFaults(loss=0.1, cut=0.01, corruption=0.005, delay=(0.0, 1.0), bandwidth=8 * _SLOW),
)


def draw(seed: int) -> ShellScenario:
    """The scenario of a seed: of ten, five have rounds, four only move tensors, and one has real processes."""
    random = Random(seed)
    kind: Any = ("rounds", "moves")[seed % 2] if seed % 10 != 9 else "processes"
    relay = random.random() < 0.35
    count = random.choice((1, 2, 2, 3, 4))
    sites = tuple(_site(random, relay=relay, moody=kind != "moves") for _ in range(count))
    scenario = ShellScenario(
        seed=seed,
        kind=kind,
        sites=sites,
        elements=random.choice((200, 40_000, 150_000)),
        rounds=random.choice((1, 2, 3)),
        min_responses=random.choice((1, 1, count)),
        cut_off=random.choice((None, None, 5.0)),
        round_timeout=random.choice((3600.0, 3600.0, 20.0)),
        engine=random.choice(("auto", "columnar", "in_time")),
        offload=random.random() < 0.75,
        quota=random.choice((None,) * 8 + (0.5, 2.5)),
        disk=random.choice((None,) * 8 + (0.5, 2.5)),
        deadline=random.choice((None,) * 6 + (3.0, 30.0)),
        drain=random.choice((5.0, 5.0, 0.0)),
    )
    spread = random.choice((0.5, 5.0, 60.0))
    if kind == "processes":
        return _with_processes(scenario, random)
    events = tuple(_fault(scenario, random, spread) for _ in range(random.choice((0, 0, 1, 2, 4))))
    endings: tuple[Ending, ...] = ()
    if random.random() < 0.3:
        what: Any = random.choice(("cancel", "leave", "raise", "finalise", "close"))
        endings = (Ending(what, random.uniform(0.0, spread)),)
    moves = tuple(_move(random, count, spread) for _ in range(random.randint(1, 8)))
    return replace(
        scenario,
        plan=FaultPlan(faults=random.choice(_RATES), events=events),
        endings=endings,
        moves=moves if kind == "moves" else (),
    )


def _site(random: Random, *, relay: bool, moody: bool) -> Site:
    return Site(
        behind=relay and random.random() < 0.7,
        weight=random.choice((1, 2)),
        trains=random.choice((0.0, 1.0, 10.0)),
        mood=random.choice(MOODS) if moody and random.random() < 0.2 else "",
        disk=random.random() < 0.3,
        arrays=random.random() < 0.25,
        snapshot=random.random() < 0.25,
        restarts=random.choice((None, 0.5, 30.0)),
        mute=random.random() < 0.15,
    )


def _fault(scenario: ShellScenario, random: Random, spread: float) -> Fault:
    index = random.randrange(len(scenario.sites))
    one, other = scenario.name(index), scenario.uplink(index)
    if other == REGION and random.random() < 0.5:
        one, other = REGION, SERVER
    at = random.uniform(0.0, spread)
    seconds = random.choice((0.2, 3.0, 12.0, 25.0, 60.0, math.inf))
    match random.choice(("cut", "cut", "partition", "partition", "slow", "kill")):
        case "cut":
            return Cut(at, one, other, seconds)
        case "partition":
            return Partition(at, one, other, seconds)
        case "slow":
            return Slow(
                at,
                one,
                other,
                seconds,
                random.choice((2e3, 2e4, math.inf)),
                random.choice((0.0, 4.0)),
            )
        case _:
            return Kill(at, SERVER if random.random() < 0.15 else one)


def _move(random: Random, count: int, spread: float) -> Move:
    sender = random.randint(-1, count - 1)
    receiver, *rest = random.sample([n for n in range(-1, count) if n != sender], k=count)
    how: Any = random.choice(
        ("take", "take", "take", "some", "decline", "ignore", "give up", "pass", "again")
    )
    if how == "pass" and (receiver < 0 or sender < 0):
        how = "take"
    below = sender >= 0 and random.random() < 0.3
    return Move(
        sender=sender,
        receiver=receiver,
        others=tuple(rest[: random.choice((0, 0, 1, 3))]) if how != "pass" else (),
        tensors=random.choice((1, 2, 5)),
        elements=random.choice((0, 200, 40_000, 150_000)),
        starts=random.uniform(0.0, spread),
        how=how,
        disk=random.random() < 0.5,
        after=random.choice((0.0, 0.01, 0.5, 5.0)),
        withdrawn=random.choice((None, None, None, None, 0.0, 0.3, 20.0)),
        snapshot=not below and random.random() < 0.2,
        below=below,
        dies=random.choice((None, 0.0, 0.2, 3.0)) if below else None,
    )


def _with_processes(scenario: ShellScenario, random: Random) -> ShellScenario:
    """Real time: little of it."""
    signals = tuple(
        Signal(
            random.uniform(0.0, 0.5),
            random.randrange(len(scenario.sites)),
            random.choice(("kill", "stop", "stop")),
            random.choice((0.1, 0.6, 1.5)),
        )
        for _ in range(random.choice((0, 1, 1, 2)))
    )
    endings: tuple[Ending, ...] = ()
    if random.random() < 0.3:
        endings = (Ending("leave", random.uniform(0.0, 0.5)),)
    sites = tuple(
        replace(
            site,
            behind=False,
            mute=False,
            mood=site.mood if site.mood == "fails" else "",
            trains=0.1,
        )
        for site in scenario.sites[:3]
    )
    return replace(
        scenario,
        sites=sites,
        elements=random.choice((200, 150_000, 1_000_000, 4_000_000)),
        rounds=random.choice((2, 4)),
        transport=random.choice(("unix", "tcp", "tls")),
        signals=tuple(one for one in signals if one.site < len(sites)),
        endings=endings,
        min_responses=1,
        round_timeout=6.0,
        cut_off=1.0,
        quota=None,
        disk=None,
        deadline=None,
        drain=0.5,
        offload=True,
    )


# --- shrinking ----------------------------------------------------------------------------------


def smaller(scenario: ShellScenario) -> Iterator[ShellScenario]:
    """Neighbours with one thing less, the most telling first."""
    plan = scenario.plan
    for index in range(len(plan.events)):
        yield replace(scenario, plan=replace(plan, events=_without(plan.events, index)))
    for name in ("endings", "signals", "moves"):
        items = getattr(scenario, name)
        for index in range(len(items)):
            yield _with(scenario, name, _without(items, index))
    if len(scenario.sites) > 1:
        yield from _without_last_site(scenario)
    for name in ("loss", "duplication", "reordering", "corruption", "cut", "delay", "bandwidth"):
        calm = _with(plan.faults, name, getattr(NO_FAULTS, name))
        if calm != plan.faults:
            yield replace(scenario, plan=replace(plan, faults=calm))
    for index, site in enumerate(scenario.sites):
        for less in (
            replace(site, mood=""),
            replace(site, behind=False),
            replace(site, disk=False),
            replace(site, arrays=False),
            replace(site, snapshot=False),
            replace(site, mute=False),
        ):
            if less != site and not (site.behind != less.behind and plan.events):
                sites = (*scenario.sites[:index], less, *scenario.sites[index + 1 :])
                yield replace(scenario, sites=sites)
    for index, move in enumerate(scenario.moves):
        for shorter in (
            replace(move, withdrawn=None),
            replace(move, others=()),
            replace(move, dies=None),
            replace(move, below=False, dies=None),
            replace(move, snapshot=False),
            replace(move, disk=False),
            replace(move, tensors=1),
            replace(move, elements=200),
        ):
            if shorter != move:
                moves = (*scenario.moves[:index], shorter, *scenario.moves[index + 1 :])
                yield replace(scenario, moves=moves)
    plainest = ShellScenario(seed=0, kind="rounds", sites=())
    for name in ("rounds", "elements", "cut_off", "engine", "offload", "quota", "disk", "deadline"):
        if getattr(scenario, name) != getattr(plainest, name):
            yield _with(scenario, name, getattr(plainest, name))


def _without_last_site(scenario: ShellScenario) -> Iterator[ShellScenario]:
    """The last one, so that the others keep their names."""
    last = len(scenario.sites) - 1
    name = scenario.name(last)
    events = tuple(event for event in scenario.plan.events if name not in _places(event))
    yield replace(
        scenario,
        sites=scenario.sites[:-1],
        min_responses=min(scenario.min_responses, last),
        plan=replace(scenario.plan, events=events),
        moves=tuple(move for move in scenario.moves if last not in {move.sender, *move.receivers}),
        signals=tuple(one for one in scenario.signals if one.site != last),
    )


def _with(item: T, name: str, value: object) -> T:
    """The same but for one field."""
    changed: T = replace(item, **{name: value})  # type: ignore[type-var]
    return changed


def _without(items: tuple[T, ...], index: int) -> tuple[T, ...]:
    return (*items[:index], *items[index + 1 :])
