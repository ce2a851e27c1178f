"""A process of a transfer benchmark: endpoints, models and raw sockets, at a conductor's orders.

Ours and the raw copies run in the same processes, with the same tensors, measured by the same meter.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import torch

from benchmarks import rawcopy
from benchmarks.meter import Meter
from benchmarks.models import tensors_of
from benchmarks.orders import read_order, say
from streamoff import DecodeContext, Endpoint, Job, Message, open_job
from streamoff.payload.endpoint import Messages
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.janitor import JANITOR
from streamoff.sim.memory import keep_large_blocks_mapped, resident_bytes, warm_torch
from streamoff.transports.sockets import HostPort, TcpTransport
from streamoff.transports.tls import Identity
from streamoff.types import OutcomeStatus

__all__ = ["LOOPBACK", "MODES", "main"]

MODES: Final = ("disk", "memory")
LOOPBACK: Final = "127.0.0.1"
FREED_SECONDS: Final = 60.0
TOPIC: Final = "payload"
BEAT: Final = "beat"

Answer = dict[str, Any]


class Peer:
    """What a process holds, and the orders that it carries out: every public method is one.

    Args:
        models: By name; what is served or copied out.
        scratch: Where landed files and raw copies go; None: it receives nothing.
        identity: Of all its links and raw copies; None: unencrypted.
    """

    def __init__(
        self,
        models: Mapping[str, dict[str, torch.Tensor]],
        scratch: Path | None,
        identity: Identity | None,
    ) -> None:
        self._models = models
        self._views = {name: rawcopy.views_of(model) for name, model in models.items()}
        self._scratch = scratch
        self._identity = identity
        self._endpoints: dict[str, Endpoint] = {}
        self._jobs: dict[str, Job] = {}
        self._boxes: dict[str, Messages] = {}
        self._beats: dict[str, Messages] = {}
        self._listener = socket.create_server((LOOPBACK, 0))
        self._rest = anyio.Event()
        self._floor = 0

    async def open(self, stack: AsyncExitStack, settings: Mapping[str, Any]) -> int | None:
        """Open an endpoint; return the port that it listens on, if it does."""
        address, host = settings["address"], settings.get("host", LOOPBACK)
        transport = TcpTransport(
            listen=HostPort(host, settings.get("port", 0)) if settings["listen"] else None,
            peers={name: HostPort.parse(place) for name, place in settings["dial"].items()},
            tls=self._identity,
            plain_anywhere=True,  # hosts are namespaces of this machine
        )
        endpoint = await stack.enter_async_context(Endpoint(address, transports=[transport]))
        self._endpoints[address] = endpoint
        self._boxes[address] = stack.enter_context(endpoint.receive(TOPIC))
        self._beats[address] = stack.enter_context(endpoint.receive(BEAT))
        if self._scratch is not None:
            job = open_job(f"bench-{address}", endpoint, scratch=self._scratch, ram_backed="allow")
            self._jobs[address] = await stack.enter_async_context(job)
        for name in settings["dial"]:
            await endpoint.connect(name)
        return None if transport.place is None else transport.place.port

    def ready(self, ports: Mapping[str, int | None]) -> Answer:
        """What a conductor must know: where endpoints listen and raw copies are taken, sizes of models.

        From here on memory is counted.
        """
        _, self._floor = resident_bytes()
        return {
            "ports": ports,
            "raw_port": self._listener.getsockname()[1],
            "sizes": {name: sum(map(len, views)) for name, views in self._views.items()},
        }

    # --- ours -------------------------------------------------------------------------------------

    async def serve(self, *, at: str, to: list[str], model: str = "payload") -> Answer:
        """Send a model and wait until everybody has it."""
        tensors = self._models[model]
        with Meter(self._floor) as meter:
            delivery = await self._endpoints[at].send(to, TOPIC, {"params": tensors})
            outcome = await delivery.wait()
        assert outcome.status is OutcomeStatus.COMPLETED, outcome
        return meter.spent.to_json()

    async def pull(self, *, at: list[str], mode: str, pause: float = 0.0) -> Answer:
        """Land what is sent to some endpoints, all at once; free it before answering.

        ``pause`` stops the whole process so many seconds after every chunk.
        """
        messages = [(await anext(self._boxes[address]), address) for address in at]
        landed: list[object] = []
        progress = (lambda *_: time.sleep(pause)) if pause else None
        with Meter(self._floor) as meter:
            async with anyio.create_task_group() as tasks:
                for message, address in messages:
                    context = DecodeContext(
                        tensors="disk" if mode == "disk" else "memory",
                        job=self._jobs[address],
                        progress=progress,
                    )
                    tasks.start_soon(_land, message, context, landed)
        landed.clear()
        messages.clear()
        if not await run_in_thread(JANITOR.idle, FREED_SECONDS):
            raise TimeoutError("landed files were not removed")
        return meter.spent.to_json()

    async def beat(self, *, at: str, to: str, count: int, every: float) -> Answer:
        """Send messages that say when they were sent, one every so many seconds."""
        for _ in range(count):
            await self._endpoints[at].send(to, BEAT, {"sent": time.monotonic()})
            await anyio.sleep(every)
        return {}

    async def hear(self, *, at: str, count: int) -> Answer:
        """Receive such messages; how long each took."""
        seconds: list[float] = []
        for _ in range(count):
            message = await anext(self._beats[at])
            seconds.append(time.monotonic() - message.tree["sent"])
        return {"seconds": seconds}

    async def watch(self) -> Answer:
        """Measure this process until it is told to rest."""
        self._rest = anyio.Event()
        with Meter(self._floor) as meter:
            await self._rest.wait()
        return meter.spent.to_json()

    async def rest(self) -> Answer:
        """End :meth:`watch`."""
        self._rest.set()
        await anyio.lowlevel.checkpoint()
        return {}

    # --- raw --------------------------------------------------------------------------------------

    async def copy_out(
        self,
        *,
        port: int,
        piece: int,
        streams: int = 1,
        at_once: bool = True,
        model: str = "payload",
    ) -> Answer:
        """Send a model over raw sockets."""
        views = self._views[model]
        context = None if self._identity is None else self._identity.context(server=False)
        dial = partial(rawcopy.dial, LOOPBACK, port, context)
        socks = [await run_in_thread(dial) for _ in range(streams)]
        with Meter(self._floor) as meter:
            await _threads([partial(rawcopy.send, s, views, piece) for s in socks], at_once=at_once)
        for sock in socks:
            sock.close()
        return meter.spent.to_json()

    async def copy_in(
        self, *, mode: str, size: int, streams: int = 1, at_once: bool = True
    ) -> Answer:
        """Receive copies over raw sockets; free them before answering."""
        context = None if self._identity is None else self._identity.context(server=True)
        accept = partial(rawcopy.accept, self._listener, context)
        socks = [await run_in_thread(accept) for _ in range(streams)]
        copies = [
            rawcopy.ToFile(sock, size, self._raw_file(number))
            if mode == "disk"
            else rawcopy.ToMemory(sock, size)
            for number, sock in enumerate(socks)
        ]
        with Meter(self._floor) as meter:
            await _threads([copy.run for copy in copies], at_once=at_once)
        for copy, sock in zip(copies, socks, strict=True):
            with closing(sock):
                copy.free()
        return meter.spent.to_json()

    def _raw_file(self, number: int) -> Path:
        assert self._scratch is not None
        return self._scratch / f"raw-{number}.bin"


async def _land(message: Message, context: DecodeContext, landed: list[object]) -> None:
    landed.append(await message.decode(context))


async def _threads(calls: list[Callable[[], None]], *, at_once: bool) -> None:
    if not at_once:
        await run_in_thread(lambda: [call() for call in calls])
        return
    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(run_in_thread, call)


async def play(settings: Mapping[str, Any]) -> None:
    """Be what the settings say until the input ends."""
    keep_large_blocks_mapped()  # what is received into is fresh memory every time, as a raw copy's is
    warm_torch()
    models = {name: tensors_of(*shape) for name, shape in settings.get("models", {}).items()}
    scratch, identity = settings.get("scratch"), settings.get("identity")
    peer = Peer(
        models,
        None if scratch is None else Path(scratch),
        None if identity is None else Identity.load(Path(identity)),
    )
    async with AsyncExitStack() as stack:
        ports = {one["address"]: await peer.open(stack, one) for one in settings["endpoints"]}
        say({"number": 0, **peer.ready(ports)})
        async with anyio.create_task_group() as tasks:
            while order := await anyio.to_thread.run_sync(read_order, abandon_on_cancel=True):
                tasks.start_soon(_carry_out, getattr(peer, order.pop("what")), order)
            tasks.cancel_scope.cancel()


async def _carry_out(handler: Callable[..., Awaitable[Answer]], order: dict[str, Any]) -> None:
    number = order.pop("number")
    try:
        say({"number": number, **await handler(**order)})
    except Exception as error:  # noqa: BLE001 - it is the conductor who fails
        traceback.print_exc()
        say({"number": number, "failed": repr(error)})


def main() -> None:
    """Play the part that the argument describes."""
    anyio.run(play, json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
