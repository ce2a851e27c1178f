"""FedAvg: broadcast, collect, average, repeat.

Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (2017),
algorithm 1: the new model is the mean of the sites' models, weighted by their numbers of samples.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, get_args

from streamoff.errors import UsageError
from streamoff.fl.aggregation.contribution import Kind
from streamoff.fl.aggregation.engine import Requested
from streamoff.fl.aggregation.policies import Policies
from streamoff.fl.exchange import ExchangeFormat
from streamoff.fl.persistor import FilePersistor
from streamoff.fl.workflows.rounds import Rounds, WorkflowObserver
from streamoff.fl.workflows.server import ServerRun
from streamoff.fl.workflows.settings import RunSettings
from streamoff.runtime.jobs import Job
from streamoff.tensors.state import State
from streamoff.types import Address

if TYPE_CHECKING:
    import torch

__all__ = ["Evaluate", "FedAvg"]

Evaluate = Callable[[State, Mapping[int, tuple[str, ...]]], Mapping[str, float]]
"""Judges a global model, given the sites that went into each round so far; runs in a worker thread."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FedAvg:
    """Federated averaging with sampling, quorum and cut-off.

    Args:
        initial: The first global model: tensors by name, a state, or a safetensors file that stays until
            the workflow ends.
        rounds: How many, from 1.
        sample: Sites per round: a number, or a fraction in (0, 1] of those given; None: all.
        min_responses: Contributions a round needs; None: all that were asked. With fewer left the round
            fails and the previous model stands.
        cut_off: Seconds that the remaining sites get once ``min_responses`` contributions are in; None:
            they are waited for until ``round_timeout``.
        round_timeout: Seconds after which a round closes with what it has. What has landed then still counts.
        kind: Whether sites send models or differences.
        aggregation: ``columnar``, ``in_time``, or ``auto``: columnar where it fits.
        policies: What contributions must be like and how they are averaged.
        enable_tensor_disk_offload: Land contributions on disk under the job root instead of in memory.
        server_expected_format: ``numpy``: parameters travel as ndarrays and always land in memory;
            ``pytorch``: as tensors.
        persistor: Publishes the final model when the iteration is finished, not when it is left before; None:
            the model ends with the job.
        evaluate: Judges every new global model; what it raises costs the round.
        observer: Watches.
        seed: Of the sampling.

    Raises:
        UsageError: A value of the wrong type or range; nothing was started.
    """

    initial: Mapping[str, torch.Tensor] | State | Path = field(repr=False)
    rounds: int
    sample: int | float | None = None
    min_responses: int | None = None
    cut_off: float | None = None
    round_timeout: float = 3600.0
    kind: Kind = Kind.FULL
    aggregation: Requested = "auto"
    policies: Policies = Policies()  # noqa: RUF009 - frozen
    enable_tensor_disk_offload: bool = False
    server_expected_format: ExchangeFormat | str = ExchangeFormat.NUMPY
    persistor: FilePersistor | None = None
    evaluate: Evaluate | None = None
    observer: WorkflowObserver | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "server_expected_format", ExchangeFormat.of(self.server_expected_format)
        )
        _check_choice("kind", self.kind, tuple(Kind))
        object.__setattr__(self, "kind", Kind(self.kind))
        _positive_int("rounds", self.rounds)
        if self.min_responses is not None:
            _positive_int("min_responses", self.min_responses)
        _check_sample(self.sample)
        _check_choice("aggregation", self.aggregation, get_args(Requested))
        for name, kind, value in (
            ("policies", Policies, self.policies),
            ("persistor", (FilePersistor, NoneType), self.persistor),
            ("seed", int, self.seed),
        ):
            _check_type(name, kind, value)
        if self.evaluate is not None and not callable(self.evaluate):
            raise UsageError("evaluate", expected="a function", got=self.evaluate)
        for name in ("cut_off", "round_timeout"):
            _check_seconds(name, getattr(self, name), optional=name == "cut_off")
        if type(self.enable_tensor_disk_offload) is not bool:
            raise UsageError(
                "enable_tensor_disk_offload",
                expected="True or False",
                got=self.enable_tensor_disk_offload,
            )
        warning = ExchangeFormat.of(self.server_expected_format).offload_warning()
        if self.enable_tensor_disk_offload and warning is not None:
            warnings.warn(warning, UserWarning, stacklevel=3)

    def run(self, job: Job, sites: Iterable[str]) -> Rounds:
        """Run the rounds in a job: ``async with fedavg.run(job, sites) as rounds``.

        Args:
            job: An open job of the aggregator's endpoint.
            sites: Addresses of the sites, distinct; they run an executor for the same job.

        Returns:
            The rounds, an async iterator and context manager.

        Raises:
            UsageError: No sites, one twice, or fewer than ``min_responses``.
        """
        if isinstance(sites, str):
            raise UsageError("sites", expected="a collection of addresses", got=sites)
        names = tuple(Address(site) for site in sites)
        if not names or len(set(names)) != len(names):
            raise UsageError("sites", expected="at least one, each once", got=names)
        wanted = sampled_number(self.sample, len(names))
        if self.min_responses is not None and self.min_responses > wanted:
            raise UsageError(
                "min_responses",
                expected=f"at most {wanted}, the sites of a round",
                got=self.min_responses,
            )
        settings = RunSettings(
            workflow="FedAvg",
            initial=self.initial,
            rounds=self.rounds,
            select=lambda number: select_sites(names, wanted, self.seed, number),
            min_responses=self.min_responses or wanted,
            cut_off=self.cut_off,
            round_timeout=self.round_timeout,
            kind=self.kind,
            aggregation=self.aggregation,
            policies=self.policies,
            offload=self.enable_tensor_disk_offload,
            exchange=ExchangeFormat.of(self.server_expected_format),
            persistor=self.persistor,
            evaluate=self.evaluate,
            observer=self.observer,
        )
        return Rounds(job, "FedAvg", ServerRun(job, names, settings).work)


def sampled_number(sample: float | None, sites: int) -> int:
    """How many of ``sites`` take part in a round: at least one."""
    if sample is None:
        return sites
    if type(sample) is int:
        return min(sample, sites)
    return max(1, math.ceil(sample * sites - 1e-9))


def select_sites(
    sites: tuple[Address, ...],
    number: int,
    seed: int,
    round: int,  # noqa: A002 - the word
) -> tuple[Address, ...]:
    """The sites of a round, in their given order; the same for the same seed and round."""
    if number >= len(sites):
        return sites
    chosen = set(random.Random(f"{seed}:{round}").sample(sites, number))
    return tuple(site for site in sites if site in chosen)


def _positive_int(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(name, expected="an int from 1", got=value)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(name, expected=" | ".join(choices), got=value)


def _check_type(name: str, kind: type | tuple[type, ...], value: object) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise UsageError(name, expected=" or ".join(one.__name__ for one in kinds), got=value)


def _check_sample(value: object) -> None:
    if value is None or (type(value) is int and value >= 1):
        return
    if type(value) is float and 0.0 < value <= 1.0:
        return
    raise UsageError("sample", expected="an int from 1 or a fraction in (0, 1]", got=value)


def _check_seconds(name: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
    ):
        raise UsageError(name, expected="finite seconds, 0 or more", got=value)
