"""The engine for when disk is scarce: each contribution is folded on arrival and freed at once.

Memory is one accumulator per element of the model plus three buffers of at most 4 MiB. Sums depend on
the order of arrival in their last bits; in the order of the sites' names they are those of ``columnar``.
What has been added cannot be taken out again, so a contribution is read twice: it is looked at to the end
before its first block is added, unless NaN and infinity are allowed. A read that fails after that costs the
round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final, Self

from streamoff.errors import AggregationError, StreamoffError
from streamoff.fl.aggregation.arithmetic import Bytes, NonfiniteError, Rule
from streamoff.fl.aggregation.blocks import BLOCK_BYTES, Block, blocks, fill, fold, inspect
from streamoff.fl.aggregation.buffers import reserve, reserve_all
from streamoff.fl.aggregation.contribution import Contribution
from streamoff.fl.aggregation.engine import EngineName, NewWriter, Stop, never_stop
from streamoff.fl.aggregation.intake import READ_FAILURES, Intake, Terms, nonfinite
from streamoff.fl.aggregation.reading import ReadAhead
from streamoff.fl.aggregation.report import AggregationResult
from streamoff.fl.aggregation.weights import Scale
from streamoff.tensors.writer import StateWriter

__all__ = ["InTime"]


@dataclass(slots=True)
class _Tally:
    """Whose values are in the accumulators of a group of blocks."""

    weights: list[float] = field(default_factory=list)
    first: str | None = None


class InTime:
    """See the module; an :class:`~streamoff.fl.aggregation.engine.Engine`.

    Args:
        terms: What the round is about. The accumulators are allocated here, once.

    Raises:
        DtypeError: The global model has an entry without arithmetic that is not excluded.
        MemoryError: There is no room for the accumulators.
    """

    name: Final[EngineName] = "in_time"

    def __init__(self, terms: Terms) -> None:
        self._intake: Final = Intake(terms, self.name)
        self._terms: Final = terms
        by_key = terms.policies.missing == "partial"
        self._blocks: Final = tuple(
            blocks(
                self._intake.layout,
                self._intake.methods,
                lambda name: name if by_key else None,
                any_dtype=terms.policies.dtypes == "cast",
            )
        )
        sizes = {
            block: block.elements * block.method.width
            for block in self._blocks
            if block.method is not None
        }
        self._accumulators: Final[dict[Block, Bytes]] = dict(
            zip(sizes, reserve_all(sizes.values()), strict=True)
        )
        self._scratch: Final = reserve(BLOCK_BYTES)
        self._tallies: Final = {block.group: _Tally() for block in self._blocks}
        self._scale: Scale | None = None
        self._touched = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the accumulators; idempotent."""
        self._intake.close()
        self._accumulators.clear()

    def add(self, contribution: Contribution, *, stop: Stop = never_stop) -> None:
        """Fold a contribution in and release it.

        A read that fails before anything was added costs the site; after that, it costs the round, and so
        does ``stop``.
        """
        try:
            stop()
            self._intake.admit(contribution)
            if contribution.weight > 0.0:
                self._fold(contribution, stop)
        finally:
            contribution.state.release()

    def _fold(self, contribution: Contribution, stop: Stop) -> None:
        site = contribution.site
        self._touched = False
        try:
            self._add_blocks(contribution, stop)
        except NonfiniteError as error:
            raise self._failed(site, nonfinite(site, error.tensor)) from None
        except READ_FAILURES as error:
            raise self._failed(site, error) from error
        except BaseException:
            if self._touched:
                self._intake.lose("cut while a contribution was being added", site=site)
            self._intake.withdraw(site)
            raise
        self._scale = self._scale or Scale.of([contribution.weight])
        for group in {block.group for block in self._wanted(site)}:
            tally = self._tallies[group]
            tally.weights.append(contribution.weight)
            tally.first = site if tally.first is None else min(tally.first, site)

    def _add_blocks(self, contribution: Contribution, stop: Stop) -> None:
        site, state = contribution.site, contribution.state
        scale = self._scale_with(contribution.weight)
        same = state.layout.specs == self._intake.layout.specs
        wanted = [block for block in self._wanted(site) if not self._outvoted(block, site)]
        with ReadAhead(BLOCK_BYTES) as ahead:
            reads = [partial(fill, state, block, same=same) for block in wanted]
            if self._intake.check_values:
                for block, parts in zip(wanted, ahead.each(reads), strict=True):
                    stop()
                    inspect(block, parts, self._scratch)
            for block, parts in zip(wanted, ahead.each(reads), strict=True):
                stop()
                self._rescale(scale.exponent)
                self._touched |= len(parts) > 1
                fold(
                    block,
                    self._accumulators[block],
                    parts,
                    scale.factor(contribution.weight),
                    self._scratch,
                    first=self._tallies[block.group].first is None,
                    check=False,
                )
                self._touched = True

    def _wanted(self, site: str) -> Iterator[Block]:
        """The blocks that are averaged and that the site has."""
        missing = self._intake.missing[site]
        for block in self._accumulators:
            if block.group not in missing:
                yield block

    def _outvoted(self, block: Block, site: str) -> bool:
        first = self._tallies[block.group].first
        assert block.method is not None
        return block.method.rule is Rule.FIRST and first is not None and first < site

    def _scale_with(self, weight: float) -> Scale:
        """The scale of all that has been added and one weight more; it never gets finer."""
        if self._scale is None:
            return Scale.of([weight])
        wider = Scale.of(self._intake.weights.values(), self._scale.reference)
        return wider if wider.exponent > self._scale.exponent else self._scale

    def _rescale(self, exponent: int) -> None:
        """Make room for more weight, by a power of two: no bit of a mantissa changes."""
        if self._scale is not None and exponent > self._scale.exponent:
            factor = math.ldexp(1.0, self._scale.exponent - exponent)
            for block, accumulator in self._accumulators.items():
                assert block.method is not None
                block.method.rescale(accumulator, factor)
            self._scale = Scale(self._scale.reference, exponent)

    def _failed(self, site: str, error: StreamoffError | OSError) -> AggregationError:
        verdict = self._intake.reject(site, error)
        if not self._touched:
            return verdict
        return self._intake.lose(
            "a contribution failed after part of it had been added", got=str(error), site=site
        )

    def finish(self, new_writer: NewWriter, *, stop: Stop = never_stop) -> AggregationResult:
        """Divide, cast and write. Destroys the sums: a writer that fails costs the round."""
        self._intake.ensure_open()
        weights = self._intake.weights
        if not weights:
            raise AggregationError("there is no contribution", round=self._terms.round)
        scale = self._scale or Scale.of(weights.values())
        writer = new_writer(self._intake.layout)
        try:
            self._write(writer, scale, stop)
            stop()
            state = writer.finish()
        except BaseException as error:
            writer.discard()
            if self._intake.lost is None:
                self._intake.lose("the result could not be written", got=str(error))
            raise
        report = self._intake.report()
        self.close()
        return AggregationResult(state, report)

    def _write(self, writer: StateWriter, scale: Scale, stop: Stop) -> None:
        buffer = reserve(BLOCK_BYTES)
        for block in self._blocks:
            stop()
            tally, method = self._tallies[block.group], block.method
            if method is None or tally.first is None:
                writer.write(block.start, self._intake.read_base(block, buffer).data)
                continue
            base = self._intake.read_base(block, buffer) if method.diff else None
            total = math.fsum(method.rounded(scale.factor(weight)) for weight in tally.weights)
            try:
                result = method.finish(
                    self._accumulators[block],
                    total,
                    base,
                    self._scratch,
                    check=self._intake.check_values,
                )
            except NonfiniteError:
                raise self._intake.overflow(block.pieces[0].name) from None
            writer.write(block.start, result.data)
