"""The settings of one simulation, checked where they enter."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from streamoff.errors import UsageError
from streamoff.scratch.names import RootName
from streamoff.sim.shapes import check_shapes
from streamoff.tensors.files import PageCache, Storage

__all__ = ["AGGREGATIONS", "BACKENDS", "PAGE_CACHES", "RECIPES", "TASKS", "SimulationConfig"]

RECIPES: Final = ("fedavg",)
TASKS: Final = ("digits", "checkpoint")
AGGREGATIONS: Final = ("columnar", "in-time")
PAGE_CACHES: Final = ("keep", "drop")
BACKENDS: Final = ("asyncio", "trio")

_CHOICES: Final = {
    "recipe": RECIPES,
    "task": TASKS,
    "aggregation": AGGREGATIONS,
    "backend": BACKENDS,
    "page_cache": PAGE_CACHES,
}
_RANGES: Final = {"sites": (1, 100_000), "rounds": (1, 1_000_000), "seed": (0, 2**63 - 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What to simulate.

    Args:
        recipe: One of :data:`RECIPES`.
        sites: Number of sites, 1 to 100,000.
        rounds: Number of rounds, 1 to 1,000,000.
        task: ``"digits"`` trains on real data; ``"checkpoint"`` moves a model of any size.
        model: Task ``checkpoint``: an existing safetensors file to start from.
        model_size: Task ``checkpoint`` without ``model``: bytes of the synthetic model.
        site_tensors: Task ``checkpoint`` without ``model``: its shapes, see
            :func:`streamoff.sim.shapes.shapes_of`.
        offload: Land the contributions on disk instead of in memory.
        aggregation: One of :data:`AGGREGATIONS`.
        backend: One of :data:`BACKENDS`.
        seed: Of everything random, 0 to 2**63 - 1.
        scratch: Existing directory for job roots, or None: the temporary directory.
        durable: Wait until what is written is on stable storage.
        page_cache: One of :data:`PAGE_CACHES`: whether what is written and read may stay in the page cache.
        output: Where the final model is published; its directory must exist, a file there is replaced.
        min_responses: Contributions that close a round, 1 to ``sites``, or None: all.

    Raises:
        UsageError: A value has the wrong type or range, two values contradict each other, or a path does
            not fit. Nothing was started.
    """

    recipe: str = "fedavg"
    sites: int = 8
    rounds: int = 5
    task: str = "digits"
    model: Path | None = None
    model_size: int | None = None
    site_tensors: str | None = None
    offload: bool = False
    aggregation: str = "columnar"
    backend: str = "asyncio"
    seed: int = 0
    scratch: Path | None = None
    durable: bool = False
    page_cache: str = "keep"
    output: Path = Path("model.safetensors")
    min_responses: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_type(item.name, getattr(self, item.name), item.type)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name} is unknown",
                    expected="one of " + ", ".join(choices),
                    got=getattr(self, name),
                )
        for name, (low, high) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        if self.min_responses is not None:
            _check_range("min_responses", self.min_responses, 1, self.sites)
        self._check_model()
        self._check_paths()

    @property
    def storage(self) -> Storage:
        """How the files of the run are kept."""
        page_cache: PageCache = "drop" if self.page_cache == "drop" else "keep"
        return Storage(durable=self.durable, page_cache=page_cache)

    def _check_model(self) -> None:
        shaped = {
            name: getattr(self, name)
            for name in ("model", "model_size", "site_tensors")
            if getattr(self, name) is not None
        }
        if self.task != "checkpoint" and shaped:
            raise UsageError(
                f"{next(iter(shaped))} has no meaning here",
                expected="task checkpoint",
                got=self.task,
            )
        if self.model is not None and len(shaped) > 1:
            raise UsageError(
                "model and " + " and ".join(list(shaped)[1:]) + " exclude each other",
                hint="Give an existing file, or the size and shapes of a synthetic one",
            )
        if self.task == "checkpoint" and self.model is None and self.model_size is None:
            raise UsageError(
                "task checkpoint needs a model", hint="Give a safetensors file or a model size"
            )
        if self.model_size is not None:
            check_shapes(self.site_tensors or "1", self.model_size)

    def _check_paths(self) -> None:
        if self.model is not None and not self.model.is_file():
            raise UsageError("model is no file", path=self.model)
        if self.scratch is not None and not self.scratch.is_dir():
            raise UsageError("scratch is no directory", path=self.scratch)
        place = self.output.absolute().parent
        if not place.is_dir():
            raise UsageError("the directory of output does not exist", path=place)
        if any(RootName.parse(name) for name in place.resolve().parts):
            raise UsageError("output lies in a job root, which is removed whole", path=place)
        if not os.access(place, os.W_OK | os.X_OK):
            raise UsageError("the directory of output is not writable", path=place)
        if self.output.is_dir():
            raise UsageError("output is a directory", path=self.output)
        if self.model is not None and self.output.exists() and self.output.samefile(self.model):
            raise UsageError("output would replace the model it starts from", path=self.output)


def _check_type(name: str, value: object, wanted: Any) -> None:
    """Refuse what is not an instance; True is no number."""
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise UsageError(
            f"{name} has the wrong type",
            expected=getattr(wanted, "__name__", str(wanted)),
            got=value,
        )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} is out of range", expected=f"{low} to {high}", got=value)
