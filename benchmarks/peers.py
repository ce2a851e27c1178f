"""The two processes of a transfer benchmark: a source that dials, and a receiver that measures.

Both talk through endpoints of their own; the receiver says what comes next. The raw copies run in the same
two processes, one after the other with ours, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import torch

from benchmarks import rawcopy
from streamoff import DecodeContext, Endpoint, open_job
from streamoff.runtime.threads import run_in_thread
from streamoff.sim.memory import MemorySampler, warm_torch
from streamoff.sim.shapes import shapes_of
from streamoff.tensors.sources import StateDictSource
from streamoff.transports.sockets import HostPort, TcpTransport

__all__ = ["MODES", "Sample", "main", "read_line"]

MODES: Final = ("disk", "memory")
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer.

    Args:
        ours: Whether streamoff did it, or the raw copy.
        mode: One of :data:`MODES`.
        seconds: At the receiver.
        receiver_cpu: CPU seconds of the receiving process.
        source_cpu: CPU seconds of the sending process.
        receiver_growth: Anonymous resident bytes above the receiver's baseline, at most.
        source_growth: The same at the source.
    """

    ours: bool
    mode: str
    seconds: float
    receiver_cpu: float
    source_cpu: float
    receiver_growth: int
    source_growth: int

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return asdict(self)


def read_line(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that a child says; empty when it has ended."""
    assert child.stdout is not None
    line = child.stdout.readline()
    said: dict[str, Any] = json.loads(line) if line else {}
    return said


def _model(shapes: str, nbytes: int) -> dict[str, torch.Tensor]:
    """Random bytes: nothing on the way can make anything of zeros."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)
        for name, shape in shapes_of(shapes, nbytes)
    }


# --- source ---------------------------------------------------------------------------------------


async def source(place: HostPort, shapes: str, nbytes: int) -> None:
    """Serve what the receiver asks for, until it says enough."""
    warm_torch()
    model = _model(shapes, nbytes)
    transport = TcpTransport(peers={"receiver": place})
    async with Endpoint("source", transports=[transport]) as endpoint:
        with endpoint.receive("go") as orders:
            await endpoint.connect("receiver")
            await (await endpoint.send("receiver", "ready", {"ready": True})).wait()
            async for order in orders:
                if order.tree["what"] == "stop":
                    return
                await _serve(endpoint, model, order.tree)


async def _serve(endpoint: Endpoint, model: dict[str, torch.Tensor], order: Any) -> None:
    cpu = time.process_time()
    with MemorySampler() as memory:
        if order["what"] == "ours":
            delivery = await endpoint.send("receiver", "payload", {"params": model})
            await delivery.wait()
        else:
            payload = StateDictSource(model)
            views = payload.views(0, payload.layout.size) or _pieces(payload)
            sock = rawcopy.dial(LOOPBACK, order["port"], None)
            await run_in_thread(rawcopy.send, sock, views)
    report = {
        "cpu": time.process_time() - cpu,
        "growth": memory.statistics().peak_delta_bytes,
    }
    await (await endpoint.send("receiver", "done", report)).wait()


def _pieces(payload: StateDictSource) -> Sequence[memoryview]:
    step, size = rawcopy.BUFFER_BYTES, payload.layout.size
    found: list[memoryview] = []
    for start in range(0, size, step):
        found += payload.views(start, min(start + step, size)) or ()
    return found


# --- receiver -------------------------------------------------------------------------------------


async def receiver(scratch: Path, repeats: int, modes: Sequence[str]) -> None:
    """Pull and copy in turns; one JSON line per transfer."""
    warm_torch()
    transport = TcpTransport(listen=HostPort(LOOPBACK, 0))
    async with Endpoint("receiver", transports=[transport]) as endpoint:
        boxes = {topic: endpoint.receive(topic) for topic in ("ready", "payload", "done")}
        assert transport.place is not None
        _say({"port": transport.place.port})
        await anext(boxes["ready"])
        listener = socket.create_server((LOOPBACK, 0))
        async with open_job("bench", endpoint, scratch=scratch, ram_backed="allow") as job:
            size = 0
            for turn in range(repeats + 1):
                for mode in modes:
                    context = DecodeContext(tensors=mode, job=job)  # type: ignore[arg-type]
                    ours, size = await _ours(endpoint, boxes, context, mode)
                    raw = await _raw(
                        endpoint, boxes, listener, size=size, scratch=scratch, mode=mode
                    )
                    if turn:  # the first pair warms up
                        _say(ours.to_json())
                        _say(raw.to_json())
            _say({"size": size})
        await (await endpoint.send("source", "go", {"what": "stop"})).wait()


async def _ours(
    endpoint: Endpoint, boxes: Any, context: DecodeContext, mode: str
) -> tuple[Sample, int]:
    await endpoint.send("source", "go", {"what": "ours"})
    message = await anext(boxes["payload"])
    size = next(iter(message.tree["params"].values())).ref.size
    cpu = time.process_time()
    with MemorySampler() as memory:
        begun = time.perf_counter()
        got = await message.decode(context)
        seconds = time.perf_counter() - begun
    spent = time.process_time() - cpu
    del got
    done = (await anext(boxes["done"])).tree
    growth = memory.statistics().peak_delta_bytes
    return Sample(True, mode, seconds, spent, done["cpu"], growth, done["growth"]), size


async def _raw(
    endpoint: Endpoint, boxes: Any, listener: socket.socket, *, size: int, scratch: Path, mode: str
) -> Sample:
    order = {"what": "raw", "port": listener.getsockname()[1]}
    await endpoint.send("source", "go", order)
    sock = await run_in_thread(rawcopy.accept, listener, None)
    cpu = time.process_time()
    copy = (
        partial(rawcopy.receive_to_file, sock, size, scratch / "raw.bin")
        if mode == "disk"
        else partial(rawcopy.receive_to_memory, sock, size)
    )
    seconds = await run_in_thread(copy)
    spent = time.process_time() - cpu
    done = (await anext(boxes["done"])).tree
    return Sample(False, mode, seconds, spent, done["cpu"], 0, done["growth"])


def _say(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run one of the two roles."""
    parser = argparse.ArgumentParser()
    roles = parser.add_subparsers(dest="role", required=True)
    one = roles.add_parser("source")
    one.add_argument("port", type=int)
    one.add_argument("shapes")
    one.add_argument("nbytes", type=int)
    other = roles.add_parser("receiver")
    other.add_argument("scratch", type=Path)
    other.add_argument("repeats", type=int)
    other.add_argument("modes", nargs="+", choices=MODES)
    args = parser.parse_args()
    if args.role == "source":
        anyio.run(source, HostPort(LOOPBACK, args.port), args.shapes, args.nbytes)
    else:
        anyio.run(receiver, args.scratch, args.repeats, args.modes)


if __name__ == "__main__":
    main()
