"""What stands for a tensor in a tree while it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn, Self, SupportsIndex

from streamoff.errors import SingleConsumerError, UsageError
from streamoff.types import Address, Ref

__all__ = ["Batch", "LeafKind", "TensorRef"]


class LeafKind(StrEnum):
    """What a leaf becomes."""

    TENSOR = "tensor"
    NDARRAY = "ndarray"


def _nobody(_reason: str) -> None:
    """Stand in for a batch that came with no message: there is nobody to tell."""


@dataclass(slots=True, eq=False)
class Batch:
    """One ref of a message and who has asked for it: each leaf has one consumer.

    A slot is one pull. Whoever ends some leaves of a ref ends the ref: the leaves left out are not to be
    had any more, and asking for them says so.

    Args:
        ref: What is pulled; its ticket is this receiver's.
        partial: Whether the payload has more tensors than the message uses.
        via: Whom the neighbour that the message came from may speak for.
        vouched: Whether that neighbour, or the sender, may name this source.
        consumed: Who has it, or what became of it; empty while nobody has asked.
        kind: What all its leaves become.
        names: The names that the message uses.
        nonfinite: Of these, the ones found to hold a NaN or an infinity, if the landing looked.
        tell: Tells the source that nobody will pull it; see :meth:`decline`.
    """

    ref: Ref
    partial: bool = False
    via: tuple[Address, ...] = ()
    vouched: bool = True
    consumed: str = ""
    kind: LeafKind | None = None
    names: set[str] = field(default_factory=set, repr=False)
    nonfinite: frozenset[str] = frozenset()
    tell: Callable[[str], object] = field(default=_nobody, repr=False)

    def check_free(self, by: str, leaf: TensorRef | None = None) -> None:
        """Make sure that nobody has asked for it.

        Raises:
            SingleConsumerError: Somebody has it already.
        """
        if self.consumed:
            raise SingleConsumerError(
                "the ref has a consumer already",
                expected="one consumer",
                got=f"{by} after {self.consumed}",
                ref=self.ref.id,
                site=self.ref.source,
                tensor=leaf.name if leaf is not None else None,
                hint="Resolve a message once and share the result, or send it once per consumer",
            )

    def consume(self, leaves: Iterable[TensorRef], by: str) -> None:
        """Take the batch for one consumer.

        Raises:
            SingleConsumerError: Somebody has it already. Nothing changed.
        """
        self.check_free(by, next(iter(leaves), None))
        self.consumed = by

    def give_back(self) -> None:
        """The consumer never got it: it may be resolved, passed on or declined after all."""
        self.consumed = ""

    def decline(self, reason: str) -> None:
        """Tell its source that nobody will pull it: the slot fails at once. Does not block.

        A source that the sender may not name is not spoken to.
        """
        if self.vouched:
            self.tell(reason)


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor that is still at its source: a name in a ref.

    A copy of a tree, deep or not, shares its leaves: a ref does not become two by being copied.

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

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "a kept ref cannot be pickled or persisted",
            tensor=self.name,
            hint="Send it: the same ref is passed on; or resolve it first",
        )
