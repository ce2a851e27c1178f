"""Three in a line over real sockets: what passes a relay arrives, and who does not read delays only itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Endpoint
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.tensors.sources import StateDictSource
from streamoff.types import CHUNK_BYTES, MIB, OutcomeStatus

from ..runtime.world import (
    ComputedSource,
    assert_pattern,
    assert_same,
    disk,
    memory,
    state_dict,
)
from .real import Cable, Consortium, Net, cable, every_loop, settled  # noqa: F401 - a fixture
from .test_sockets import offer

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_leaks")]


@asynccontextmanager
async def line(net: Net) -> AsyncIterator[tuple[Endpoint, Endpoint, Endpoint]]:
    """A server, a site that dials it, and a trainer that only the site can reach."""
    async with Endpoint("server", transports=[net.server("server")]) as server:
        dial, listen = net.client("site-1"), net.server("site-1")
        async with Endpoint("site-1", transports=[dial, listen]) as site:
            await site.connect("server")
            transport = net.client("site-1.t")
            async with Endpoint("site-1.t", transports=[transport]) as trainer:
                await trainer.connect("site-1")
                await settled(lambda: site.statistics().links == 2 and server.statistics().links)
                yield server, site, trainer


async def test_messages_and_payloads_pass_both_ways(net: Net, tmp_path):
    """A server and a trainer that have no link exchange messages and payloads through the site between them."""
    tensors = state_dict(9)
    async with line(net) as (server, site, trainer):
        async with open_job("job", server, scratch=tmp_path) as job:
            tx, ref = offer(trainer, StateDictSource(tensors))
            assert_same(await job.download(ref, disk(job)), tensors)
            assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        tx, ref = offer(server, ComputedSource(9 * MIB), to="site-1.t")
        assert_pattern(await trainer.run_transfer(trainer.transfer(ref, memory())))
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED

        # the trainer's result is kept by the site as a ref, and ends at the server
        kept, arrived = site.receive("result"), server.receive("result")
        await trainer.send("site-1", "result", {"params": tensors}, pass_through=True)
        tree = await (await anext(kept)).decode()
        await site.send("server", "result", tree)
        params = (await (await anext(arrived)).decode(DecodeContext()))["params"]
        assert params["large"].equal(tensors["large"])
        assert site.statistics().publisher.bytes_served == 0
        await settled(lambda: not site.relay.statistics().under_way)
        assert site.relay.statistics().held == 0
        assert site.resources.pool.lent == 0


async def test_a_cut_behind_the_relay_is_told_and_resumed(unix: Net, tmp_path):
    """A trainer whose cable to its site is cut in the middle is found again; no landed range travels twice."""
    net = unix
    async with (
        BaseEndpoint("server", transports=[net.server("server")]) as server,
        BaseEndpoint(
            "site-1", transports=[net.client("site-1"), net.server("site-1")], seed=1
        ) as site,
        cable(net.places["site-1"], net.directory) as wire,
    ):
        await site.connect("server")
        transport = net.client("site-1.t", instead={"site-1": wire.place})
        async with BaseEndpoint("site-1.t", transports=[transport], seed=1) as trainer:
            await trainer.connect("site-1")
            await settled(lambda: site.statistics().links == 2)
            async with open_job("job", server, scratch=tmp_path) as job:
                tx, ref = offer(trainer, ComputedSource(40 * MIB))
                wire.cut_after(24 * MIB)

                async def mend() -> None:
                    await wire.reached.wait()
                    await settled(lambda: site.statistics().links == 1)
                    wire.mend()

                async with anyio.create_task_group() as group:
                    group.start_soon(mend)
                    state = await job.download(ref, disk(job))
                assert_pattern(state)
                served = trainer.statistics().publisher.bytes_served
                assert served <= ref.size + 9 * CHUNK_BYTES
                assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert wire.connections == 2
