"""What a transfer costs besides its bytes: ten thousand refs of 4 KiB, in one event loop, in memory."""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import torch

from benchmarks.machine import Machine
from streamoff import DecodeContext, Endpoint, MemoryNetwork
from streamoff.payload.endpoint import Messages
from streamoff.types import OutcomeStatus

__all__ = ["ControlReport", "measure"]

REFS: Final = 10_000
QUICK_REFS: Final = 500
ELEMENTS: Final = 1024
AT_ONCE: Final = 16
FLOOR: Final = 1500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReport:
    """One run: refs per second, each with a transaction, a message, a download and a confirmation."""

    machine: Machine
    refs: int
    refs_per_second: float

    @property
    def passed(self) -> bool:
        """Whether it is fast enough."""
        return self.refs_per_second >= FLOOR

    def to_text(self) -> str:
        """Return three lines."""
        verdict = "ok" if self.passed else "FAIL"
        return (
            f"control: {self.refs} refs of {ELEMENTS * 4} bytes in memory, {AT_ONCE} at once\n\n"
            f"{self.refs_per_second:.0f} refs per second ({verdict}, at least {FLOOR:.0f})\n\n"
            f"{self.machine.to_text()}"
        )

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            "refs": self.refs,
            "refs_per_second": self.refs_per_second,
            "machine": self.machine.to_json(),
        }


def measure(*, quick: bool) -> ControlReport:
    """Send refs from one endpoint to another as fast as they are taken."""
    refs = QUICK_REFS if quick else REFS
    seconds = anyio.run(_run, refs)
    machine = Machine.here(Path.cwd())
    return ControlReport(machine=machine, refs=refs, refs_per_second=refs / seconds)


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
        gc.freeze()  # what was imported is no garbage; looking through all of torch is not what is measured
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
