"""A site in the process of its endpoint: what it trains on, what it sends, whom it hears, and how it ends."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from streamoff.errors import QuorumLostError, UsageError
from streamoff.fl.aggregation import Kind
from streamoff.fl.envelope import TaskEnvelope, task_topic
from streamoff.fl.executors.in_process import InProcess, Result, Task
from streamoff.runtime.threads import wait_from_thread
from streamoff.tensors.layout import Layout, plan
from streamoff.tensors.lazy import open_state
from streamoff.tensors.state import MemoryState
from streamoff.tensors.views import Views
from streamoff.types import MIB

from ...soon import soon
from ..world import JOB, Train, World, federated, model, plus, reasons, settled, value_of

pytestmark = pytest.mark.usefixtures("no_leaks")


def added(task: Task, amount: float = 1.0) -> Result:
    """The model of a task with a number added to every float."""
    params = {k: v if k == "steps" else v + amount for k, v in task.params.items()}
    return Result(params=params, weight=1)


class Trainer:
    """Objects that train when they are called, in a coroutine or not."""

    async def __call__(self, task: Task) -> Result:
        return added(task)


async def coroutine(task: Task) -> Result:
    """Training in the event loop."""
    await anyio.sleep(1)
    return added(task)


def later(task: Task) -> Any:
    """A plain function that returns what is to be awaited."""
    return coroutine(task)


def thread(task: Task) -> Result:
    """Training in a worker thread, which must not be the event loop's."""
    assert threading.current_thread() is not threading.main_thread()
    return added(task)


TRAININGS: dict[str, Train] = {
    "coroutine": coroutine,
    "thread": thread,
    "partial-coroutine": partial(coroutine),
    "partial-thread": partial(added, amount=1.0),
    "object": Trainer(),
    "function-of-a-coroutine": later,
}


@pytest.mark.parametrize("name", TRAININGS)
async def test_training_is_a_coroutine_or_runs_in_a_thread(tmp_path: Path, name: str) -> None:
    """Whatever callable it is, its result is what the server gets."""
    async with World(tmp_path) as world:
        await world.site("site-1", TRAININGS[name])
        _, values = await world.run(federated(2), ["site-1"])
        assert values == [1.0, 2.0]


async def test_a_task_says_what_is_wanted(tmp_path: Path) -> None:
    """Job, round, number of rounds, kind and model reach the training code."""
    seen: list[tuple[object, ...]] = []

    async def train(task: Task) -> Result:
        seen.append((task.job, task.round, task.rounds, task.kind, float(task.params["bias"][0])))
        return added(task)

    async with World(tmp_path) as world:
        await world.site("site-1", train)
        await world.run(federated(2), ["site-1"])
    assert seen == [(JOB, 1, 2, Kind.FULL, 0.0), (JOB, 2, 2, Kind.FULL, 1.0)]


async def test_functions_train_one_at_a_time_unless_told_otherwise(tmp_path: Path) -> None:
    """In one event loop one function trains at a time by default, and a limiter of one's own says how many."""

    async def most(limiter: anyio.CapacityLimiter | None) -> int:
        at_once = [0, 0]

        def train(task: Task) -> Result:
            at_once[0] += 1
            at_once[1] = max(at_once)
            wait_from_thread(anyio.sleep, 10)
            at_once[0] -= 1
            return added(task)

        async with World(tmp_path) as world:
            for number in range(4):
                await world.site(f"site-{number}", train, limiter=limiter)
            await world.run(federated(), [f"site-{number}" for number in range(4)])
        return at_once[1]

    assert await most(None) == 1
    assert await most(anyio.CapacityLimiter(3)) == 3


async def test_a_training_thread_does_not_hold_up_the_aggregator(tmp_path: Path) -> None:
    """A straggler that blocks its thread in the aggregator's own event loop delays no other site's result."""

    def slow(task: Task) -> Result:
        wait_from_thread(anyio.sleep, 100)
        return added(task)

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(5.0), "site-2": slow})
        rounds, values = await world.run(federated(min_responses=1, cut_off=10), sites)
        assert (rounds[0].seconds, values) == (10.0, [5.0])


# --- failures -------------------------------------------------------------------------------------


async def fails_in_a_coroutine(task: Task) -> Result:
    """Training that fails."""
    raise RuntimeError("no GPU")


def fails_in_a_thread(task: Task) -> Result:
    """Training that fails."""
    raise RuntimeError("no GPU")


def returns_parameters(task: Task) -> Any:
    """Training that forgot to wrap its result."""
    return task.params


def has_a_metric_that_is_no_number(task: Task) -> Result:
    """Training with a wrong metric."""
    return Result(params=model(), weight=1, metrics={"loss": "low"})  # type: ignore[dict-item]


def is_of_no_kind(task: Task) -> Result:
    """Training of a wrong kind."""
    return Result(params=model(), weight=1, kind="half")  # type: ignore[arg-type]


def has_a_tensor_that_cannot_travel(task: Task) -> Result:
    """Training with a sparse result."""
    return Result(params=model() | {"bias": torch.zeros(3).to_sparse()}, weight=1)


def has_a_name_that_no_link_carries(task: Task) -> Result:
    """Training with a tensor whose name alone is above a limit."""
    return Result(params=model() | {"n" * (MIB + 1): torch.zeros(3)}, weight=1)


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (fails_in_a_coroutine, "RuntimeError: no GPU"),
        (fails_in_a_thread, "RuntimeError: no GPU"),
        (returns_parameters, "train() must return a Result"),
        (has_a_metric_that_is_no_number, "could not convert string to float"),
        (is_of_no_kind, "'half' is not a valid Kind"),
        (has_a_tensor_that_cannot_travel, "tensor of this layout cannot travel"),
        (has_a_name_that_no_link_carries, "limit 'name'"),
    ],
)
async def test_a_training_that_fails_is_reported(tmp_path: Path, train: Train, why: str) -> None:
    """The server hears at once what went wrong, and the site serves the next task."""
    healthy = added

    def sometimes(task: Task) -> Any:
        return train(task) if task.round == 1 else healthy(task, 3.0)

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": sometimes, "site-2": plus(1.0)})
        rounds, values = await world.run(federated(2, min_responses=1), sites)
        assert why in rounds[0].failed["site-1"]
        assert rounds[0].seconds == 0.0
        assert rounds[1].accepted == ("site-1", "site-2")
        assert values == [1.0, 3.0]


async def test_a_result_that_is_refused_is_logged_and_the_site_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is not the end of a site: it says why in its log and takes the next task."""

    async def train(task: Task) -> Result:
        result = added(task)
        return result if task.round > 1 else Result(params=result.params, weight=float("nan"))

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": train, "site-2": plus(1.0)})
        with caplog.at_level(logging.INFO, logger="streamoff.fl.executors"):
            rounds, _ = await world.run(federated(2, min_responses=1), sites)
        assert [len(one.accepted) for one in rounds] == [1, 2]
    assert "the result was not taken: declined: not a weight" in caplog.text


def test_training_must_be_callable() -> None:
    """Something else than a function is refused before anything is read."""
    with pytest.raises(UsageError, match="train"):
        InProcess(None, job=JOB, train=3)  # type: ignore[arg-type]


# --- whom it hears --------------------------------------------------------------------------------


async def test_tasks_of_anybody_but_the_server_are_declined(tmp_path: Path) -> None:
    """Another endpoint can neither make a site train nor send it home, though its messages arrive."""
    trained: list[Task] = []

    async def train(task: Task) -> Result:
        trained.append(task)
        return added(task)

    async with World(tmp_path) as world:
        await world.site("site-1", train)
        stranger = await world.endpoint("site-2")
        task = TaskEnvelope(job=JOB, round=1, rounds=1, params=model())
        sent = await stranger.send("site-1", task_topic(JOB), task.tree())
        assert "a task of somebody else" in reasons(await sent.wait())
        goodbye = TaskEnvelope(job=JOB, round=0, rounds=1)
        await (await stranger.send("site-1", task_topic(JOB), goodbye.tree())).wait()
        await anyio.sleep(1)
        assert trained == []
        assert world.ended == {}
        _, values = await world.run(federated(), ["site-1"])
        assert values == [1.0]


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        {"job": JOB, "round": "1", "rounds": 1, "kind": "full", "params": model()},
        {"job": "job-2", "round": 1, "rounds": 1, "kind": "full", "params": model()},
        {"job": JOB, "round": 1, "rounds": 1, "kind": "half", "params": model()},
    ],
    ids=["nothing", "empty", "types", "job", "kind"],
)
async def test_what_is_no_task_is_declined(tmp_path: Path, tree: object) -> None:
    """A malformed task, also of the server, is answered and does not end the site."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        sent = await world.server.send("site-1", task_topic(JOB), tree)
        outcome = await sent.wait()
        assert isinstance(tree, dict) is False or not tree or "declined" in reasons(outcome)
        await settled(world.server)
        _, values = await world.run(federated(), ["site-1"])
        assert values == [1.0]


# --- what it sends --------------------------------------------------------------------------------


async def test_a_loop_that_goes_on_changing_its_tensors_needs_a_snapshot(tmp_path: Path) -> None:
    """With `snapshot` what was returned is what is averaged; without, the change is found and costs the site."""

    def train_in_place(world: World) -> Train:
        tensors = model()

        async def train(task: Task) -> Result:
            for tensor in (tensors["layer"], tensors["bias"]):
                tensor.add_(1)

            async def go_on() -> None:
                await anyio.sleep(0.001)
                for tensor in tensors.values():
                    tensor.add_(100)

            world.tasks.start_soon(go_on)
            return Result(params=tensors, weight=1)

        return train

    for snapshot in (True, False):
        async with World(tmp_path) as world:
            world.network.conditions("site-1", "server").set(latency=1.0)
            await world.site("site-1", train_in_place(world), snapshot=snapshot)
            await world.site("site-2", plus(1.0))
            await anyio.sleep(5)  # the handshake takes its time as well
            workflow = federated(min_responses=1)
            rounds, values = await world.run(workflow, ["site-1", "site-2"])
            assert values == [1.0]
            assert ("changed" in rounds[0].failed.get("site-1", "")) != snapshot


async def test_a_snapshot_takes_every_kind_of_parameters(tmp_path: Path) -> None:
    """Tensors with a graph, parameters, arrays, states in memory and files are all sent with `snapshot`."""
    path = tmp_path / "model.safetensors"
    save_file(model(6.0), path)
    graph = {
        "layer": torch.full((2, 3), 3.0, requires_grad=True) * 2,
        "bias": torch.nn.Parameter(torch.full((3,), 6.0)),
        "steps": torch.tensor(0),
    }
    choices = (
        graph,
        {name: tensor.numpy() for name, tensor in model(6.0).items()},
        MemoryState(model(6.0)),
        open_state(path),
    )
    for params in choices:
        async with World(tmp_path / "scratch") as world:
            world.scratch.mkdir(exist_ok=True)

            async def train(task: Task, params: Any = params) -> Result:
                return Result(params=params, weight=1)

            await world.site("site-1", train, snapshot=True)
            rounds, values = await world.run(federated(), ["site-1"])
            assert (values, rounds[0].failed) == ([6.0], {})


class Ones:
    """A source that computes a model of ones, and remembers how often it was closed."""

    blocking = True

    def __init__(self) -> None:
        self.layout: Layout = plan([("layer", "F32", (2, 3)), ("bias", "F32", (3,))])
        self.closed = 0
        self._content = self.layout.header + np.ones(9, dtype=np.float32).tobytes()

    def views(self, start: int, stop: int) -> Views | None:
        return None

    def read_into(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self._content[start : start + len(buffer)]

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("metrics", [{}, {"loss": "low"}], ids=["taken", "not-sent"])
async def test_a_source_is_pulled_and_closed(tmp_path: Path, metrics: dict[str, Any]) -> None:
    """A result can be computed as it is read; it is closed when the server has it, or if it cannot be sent."""
    source = Ones()

    async def train(task: Task) -> Result:
        return Result(params=source, weight=1, metrics=metrics)

    initial = {"layer": torch.zeros(2, 3), "bias": torch.zeros(3)}
    async with World(tmp_path) as world:
        await world.site("site-1", train)
        await world.site("site-2", plus(3.0))
        workflow = federated(initial=initial, min_responses=1)
        _, values = await world.run(workflow, ["site-1", "site-2"])
        assert values == [3.0 if metrics else 2.0]
    assert source.closed > 0


async def test_metrics_may_be_any_real_numbers(tmp_path: Path) -> None:
    """NumPy's and torch's scalars are numbers to the server."""

    async def train(task: Task) -> Result:
        metrics: dict[str, Any] = {
            "a": np.float32(0.5),
            "b": np.int64(3),
            "c": torch.tensor(2.0),
            "d": True,
        }
        return Result(params=added(task).params, weight=1, metrics=metrics)

    async with World(tmp_path) as world:
        await world.site("site-1", train)
        rounds, _ = await world.run(federated(), ["site-1"])
        assert rounds[0].metrics == {"a": 0.5, "b": 3.0, "c": 2.0, "d": 1.0}


# --- links and ends -------------------------------------------------------------------------------


async def test_a_result_waits_for_a_lost_link(tmp_path: Path) -> None:
    """A link that is down at the moment of sending gets the grace that a download gets."""
    async with World(tmp_path) as world:

        async def train(task: Task) -> Result:
            world.network.cut("site-1", "server")
            world.tasks.start_soon(mend)
            return added(task)

        async def mend() -> None:
            await anyio.sleep(20)
            world.network.mend("site-1", "server")

        await world.site("site-1", train)
        rounds, values = await world.run(federated(), ["site-1"])
        assert values == [1.0]
        assert 20 <= rounds[0].seconds <= 30


async def test_a_server_that_stays_away_is_given_up_and_the_site_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A result that cannot be sent is dropped with a log line; the site takes tasks when the server is back."""
    async with World(tmp_path) as world:

        async def train(task: Task) -> Result:
            if task.round == 1:
                world.network.cut("site-1", "server")
                world.tasks.start_soon(mend)
                await anyio.sleep(1)
            return added(task)

        async def mend() -> None:
            await anyio.sleep(200)
            world.network.mend("site-1", "server")

        await world.site("site-1", train)

        async def slow(task: Task) -> Result:
            await anyio.sleep(300)
            return added(task, 2.0)

        await world.site("site-2", slow)

        workflow = federated(2, min_responses=1)
        rounds, _ = await world.run(workflow, ["site-1", "site-2"], drain_window=0)
        assert [len(one.accepted) for one in rounds] == [1, 2]
    assert "no way to the receiver" in caplog.text


async def test_a_result_without_tensors_that_nobody_acknowledges_does_not_end_the_site(
    tmp_path: Path,
) -> None:
    """A server that is silent costs a site its result, not its life."""
    async with World(tmp_path) as world:
        running = []

        async def train(task: Task) -> Result:
            world.network.partition("site-1", "server")
            return Result(params={}, weight=1)

        endpoint = await world.endpoint("site-1")

        async def run() -> None:
            executor = InProcess(endpoint, job=JOB, train=train)
            running.append("runs")
            await executor.run()
            running.append("ended")

        world.tasks.start_soon(run)
        await anyio.sleep(1)
        with pytest.raises(Exception, match="no result within 5 s"):
            await world.run(federated(round_timeout=5), ["site-1"])
        await anyio.sleep(2000)
        assert running == ["runs"]


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_a_cancelled_site_stops_its_training(tmp_path: Path, kind: str) -> None:
    """Cancelled while it trains a coroutine is cut at once, and a thread that asks is told; the site ends with it."""
    ended: dict[str, float] = {}
    scope = anyio.CancelScope()

    async def in_a_coroutine(task: Task) -> Result:
        try:
            await anyio.sleep(3600)
        finally:
            ended["training"] = anyio.current_time()
        raise AssertionError

    async def a_step() -> float:
        with anyio.CancelScope(shield=True):  # training looks at no scope of ours by itself
            await anyio.sleep(2)
        return anyio.current_time()

    def in_a_thread(task: Task) -> Result:
        while True:
            ended["training"] = wait_from_thread(a_step)
            anyio.from_thread.check_cancelled()

    async with World(tmp_path) as world:
        endpoint = await world.endpoint("site-1")

        async def run() -> None:
            train = in_a_coroutine if kind == "coroutine" else in_a_thread
            with scope:
                await InProcess(endpoint, job=JOB, train=train).run()
            ended["site"] = anyio.current_time()

        async def leave() -> None:
            await anyio.sleep(5.5)
            scope.cancel()

        world.tasks.start_soon(run)
        world.tasks.start_soon(leave)
        await anyio.sleep(1)
        with pytest.raises(QuorumLostError, match="no result within 60 s"):
            await world.run(federated(round_timeout=60), ["site-1"])
        assert scope.cancelled_caught
        assert ended == dict.fromkeys(("training", "site"), 5.5 if kind == "coroutine" else 7.0)
        assert not endpoint.publisher.open


async def test_a_cancelled_site_withdraws_what_it_offered(tmp_path: Path) -> None:
    """Cancelling an executor ends its transactions: the server hears that the result is not to be had."""
    async with World(tmp_path) as world:
        endpoint = await world.endpoint("site-1")
        world.network.conditions("site-1", "server").set(bandwidth=10)
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                await InProcess(endpoint, job=JOB, train=added).run()

        async def leave() -> None:
            await anyio.sleep(5)
            scope.cancel()

        world.tasks.start_soon(run)
        world.tasks.start_soon(leave)
        await anyio.sleep(1)
        with pytest.raises(Exception, match="the site is leaving"):
            await world.run(federated(), ["site-1"])
        assert not endpoint.publisher.open
        assert scope.cancelled_caught


async def test_a_site_ends_with_its_endpoint(tmp_path: Path) -> None:
    """When its endpoint closes, an executor that waits for tasks returns."""
    async with World(tmp_path) as world, anyio.create_task_group() as tasks:
        endpoint = await world.endpoint("site-1")
        executor = InProcess(endpoint, job=JOB, train=added)
        tasks.start_soon(executor.run)
        await anyio.sleep(1)
        endpoint.mailbox.close()


async def test_one_executor_serves_a_job_at_an_endpoint(tmp_path: Path) -> None:
    """A second one is refused, and another job's is not."""
    async with World(tmp_path) as world:
        endpoint = await world.endpoint("site-1")
        InProcess(endpoint, job=JOB, train=added)
        with pytest.raises(UsageError, match="reader already"):
            InProcess(endpoint, job=JOB, train=added)
        InProcess(endpoint, job="job-2", train=added)


async def test_models_are_not_kept_between_tasks(tmp_path: Path) -> None:
    """Neither the model that came nor the result that went is held while a site waits."""
    import weakref

    seen: list[weakref.ref[Any]] = []

    async def train(task: Task) -> Result:
        result = added(task)
        seen.extend(weakref.ref(one) for one in (*task.params.values(), *result.params.values()))  # type: ignore[union-attr]
        return result

    async with World(tmp_path) as world:
        await world.site("site-1", train)
        async with world.open_job() as job, federated(2).run(job, ["site-1"]) as rounds:
            finished = await anext(rounds)
            await anyio.sleep(1)
            assert len(seen) == 6
            assert soon(lambda: all(one() is None for one in seen))
            assert value_of(finished.state) == 1.0
