"""What the aggregation tests share: real files, real engines, one exact reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import torch
from safetensors.torch import save_file

from streamoff.fl.aggregation import (
    AggregationResult,
    Contribution,
    EngineName,
    Kind,
    NewWriter,
    Policies,
    Terms,
    open_engine,
)
from streamoff.tensors.lazy import LazyStateDict, open_state
from streamoff.tensors.state import MemoryState, State
from streamoff.tensors.writer import FileWriter, MemoryWriter

ENGINES: tuple[EngineName, ...] = ("columnar", "in_time")
ROUND = 3
JOB = "job-1"

Tensors = Mapping[str, torch.Tensor]
_numbers = itertools.count()


def terms(previous: Tensors | State, *, kind: Kind = Kind.FULL, **policies: object) -> Terms:
    """Terms of a round on top of ``previous``."""
    state = previous if isinstance(previous, State) else MemoryState(previous)
    chosen = Policies(**policies)  # type: ignore[arg-type]  # tests pass what they test
    return Terms(previous=state, round=ROUND, job=JOB, kind=kind, policies=chosen)


def contribution(
    site: str,
    tensors: object,
    weight: object = 1,
    *,
    kind: Kind = Kind.FULL,
    round_number: int = ROUND,
    job: str = JOB,
) -> Contribution:
    """One site's update; any value of any field."""
    return Contribution(
        site=site,
        weight=weight,  # type: ignore[arg-type]  # tests pass what they test
        state=tensors,  # type: ignore[arg-type]  # so here
        kind=kind,
        round=round_number,
        job=job,
    )


def landed(directory: Path, tensors: Tensors) -> LazyStateDict:
    """The tensors in a file written by the safetensors library."""
    path = directory / f"{next(_numbers)}.safetensors"
    save_file(dict(tensors), path)
    return open_state(path)


def verified(directory: Path, tensors: Tensors) -> LazyStateDict:
    """The tensors in a file of ours, whose pages are checked whenever they are read."""
    state = MemoryState(tensors)
    writer = FileWriter(directory / f"{next(_numbers)}.safetensors", state.layout)
    content = bytearray(state.layout.data_nbytes)
    state.read_span(0, len(content), memoryview(content))
    writer.write(0, memoryview(content))
    return writer.finish()


def aggregate(
    engine: EngineName,
    agreed: Terms,
    contributions: Iterable[Contribution],
    new_writer: NewWriter = MemoryWriter,
) -> AggregationResult:
    """A whole round, into memory."""
    with open_engine(engine, agreed) as opened:
        for item in contributions:
            opened.add(item)
        return opened.finish(new_writer)


def mean_of(
    engine: EngineName, values: Sequence[torch.Tensor], weights: Sequence[object] | None = None
) -> torch.Tensor:
    """The mean of single tensors of equal weight, or of ``weights``, in the dtype of the first."""
    chosen = weights or [1] * len(values)
    sites = [
        contribution(f"site-{number:03}", {"w": value}, weight)
        for number, (value, weight) in enumerate(zip(values, chosen, strict=True))
    ]
    return aggregate(engine, terms({"w": torch.zeros_like(values[0])}), sites).state.tensor("w")


def bits(state: State) -> dict[str, bytes]:
    """Every tensor as its bytes."""
    found = {}
    for spec in state.layout.specs:
        content = bytearray(spec.nbytes)
        state.read_into(spec.name, 0, memoryview(content))
        found[spec.name] = bytes(content)
    return found


def exact_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean without any rounding but the last."""
    total = sum(map(Fraction, weights), Fraction())
    parts = (Fraction(w) * Fraction(v) for w, v in zip(weights, values, strict=True))
    return float(sum(parts, Fraction()) / total)


def tolerance(values: Sequence[float]) -> float:
    """Bound of the error of a mean with float32 accumulators: a few roundings per site."""
    return math.ldexp(2 * len(values) + 4, -24) * max(map(abs, values)) + 1e-44


def to_file(path: Path) -> NewWriter:
    """A writer factory for a result file."""
    return lambda layout: FileWriter(path, layout)
