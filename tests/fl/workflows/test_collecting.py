"""Waiting for sites: quorum, cut-off and timeout to the exact second, stragglers, the dead and the late."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
import torch

from streamoff.errors import AggregationError, QuorumLostError, TransferError
from streamoff.fl.aggregation import Policies
from streamoff.fl.executors.in_process import Result
from streamoff.types import MIB

from ..world import Train, World, federated, landed_bytes, model, plus, settled, value_of

pytestmark = pytest.mark.usefixtures("no_leaks")


def after(seconds: float, amount: float = 1.0, weight: float = 1.0) -> Train:
    """Training that takes a while."""

    async def train(task):
        await anyio.sleep(seconds)
        return await plus(amount, weight)(task)

    return train


async def test_a_site_may_train_for_hours(tmp_path: Path) -> None:
    """Training that takes two hours costs no budget and no link: its result is taken as if it had come at once."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": after(7200), "site-2": after(1, 3.0)})
        workflow = federated(round_timeout=8000)
        async with world.open_job() as job, workflow.run(job, sites) as rounds:
            finished = await anext(rounds)
            assert (finished.seconds, finished.failed) == (7200.0, {})
            assert value_of(finished.state) == 2.0
            assert world.server.statistics().links_lost == 0


async def test_a_round_ends_with_its_last_site_and_no_later(tmp_path: Path) -> None:
    """When everybody has answered nothing is waited for, cut-off and timeout or not."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": after(3), "site-2": after(8, 3.0)})
        rounds, values = await world.run(federated(cut_off=60, min_responses=1), sites)
        assert rounds[0].seconds == 8.0
        assert values == [2.0]


async def test_the_timeout_closes_a_round_with_what_it_has(tmp_path: Path) -> None:
    """At the exact second a round goes on without whoever has not answered, and says so."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": after(1), "site-2": after(50, 9.0)})
        rounds, values = await world.run(federated(min_responses=1, round_timeout=20), sites)
        assert rounds[0].seconds == 20.0
        assert rounds[0].accepted == ("site-1",)
        assert rounds[0].failed == {"site-2": "no result within 20 s"}
        assert values == [1.0]


async def test_a_model_is_not_served_beyond_its_round(tmp_path: Path) -> None:
    """A site that comes for the model when the round is over is told that it is gone; nothing stays open for it."""
    async with World(tmp_path) as world:
        await world.site("site-1", after(1))
        hand = await world.hand("site-2")
        workflow = federated(min_responses=1, round_timeout=20)
        async with (
            world.open_job() as job,
            workflow.run(job, ["site-1", "site-2"]) as rounds,
        ):
            await anext(rounds)
            assert not world.server.publisher.open
            with pytest.raises(TransferError, match=r"gone|deleted"):
                await hand.fetch()


async def test_the_timeout_with_too_few_costs_the_round(tmp_path: Path) -> None:
    """Short of the quorum at the timeout the round fails, with the reason of each site."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": after(1), "site-2": after(50)})
        with pytest.raises(QuorumLostError, match="site-2: no result within 20 s") as caught:
            await world.run(federated(round_timeout=20), sites)
        assert anyio.current_time() == 20.0
        assert (caught.value.expected, caught.value.got) == ("at least 2 of 2", 1)


async def test_nobody_answering_is_a_lost_quorum(tmp_path: Path) -> None:
    """A round without a single result says that its quorum is lost, and which sites were silent."""
    async with World(tmp_path) as world:
        await world.hand("site-1")
        with pytest.raises(QuorumLostError, match="site-1: no result within 5 s"):
            await world.run(federated(min_responses=1, round_timeout=5), ["site-1"])


async def test_the_cut_off_runs_from_the_moment_there_are_enough(tmp_path: Path) -> None:
    """The others get the cut-off from the last contribution that was needed, not from the first."""
    trains = {"site-1": after(2), "site-2": after(7, 3.0), "site-3": after(17.5, 100.0)}
    async with World(tmp_path) as world:
        sites = await world.sites(trains)
        rounds, values = await world.run(federated(min_responses=2, cut_off=10), sites)
        assert rounds[0].seconds == 17.0
        assert rounds[0].failed == {"site-3": "no result within 10 s of the first 2"}
        assert values == [2.0]


async def test_a_cut_off_of_nothing_takes_the_first_that_come(tmp_path: Path) -> None:
    """With no cut-off time the round closes when it has enough."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": after(30), "site-2": after(4, 5.0)})
        rounds, values = await world.run(federated(min_responses=1, cut_off=0), sites)
        assert (rounds[0].seconds, values) == (4.0, [5.0])


async def test_without_a_cut_off_the_slow_are_waited_for(tmp_path: Path) -> None:
    """Enough is not a reason to hurry unless the settings say so."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": after(1), "site-2": after(300, 3.0)})
        rounds, _ = await world.run(federated(min_responses=1), sites)
        assert (rounds[0].seconds, rounds[0].accepted) == (300.0, ("site-1", "site-2"))


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
async def test_a_site_that_dies_mid_upload_costs_the_cut_off_and_nothing_else(
    tmp_path: Path, aggregation: str
) -> None:
    """The round closes at the cut-off, the partial bytes are gone, and the weights are the reporter's alone."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0, weight=5.0))
        hand = await world.hand("site-2")
        line = world.network.conditions("site-2", "server")

        async def die() -> None:
            await hand.task()
            line.set(bandwidth=10)
            await hand.answer(params=model(100.0))
            await anyio.sleep(2)
            world.network.cut("site-2", "server")

        world.tasks.start_soon(die)
        workflow = federated(min_responses=1, cut_off=10, aggregation=aggregation)
        async with (
            world.open_job() as job,
            workflow.run(job, ["site-1", "site-2"]) as rounds,
        ):
            finished = await anext(rounds)
            assert finished.seconds == 10.0
            assert finished.weights == {"site-1": 5.0}
            assert "no result within 10 s" in finished.failed["site-2"]
            assert value_of(finished.state) == 1.0
            assert landed_bytes(job) == finished.state.layout.size, "nothing but the new model"


async def test_a_link_that_comes_back_in_time_costs_nothing(tmp_path: Path) -> None:
    """An upload goes on where it stopped when the link was away for a while."""
    async with World(tmp_path) as world:
        hand = await world.hand("site-1")
        line = world.network.conditions("site-1", "server")

        async def upload() -> None:
            await hand.task()
            line.set(bandwidth=10)
            await hand.answer()
            await anyio.sleep(2)
            world.network.cut("site-1", "server")
            await anyio.sleep(15)
            world.network.mend("site-1", "server")

        world.tasks.start_soon(upload)
        rounds, values = await world.run(federated(), ["site-1"])
        assert values == [1.0]
        assert rounds[0].failed == {}


async def test_a_site_that_cannot_be_reached_is_known_at_once(tmp_path: Path) -> None:
    """A quorum that is impossible from the start is lost before anybody trains."""
    async with World(tmp_path) as world:
        trained = []

        async def train(task):
            trained.append(task)

        await world.site("site-1", train)
        workflow = federated(rounds=1, min_responses=2)
        with pytest.raises(QuorumLostError, match="site-2: unreachable when the round began"):
            await world.run(workflow, ["site-1", "site-2"])
        assert anyio.current_time() == 0.0


async def test_a_site_lost_in_the_instant_of_the_broadcast_costs_itself(tmp_path: Path) -> None:
    """A link that breaks between the look and the sending fails its site, not the round."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(1.0), "site-2": plus(1.0)})
        send = world.server.send
        lost: list[object] = []

        async def unlucky(to, *args, **kwargs):
            if not lost:
                lost.append(to)
                world.network.cut("site-2", "server")
                await anyio.sleep(0.01)
            return await send(to, *args, **kwargs)

        world.server.send = unlucky  # type: ignore[method-assign]
        rounds, _ = await world.run(federated(min_responses=1), sites)
        assert lost == [("site-1", "site-2")]
        assert rounds[0].accepted == ("site-1",)
        assert rounds[0].failed == {"site-2": "unreachable when the round began"}


async def test_a_site_without_an_executor_is_not_waited_for(tmp_path: Path) -> None:
    """A site where nobody serves the job says so, and the round does not wait for its timeout."""
    async with World(tmp_path) as world:
        await world.site("site-1", after(60))
        await world.endpoint("site-2")
        rounds, _ = await world.run(federated(min_responses=1), ["site-1", "site-2"])
        assert rounds[0].seconds == 60.0
        assert "the model did not reach it" in rounds[0].failed["site-2"]
        assert "nobody reads" in rounds[0].failed["site-2"]


async def test_a_busy_straggler_has_the_whole_round_to_come_for_the_model(tmp_path: Path) -> None:
    """Who is still training for the last round when the next begins can take part in it late."""
    async with World(tmp_path) as world:
        slow = {1: 700.0, 2: 1.0}

        async def straggler(task):
            await anyio.sleep(slow[task.round])
            return await plus(3.0)(task)

        sites = await world.sites({"site-1": after(1), "site-2": straggler})
        rounds, values = await world.run(federated(2, min_responses=1, round_timeout=500), sites)
        assert [one.accepted for one in rounds] == [("site-1",), ("site-1", "site-2")]
        assert rounds[1].seconds == 201.0
        assert values == [1.0, 3.0]


async def test_the_quorum_is_lost_as_soon_as_it_is_impossible(tmp_path: Path) -> None:
    """Failures that leave too few end the round at once, and name who failed and why."""

    async def fail(task):
        await anyio.sleep(4)
        raise RuntimeError("no GPU")

    async with World(tmp_path) as world:
        await world.sites({"site-1": after(100), "site-2": fail, "site-3": fail})
        with pytest.raises(QuorumLostError) as caught:
            await world.run(federated(min_responses=2), ["site-1", "site-2", "site-3"])
        assert anyio.current_time() == 4.0
        message = str(caught.value)
        assert "site-2: the site failed: RuntimeError: no GPU" in message
        assert "site-3" in message
        assert "previous model stands" in message
        assert "round=1" in message


async def test_many_reasons_are_counted_and_not_spelled_out(tmp_path: Path) -> None:
    """The message of a lost quorum stays readable with many sites."""
    async with World(tmp_path) as world:
        sites = [f"site-{number}" for number in range(40)]
        with pytest.raises(QuorumLostError, match="and 32 more") as caught:
            await world.run(federated(), sites)
        assert len(str(caught.value)) < 1000


async def test_a_failed_site_is_asked_again_in_the_next_round(tmp_path: Path) -> None:
    """A failure costs one round: the site gets the next task like everybody."""

    async def flaky(task):
        if task.round == 1:
            raise RuntimeError("out of memory")
        return await plus(3.0)(task)

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(1.0), "site-2": flaky})
        rounds, values = await world.run(federated(2, min_responses=1), sites)
        assert [one.accepted for one in rounds] == [("site-1",), ("site-1", "site-2")]
        assert values == [1.0, 3.0]


async def test_a_result_that_comes_after_the_round_is_declined_unpulled(tmp_path: Path) -> None:
    """A straggler is told that its result is not wanted; not a byte of it is pulled or kept."""
    async with World(tmp_path) as world:
        await world.site("site-1", after(1))
        hand = await world.hand("site-2")
        workflow = federated(2, min_responses=1, round_timeout=10)
        async with (
            world.open_job() as job,
            workflow.run(job, ["site-1", "site-2"]) as rounds,
        ):
            first = await anext(rounds)
            pulled, on_disk = job.bytes_landed, landed_bytes(job)
            between = await hand.answer(round=1)
            assert "no round is open" in await hand.refused(between)

            async def late() -> None:
                await anyio.sleep(5)
                delivery = await hand.answer(round=1)
                assert "round 2 is open" in await hand.refused(delivery)

            world.tasks.start_soon(late)
            second = await anext(rounds)
            assert second.failed["site-2"] == "no result within 10 s", "it could still answer"
            assert job.bytes_landed == pulled + first.bytes_landed
            assert landed_bytes(job) == on_disk
            assert hand.endpoint.publisher.statistics().bytes_served == 0


async def test_what_comes_while_a_round_is_closing_is_late(tmp_path: Path) -> None:
    """A result that arrives while the model is being averaged is declined with why the round closed."""
    async with World(tmp_path) as world:
        hand = await world.hand("site-2")
        told: list[str] = []

        async def answer_late() -> None:
            told.append(await hand.refused(await hand.answer()))

        def evaluate(state, sites):
            return {}

        await world.site("site-1", plus(1.0))
        workflow = federated(min_responses=1, round_timeout=10, evaluate=evaluate)
        async with (
            world.open_job() as job,
            workflow.run(job, ["site-1", "site-2"]) as rounds,
        ):
            limiter = world.server.resources.maths

            async def hold_the_engine() -> None:
                await anyio.sleep(9)
                async with limiter:
                    await anyio.sleep(2)
                    await answer_late()

            world.tasks.start_soon(hold_the_engine)
            finished = await anext(rounds)
            assert finished.accepted == ("site-1",)
        await anyio.sleep(1)
        assert told == ["declined: too late: no result within 10 s"]


async def test_a_second_result_is_declined_and_the_first_counts(tmp_path: Path) -> None:
    """The same site twice in a round, while the first lands and after it counted: one is pulled."""
    async with World(tmp_path) as world:
        first, second = await world.hand("site-1"), await world.hand("site-2")
        line = world.network.conditions("site-1", "server")
        workflow = federated(1)
        async with (
            world.open_job() as job,
            workflow.run(job, ["site-1", "site-2"]) as rounds,
        ):

            async def twice() -> None:
                await first.task()
                await second.task()
                line.set(bandwidth=100)
                once = await first.answer(params=model(1.0))
                again = await first.answer(params=model(100.0))
                assert "second result" in await first.refused(again)
                assert (await once.wait()).quorum
                later = await first.answer(params=model(100.0))
                assert "second result" in await first.refused(later)
                await second.answer(params=model(3.0))

            world.tasks.start_soon(twice)
            finished = await anext(rounds)
            assert value_of(finished.state) == 2.0
            assert finished.accepted == ("site-1", "site-2")
            assert finished.failed == {}
        await settled(first.endpoint, second.endpoint)
        after_cleanup = await first.answer()
        assert "refused" in await first.refused(after_cleanup)


async def test_results_that_wait_when_the_workflow_ends_are_declined(tmp_path: Path) -> None:
    """A result that nobody will look at any more is answered, and its site does not wait for a budget."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        hand = await world.hand("site-2")
        async with world.open_job() as job:
            async with federated(2, min_responses=1, cut_off=0).run(
                job, ["site-1", "site-2"]
            ) as rounds:
                await anext(rounds)
                begun = anyio.current_time()
                delivery = await hand.answer(round=2)
            reason = await hand.refused(delivery)
            assert "declined" in reason or "refused" in reason
            assert anyio.current_time() - begun < 1.0


async def test_who_waits_for_its_turn_when_the_round_closes_is_told(tmp_path: Path) -> None:
    """Where contributions take turns, one whose turn did not come is declined, and its site goes on at once."""
    initial = model() | {"layer": torch.zeros(2000)}
    async with World(tmp_path) as world:
        first, second, third = [await world.hand(f"site-{n}") for n in (1, 2, 3)]
        line = world.network.conditions("site-2", "server")
        told: list[tuple[float, str]] = []

        async def answer() -> None:
            await first.task()
            await first.answer(params=initial)
            await anyio.sleep(0.1)
            line.set(bandwidth=100)
            await second.answer(params=initial)
            await anyio.sleep(1)
            delivery = await third.answer(params=initial)
            told.append((anyio.current_time(), await third.refused(delivery)))
            told.append((anyio.current_time(), ""))

        world.tasks.start_soon(answer)
        workflow = federated(initial=initial, min_responses=1, cut_off=10, aggregation="in_time")
        async with (
            world.open_job(quota=3 * 8_300) as job,
            workflow.run(job, ["site-1", "site-2", "site-3"]) as rounds,
        ):
            finished = await anext(rounds)
            assert finished.accepted == ("site-1",)
            assert set(finished.failed) == {"site-2", "site-3"}
            await anyio.sleep(1)
            assert second.endpoint.publisher.statistics().bytes_served == 0
        assert told[0][1].startswith("declined")
        assert told[1][0] == 10.0


@pytest.mark.parametrize("mixed", [False, True], ids=["one payload", "two payloads"])
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_what_is_not_averaged_is_not_pulled(tmp_path: Path, disk: bool, mixed: bool) -> None:
    """Excluded keys stay at their site: they cost neither the line nor the disk, and keep their previous value."""
    frozen = {"frozen.1": torch.zeros(MIB // 4), "frozen.2": torch.zeros(MIB // 2)}
    async with World(tmp_path) as world:
        hand = await world.hand("site-1")

        async def answer() -> None:
            await hand.task()
            params: dict[str, object] = {**frozen, **model(4.0)}
            if mixed:
                params["bias"] = np.full(3, 4.0, dtype=np.float32)
            await hand.answer(params=params)

        world.tasks.start_soon(answer)
        policies = Policies(exclude=("frozen.*",))
        workflow = federated(initial=model() | frozen, disk=disk, policies=policies)
        async with world.open_job() as job, workflow.run(job, ["site-1"]) as rounds:
            finished = await anext(rounds)
            assert value_of(finished.state) == 4.0
            assert torch.equal(finished.state.tensor("frozen.2"), frozen["frozen.2"])
            assert finished.bytes_landed < 64 * 1024
            assert hand.endpoint.publisher.statistics().bytes_served < 64 * 1024
            models = 2 * finished.state.layout.size if disk else 0
            assert job.ledger.peak <= models + 64 * 1024


async def test_a_zero_weight_is_listed_and_not_averaged(tmp_path: Path) -> None:
    """Of weights 0 and 3 the second site's model is the result, and of its metrics too."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(9.0, weight=0), "site-2": plus(2.0, weight=3)})
        rounds, values = await world.run(federated(), sites)
        assert values == [2.0]
        assert rounds[0].metrics == {"loss": 2.0}
        assert rounds[0].weights == {"site-1": 0.0, "site-2": 3.0}


async def test_contributions_are_weighted(tmp_path: Path) -> None:
    """Models and metrics are averaged by weight."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(1.0, weight=1), "site-2": plus(5.0, weight=3)})
        rounds, values = await world.run(federated(), sites)
        assert values == [4.0]
        assert rounds[0].metrics == {"loss": 4.0}
        assert rounds[0].site_metrics == {"site-1": {"loss": 1.0}, "site-2": {"loss": 5.0}}


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_the_order_of_keys_at_a_site_means_nothing(tmp_path: Path, disk: bool) -> None:
    """Tensors are paired by name: three sites with three orders of keys give what sorted ones give."""

    def shuffled(order: list[str], amount: float) -> Train:
        async def train(task):
            params = {name: task.params[name] + amount for name in order}
            params["steps"] = task.params["steps"]
            return Result(params=params, weight=1)

        return train

    orders = (["layer", "bias"], ["bias", "layer"], ["bias", "layer"])
    async with World(tmp_path) as world:
        sites = await world.sites(
            {f"site-{n}": shuffled(order, float(n)) for n, order in enumerate(orders)}
        )
        _, values = await world.run(federated(disk=disk), sites)
        assert values == [1.0]


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
async def test_a_value_that_is_not_finite_costs_its_site(
    tmp_path: Path, bad: float, disk: bool
) -> None:
    """By default one NaN or infinity rejects its site by name and key, and the others' average is untouched."""

    async def train(task):
        params = {name: value + 100 for name, value in task.params.items()}
        params["layer"][1, 2] = bad
        return Result(params=params, weight=1)

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": train, "site-2": plus(2.0)})
        rounds, values = await world.run(federated(disk=disk, min_responses=1), sites)
        assert values == [2.0]
        assert "NaN or infinite" in rounds[0].failed["site-1"]
        assert "tensor=layer" in rounds[0].failed["site-1"]


async def test_a_value_that_is_not_finite_can_cost_the_round_or_nothing(tmp_path: Path) -> None:
    """The policy decides: `reject_round` fails the round, `allow` averages what came."""

    async def train(task):
        params = dict(task.params)
        params["bias"] = torch.full((3,), float("nan"))
        return Result(params=params, weight=1)

    async with World(tmp_path) as world:
        await world.site("site-1", train)
        policies = Policies(nonfinite="reject_round")
        with pytest.raises(AggregationError, match="nonfinite of site site-1 costs the round"):
            await world.run(federated(policies=policies), ["site-1"])
    async with World(tmp_path) as world:
        await world.site("site-1", train)
        workflow = federated(policies=Policies(nonfinite="allow"))
        async with world.open_job() as job, workflow.run(job, ["site-1"]) as rounds:
            finished = await anext(rounds)
            assert finished.state.tensor("bias").isnan().all()


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_a_mismatch_can_cost_the_round(tmp_path: Path, disk: bool) -> None:
    """With `reject_round` a wrong shape ends the round, although it is found before anything is pulled."""

    async def train(task):
        return Result(params=model() | {"bias": torch.zeros(4)}, weight=1)

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": train, "site-2": after(100)})
        workflow = federated(disk=disk, policies=Policies(mismatch="reject_round"), min_responses=1)
        with pytest.raises(AggregationError, match="site site-1 costs the round: shape"):
            await world.run(workflow, sites)
        assert anyio.current_time() == 0.0


async def test_a_slow_site_neither_blocks_nor_changes_the_others(tmp_path: Path) -> None:
    """One site stuck half way: another is folded and its disk freed meanwhile, and the sum is the same bits."""
    generator = torch.Generator().manual_seed(7)
    updates = [torch.randn(6 * MIB // 4, generator=generator) for _ in range(2)]
    initial = {"w": torch.zeros(6 * MIB // 4)}

    def sender(update: torch.Tensor) -> Train:
        async def train(task):
            return Result(params={"w": update}, weight=1)

        return train

    results = []
    for paused in (False, True):
        async with World(tmp_path) as world:
            sites = await world.sites({f"site-{n}": sender(one) for n, one in enumerate(updates)})
            workflow = federated(initial=initial, aggregation="in_time")
            line = world.network.conditions("site-1", "server")
            line.set(bandwidth=MIB / 2 if paused else 1e9)
            async with world.open_job() as job, workflow.run(job, sites) as rounds:

                async def look() -> None:
                    await anyio.sleep(10)
                    whole = [p for p in job.path.rglob("*.safetensors") if "model" not in p.name]
                    assert not whole, "the complete one was folded and freed"
                    parts = list(job.path.rglob("*.part"))
                    assert len(parts) == 1, "the other one is half way"

                if paused:
                    world.tasks.start_soon(look)
                finished = await anext(rounds)
                assert (finished.seconds > 11) == paused
                results.append(finished.state.tensor("w").clone())
    assert torch.equal(*results)
