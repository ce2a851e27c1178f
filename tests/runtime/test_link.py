"""One link: what is queued is sent or dropped, exactly once; what is begun goes on; a defect costs one link."""

import logging
import secrets
from functools import partial
from typing import Any

import anyio
import pytest

from streamoff.errors import LimitError, LinkLostError, SourceLostError, TransferTimeoutError
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.runtime.link import (
    MAX_CONTROL,
    Inbound,
    Link,
    LinkDriver,
    Listener,
    Outbound,
    Urgent,
)
from streamoff.tensors.digests import chunk_digest
from streamoff.transports.memory import MemoryLink, MemoryNetwork
from streamoff.types import MIB, Address, OutcomeStatus, Slot
from streamoff.wire.frames import Cancel, Chunk, Frame, Hold, Ping

from .world import (
    Attempt,
    ComputedSource,
    Gate,
    assert_pattern,
    disk,
    files,
    memory,
    puppet,
    settled_tasks,
    swept,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


class Parcel:
    """A chunk that counts what became of it."""

    def __init__(self, to: str, sender: str, nbytes: int = 1000, gate: Gate | None = None) -> None:
        self.ends: list[str] = []
        self.released = 0
        self.nbytes = nbytes
        self._route: dict[str, Any] = {"to": Address(to), "sender": Address(sender)}
        self._gate = gate

    def drop(self) -> None:
        self.ends.append("dropped")

    async def render(self) -> Inbound:
        if self._gate is not None:
            await self._gate._stand()
        self.ends.append("rendered")
        data = bytes(self.nbytes)
        chunk = Chunk(
            **self._route,
            stream=1,
            start=0,
            stop=self.nbytes,
            digest=chunk_digest((memoryview(data),), 0),
            body=(memoryview(data),),
        )
        return Inbound(chunk, self._release)

    def _release(self) -> None:
        self.released += 1


def driver(of: BaseEndpoint, to: str) -> LinkDriver:
    """The live link of an endpoint."""
    return of.links.live[Address(to)]


@pytest.mark.parametrize("end", ["served", "lost", "cut", "partition", "closed by the peer"])
async def test_every_queued_chunk_is_rendered_or_dropped_exactly_once(end):
    """Whatever happens to a link with a hundred chunks queued, each is rendered or dropped, and released if rendered."""
    network = MemoryNetwork(bandwidth=100_000)
    async with world(network=network) as w:
        link = driver(w.site, "server")
        parcels = [Parcel("server", "site-1") for _ in range(100)]
        for parcel in parcels:
            link.serve_nowait(parcel)
        await anyio.sleep(0.305)
        match end:
            case "lost":
                link.lose(LinkLostError("for a test"))
            case "cut":
                network.cut("server", "site-1")
            case "partition":
                network.partition("server", "site-1")
                await anyio.sleep(60)
                network.heal("server", "site-1")
            case "closed by the peer":
                driver(w.server, "site-1").lose(LinkLostError("for a test"))
            case _:
                pass
        await anyio.sleep(60)
        for parcel in parcels:
            assert len(parcel.ends) == 1
            assert parcel.released == parcel.ends.count("rendered")
        if end == "served":
            assert {parcel.ends[0] for parcel in parcels} == {"rendered"}
        else:
            assert {parcel.ends[0] for parcel in parcels} == {"rendered", "dropped"}
        late = Parcel("server", "site-1")
        link.serve_nowait(late)
        await anyio.sleep(1)
        assert len(late.ends) == 1


async def test_a_chunk_that_is_being_fetched_when_the_link_goes_is_released():
    """A chunk whose bytes come after its link has gone is not delivered, and its memory goes back."""
    gate = Gate()
    async with world() as w, tasks(gate):
        parcel = Parcel("server", "site-1", gate=gate)
        driver(w.site, "server").serve_nowait(parcel)
        await gate.reached()
        w.network.cut("server", "site-1")
        await anyio.sleep(1)
        assert parcel.ends == []
        gate.open()
        await settled_tasks()
        assert parcel.ends == ["rendered"]
        assert parcel.released == 1
        w.network.mend("server", "site-1")


async def test_flushing_waits_for_what_is_being_sent():
    """A flush is over when the transport has taken the last frame, also the one that is under way; many may wait."""
    network = MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w:
        link = driver(w.site, "server")
        link.serve_nowait(Parcel("server", "site-1", 2 * MIB))
        ends: list[float] = []

        async def flush() -> None:
            await link.flush()
            ends.append(anyio.current_time())

        async with tasks() as group:
            group.start_soon(flush)
            await anyio.sleep(0.5)
            group.start_soon(flush)
        assert ends == [2, 2]
        await link.flush()


async def test_a_flush_ends_with_the_link():
    """Nobody waits for a link that is gone."""
    network = MemoryNetwork(bandwidth=1000)
    async with world(network=network) as w:
        link = driver(w.site, "server")
        link.serve_nowait(Parcel("server", "site-1", 2 * MIB))
        async with tasks() as group:
            group.start_soon(link.flush)
            await anyio.sleep(3)
            network.cut("server", "site-1")
        assert anyio.current_time() == 3


async def test_last_words_are_heard():
    """What a peer sent before it closed is taken, even when sending to it fails at once."""
    network = MemoryNetwork(latency=3, bandwidth=MIB)
    async with BaseEndpoint("site-1", transports=[network]) as site, tasks() as group:
        tx = site.publish([ComputedSource(50 * MIB)], [Slot(secrets.token_bytes(16))])
        async with BaseEndpoint("server", transports=[network]) as server:
            await site.connect("server")
            await settled_tasks()
            attempt = Attempt()
            transfer = server.transfer(tx.refs(0)[0], memory())
            group.start_soon(attempt.run, partial(server.run_transfer, transfer))
            await anyio.sleep(20)
            left_at = anyio.current_time()
        outcome = await tx.wait()
        assert outcome.reason == "receiver_failed"
        assert outcome.settled_at == left_at + 3
        await anyio.sleep(1)
        assert site.statistics().links == 0


async def test_a_peer_that_reads_nothing_loses_the_link():
    """Control frames that nobody takes are bounded: the link is lost, with a word why."""
    async with world() as w:
        w.network.partition("server", "site-1")
        link = driver(w.server, "site-1")
        for number in range(MAX_CONTROL + 200):
            link.send_nowait(Ping(id=number, reply=True))
            if number % 64 == 0:
                await anyio.lowlevel.checkpoint()
        assert isinstance(link.cause, LimitError)
        assert "reads nothing" in str(link.cause)
        await settled_tasks()
        assert w.server.statistics().links == 0
        link.send_nowait(Ping(id=1, reply=True))
        assert link.backlog == 0
        w.network.heal("server", "site-1")


async def test_a_second_hello_is_nonsense():
    """A peer that greets twice loses its link."""
    async with world(sites=0) as w, puppet(w.network) as site:
        assert site.hello is not None
        from streamoff.wire.frames import Hello
        from streamoff.wire.limits import LinkLimits

        await site.send(
            Hello(
                address=site.address,
                instance=bytes(16),
                capabilities=frozenset(),
                limits=LinkLimits(),
            )
        )
        await settled_tasks()
        assert not site.alive()


async def test_pings_are_answered():
    """A ping comes back with its number."""
    async with world(sites=0) as w:
        link = await w.network.dial(Address("x"), Address("server"))
        from .world import Puppet

        site = Puppet("x", link)
        await site.greet()
        await site.send(Ping(id=42, reply=False))
        assert (await link.receive()).frame == Ping(id=42, reply=True)
        await link.aclose()


async def test_a_defect_costs_one_link_and_not_the_endpoint(caplog, monkeypatch):
    """An unforeseen error over a frame is logged and ends its link; other links and downloads go on."""

    def defect(frame: Hold) -> None:
        raise ZeroDivisionError("a defect")

    network = MemoryNetwork()
    async with (
        BaseEndpoint("server", transports=[network]) as server,
        BaseEndpoint("site-1", transports=[network]) as site,
        puppet(network, "odd") as odd,
    ):
        monkeypatch.setattr(server.publisher, "on_hold", defect)
        await site.connect("server")
        with caplog.at_level(logging.ERROR, "streamoff.link"):
            await odd.send(Hold(**odd.route(), stream=1, seconds=1.0))
            await settled_tasks()
        assert not odd.alive()
        assert "a defect ends the link to odd" in caplog.text
        tx = site.publish([ComputedSource(MIB)], [Slot(secrets.token_bytes(16))])
        state = await server.run_transfer(server.transfer(tx.refs(0)[0], memory()))
        assert_pattern(state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


class Faulty(MemoryLink):
    """A link whose operating system fails in a way that nobody foresaw."""

    faults: list[str]

    def send_nowait(self, frame: Frame) -> bool:  # as for sockets: the writer does it
        return False

    async def send(self, item: Outbound, urgent: Urgent) -> None:
        self._fail("send")
        await super().send(item, urgent)

    async def receive(self) -> Inbound:
        inbound = await super().receive()
        self._fail("receive")
        return inbound

    def _fail(self, where: str) -> None:
        if where in self.faults:
            self.faults.remove(where)
            raise OSError(5, "Input/output error")


class FaultyNetwork(MemoryNetwork):
    """A network whose accepted links fail when they are told to."""

    def __init__(self) -> None:
        super().__init__(bandwidth=MIB)
        self.faults: list[str] = []

    def listen(self, address: Address, accept: Listener) -> None:
        def faulty(link: Link) -> anyio.Event:
            assert isinstance(link, MemoryLink)
            one = Faulty(link._out, link._into)
            one.faults = self.faults
            return accept(one)

        super().listen(address, faulty)

    async def dial(self, me: Address, to: Address) -> MemoryLink:
        if "dial" in self.faults:
            self.faults.remove("dial")
            raise OSError(24, "Too many open files")
        return await super().dial(me, to)


@pytest.mark.parametrize("where", ["send", "receive"])
async def test_a_transport_that_raises_costs_a_delay_and_no_transfer(tmp_path, where):
    """Whatever a transport raises ends its link only: the download goes on over the next one, with what has landed."""
    network = FaultyNetwork()
    async with world(network=network) as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(ComputedSource(13 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(5.5)
            network.faults.append(where)
            driver(w.server, "site-1").send_nowait(Ping(id=1, reply=where == "send"))
        assert network.faults == []
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert w.server.statistics().links_lost == 1
        w.assert_idle()


@pytest.mark.parametrize(
    ("where", "error", "most"),
    [
        ("dial", SourceLostError, 30),
        ("receive", SourceLostError, 30),
        ("send", TransferTimeoutError, 94 + 30),  # the link is back again and again, for a moment
    ],
)
async def test_a_transport_that_raises_for_good_ends_a_download_in_time(
    tmp_path, where, error, most
):
    """Where no link works any more a download ends typed and in time, and its file goes; the endpoints live on."""
    network = FaultyNetwork()
    async with world(network=network) as w, open_job("job", w.server, scratch=tmp_path) as job:
        _, ref = w.offer(ComputedSource(13 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(5.5)
            network.faults += [where] * 1000
            if where == "dial":
                network.cut("server", "site-1")
                network.mend("server", "site-1")
            else:
                driver(w.server, "site-1").send_nowait(Ping(id=1, reply=where == "send"))
        assert type(attempt.error) is error
        assert attempt.seconds <= 5.5 + most + 1
        await swept()
        assert files(job.path) == [".lease"]
        assert 0 < len(network.faults) < 1000
        network.faults.clear()
        while not w.server.statistics().links:  # noqa: ASYNC110 - whoever dialled it dials again
            await anyio.sleep(1)
        _, ref = w.offer(ComputedSource(MIB))
        assert_pattern(await w.download(ref))


async def test_frames_for_nobody_are_answered():
    """A frame for an address that cannot be reached is answered as unreachable, and costs no link."""
    from streamoff.wire.frames import FrameType, Unreachable

    async with world(sites=0) as w, puppet(w.network) as site:
        await site.send(
            Cancel(to=Address("nowhere"), sender=site.address, stream=5, ref="r", ticket=bytes(16))
        )
        answer = await site.next(Unreachable)
        assert (answer.address, answer.about, answer.of) == ("nowhere", 5, FrameType.CANCEL)
        assert site.alive()
