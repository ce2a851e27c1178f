"""A producer's desk: one transaction, driven by short commands, that keeps every effect."""

from __future__ import annotations

from typing import Any

from streamoff.machines import serving as s, transaction as t
from streamoff.machines.invariants import check_transaction
from streamoff.types import Address, ByteRange, Outcome, RangeSet, Slot, Verdict

from . import samples

WHOLE = RangeSet((ByteRange(0, 100),))


class Desk:
    """One transaction; every step is checked against the invariants.

    Args:
        slots: Receivers or their slots; receiver ``i`` speaks from ``site-i`` and uses slot ``i``.
        refs: Refs or their number, then named ``ref-1`` and so on; each has 100 bytes.
        changes: Arguments of :func:`streamoff.machines.transaction.begin`.
    """

    def __init__(
        self, slots: int | list[Slot] = 1, refs: int | list[str] = 1, **changes: Any
    ) -> None:
        self.record = samples.begin(slots, refs, **changes)
        self.effects: list[t.TransactionEffect] = []

    def do(self, event: t.Event) -> tuple[t.TransactionEffect, ...]:
        """Apply one event and keep its effects."""
        self.record, effects = t.step(self.record, event)
        check_transaction(self.record)
        self.effects += effects
        return effects

    @staticmethod
    def origin(slot: int) -> s.Origin:
        """Where the receiver of a slot speaks from."""
        return s.Origin(Address(f"site-{slot}"), slot)

    def open(
        self,
        slot: int = 0,
        ref: str = "ref-1",
        *,
        now: float = 0.0,
        nonce: bytes = samples.NONCE,
        first: ByteRange | None = None,
    ) -> tuple[t.TransactionEffect, ...]:
        """Present the ticket and ask for the whole payload."""
        return self.do(
            t.OpenRequested(now, slot, ref, self.origin(slot), nonce, WHOLE, samples.CANCEL, first)
        )

    def pull(
        self,
        slot: int = 0,
        ref: str = "ref-1",
        *,
        now: float = 0.0,
        start: int = 0,
        stop: int = 100,
    ) -> tuple[t.TransactionEffect, ...]:
        """Ask for a range."""
        return self.do(t.PullRequested(now, slot, ref, self.origin(slot), ByteRange(start, stop)))

    def ended(
        self,
        slot: int = 0,
        ref: str = "ref-1",
        *,
        now: float = 0.0,
        start: int = 0,
        stop: int = 100,
        served: bool = True,
    ) -> tuple[t.TransactionEffect, ...]:
        """The link has read a range, or skipped it."""
        return self.do(t.RangeEnded(now, slot, ref, ByteRange(start, stop), served))

    def serve(self, slot: int = 0, ref: str = "ref-1", *, now: float = 0.0) -> None:
        """Open, pull and serve the whole payload."""
        self.open(slot, ref, now=now)
        self.pull(slot, ref, now=now)
        self.ended(slot, ref, now=now)

    def confirm(
        self,
        slot: int = 0,
        ref: str = "ref-1",
        *,
        now: float = 0.0,
        ok: bool = True,
        nonce: bytes = samples.NONCE,
        reason: str = "",
    ) -> tuple[t.TransactionEffect, ...]:
        """Say the receiver's last word."""
        return self.do(t.ConfirmRequested(now, slot, ref, self.origin(slot), ok, nonce, reason))

    def hand_over(self, slot: int = 0, ref: str = "ref-1", *, now: float = 0.0) -> None:
        """Serve everything and confirm it."""
        self.serve(slot, ref, now=now)
        self.confirm(slot, ref, now=now)

    def cancel(
        self, slot: int = 0, *, now: float = 0.0, reason: str = "gave up"
    ) -> tuple[t.TransactionEffect, ...]:
        """Give up as the receiver."""
        return self.do(t.CancelRequested(now, slot, self.origin(slot).address, reason))

    def hold(
        self, seconds: float, slot: int = 0, ref: str = "ref-1", *, now: float = 0.0
    ) -> tuple[t.TransactionEffect, ...]:
        """Ask for patience."""
        return self.do(t.HoldRequested(now, slot, ref, seconds))

    def tick(self, now: float) -> tuple[t.TransactionEffect, ...]:
        """Let time pass."""
        return self.do(t.Ticked(now))

    def abort(
        self, reason: str = "deleted", *, now: float = 0.0
    ) -> tuple[t.TransactionEffect, ...]:
        """End it from the producer's side."""
        return self.do(t.Aborted(now, reason))

    @property
    def outcome(self) -> Outcome:
        """The outcome, which must be there."""
        assert self.record.outcome is not None
        return self.record.outcome

    def verdict(self, slot: int = 0, ref: str = "ref-1") -> Verdict:
        """How a slot stands on a ref."""
        return self.record.servings[slot, ref].verdict.verdict

    def told(self, kind: type[object]) -> int:
        """How often an effect came out."""
        return sum(isinstance(effect, kind) for effect in self.effects)
