"""A receiver and a source, side by side or with a relay between them, with a way that takes its time."""

import secrets
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.publishing import Transaction
from streamoff.tensors.sources import Source
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Capability, Ref, Slot

from .world import World, numbers, watched

PLACES = ["direct", "behind a relay", "below a relay"]
"""The source beside the receiver, below a relay that is below the receiver, or above a relay."""

LATENCY = 1.0
NBYTES = 9 * MIB
"""Of the payload: three chunks."""


@dataclass(frozen=True)
class Ends:
    """Who pulls, who serves, and how long a word takes from one to the other."""

    world: World
    receiver: BaseEndpoint
    source: BaseEndpoint
    way: float

    def offer(self) -> tuple[Transaction, Ref, list[weakref.ref[Any]]]:
        """Two payloads for one slot; only the first will be opened."""
        source, references = watched({"w": numbers(NBYTES // 4)})
        other, more = watched({"w": numbers(100)})
        tx = self.publish(source, other)
        return tx, tx.refs(0)[0], [*references, *more]

    def publish(self, *sources: Source) -> Transaction:
        """Payloads for one slot of the receiver's."""
        slot = Slot(secrets.token_bytes(16), self.receiver.address)
        return self.source.publish(list(sources), [slot])


@asynccontextmanager
async def ends(
    where: str,
    *,
    latency: float = LATENCY,
    receiver: Iterable[Capability] = tuple(Capability),
    source: Iterable[Capability] = tuple(Capability),
) -> AsyncIterator[Ends]:
    """Connect them; what each can do is given."""
    network = MemoryNetwork(latency=latency)
    below = where == "below a relay"
    async with AsyncExitStack() as stack:

        async def enter(
            address: str, capabilities: Iterable[Capability], uplink: str | None = None
        ) -> BaseEndpoint:
            end = BaseEndpoint(address, transports=[network], capabilities=capabilities, seed=1)
            await stack.enter_async_context(end)
            if uplink is not None:
                await end.connect(uplink)
            return end

        top, bottom = (source, receiver) if below else (receiver, source)
        server = await enter("server", top)
        if where == "direct":
            both = [await enter("site-1", bottom, "server")]
        else:
            site = await enter("site-1", tuple(Capability), "server")
            both = [site, await enter("site-1.trainer", bottom, "site-1")]
        await anyio.sleep(2 * latency)
        world = World(network, server, both)
        pulls, serves = (both[-1], server) if below else (server, both[-1])
        yield Ends(world, pulls, serves, latency * len(both))
        await anyio.sleep(10 * latency)
        relay = both[0].statistics().relay
        assert (relay.streams, relay.under_way, relay.held) == (0, 0, 0)
