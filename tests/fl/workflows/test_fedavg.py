"""FedAvg: its settings, its sampling, what travels in which format, and where it lands."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from streamoff.errors import UnsupportedTensorError, UsageError
from streamoff.fl.aggregation import Kind, Policies
from streamoff.fl.exchange import ExchangeFormat
from streamoff.fl.executors.in_process import InProcess, Result, Task
from streamoff.fl.workflows import fedavg
from streamoff.fl.workflows.fedavg import FedAvg, sampled_number, select_sites
from streamoff.fl.workflows.rounds import Round
from streamoff.runtime.jobs import open_job
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.state import MemoryState
from streamoff.types import Address

from ..world import Train, World, entries, federated, landed_bytes, model, plus, value_of

pytestmark = pytest.mark.usefixtures("no_leaks")

DEFAULTS = {
    "sample": None,
    "min_responses": None,
    "cut_off": None,
    "round_timeout": 3600.0,
    "kind": Kind.FULL,
    "aggregation": "auto",
    "policies": Policies(),
    "enable_tensor_disk_offload": False,
    "server_expected_format": ExchangeFormat.NUMPY,
    "persistor": None,
    "evaluate": None,
    "observer": None,
    "seed": 0,
}


def test_the_surface_is_as_documented() -> None:
    """Every setting is a keyword with the documented default, and the class documents each of them."""
    parameters = inspect.signature(FedAvg).parameters
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in parameters.values())
    required = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
    assert required == ["initial", "rounds"]
    assert {
        name: getattr(FedAvg(initial={}, rounds=1), name)
        for name in parameters
        if name not in required
    } == DEFAULTS
    assert FedAvg.__doc__ is not None
    for name in parameters:
        assert f"        {name}: " in FedAvg.__doc__, name
    assert list(inspect.signature(FedAvg.run).parameters) == ["self", "job", "sites"]
    assert fedavg.__all__ == ["Evaluate", "FedAvg"]


def test_a_round_has_the_documented_fields() -> None:
    """What a round tells is fixed, and documented field by field."""
    fields = list(inspect.signature(Round).parameters)
    assert fields == [
        "number",
        "state",
        "accepted",
        "failed",
        "weights",
        "metrics",
        "site_metrics",
        "bytes_landed",
        "seconds",
        "report",
    ]
    assert Round.__doc__ is not None
    for name in fields:
        assert f"        {name}: " in Round.__doc__, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", 0),
        ("rounds", -1),
        ("rounds", 2.0),
        ("rounds", True),
        ("rounds", "3"),
        ("min_responses", 0),
        ("min_responses", 1.0),
        ("min_responses", True),
        ("sample", 0),
        ("sample", -2),
        ("sample", 0.0),
        ("sample", 1.5),
        ("sample", float("nan")),
        ("sample", True),
        ("sample", "half"),
        ("cut_off", -1),
        ("cut_off", float("inf")),
        ("cut_off", "10"),
        ("cut_off", True),
        ("round_timeout", None),
        ("round_timeout", float("nan")),
        ("round_timeout", -0.1),
        ("kind", "half"),
        ("kind", None),
        ("aggregation", "fast"),
        ("aggregation", None),
        ("policies", None),
        ("policies", {"missing": "partial"}),
        ("enable_tensor_disk_offload", 1),
        ("enable_tensor_disk_offload", "yes"),
        ("enable_tensor_disk_offload", None),
        ("enable_tensor_disk_offload", np.True_),
        ("server_expected_format", "onnx"),
        ("server_expected_format", None),
        ("persistor", "model.safetensors"),
        ("evaluate", 3),
        ("seed", "lucky"),
        ("seed", True),
    ],
)
def test_a_setting_of_a_wrong_type_or_range_is_refused_by_name(name: str, value: object) -> None:
    """Settings are strict: nothing is rounded, truncated or taken for true, and the message says which it was."""
    settings: dict[str, Any] = {"initial": {}, "rounds": 1, "server_expected_format": "pytorch"}
    with pytest.raises(UsageError, match=name):
        FedAvg(**(settings | {name: value}))


def test_offload_with_numpy_warns_and_says_what_to_set() -> None:
    """Asking for disk with arrays is a warning at the caller's line that names the setting."""
    with pytest.warns(UserWarning, match="server_expected_format='pytorch'") as caught:
        FedAvg(initial={}, rounds=1, enable_tensor_disk_offload=True)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FedAvg(initial={}, rounds=1)
        FedAvg(
            initial={}, rounds=1, enable_tensor_disk_offload=True, server_expected_format="PyTorch "
        )


def test_settings_do_not_print_the_model() -> None:
    """The representation is one line, whatever the size of the initial model."""
    text = repr(FedAvg(initial={"w": torch.zeros(1000)}, rounds=3))
    assert "0., 0., 0." not in text
    assert "\n" not in text
    assert "rounds=3" in text


@pytest.mark.parametrize(
    ("sites", "options"),
    [
        ([], {}),
        (["site-1", "site-1"], {}),
        (["not an address"], {}),
        ("site-1", {}),
        (["site-1", "site-2"], {"min_responses": 3}),
        (["site-1", "site-2"], {"min_responses": 2, "sample": 1}),
        ([f"site-{n}" for n in range(10)], {"min_responses": 6, "sample": 0.5}),
    ],
    ids=["none", "twice", "no-address", "text", "quorum", "quorum-of-one", "quorum-of-half"],
)
async def test_sites_that_cannot_make_a_quorum_are_refused(
    tmp_path: Path, sites: list[str], options: dict[str, Any]
) -> None:
    """A run that can never succeed is refused when it is made, and nothing was started."""
    async with World(tmp_path) as world, world.open_job() as job:
        with pytest.raises(UsageError):
            federated(**options).run(job, sites)
        assert not job.report.ends


# --- sampling -------------------------------------------------------------------------------------

SITES = tuple(Address(f"site-{number}") for number in range(10))


@pytest.mark.parametrize(
    ("sample", "number"),
    [(None, 10), (3, 3), (10, 10), (99, 10), (1.0, 10), (0.3, 3), (0.31, 4), (0.001, 1), (0.7, 7)],
)
def test_a_sample_is_a_number_or_a_fraction_rounded_up(sample: float | None, number: int) -> None:
    """A fraction of the sites is at least one and never loses one to binary rounding."""
    assert sampled_number(sample, 10) == number


@given(st.integers(1, 10), st.integers(0, 2**40), st.integers(1, 10_000))
def test_the_same_seed_and_round_choose_the_same_sites(number: int, seed: int, turn: int) -> None:
    """A choice depends on seed and round alone, has no site twice, and keeps the given order."""
    chosen = select_sites(SITES, number, seed, turn)
    assert chosen == select_sites(SITES, number, seed, turn)
    assert len(set(chosen)) == len(chosen) == number
    assert sorted(chosen, key=SITES.index) == list(chosen)


def test_rounds_choose_differently_and_leave_nobody_out() -> None:
    """Over many rounds every site takes part about equally often, and another seed chooses otherwise."""
    rounds = [select_sites(SITES, 3, 7, turn) for turn in range(1, 1001)]
    counts = [sum(site in chosen for chosen in rounds) for site in SITES]
    assert sum(counts) == 3000
    assert all(200 < count < 400 for count in counts)
    assert [select_sites(SITES, 3, 8, turn) for turn in range(1, 1001)] != rounds


def test_the_choice_does_not_touch_the_global_generator() -> None:
    """A program that seeds Python's generator gets its own numbers, sampling or not."""
    import random

    random.seed(1)
    before = random.getstate()
    select_sites(SITES, 3, 7, 1)
    assert random.getstate() == before


async def test_only_sampled_sites_get_a_task(tmp_path: Path) -> None:
    """Sites that are not drawn hear nothing of the round, and the quorum is of those that are."""
    trained: list[tuple[int, str]] = []

    def recording(name: str) -> Train:
        async def train(task: Task) -> object:
            trained.append((task.round, name))
            return await plus(1.0)(task)

        return train

    async with World(tmp_path) as world:
        sites = await world.sites({str(name): recording(name) for name in SITES})
        rounds, values = await world.run(federated(3, sample=0.4, seed=5), sites)
    for finished in rounds:
        chosen = select_sites(SITES, 4, 5, finished.number)
        assert set(finished.accepted) == set(chosen)
        assert {name for number, name in trained if number == finished.number} == set(chosen)
    assert values == [1.0, 2.0, 3.0]


# --- formats --------------------------------------------------------------------------------------


async def test_pytorch_parameters_land_lazily_on_disk(tmp_path: Path) -> None:
    """With offload contributions and models are files under the job root, and sites on disk train on lazy tensors."""
    seen: list[type] = []

    async def train(task: Task) -> Result:
        seen.append(type(task.params))
        params = {name: await lazy.load() + 1 for name, lazy in task.params.items()}
        return Result(params=params, weight=1)

    async with World(tmp_path) as world:
        await world.site("site-1", train, on_disk=True)
        async with world.open_job() as job, federated(2).run(job, ["site-1"]) as rounds:
            async for finished in rounds:
                assert isinstance(finished.state, LazyStateDict)
                assert finished.state.path.is_relative_to(job.path)
                assert finished.bytes_landed == finished.state.layout.size
                assert landed_bytes(job) == finished.state.layout.size
            assert job.ledger.peak >= 2 * 200
    assert seen == [LazyStateDict] * 2


async def test_without_offload_nothing_touches_the_disk(tmp_path: Path) -> None:
    """The default lands in memory: the job root stays empty and is charged nothing."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with (
            world.open_job() as job,
            federated(2, disk=False).run(job, ["site-1"]) as rounds,
        ):
            async for finished in rounds:
                assert isinstance(finished.state, MemoryState)
                assert [one for one in entries(job.path) if "transfer" in one] == []
            assert job.ledger.peak == 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.filterwarnings("ignore:enable_tensor_disk_offload has no effect")
async def test_numpy_parameters_travel_as_arrays_and_stay_in_memory(
    tmp_path: Path, offload: bool
) -> None:
    """The default format gives training code ndarrays, takes them back, and never uses the disk."""
    seen: list[Mapping[str, object]] = []

    def train(task: Task) -> Result:
        seen.append({name: (type(one), one.dtype.name) for name, one in task.params.items()})
        params = {name: value + 1 for name, value in task.params.items()}
        return Result(
            params=params, weight=float(np.float32(2)), metrics={"loss": np.float64(0.25)}
        )

    async with World(tmp_path) as world:
        await world.site("site-1", train)
        workflow = federated(2, disk=offload, server_expected_format="numpy")
        async with world.open_job() as job, workflow.run(job, ["site-1"]) as rounds:
            async for finished in rounds:
                assert isinstance(finished.state, MemoryState)
                assert finished.metrics == {"loss": 0.25}
                assert finished.weights == {"site-1": 2.0}
            assert value_of(finished.state) == 2.0
            assert finished.state.tensor("steps").item() == 2
            assert job.ledger.peak == 0
    array = np.ndarray
    kinds = {"layer": (array, "float32"), "bias": (array, "float32"), "steps": (array, "int64")}
    assert seen == [kinds, kinds]


async def test_offload_belongs_to_the_workflow_and_to_nobody_else(tmp_path: Path) -> None:
    """While one workflow lands on disk, other messages of the endpoint and another job's workflow land in memory."""
    async with World(tmp_path) as world:
        hand = await world.hand("site-1")
        endpoint = await world.endpoint("site-2")
        others = world.server.receive("other")

        async def train(task: Task) -> object:
            return await plus(3.0)(task)

        executor = InProcess(endpoint, job="job-2", train=train)  # type: ignore[arg-type]
        world.tasks.start_soon(executor.run)
        async with (
            world.open_job() as job,
            federated().run(job, ["site-1"]) as rounds,
            open_job("job-2", world.server, scratch=tmp_path) as second,
            federated(disk=False).run(second, ["site-2"]) as in_memory,
        ):
            found: list[object] = []

            async def behave() -> None:
                await hand.task()
                await hand.endpoint.send("server", "other", {"x": torch.ones(3)})
                found.append((await (await anext(others)).decode())["x"])
                found.append((await anext(in_memory)).state)
                await hand.answer(params=model(1.0))

            world.tasks.start_soon(behave)
            on_disk = await anext(rounds)
            assert isinstance(on_disk.state, LazyStateDict)
            assert isinstance(found[0], torch.Tensor)
            assert isinstance(found[1], MemoryState)
            assert second.ledger.peak == 0
        others.close()


async def test_a_dtype_that_numpy_lacks_is_refused_by_key(tmp_path: Path) -> None:
    """A bfloat16 model in the NumPy format ends the first round, names the tensor and says what to set."""
    initial = {"w": torch.zeros(2), "half": torch.zeros(2, dtype=torch.bfloat16)}
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        workflow = FedAvg(initial=initial, rounds=1)
        async with world.open_job() as job, workflow.run(job, ["site-1"]) as rounds:
            with pytest.raises(UnsupportedTensorError, match="server_expected_format") as caught:
                await anext(rounds)
        assert caught.value.where["tensor"] == "half"


async def test_low_precision_travels_and_averages_as_tensors(tmp_path: Path) -> None:
    """bfloat16 and float8 models go round in the PyTorch format, and keep their dtypes."""
    initial = {
        "half": torch.zeros(4, dtype=torch.bfloat16),
        "quarter": torch.zeros(4, dtype=torch.float8_e4m3fn),
    }

    def train(task: Task) -> Result:
        params = {name: (one.float() + 1).to(one.dtype) for name, one in task.params.items()}
        return Result(params=params, weight=1)

    async with World(tmp_path) as world:
        await world.sites({"site-1": train, "site-2": train})
        workflow = federated(2, initial=initial)
        async with (
            world.open_job() as job,
            workflow.run(job, ["site-1", "site-2"]) as rounds,
        ):
            async for finished in rounds:
                for name, tensor in initial.items():
                    now = finished.state.tensor(name)
                    assert now.dtype == tensor.dtype
                    assert now.float().tolist() == [float(finished.number)] * 4


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_tied_weights_stay_tied(tmp_path: Path, disk: bool) -> None:
    """Two names of one tensor travel once, come back tied, and are tied in the new model."""
    shared = torch.zeros(64)
    initial = {"embed": shared, "head": shared, "bias": torch.zeros(3)}

    async def train(task: Task) -> Result:
        embed = task.params["embed"] + 1
        params = {"embed": embed, "head": embed, "bias": task.params["bias"] + 1}
        return Result(params=params, weight=1)

    for snapshot in (False, True):
        async with World(tmp_path) as world:
            await world.site("site-1", train, snapshot=snapshot)
            workflow = federated(initial=initial, disk=disk)
            async with world.open_job() as job, workflow.run(job, ["site-1"]) as rounds:
                finished = await anext(rounds)
                assert finished.failed == {}
                layout = finished.state.layout
                assert layout.data_nbytes == 4 * (64 + 3)
                assert layout.spec("embed") == layout.spec("head")


# --- differences ----------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["columnar", "in_time"])
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_differences_are_averaged_and_added(
    tmp_path: Path, aggregation: str, disk: bool
) -> None:
    """Where differences are asked for, the mean of them is added to the model of the round."""

    def differing(amount: float):
        async def train(task: Task) -> Result:
            assert task.kind is Kind.DIFF
            params = {name: torch.zeros_like(one) for name, one in model().items()}
            params["layer"] += amount
            params["bias"] += amount
            return Result(params=params, weight=1, kind=Kind.DIFF)

        return train

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": differing(1.0), "site-2": differing(2.0)})
        workflow = federated(
            3, initial=model(10.0), kind="diff", aggregation=aggregation, disk=disk
        )
        _, values = await world.run(workflow, sites)
        assert values == [11.5, 13.0, 14.5]


async def test_kinds_are_never_mixed(tmp_path: Path) -> None:
    """A site that sends a whole model where differences are wanted is refused before it is pulled."""
    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(1.0)})
        with pytest.raises(
            Exception, match="contribution of another kind: expected diff, got full"
        ):
            await world.run(federated(kind=Kind.DIFF), sites)


async def test_what_is_watched_is_told(tmp_path: Path) -> None:
    """An observer hears of each round and of landed bytes, up to the whole of each contribution."""
    rounds: list[tuple[int, int]] = []
    landed: dict[str, tuple[int, int]] = {}

    class Watcher:
        def round_started(self, number: int, sites: int) -> None:
            rounds.append((number, sites))

        def transfer(self, site: str, landed_bytes: int, total_bytes: int) -> None:
            landed[site] = (landed_bytes, total_bytes)

    async with World(tmp_path) as world:
        sites = await world.sites({"site-1": plus(1.0), "site-2": plus(1.0)})
        finished, _ = await world.run(federated(2, observer=Watcher()), sites)
    assert rounds == [(1, 2), (2, 2)]
    assert set(landed) == {"site-1", "site-2"}
    assert all(now == total > 0 for now, total in landed.values())
    assert finished[1].bytes_landed == sum(now for now, _ in landed.values())


async def test_a_round_takes_no_virtual_time_of_its_own(tmp_path: Path) -> None:
    """A workflow waits for sites and for nothing else: no polling, no pauses between rounds."""
    async with World(tmp_path) as world:
        sites = await world.sites({f"site-{n}": plus(1.0) for n in range(5)})
        await world.run(federated(5), sites)
        assert anyio.current_time() == 0.0
