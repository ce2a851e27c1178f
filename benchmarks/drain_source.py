"""The source of the drain suite: it offers payloads at a conductor's orders, and says when each was over.

Times are the event loop's, which on Linux all processes of a machine share.
"""

import json
import secrets
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

from benchmarks.orders import read_order, say
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.publishing import Transaction
from streamoff.sim.memory import warm_torch
from streamoff.tensors.sources import StateDictSource
from streamoff.transports.sockets import UnixTransport
from streamoff.types import Slot

SERVER, SOURCE = "server", "source"


class Source:
    """What the process offers; every public method is an order.

    Args:
        endpoint: Its own.
        nbytes: Of the one tensor that all payloads share.
    """

    def __init__(self, endpoint: BaseEndpoint, nbytes: int) -> None:
        self._endpoint = endpoint
        self._model = {"w": torch.empty(nbytes // 4).uniform_(-1.0, 1.0)}
        self._offered: list[Transaction] = []

    async def offer(self, count: int) -> dict[str, Any]:
        """Offer so many payloads, each in a transaction of its own."""
        self._offered = [
            self._endpoint.publish([StateDictSource(self._model)], [Slot(secrets.token_bytes(16))])
            for _ in range(count)
        ]
        refs = [tx.refs(0)[0] for tx in self._offered]
        return {"refs": [(ref.id, ref.ticket.hex(), ref.size) for ref in refs]}

    async def settled(self) -> dict[str, Any]:
        """Wait until all of them are over, and say when each was."""
        return {"at": [(await tx.wait()).settled_at for tx in self._offered]}

    async def withdraw(self) -> dict[str, Any]:
        """End what is left of them."""
        for tx in self._offered:
            tx.cancel()
        return {}

    async def fail(self) -> dict[str, Any]:
        """Tell the receiver that none of them can be had; say when that began."""
        begun = anyio.current_time()
        refs = [ref for tx in self._offered for ref in tx.record.refs]
        await self._endpoint.notify_failure([SERVER], SOURCE, refs, "the benchmark says so")
        return {"at": begun}


async def play(settings: dict[str, Any]) -> None:
    """Be the source until the input ends."""
    warm_torch()
    transport = UnixTransport(peers={SERVER: Path(settings["socket"])})
    async with BaseEndpoint(SOURCE, transports=[transport]) as endpoint:
        source = Source(endpoint, settings["nbytes"])
        await endpoint.connect(SERVER)
        say({"number": 0})
        while order := await anyio.to_thread.run_sync(read_order, abandon_on_cancel=True):
            number = order.pop("number")
            say({"number": number, **await getattr(source, order.pop("what"))(**order)})


if __name__ == "__main__":
    anyio.run(play, json.loads(sys.argv[1]))
