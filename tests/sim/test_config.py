"""The settings of a simulation."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from streamoff.errors import UsageError
from streamoff.sim.config import SimulationConfig


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"x")


def test_the_defaults_are_valid_and_frozen() -> None:
    """The default simulation needs no setting, and none changes once it is made."""
    config = SimulationConfig()
    assert (config.sites, config.rounds, config.task, config.offload) == (8, 5, "digits", False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sites = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sites": 0}, "sites"),
        ({"sites": True}, "sites"),
        ({"sites": 2.0}, "sites"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": "3"}, "rounds"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"offload": 1}, "offload"),
        ({"task": "mnist"}, "task"),
        ({"recipe": None}, "recipe"),
        ({"backend": "curio"}, "backend"),
        ({"aggregation": "fast"}, "aggregation"),
        ({"durable": 1}, "durable"),
        ({"page_cache": "flush"}, "page_cache"),
        ({"min_responses": 0}, "min_responses"),
        ({"min_responses": 9}, "min_responses"),
        ({"model": Path("a.safetensors")}, "model"),
        ({"model_size": 100}, "model_size"),
        ({"site_tensors": "many"}, "site_tensors"),
        ({"task": "checkpoint"}, "model"),
        ({"task": "checkpoint", "site_tensors": "1"}, "model"),
        ({"task": "checkpoint", "model": Path("a.safetensors"), "model_size": 100}, "model_size"),
        (
            {"task": "checkpoint", "model": Path("a.safetensors"), "site_tensors": "1"},
            "site_tensors",
        ),
        ({"task": "checkpoint", "model": Path("missing")}, "model"),
        ({"task": "checkpoint", "model_size": 3}, "model_size"),
        ({"task": "checkpoint", "model_size": 100, "site_tensors": "few"}, "site_tensors"),
        ({"scratch": Path("missing")}, "scratch"),
        ({"scratch": Path("a.safetensors")}, "scratch"),
        ({"output": Path("missing/model.safetensors")}, "output"),
        ({"output": Path()}, "output"),
        ({"output": "model.safetensors"}, "output"),
        (
            {"task": "checkpoint", "model": Path("a.safetensors"), "output": Path("a.safetensors")},
            "output",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    """A value of the wrong type or range, and values that contradict each other, are named."""
    with pytest.raises(UsageError, match=named):
        SimulationConfig(**settings)


def test_an_output_inside_a_job_root_is_refused(tmp_path: Path) -> None:
    """A job root is removed whole, so no model is published into one."""
    root = tmp_path / "streamoff_tensor_offload_job_0123456789abcdef"
    root.mkdir()
    with pytest.raises(UsageError, match="output"):
        SimulationConfig(output=root / "model.safetensors")


def test_fitting_settings_are_taken(tmp_path: Path) -> None:
    """A checkpoint simulation starts from a file or from a size, and an old output may be replaced."""
    (tmp_path / "model.safetensors").write_bytes(b"old")
    SimulationConfig(task="checkpoint", model=Path("a.safetensors"), min_responses=8)
    SimulationConfig(task="checkpoint", model_size=1000, site_tensors="3", scratch=tmp_path)
