"""``streamoff simulate`` from end to end, in processes of its own."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from .running import streamoff

pytestmark = pytest.mark.real_time


def simulate(place: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run a simulation in a directory with its scratch below, and return how it ended and its JSON."""
    (place / "scratch").mkdir(exist_ok=True)
    ended = streamoff(
        "simulate", "--scratch", "scratch", "--json", "report.json", *arguments, cwd=place
    )
    report = place / "report.json"
    return ended, json.loads(report.read_text()) if report.exists() else None


def test_digits_are_learnt_and_the_report_tells_how(tmp_path: Path) -> None:
    """Eight sites and five rounds with offload: a good model, a full report, and nothing left."""
    ended, report = simulate(tmp_path, "--offload", "--rounds", "5", "--sites", "8")
    assert ended.returncode == 0, ended.stderr
    assert report["metrics"]["accuracy"] >= 0.93
    assert [row["round"] for row in report["rounds"]] == [1, 2, 3, 4, 5]
    assert all(row["accepted"] == 8 and row["failed"] == 0 for row in report["rounds"])
    assert all(row["bytes_landed"] > 8 * 48_000 for row in report["rounds"])
    assert (report["recipe"], report["backend"], report["sites"]) == ("fedavg", "asyncio", 8)
    assert report["scratch"]["peak_bytes"] > 0
    assert (report["scratch"]["left_bytes"], report["scratch"]["left_entries"]) == (0, 0)
    assert report["transactions"]["open"] == 0
    assert report["model"]["path"] == str(tmp_path / "model.safetensors")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.safetensors",
        "report.json",
        "scratch",
    ]
    modes = {(tmp_path / name).stat().st_mode for name in ("model.safetensors", "report.json")}
    assert len(modes) == 1, "the model is as readable as any file that is written here"
    with safe_open(tmp_path / "model.safetensors", framework="pt") as model:
        assert "head.weight" in model.keys()  # noqa: SIM118  safe_open is no mapping
    assert len(ended.stderr.splitlines()) == 5
    assert ended.stdout.startswith("fedavg: 8 sites, asyncio, local engine\n")


def test_the_model_does_not_depend_on_how_it_was_computed(tmp_path: Path) -> None:
    """Disk or memory, asyncio or trio: the published bits are the same; another seed gives others."""
    found = {}
    for arguments in (
        ("--offload", "--backend", "asyncio"),
        ("--no-offload", "--backend", "asyncio"),
        ("--offload", "--backend", "trio"),
        ("--offload", "--seed", "1"),
    ):
        ended, report = simulate(tmp_path, "--rounds", "2", "--sites", "3", *arguments)
        assert ended.returncode == 0, ended.stderr
        found[arguments] = report["model"]["sha256"]
    first, second, third, other = found.values()
    assert first == second == third != other


@pytest.mark.parametrize("aggregation", ["columnar", "in-time"])
@pytest.mark.parametrize("shapes", ["1", "many", "gpt2-medium"])
def test_a_checkpoint_is_averaged_right(tmp_path: Path, aggregation: str, shapes: str) -> None:
    """The average of noisy checkpoints passes the task's own check, whatever their shapes."""
    ended, report = simulate(
        tmp_path,
        *("--task", "checkpoint", "--model-size", "24MiB", "--site-tensors", shapes),
        *("--offload", "--aggregation", aggregation, "--sites", "3", "--rounds", "2"),
        *(("--durable", "--page-cache", "drop") if shapes == "many" else ()),
    )
    assert ended.returncode == 0, ended.stderr
    assert report["metrics"]["checked_elements"] > 1000
    assert report["scratch"]["left_entries"] == 0
    assert list((tmp_path / "scratch").iterdir()) == []


def test_quiet_is_quiet(tmp_path: Path) -> None:
    """With --quiet a simulation that works says nothing, and still writes its files."""
    ended, report = simulate(tmp_path, "--quiet", "--rounds", "1", "--sites", "2")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert report["sites"] == 2


def test_a_failed_job_leaves_the_old_model_alone(tmp_path: Path) -> None:
    """When the job fails the exit code is 1, the reason is told, and the output is as it was."""
    (tmp_path / "model.safetensors").write_bytes(b"old")
    (tmp_path / "broken.safetensors").write_bytes((2**40).to_bytes(8, "little") + bytes(100))
    ended, report = simulate(tmp_path, "--task", "checkpoint", "--model", "broken.safetensors")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "streamoff simulate: error: " in ended.stderr
    assert report is None
    assert (tmp_path / "model.safetensors").read_bytes() == b"old"
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=("SIGINT", "SIGTERM")
)
def test_a_stopped_job_cleans_up(
    tmp_path: Path, backend: str, signum: signal.Signals, code: int
) -> None:
    """A signal in the middle of the rounds ends the job: nothing in scratch, nothing published."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "streamoff", "simulate", "--backend", backend, "--offload"),
            *("--rounds", "100000", "--sites", "2", "--scratch", "scratch"),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("round 1/100000: ")
            process.send_signal(signum)
            out, said = process.communicate()
        finally:
            process.kill()
    assert process.returncode == code, said
    assert out == ""
    assert "Traceback" not in said
    assert "stopping" in said
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "model.safetensors").exists()
