"""What a finished round leaves behind: the global model, and nothing of any site."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
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

from ...soon import soon
from ..world import Train, World, federated, landed_bytes, model, plus

pytestmark = pytest.mark.usefixtures("no_leaks")


def alive(*kinds: type) -> Counter[str]:
    """Objects of these types that the garbage collector knows."""
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)


def ours() -> Counter[str]:
    """Objects of streamoff's types."""
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
        gc.collect()
        before = alive(MemoryState, LazyStateDict, LazyTensor)
        kept = {LazyStateDict.__name__ if disk else MemoryState.__name__: 1}
        async with (
            world.open_job() as job,
            federated(5, disk=disk, aggregation=aggregation).run(job, sites) as rounds,
        ):
            async for finished in rounds:
                await anyio.sleep(1)
                assert soon(lambda: alive(MemoryState, LazyStateDict, LazyTensor) - before == kept)
                assert soon(lambda: alive(Contribution, OpenRound, Transfer) == {})
                assert soon(lambda: alive(Consumer) == {"Consumer": 1}), "the workflow's own"
                assert len(updates) == 30 * finished.number
                assert soon(lambda: not held(updates))
                assert landed_bytes(job) == (finished.state.layout.size if disk else 0)
                assert job.ledger.used == (finished.state.layout.size if disk else 0)


def held(updates: Iterable[weakref.ref[Any]]) -> list[Any]:
    """Tensors of updates that somebody holds; the scalar that sites return as it came is the server's."""
    return [one for update in updates if (one := update()) is not None and one.dim() > 0]


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
        first: Counter[str] = Counter()
        few = {"Ping": 100, "_Parcel": 100, "Encoded": 100}  # the last one on each way
        few["Timer"] = 999  # one that was cancelled leaves when it is due

        def grown() -> dict[str, int]:
            more = ours() - first
            return {kind: count for kind, count in more.items() if count > few.get(kind, 0)}

        async with world.open_job() as job, federated(10).run(job, sites) as rounds:
            async for finished in rounds:
                assert len(finished.accepted) == 50
                await anyio.sleep(1)
                landed_bytes(job)
                forget_what_is_settled()
                if not first:
                    assert soon(lambda: alive(Contribution, OpenRound, Transfer) == {})
                    first.update(ours())
                assert soon(lambda: grown() == {}), grown()
                seen.append((len(anyio.get_running_tasks()), threads(), descriptors()))
        assert set(seen) == {seen[0]}


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
                    assert soon(lambda: alive(Contribution, OpenRound, Transfer) == {})
                    assert soon(lambda: all(one() is None for one in refs))
            del finished
            assert soon(lambda: alive(LazyStateDict) == {})
            assert landed_bytes(job) == 0
