"""What the sites of a simulation work on.

A task knows the first global model, what each site does with a global model, and how good one is. It is
synchronous and runs in the simulation's worker thread; it never sees an endpoint or an event loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import torch

from streamoff.fl.aggregation.contribution import Kind
from streamoff.tensors.sources import Source
from streamoff.tensors.state import State

__all__ = ["GlobalState", "SiteTask", "Task", "TrainResult", "tensors_of"]

GlobalState: TypeAlias = Mapping[str, torch.Tensor] | State
"""A global model as it landed: tensors in memory, or a state whose tensors are read when asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a site sends after a round.

    Args:
        params: Tensors by name, or a source of them. They are the task's until the transaction that hands
            them over has settled; whoever sends a source closes it.
        weight: Finite and >= 0, usually the number of samples.
        metrics: Of the training, by name.
        kind: Whether ``params`` is a model or a difference.
    """

    params: Mapping[str, torch.Tensor] | Source
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    kind: Kind = Kind.FULL


class SiteTask(Protocol):
    """One site's part of a task."""

    def train(self, round: int, state: GlobalState) -> TrainResult:  # noqa: A002  the word of the domain
        """Work on a global model.

        Args:
            round: Number of the round, as the workflow counts.
            state: The global model, borrowed; a source in the result may read it until it is closed.
        """
        ...


class Task(Protocol):
    """What all sites work on together."""

    @property
    def landing(self) -> Literal["memory", "disk"]:
        """Where a site wants global models: training code wants memory."""
        ...

    def initial_state(self) -> Mapping[str, torch.Tensor] | Path:
        """Return the first global model: tensors, or a safetensors file that stays until the end."""
        ...

    def site(self, name: str) -> SiteTask:
        """Return a site's part; the same one each time it is asked for."""
        ...

    def evaluate(
        self, state: GlobalState, accepted: Mapping[int, Sequence[str]]
    ) -> dict[str, float]:
        """Judge a global model.

        Args:
            state: Borrowed.
            accepted: Which sites' contributions were averaged in each round that led to ``state``, by the
                round's number as ``train`` got it, in order.

        Raises:
            AggregationError: The model cannot be what these rounds produce.
        """
        ...


def tensors_of(state: GlobalState) -> Mapping[str, torch.Tensor]:
    """Return a model as tensors in memory; those of a state are read here."""
    if isinstance(state, State):
        return {name: state.tensor(name) for name in state.layout.by_name}
    return state
