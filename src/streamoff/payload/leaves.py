"""What stands for a tensor in a tree while it is elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from streamoff.errors import SingleConsumerError
from streamoff.types import Address, Ref

__all__ = ["Batch", "LeafKind", "TensorRef"]


class LeafKind(StrEnum):
    """What a leaf becomes."""

    TENSOR = "tensor"
    NDARRAY = "ndarray"


@dataclass(slots=True, eq=False)
class Batch:
    """One ref of a message and who has asked for it: each leaf has one consumer.

    A slot is one pull. Whoever ends some leaves of a ref ends the ref: the leaves left out are not to be
    had any more, and asking for them says so.

    Args:
        ref: What is pulled; its ticket is this receiver's.
        partial: Whether the payload has more tensors than the message uses.
        via: The neighbour the message came from.
        vouched: Whether that neighbour, or the sender, may name this source.
    """

    ref: Ref
    partial: bool = False
    via: Address | None = None
    vouched: bool = True
    consumed: str = ""

    def consume(self, leaves: Iterable[TensorRef], by: str) -> None:
        """Take the batch for one consumer.

        Raises:
            SingleConsumerError: Somebody has it already. Nothing changed.
        """
        if self.consumed:
            first = next(iter(leaves), None)
            raise SingleConsumerError(
                "the ref has a consumer already",
                expected="one consumer",
                got=f"{by} after {self.consumed}",
                ref=self.ref.id,
                site=self.ref.source,
                tensor=first.name if first is not None else None,
                hint="Resolve a message once and share the result, or send it once per consumer",
            )
        self.consumed = by


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor that is still at its source: a name in a ref.

    Args:
        batch: Its ref, shared with the other leaves of the same payload.
        name: In the payload.
        kind: Whether it becomes a tensor or an ndarray.
    """

    batch: Batch = field(repr=False)
    name: str
    kind: LeafKind = LeafKind.TENSOR

    @property
    def ref(self) -> Ref:
        """The ref."""
        return self.batch.ref
