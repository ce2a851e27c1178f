"""What a transfer costs besides its bytes: ten thousand refs of 4 KiB, in one event loop, in memory.

Each ref is a transaction, a message, a download and a confirmation.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import torch

from benchmarks.garbage import garbage_is_new
from benchmarks.machine import Machine
from benchmarks.report import Report
from streamoff import DecodeContext, Endpoint, MemoryNetwork
from streamoff.payload.endpoint import Messages
from streamoff.types import OutcomeStatus

__all__ = ["measure"]

REFS: Final = 10_000
QUICK_REFS: Final = 500
ELEMENTS: Final = 1024
AT_ONCE: Final = 16


def measure(*, quick: bool) -> Report:
    """Send refs from one endpoint to another as fast as they are taken."""
    refs = QUICK_REFS if quick else REFS
    with garbage_is_new():
        per_second = refs / anyio.run(_run, refs)
    return Report(
        title=f"control: {refs} refs of {ELEMENTS * 4} bytes in memory, {AT_ONCE} at once",
        machine=Machine.here(Path.cwd()),
        figures={"refs_per_second": per_second},
        quick=quick,
    )


async def _run(refs: int) -> float:
    network = MemoryNetwork()
    async with (
        Endpoint("server", transports=[network]) as server,
        Endpoint("site", transports=[network]) as site,
    ):
        box = server.receive("ref")
        await site.connect("server")
        tensor = torch.randn(ELEMENTS)
        offers, pulls = iter(range(refs)), iter(range(refs))
        begun = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(_send, site, offers, tensor)
                tasks.start_soon(_pull, box, pulls)
        return time.perf_counter() - begun


async def _send(site: Endpoint, offers: Iterator[int], tensor: torch.Tensor) -> None:
    for number in offers:
        delivery = await site.send("server", "ref", {"number": number, "tensor": tensor})
        outcome = await delivery.wait()
        assert outcome.status is OutcomeStatus.COMPLETED, outcome


async def _pull(box: Messages, pulls: Iterator[int]) -> None:
    for _ in pulls:
        message = await anext(box)
        await message.decode(DecodeContext())
