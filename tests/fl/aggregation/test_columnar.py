"""The walk: bits, reads, failures and memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamoff.errors import AggregationError, JobClosedError, LandingError, UsageError
from streamoff.fl.aggregation import Columnar, Kind, Reason
from streamoff.fl.aggregation.blocks import BLOCK_BYTES, blocks
from streamoff.tensors.layout import Layout
from streamoff.tensors.lazy import LazyStateDict, open_state
from streamoff.tensors.state import MemoryState
from streamoff.tensors.writer import FileWriter, MemoryWriter

from .support import (
    aggregate,
    bits,
    contribution,
    landed,
    terms,
    to_file,
    verified,
)


def model(seed: int, *, large: int = 1_500_000) -> dict[str, torch.Tensor]:
    """A model of 6 MiB of float32 in two tensors, small ones, a low-precision one and a counter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(large, generator=generator),
        "wide": torch.randn(301, 333, generator=generator).to(torch.bfloat16),
        **{f"small.{n}": torch.randn(n + 1, generator=generator) for n in range(40)},
        "steps": torch.tensor(seed),
    }


def test_arrival_order_changes_no_bit(tmp_path):
    """Contributions in any order, from files or memory, give the same result file, byte for byte."""
    previous = {name: torch.zeros_like(value) for name, value in model(0).items()}
    weights = [0.1, 7, 1e-3, 250]
    results = set()
    for turn in range(4):
        order = random.Random(turn).sample(range(4), 4)
        sites = [
            contribution(
                f"site-{number}",
                model(number) if turn % 2 else verified(tmp_path, model(number)),
                weights[number],
            )
            for number in order
        ]
        target = tmp_path / f"result-{turn}.safetensors"
        aggregate("columnar", terms(previous), sites, to_file(target))
        results.add(target.read_bytes())
    assert len(results) == 1


def test_another_file_layout_changes_no_bit(tmp_path):
    """A contribution whose file orders, names or splits its entries differently is the same to us."""
    values = model(1)
    previous = {name: torch.zeros_like(value) for name, value in values.items()}
    padded = {
        **values,
        **{f"extra.{n}": torch.ones(n) for n in range(0, 90, 7)},
        "aaa": torch.ones(3),
    }
    plain = aggregate(
        "columnar", terms(previous), [contribution("a", values), contribution("b", model(2))]
    )
    other = aggregate(
        "columnar",
        terms(previous, extra="drop"),
        [contribution("a", landed(tmp_path, padded)), contribution("b", model(2))],
    )
    assert bits(plain.state) == bits(other.state)


def test_other_dtypes_in_scattered_files_are_cast_where_they_lie(tmp_path):
    """Pieces of several dtypes in one block are each read and cast at their own place."""
    generator = torch.Generator().manual_seed(5)
    values = {f"k{n}": torch.randn(n + 1, generator=generator) for n in range(30)}
    mixed = {
        name: value.to((torch.float64, torch.float16, torch.bfloat16, torch.float32)[n % 4])
        for n, (name, value) in enumerate(values.items())
    }
    previous = {name: torch.zeros_like(value) for name, value in values.items()}
    result = aggregate(
        "columnar", terms(previous, dtypes="cast"), [contribution("a", landed(tmp_path, mixed))]
    )
    for name, value in mixed.items():
        assert torch.equal(result.state.tensor(name), value.to(torch.float32))


class CountingState(MemoryState):
    """Counts its reads."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.reads = 0

    def read_span(self, start: int, stop: int, buffer: memoryview) -> None:
        """Count and read."""
        self.reads += 1
        super().read_span(start, stop, buffer)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Count and read."""
        self.reads += 1
        super().read_into(name, start, buffer)


def test_small_tensors_share_a_read():
    """A thousand small tensors of one dtype cost one read per site, not a thousand."""
    tensors = {f"k{n:04}": torch.ones(8) for n in range(1000)}
    state = CountingState(tensors)
    other = CountingState({**tensors, "zz": torch.tensor(1.0)})
    aggregate(
        "columnar",
        terms({name: torch.zeros(8) for name in tensors}, extra="drop"),
        [contribution("a", state), contribution("b", other)],
    )
    assert (state.reads, other.reads) == (1, 1)


def test_no_block_is_larger_than_the_buffers():
    """Blocks cover the data section exactly, and neither values nor accumulators outgrow a buffer."""
    previous = model(0)
    previous["bytes"] = torch.zeros(9_000_001, dtype=torch.uint8)
    for any_dtype in (False, True):
        agreed = terms(previous)
        layout = agreed.previous.layout
        at = 0
        for block in blocks(layout, agreed.methods(), lambda _: None, any_dtype=any_dtype):
            assert block.method is not None
            assert block.start == at
            assert block.elements * block.stride <= BLOCK_BYTES
            assert block.elements * block.method.width <= BLOCK_BYTES
            assert block.stride == 8 or not any_dtype
            at += block.nbytes
        assert at == layout.data_nbytes


def corrupt(state: LazyStateDict, name: str) -> LazyStateDict:
    """Flip one byte of a tensor on disk."""
    spec = state.layout.by_name[name]
    at = state.layout.data_start + spec.start + spec.nbytes // 2
    with state.path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))
    return state


def truncate(state: LazyStateDict) -> LazyStateDict:
    """Cut the file in half."""
    os.truncate(state.path, state.layout.size // 2)
    return state


def unlink(state: LazyStateDict) -> LazyStateDict:
    """Take the file away."""
    state.path.unlink()
    return state


@pytest.mark.parametrize(
    "harm", [lambda s: corrupt(s, "large"), lambda s: corrupt(s, "small.3"), truncate, unlink]
)
def test_a_read_that_fails_drops_the_site_and_no_byte_of_it_stays(tmp_path, harm):
    """The walk restarts without the site: the result is what the others alone give, and says so."""
    previous = {name: torch.zeros_like(value) for name, value in model(0).items()}
    good = [contribution("a", verified(tmp_path, model(1)), 2), contribution("c", model(3), 5)]
    bad = contribution("b", harm(verified(tmp_path, model(2))), 3)
    path = tmp_path / "result.safetensors"
    result = aggregate("columnar", terms(previous), [good[0], bad, good[1]], to_file(path))
    alone = [contribution("a", model(1), 2), contribution("c", model(3), 5)]
    assert bits(result.state) == bits(aggregate("columnar", terms(previous), alone).state)
    assert result.report.weights == {"a": 2.0, "c": 5.0}
    assert result.report.restarts == 1
    [rejection] = result.report.rejected
    assert (rejection.site, rejection.reason) == ("b", Reason.READ)
    assert bits(open_state(path)) == bits(result.state)


def test_restarts_are_bounded_by_the_sites(tmp_path):
    """When every contribution is bad there is an error naming the round, not a loop or half a model."""
    previous = {name: torch.zeros_like(value) for name, value in model(0).items()}
    path = tmp_path / "result.safetensors"
    sites = [
        contribution(f"s{n}", corrupt(verified(tmp_path, model(n)), "large")) for n in range(3)
    ]
    with pytest.raises(AggregationError, match="no contribution is left"):
        aggregate("columnar", terms(previous), sites, to_file(path))
    assert not path.exists()
    assert not path.with_name(path.name + ".part").exists()


def test_a_closed_job_is_named_as_the_cause(tmp_path):
    """When every file is gone because the job closed, that is what is raised."""
    previous = {name: torch.zeros_like(value) for name, value in model(0).items()}
    sites = [contribution(f"s{n}", unlink(verified(tmp_path, model(n)))) for n in range(2)]
    with pytest.raises(JobClosedError):
        aggregate("columnar", terms(previous), sites)


def test_a_previous_model_that_cannot_be_read_costs_the_round(tmp_path):
    """Differences have nothing to be added to: an error, and no site is blamed."""
    previous = corrupt(verified(tmp_path, model(0)), "large")
    site = contribution("a", model(1), kind=Kind.DIFF)
    with pytest.raises(AggregationError, match="previous model"):
        aggregate("columnar", terms(previous, kind=Kind.DIFF), [site])


class Cut(Exception):  # noqa: N818 -- an interruption, not an error
    """Raised by the tests' stop."""


def stop_at(call: int) -> Callable[[], None]:
    """A stop that cuts at its n-th call."""
    left = [call]

    def stop() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Cut

    return stop


def test_a_cut_between_blocks_publishes_nothing_and_can_be_taken_up(tmp_path):
    """Cutting the walk anywhere leaves no result and no partial file; a second finish does the work."""
    previous = {name: torch.zeros_like(value) for name, value in model(0).items()}
    path = tmp_path / "result.safetensors"
    expected = bits(aggregate("columnar", terms(previous), [contribution("a", model(1))]).state)
    cuts = 0
    for call in range(100):
        with Columnar(terms(previous)) as engine:
            engine.add(contribution("a", model(1)))
            try:
                engine.finish(lambda layout: FileWriter(path, layout), stop=stop_at(call))
            except Cut:
                cuts += 1
                assert list(tmp_path.iterdir()) == []
            else:
                break
            assert bits(engine.finish(MemoryWriter).state) == expected
    assert cuts > 3
    assert bits(open_state(path)) == expected


class FailingWriter(MemoryWriter):
    """A disk that is full after two writes."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.left = 2

    def write(self, start: int, buffer: memoryview) -> None:
        """Write, or be full."""
        self.left -= 1
        if self.left < 0:
            raise LandingError("full")
        super().write(start, buffer)


def test_a_result_that_cannot_be_written_keeps_the_contributions(tmp_path):
    """A full disk is the caller's to solve: the same round can be finished elsewhere."""
    previous = {name: torch.zeros_like(value) for name, value in model(0).items()}
    with Columnar(terms(previous)) as engine:
        engine.add(contribution("a", verified(tmp_path, model(1))))
        with pytest.raises(LandingError, match="full"):
            engine.finish(FailingWriter)
        assert bits(engine.finish(MemoryWriter).state) == bits(MemoryState(model(1)))


def test_contributions_are_released_when_the_result_is_there(tmp_path):
    """The disk of every contribution is free once the round is finished."""
    previous = {name: torch.zeros_like(value) for name, value in model(0).items()}
    states = [verified(tmp_path, model(n)) for n in range(2)]
    aggregate("columnar", terms(previous), [contribution(f"s{n}", s) for n, s in enumerate(states)])
    for state in states:
        with pytest.raises((JobClosedError, UsageError)):
            state.tensor("large")


MEMORY = """
import json, sys, threading
import torch
from pathlib import Path
from streamoff.fl.aggregation import Columnar, Contribution, Terms
from streamoff.tensors.lazy import open_state
from streamoff.tensors.writer import FileWriter

directory, sites = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def run(count):
    previous = open_state(directory / "model.safetensors")
    with Columnar(Terms(previous=previous, round=0, job="j")) as engine:
        for number in range(count):
            state = open_state(directory / f"{number % 2}.safetensors")
            engine.add(Contribution(site=f"s{number:02}", weight=1 + number, state=state, round=0, job="j"))
        engine.finish(lambda layout: FileWriter(directory / f"result-{sites}.safetensors", layout))

run(1)
base = peak = resident()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, resident())

watcher = threading.Thread(target=watch)
watcher.start()
run(sites)
done.set()
watcher.join()
print(json.dumps([base, peak]))
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="resident memory is read from /proc"
)
def test_memory_does_not_grow_with_the_number_of_sites(tmp_path):
    """Averaging 16 contributions of 64 MiB peaks within 8 MiB of averaging 2, far below one model."""
    generator = torch.Generator().manual_seed(0)
    for name in ("model", "0", "1"):
        values = {
            "one": torch.randn(12 << 20, generator=generator),
            **{f"k{n}": torch.randn(1 << 16, generator=generator) for n in range(64)},
        }
        landed(tmp_path, values).path.rename(tmp_path / f"{name}.safetensors")
    grown = {}
    for sites in (2, 16):
        output = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path), str(sites)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        base, peak = json.loads(output)
        grown[sites] = peak - base
    assert abs(grown[16] - grown[2]) < 8 << 20
    assert max(grown.values()) < 32 << 20
