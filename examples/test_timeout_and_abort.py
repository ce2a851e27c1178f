"""Drive a transfer into a timeout, and into an abort, in virtual time: minutes pass in milliseconds.

The pytest plugin of streamoff gives the fixtures: ``virtual_time`` runs a test on a clock that jumps, exactly and
only when nothing real is under way; ``no_leaks`` fails a test that leaves anything behind. Run it:

    python -m pytest examples/test_timeout_and_abort.py
"""

from __future__ import annotations

import anyio
import pytest
import torch

from streamoff import Budgets, DecodeContext, Endpoint, MemoryNetwork, open_job
from streamoff.errors import TransferTimeoutError
from streamoff.testing import VirtualTime

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

UPDATE = {"weight": torch.zeros(1_000_000)}  # 4 MB


@pytest.fixture
def network() -> MemoryNetwork:
    """A network inside one event loop."""
    return MemoryNetwork()


async def test_a_source_that_falls_silent_is_given_up(
    virtual_time: VirtualTime, network: MemoryNetwork
) -> None:
    """A link that is there and brings nothing: three attempts of 10 s with pauses between, then a typed error."""
    budgets = Budgets(stall=10.0, backoff=(1.0, 2.0))
    async with (
        Endpoint("site", transports=[network]) as site,
        Endpoint("server", transports=[network], budgets=budgets) as server,
        open_job("job", server) as job,
    ):
        await site.connect("server")
        updates = server.receive("updates")
        await site.send("server", "updates", UPDATE)
        message = await anext(updates)

        network.conditions("site", "server").set(bandwidth=1.0)  # a byte per second
        begun = virtual_time.now
        with pytest.raises(TransferTimeoutError):
            await message.resolve(DecodeContext(tensors="disk", job=job))
        # on this line the answer to a new attempt waits a second for the byte that is on its way
        assert virtual_time.now - begun == 10 + 1 + (1 + 10) + 2 + (1 + 10)
        assert not list(job.path.glob("transfer-*/*"))  # nothing of it is left
        network.conditions("site", "server").set(bandwidth=1e9)


async def test_an_abort_stops_a_transfer_at_once(
    virtual_time: VirtualTime, network: MemoryNetwork
) -> None:
    """A receiver that is cancelled half way: its disk is free, and the source hears it without waiting."""
    async with (
        Endpoint("site", transports=[network]) as site,
        Endpoint("server", transports=[network]) as server,
        open_job("job", server) as job,
    ):
        await site.connect("server")
        updates = server.receive("updates")
        delivery = await site.send("server", "updates", UPDATE)
        message = await anext(updates)

        network.conditions("site", "server").set(bandwidth=100_000)
        with anyio.move_on_after(15) as abort:
            await message.resolve(DecodeContext(tensors="disk", job=job))
        assert abort.cancelled_caught

        outcome = await delivery.wait()
        assert outcome.status == "failed"
        assert outcome.slots["server"][next(iter(outcome.slots["server"]))].reason == (
            "cancelled: the receiver was cancelled"
        )
        assert virtual_time.now == 15.0


async def test_the_end_of_a_job_cuts_what_outstays_the_window(
    virtual_time: VirtualTime, network: MemoryNetwork
) -> None:
    """A consumer that does not stop gets the drain window to the second; then it is cut, and the report says so."""

    async def never_ends() -> None:
        await anyio.sleep_forever()

    async with Endpoint("server", transports=[network]) as server:
        async with open_job("job", server, drain_window=30.0) as job:
            job.start(never_ends, name="a consumer")
            await anyio.sleep(100)
        assert virtual_time.now == 130.0
        assert [(one.name, one.end) for one in job.report.consumers] == [("a consumer", "cut")]
        assert job.report.removed
