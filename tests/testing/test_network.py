"""A network that fails as it is told: each fault does what it says, when it says, the same way each time."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from streamoff.errors import (
    LinkLostError,
    MalformedFrameError,
    StreamoffError,
    UnreachableError,
    UsageError,
)
from streamoff.runtime.link import Inbound, Link
from streamoff.testing import Cut, FaultPlan, FaultyNetwork, Kill, LinkFaults, Partition, Slow
from streamoff.testing.network import _corrupted
from streamoff.transports.memory import MemoryLink
from streamoff.types import MIB, Address
from streamoff.wire.frames import Chunk, Frame, Hello, Ping

from ..runtime.world import Attempt, assert_same, memory, settled_tasks, state_dict, tasks, world
from ..transports.test_memory import Bulk, listener, nothing, ping
from ..wire.samples import SAMPLES

pytestmark = pytest.mark.usefixtures("no_leaks")

A, B = Address("a"), Address("b")


@asynccontextmanager
async def line(seed: int = 1, /, **faults: Any):
    """A link from a to b through a network with these faults, and the network."""
    async with FaultyNetwork(seed=seed, plan=FaultPlan(faults=LinkFaults(**faults))) as network:
        accepted: list[Link] = []
        network.listen(B, listener(accepted))
        near = await network.dial(A, B)
        [far] = accepted
        assert isinstance(far, MemoryLink)
        yield network, near, far
        await near.aclose()
        await far.aclose()


async def heard(link: MemoryLink) -> list[int]:
    """The pings that come until nothing comes any more."""
    found: list[int] = []
    with anyio.move_on_after(100):
        while True:
            frame = (await link.receive()).frame
            assert isinstance(frame, Ping)
            found.append(frame.id)
    return found


async def sent(count: int, seed: int = 1, /, **faults: Any) -> tuple[list[int], dict[str, int]]:
    """What arrives of so many pings, and what was injected."""
    async with line(seed, **faults) as (network, near, far):
        for number in range(count):
            await near.send(ping(number), nothing)
        return await heard(far), dict(network.injected)


# --- chances ------------------------------------------------------------------------------------


async def test_without_faults_it_is_a_memory_network():
    """Everything arrives, once, in order, and nothing was injected."""
    assert await sent(50) == (list(range(50)), {})


async def test_lost_frames_are_lost_and_the_others_come_in_order():
    """About as many as the chance says are missing, and what is missing was counted."""
    came, injected = await sent(60, loss=0.3)
    assert came == sorted(came)
    assert 30 <= len(came) <= 54
    assert injected == {"loss": 60 - len(came)}


async def test_duplicated_frames_come_twice():
    """A frame that is duplicated comes twice in a row."""
    came, injected = await sent(60, duplication=0.3)
    assert sorted(set(came)) == list(range(60))
    assert came == sorted(came)
    assert injected == {"duplication": len(came) - 60}


async def test_reordered_frames_come_after_the_next_one_and_none_is_missing():
    """Frames change places with their neighbours; at the end at most the last one still waits for a next."""
    came, injected = await sent(60, reordering=0.3)
    assert came != sorted(came)
    assert set(range(59)) <= set(came)
    assert all(abs(place - number) <= 2 for place, number in enumerate(came))
    assert injected["reordering"] >= 5


async def test_everything_at_once_adds_up():
    """With loss, duplicates and disorder together, what is counted explains what comes."""
    came, injected = await sent(60, loss=0.1, duplication=0.2, reordering=0.2)
    assert set(injected) == {"loss", "duplication", "reordering"}
    assert abs(len(came) - (60 - injected["loss"] + injected["duplication"])) <= 2


async def test_a_link_that_breaks_by_chance_comes_back():
    """Both ends see it break, nobody gets through meanwhile, and after its time it can be dialled again."""
    async with line(cut=1.0, down=(3.0, 3.0)) as (network, near, far):
        await near.send(ping(1), nothing)
        for end in (far, near):
            with pytest.raises(LinkLostError, match="cut"):
                await end.receive()
        with pytest.raises(UnreachableError):
            await network.dial(A, B)
        await anyio.sleep(3.0)
        again = await network.dial(A, B)
        await again.aclose()
        assert network.injected == {"cut": 1}


async def test_a_delay_keeps_the_order():
    """Frames take the time that is drawn for each, and none overtakes another."""
    async with line(delay=(0.5, 2.0)) as (_, near, far):
        for number in range(10):
            await near.send(ping(number), nothing)
        for number in range(10):
            assert (await far.receive()).frame == ping(number)
        assert 0.5 < anyio.current_time() <= 2.0


async def test_a_bandwidth_is_one_of_virtual_time():
    """Three MiB at one MiB per second take three seconds."""
    async with line(bandwidth=MIB) as (_, near, far):
        await near.send(Bulk(3 * MIB), nothing)
        assert anyio.current_time() == 3
        (await far.receive()).release()


async def test_the_handshake_is_spared():
    """A hello arrives as it is even where nothing else does, so that a test can begin."""
    hello = SAMPLES[0]
    assert isinstance(hello, Hello)
    async with line(loss=1.0, corruption=1.0, cut=1.0) as (_, near, far):
        await near.send(hello, nothing)
        assert (await far.receive()).frame == hello


async def test_the_same_seed_does_the_same():
    """What happens to each frame of a line is a function of the seed, and of nothing that others do."""
    faults = {"loss": 0.2, "duplication": 0.2, "reordering": 0.2}
    one, two = await sent(40, 3, **faults), await sent(40, 3, **faults)
    assert one == two
    assert one != await sent(40, 4, **faults)
    async with line(3, **faults) as (_, near, far):
        for number in range(40):
            await far.send(ping(1000 + number), nothing)
            await near.send(ping(number), nothing)
        assert await heard(far) == one[0]


# --- corruption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_no_bit_of_a_prefix_can_flip_unseen(frame: Frame) -> None:
    """A flipped bit in the prefix of any frame is refused; it never makes another frame."""
    if isinstance(frame, Chunk):
        frame = Chunk(**{**{name: getattr(frame, name) for name in CHUNK_FIELDS}, "body": ()})
    for bit in range(128):
        with pytest.raises(StreamoffError):
            _corrupted(Inbound(frame), bit / 128)


CHUNK_FIELDS = ("to", "sender", "hops", "stream", "start", "stop", "digest")


async def test_a_corrupted_chunk_differs_in_one_bit_and_gives_its_memory_back():
    """The receiving end gets a copy with one bit flipped; the source's own bytes are untouched."""
    async with line(corruption=1.0) as (network, near, far):
        bulk = Bulk(1000)
        await near.send(bulk, nothing)
        frame = (await far.receive()).frame
        assert isinstance(frame, Chunk)
        came = b"".join(frame.body)
        assert (
            sum((one ^ other).bit_count() for one, other in zip(came, bulk.data, strict=True)) == 1
        )
        assert bulk.released == 1
        assert bulk.data == bytes(1000)
        assert network.injected == {"corruption": 1}


async def test_a_corrupted_control_frame_ends_the_link():
    """The frame checks see it, and what cannot be read is not guessed at."""
    async with line(corruption=1.0) as (_, near, far):
        await near.send(ping(1), nothing)
        with pytest.raises(MalformedFrameError):
            await far.receive()


@pytest.mark.parametrize("fault", ["loss", "duplication", "reordering"])
async def test_a_chunk_gives_its_memory_back_whatever_becomes_of_it(fault: str) -> None:
    """The sender's memory is free again once the frame has been dealt with, also if it is held back."""
    async with line(**{fault: 1.0}) as (_, near, far):
        bulk = Bulk(1000)
        await near.send(bulk, nothing)
        await heard_nothing_or_chunks(far)
        assert bulk.released == 1


async def heard_nothing_or_chunks(link: MemoryLink) -> None:
    """Take what comes."""
    with anyio.move_on_after(10):
        while True:
            (await link.receive()).release()


# --- events -------------------------------------------------------------------------------------


@asynccontextmanager
async def planned(*events: Any):
    """A network that plays these events, with a listener at b."""
    async with FaultyNetwork(plan=FaultPlan(events=events)) as network:
        accepted: list[Link] = []
        network.listen(B, listener(accepted))
        async with AsyncExitStack() as stack:

            async def dial() -> tuple[MemoryLink, MemoryLink]:
                near = await network.dial(A, B)
                far = accepted[-1]
                assert isinstance(far, MemoryLink)
                stack.push_async_callback(far.aclose)
                stack.push_async_callback(near.aclose)
                return near, far

            yield network, dial


async def test_a_cut_begins_and_ends_to_the_second():
    """The link is reset at its time, and for as long as it says nobody can dial."""
    async with planned(Cut(2.0, "a", "b", 3.0)) as (_, dial):
        near, _ = await dial()
        with pytest.raises(LinkLostError):
            await near.receive()
        assert anyio.current_time() == 2.0
        await anyio.sleep(2.9)
        with pytest.raises(UnreachableError):
            await dial()
        await anyio.sleep(0.1)
        await dial()


async def test_a_partition_begins_and_ends_to_the_second():
    """What is sent meanwhile arrives when it is over."""
    async with planned(Partition(2.0, "b", "a", 3.0)) as (network, dial):
        near, far = await dial()
        await anyio.sleep(2.5)
        await near.send(ping(1), nothing)
        await far.receive()
        assert anyio.current_time() == 5.0
        assert network.injected == {"partition": 1}


async def test_faults_of_one_kind_may_overlap():
    """A line is whole again when the last of the faults upon it has ended."""
    cuts = (Cut(1.0, "a", "b", 5.0), Cut(2.0, "b", "a", 1.0))
    walls = (Partition(10.0, "a", "b", 5.0), Partition(11.0, "b", "a", 1.0))
    async with planned(*cuts, *walls) as (network, dial):
        await anyio.sleep(5.9)
        with pytest.raises(UnreachableError):
            await dial()
        await anyio.sleep(0.1)
        near, far = await dial()
        await anyio.sleep(6.0)
        await near.send(ping(1), nothing)
        await far.receive()
        assert anyio.current_time() == 15.0
        assert network.injected == {"cut": 2, "partition": 2}


async def test_a_slow_line_is_slow_for_its_time():
    """Two overlapping slownesses count as the slower of each; afterwards the line is what it was."""
    slow = (Slow(0.0, "a", "b", 10.0, MIB), Slow(0.0, "a", "b", 5.0, MIB / 4, 2.0))
    async with planned(*slow) as (_, dial):
        near, far = await dial()
        await settled_tasks()
        await near.send(Bulk(MIB), nothing)
        assert anyio.current_time() == 4.0
        (await far.receive()).release()
        assert anyio.current_time() == 6.0
        await near.send(Bulk(2 * MIB), nothing)
        assert anyio.current_time() == 8.0
        (await far.receive()).release()
        assert anyio.current_time() == 8.0
        await anyio.sleep(2.5)
        await near.send(Bulk(100 * MIB), nothing)
        assert anyio.current_time() == 10.5


async def test_a_killed_endpoint_says_no_last_word():
    """Its links are reset before its program is cancelled, and nobody gets through to it."""
    async with planned(Kill(2.0, "b")) as (network, dial):
        near, far = await dial()
        with network.life("b") as scope:
            try:
                await anyio.sleep(100)
            finally:
                with anyio.CancelScope(shield=True), pytest.raises(LinkLostError):
                    await far.send(ping(1), nothing)
        assert scope.cancelled_caught
        assert anyio.current_time() == 2.0
        with pytest.raises(LinkLostError):
            await near.receive()
        with pytest.raises(UnreachableError):
            await dial()
        with network.life("b"):
            await dial()
        assert network.injected == {"kill": 1}


async def test_the_dead_do_not_dial():
    """A killed endpoint that goes on cannot reach anybody either."""
    async with planned() as (network, dial):
        network.kill("a")
        with pytest.raises(UnreachableError):
            await dial()


async def test_leaving_the_network_ends_its_plan():
    """Nothing of a plan is left when the test has what it wanted."""
    async with planned(Cut(2.0, "a", "b", math.inf), Kill(500.0, "b")) as (network, _):
        await anyio.sleep(3.0)
    assert network.injected == {"cut": 1}


async def test_a_network_is_entered_before_it_is_used():
    """Its time passes inside ``async with`` only, so it cannot be used outside."""
    network = FaultyNetwork()
    with pytest.raises(UsageError, match="async with"):
        await network.dial(A, B)


def test_a_plan_says_what_a_direction_does_wrong():
    """A direction that is named has its own faults, every other the common ones."""
    bad = LinkFaults(loss=0.5)
    plan = FaultPlan(faults=LinkFaults(loss=0.1), links={("a", "b"): bad})
    assert plan.between("a", "b") is bad
    assert plan.between("b", "a").loss == 0.1


NONSENSE: list[Any] = [
    lambda: LinkFaults(loss=1.1),
    lambda: LinkFaults(cut=True),
    lambda: LinkFaults(delay=(2.0, 1.0)),
    lambda: LinkFaults(delay=1.0),  # type: ignore[arg-type]
    lambda: LinkFaults(down=(0.0, math.inf)),
    lambda: LinkFaults(bandwidth=0.0),
    lambda: FaultPlan(links={("a", "b c"): LinkFaults()}),
    lambda: FaultPlan(events=(Cut(-1.0, "a", "b"),)),
    lambda: FaultPlan(events=(Cut(1.0, "a", "b", math.nan),)),
    lambda: FaultPlan(events=(Kill(1.0, ""),)),
    lambda: FaultPlan(events=(Slow(1.0, "a", "b", bandwidth=-1.0),)),
]


@pytest.mark.parametrize("make", NONSENSE)
def test_nonsense_is_no_plan(make: Any) -> None:
    """A plan is checked where it is made, not where it would begin to do something else."""
    with pytest.raises(UsageError):
        make()


# --- endpoints ----------------------------------------------------------------------------------


async def test_a_transfer_survives_what_a_network_may_do():
    """Cuts, a partition, and a slow line cost a transfer time, and nothing else."""
    plan = FaultPlan(
        faults=LinkFaults(bandwidth=MIB, delay=(0.01, 0.2)),
        events=(Cut(1.0, "site-1", "server", 2.0), Partition(6.0, "site-1", "server", 25.0)),
    )
    tensors = state_dict(12)
    async with FaultyNetwork(plan=plan) as network, world(network=network) as w:
        tx, ref = w.offer(tensors)
        assert_same(await w.download(ref), tensors)
        assert (await tx.wait()).succeeded == ("server",)
        assert network.injected == {"cut": 1, "partition": 1}


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_damaged_is_never_landed(seed: int) -> None:
    """A transfer over a line that flips bits brings what was sent, or fails at both ends."""
    plan = FaultPlan(faults=LinkFaults(corruption=0.3))
    tensors = state_dict(12)
    async with FaultyNetwork(seed=seed, plan=plan) as network, world(network=network) as w:
        tx, ref = w.offer(tensors)
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, lambda: w.download(ref, memory()))
            outcome = await tx.wait()
            await attempt.over.wait()
        if attempt.state is not None:
            assert_same(attempt.state, tensors)
        else:
            assert not outcome.succeeded
        assert network.injected["corruption"]
