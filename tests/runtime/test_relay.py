"""Forwarding: what passes through an endpoint arrives, costs it a bounded memory, and delays only who is slow."""

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import pytest

from streamoff.errors import SourceFailedError, SourceLostError, UnreachableError
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.relay import STREAM_PULLS
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, OutcomeStatus, Ref, Slot
from streamoff.wire.frames import Cancel, Open, Unreachable

from .world import (
    Attempt,
    ComputedSource,
    Gate,
    World,
    assert_pattern,
    assert_same,
    memory,
    puppet,
    settled_tasks,
    state_dict,
    tasks,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


@asynccontextmanager
async def chain(network: MemoryNetwork | None = None, trainers: int = 1) -> AsyncIterator[World]:
    """A server, a site below it, and the site's trainers, which only the site can reach; the trainers are its sites."""
    network = network or MemoryNetwork()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(BaseEndpoint("server", transports=[network]))
        site = await stack.enter_async_context(BaseEndpoint("site-1", transports=[network], seed=1))
        await site.connect("server")
        ends = [site]
        for number in range(trainers):
            end = BaseEndpoint(f"site-1.t{number}", transports=[network], seed=number)
            ends.append(await stack.enter_async_context(end))
            await end.connect("site-1")
        while site.statistics().links < 1 + trainers or not server.statistics().links:
            await anyio.lowlevel.checkpoint()
        yield World(network, server, ends)
        await anyio.sleep(1)
        relay = site.statistics().relay
        assert (relay.under_way, relay.held) == (0, 0)


@pytest.mark.parametrize(("through", "mebibytes"), [(False, 4), (True, 2)])
async def test_less_is_pulled_at_once_from_behind_a_relay(through: bool, mebibytes: int) -> None:
    """Several chunks of a stream wait in a relay, so they are half as large as over a link of one's own."""
    starts: list[int] = []
    async with chain() as w:
        source = ComputedSource(13 * MIB, starts.append)
        tx, ref = w.offer(source, site=w.sites[int(through)])
        assert_pattern(await w.download(ref))
        await tx.wait()
        assert sorted(starts) == list(range(0, ref.size, mebibytes * MIB))
        w.assert_idle()


@pytest.mark.parametrize("mebibytes", [0.001, 3, 21])
async def test_a_payload_passes_through_a_relay(mebibytes):
    """A server pulls from a trainer behind a site, bit for bit, and every byte passes once."""
    async with chain() as w:
        tx, ref = w.offer(state_dict(mebibytes), site=w.sites[1])
        assert_same(await w.download(ref), state_dict(mebibytes))
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert w.site.statistics().relay.bytes_forwarded == ref.size
        w.assert_idle()


async def test_a_broadcast_passes_through_a_relay():
    """Trainers behind a site pull from the server, all at once."""
    async with chain(trainers=4) as w:
        slots = [Slot(secrets.token_bytes(16), end.address) for end in w.sites[1:]]
        tx = w.server.publish([ComputedSource(9 * MIB)], slots)
        attempts = [Attempt() for _ in slots]
        async with tasks() as group:
            for index, (attempt, end) in enumerate(zip(attempts, w.sites[1:], strict=True)):
                transfer = end.transfer(tx.refs(index)[0], memory())
                group.start_soon(attempt.run, partial(end.run_transfer, transfer))
        for attempt in attempts:
            assert attempt.state is not None
            assert_pattern(attempt.state)
        assert len((await tx.wait()).succeeded) == 4
        w.assert_idle()


async def test_neighbours_pull_from_each_other_through_their_site():
    """Two trainers of one site reach each other by way of it, and the server sees none of it."""
    async with chain(trainers=2) as w:
        _, first, second = w.sites
        tx, ref = w.offer(state_dict(5), site=first, to=None)
        assert_same(await second.run_transfer(second.transfer(ref, memory())), state_dict(5))
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert w.server.statistics().relay.bytes_forwarded == 0


async def test_messages_pass_and_are_acknowledged_from_end_to_end():
    """A message to an endpoint behind a relay arrives once, with its own sender, and its poster hears of it."""
    async with chain() as w:
        inbox = w.sites[1].mailbox.subscribe("tasks")
        answers: list[object] = []
        w.server.mailbox.post(
            Address("site-1.t0"), "tasks", (memoryview(b"x"),), on_answer=answers.append
        )
        parcel = await anext(inbox)
        assert (parcel.sender, bytes(parcel.body[0])) == ("server", b"x")
        await settled_tasks()
        assert answers == [None]


async def test_nobody_there_is_said_by_the_relay():
    """A message to an endpoint that a relay does not know is refused by it, and a download of it waits the grace out."""
    async with chain() as w:
        answers: list[object] = []
        w.server.mailbox.post(Address("site-1.gone"), "tasks", (), on_answer=answers.append)
        await settled_tasks()
        assert isinstance(answers[0], UnreachableError)
        ref = Ref(Address("site-1.gone"), "r1", secrets.token_bytes(16), 100)
        attempt = Attempt()
        await attempt.run(partial(w.download, ref))
        assert isinstance(attempt.error, SourceLostError)
        assert attempt.seconds == 30


async def test_a_trainer_that_comes_back_in_time_is_found_again():
    """A link behind the relay that is cut and mended costs seconds: the relay is asked again and again."""
    async with chain(MemoryNetwork(bandwidth=4 * MIB)) as w:
        tx, ref = w.offer(ComputedSource(21 * MIB), site=w.sites[1])
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(2.5)
            w.network.cut("site-1", "site-1.t0")
            await anyio.sleep(8)
            w.network.mend("site-1", "site-1.t0")
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert attempt.seconds < 6 + 8 + 12
        w.assert_idle()


async def test_a_relay_that_loses_its_uplink_resumes():
    """A cut between server and site is survived by what passes through."""
    async with chain(MemoryNetwork(bandwidth=4 * MIB)) as w:
        tx, ref = w.offer(ComputedSource(21 * MIB), site=w.sites[1])
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(2.5)
            w.network.cut("server", "site-1")
            await anyio.sleep(5)
            w.network.mend("server", "site-1")
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        w.assert_idle()


async def test_a_cancel_passes_a_relay():
    """Giving up is heard behind the relay, and the relay keeps nothing of the stream."""
    async with chain(MemoryNetwork(bandwidth=MIB)) as w:
        tx, ref = w.offer(ComputedSource(40 * MIB), site=w.sites[1])
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(20)
            attempt.scope.cancel()
        outcome = await tx.wait()
        assert outcome.reason == "receiver_failed"
        assert outcome.settled_at <= 20 + 1
        await anyio.sleep(10)
        assert w.site.statistics().relay.streams == 0
        w.assert_idle()


@pytest.mark.parametrize(
    ("source", "hub", "first"), [("site-2", "server", 1000), ("site-1.p", "site-1", 0)]
)
async def test_a_relay_lets_nothing_through_that_nobody_pulls(source, hub, first):
    """Directly, an open takes the first bytes along with the answer; through a relay they have to be pulled."""
    async with chain() as w, puppet(w.network, source, hub) as site:
        attempt = Attempt()
        ref = Ref(site.address, "r1", secrets.token_bytes(16), 1000)
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            assert (await site.next(Open)).first == first
            attempt.scope.cancel()


async def test_a_stream_has_two_chunks_in_a_relay():
    """A receiver behind a slow line has at most two chunks of a stream in the relay; further pulls wait there."""
    network = MemoryNetwork()
    async with chain(network) as w:
        network.conditions("site-1", "server").set(bandwidth=MIB)
        tx, ref = w.offer(ComputedSource(60 * MIB), site=w.sites[1])
        most = held = 0
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            while not attempt.over.is_set():
                relay = w.site.statistics().relay
                most, held = max(most, relay.under_way), max(held, relay.held)
                await anyio.sleep(0.5)
        assert attempt.state is not None, attempt.error
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert most <= STREAM_PULLS
        assert held > 0
        w.assert_idle()


async def test_a_slow_receiver_behind_a_relay_delays_only_itself():
    """Beside a trainer on a line a hundred times slower, another one has its payload as fast as alone."""
    times = []
    for slow in (False, True):
        network = MemoryNetwork(latency=0.001)
        async with chain(network, trainers=2) as w:
            network.conditions("site-1", "site-1.t0").set(bandwidth=40_000)
            network.conditions("site-1", "site-1.t1").set(bandwidth=4 * MIB)
            _, first, second = w.sites
            async with tasks() as group:
                dawdler = Attempt()
                if slow:
                    one = w.server.publish([ComputedSource(50 * MIB)], [slot()])
                    transfer = first.transfer(one.refs(0)[0], memory())
                    group.start_soon(dawdler.run, partial(first.run_transfer, transfer))
                    await anyio.sleep(5)
                two = w.server.publish([ComputedSource(20 * MIB)], [slot()])
                attempt = Attempt()
                transfer = second.transfer(two.refs(0)[0], memory())
                await attempt.run(partial(second.run_transfer, transfer))
                assert attempt.state is not None, attempt.error
                assert_pattern(attempt.state)
                times.append(attempt.seconds)
                dawdler.scope.cancel()
    alone, beside = times
    assert beside <= alone + 1


def slot() -> Slot:
    """A slot for whoever has the ticket."""
    return Slot(secrets.token_bytes(16))


async def test_a_receiver_that_reads_nothing_costs_the_relay_nothing():
    """A receiver whose landing hangs keeps its own pulls back; the relay's other streams go on."""
    gate = Gate()
    from streamoff.runtime.downloading import Terms

    from .world import in_memory

    async with chain(trainers=2) as w, tasks(gate) as group:
        _, first, second = w.sites
        one = w.server.publish([ComputedSource(60 * MIB)], [slot()])
        stuck = Attempt()
        transfer = first.transfer(one.refs(0)[0], Terms(landing=in_memory(write=gate)))
        group.start_soon(stuck.run, partial(first.run_transfer, transfer))
        await gate.reached()
        two = w.server.publish([ComputedSource(20 * MIB)], [slot()])
        state = await second.run_transfer(second.transfer(two.refs(0)[0], memory()))
        assert_pattern(state)
        assert anyio.current_time() < 5
        stuck.scope.cancel()
        gate.open()


async def test_a_notice_about_somebody_below_passes():
    """A site that declares its trainer dead ends the server's download from it, through itself."""
    async with chain(MemoryNetwork(bandwidth=MIB)) as w:
        tx, ref = w.offer(ComputedSource(40 * MIB), site=w.sites[1])
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(10)
            told = await w.site.notify_failure(["server"], "site-1.t0", [ref.id], "exit code -9")
        assert told == {Address("server"): ""}
        assert isinstance(attempt.error, SourceFailedError)
        tx.cancel()
        await anyio.sleep(40)


async def test_frames_do_not_go_in_circles():
    """A frame whose hops are used up is answered as unreachable and goes no further."""
    async with chain() as w, puppet(w.network, "stray", "server") as stray:
        await stray.send(
            Cancel(
                to=Address("site-1.t0"),
                sender=stray.address,
                stream=3,
                ref="r",
                ticket=bytes(16),
                hops=0,
            )
        )
        answer = await stray.next(Unreachable)
        assert (answer.address, answer.about) == ("site-1.t0", 3)


async def test_nobody_speaks_through_a_relay_for_somebody_else():
    """A trainer that sends in its neighbour's name loses its link to the site; the site keeps its own."""
    async with chain() as w, puppet(w.network, "site-1.liar", "site-1") as liar:
        await liar.send(
            Cancel(
                to=Address("server"),
                sender=Address("site-1.t0"),
                stream=1,
                ref="r",
                ticket=bytes(16),
            )
        )
        await settled_tasks()
        assert not liar.alive()
        assert w.server.statistics().links == 1
        assert w.site.statistics().links == 2
