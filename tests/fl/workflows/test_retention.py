"""What a finished round leaves behind: the global model, and nothing of any site."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from streamoff.fl.aggregation import Contribution
from streamoff.fl.executors.in_process import Result, Task
from streamoff.fl.workflows.open_round import OpenRound
from streamoff.payload.endpoint import Endpoint
from streamoff.runtime.downloading import Transfer
from streamoff.runtime.jobs import Consumer
from streamoff.tensors.lazy import LazyStateDict, LazyTensor
from streamoff.tensors.state import MemoryState

from ..world import Train, World, federated, landed_bytes, model, plus

pytestmark = pytest.mark.usefixtures("no_leaks")


def alive(*kinds: type) -> Counter[str]:
    """Objects of these types that the garbage collector knows and does not collect."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)


def ours() -> Counter[str]:
    """Objects of streamoff's types."""
    gc.collect()
    return Counter(
        type(one).__qualname__
        for one in gc.get_objects()
        if str(getattr(type(one), "__module__", "")).startswith("streamoff.")
    )


def threads() -> int:
    """Threads that are not idle workers of a pool, which has as many as were ever busy at once."""
    pools = ("AnyIO worker thread", "Trio thread")
    return sum(not thread.name.startswith(pools) for thread in threading.enumerate())


def descriptors() -> int:
    """Open descriptors."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_no_handle_of_a_site_survives_its_round(
    tmp_path: Path, aggregation: str, disk: bool
) -> None:
    """After each of five rounds of ten sites only the global model is held, in memory and on disk."""
    updates: list[weakref.ref[Any]] = []

    def remembering(amount: float) -> Train:
        async def train(task: Task) -> Result:
            result: Result = await plus(amount)(task)
            assert isinstance(result.params, dict)
            updates.extend(weakref.ref(tensor) for tensor in result.params.values())
            return result

        return train

    async with World(tmp_path) as world:
        sites = await world.sites({f"site-{n}": remembering(float(n)) for n in range(10)})
        before = alive(MemoryState, LazyStateDict, LazyTensor)
        async with (
            world.open_job() as job,
            federated(5, disk=disk, aggregation=aggregation).run(job, sites) as rounds,
        ):
            async for finished in rounds:
                await anyio.sleep(1)
                kept = alive(MemoryState, LazyStateDict, LazyTensor) - before
                assert kept == {type(finished.state).__name__: 1}
                assert alive(Contribution, OpenRound, Transfer) == {}
                assert alive(Consumer) == {"Consumer": 1}, "the workflow's own"
                assert len(updates) == 30 * finished.number
                held = [one() for one in updates if one() is not None]
                assert [one for one in held if one is not None and one.dim() > 0] == []
                assert landed_bytes(job) == (finished.state.layout.size if disk else 0)
                assert job.ledger.used == (finished.state.layout.size if disk else 0)


def forget_what_is_settled() -> None:
    """Drop the tombstones, which answer late requests and are bounded in number and time."""
    for endpoint in [one for one in gc.get_objects() if type(one) is Endpoint]:
        while endpoint.publisher._buried.drop_oldest():
            pass


async def test_ten_rounds_of_fifty_sites_leave_what_one_leaves(tmp_path: Path) -> None:
    """Tasks, threads, descriptors and live objects after each round equal those after the first."""
    async with World(tmp_path) as world:
        sites = await world.sites({f"site-{n}": plus(1.0) for n in range(50)})
        seen: list[tuple[int, int, int]] = []
        objects: list[Counter[str]] = []
        async with world.open_job() as job, federated(10).run(job, sites) as rounds:
            async for finished in rounds:
                assert len(finished.accepted) == 50
                await anyio.sleep(1)
                landed_bytes(job)
                forget_what_is_settled()
                objects.append(ours())
                seen.append((len(anyio.get_running_tasks()), threads(), descriptors()))
        assert set(seen) == {seen[0]}
        first = objects[0]
        for now in objects[1:]:
            grown = {name: now[name] - first[name] for name in now if now[name] > first[name]}
            pings = {"Ping", "_Parcel", "Encoded"}
            assert set(grown) <= {*pings, "Timer"}, grown
            assert all(grown.get(kind, 0) <= 100 for kind in pings), "the last one on each way"
            assert grown.get("Timer", 0) < 1000, "one that was cancelled leaves when it is due"


async def test_a_failed_round_leaves_no_more_than_a_good_one(tmp_path: Path) -> None:
    """Refused, failed and late contributions are let go like accepted ones."""
    refs: list[weakref.ref[Any]] = []

    async def bad(task: Task) -> Result:
        params = model() | {"bias": torch.full((3,), float("nan"))}
        refs.extend(weakref.ref(one) for one in params.values())
        return Result(params=params, weight=1)

    async def broken(task: Task) -> Result:
        raise RuntimeError("no GPU")

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(1.0), "site-2": bad, "site-3": broken})
        async with world.open_job() as job:
            async with federated(3, min_responses=1).run(job, sites) as rounds:
                async for finished in rounds:
                    await anyio.sleep(1)
                    assert len(finished.failed) == 2
                    assert alive(Contribution, OpenRound, Transfer) == {}
                    assert [one() for one in refs if one() is not None] == []
            del finished
            assert alive(LazyStateDict) == {}
            assert landed_bytes(job) == 0
