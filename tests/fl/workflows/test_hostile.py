"""Sites that send anything: each costs itself a place in the round, and nobody else anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from streamoff.fl.envelope import result_topic
from streamoff.tensors.sources import StateDictSource
from streamoff.tensors.views import Views

from ..world import JOB, SERVER, Hand, World, federated, landed_bytes, model, plus, settled

pytestmark = pytest.mark.usefixtures("no_leaks")

FORMATS = pytest.mark.parametrize(
    "options",
    [{"disk": True}, {"disk": False, "server_expected_format": "numpy"}],
    ids=["disk", "numpy"],
)


async def beside_an_honest_site(
    scratch: Path, behave: Callable[[Hand], Awaitable[object]], **options: Any
) -> str:
    """A round of a bad site and a good one: the good one's model is the result.

    Returns:
        Why the bad site is not in.
    """
    async with World(scratch) as world:
        await world.site("site-2", plus(2.0))
        hand = await world.hand("site-1")
        done = anyio.Event()

        async def bad() -> None:
            await hand.fetch()
            await behave(hand)
            done.set()

        world.tasks.start_soon(bad)
        workflow = federated(**({"min_responses": 1, "round_timeout": 300.0} | options))
        async with world.open_job() as job, workflow.run(job, ["site-1", "site-2"]) as rounds:
            finished = await anext(rounds)
            assert finished.accepted == ("site-2",)
            assert finished.weights == {"site-2": 1.0}
            assert float(finished.state.tensor("bias")[0]) == 2.0
            assert not job.failures
            kept = landed_bytes(job)
            assert kept == (
                finished.state.layout.size if workflow.enable_tensor_disk_offload else 0
            )
            reason = finished.failed["site-1"]
        with anyio.fail_after(60):
            await done.wait()
        await settled(hand.endpoint, world.server)
    return reason


ENVELOPES: dict[str, tuple[dict[str, Any], str]] = {
    "weight-nan": ({"weight": float("nan")}, "not a weight"),
    "weight-inf": ({"weight": float("inf")}, "not a weight"),
    "weight-negative": ({"weight": -1}, "not a weight"),
    "weight-bool": ({"weight": True}, "not a weight"),
    "weight-text": ({"weight": "12"}, "not a weight"),
    "weight-none": ({"weight": None}, "not a weight"),
    "weight-huge": ({"weight": 10**400}, "weight is too large"),
    "weight-beyond-printing": ({"weight": 10**5000}, "weight is too large"),
    "weight-tensor": ({"weight": torch.tensor(1.0)}, "not a weight"),
    "round-text": ({"round": "1"}, "envelope field 'round'"),
    "round-bool": ({"round": True}, "envelope field 'round'"),
    "round-none": ({"round": None}, "envelope field 'round'"),
    "job-bytes": ({"job": b"job-1"}, "envelope field 'job'"),
    "job-other": ({"job": "job-2"}, "contribution of another job"),
    "job-long": ({"job": "j" * 100_000}, "envelope field 'job'"),
    "kind-other": ({"kind": "diff"}, "contribution of another kind"),
    "kind-unknown": ({"kind": "half"}, "envelope field 'kind'"),
    "kind-list": ({"kind": ["full"]}, "envelope field 'kind'"),
    "metrics-list": ({"metrics": [1.0]}, "envelope field 'metrics'"),
    "metrics-huge": ({"metrics": {"loss": 10**400}}, "a metric"),
    "metrics-beyond-printing": ({"metrics": {"loss": -(10**5000)}}, "a metric"),
    "metrics-text": ({"metrics": {"loss": "low"}}, "a metric"),
    "metrics-bool": ({"metrics": {"loss": True}}, "a metric"),
    "metrics-nested": ({"metrics": {"loss": {"train": 1.0}}}, "a metric"),
    "metrics-number-as-name": ({"metrics": {3: 1.0}}, "a metric's name"),
    "metrics-long-name": ({"metrics": {"m" * 5000: 1.0}}, "a metric's name"),
    "metrics-many": ({"metrics": {f"m{n}": 1.0 for n in range(300)}}, "metrics"),
    "error-number": ({"error": 1}, "envelope field 'error'"),
    "error": ({"error": "no GPU"}, "the site failed: no GPU"),
}


@pytest.mark.parametrize("name", ENVELOPES)
async def test_an_envelope_out_of_order_costs_its_site(tmp_path: Path, name: str) -> None:
    """A field of a wrong type, range or size is refused by name, before a byte is pulled, and the site is told."""
    fields, expected = ENVELOPES[name]

    async def send(hand: Hand) -> None:
        delivery = await hand.answer(params=model(100.0), **fields)
        assert "declined" in await hand.refused(delivery)
        assert hand.endpoint.publisher.statistics().bytes_served == 0

    assert expected in await beside_an_honest_site(tmp_path, send)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        7,
        "result",
        [],
        {},
        {"round": 1},
        [model()],
        {"params": model()},
        {1: 2, "params": None},
        {"job": JOB, "round": 1, "weight": 1.0, "kind": "full", "metrics": {}, "error": ""},
    ],
    ids=repr,
)
async def test_what_is_no_envelope_costs_its_site(tmp_path: Path, tree: object) -> None:
    """Any other tree than an envelope is no result; the round does not wait for a better one."""

    async def send(hand: Hand) -> None:
        await hand.send(tree)

    reason = await beside_an_honest_site(tmp_path, send)
    assert "envelope" in reason


PARAMS: dict[str, tuple[object, str]] = {
    "nothing": (None, "no parameters"),
    "empty": ({}, "keys are missing"),
    "a-list": ([torch.zeros(3)], "no parameters"),
    "a-tensor": (torch.zeros(3), "no parameters"),
    "a-number": (3, "no parameters"),
    "numbers-as-names": ({1: torch.zeros(3)}, "a parameter name"),
    "an-int-beside": (model() | {"epoch": 3}, "tensor=epoch"),
    "text-beside": (model() | {"note": "x"}, "tensor=note"),
    "none-beside": (model() | {"nothing": None}, "tensor=nothing"),
    "a-list-beside": (model() | {"list": [1, 2]}, "tensor=list"),
    "nested": ({"model": model()}, "tensor=model"),
    "a-float-instead": (model() | {"bias": 1.5}, "tensor=bias"),
    "a-numpy-number": (model() | {"bias": np.float32(1.5)}, "tensor=bias"),
    "a-key-missing": ({"layer": torch.zeros(2, 3), "steps": torch.tensor(0)}, "keys are missing"),
    "a-key-too-many": (model() | {"more": torch.zeros(1)}, "keys the global model lacks"),
    "a-shape": (model() | {"layer": torch.zeros(3, 2)}, "shape"),
    "a-shape-that-broadcasts": (model() | {"layer": torch.zeros(3)}, "shape"),
    "a-dtype": (model() | {"bias": torch.zeros(3, dtype=torch.float64)}, "dtype"),
    "a-dtype-numpy-lacks": (model() | {"bias": torch.zeros(3, dtype=torch.bfloat16)}, "dtype"),
    "an-array-of-a-wrong-shape": (
        {name: value.numpy() for name, value in model().items()} | {"bias": np.zeros(4, "f4")},
        "shape",
    ),
    "tensors-and-arrays": (model() | {"bias": np.zeros(4, "f4")}, "shape"),
    "an-expanded-scalar": (model() | {"bias": torch.zeros(()).expand(3, 1)}, "shape"),
    "an-empty-tensor": (model() | {"bias": torch.empty(0)}, "shape"),
}


@pytest.mark.parametrize("name", PARAMS)
@FORMATS
async def test_parameters_that_do_not_fit_cost_their_site(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """What is no state dict of the agreed keys, shapes and dtypes is refused by key, from the header at the latest."""
    params, expected = PARAMS[name]

    async def send(hand: Hand) -> None:
        tree = {"job": JOB, "round": 1, "weight": 1.0, "kind": "full", "metrics": {}, "error": ""}
        await hand.send(tree | {"params": params})

    assert expected in await beside_an_honest_site(tmp_path, send, **options)


async def test_tensors_and_arrays_may_be_mixed(tmp_path: Path) -> None:
    """Parameters of two payloads are put together by name, each checked on its own header."""
    async with World(tmp_path) as world:
        hand = await world.hand("site-1")

        async def answer() -> None:
            await hand.task()
            params: dict[str, object] = dict(model(4.0))
            params["bias"] = np.full(3, 4.0, dtype=np.float32)
            await hand.answer(params=params)

        world.tasks.start_soon(answer)
        _, values = await world.run(federated(), ["site-1"])
        assert values == [4.0]


async def test_a_huge_payload_is_refused_by_its_header(tmp_path: Path) -> None:
    """A state dict of another size than the model's ends with its header: no allocation, no quota spent."""

    async def send(hand: Hand) -> None:
        huge = model() | {"layer": torch.zeros(1).expand(1_000_000_000, 3)}
        delivery = await hand.answer(params=huge)
        await delivery.wait()
        assert hand.endpoint.publisher.statistics().bytes_served <= 4 * 1024**2

    assert "shape" in await beside_an_honest_site(tmp_path, send)


class Garbled:
    """A source whose header is as long as it says, and nonsense."""

    blocking = False

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inner = StateDictSource(tensors)
        true = self._inner.layout
        self.layout = replace(true, header=true.header[:8] + b"x" * (true.data_start - 8))

    def views(self, start: int, stop: int) -> Views:
        out = bytearray(stop - start)
        self.read_into(start, memoryview(out))
        return (memoryview(out),)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._inner.read_into(start, buffer)
        head = self.layout.header[start : start + len(buffer)]
        buffer[: len(head)] = head

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()


async def test_a_header_that_is_none_costs_its_site(tmp_path: Path) -> None:
    """A result whose header is nonsense is refused by it, its site is told, and nothing of it is on disk."""

    async def send(hand: Hand) -> None:
        delivery = await hand.answer(params=Garbled(model(100.0)))
        assert "header JSON" in await hand.refused(delivery)

    assert "header JSON" in await beside_an_honest_site(tmp_path, send)


async def test_a_ref_to_somebody_elses_payload_is_not_followed(tmp_path: Path) -> None:
    """A site that names another site as the source of its result is refused, and the other is not asked."""
    async with World(tmp_path) as world:
        await world.site("site-2", plus(2.0))
        victim, thief = await world.hand("site-3"), await world.hand("site-1")
        loot: list[dict[str, Any]] = []

        async def steal() -> None:
            await thief.task()
            offered = thief.endpoint.receive("loot")
            await victim.endpoint.connect("site-1")
            await victim.endpoint.send("site-1", "loot", model(100.0))
            message = await anext(offered)
            loot.append(message.tree)
            await thief.answer(params=message.tree)

        world.tasks.start_soon(steal)
        workflow = federated(min_responses=1, round_timeout=300)
        rounds, values = await world.run(workflow, ["site-1", "site-2"])
        assert loot
        assert "may not speak for the source" in rounds[0].failed["site-1"]
        assert values == [2.0]
        assert victim.endpoint.publisher.statistics().bytes_served == 0


@pytest.mark.parametrize("behind", ["garbage", "error", "result"])
async def test_what_comes_behind_a_result_does_not_take_it_back(
    tmp_path: Path, behind: str
) -> None:
    """Garbage, an error or another result after a good one, landing or counted, leave the good one in."""
    async with World(tmp_path) as world:
        hand, other = await world.hand("site-1"), await world.hand("site-2")
        line = world.network.conditions("site-1", "server")

        async def noise() -> None:
            match behind:
                case "garbage":
                    await hand.send({"params": model(50.0)})
                case "error":
                    await hand.answer(error="out of memory")
                case _:
                    await hand.answer(params=model(50.0))

        async def behave() -> None:
            await hand.task()
            line.set(bandwidth=100)
            delivery = await hand.answer(params=model(1.0))
            await noise()
            assert (await delivery.wait()).quorum
            await noise()
            await other.answer(params=model(3.0))

        world.tasks.start_soon(behave)
        rounds, values = await world.run(federated(), ["site-1", "site-2"])
        assert rounds[0].accepted == ("site-1", "site-2")
        assert rounds[0].failed == {}
        assert values == [2.0]


async def test_a_result_for_the_next_round_is_refused(tmp_path: Path) -> None:
    """A result tagged r+1 in round r is declined unpulled, and the site can still answer round r."""
    async with World(tmp_path) as world:
        hand = await world.hand("site-1")

        async def behave() -> None:
            await hand.task()
            for number in (0, 2, -1, 2**40):
                delivery = await hand.answer(params=model(9.0), round=number)
                assert "round 1 is open" in await hand.refused(delivery)
            assert hand.endpoint.publisher.statistics().bytes_served == 0
            await hand.answer(params=model(4.0))

        world.tasks.start_soon(behave)
        async with world.open_job() as job, federated().run(job, ["site-1"]) as rounds:
            finished = await anext(rounds)
            assert finished.failed == {}
            assert float(finished.state.tensor("bias")[0]) == 4.0
            assert landed_bytes(job) == finished.state.layout.size


async def test_a_result_of_another_job_in_the_same_topic_is_refused(tmp_path: Path) -> None:
    """A site that mixes up jobs fails in this round, is told, and leaves no byte."""

    async def send(hand: Hand) -> None:
        delivery = await hand.answer(params=model(9.0), job="job-2")
        assert "another job" in await hand.refused(delivery)

    reason = await beside_an_honest_site(tmp_path, send)
    assert "expected job-1, got job-2" in reason


async def test_a_stranger_is_declined(tmp_path: Path) -> None:
    """A result of an endpoint that is no site of the round is not looked at."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        stranger = await world.endpoint("stranger")
        told: list[str] = []

        async def intrude(task):
            tree = {"job": JOB, "round": 1, "weight": 1.0, "kind": "full", "params": model(9.0)}
            delivery = await stranger.send(
                SERVER, result_topic(JOB), tree | {"metrics": {}, "error": ""}
            )
            told.append(await Hand.refused(None, delivery))  # type: ignore[arg-type]
            return await plus(1.0)(task)

        await world.site("site-2", intrude)
        rounds, values = await world.run(federated(), ["site-1", "site-2"])
        assert values == [1.0]
        assert rounds[0].failed == {}
        assert "not awaited" in told[0]


async def test_a_site_that_answers_for_another_is_itself(tmp_path: Path) -> None:
    """Who a result is from is who sent it: no field of the envelope can say otherwise."""
    async with World(tmp_path) as world:
        one, two = await world.hand("site-1"), await world.hand("site-2")

        async def behave() -> None:
            await one.task()
            await two.task()
            await one.answer(params=model(1.0), site="site-2", sender="site-2")
            await two.answer(params=model(5.0))

        world.tasks.start_soon(behave)
        rounds, values = await world.run(federated(), ["site-1", "site-2"])
        assert values == [3.0]
        assert rounds[0].accepted == ("site-1", "site-2")


async def test_a_flood_of_results_is_answered_one_by_one(tmp_path: Path) -> None:
    """Three hundred results of one site in one round: one is pulled, each other is declined."""
    async with World(tmp_path) as world:
        hand, other = await world.hand("site-1"), await world.hand("site-2")

        async def behave() -> None:
            await hand.task()
            deliveries = [await hand.answer(params=model(float(n))) for n in range(300)]
            ends = [await one.wait() for one in deliveries]
            assert sum(end.quorum for end in ends) == 1
            await other.answer(params=model(2.0))

        world.tasks.start_soon(behave)
        rounds, values = await world.run(federated(), ["site-1", "site-2"])
        assert values == [1.0]
        assert len(rounds[0].accepted) == 2


async def test_a_source_that_changes_while_it_is_served_costs_its_site(tmp_path: Path) -> None:
    """A training loop that goes on writing into its result loses the round, with a hint; nobody else does."""

    async def send(hand: Hand) -> None:
        params = model(100.0)
        await hand.answer(params=params)
        params["layer"].add_(1)

    assert "changed" in await beside_an_honest_site(tmp_path, send)
