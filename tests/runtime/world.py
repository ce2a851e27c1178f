"""What the tests of this layer share: endpoints, payloads with a will of their own, and a peer driven by hand."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import torch
import xxhash
from anyio.abc import TaskGroup

from streamoff.errors import StreamoffError
from streamoff.machines.job_root import JobRootState
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import Job
from streamoff.runtime.link import Inbound
from streamoff.runtime.publishing import Transaction
from streamoff.runtime.threads import run_in_thread, wait_from_thread
from streamoff.scratch.janitor import JANITOR
from streamoff.tensors.landing import MemoryLanding
from streamoff.tensors.layout import Layout, plan
from streamoff.tensors.places import Place
from streamoff.tensors.sources import Source, StateDictSource
from streamoff.tensors.state import State
from streamoff.tensors.views import Views
from streamoff.transports.memory import MemoryLink, MemoryNetwork
from streamoff.types import (
    MIB,
    Address,
    Budgets,
    Capability,
    Outcome,
    OutcomeStatus,
    RangeSet,
    Ref,
    Slot,
)
from streamoff.wire.frames import Frame, Hello, Open, Opened, Ping, Pull
from streamoff.wire.limits import LinkLimits

from ..soon import soon

F = TypeVar("F", bound=Frame)

CAPABILITIES = frozenset(Capability)


# --- payloads -----------------------------------------------------------------------------------


def numbers(count: int, seed: int = 1) -> torch.Tensor:
    """Random float32 values."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def state_dict(mebibytes: float = 1.0, seed: int = 1) -> dict[str, torch.Tensor]:
    """A state dict of one large tensor, two small ones and a scalar."""
    return {
        "large": numbers(int(mebibytes * MIB) // 4, seed),
        "small": torch.arange(100 + seed, dtype=torch.int16),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(seed, dtype=torch.int64),
    }


def assert_same(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare every tensor of a state, bit for bit."""
    assert set(state.layout.names) == set(tensors)
    for name, tensor in tensors.items():
        there = state.tensor(name)
        assert there.dtype == tensor.dtype
        assert there.shape == tensor.shape
        assert torch.equal(there.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), (
            name
        )


def pattern(start: int, stop: int) -> np.ndarray:
    """Bytes ``start`` to ``stop`` of an endless sequence without a short period."""
    first = start // 8
    words = np.arange(first, (stop + 7) // 8, dtype=np.uint64)
    mixed = words * np.uint64(0x9E3779B97F4A7C15) ^ (words >> np.uint64(3))
    return mixed.view(np.uint8)[start - 8 * first : stop - 8 * first]


_BLOCK = 128 * 1024


class ComputedSource:
    """A source of one tensor of bytes that is computed as it is read, in a thread: it holds no memory.

    Args:
        nbytes: Of the tensor ``"w"``.
        before_read: Called in the reading thread.
    """

    blocking = True

    def __init__(self, nbytes: int, before_read: Callable[[int], object] | None = None) -> None:
        self.layout: Layout = plan([("w", "U8", (nbytes,))])
        self.closed = False
        self._before_read = before_read

    def views(self, start: int, stop: int) -> Views | None:
        return None

    def read_into(self, start: int, buffer: memoryview) -> None:
        if self._before_read is not None:
            self._before_read(start)
        head = self.layout.header[start : start + len(buffer)]
        buffer[: len(head)] = head
        base = start - self.layout.data_start
        for at in range(len(head), len(buffer), _BLOCK):  # in pieces: it is to hold no memory
            stop = min(at + _BLOCK, len(buffer))
            buffer[at:stop] = pattern(base + at, base + stop).data

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def assert_pattern(state: State) -> None:
    """Compare what a computed source brought."""
    whole = state.tensor("w").numpy()
    assert np.array_equal(whole, pattern(0, len(whole)))


def watched(tensors: Mapping[str, torch.Tensor]) -> tuple[StateDictSource, list[weakref.ref[Any]]]:
    """A source, and weak references by which to tell whether the tensors were let go."""
    return StateDictSource(tensors), [weakref.ref(tensor) for tensor in tensors.values()]


def all_dead(references: Iterable[weakref.ref[Any]]) -> bool:
    """Whether nothing holds the tensors any more, or is just about to let them go."""
    held = tuple(references)
    return soon(lambda: all(reference() is None for reference in held))


# --- landings -----------------------------------------------------------------------------------


class Gate:
    """Holds threads that reach it until it is opened; virtual time goes on meanwhile."""

    def __init__(self) -> None:
        self._open = anyio.Event()
        self._reached = anyio.Event()
        self.waiting = 0

    async def reached(self) -> None:
        """Wait until a thread stands before the gate."""
        await self._reached.wait()

    def open(self) -> None:
        """Let everybody through, now and later."""
        self._open.set()

    async def _stand(self) -> None:
        self.waiting += 1
        self._reached.set()
        try:
            with anyio.CancelScope(shield=True):  # a thread that blocks is not cancelled
                await self._open.wait()
        finally:
            self.waiting -= 1

    def __call__(self, *_: object) -> None:
        """Wait, in a thread."""
        wait_from_thread(self._stand)


def not_the_first(gate: Gate) -> Callable[[int], None]:
    """A hook that stops at the gate, except for what begins at the first byte."""

    def stop(start: int) -> None:
        if start:
            gate()

    return stop


class Hooked:
    """A landing that calls hooks in its thread, and is otherwise the one it wraps.

    Args:
        landing: Memory by default.
        hooks: By method: ``open``, ``write``, ``finish``, ``discard``; called before the real one. With one for
            ``write``, every chunk is written, and none landed while it comes.
    """

    hands_over = False

    def __init__(self, landing: Any = None, **hooks: Callable[..., object]) -> None:
        self.real = MemoryLanding() if landing is None else landing
        self.discarded = 0
        self._hooks = hooks

    def _call(self, name: str, *args: object) -> None:
        if name in self._hooks:
            self._hooks[name](*args)

    def open(self, layout: Layout, names: Iterable[str] | None = None) -> RangeSet:
        self._call("open", layout)
        opened: RangeSet = self.real.open(layout, names)
        return opened

    def place(self, start: int, stop: int) -> Place | None:
        place: Place | None = None if "write" in self._hooks else self.real.place(start, stop)
        return place

    def write(self, start: int, views: Views, digest: bytes) -> None:
        self._call("write", start)
        self.real.write(start, views, digest)

    def finish(self) -> State:
        self._call("finish")
        state: State = self.real.finish()
        return state

    def discard(self) -> None:
        self._call("discard")
        self.discarded += 1
        self.real.discard()


def in_memory(**hooks: Callable[..., object]) -> Callable[[Layout], Hooked]:
    """Terms' way to a landing in memory, with hooks."""
    return lambda _layout: Hooked(**hooks)


def memory(names: Iterable[str] | None = None, **others: Any) -> Terms:
    """Terms of a download into memory."""
    wanted = None if names is None else tuple(names)
    return Terms(landing=lambda _layout: MemoryLanding(), names=wanted, **others)


def disk(job: Job, names: Iterable[str] | None = None, **others: Any) -> Terms:
    """Terms of a download to a job's disk."""
    wanted = None if names is None else tuple(names)
    settings: dict[str, Any] = {"space": job.space} | others
    return Terms(landing=lambda layout: job.landing(layout, names=wanted), names=wanted, **settings)


def files(root: Path) -> list[str]:
    """Every file below a directory."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def until_gone(job: Job) -> None:
    """Wait until what was stuck has ended and the root is gone."""
    while job.state is not JobRootState.GONE:  # noqa: ASYNC110 - a state
        await anyio.sleep(0.01)


async def swept() -> None:
    """Wait for the janitor."""
    await run_in_thread(JANITOR.idle, 10.0)


def assert_told(error: BaseException | None, outcome: Outcome, *, needed: int) -> None:
    """The error has the numbers and the names; the producer was told in the receiver's words."""
    assert isinstance(error, StreamoffError)
    assert error.where["site"] == "site-1"
    assert error.where["ref"]
    assert error.where["needed"] == needed
    assert outcome.status is OutcomeStatus.FAILED
    [verdict] = outcome.slots["server"].values()
    assert error.what in verdict.reason


# --- endpoints ----------------------------------------------------------------------------------


class World:
    """A network with a server and its sites."""

    def __init__(
        self, network: MemoryNetwork, server: BaseEndpoint, sites: list[BaseEndpoint]
    ) -> None:
        self.network = network
        self.server = server
        self.sites = sites

    @property
    def site(self) -> BaseEndpoint:
        """The first site."""
        return self.sites[0]

    def offer(
        self,
        tensors: Mapping[str, torch.Tensor] | Source,
        *,
        site: BaseEndpoint | None = None,
        to: str | None = "server",
        budgets: Budgets | None = None,
    ) -> tuple[Transaction, Ref]:
        """Publish one payload of a site for one receiver."""
        source = StateDictSource(tensors) if isinstance(tensors, Mapping) else tensors
        slot = Slot(secrets.token_bytes(16), None if to is None else Address(to))
        tx = (site or self.site).publish([source], [slot], budgets=budgets)
        return tx, tx.refs(0)[0]

    async def download(self, ref: Ref, terms: Terms | None = None) -> State:
        """Pull a payload at the server."""
        return await self.server.run_transfer(self.server.transfer(ref, terms or memory()))

    def assert_idle(self) -> None:
        """Nothing is under way: no buffer is lent, no download runs, no transaction is open."""
        resources = self.server.resources.statistics()
        assert resources.buffers_lent == 0
        assert resources.active_downloads == 0
        assert resources.landing_threads == 0
        assert resources.reading_threads == 0
        for endpoint in (self.server, *self.sites):
            statistics = endpoint.statistics()
            assert statistics.downloads.active == 0
            assert statistics.publisher.open == statistics.publisher.settling == 0
            assert statistics.publisher.streams == 0


@asynccontextmanager
async def world(
    sites: int = 1, network: MemoryNetwork | None = None, **server: Any
) -> AsyncIterator[World]:
    """A server and its connected sites, ``site-1`` and on."""
    network = network or MemoryNetwork()
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(
            BaseEndpoint("server", transports=[network], **server)
        )
        ends = []
        for number in range(1, sites + 1):
            end = BaseEndpoint(f"site-{number}", transports=[network], seed=number)
            ends.append(await stack.enter_async_context(end))
            await end.connect("server")
        while hub.statistics().links < sites:
            await anyio.lowlevel.checkpoint()
        yield World(network, hub, ends)


class Attempt:
    """A download in a task of its own: how it ended, and when."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.state: State | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.began = self.ended = 0.0
        self.over = anyio.Event()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began

    async def run(self, call: Callable[[], Any]) -> None:
        """Run it to its end."""
        self.began = anyio.current_time()
        try:
            with self.scope:
                try:
                    self.state = await call()
                except StreamoffError as error:
                    self.error = error
            self.cancelled = self.scope.cancelled_caught
        finally:
            self.ended = anyio.current_time()
            self.over.set()


@asynccontextmanager
async def tasks(*gates: Gate) -> AsyncIterator[TaskGroup]:
    """A task group whose tasks may stand before gates: these are opened when the test fails."""
    async with anyio.create_task_group() as group:
        try:
            yield group
        except BaseException:
            for gate in gates:
                gate.open()
            raise


async def settled_tasks() -> None:
    """Let everything run that can run now; takes no time."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


# --- by hand ------------------------------------------------------------------------------------


class Puppet:
    """An end of a link that says what the test says, and no more: it answers pings, nothing else."""

    def __init__(self, address: str, link: MemoryLink) -> None:
        self.address = Address(address)
        self.link = link
        self.hello: Hello | None = None
        self.lost: StreamoffError | None = None
        self._frames: list[Inbound] = []
        self._arrived = anyio.Event()

    @classmethod
    async def dial(
        cls,
        network: MemoryNetwork,
        address: str,
        to: str,
        *,
        instance: bytes | None = None,
        **hello: Any,
    ) -> Self:
        """Dial an endpoint and shake hands."""
        puppet = cls(address, await network.dial(Address(address), Address(to)))
        await puppet.greet(instance, **hello)
        return puppet

    async def greet(self, instance: bytes | None = None, **hello: Any) -> None:
        """Exchange hellos."""
        await self.send(
            Hello(
                address=self.address,
                instance=instance or secrets.token_bytes(16),
                capabilities=hello.pop("capabilities", CAPABILITIES),
                limits=LinkLimits(),
                **hello,
            )
        )
        frame = (await self.link.receive()).frame
        assert isinstance(frame, Hello)
        self.hello = frame

    async def send(self, frame: Frame) -> None:
        """Send a frame."""
        await self.link.send(frame, lambda: iter(()))

    async def listen(self) -> None:
        """Take frames and answer pings until the link is lost."""
        try:
            while True:
                inbound = await self.link.receive()
                if isinstance(inbound.frame, Ping):
                    if not inbound.frame.reply:
                        await self.send(Ping(id=inbound.frame.id, reply=True))
                    continue
                self._frames.append(inbound)
                arrived, self._arrived = self._arrived, anyio.Event()
                arrived.set()
        except StreamoffError as error:
            self.lost = error
        self._arrived.set()

    async def next(self, kind: type[F]) -> F:
        """Wait for the next frame of a kind; others stay."""
        while True:
            for inbound in self._frames:
                if isinstance(inbound.frame, kind):
                    self._frames.remove(inbound)
                    inbound.release()
                    return inbound.frame
            assert self.lost is None, f"the link is lost: {self.lost}"
            await self._arrived.wait()

    @property
    def frames(self) -> list[Frame]:
        """What arrived and was not asked for."""
        return [inbound.frame for inbound in self._frames]

    def alive(self) -> bool:
        """Whether the link is still there, as far as this end has heard."""
        return self.lost is None

    def route(self, to: str = "server") -> dict[str, Any]:
        """The routing fields of a frame of ours."""
        return {"to": Address(to), "sender": self.address}

    async def open(self, ref: Ref, stream: int = 1, names: tuple[str, ...] | None = None) -> Opened:
        """Open a ref and wait for the answer."""
        await self.send(
            Open(
                **self.route(ref.source),
                stream=stream,
                ref=ref.id,
                ticket=ref.ticket,
                names=names,
                capabilities=CAPABILITIES,
            )
        )
        return await self.next(Opened)

    async def pull(self, ref: Ref, start: int, stop: int, stream: int = 1) -> None:
        """Ask for a range."""
        await self.send(Pull(**self.route(ref.source), stream=stream, start=start, stop=stop))


@asynccontextmanager
async def puppet(
    network: MemoryNetwork, address: str = "site-1", to: str = "server", **hello: Any
) -> AsyncIterator[Puppet]:
    """A puppet that is connected and listens."""
    one = await Puppet.dial(network, address, to, **hello)
    async with anyio.create_task_group() as group:
        group.start_soon(one.listen)
        try:
            yield one
        finally:
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await one.link.aclose()


def digest(data: bytes | memoryview) -> bytes:
    """The digest of a header."""
    return xxhash.xxh3_128_digest(data)


def thread_count() -> int:
    """Threads of this process."""
    return threading.active_count()
