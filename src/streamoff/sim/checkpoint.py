"""Moving a model of any size: each site returns the global model with a little noise on it.

Nobody ever holds the model. The synthetic one is written block by block; a site's update is a source that
reads the range it is asked for and adds the noise of just that range; and what the average must be is
recomputed for a few sampled blocks, so an aggregator that loses, doubles or misplaces a contribution is
found out.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from streamoff.errors import AggregationError, JobClosedError, UsageError
from streamoff.sim.noise import BLOCK, uniform
from streamoff.sim.seeds import derive
from streamoff.sim.shapes import shapes_of
from streamoff.sim.tasks import GlobalState, TrainResult
from streamoff.tensors.dtypes import itemsize, torch_dtype
from streamoff.tensors.files import DEFAULT_STORAGE, Storage
from streamoff.tensors.layout import Layout, plan
from streamoff.tensors.lazy import open_state
from streamoff.tensors.sources import Source
from streamoff.tensors.state import MemoryState, State
from streamoff.tensors.views import Views, as_bytes
from streamoff.tensors.writer import FileWriter
from streamoff.types import TensorSpec

__all__ = ["Checkpoint", "CheckpointSite", "NoisySource", "Sample", "write_synthetic"]

NOISE: Final = 2.0**-8
"""Largest change of an element by a site in a round."""
SPREAD: Final = 2.0**-4
"""Largest element of a synthetic model."""
NOISY: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Dtypes that get noise; tensors of others are returned unchanged."""

SAMPLES: Final = 32
"""Blocks that are recomputed at byte offsets drawn from the seed, and once more in tensors by turns."""
SAMPLE_ELEMENTS: Final = 4096


def write_synthetic(
    path: Path, kind: str, nbytes: int, *, seed: int, storage: Storage = DEFAULT_STORAGE
) -> None:
    """Write a float32 model, block by block.

    Args:
        path: A file that does not exist yet.
        kind: Its shapes, see :func:`~streamoff.sim.shapes.shapes_of`.
        nbytes: Its size, as there.
        seed: Of its elements, uniform in ``[-SPREAD, SPREAD)``.
        storage: How the file is kept.

    Raises:
        UsageError: ``nbytes`` does not fit ``kind``.
        LandingError: The file cannot be written; nothing is left of it.
    """
    layout = plan((name, "F32", shape) for name, shape in shapes_of(kind, nbytes))
    writer = FileWriter(path, layout, storage=storage)
    try:
        for spec in layout.specs:
            key = derive(seed, "synthetic", spec.name)
            for first, count in _blocks(0, spec.numel):
                values = uniform(key, first, count, scale=SPREAD)
                writer.write(spec.start + first * values.itemsize, values.data.cast("B"))
        writer.finish()
    except BaseException:
        writer.discard()
        raise


class NoisySource:
    """A model with noise on it, computed range by range: a :class:`~streamoff.tensors.sources.Source`.

    Safe to read from several threads at once. A read of n bytes needs memory for one block of noise.

    Args:
        state: The model, borrowed until :meth:`close`.
        key: What the noise depends on besides the tensor's name and the element's index.
    """

    blocking: Final = True

    def __init__(self, state: State, key: int) -> None:
        self.layout: Final[Layout] = state.layout
        self._state: State | None = state
        self._key = key
        self._starts = [spec.start for spec in self.layout.specs]

    def views(self, start: int, stop: int) -> Views | None:  # noqa: ARG002  the protocol's names
        """Return None: every range is computed into a buffer."""
        return None

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Compute payload bytes from ``start`` on.

        Raises:
            UsageError: The range is not inside the payload.
            JobClosedError: The source is closed.
        """
        if self._state is None:
            raise JobClosedError("the source is closed")
        out, origin = as_bytes(buffer), self.layout.data_start
        stop = start + len(out)
        if not 0 <= start <= stop <= self.layout.size:
            raise UsageError(
                "range outside the payload", expected=f"0 to {self.layout.size}", got=(start, stop)
            )
        head = self.layout.header[start:stop]
        out[: len(head)] = head
        data, at = out[len(head) :], max(start, origin) - origin
        if not data:
            return
        self._state.read_span(at, at + len(data), data)
        for spec in self._specs(at, at + len(data)):
            low, high = max(spec.start, at), min(spec.stop, at + len(data))
            if spec.dtype in NOISY:
                _disturb(self._state, spec, self._key, low - spec.start, data[low - at : high - at])

    def check(self) -> None:
        """Do nothing: the state checks itself at each read."""

    def close(self) -> None:
        """Let go of the model."""
        self._state = None

    def _specs(self, start: int, stop: int) -> Iterator[TensorSpec]:
        """Yield the tensors that have bytes in a range of the data section."""
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._starts)):
            spec = self.layout.specs[index]
            if spec.start >= stop:
                return
            if spec.stop > start and spec.nbytes:
                yield spec


def _disturb(state: State, spec: TensorSpec, key: int, start: int, out: memoryview) -> None:
    """Add noise to bytes of one tensor, from byte ``start`` of it; elements may be cut at both ends."""
    size = itemsize(spec.dtype)
    head = min(-start % size, len(out))
    stop = len(out) - (start + len(out)) % size if len(out) > head else head
    for low, high in ((0, head), (max(stop, head), len(out))):
        if low < high:
            index, skip = divmod(start + low, size)
            element = memoryview(bytearray(size))
            state.read_into(spec.name, index * size, element)
            _add_noise(element, spec, key, index)
            out[low:high] = element[skip : skip + high - low]
    if head < stop:
        _add_noise(out[head:stop], spec, key, (start + head) // size)


def _add_noise(buffer: memoryview, spec: TensorSpec, key: int, first: int) -> None:
    """Add noise to whole elements of a tensor, in place; ``first`` is the index of the first one."""
    values = torch.frombuffer(buffer, dtype=torch_dtype(spec.dtype))
    wide = torch.float64 if spec.dtype == "F64" else torch.float32
    own = derive(key, spec.name)
    for at, count in _blocks(first, values.numel()):
        noise = torch.from_numpy(uniform(own, at, count, scale=NOISE))
        part = values[at - first : at - first + count]
        part.copy_(part.to(wide).add_(noise))


def _blocks(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut a run of elements into pairs of first index and length."""
    for at in range(first, first + count, BLOCK):
        yield at, min(BLOCK, first + count - at)


@dataclass(frozen=True, slots=True)
class Sample:
    """A few elements of one tensor: ``count`` from index ``first`` on."""

    spec: TensorSpec
    first: int
    count: int

    def read(self, state: State) -> memoryview:
        """Return the sampled bytes of a model, fresh and writable."""
        size = itemsize(self.spec.dtype)
        buffer = memoryview(bytearray(self.count * size))
        state.read_into(self.spec.name, self.first * size, buffer)
        return buffer


class Checkpoint:
    """The checkpoint task: a :class:`~streamoff.sim.tasks.Task`.

    Args:
        sites: Names of the sites.
        seed: Of model, noise and weights, non-negative.
        directory: An existing directory; a synthetic model is written there, once.
        model: An existing safetensors file, or None: a synthetic model.
        nbytes: Size of the synthetic model.
        shapes: Shapes of the synthetic model.
        storage: How the synthetic model is kept.
    """

    landing: Literal["memory", "disk"] = "disk"

    def __init__(
        self,
        sites: Sequence[str],
        *,
        seed: int,
        directory: Path,
        model: Path | None = None,
        nbytes: int | None = None,
        shapes: str = "1",
        storage: Storage = DEFAULT_STORAGE,
    ) -> None:
        self._sites = {name: CheckpointSite(name, seed=seed) for name in sites}
        self._seed = seed
        self._directory = directory
        self._model = model
        self._nbytes = nbytes
        self._shapes = shapes
        self._storage = storage
        self._replay: _Replay | None = None

    def initial_state(self) -> Path:
        """Return the file of the first global model; a synthetic one is written by the first call.

        Raises:
            UsageError: There is neither a model nor the size of one.
            LandingError: The synthetic model cannot be written.
        """
        if self._model is None:
            if self._nbytes is None:
                raise UsageError("task checkpoint needs a model or the size of one")
            path = self._directory / "synthetic.safetensors"
            write_synthetic(
                path, self._shapes, self._nbytes, seed=self._seed, storage=self._storage
            )
            self._model = path
        return self._model

    def site(self, name: str) -> "CheckpointSite":
        """Return a site's part.

        Raises:
            UsageError: The task has no such site.
        """
        if name not in self._sites:
            raise UsageError("no such site", site=name)
        return self._sites[name]

    def evaluate(
        self, state: GlobalState, accepted: Mapping[int, Sequence[str]]
    ) -> dict[str, float]:
        """Compare sampled blocks of a global model with what the rounds must have made of them.

        The blocks of the first model go through every round again: each site's noise, the cast to the
        tensor's dtype, the weighted mean in float64, the cast. Replaying goes on where the last call
        stopped, so a round costs time in proportion to its sites, whatever the size of the model.

        Args:
            state: The global model.
            accepted: The sites averaged in each round so far, by the number that ``train`` got.

        Returns:
            ``max_error``, the largest absolute difference that rounding left, and ``checked_elements``.

        Raises:
            AggregationError: The model has other tensors, or a difference that rounding does not explain.
        """
        model = _as_state(state)
        if self._replay is None or not self._replay.leads_to(accepted):
            self._replay = _Replay(self.initial_state(), self._seed)
        self._replay.follow(accepted, self._sites)
        return self._replay.compare(model)


class CheckpointSite:
    """One site: the global model with the site's noise on it, and a weight of 1 to 100.

    Args:
        name: Of the site.
        seed: Of the simulation.
    """

    def __init__(self, name: str, *, seed: int) -> None:
        self.name = name
        self.weight = float(derive(seed, "weight", name) % 100 + 1)
        self._seed = seed

    def key(self, round: int) -> int:  # noqa: A002  the word of the domain
        """Return what the noise of a round depends on."""
        return derive(self._seed, "noise", round, self.name)

    def train(self, round: int, state: GlobalState) -> TrainResult:  # noqa: A002
        """Return a source of the noisy model; nothing is read yet."""
        source: Source = NoisySource(_as_state(state), self.key(round))
        return TrainResult(params=source, weight=self.weight)


def _as_state(state: GlobalState) -> State:
    return state if isinstance(state, State) else MemoryState(state)


class _Replay:
    """Sampled blocks of a model on their way through the rounds."""

    def __init__(self, model: Path, seed: int) -> None:
        with open_state(model) as initial:
            self._layout = initial.layout
            self._samples = list(_samples(self._layout, seed))
            self._values = [sample.read(initial) for sample in self._samples]
        self._rounds: dict[int, tuple[str, ...]] = {}
        self._slack = 0.0

    def leads_to(self, accepted: Mapping[int, Sequence[str]]) -> bool:
        """Whether what was replayed is the beginning of ``accepted``."""
        begun = dict(list(accepted.items())[: len(self._rounds)])
        return self._rounds == {number: tuple(names) for number, names in begun.items()}

    def follow(
        self, accepted: Mapping[int, Sequence[str]], sites: Mapping[str, CheckpointSite]
    ) -> None:
        """Replay the rounds that are new."""
        for number, names in list(accepted.items())[len(self._rounds) :]:
            chosen = [sites[name] for name in names]
            for sample, values in zip(self._samples, self._values, strict=True):
                if sample.spec.dtype in NOISY:
                    _average(sample, values, chosen, number)
            self._rounds[number] = tuple(names)
            self._slack += len(names) + 3

    def compare(self, state: State) -> dict[str, float]:
        """Return the largest error; as :meth:`Checkpoint.evaluate`."""
        wanted = {spec.name: (spec.dtype, spec.shape) for spec in self._layout.specs}
        if {spec.name: (spec.dtype, spec.shape) for spec in state.layout.specs} != wanted:
            raise AggregationError("the averaged model has other tensors than the first one")
        worst = 0.0
        for sample, values in zip(self._samples, self._values, strict=True):
            worst = max(worst, self._error(sample, values, sample.read(state)))
        checked = sum(sample.count for sample in self._samples)
        return {"max_error": worst, "checked_elements": float(checked)}

    def _error(self, sample: Sample, values: memoryview, found: memoryview) -> float:
        if sample.spec.dtype not in NOISY:
            if values != found:
                raise AggregationError(
                    "a tensor that every site returned unchanged has changed",
                    tensor=sample.spec.name,
                )
            return 0.0
        dtype = torch_dtype(sample.spec.dtype)
        expected = torch.frombuffer(values, dtype=dtype).double()
        got = torch.frombuffer(found, dtype=dtype).double()
        error = (got - expected).abs()
        step = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
        own = torch.finfo(dtype)
        # Per round: one float32 rounding per site and a few more, and one step of the storage dtype where
        # a value close to the middle of two representable ones fell to the other side.
        bound = (expected.abs() + NOISE) * (self._slack * step + len(self._rounds) * own.eps)
        bound += len(self._rounds) * own.smallest_normal * own.eps
        wrong = ~(error <= bound)  # a NaN is wrong, too
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise AggregationError(
                "the averaged model is not the weighted mean of its contributions",
                expected=expected[at].item(),
                got=got[at].item(),
                tensor=sample.spec.name,
                element=sample.first + at,
            )
        return error.max().item()


def _average(
    sample: Sample, values: memoryview, sites: Sequence[CheckpointSite], number: int
) -> None:
    """Replace sampled values by the weighted mean of what the sites make of them."""
    before = torch.frombuffer(values, dtype=torch_dtype(sample.spec.dtype))
    total = torch.zeros(sample.count, dtype=torch.float64)
    for site in sites:
        theirs = memoryview(bytearray(values))
        _add_noise(theirs, sample.spec, site.key(number), sample.first)
        total += torch.frombuffer(theirs, dtype=before.dtype).double() * site.weight
    before.copy_(total / sum(site.weight for site in sites))


def _samples(layout: Layout, seed: int) -> Iterator[Sample]:
    """Choose blocks by byte, so that large tensors have more, and by tensor, so that small ones have some."""
    specs = [spec for spec in layout.specs if spec.nbytes]
    starts = [spec.start for spec in specs]
    chosen = [(spec, 0) for spec in specs[:: -(-len(specs) // SAMPLES) or 1]]
    for index in range(SAMPLES if specs else 0):
        offset = derive(seed, "sample", index) % layout.data_nbytes
        spec = specs[bisect_right(starts, offset) - 1]
        chosen.append((spec, (offset - spec.start) // itemsize(spec.dtype)))
    if specs:
        chosen.append((specs[-1], specs[-1].numel))
    for spec, element in chosen:
        first = max(min(element, spec.numel - SAMPLE_ELEMENTS), 0)
        yield Sample(spec, first, min(SAMPLE_ELEMENTS, spec.numel))
