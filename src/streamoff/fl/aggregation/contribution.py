"""What one site adds to a round."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from streamoff.errors import UsageError
from streamoff.fl.aggregation.foreign import as_state
from streamoff.fl.aggregation.weights import weight_of
from streamoff.tensors.state import State

__all__ = ["Contribution", "Kind"]


class Kind(StrEnum):
    """What the tensors of a contribution are."""

    FULL = "full"
    """A whole model; the mean replaces the previous one."""
    DIFF = "diff"
    """Differences to the previous model; their mean is added to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One site's update and what is said about it.

    Args:
        site: Who sends it; contributions are combined in the order of these names.
        weight: By :func:`weight_of`: finite, 0 or more; usually the number of examples.
        state: The tensors. A ``Mapping[str, Tensor]``, or one whose values have ``materialize()``, is
            taken as well. The engine that gets the contribution owns it and releases it.
        kind: Whether ``state`` is a model or a difference.
        round: The round whose model the site started from, from 0.
        job: The job it was made for.

    Raises:
        WeightError: The weight is none. ``state`` still belongs to the caller.
        UsageError: Another field is of the wrong type or range. So does it here.
    """

    site: str
    weight: float
    state: State
    kind: Kind = Kind.FULL
    round: int
    job: str

    def __post_init__(self) -> None:
        for name in ("site", "job"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise UsageError(f"contribution's {name}", expected="a name", got=text)
        if type(self.round) is not int or self.round < 0:
            raise UsageError(
                "contribution's round", expected="an int from 0", got=self.round, site=self.site
            )
        if self.kind not in tuple(Kind):
            raise UsageError(
                "contribution's kind", expected="full | diff", got=self.kind, site=self.site
            )
        object.__setattr__(self, "kind", Kind(self.kind))
        object.__setattr__(self, "weight", weight_of(self.weight, site=self.site))
        object.__setattr__(self, "state", as_state(self.state))
