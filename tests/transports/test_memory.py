"""The memory transport: frames as they were sent, at the time they are due, through a network's bad habits."""

import anyio
import pytest

from streamoff.errors import LinkLostError, UnreachableError, UsageError
from streamoff.runtime.link import Inbound, Link, Listener
from streamoff.transports.memory import PIPE_ITEMS, MemoryLink, MemoryNetwork
from streamoff.types import MIB, Address
from streamoff.wire.frames import Chunk, Frame, Message, MessageKind, Ping

pytestmark = pytest.mark.usefixtures("no_leaks")

A, B = Address("a"), Address("b")


def nothing():
    """No urgent frames."""
    return iter(())


def listener(accepted: list[Link]) -> Listener:
    """What keeps the links that somebody opened."""

    def accept(link: Link) -> anyio.Event:
        accepted.append(link)
        return anyio.Event()

    return accept


async def pair(network: MemoryNetwork) -> tuple[MemoryLink, MemoryLink]:
    """Both ends of a link from a to b."""
    accepted: list[Link] = []
    network.listen(B, listener(accepted))
    near = await network.dial(A, B)
    network.unlisten(B)
    far = accepted[0]
    assert isinstance(far, MemoryLink)
    return near, far


def ping(number: int) -> Ping:
    """A frame that is told apart by its number."""
    return Ping(id=number, reply=False)


class Bulk:
    """A chunk that is fetched when it is taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = bytes(nbytes)
        self.fetched_at: list[float] = []
        self.dropped = False
        self.released = 0

    def drop(self) -> None:
        self.dropped = True

    async def render(self) -> Inbound:
        self.fetched_at.append(anyio.current_time())
        chunk = Chunk(
            to=B,
            sender=A,
            stream=1,
            start=0,
            stop=self.nbytes,
            digest=bytes(16),
            body=(memoryview(self.data),),
        )
        return Inbound(chunk, self._release)

    def _release(self) -> None:
        self.released += 1


class Outsized(Bulk):
    """A chunk that breaks a limit of the wire."""

    async def render(self) -> Inbound:
        rendered = await super().render()
        assert isinstance(rendered.frame, Chunk)
        broken = Chunk(
            to=B,
            sender=A,
            stream=1,
            start=5,
            stop=5 + self.nbytes + 1,
            digest=bytes(16),
            body=rendered.frame.body,
        )
        return Inbound(broken, rendered.release)


async def received(link: MemoryLink, count: int) -> list[tuple[int, float]]:
    """The next pings and when they came."""
    found = []
    for _ in range(count):
        frame = (await link.receive()).frame
        assert isinstance(frame, Ping)
        found.append((frame.id, anyio.current_time()))
    return found


async def test_frames_arrive_in_order_both_ways():
    """What is sent arrives, equal and in order, in both directions at once."""
    near, far = await pair(MemoryNetwork())
    for number in range(20):
        await near.send(ping(number), nothing)
        await far.send(ping(100 + number), nothing)
    assert [number for number, _ in await received(far, 20)] == list(range(20))
    assert [number for number, _ in await received(near, 20)] == list(range(100, 120))
    await near.aclose()
    await far.aclose()


async def test_bodies_are_handed_over_and_not_copied():
    """A message's body is the sender's memory."""
    near, far = await pair(MemoryNetwork())
    data = bytearray(b"one")
    body = (memoryview(data),)
    await near.send(
        Message(to=B, sender=A, kind=MessageKind.NOTIFY, topic="t", id=1, body=body), nothing
    )
    data[:] = b"two"
    frame = (await far.receive()).frame
    assert isinstance(frame, Message)
    assert bytes(frame.body[0]) == b"two"
    await near.aclose()
    await far.aclose()


async def test_nonsense_is_refused_as_on_any_wire():
    """A frame that the wire does not allow is refused where it is sent."""
    near, far = await pair(MemoryNetwork())
    with pytest.raises(UsageError):
        await near.send(Ping(id=-1, reply=False), nothing)
    await near.aclose()
    await far.aclose()


async def test_latency_is_kept_to_the_second():
    """A frame arrives exactly the latency after it was sent, however many are under way."""
    near, far = await pair(MemoryNetwork(latency=1.25))
    for number in range(3):
        await near.send(ping(number), nothing)
        await anyio.sleep(0.5)
    assert await received(far, 3) == [(0, 1.5), (1, 1.75), (2, 2.25)]
    await near.aclose()
    await far.aclose()


async def test_bandwidth_is_kept_and_control_frames_overtake():
    """A chunk takes the time its bytes take; what is urgent passes between its pieces."""
    near, far = await pair(MemoryNetwork(bandwidth=MIB))
    bulk = Bulk(3 * MIB)
    urgent: list[Frame] = [ping(1)]
    seen: list[tuple[int, float]] = []

    async def read() -> None:
        seen.extend(await received(far, 2))
        assert isinstance((await far.receive()).frame, Chunk)
        seen.append((0, anyio.current_time()))

    async def later() -> None:
        await anyio.sleep(1.1)
        urgent.append(ping(2))

    def take():
        while urgent:
            yield urgent.pop()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(later)
        await near.send(bulk, take)
        assert anyio.current_time() == 3
    assert seen == [(1, 0), (2, 1.25), (0, 3)]
    await near.aclose()
    await far.aclose()


async def test_conditions_change_while_frames_travel():
    """A line that turns ten times as fast in the middle of a chunk takes the rest at the new speed."""
    network = MemoryNetwork(bandwidth=MIB)
    near, far = await pair(network)

    async def change() -> None:
        await anyio.sleep(1)
        network.conditions("a", "b").set(bandwidth=10 * MIB)

    async with anyio.create_task_group() as group:
        group.start_soon(change)
        await near.send(Bulk(2 * MIB), nothing)
    assert 1.09 <= anyio.current_time() <= 1.36
    await near.aclose()
    await far.aclose()


async def test_a_chunk_is_fetched_when_it_is_taken():
    """What waits in a link costs nothing: its bytes are fetched when the far end takes it."""
    near, far = await pair(MemoryNetwork(latency=5))
    bulk = Bulk(1000)
    await near.send(bulk, nothing)
    await anyio.sleep(50)
    assert not bulk.fetched_at
    inbound = await far.receive()
    assert bulk.fetched_at == [50]
    assert bulk.released == 0
    inbound.release()
    assert bulk.released == 1
    await near.aclose()
    await far.aclose()


async def test_a_chunk_that_breaks_the_wire_gives_its_memory_back():
    """A fetched chunk that the wire refuses is released."""
    near, far = await pair(MemoryNetwork())
    bulk = Outsized(1000)
    await near.send(bulk, nothing)
    with pytest.raises(UsageError):
        await far.receive()
    assert bulk.released == 1
    await near.aclose()
    await far.aclose()


async def test_a_link_that_nobody_reads_is_bounded():
    """A sender waits once so many items are under way, and goes on when one is taken."""
    near, far = await pair(MemoryNetwork())
    for number in range(PIPE_ITEMS):
        await near.send(ping(number), nothing)
    with anyio.move_on_after(10) as scope:
        await near.send(ping(99), nothing)
    assert scope.cancelled_caught
    await far.receive()
    await near.send(ping(100), nothing)
    await near.aclose()
    await far.aclose()


async def test_a_partition_delays_and_loses_nothing():
    """While partitioned nothing arrives, and when healed all of it does, in order."""
    network = MemoryNetwork()
    near, far = await pair(network)
    network.partition("a", "b")
    for number in range(3):
        await near.send(ping(number), nothing)
    with anyio.move_on_after(10) as scope:
        await far.receive()
    assert scope.cancelled_caught
    network.heal("a", "b")
    assert [number for number, _ in await received(far, 3)] == [0, 1, 2]
    await near.aclose()
    await far.aclose()


async def test_a_partition_hides_the_end():
    """An end that closes in a partition is not heard, and sending to it is sending into the dark, until it heals."""
    network = MemoryNetwork()
    near, far = await pair(network)
    await far.send(ping(1), nothing)
    network.partition("a", "b")
    await far.send(ping(2), nothing)
    await far.aclose()
    await near.send(ping(3), nothing)
    bulk = Bulk(10)
    await near.send(bulk, nothing)
    assert bulk.dropped
    with anyio.move_on_after(10) as scope:
        await near.receive()
    assert scope.cancelled_caught
    network.heal("a", "b")
    assert [number for number, _ in await received(near, 2)] == [1, 2]
    with pytest.raises(LinkLostError):
        await near.receive()
    with pytest.raises(LinkLostError):
        await near.send(ping(4), nothing)
    await near.aclose()


async def test_closing_lets_control_frames_arrive_and_drops_chunks():
    """What was said before the close is heard; chunks that nobody will take are dropped, and then comes the end."""
    near, far = await pair(MemoryNetwork(latency=2))
    bulk = Bulk(10)
    await near.send(ping(1), nothing)
    await near.send(bulk, nothing)
    await near.send(ping(2), nothing)
    await near.aclose()
    await near.aclose()
    assert bulk.dropped
    assert await received(far, 2) == [(1, 2), (2, 2)]
    with pytest.raises(LinkLostError):
        await far.receive()
    await far.aclose()


async def test_cutting_loses_what_is_under_way():
    """A cut is heard at once by both ends, everything under way is lost, and nobody gets through until it is mended."""
    network = MemoryNetwork(latency=2)
    accepted: list[Link] = []
    network.listen(B, listener(accepted))
    near = await network.dial(A, B)
    [far] = accepted
    bulk = Bulk(10)
    await near.send(ping(1), nothing)
    await near.send(bulk, nothing)
    network.cut("a", "b")
    assert bulk.dropped
    for end in (near, far):
        with pytest.raises(LinkLostError, match="cut"):
            await end.receive()
        with pytest.raises(LinkLostError, match="cut"):
            await end.send(ping(1), nothing)
        await end.aclose()
    with pytest.raises(UnreachableError):
        await network.dial(A, B)
    network.mend("a", "b")
    again = await network.dial(A, B)
    await again.aclose()
    await accepted[1].aclose()
    network.unlisten(B)


async def test_a_cut_is_heard_through_a_partition():
    """A link that is reset while it is partitioned is lost at once: a reset needs no reader."""
    network = MemoryNetwork()
    near, far = await pair(network)
    network.partition("a", "b")
    network.cut("a", "b")
    for end in (near, far):
        with pytest.raises(LinkLostError, match="cut"):
            await end.receive()
        await end.aclose()


async def test_a_send_that_is_given_up_drops_its_chunk():
    """A sender that is cancelled while it waits or paces has dropped what it was sending."""
    near, far = await pair(MemoryNetwork(bandwidth=1000))
    bulk = Bulk(10_000)
    with anyio.move_on_after(3):
        await near.send(bulk, nothing)
    assert bulk.dropped
    assert anyio.current_time() == 3
    await near.aclose()
    await far.aclose()


async def test_nobody_listens():
    """An address where nobody listens cannot be dialled; one that is taken cannot be listened at."""
    network = MemoryNetwork()
    with pytest.raises(UnreachableError, match="b"):
        await network.dial(A, B)
    network.listen(B, listener([]))
    with pytest.raises(UsageError, match="taken"):
        network.listen(B, listener([]))
    network.unlisten(B)
    network.unlisten(B)


@pytest.mark.parametrize(
    "change",
    [
        {"latency": -1},
        {"latency": float("nan")},
        {"bandwidth": 0},
        {"bandwidth": -5},
        {"bandwidth": float("nan")},
    ],
)
def test_impossible_conditions_are_refused(change):
    """A latency below zero and a bandwidth that is not above it are no conditions."""
    with pytest.raises(UsageError):
        MemoryNetwork().conditions("a", "b").set(**change)
