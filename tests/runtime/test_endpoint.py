"""The life of an endpoint: how it is entered, how it is left, and what is left of it."""

import gc
import secrets
from functools import partial

import anyio
import pytest

from streamoff.errors import (
    HandshakeError,
    LinkLostError,
    UnreachableError,
    UsageError,
)
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, OutcomeStatus, Slot

from ..soon import soon
from .world import (
    Attempt,
    ComputedSource,
    Gate,
    assert_same,
    memory,
    settled_tasks,
    state_dict,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


async def until_linked(endpoint: BaseEndpoint, count: int = 1) -> None:
    """Wait until an endpoint has so many links."""
    while endpoint.statistics().links != count:  # noqa: ASYNC110 - a counter
        await anyio.sleep(0.01)


async def test_an_address_that_is_taken_is_refused_on_entry():
    """Two endpoints cannot listen under one address, and the second leaves nothing behind."""
    network = MemoryNetwork()
    async with BaseEndpoint("a", transports=[network]):
        with pytest.raises(UsageError, match="taken"):
            await BaseEndpoint("a", transports=[network]).__aenter__()


async def test_leaving_tells_everybody():
    """An endpoint that closes aborts what it serves and cancels what it downloads, and both peers hear of it."""
    network = MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w:
        async with tasks() as group:
            serving, pulling = Attempt(), Attempt()
            async with BaseEndpoint("guest", transports=[network]) as guest:
                await guest.connect("server")
                own = guest.publish([ComputedSource(50 * MIB)], [Slot(secrets.token_bytes(16))])
                theirs = w.server.publish(
                    [ComputedSource(50 * MIB)], [Slot(secrets.token_bytes(16))]
                )
                group.start_soon(serving.run, partial(w.download, own.refs(0)[0]))
                transfer = guest.transfer(theirs.refs(0)[0], memory())
                group.start_soon(pulling.run, partial(guest.run_transfer, transfer))
                await anyio.sleep(5.1)
            assert anyio.current_time() <= 5.1 + 1
            assert (await own.wait()).status is OutcomeStatus.ABORTED
            assert (await theirs.wait()).status is OutcomeStatus.FAILED
            assert "guest" in (await theirs.wait()).slots
        assert "the endpoint is closing" in str(serving.error)
        assert "the endpoint is closing" in str(pulling.error)


async def test_leaving_a_partitioned_network_is_bounded():
    """An endpoint whose peers are silent leaves within its close timeout."""
    async with world() as w:
        async with BaseEndpoint("guest", transports=[w.network], close_timeout=3) as guest:
            await guest.connect("server")
            w.network.partition("guest", "server")
            for _ in range(200):
                guest.mailbox.post(Address("server"), "topic", ())
            await anyio.sleep(1)
        assert anyio.current_time() == 1 + 3
        w.network.heal("guest", "server")


async def test_an_error_of_the_body_comes_out_as_it_is():
    """What the body of an endpoint raises is not wrapped in a group."""
    network = MemoryNetwork()

    async def body() -> None:
        async with (
            BaseEndpoint("a", transports=[network]),
            BaseEndpoint("b", transports=[network]) as b,
        ):
            await b.connect("a")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await body()


async def test_dialling_an_endpoint_that_is_about_to_close_hangs_nobody():
    """A link that arrives in whichever instant of a peer's closing ends with it."""
    for steps in range(12):
        network = MemoryNetwork()
        a, b = (BaseEndpoint(name, transports=[network]) for name in "ab")

        async def dial(a: BaseEndpoint = a) -> None:
            try:
                await a.connect("b")
            except (UnreachableError, HandshakeError, LinkLostError):
                return

        async with a, tasks() as group, b:
            group.start_soon(dial)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()


async def test_a_download_that_blocks_delays_the_links_only_so_long():
    """With a landing stuck in a thread an endpoint closes its links in time; itself it waits for the thread."""
    from streamoff.runtime.downloading import Terms

    from .world import in_memory

    network = MemoryNetwork()
    gate = Gate()
    async with BaseEndpoint("site-1", transports=[network]) as site, tasks(gate) as group:
        attempt = Attempt()

        async def later() -> None:
            await anyio.sleep(60)
            assert site.statistics().links == 0
            gate.open()

        async with BaseEndpoint("server", transports=[network], close_timeout=2) as server:
            await site.connect("server")
            tx = site.publish([ComputedSource(9 * MIB)], [Slot(secrets.token_bytes(16))])
            terms = Terms(landing=in_memory(write=gate))
            transfer = server.transfer(tx.refs(0)[0], terms)
            group.start_soon(attempt.run, partial(server.run_transfer, transfer))
            await gate.reached()
            group.start_soon(later)
        assert anyio.current_time() == 60
        assert (await tx.wait()).settled_at == 0
        assert attempt.error is not None


async def test_leaving_keeps_nothing(tmp_path):
    """After many rounds of links, downloads and messages an endpoint's tables are as they were after the first."""
    async with world(sites=5) as w:

        async def one_round() -> None:
            for site in w.sites:
                tx, ref = w.offer(state_dict(0.01), site=site)
                assert_same(await w.download(ref), state_dict(0.01))
                await tx.wait()
            w.network.cut("server", "site-1")
            w.network.mend("server", "site-1")
            await settled_tasks()
            await until_linked(w.server, 5)
            await settled_tasks()

        def counted() -> dict[str, int]:
            kinds: dict[str, int] = {}
            for thing in gc.get_objects():
                name = str(type(thing).__module__)
                if name.startswith(
                    ("streamoff.runtime", "streamoff.transports", "streamoff.tensors")
                ):
                    kinds[type(thing).__name__] = kinds.get(type(thing).__name__, 0) + 1
            return kinds

        def grown(before: dict[str, int]) -> dict[str, tuple[int, int]]:
            return {
                kind: (before.get(kind, 0), count)
                for kind, count in counted().items()
                if count > before.get(kind, 0)
            }

        await one_round()
        assert soon(lambda: "Transfer" not in counted())
        before, timers = counted(), w.server.statistics().timers
        for _ in range(9):
            await one_round()
        await anyio.sleep(1900)  # tombstones included
        await one_round()
        assert soon(lambda: grown(before) == {}), grown(before)
        assert w.server.statistics().timers <= timers
