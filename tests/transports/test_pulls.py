"""How much is asked for at once over a real line, whose speed is not known yet."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from streamoff.runtime.pace import FIRST_BYTES
from streamoff.runtime.resources import MAX_WINDOW, MIN_WINDOW, Resources
from streamoff.tensors.sources import StateDictSource
from streamoff.types import CHUNK_BYTES, MIB, Slot

from ..runtime.world import memory
from .real import Net, connected, every_loop  # noqa: F401 - a fixture among them

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_leaks")]


async def landed(net: Net, nbytes: int, others: int = 0) -> list[int]:
    """Land a payload in memory beside so many other downloads; how much has landed after each chunk."""
    steps: list[int] = []
    async with connected(net) as (server, site):
        tensors = {"w": torch.zeros(nbytes, dtype=torch.uint8)}
        ref = site.publish([StateDictSource(tensors)], [Slot(b"t" * 16, server.address)]).refs(0)[0]
        server.resources.active += others
        try:
            terms = memory(progress=lambda done, _: steps.append(done))
            await server.run_transfer(server.transfer(ref, terms))
        finally:
            server.resources.active -= others
    return steps


async def test_a_line_is_tried_with_little_and_then_with_more(tcp: Net):
    """The first chunk over a line is small, and the following ones grow; small payloads come in one."""
    steps = await landed(tcp, 24 * MIB)
    assert steps[0] == FIRST_BYTES
    sizes = [after - before for before, after in pairwise(steps)]
    assert FIRST_BYTES < max(sizes) <= CHUNK_BYTES
    assert len(await landed(tcp, 2 * FIRST_BYTES - 1000)) == 1


async def test_beside_many_others_less_is_tried(tcp: Net):
    """Who is one of many begins with a share of the pool's buffers, so that all of them can begin."""
    pool = Resources.current().pool
    steps = await landed(tcp, 4 * MIB, others=63)
    assert steps[0] == pool.capacity // 64


async def test_a_line_is_never_idle_for_a_round_trip():
    """However many downloads share the pool, each has a chunk asked for beside the one that comes."""
    resources = Resources()
    windows = set[int]()
    for resources.active in (0, 1, 2, 4, 1000):
        windows.add(resources.window)
        assert MIN_WINDOW <= resources.window <= MAX_WINDOW
    assert windows == {2, 4, 8}
