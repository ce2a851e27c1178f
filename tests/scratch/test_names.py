"""How roots are named, and where the layer may be imported."""

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from streamoff.errors import UsageError
from streamoff.scratch.names import RootName, Stage, check_job

pytestmark = pytest.mark.core

JOBS = st.text(min_size=1, max_size=255).filter(str.isprintable)


@given(JOBS, st.sampled_from(Stage))
def test_every_job_id_makes_a_name_that_reads_back(job: str, stage: Stage) -> None:
    """Any printable job id gives a plain file name of at most 104 characters that parses to itself."""
    name = RootName.fresh(job).at(stage)
    text = str(name)
    assert RootName.parse(text) == name
    assert text.isascii()
    assert "/" not in text
    assert len(text) <= 104


@pytest.mark.parametrize(
    "name",
    [
        "",
        "streamoff_tensor_offload_job",
        "streamoff_tensor_offload__0123456789abcdef",
        "streamoff_tensor_offload_job_0123456789ABCDEF",
        "streamoff_tensor_offload_job_0123456789abcde",
        "streamoff_tensor_offload_j.b_0123456789abcdef",
        "xstreamoff_tensor_offload_job_0123456789abcdef",
        ".old-streamoff_tensor_offload_job_0123456789abcdef",
        "streamoff_tensor_offload_job_0123456789abcdef\n",
        "nvflare_tensor_offload_job_0123456789abcdef",
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    """Near misses of the pattern are not taken for roots."""
    assert RootName.parse(name) is None


@pytest.mark.parametrize("job", ["", "x" * 256, "a\tb", "\x1b[2J"])
def test_a_job_id_is_printable_and_bounded(job: str) -> None:
    """What would break a listing or a lease is refused where it enters."""
    with pytest.raises(UsageError, match="job id"):
        check_job(job)


def test_windows_is_refused_at_import_with_the_reason() -> None:
    """Importing the layer on Windows fails with a sentence that says why, not with a missing module."""
    script = "import sys; sys.platform = 'win32'; import streamoff.scratch.lease"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "Windows is not supported" in done.stderr
    assert "fcntl" not in done.stderr


def test_the_layer_imports_neither_torch_nor_an_event_loop() -> None:
    """Listing and reclaiming scratch costs no import of torch, anyio, trio or asyncio."""
    script = (
        "import sys; import streamoff.scratch.reaper, streamoff.scratch.ledger;"
        "print(sorted({'torch', 'anyio', 'trio', 'asyncio', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
