"""Choosing an engine, and refusing what cannot fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamoff.errors import NoSpaceError, QuotaExceededError, UsageError
from streamoff.fl.aggregation import Engine, choose_engine, open_engine, preflight

from .support import ENGINES, terms

GIB = 1024**3


def test_the_walk_is_the_default_where_everything_fits():
    """Room for every contribution and the result means columnar, without a notice."""
    for quota, free in ((5 * GIB, None), (None, 5 * GIB), (None, None)):
        choice = choose_engine("auto", sites=4, model_bytes=GIB, quota=quota, free=free)
        assert (choice.engine, choice.notice) == ("columnar", None)


@pytest.mark.parametrize(
    ("quota", "free", "what"), [(5 * GIB - 1, None, "quota"), (9 * GIB, 3 * GIB, "free space")]
)
def test_folding_is_chosen_with_a_notice_that_says_the_numbers(quota, free, what):
    """One byte too few is enough; the notice says what was needed and what there was."""
    choice = choose_engine("auto", sites=4, model_bytes=GIB, quota=quota, free=free)
    assert choice.engine == "in_time"
    assert choice.notice is not None
    for part in ("4 contributions", "5.00 GiB", what, "order of arrival"):
        assert part in choice.notice


@pytest.mark.parametrize("engine", ENGINES)
def test_an_explicit_choice_is_not_overruled(engine):
    """Who names an engine gets it; preflight, not a surprise, says that it does not fit."""
    choice = choose_engine(engine, sites=100, model_bytes=GIB, quota=1, free=1)
    assert (choice.engine, choice.notice) == (engine, None)


def test_preflight_refuses_with_the_numbers():
    """What cannot fit is refused before a byte is pulled: needed, available, sites and model."""
    with pytest.raises(QuotaExceededError) as quota:
        preflight("columnar", sites=4, model_bytes=10, quota=49, free=1000)
    with pytest.raises(NoSpaceError) as space:
        preflight("columnar", sites=4, model_bytes=10, quota=None, free=49)
    for caught in (quota, space):
        assert "at least 50 bytes" in str(caught.value)
        assert "49 bytes" in str(caught.value)
        assert (caught.value.sites, caught.value.model_bytes) == (4, 10)
    assert preflight("columnar", sites=4, model_bytes=10, quota=50, free=50) == 50


def test_preflight_of_folding_needs_what_lands_at_once():
    """Folding needs room for the landings in flight and the result, not for every site."""
    assert preflight("in_time", sites=100, model_bytes=10, quota=20, free=None) == 20
    assert (
        preflight("in_time", sites=100, model_bytes=10, quota=None, free=None, concurrent=4) == 50
    )
    assert preflight("in_time", sites=2, model_bytes=10, quota=None, free=None, concurrent=9) == 30
    with pytest.raises(QuotaExceededError):
        preflight("in_time", sites=100, model_bytes=10, quota=19, free=None)


def test_unknown_space_is_not_no_space():
    """A file system that reports no size refuses nothing; 0 free bytes refuse everything."""
    assert preflight("columnar", sites=9, model_bytes=GIB, quota=None, free=None) == 10 * GIB
    with pytest.raises(NoSpaceError):
        preflight("columnar", sites=1, model_bytes=1, quota=None, free=0)


@pytest.mark.parametrize(
    "change",
    [
        {"sites": 0},
        {"sites": True},
        {"sites": 2.0},
        {"model_bytes": -1},
        {"model_bytes": None},
        {"quota": -1},
        {"quota": "1"},
        {"free": 1.5},
        {"concurrent": 0},
    ],
    ids=str,
)
def test_numbers_of_the_wrong_type_or_range_are_refused(change):
    """Nothing is guessed from a number that makes no sense."""
    facts = {"sites": 2, "model_bytes": 10, "quota": None, "free": None, **change}
    with pytest.raises(UsageError):
        preflight("columnar", **facts)


def test_an_unknown_engine_is_refused():
    """The choices are listed."""
    with pytest.raises(UsageError, match="columnar"):
        choose_engine("fast", sites=1, model_bytes=1, quota=None, free=None)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(UsageError, match="columnar"):
        preflight("auto", sites=1, model_bytes=1, quota=None, free=None)  # type: ignore[arg-type]  # so here
    with pytest.raises(UsageError, match="columnar"):
        open_engine("auto", terms({"w": torch.zeros(1)}))  # type: ignore[arg-type]  # and here


FEW_DESCRIPTORS = """
import resource, sys
from pathlib import Path
import torch
from streamoff.fl.aggregation import Contribution, Terms, open_engine
from streamoff.tensors.lazy import open_state
from streamoff.tensors.state import MemoryState
from streamoff.tensors.writer import FileWriter

directory, name = Path(sys.argv[1]), sys.argv[2]

def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))

def written(number):
    state = MemoryState({"w": torch.full((3000,), float(number))})
    writer = FileWriter(directory / f"{number}.safetensors", state.layout)
    content = bytearray(state.layout.data_nbytes)
    state.read_span(0, len(content), memoryview(content))
    writer.write(0, memoryview(content))
    return writer.finish()

before, most, looks = descriptors(), 0, 0
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def look():
    global most, looks
    most, looks = max(most, descriptors() - before), looks + 1

terms = Terms(previous=MemoryState({"w": torch.zeros(3000)}), round=0, job="j")
held = [written(number) for number in range(500)]
with open_engine(name, terms) as engine:
    for number, state in enumerate(held):
        engine.add(Contribution(site=f"s{number}", weight=1, state=state, round=0, job="j"), stop=look)
    result = engine.finish(lambda layout: FileWriter(directory / "result", layout), stop=look)
print(looks > 0 and most < 20, bool((result.state.tensor("w") == 249.5).all()))
"""


@pytest.mark.parametrize("name", ENGINES)
def test_hundreds_of_contributions_need_few_descriptors(tmp_path: Path, name: str) -> None:
    """With 64 descriptors in all, five hundred contributions are held lazily and averaged; few are ever open."""
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path), name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize("name", ENGINES)
def test_both_engines_keep_the_protocol(name):
    """A workflow sees one protocol, whichever engine stands behind it."""
    with open_engine(name, terms({"w": torch.zeros(1)})) as engine:
        assert isinstance(engine, Engine)
        assert engine.name == name
    engine.close()
