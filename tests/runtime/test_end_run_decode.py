"""Messages that are being decoded when their job ends: the pull ends with it, and the sender is told at once."""

import anyio
import pytest
import torch

from streamoff import DecodeContext, Endpoint, MemoryNetwork, open_job
from streamoff.errors import JobClosedError
from streamoff.types import MIB, OutcomeStatus

from .world import files

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("tensors", ["disk", "memory"])
@pytest.mark.parametrize("how", ["left", "aborted"])
async def test_decoding_ends_with_its_job(tmp_path, how, tensors):
    """Whoever decodes an inbound message when the job is left or aborted stops pulling then, and nothing of it stays."""
    network = MemoryNetwork(bandwidth=MIB)
    ends: list[tuple[str, float]] = []
    async with (
        Endpoint("server", transports=[network]) as server,
        Endpoint("site", transports=[network]) as site,
    ):
        updates = server.receive("update")
        await site.connect("server")
        delivery = await site.send("server", "update", {"w": torch.zeros(20 * MIB // 4)})

        async def decode(context: DecodeContext) -> None:
            try:
                await (await anext(updates)).decode(context)
            except JobClosedError:
                ends.append(("told", anyio.current_time()))
                raise
            except anyio.get_cancelled_exc_class():
                ends.append(("cut", anyio.current_time()))
                raise

        with anyio.CancelScope() as scope:
            async with open_job("job", server, scratch=tmp_path, drain_window=2) as job:
                context = DecodeContext(tensors=tensors, job=job)
                if how == "left":
                    job.start(decode, context)
                    await anyio.sleep(5.5)
                else:
                    async with anyio.create_task_group() as body:
                        body.start_soon(decode, context)
                        await anyio.sleep(5.5)
                        scope.cancel()
        assert scope.cancelled_caught is (how == "aborted")
        assert ends == [("told" if how == "left" else "cut", 5.5)]
        assert anyio.current_time() == 5.5
        outcome = await delivery.wait()
        assert (outcome.status, outcome.settled_at) == (OutcomeStatus.FAILED, 5.5)
        assert files(tmp_path) == []
