"""How a whole run keeps its files: out of the page cache if it is told to, from the first model to the published one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from streamoff.fl.executors.in_process import Result, Task
from streamoff.fl.persistor import FilePersistor
from streamoff.scratch.space import filesystem
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.state import State
from streamoff.types import MIB

from ...disks import cached_bytes
from ..world import World, federated


async def change(task: Task) -> Result:
    """Training that adds one."""
    return Result(params={name: value + 1 for name, value in task.params.items()}, weight=1.0)


async def test_a_run_that_drops_its_pages_drops_all_of_them(tmp_path: Path) -> None:
    """Neither the first model, nor what has landed, nor any new model is in the page cache when it was used."""
    if filesystem(tmp_path).ram_backed:
        pytest.skip("the temporary directory is in RAM, where nothing can be dropped")
    persistor = FilePersistor(tmp_path / "model.safetensors", page_cache="drop")
    first = persistor.save({"w": torch.zeros(3 * MIB)}).path
    (tmp_path / "scratch").mkdir()
    new: list[int] = []

    def evaluate(state: State, _: Mapping[int, tuple[str, ...]]) -> dict[str, float]:
        assert isinstance(state, LazyStateDict)
        new.append(cached_bytes(state.path))
        return {}

    async with World(tmp_path / "scratch") as world:
        sites = await world.sites({f"site-{number}": change for number in (1, 2)})
        target = FilePersistor(tmp_path / "last.safetensors", page_cache="drop")
        workflow = federated(2, initial=first, persistor=target, evaluate=evaluate)
        async with (
            world.open_job(page_cache="drop") as job,
            workflow.run(job, sites) as rounds,
        ):
            async for finished in rounds:
                assert finished.accepted == ("site-1", "site-2")
                assert cached_bytes(first) == 0
                assert isinstance(finished.state, LazyStateDict)
                assert cached_bytes(finished.state.path) == 0
        assert new == [0, 0]
        assert cached_bytes(target.target) == 0
        with target.load() as published:
            assert torch.equal(published["w"].materialize(), torch.full((3 * MIB,), 2.0))
