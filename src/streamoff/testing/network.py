"""A network that fails as it is told, to be used in place of :class:`~streamoff.transports.memory.MemoryNetwork`.

    async with FaultyNetwork(seed=7, plan=FaultPlan(events=(Cut(2.0, "site-1", "server"),))) as network:
        async with Endpoint("server", transports=[network]) as server: ...

Chances are drawn per direction of a line and per frame, from the seed: what happens to the tenth frame from one
endpoint to another does not depend on what the others do.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from streamoff.errors import UnreachableError, UsageError
from streamoff.runtime.link import Inbound, Outbound, Urgent
from streamoff.testing.faults import (
    CHANCES,
    Cut,
    Fault,
    FaultPlan,
    Kill,
    LinkFaults,
    Partition,
    Slow,
)
from streamoff.transports.memory import Conditions, MemoryLink, MemoryNetwork, Pipe
from streamoff.types import Address
from streamoff.wire.codec import PREFIX_BYTES, decode, encode
from streamoff.wire.frames import Chunk, Frame, Hello

__all__ = ["FaultyNetwork"]


class FaultyNetwork(MemoryNetwork):
    """A memory network with a plan of faults; an async context manager, in which its time passes.

    Args:
        seed: Of everything that is left to chance.
        plan: What goes wrong; nothing by default. Faults can also be made by calling :meth:`cut`,
            :meth:`partition`, :meth:`kill` and :meth:`conditions` at any time.
    """

    def __init__(self, *, seed: int = 0, plan: FaultPlan | None = None) -> None:
        super().__init__()
        self.plan = plan if plan is not None else FaultPlan()
        self.injected: Counter[str] = Counter()
        """How often each kind of fault was injected so far."""
        self._seed = seed
        self._lines: dict[tuple[Address, Address], _Line] = {}
        self._lives: dict[Address, list[anyio.CancelScope]] = {}
        self._dead: set[Address] = set()
        self._cut: Counter[frozenset[Address]] = Counter()
        self._parted: Counter[frozenset[Address]] = Counter()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        for event in sorted(self.plan.events, key=lambda event: event.at):
            self._tasks.start_soon(self._play, event)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        tasks.cancel_scope.cancel()
        try:
            return await tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if error is not None and group.exceptions == (error,):
                return False  # the body's own error is not wrapped
            raise

    # --- endpoints that die -----------------------------------------------------------------------

    @contextmanager
    def life(self, address: str) -> Iterator[anyio.CancelScope]:
        """Run an endpoint's program so that :meth:`kill` ends it; entered again, it lives again.

        Yields:
            The scope that a kill cancels. The links are gone by then, so what the program says on its way out
            reaches nobody. Its ``finally`` blocks still run: only a process can be stopped without them.
        """
        name, scope = Address(address), anyio.CancelScope()
        self._dead.discard(name)
        self._lives.setdefault(name, []).append(scope)
        try:
            with scope:
                yield scope
        finally:
            self._lives[name].remove(scope)

    def kill(self, address: str) -> None:
        """Reset every link of an endpoint, let nobody reach it, and cancel its :meth:`life`."""
        name = Address(address)
        self.injected["kill"] += 1
        self._dead.add(name)
        for pair, links in self._links.items():
            if name in pair:
                for link in tuple(links):
                    link.cut()
        for scope in self._lives.get(name, ()):
            scope.cancel()

    # --- links ------------------------------------------------------------------------------------

    async def dial(self, mine: Address, to: Address) -> MemoryLink:
        """Open a link.

        Raises:
            UnreachableError: Nobody listens there, the cable is cut, or one of the two is dead.
            UsageError: The network was not entered.
        """
        if self._tasks is None:
            raise UsageError(
                "the network is not there", hint="async with FaultyNetwork(...) as network"
            )
        link = await super().dial(mine, to)
        if {mine, to} & self._dead:
            link.cut()
            raise UnreachableError("nobody answers", peer=to)
        return link

    def _end(self, out: Pipe, into: Pipe, mine: Address, peer: Address) -> MemoryLink:
        return _FaultyLink(out, into, self._line(mine, peer), self._line(peer, mine))

    def _line(self, sender: Address, receiver: Address) -> _Line:
        """One direction between two endpoints, for all the links there will be."""
        if (sender, receiver) not in self._lines:
            self._lines[sender, receiver] = _Line(
                self.plan.between(sender, receiver),
                Random(f"{self._seed}:{sender}>{receiver}"),
                self.conditions(sender, receiver),
                self.injected,
                lambda seconds: self._break(Cut(0.0, sender, receiver, seconds)),
            )
        return self._lines[sender, receiver]

    def _break(self, event: Cut) -> None:
        """Break a link by chance; it comes back."""
        if self._tasks is not None:
            self._begin(event)
            self._tasks.start_soon(self._finish, event)

    # --- the plan ---------------------------------------------------------------------------------

    async def _play(self, event: Fault) -> None:
        await anyio.sleep(event.at)
        self._begin(event)
        await self._finish(event)

    async def _finish(self, event: Fault) -> None:
        if not isinstance(event, Kill):
            await anyio.sleep(event.seconds)
            self._stop(event)

    def _begin(self, event: Fault) -> None:
        """Faults of one kind on one line may overlap: the last of them to end mends it."""
        match event:
            case Cut():
                self._cut[_pair(event)] += 1
                self.cut(event.one, event.other)
            case Partition():
                self._parted[_pair(event)] += 1
                self.partition(event.one, event.other)
            case Slow():
                self.injected["slow"] += 1
                for line in self._both_lines(event):
                    line.slow(event)
            case Kill():
                self.kill(event.address)

    def _stop(self, event: Cut | Partition | Slow) -> None:
        match event:
            case Cut():
                self._cut[_pair(event)] -= 1
                if not self._cut[_pair(event)]:
                    self.mend(event.one, event.other)
            case Partition():
                self._parted[_pair(event)] -= 1
                if not self._parted[_pair(event)]:
                    self.heal(event.one, event.other)
            case Slow():
                for line in self._both_lines(event):
                    line.recover(event)

    def _both_lines(self, event: Slow) -> tuple[_Line, _Line]:
        one, other = Address(event.one), Address(event.other)
        return self._line(one, other), self._line(other, one)

    def cut(self, one: str, other: str) -> None:
        """Reset every link between two endpoints and refuse new ones until :meth:`mend`."""
        self.injected["cut"] += 1
        super().cut(one, other)

    def partition(self, one: str, other: str) -> None:
        """Let nothing pass between two endpoints; both only see silence."""
        self.injected["partition"] += 1
        super().partition(one, other)


def _pair(event: Cut | Partition) -> frozenset[Address]:
    return frozenset((Address(event.one), Address(event.other)))


class _Line:
    """The faults of one direction and its dice, for all the links there will be."""

    def __init__(
        self,
        faults: LinkFaults,
        random: Random,
        conditions: Conditions,
        injected: Counter[str],
        cut: Callable[[float], None],
    ) -> None:
        self._planned = self._faults = faults
        self._random = random
        self._conditions = conditions
        self._injected = injected
        self._cut = cut
        self._slow: list[Slow] = []
        if math.isfinite(faults.bandwidth):
            conditions.set(bandwidth=faults.bandwidth)

    def slow(self, event: Slow) -> None:
        """Be slower from now on."""
        self._slow.append(event)
        self._change()

    def recover(self, event: Slow) -> None:
        """Be only as slow as what is left says."""
        self._slow.remove(event)
        self._change()

    def _change(self) -> None:
        planned = self._planned
        more = max((event.delay for event in self._slow), default=0.0)
        self._faults = replace(
            planned,
            bandwidth=min([planned.bandwidth, *(event.bandwidth for event in self._slow)]),
            delay=(planned.delay[0] + more, planned.delay[1] + more),
        )
        self._conditions.set(bandwidth=self._faults.bandwidth, latency=self._faults.delay[0])

    def delay(self) -> None:
        """Draw the delay of the frame that goes out next."""
        if any(self._faults.delay):
            self._conditions.latency = self._random.uniform(*self._faults.delay)

    def carry(self, inbound: Inbound, held: deque[Inbound]) -> Iterable[Inbound]:
        """Do to a frame what the dice say; as many are thrown for every frame.

        Args:
            inbound: The frame; given back here if it does not arrive.
            held: Those that wait for one to pass them.

        Returns:
            What arrives now, in order.

        Raises:
            MalformedFrameError: The frame was corrupted, and the frame checks see it.
        """
        if isinstance(inbound.frame, Hello):
            return (inbound,)
        struck = {name for name in CHANCES if self._random.random() < getattr(self._faults, name)}
        seconds, bit = self._random.uniform(*self._faults.down), self._random.random()
        if "cut" in struck:
            self._cut(seconds)
            struck = {"loss"}
        elif "loss" in struck:
            self._injected["loss"] += 1
        if "loss" in struck:
            inbound.release()
            return ()
        self._injected.update(struck)
        if "corruption" in struck:
            inbound = _corrupted(inbound, bit)
        if "duplication" in struck or "reordering" in struck:
            inbound = _detached(inbound)
        copies = (inbound,) * (2 if "duplication" in struck else 1)
        passed = tuple(held)
        held.clear()
        if "reordering" in struck:
            held.extend(copies)
            return passed
        return (*copies, *passed)


def _detached(inbound: Inbound) -> Inbound:
    """A frame with memory of its own, so that it can wait, come twice, or be forgotten."""
    frame = inbound.frame
    if not isinstance(frame, Chunk):
        return inbound
    body = (memoryview(b"".join(frame.body)),) if frame.body else ()
    inbound.release()
    return Inbound(replace(frame, body=body))


def _corrupted(inbound: Inbound, where: float) -> Inbound:
    """A frame with one bit flipped, ``where`` of the way through: a chunk's body, else the prefix.

    Raises:
        MalformedFrameError: The frame checks see it.
    """
    frame = inbound.frame
    if isinstance(frame, Chunk) and frame.body:
        data = bytearray(b"".join(frame.body))
        inbound.release()
        _flip(data, where * len(data))
        return Inbound(replace(frame, body=(memoryview(data),)))
    inbound.release()
    head, body = encode(frame)
    garbled = bytearray(head)
    _flip(garbled, where * PREFIX_BYTES)
    return Inbound(decode(bytes(garbled), body))


def _flip(data: bytearray, place: float) -> None:
    data[int(place)] ^= 1 << int(8 * (place % 1.0))


class _FaultyLink(MemoryLink):
    """One end of a link whose frames go through two lines."""

    def __init__(self, out: Pipe, into: Pipe, sends: _Line, hears: _Line) -> None:
        super().__init__(out, into)
        self._sends = sends
        self._hears = hears
        self._arrived: deque[Inbound] = deque()
        self._held: deque[Inbound] = deque()

    async def send(self, item: Outbound, urgent: Urgent) -> None:
        """Send one item. See :class:`streamoff.runtime.link.Link`."""

        def delayed() -> Iterator[Frame]:
            for frame in urgent():
                self._sends.delay()
                yield frame

        self._sends.delay()
        await super().send(item, delayed)

    async def receive(self) -> Inbound:
        """Receive the next frame that gets through. See :class:`streamoff.runtime.link.Link`."""
        while not self._arrived:
            self._arrived.extend(self._hears.carry(await super().receive(), self._held))
        return self._arrived.popleft()
