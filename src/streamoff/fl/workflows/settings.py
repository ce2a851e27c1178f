"""The settings of one run of a server workflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamoff.fl.aggregation.contribution import Kind
from streamoff.fl.aggregation.engine import Requested
from streamoff.fl.aggregation.policies import Policies
from streamoff.fl.exchange import ExchangeFormat
from streamoff.fl.persistor import FilePersistor
from streamoff.fl.workflows.rounds import WorkflowObserver
from streamoff.tensors.state import State
from streamoff.types import Address

if TYPE_CHECKING:
    import torch

__all__ = ["RunSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of one run, validated by the workflow that made them.

    Args:
        workflow: Its name.
        select: Gives the sites of a round by its number.
        min_responses: Contributions a round needs.

    The others are those of :class:`streamoff.fl.workflows.fedavg.FedAvg`.
    """

    workflow: str
    initial: Mapping[str, torch.Tensor] | State | Path
    rounds: int
    select: Callable[[int], tuple[Address, ...]]
    min_responses: int
    cut_off: float | None
    round_timeout: float
    kind: Kind
    aggregation: Requested
    policies: Policies
    offload: bool
    exchange: ExchangeFormat
    persistor: FilePersistor | None
    evaluate: Callable[[State, Mapping[int, tuple[str, ...]]], Mapping[str, float]] | None
    observer: WorkflowObserver | None

    @property
    def to_disk(self) -> bool:
        """Whether contributions and models live on disk."""
        return self.offload and self.exchange.can_offload
