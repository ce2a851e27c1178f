"""A trio program that pulls updates by reference and adds them up block by block.

No workflow here: the program reads messages, decides which updates it wants before a byte has moved, lands
those on disk, and reads them lazily. Run it:

    python examples/trio_program.py
"""

from __future__ import annotations

import numpy as np
import torch
import trio

from streamoff import DecodeContext, Endpoint, LazyTensor, MemoryNetwork, open_job
from streamoff.errors import TransferError

SITES = 4
ELEMENTS = 1_000_000


async def site(
    network: MemoryNetwork,
    number: int,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Offer one update and wait for what becomes of it."""
    async with Endpoint(f"site-{number}", transports=[network]) as endpoint:
        await endpoint.connect("server")
        task_status.started()
        update = {"weight": torch.full((ELEMENTS,), float(number))}
        delivery = await endpoint.send(
            "server", "updates", {"samples": 10 * number, "update": update}
        )
        outcome = await delivery.wait()  # the tensors are borrowed until here
        print(f"site-{number}: {outcome.status.value}")


async def main() -> None:
    """Pull three of four updates and average them."""
    network = MemoryNetwork()
    async with (
        Endpoint("server", transports=[network]) as server,
        open_job("trio-job", server) as job,
        trio.open_nursery() as nursery,
    ):
        updates = server.receive("updates")
        for number in range(SITES):
            await nursery.start(site, network, number)
        total = np.zeros(ELEMENTS, dtype=np.float64)
        samples = 0
        for _ in range(SITES):
            message = await anext(updates)
            if message.tree["samples"] == 0:
                message.decline("no samples")  # the site hears it at once; nothing was pulled
                continue
            try:
                with trio.fail_after(60):
                    tree = await message.resolve(DecodeContext(tensors="disk", job=job))
            except (TransferError, trio.TooSlowError) as error:
                print(f"{message.sender}: {error}")
                continue
            samples += tree["samples"]
            lazy: LazyTensor = tree["update"]["weight"]
            await trio.to_thread.run_sync(add, total, lazy, tree["samples"])  # reads block
            del tree, lazy  # the last reference: the disk is free again
        updates.close()
    print(f"mean {total[0] / samples:.4f} of {samples} samples")
    print(f"landed {job.report.bytes_landed} bytes, at most {job.report.bytes_peak} at once")
    print(f"nothing left on disk: {job.report.removed}")


def add(total: np.ndarray, lazy: LazyTensor, samples: int) -> None:
    """Add an update that lies on disk, 64 KiB at a time."""
    at = 0
    for block in lazy.blocks(64 * 1024):
        values = block.numpy()
        total[at : at + len(values)] += samples * values
        at += len(values)


if __name__ == "__main__":
    trio.run(main)
