"""One host of the tests in network namespaces: an endpoint that says on its output what happens to it.

Usage: ``python -m tests.transports.netns_host ROLE IDENTITY PLACES BYTES`` with the roles server, relay and
site, a directory of an identity, and places as JSON. It ends when its input does, or by SIGTERM.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import tempfile
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np

from streamoff.runtime import link
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.tensors.layout import plan
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.sources import FileSource
from streamoff.transports.sockets import HostPort, TcpTransport
from streamoff.transports.tls import Identity
from streamoff.types import Address, Ref, Slot

link.KEEPALIVE_SECONDS = 0.5  # type: ignore[misc] # a cut is noticed in two seconds and not in fifteen
link.SILENCE_SECONDS = 2.0  # type: ignore[misc]

SERVER, RELAY, SITE = Address("server"), Address("region"), Address("region.site-1")
BEAT_SECONDS = 0.2


def pattern(nbytes: int) -> np.ndarray:
    """Bytes without a short period."""
    words = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)


def say(event: str, **facts: object) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


async def until_told() -> None:
    """Wait for the end of the input."""
    await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


async def watch(endpoint: BaseEndpoint) -> None:
    """Tell how many links there are."""
    links = 0
    while True:
        if links != endpoint.statistics().links:
            links = endpoint.statistics().links
            say("links", count=links)
        await anyio.sleep(0.02)


async def serve(endpoint: BaseEndpoint) -> None:
    """Download whatever is offered, twice, and tell how it goes and when beats come in."""
    landed = 0

    def note(now: int, _: int) -> None:
        nonlocal landed
        landed = now
        say("landed", bytes=now)

    async def listen() -> None:
        async for beat in endpoint.mailbox.subscribe("beat"):
            say("beat", served=json.loads(bytes(beat.body[0])), landed=landed)

    offers = endpoint.mailbox.subscribe("offer")
    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        with tempfile.TemporaryDirectory() as scratch:
            async with open_job("job", endpoint, scratch=Path(scratch), ram_backed="allow") as job:
                async for offer in offers:
                    facts = json.loads(bytes(offer.body[0]))
                    ref = Ref(SITE, facts["ref"], bytes.fromhex(facts["ticket"]), facts["size"])
                    terms = Terms(landing=job.landing, progress=note)
                    state = await job.download(ref, terms)
                    assert isinstance(state, LazyStateDict)
                    with state:
                        start, stop = state.layout.data_start, state.layout.size
                        landed_bytes = np.fromfile(state.path, np.uint8)[start:stop]
                        assert np.array_equal(landed_bytes, pattern(stop - start))
                    say("done", bytes=landed)
                    landed = 0


async def offer(endpoint: BaseEndpoint, nbytes: int, directory: Path) -> None:
    """Offer a payload to the server, and another each time a line comes in; beat all the while."""

    async def beat(served_before: int) -> None:
        while True:
            await anyio.sleep(BEAT_SECONDS)
            served = endpoint.statistics().publisher.bytes_served - served_before
            endpoint.mailbox.post(SERVER, "beat", (memoryview(json.dumps(served).encode()),))

    path = directory / "payload.safetensors"
    layout = plan([("w", "U8", (nbytes,))])
    path.write_bytes(layout.header + pattern(nbytes).tobytes())
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        before = endpoint.statistics().publisher.bytes_served
        ticket = secrets.token_bytes(16)
        tx = endpoint.publish([FileSource(path)], [Slot(ticket, SERVER)])
        [ref] = tx.refs(0)
        facts = {"ref": ref.id, "ticket": ticket.hex(), "size": ref.size}
        endpoint.mailbox.post(SERVER, "offer", (memoryview(json.dumps(facts).encode()),))
        async with anyio.create_task_group() as group:
            if line.strip() == "beat":
                group.start_soon(beat, before)
            outcome = await tx.wait()
            group.cancel_scope.cancel()
        served = endpoint.statistics().publisher.bytes_served - before
        say("settled", status=outcome.status.value, served=served, size=ref.size)


async def main(role: str, identity: Path, places: dict[str, str], nbytes: int) -> None:
    """Play a role until the input ends."""
    address = {"server": SERVER, "relay": RELAY, "site": SITE}[role]
    uplink = {"server": None, "relay": SERVER, "site": RELAY}[role]
    own = {name: HostPort.parse(place) for name, place in places.items()}
    transport = TcpTransport(
        listen=own.get(address),
        peers={} if uplink is None else {uplink: own[uplink]},
        tls=Identity.load(identity),
    )
    async with BaseEndpoint(address, transports=[transport]) as endpoint:
        say("ready")
        if uplink is not None:
            while True:
                try:
                    await endpoint.connect(uplink)
                    break
                except ConnectionError:
                    await anyio.sleep(0.1)
        say("connected")
        if role == "site":
            with tempfile.TemporaryDirectory() as directory:
                await offer(endpoint, nbytes, Path(directory))
            return
        async with anyio.create_task_group() as group:
            group.start_soon(serve if role == "server" else watch, endpoint)
            await until_told()
            group.cancel_scope.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    _, role, identity, places, nbytes = sys.argv
    anyio.run(main, role, Path(identity), json.loads(places), int(nbytes))
