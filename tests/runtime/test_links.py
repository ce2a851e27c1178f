"""The links of an endpoint: dialled, kept, lost, replaced; the uplink; and peers that restart."""

import secrets
from contextlib import AsyncExitStack
from functools import partial

import anyio
import pytest

from streamoff.errors import (
    HandshakeError,
    LinkLostError,
    SourceFailedError,
    UnreachableError,
    UsageError,
)
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.link import KEEPALIVE_SECONDS, SILENCE_SECONDS
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, OutcomeStatus, Slot

from .world import (
    Attempt,
    ComputedSource,
    Puppet,
    assert_pattern,
    memory,
    puppet,
    settled_tasks,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


def link(of: BaseEndpoint, to: str):
    """The live link of an endpoint to another."""
    return of.links.live.get(Address(to))


async def until_linked(endpoint: BaseEndpoint, count: int = 1) -> None:
    """Wait until an endpoint has so many links."""
    while endpoint.statistics().links != count:  # noqa: ASYNC110 - a counter
        await anyio.sleep(0.01)


async def test_connecting_to_nobody_fails_at_once():
    """Dialling an address where nobody listens is an error that names it, and may be tried again."""
    network = MemoryNetwork()
    async with BaseEndpoint("a", transports=[network]) as a:
        with pytest.raises(UnreachableError, match="b"):
            await a.connect("b")
        async with BaseEndpoint("b", transports=[network]):
            await a.connect("b")
            await until_linked(a)


async def test_an_endpoint_without_transports_says_what_it_lacks():
    """Without a transport no address can be dialled."""
    async with BaseEndpoint("a") as a:
        with pytest.raises(UnreachableError, match="no transport"):
            await a.connect("b")


async def test_connecting_twice_is_refused():
    """An endpoint that is being kept is not dialled a second time."""
    async with world() as w:
        with pytest.raises(UsageError, match="connected already"):
            await w.site.connect("server")
        assert w.server.statistics().links == 1


async def test_an_endpoint_does_not_connect_to_itself():
    """Its own address is nobody else's."""
    network = MemoryNetwork()
    async with BaseEndpoint("a", transports=[network]) as a:
        with pytest.raises(HandshakeError, match="my own address"):
            await a.connect("a")


async def test_an_idle_link_lives():
    """Without traffic, keep-alives hold a link for hours."""
    async with world() as w:
        first = link(w.server, "site-1")
        await anyio.sleep(3 * 3600)
        assert link(w.server, "site-1") is first


async def test_silence_is_noticed_after_fifteen_seconds():
    """A link over which nothing comes is lost 15 s after the last frame, on both sides, and not before."""
    async with world() as w:
        await anyio.sleep(2 * KEEPALIVE_SECONDS + 0.5)
        sides = [link(w.server, "site-1"), link(w.site, "server")]
        w.network.partition("server", "site-1")
        await anyio.sleep(SILENCE_SECONDS - 0.501)
        assert [side.cause for side in sides] == [None, None]
        await anyio.sleep(0.002)
        for side in sides:
            assert isinstance(side.cause, LinkLostError)
            assert "silent" in str(side.cause)
        w.network.heal("server", "site-1")


@pytest.mark.parametrize("latency", [0.1, 0.2, 0.3, 0.7, 1 / 3, 1.1, 2.3])
async def test_silence_is_noticed_whatever_the_instant(latency):
    """A last frame at an odd instant is counted from like any other: the clock does not stand still over a rounding."""
    async with world(network=MemoryNetwork(latency=latency)) as w:
        await anyio.sleep(12)
        w.network.partition("server", "site-1")
        with anyio.fail_after(SILENCE_SECONDS + 0.001):
            while w.server.statistics().links or w.site.statistics().links:  # noqa: ASYNC110
                await anyio.sleep(0.25)
        w.network.heal("server", "site-1")


async def test_one_direction_that_is_dead_is_a_dead_link():
    """When only one direction is cut off, its far end notices the silence, and both end the link."""
    async with world() as w:
        sides = [link(w.server, "site-1"), link(w.site, "server")]
        w.network.conditions("site-1", "server").set(partitioned=True)
        await anyio.sleep(SILENCE_SECONDS + KEEPALIVE_SECONDS)
        assert all(side.cause is not None for side in sides)
        w.network.conditions("site-1", "server").set(partitioned=False)
        await anyio.sleep(12)
        assert link(w.server, "site-1") is not None
        assert link(w.site, "server") is not None


async def test_a_lost_link_is_dialled_again_until_it_is_there():
    """A kept link that is cut comes back within seconds of the network's return, however long that took."""
    async with world() as w:
        w.network.cut("server", "site-1")
        await anyio.sleep(3600)
        assert w.server.statistics().links == 0
        w.network.mend("server", "site-1")
        with anyio.fail_after(5.1):
            await until_linked(w.server)


async def test_two_ends_that_dial_each_other_settle_on_one_link():
    """When both ends dial, one link stays in service, and it is not replaced again and again."""
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(BaseEndpoint("a", transports=[network], seed=1))
        b = await stack.enter_async_context(BaseEndpoint("b", transports=[network], seed=2))
        await a.connect("b")
        await b.connect("a")
        await anyio.sleep(30)
        links = link(a, "b"), link(b, "a")
        assert None not in links
        await anyio.sleep(600)
        assert (link(a, "b"), link(b, "a")) == links
        tx = a.publish([ComputedSource(MIB)], [Slot(secrets.token_bytes(16))])
        assert_pattern(await b.run_transfer(b.transfer(tx.refs(0)[0], memory())))


async def test_only_the_first_connection_is_the_uplink():
    """What an endpoint dials after its uplink may speak for itself only."""
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        up, peer, a = [
            await stack.enter_async_context(BaseEndpoint(name, transports=[network]))
            for name in ("up", "peer", "a")
        ]
        async with anyio.create_task_group() as group:
            group.start_soon(a.connect, "up")
            await anyio.lowlevel.checkpoint()
            group.start_soon(a.connect, "peer")
        uplinks = {str(one): driver.uplink for one, driver in a.links.live.items()}
        assert sorted(uplinks) == ["peer", "up"]
        assert sum(uplinks.values()) == 1
        assert uplinks[str(a.links.uplink)]
        assert not any(
            driver.uplink for driver in (*up.links.live.values(), *peer.links.live.values())
        )


async def test_a_failed_first_connection_is_no_uplink():
    """When the first dial fails the next one becomes the way out."""
    network = MemoryNetwork()
    async with (
        BaseEndpoint("b", transports=[network]),
        BaseEndpoint("a", transports=[network]) as a,
    ):
        with pytest.raises(UnreachableError):
            await a.connect("absent")
        await a.connect("b")
        assert a.links.uplink == "b"


async def test_connecting_can_be_given_up_in_any_instant():
    """A dial that is cancelled leaves no link, and can be made again."""
    network = MemoryNetwork(latency=0.001)
    a, b = (BaseEndpoint(name, transports=[network]) for name in "ab")
    async with b, a:
        for steps in range(10):
            with anyio.move_on_after(0.0005 * steps):
                await a.connect("b")
                break
            await anyio.sleep(0.1)
            assert a.statistics().links == 0
            assert b.statistics().links == 0
        await until_linked(a)
        await until_linked(b)


# --- restarts -------------------------------------------------------------------------------------


async def test_a_source_that_restarts_ends_its_downloads_at_once():
    """A new instance of a source's address ends downloads from the old one, which could never go on."""
    before, after = MemoryNetwork(bandwidth=MIB), MemoryNetwork()
    old = BaseEndpoint("site-1", transports=[before])
    new = BaseEndpoint("site-1", transports=[after])
    attempt = Attempt()
    async with (
        BaseEndpoint("server", transports=[before, after]) as server,
        old,
        new,
        tasks() as group,
    ):
        await old.connect("server")
        tx = old.publish([ComputedSource(20 * MIB)], [Slot(secrets.token_bytes(16))])
        transfer = server.transfer(tx.refs(0)[0], memory())
        group.start_soon(attempt.run, partial(server.run_transfer, transfer))
        await anyio.sleep(5)
        before.cut("server", "site-1")
        await anyio.sleep(2)
        assert not attempt.over.is_set()
        await new.connect("server")
        await attempt.over.wait()
        assert anyio.current_time() == 7
        tx.cancel()
    assert isinstance(attempt.error, SourceFailedError)
    assert "restarted" in str(attempt.error)


async def test_a_receiver_that_restarts_frees_its_slots_at_once():
    """A new instance of a receiver's address fails the slots of the old one: nobody pins the source for it."""
    async with world(sites=0) as w:
        first = await Puppet.dial(w.network, "site-1", "server")
        slots = [Slot(secrets.token_bytes(16), Address(name)) for name in ("site-1", "site-2")]
        tx = w.server.publish([ComputedSource(9 * MIB)], slots)
        async with tasks() as group:
            group.start_soon(first.listen)
            await first.open(tx.refs(0)[0])
            await first.link.aclose()
        await anyio.sleep(20)
        assert not tx.record.servings[0, tx.record.refs[0]].final
        async with puppet(w.network, "site-1"):
            await settled_tasks()
            verdict = tx.record.servings[0, tx.record.refs[0]].verdict
            assert "restarted" in verdict.reason
        assert tx.outcome is None  # the other slot is still open
        tx.cancel()


async def test_a_peer_that_only_reconnects_is_the_same():
    """The same instance over a new link is no restart: its slots and downloads go on."""
    async with world(network=MemoryNetwork(bandwidth=4 * MIB)) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(2.5)
            w.network.cut("server", "site-1")
            w.network.mend("server", "site-1")
        assert attempt.state is not None
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
