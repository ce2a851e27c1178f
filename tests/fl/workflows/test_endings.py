"""Every way a round can go wrong on the aggregator's own side: typed, released, settled, and the job goes on."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import pytest
import torch
from safetensors.torch import load_file, save_file

from streamoff.errors import (
    JobClosedError,
    NoSpaceError,
    QuorumLostError,
    QuotaExceededError,
    UnsupportedTensorError,
    UsageError,
    WeightError,
)
from streamoff.fl.persistor import FilePersistor
from streamoff.fl.workflows.fedavg import FedAvg
from streamoff.machines.job_root import JobRootState
from streamoff.runtime.jobs import Job
from streamoff.runtime.threads import wait_from_thread
from streamoff.tensors.layout import Layout
from streamoff.tensors.writer import FileWriter
from streamoff.types import MIB

from ..world import World, entries, federated, landed_bytes, model, plus, value_of

pytestmark = pytest.mark.usefixtures("no_leaks")

E = TypeVar("E", bound=Exception)


async def fails(
    world: World, job: Job, workflow: FedAvg, sites: Iterable[str], error: type[E]
) -> E:
    """Run a workflow that fails; nothing of it may be left in the job."""

    async def run() -> None:
        async with workflow.run(job, sites) as rounds:
            async for _ in rounds:
                pass

    with pytest.raises(error) as caught:
        await run()
    assert type(caught.value) is error, "not wrapped"
    assert landed_bytes(job) == 0
    assert not world.server.publisher.open
    assert not job.failures
    return caught.value


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_weights_that_add_up_to_nothing_cost_the_round(
    tmp_path: Path, aggregation: str, disk: bool
) -> None:
    """Sites without a single example are a typed refusal; no model of NaN, and the job lives on."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(1.0, weight=0), "site-2": plus(2.0, weight=0)})
        async with world.open_job() as job:
            workflow = federated(aggregation=aggregation, disk=disk)
            error = await fails(world, job, workflow, sites, WeightError)
            assert "add up to 0" in str(error)


async def test_the_model_of_the_last_good_round_stands(tmp_path: Path) -> None:
    """A round that fails publishes nothing: the persisted model is the one from before, whole."""
    target = tmp_path / "out" / "model.safetensors"
    persistor = FilePersistor(target)
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        await world.run(federated(persistor=persistor), ["site-1"])
    before = target.read_bytes()

    async def fail_later(task):
        if task.round == 2:
            raise RuntimeError("no GPU")
        return await plus(5.0)(task)

    async with World(tmp_path) as world:
        await world.site("site-1", fail_later)
        with pytest.raises(QuorumLostError):
            await world.run(federated(3, persistor=persistor), ["site-1"])
    assert target.read_bytes() == before
    assert entries(target.parent) == ["model.safetensors"]
    assert float(load_file(target)["bias"][0]) == 1.0


async def test_the_final_model_is_published(tmp_path: Path) -> None:
    """A finished iteration leaves the last model at the persistor's target, bit for bit; one left before does not."""
    target = tmp_path / "out" / "model.safetensors"
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        workflow = federated(2, persistor=FilePersistor(target))
        async with world.open_job() as job, workflow.run(job, ["site-1"]) as rounds:
            async for finished in rounds:
                if finished.number == 2:
                    break
        assert not target.exists()
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        _, values = await world.run(workflow, ["site-1"])
        assert values == [1.0, 2.0]
        assert torch.equal(load_file(target)["layer"], model(2.0)["layer"])


@pytest.mark.parametrize("how", ["finished", "aborted"])
async def test_whoever_sees_that_a_job_is_gone_finds_everything_in_its_place(
    tmp_path: Path, how: str
) -> None:
    """In the first instant in which a job counts as gone its root is, and the model is published whole or untouched."""
    scratch, target = tmp_path / "scratch", tmp_path / "out" / "model.safetensors"
    scratch.mkdir()
    target.parent.mkdir()
    save_file(model(9.0), target)
    seen: list[tuple[list[str], list[str], float]] = []

    async def watch(job: Job) -> None:
        while job.state is not JobRootState.GONE:
            await anyio.lowlevel.checkpoint()
        published = float(load_file(target)["bias"][0])
        seen.append((entries(scratch), entries(target.parent), published))

    async def run(world: World, scope: anyio.CancelScope) -> None:
        workflow = federated(2, persistor=FilePersistor(target))
        async with world.open_job() as job, workflow.run(job, ["site-1"]) as rounds:
            world.tasks.start_soon(watch, job)
            async for finished in rounds:
                if how == "aborted" and finished.number == 2:
                    scope.cancel()

    async with World(scratch) as world:
        await world.site("site-1", plus(1.0))
        with anyio.CancelScope() as scope:
            await run(world, scope)
        while not seen:
            await anyio.lowlevel.checkpoint()
    published = 2.0 if how == "finished" else 9.0
    assert seen == [([], ["model.safetensors"], published)]


async def test_a_persistor_that_cannot_write_is_the_workflows_error(tmp_path: Path) -> None:
    """The rounds came, and the failed publication is raised where the iteration would have ended."""
    (tmp_path / "file").touch()
    persistor = FilePersistor(tmp_path / "file" / "model.safetensors")
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with (
            world.open_job() as job,
            federated(persistor=persistor).run(job, ["site-1"]) as rounds,
        ):
            assert (await anext(rounds)).number == 1
            with pytest.raises(OSError, match=r"Not a directory|File exists"):
                await anext(rounds)
        await anyio.sleep(1)
        assert "site-1" in world.ended


async def test_what_evaluate_raises_is_the_rounds_error(tmp_path: Path) -> None:
    """A user's function that fails ends the workflow with its own error; the new model is released."""

    def evaluate(state, sites):
        raise ZeroDivisionError("no validation data")

    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with world.open_job() as job:
            workflow = federated(evaluate=evaluate)
            error = await fails(world, job, workflow, ["site-1"], ZeroDivisionError)
            assert "no validation data" in str(error)


async def test_evaluate_sees_the_new_model_and_who_made_it(tmp_path: Path) -> None:
    """Each new model is judged once, in a worker thread, with the sites of every round so far."""
    seen: list[tuple[float, object]] = []

    def evaluate(state, sites):
        seen.append((value_of(state), sites))
        return {"accuracy": value_of(state) / 10}

    async def sometimes(task):
        if task.round == 2:
            raise RuntimeError("away")
        return await plus(3.0)(task)

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(1.0), "site-2": sometimes})
        rounds, values = await world.run(federated(2, min_responses=1, evaluate=evaluate), sites)
        assert values == [2.0, 3.0]
        assert [dict(one.metrics) for one in rounds] == [{"accuracy": 0.2}, {"accuracy": 0.3}]
        assert seen == [
            (2.0, {1: ("site-1", "site-2")}),
            (3.0, {1: ("site-1", "site-2"), 2: ("site-1",)}),
        ]


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
async def test_a_result_that_cannot_be_written_costs_the_round(
    tmp_path: Path, aggregation: str
) -> None:
    """A disk that fills up while the model is averaged fails the round with a typed error; all is released."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with world.open_job() as job:
            made = job.new_writer
            calls = []

            def new_writer(layout: Layout, what: str, **others: str) -> FileWriter:
                calls.append(what)
                if len(calls) > 1:
                    raise NoSpaceError("no room on disk", needed=layout.size, free=0)
                return made(layout, what, **others)

            job.new_writer = new_writer  # type: ignore[method-assign]
            workflow = federated(aggregation=aggregation)
            error = await fails(world, job, workflow, ["site-1"], NoSpaceError)
            assert "no room" in str(error)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = os.geteuid() == 0 and os.system(f"mount -t tmpfs -o size=8m tmpfs {place}") == 0
    if not mounted:
        pytest.skip("mounting a small tmpfs needs root and the right to mount")
    yield place
    os.system(f"umount {place}")


async def test_a_round_that_cannot_fit_is_refused_before_anything_is_sent(
    small_disk: Path,
) -> None:
    """Sites times model against the free space: refused with the numbers, and no site has trained."""
    big = {"w": torch.zeros(2 * MIB // 4)}
    async with World(small_disk) as world:
        trained: list[object] = []

        async def train(task):
            trained.append(task)

        sites = await world.sites({f"site-{n}": train for n in range(8)})
        async with world.open_job(ram_backed="allow") as job:
            workflow = federated(initial=big, aggregation="columnar")
            error = await fails(world, job, workflow, sites, NoSpaceError)
            assert "does not fit on the file system" in str(error)
            assert error.where["sites"] == 8
            assert str(error.where["model_bytes"]).startswith("209")
        assert trained == []


async def test_a_model_that_fills_the_disk_is_refused_at_the_start(small_disk: Path) -> None:
    """An initial model that has no room is a typed error of the first round; its copy is gone."""
    async with World(small_disk) as world, world.open_job(ram_backed="allow") as job:
        workflow = federated(initial={"w": torch.zeros(10 * MIB // 4)})
        error = await fails(world, job, workflow, ["site-1"], NoSpaceError)
        assert "no room on disk" in str(error)


async def test_a_quota_below_the_round_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """An explicit engine that needs more than the quota is refused before the broadcast."""
    async with World(tmp_path) as world:
        sites = await world.sites({f"site-{n}": plus(1.0) for n in range(4)})
        async with world.open_job(quota=1000) as job:
            workflow = federated(aggregation="columnar")
            error = await fails(world, job, workflow, sites, QuotaExceededError)
            assert "does not fit the job's quota" in str(error)
            assert error.where["engine"] == "columnar"


async def test_a_small_quota_folds_contributions_one_after_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where contributions do not fit together they take turns: every site is in, and the quota holds."""
    initial = {"layer": torch.zeros(1000), "bias": torch.zeros(10), "steps": torch.tensor(0)}
    size = 4_400
    async with World(tmp_path) as world:
        sites = await world.sites({f"site-{n}": plus(float(n)) for n in range(12)})
        workflow = federated(2, initial=initial)
        with caplog.at_level(logging.WARNING, logger="streamoff.fl"):
            rounds, values = await world.run(workflow, sites, quota=4 * size)
        assert values == [5.5, 11.0]
        assert [len(one.accepted) for one in rounds] == [12, 12]
        assert [one.report.engine for one in rounds] == ["in_time", "in_time"]
        assert caplog.text.count("folding each on arrival") == 1, "said once, in the first round"


async def test_a_quota_that_just_fits_fits_in_every_round(tmp_path: Path) -> None:
    """What a round released is off the books before the next one is measured: no round is refused for it."""
    async with World(tmp_path) as world:
        sites = await world.sites({f"site-{n}": plus(1.0) for n in range(3)})
        rounds, _ = await world.run(federated(6), sites, quota=5 * 240)
        assert [one.report.engine for one in rounds] == ["columnar"] * 6
        assert [one.failed for one in rounds] == [{}] * 6


async def test_a_site_lost_while_its_file_is_read_is_dropped(tmp_path: Path) -> None:
    """A landed file that is damaged before the average fails its site, and the walk goes on without it."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        hand = await world.hand("site-2")
        async with world.open_job() as job:

            async def damage() -> None:
                await hand.task()
                await anyio.sleep(1)
                (landed,) = [p for p in job.path.rglob("*.safetensors") if "model" not in p.name]
                content = bytearray(landed.read_bytes())
                content[-1] ^= 0xFF
                landed.write_bytes(content)
                await hand.answer(params=model(3.0))

            world.tasks.start_soon(damage)
            async with federated(min_responses=1).run(job, ["site-1", "site-2"]) as rounds:
                finished = await anext(rounds)
                assert finished.accepted == ("site-2",)
                assert "site-1" in finished.failed
                assert finished.report.restarts == 1
                assert value_of(finished.state) == 3.0
                assert landed_bytes(job) == finished.state.layout.size


async def test_a_quorum_lost_while_files_are_read_releases_the_result(tmp_path: Path) -> None:
    """If the dropped site was needed the round fails, and the model averaged without it is not kept."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        hand = await world.hand("site-2")
        async with world.open_job() as job:

            async def damage() -> None:
                await hand.task()
                await anyio.sleep(1)
                (landed,) = [p for p in job.path.rglob("*.safetensors") if "model" not in p.name]
                os.truncate(landed, 100)
                await hand.answer(params=model(3.0))

            world.tasks.start_soon(damage)
            error = await fails(world, job, federated(), ["site-1", "site-2"], QuorumLostError)
            assert "site-1" in str(error)
            assert error.got == 1


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
async def test_no_half_added_contribution_is_published(tmp_path: Path, aggregation: str) -> None:
    """A contribution is in the average with all its keys or with none, and the weights say which."""
    initial = {f"w{n}": torch.zeros(40_000) for n in range(4)}

    async def train(task):
        return await plus(8.0, weight=1.0)(task)

    async with World(tmp_path) as world:
        await world.site("site-1", train)
        hand = await world.hand("site-2")
        async with world.open_job() as job:

            async def damage() -> None:
                await hand.task()
                params = {name: value + 2 for name, value in initial.items()}
                params["w3"] = torch.full((40_000,), math.inf)
                await hand.answer(params=params)

            world.tasks.start_soon(damage)
            workflow = federated(initial=initial, min_responses=1, aggregation=aggregation)
            async with workflow.run(job, ["site-1", "site-2"]) as rounds:
                finished = await anext(rounds)
                assert finished.weights == {"site-1": 1.0}
                for name in initial:
                    assert float(finished.state.tensor(name).min()) == 8.0
                    assert float(finished.state.tensor(name).max()) == 8.0


async def test_the_job_finalising_under_a_round_ends_it(tmp_path: Path) -> None:
    """From finalise() on no result is pulled: the round ends with that reason, and no new one begins."""
    async with World(tmp_path) as world:
        hand = await world.hand("site-1")
        told: list[str] = []
        async with world.open_job() as job, federated().run(job, ["site-1"]) as rounds:

            async def answer() -> None:
                await hand.task()
                job.finalise()
                told.append(await hand.refused(await hand.answer()))

            world.tasks.start_soon(answer)
            with pytest.raises(QuorumLostError, match="admits no more work"):
                await anext(rounds)
            await anyio.sleep(1)
        assert len(told) == 1
        assert "admits no more work" in told[0]
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with world.open_job() as job, federated(2).run(job, ["site-1"]) as rounds:
            await anext(rounds)
            job.finalise()
            with pytest.raises(JobClosedError, match="no new rounds"):
                await anext(rounds)


async def test_two_workflows_of_one_job_do_not_run_at_once(tmp_path: Path) -> None:
    """The second is refused where it is asked for a round; the first and its sites do not notice."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with world.open_job() as job, federated(2).run(job, ["site-1"]) as rounds:
            await anext(rounds)
            async with federated().run(job, ["site-1"]) as others:
                with pytest.raises(UsageError, match="reader already"):
                    await anext(others)
            assert value_of((await anext(rounds)).state) == 2.0


async def test_workflows_can_follow_each_other(tmp_path: Path) -> None:
    """A second run in the same job begins afresh, with executors that serve it."""
    async with World(tmp_path) as world, world.open_job() as job:
        for amount in (1.0, 5.0):
            await world.site("site-1", plus(amount))
            async with federated().run(job, ["site-1"]) as rounds:
                assert value_of((await anext(rounds)).state) == amount
                with pytest.raises(StopAsyncIteration):
                    await anext(rounds)
            await anyio.sleep(1)


async def test_goodbye_reaches_whom_it_can(tmp_path: Path) -> None:
    """A site whose link is down costs the end nothing, and one behind a silent link hears it when it is back."""
    async with World(tmp_path) as world:
        sites = await world.sites({f"site-{n}": plus(1.0) for n in range(3)})
        async with world.open_job() as job, federated().run(job, sites) as rounds:
            await anext(rounds)
            world.network.cut("site-0", "server")
            world.network.partition("site-1", "server")
            begun = anyio.current_time()
        assert anyio.current_time() == begun
        await anyio.sleep(1)
        assert set(world.ended) == {"site-2"}
        world.network.heal("site-1", "server")
        await anyio.sleep(1)
        assert set(world.ended) == {"site-1", "site-2"}


async def test_a_dtype_without_arithmetic_is_refused_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    """A global model that cannot be averaged is refused by key; no site trains for it."""
    initial = {"scales": torch.zeros(4, dtype=torch.float8_e8m0fnu)}
    async with World(tmp_path) as world, world.open_job() as job:
        with pytest.raises(TypeError, match="scales"):
            async with federated(initial=initial).run(job, ["site-1"]) as rounds:
                await anext(rounds)


@pytest.mark.parametrize(
    ("initial", "error"),
    [
        ({"w": [1.0, 2.0]}, UnsupportedTensorError),
        ({"w": torch.zeros(3).to_sparse()}, UnsupportedTensorError),
        ([torch.zeros(3)], UsageError),
        (Path("/nowhere/model.safetensors"), OSError),
    ],
    ids=["list", "sparse", "no-mapping", "no-file"],
)
async def test_an_initial_model_that_is_none_fails_the_first_round(
    tmp_path: Path, initial: object, error: type[Exception]
) -> None:
    """What cannot be a model is refused where the first round is asked for, and the sites are let go."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with world.open_job() as job, federated(initial=initial).run(job, ["site-1"]) as all_:
            with pytest.raises(error):
                await anext(all_)
        await anyio.sleep(1)
        assert "site-1" in world.ended


async def test_an_initial_file_stays(tmp_path: Path) -> None:
    """A model file that a workflow starts from is read where it is and is there, unchanged, afterwards."""
    path = tmp_path / "initial.safetensors"
    save_file(model(5.0), path)
    before = path.read_bytes()
    for disk in (True, False):
        async with World(tmp_path) as world:
            await world.site("site-1", plus(1.0))
            _, values = await world.run(federated(initial=path, disk=disk), ["site-1"])
            assert values == [6.0]
        assert path.read_bytes() == before


async def test_the_callers_tensors_are_never_touched(tmp_path: Path) -> None:
    """Initial tensors are copied: whatever happens to them later, the rounds are the same."""
    for disk in (True, False):
        initial = model(1.0)
        async with World(tmp_path) as world:
            await world.site("site-1", plus(1.0))
            workflow = federated(2, initial=initial, disk=disk)
            async with world.open_job() as job, workflow.run(job, ["site-1"]) as rounds:
                async for _ in rounds:
                    initial["bias"].fill_(99)
            assert float(initial["layer"][0, 0]) == 1.0


async def test_a_failed_consumer_of_the_job_ends_the_iteration_with_it(tmp_path: Path) -> None:
    """When something else in the job fails the body is cut, the workflow settles, and that error is raised."""

    async def broken() -> None:
        await anyio.sleep(3)
        raise ZeroDivisionError("a consumer of mine")

    async def body(world: World) -> None:
        async with world.open_job() as job, federated().run(job, ["site-1"]) as rounds:
            job.start(broken)
            await anext(rounds)

    async with World(tmp_path) as world:
        await world.hand("site-1")
        with pytest.raises(ZeroDivisionError, match="a consumer of mine"):
            await body(world)
        assert anyio.current_time() == 3.0
        assert not world.server.publisher.open
        assert entries(tmp_path) == []


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
async def test_a_controller_that_is_cancelled_mid_upload_is_out_within_its_window(
    tmp_path: Path, aggregation: str
) -> None:
    """An outer cancellation while a site uploads: the site hears it at once, and scratch and transactions are gone."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        hand = await world.hand("site-2")
        told: list[tuple[float, str]] = []

        async def upload() -> None:
            await hand.task()
            world.network.conditions("site-2", "server").set(bandwidth=10)
            delivery = await hand.answer()
            told.append((anyio.current_time(), await hand.refused(delivery)))
            told.append((anyio.current_time(), ""))

        world.tasks.start_soon(upload)
        with anyio.move_on_after(9) as cancelled:
            await world.run(federated(aggregation=aggregation), ["site-1", "site-2"])
        assert cancelled.cancelled_caught
        assert anyio.current_time() == 9.0
        assert not world.server.publisher.open
        assert entries(tmp_path) == []
        await anyio.sleep(1)
        assert told[0][1] == "cancelled: the receiver was cancelled"
        assert told[1][0] == 9.0


async def test_leaving_does_not_wait_for_ever_for_a_blocking_call(tmp_path: Path) -> None:
    """A user's function that blocks for an hour holds the leaving up for five seconds; then the job names it stuck."""

    async def an_hour() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(3600)

    def evaluate(state, sites):
        wait_from_thread(an_hour)
        return {}

    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with world.open_job(drain_window=2.0) as job:
            with anyio.move_on_after(10):
                async with federated(evaluate=evaluate).run(job, ["site-1"]) as rounds:
                    await anext(rounds)
            assert anyio.current_time() == 15.0
        assert anyio.current_time() == pytest.approx(17.2)
        assert job.report.state == "stuck"
        assert [one.name for one in job.report.consumers] == ["FedAvg"]
        await anyio.sleep(3600)
        assert entries(tmp_path) == []
