"""The default engine: every contribution stays on disk, and the model is walked once.

For each block of the global model the same block of every contribution is read and combined, in the
order of the sites' names. Memory is two read buffers, an accumulator and a scratch buffer of at most
4 MiB each, whatever the model and the number of sites. Nothing depends on the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Final, NamedTuple, Self

from streamoff.errors import AggregationError, JobClosedError, StreamoffError
from streamoff.fl.aggregation.arithmetic import Bytes, NonfiniteError, Rule
from streamoff.fl.aggregation.blocks import (
    BLOCK_BYTES,
    Block,
    Segment,
    blocks,
    fill,
    fold,
)
from streamoff.fl.aggregation.buffers import reserve
from streamoff.fl.aggregation.contribution import Contribution
from streamoff.fl.aggregation.engine import EngineName, NewWriter, Stop, never_stop
from streamoff.fl.aggregation.intake import READ_FAILURES, Intake, Terms, nonfinite
from streamoff.fl.aggregation.reading import ReadAhead
from streamoff.fl.aggregation.report import AggregationResult
from streamoff.fl.aggregation.weights import Scale
from streamoff.tensors.state import State
from streamoff.tensors.writer import StateWriter

__all__ = ["Columnar"]


class _SiteFailed(Exception):  # noqa: N818 -- caught inside
    """A contribution turned out to be unusable half way; the walk restarts without it."""

    def __init__(self, site: str, error: StreamoffError | OSError) -> None:
        super().__init__(site)
        self.site = site
        self.error = error


class _Voter(NamedTuple):
    state: State
    weight: float
    """As a factor."""
    same: bool


class Columnar:
    """See the module; an :class:`~streamoff.fl.aggregation.engine.Engine`.

    Args:
        terms: What the round is about.

    Raises:
        DtypeError: The global model has an entry without arithmetic that is not excluded.
    """

    name: Final[EngineName] = "columnar"

    def __init__(self, terms: Terms) -> None:
        self._intake: Final = Intake(terms, self.name)
        self._terms: Final = terms
        self._states: Final[dict[str, State]] = {}

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
        """Release what is left; idempotent."""
        self._intake.close()
        while self._states:
            self._states.popitem()[1].release()

    def add(self, contribution: Contribution, *, stop: Stop = never_stop) -> None:
        """Check a contribution and keep it; nothing is read."""
        try:
            stop()
            self._intake.admit(contribution)
        except BaseException:
            contribution.state.release()
            raise
        self._states[contribution.site] = contribution.state

    def finish(self, new_writer: NewWriter, *, stop: Stop = never_stop) -> AggregationResult:
        """Walk the model, as often as a contribution fails on the way, and release the contributions."""
        restarts = 0
        with ReadAhead(BLOCK_BYTES) as ahead:
            state = None
            while state is None:
                try:
                    state = self._walk(new_writer, ahead, stop)
                except _SiteFailed as failed:
                    self._drop(failed)
                    restarts += 1
        report = self._intake.report(restarts)
        self.close()
        return AggregationResult(state, report)

    def _drop(self, failed: _SiteFailed) -> None:
        self._states.pop(failed.site).release()
        verdict = self._intake.reject(failed.site, failed.error)
        self._intake.ensure_open()
        if not self._states:
            if isinstance(failed.error, JobClosedError):
                raise failed.error
            raise self._intake.lose("no contribution is left") from verdict

    def _voters(self) -> dict[str, _Voter]:
        self._intake.ensure_open()
        if not self._states:
            raise AggregationError("there is no contribution", round=self._terms.round)
        weights = self._intake.weights
        scale = Scale.of(weights[site] for site in sorted(weights))
        specs = self._intake.layout.specs
        return {
            site: _Voter(
                self._states[site],
                scale.factor(weights[site]),
                self._states[site].layout.specs == specs,
            )
            for site in self._intake.voters()
        }

    def _walk(self, new_writer: NewWriter, ahead: ReadAhead, stop: Stop) -> State:
        voters = self._voters()
        everyone = tuple(voters)

        lacking = frozenset[str]().union(*(self._intake.missing[site] for site in everyone))

        def group(name: str) -> tuple[str, ...]:
            return self._intake.contributors(everyone, name) if name in lacking else everyone

        plan = [
            _plan(block)
            for block in blocks(
                self._intake.layout,
                self._intake.methods,
                group,
                any_dtype=self._terms.policies.dtypes == "cast",
            )
        ]
        writer = new_writer(self._intake.layout)
        try:
            self._combine(plan, voters, writer, ahead, stop)
            stop()
            return writer.finish()
        except BaseException:
            writer.discard()
            raise

    def _combine(
        self,
        plan: list[_Step],
        voters: dict[str, _Voter],
        writer: StateWriter,
        ahead: ReadAhead,
        stop: Stop,
    ) -> None:
        accumulator = reserve(BLOCK_BYTES)
        scratch = reserve(BLOCK_BYTES)
        check = self._intake.check_values
        reads = ahead.each(chain.from_iterable(self._reads(step, voters) for step in plan))
        for step in plan:
            stop()
            block, method = step.block, step.block.method
            if method is None or not step.sites:
                writer.write(block.start, next(reads)[0].raw.data)
                continue
            total = accumulator[: block.elements * method.width]
            weights: list[float] = []
            for turn, site in enumerate(step.sites):
                weight, parts = voters[site].weight, next(reads)
                try:
                    fold(block, total, parts, weight, scratch, first=turn == 0, check=check)
                except NonfiniteError as error:
                    raise _SiteFailed(site, nonfinite(site, error.tensor)) from None
                weights.append(method.rounded(weight))
            base = next(reads)[0].raw if method.diff else None
            try:
                result = method.finish(total, math.fsum(weights), base, scratch, check=check)
            except NonfiniteError:
                raise self._intake.overflow(block.pieces[0].name) from None
            writer.write(block.start, result.data)

    def _reads(
        self, step: _Step, voters: dict[str, _Voter]
    ) -> Iterator[Callable[[Bytes], list[Segment]]]:
        for site in step.sites:
            yield partial(_read_site, site, voters[site], step.block)
        if not step.sites or step.block.method is None or step.block.method.diff:
            yield partial(self._read_base, step.block)

    def _read_base(self, block: Block, buffer: Bytes) -> list[Segment]:
        return [Segment(0, block.elements, "U8", self._intake.read_base(block, buffer))]


class _Step(NamedTuple):
    block: Block
    sites: tuple[str, ...]
    """Whose values are read, in order; none: the previous value is kept."""


def _plan(block: Block) -> _Step:
    sites = block.group
    if block.method is None or not isinstance(sites, tuple):
        return _Step(block, ())
    return _Step(block, sites[:1] if block.method.rule is Rule.FIRST else sites)


def _read_site(site: str, voter: _Voter, block: Block, buffer: Bytes) -> list[Segment]:
    try:
        return fill(voter.state, block, buffer, same=voter.same)
    except READ_FAILURES as error:
        raise _SiteFailed(site, error) from error
