"""Peers that stop reading or sending, on unix sockets in virtual time: others go on, and they themselves later."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import pytest

from streamoff.errors import GoneError, StreamoffError, UnreachableError
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.link import CROWDED_BYTES, SILENCE_SECONDS
from streamoff.runtime.pool import LAPSE_SECONDS, POOL_BYTES
from streamoff.runtime.publishing import Transaction
from streamoff.transports.sockets import UnixTransport
from streamoff.types import MIB, Address, Budgets, OutcomeStatus, Slot

from ..runtime.world import (
    Attempt,
    ComputedSource,
    Gate,
    assert_pattern,
    memory,
    settled_tasks,
    tasks,
)
from .real import Cable, Net, cable, settled

pytestmark = pytest.mark.usefixtures("no_leaks")
STALLED = 10
"""More than the pool has buffers."""


@asynccontextmanager
async def star(
    net: Net, hub: str, names: list[str], *others: object
) -> AsyncIterator[tuple[BaseEndpoint, list[BaseEndpoint], list[Cable]]]:
    """An endpoint, and others that dial it, each along a cable of its own."""
    async with AsyncExitStack() as stack:
        transports = [*others, net.server(hub)]
        middle = await stack.enter_async_context(BaseEndpoint(hub, transports=transports))  # type: ignore[arg-type]
        ends, wires = [], []
        for name in names:
            directory = net.directory / name
            directory.mkdir()
            wire = await stack.enter_async_context(cable(net.places[hub], directory))
            transport = UnixTransport(peers={hub: wire.place})  # type: ignore[dict-item]
            end = await stack.enter_async_context(BaseEndpoint(name, transports=[transport]))
            await end.connect(hub)
            ends.append(end)
            wires.append(wire)
        await settled_tasks()
        yield middle, ends, wires
        for wire in wires:
            wire.go_on()


async def pull(source: BaseEndpoint, receiver: BaseEndpoint, nbytes: int, attempt: Attempt) -> None:
    """Let a receiver pull a computed payload."""
    tx = source.publish([ComputedSource(nbytes)], [Slot(secrets.token_bytes(16))])
    transfer = receiver.transfer(tx.refs(0)[0], memory())
    await attempt.run(partial(receiver.run_transfer, transfer))


async def stalled_beside_one(
    source: BaseEndpoint, ends: list[BaseEndpoint], wires: list[Cable]
) -> float:
    """Stall all lines but one in the middle of their downloads; how long that one takes.

    The others go on before they are missed, and all of them have their payload in the end.
    """
    *slow, quick = ends
    attempts = [Attempt() for _ in slow]
    alone = Attempt()
    async with anyio.create_task_group() as group:
        for wire, end, attempt in zip(wires, slow, attempts, strict=False):
            wire.stall_after(5 * MIB)
            group.start_soon(pull, source, end, 16 * MIB, attempt)
        for wire in wires[:-1]:
            await wire.reached.wait()
        await pull(source, quick, 40 * MIB, alone)
        assert alone.state is not None, alone.error
        for wire in wires[:-1]:
            wire.go_on()
    for attempt in attempts:
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        assert attempt.seconds < SILENCE_SECONDS
    return alone.seconds


async def test_receivers_that_stall_delay_nobody(unix: Net):
    """More stalled receivers than the pool has buffers do not keep a server's broadcast from another; then they go on."""
    async with star(unix, "server", [f"site-{n}" for n in range(STALLED + 1)]) as (
        server,
        sites,
        wires,
    ):
        assert await stalled_beside_one(server, sites, wires) < 20 * LAPSE_SECONDS
        assert server.resources.pool.lent == 0


async def test_receivers_that_stall_behind_a_relay_delay_nobody(unix: Net):
    """More stalled receivers behind one relay than its pool has buffers do not keep another from its payload."""
    async with BaseEndpoint("server", transports=[unix.server("server")]) as server:
        names = [f"site-1.t{n}" for n in range(STALLED + 1)]
        async with star(unix, "site-1", names, unix.client("site-1")) as (site, trainers, wires):
            await site.connect("server")
            await settled_tasks()
            assert await stalled_beside_one(server, trainers, wires) < 20 * LAPSE_SECONDS
            assert server.resources.pool.used <= POOL_BYTES
            assert site.relay.statistics().under_way == 0


async def test_sources_that_stall_delay_nobody(unix: Net):
    """More sites that stop in the middle of a chunk than the pool has buffers cost another site's upload little."""
    async with star(unix, "server", [f"site-{n}" for n in range(STALLED + 1)]) as (
        server,
        sites,
        wires,
    ):
        attempts = [Attempt() for _ in sites]
        async with anyio.create_task_group() as group:
            for wire, end, attempt in zip(wires, sites[:-1], attempts, strict=False):
                wire.stall_after(5 * MIB)
                group.start_soon(pull, end, server, 16 * MIB, attempt)
            for wire in wires[:-1]:
                await wire.reached.wait()
            await pull(sites[-1], server, 40 * MIB, attempts[-1])
            assert attempts[-1].seconds < 20 * LAPSE_SECONDS
            for wire in wires:
                wire.go_on()
        for attempt in attempts:
            assert attempt.state is not None, attempt.error
            assert_pattern(attempt.state)
            assert attempt.seconds < SILENCE_SECONDS


async def test_a_relay_takes_no_more_for_a_peer_than_that_can_get_rid_of(unix: Net):
    """Messages for a trainer that does not read are refused to their sender; neither link is lost for it."""
    names = ["site-1.reader", "site-1.writer"]
    async with star(unix, "site-1", names) as (site, (reader, writer), (wire, _)):
        wire.stall()
        refusals: list[StreamoffError | None] = []
        body = (memoryview(bytes(8 * MIB)),)
        for _ in range(12):
            writer.mailbox.post(reader.address, "t", body, on_answer=refusals.append)
            await settled_tasks()
        await settled(lambda: refusals)
        assert all(isinstance(error, UnreachableError) for error in refusals)
        driver = site.links.live[Address("site-1.reader")]
        assert driver.cause is None
        assert driver._control_bytes <= CROWDED_BYTES + 8 * MIB
        assert site.statistics().links == 2
        inbox = reader.mailbox.subscribe("t")
        wire.go_on()
        assert (await anext(inbox)).sender == writer.address
        inbox.close()


async def test_a_source_that_hangs_is_given_up_and_its_receiver_told(unix: Net):
    """A transaction that ends while its source hangs says so when its settle budget is over, along the same link."""
    gate = Gate()
    async with (
        star(unix, "server", ["site-1"]) as (server, [site], _),
        tasks(gate) as group,
    ):
        source = ComputedSource(9 * MIB, gate)
        slot = Slot(secrets.token_bytes(16))
        tx = site.publish([source], [slot], budgets=Budgets(settle=7))
        attempt = Attempt()
        transfer = server.transfer(tx.refs(0)[0], memory())
        group.start_soon(attempt.run, partial(server.run_transfer, transfer))
        await gate.reached()
        tx.cancel("no more")
        let_go = [source.closed]
        await attempt.over.wait()
        assert isinstance(attempt.error, GoneError)
        assert attempt.seconds == 7
        assert [*let_go, source.closed] == [False, True]
        assert gate.waiting == 1, "the read goes on"
        assert server.statistics().links == 1
        gate.open()


async def test_an_endpoint_whose_source_hangs_tells_before_it_can_leave(unix: Net):
    """The thread of a read that hangs keeps its endpoint; whoever waits for the outcome has it after the close timeout."""
    gate = Gate()
    told: list[float] = []

    async def wait(tx: Transaction) -> None:
        assert (await tx.wait()).status is OutcomeStatus.ABORTED
        told.append(anyio.current_time())
        await anyio.sleep(100)
        gate.open()

    async with (
        BaseEndpoint("server", transports=[unix.server("server")]) as server,
        tasks(gate) as group,
    ):
        async with BaseEndpoint("site-1", transports=[unix.client("site-1")]) as site:
            await site.connect("server")
            tx = site.publish([ComputedSource(9 * MIB, gate)], [Slot(secrets.token_bytes(16))])
            group.start_soon(wait, tx)
            attempt = Attempt()
            transfer = server.transfer(tx.refs(0)[0], memory())
            group.start_soon(attempt.run, partial(server.run_transfer, transfer))
            await gate.reached()
            left_at = anyio.current_time()
        assert told == [left_at + 5]
        assert anyio.current_time() == left_at + 5 + 100
        await attempt.over.wait()
        assert attempt.error is not None
