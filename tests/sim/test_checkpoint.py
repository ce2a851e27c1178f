"""Moving a model of any size."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from streamoff.errors import AggregationError, JobClosedError, UsageError
from streamoff.sim.checkpoint import NOISE, SPREAD, Checkpoint, NoisySource, write_synthetic
from streamoff.tensors.dtypes import torch_dtype
from streamoff.tensors.lazy import open_state
from streamoff.tensors.sources import Source
from streamoff.tensors.state import MemoryState

Tensors = dict[str, torch.Tensor]
Mixed = tuple[Path, Tensors]

NAMES = ("site-1", "site-2", "site-3")


def mixed_tensors() -> Tensors:
    """Return tensors of many dtypes, small ones, an empty one and one that spans noise blocks."""
    random = torch.Generator().manual_seed(1)
    wide = torch.empty(70_000).uniform_(-1, 1, generator=random)
    return {
        "f64": wide[:100].double(),
        "f32": wide.reshape(70, 1000),
        "f16": wide[:333].half(),
        "bf16": wide[:999].bfloat16(),
        "f8": wide[:77].to(torch.float8_e4m3fn),
        "f8_e5m2": wide[:77].to(torch.float8_e5m2),
        "i64": torch.arange(50),
        "bool": torch.tensor([True, False, True]),
        "c64": torch.complex(wide[:9], wide[9:18]),
        "scalar": torch.tensor(0.5),
        "empty": torch.zeros(0, 3),
    }


def payload_of(source: Source) -> bytearray:
    """Return all bytes of a source."""
    buffer = bytearray(source.layout.size)
    source.read_into(0, memoryview(buffer))
    return buffer


def tensors_in(source: Source) -> Tensors:
    """Return the tensors that a source serves, without the empty ones."""
    payload, origin = payload_of(source), source.layout.data_start
    return {
        spec.name: torch.frombuffer(
            payload[origin + spec.start : origin + spec.stop], dtype=torch_dtype(spec.dtype)
        ).reshape(spec.shape)
        for spec in source.layout.specs
        if spec.nbytes
    }


def updated_by(task: Checkpoint, name: str, number: int, model: Tensors) -> tuple[Source, float]:
    """Return what a site makes of a model in memory, and its weight."""
    result = task.site(name).train(number, MemoryState(model))
    assert not isinstance(result.params, Mapping)
    return result.params, result.weight


def averaged(
    task: Checkpoint,
    model: Tensors,
    number: int,
    names: Sequence[str] = NAMES,
    *,
    weighted: bool = True,
) -> Tensors:
    """Return the mean, in float32, of what the sites make of a model in memory."""
    updates = [updated_by(task, name, number, model) for name in names]
    weights = [weight if weighted else 1.0 for _, weight in updates]
    parts = [tensors_in(source) for source, _ in updates]
    mean = dict(model)
    for name, before in model.items():
        if before.is_floating_point() and before.numel():
            total = torch.zeros_like(
                before, dtype=torch.float64 if before.dtype is torch.float64 else torch.float32
            )
            for part, weight in zip(parts, weights, strict=True):
                total += part[name].to(total.dtype) * weight
            mean[name] = (total / sum(weights)).to(before.dtype)
    return mean


@pytest.fixture
def mixed(tmp_path: Path) -> Mixed:
    """Return a file of many dtypes and its tensors."""
    path = tmp_path / "mixed.safetensors"
    tensors = mixed_tensors()
    save_file(tensors, path)
    return path, tensors


@pytest.mark.parametrize(("kind", "nbytes"), [("1", 10**6), ("many", 2_002_000), ("5", 999)])
def test_a_synthetic_model_is_a_plain_safetensors_file(
    tmp_path: Path, kind: str, nbytes: int
) -> None:
    """The file opens with safetensors, has the size that was asked for, and no extreme elements."""
    path = tmp_path / "model.safetensors"
    write_synthetic(path, kind, nbytes, seed=1)
    tensors = load_file(path)
    assert sum(tensor.nbytes for tensor in tensors.values()) == nbytes // 4 * 4
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    elements = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    assert elements.abs().max() <= SPREAD
    assert elements.std() > SPREAD / 2


def test_a_synthetic_model_depends_on_its_seed_only(tmp_path: Path) -> None:
    """The same seed writes the same file, another seed another one."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synthetic(tmp_path / name, "2", 4000, seed=seed)
    one, same, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert one == same != other
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a", "b", "c"]


def test_every_floating_element_gets_a_little_noise(mixed: Mixed) -> None:
    """A site changes each floating tensor by at most the noise, and returns the others unchanged."""
    path, tensors = mixed
    with open_state(path) as state:
        found = tensors_in(NoisySource(state, 7))
    for name, before in tensors.items():
        if not before.numel():
            continue
        after = found[name]
        if not before.is_floating_point():
            assert torch.equal(after, before), name
            continue
        change = after.double() - before.double()
        rounding = before.double().abs().max() * torch.finfo(before.dtype).eps
        assert 0 < change.abs().max() <= NOISE + rounding, name


def test_the_source_is_a_source(mixed: Mixed) -> None:
    """It serves the layout of its model, from a thread, and refuses to read once it is closed."""
    with open_state(mixed[0]) as state:
        source: Source = NoisySource(state, 7)
        assert source.layout is state.layout
        assert source.blocking
        assert source.views(0, 8) is None
        source.check()
        for start, length in ((source.layout.size - 3, 4), (-1, 2)):
            with pytest.raises(UsageError, match="range"):
                source.read_into(start, memoryview(bytearray(length)))
        source.close()
        source.close()
        with pytest.raises(JobClosedError):
            source.read_into(0, memoryview(bytearray(4)))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_range_can_be_read_alone(data: st.DataObject) -> None:
    """A range has the same bytes however it is cut, also in the middle of a header or an element."""
    source = NoisySource(MemoryState(mixed_tensors()), 7)
    whole = payload_of(source)
    for _ in range(20):
        start = data.draw(st.integers(0, len(whole) - 1))
        length = data.draw(st.one_of(st.integers(0, 20), st.integers(0, len(whole) - start)))
        buffer = bytearray(min(length, len(whole) - start))
        source.read_into(start, memoryview(buffer))
        assert buffer == whole[start : start + len(buffer)]


@pytest.mark.parametrize("change", ["round", "site", "seed"])
def test_noise_differs_between_rounds_sites_and_seeds(mixed: Mixed, change: str) -> None:
    """No two updates are alike, and each one repeats."""

    def update(number: int = 0, site: str = "site-1", seed: int = 5) -> bytes:
        task = Checkpoint(NAMES, seed=seed, directory=mixed[0].parent, model=mixed[0])
        return bytes(payload_of(updated_by(task, site, number, mixed[1])[0]))

    other: dict[str, Callable[[], bytes]] = {
        "round": lambda: update(number=1),
        "site": lambda: update(site="site-2"),
        "seed": lambda: update(seed=6),
    }
    assert update() == update() != other[change]()


def test_a_right_average_passes_in_every_round(mixed: Mixed) -> None:
    """The weighted mean of the updates is taken for right, for every dtype, round after round."""
    path, model = mixed
    task = Checkpoint(NAMES, seed=5, directory=path.parent, model=path)
    assert task.evaluate(MemoryState(model), {})["max_error"] == 0.0
    accepted: dict[int, Sequence[str]] = {}
    for number, names in enumerate((NAMES, NAMES[:2], NAMES[1:], NAMES)):
        model = averaged(task, model, number, names)
        accepted[number] = names
        assert task.evaluate(MemoryState(model), dict(accepted))["checked_elements"] > 1000
    again = Checkpoint(NAMES, seed=5, directory=path.parent, model=path)
    expected = task.evaluate(MemoryState(model), accepted)
    assert again.evaluate(MemoryState(model), accepted) == expected


@pytest.mark.parametrize(
    "fault", ["lost", "doubled", "unweighted", "stale", "wrong round", "element", "nan", "integer"]
)
def test_a_wrong_average_is_found_out(mixed: Mixed, fault: str) -> None:
    """An aggregator that loses, doubles, misweighs or misplaces something is refused."""
    path, model = mixed
    task = Checkpoint(NAMES, seed=5, directory=path.parent, model=path)
    right = averaged(task, model, 0)
    assert len({task.site(name).weight for name in NAMES}) == 3
    wrong: dict[str, Callable[[], Tensors]] = {
        "lost": lambda: averaged(task, model, 0, NAMES[:2]),
        "doubled": lambda: averaged(task, model, 0, (*NAMES, NAMES[0])),
        "unweighted": lambda: averaged(task, model, 0, weighted=False),
        "stale": lambda: model,
        "wrong round": lambda: averaged(task, model, 1),
        "element": lambda: right | {"scalar": right["scalar"] + 1e-4},
        "nan": lambda: right | {"scalar": right["scalar"] * torch.nan},
        "integer": lambda: right | {"i64": right["i64"] + 1},
    }
    task.evaluate(MemoryState(right), {0: NAMES})
    found = MemoryState(wrong[fault]())
    with pytest.raises(AggregationError):
        task.evaluate(found, {0: NAMES})


def test_a_model_with_other_tensors_is_found_out(mixed: Mixed) -> None:
    """A tensor that is missing or has another shape is no average of these contributions."""
    path, model = mixed
    task = Checkpoint(NAMES, seed=5, directory=path.parent, model=path)
    for wrong in (
        {name: tensor for name, tensor in model.items() if name != "bf16"},
        model | {"f32": model["f32"].reshape(-1)},
        model | {"f16": model["f16"].bfloat16()},
    ):
        with pytest.raises(AggregationError, match="other tensors"):
            task.evaluate(MemoryState(wrong), {})


def test_a_history_that_does_not_continue_is_replayed_from_the_start(mixed: Mixed) -> None:
    """Evaluating a shorter or another history than the last one is as good as the first time."""
    path, model = mixed
    task = Checkpoint(NAMES, seed=5, directory=path.parent, model=path)
    one = averaged(task, model, 0)
    two = averaged(task, one, 1)
    task.evaluate(MemoryState(two), {0: NAMES, 1: NAMES})
    task.evaluate(MemoryState(one), {0: NAMES})
    other = averaged(task, model, 0, NAMES[:2])
    task.evaluate(MemoryState(other), {0: NAMES[:2]})


def test_the_weights_are_the_sites_own(mixed: Mixed) -> None:
    """A site has the same weight in every round; it does not depend on the other sites."""
    few, many = (
        Checkpoint(names, seed=5, directory=mixed[0].parent, model=mixed[0])
        for names in (NAMES[:1], NAMES)
    )
    model = MemoryState(mixed[1])
    weight = few.site("site-1").train(0, model).weight
    assert weight == many.site("site-1").train(9, model).weight
    assert 1 <= weight <= 100
    with pytest.raises(UsageError, match="site-9"):
        many.site("site-9")


def test_a_synthetic_model_is_written_once(tmp_path: Path) -> None:
    """The first model is a file in the task's directory, the same for as long as the task lives."""
    task = Checkpoint(NAMES, seed=5, directory=tmp_path, nbytes=4000, shapes="3")
    path = task.initial_state()
    before = path.stat().st_mtime_ns
    assert task.initial_state() == path
    assert path.stat().st_mtime_ns == before
    assert path.parent == tmp_path
    with pytest.raises(UsageError, match="model"):
        Checkpoint(NAMES, seed=5, directory=tmp_path).initial_state()


def test_nobody_holds_the_model(tmp_path: Path) -> None:
    """Writing, updating and checking 256 MiB in one tensor takes memory for a few blocks only."""
    script = """
        import json, sys
        from pathlib import Path
        from streamoff.sim.checkpoint import Checkpoint
        from streamoff.sim.memory import MemorySampler, warm_torch
        from streamoff.tensors.lazy import open_state
        warm_torch()
        with MemorySampler() as sampler:
            task = Checkpoint(["site-1"], seed=1, directory=Path(sys.argv[1]), nbytes=256 << 20)
            with open_state(task.initial_state()) as state:
                source = task.site("site-1").train(0, state).params
                buffer = memoryview(bytearray(4 << 20))
                for at in range(0, source.layout.size, len(buffer)):
                    source.read_into(at, buffer[: source.layout.size - at])
                task.evaluate(state, {})
        print(json.dumps(sampler.statistics().peak_delta_bytes))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(ended.stdout) < 24 << 20
