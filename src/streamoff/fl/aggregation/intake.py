"""What both engines check before they add anything, and what they remember for the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NoReturn

from streamoff.errors import (
    AggregationError,
    ContributionRejectedError,
    PeerError,
    ScratchError,
    SpecMismatchError,
    StreamoffError,
    TransferError,
    UsageError,
)
from streamoff.fl.aggregation.arithmetic import Bytes, Method, castable, method_of
from streamoff.fl.aggregation.blocks import Block
from streamoff.fl.aggregation.contribution import Contribution, Kind
from streamoff.fl.aggregation.policies import Policies
from streamoff.fl.aggregation.report import Reason, Rejection, RoundReport
from streamoff.tensors.layout import Layout
from streamoff.tensors.state import State
from streamoff.types import TensorSpec

__all__ = ["READ_FAILURES", "Fit", "Intake", "Terms", "check_layout", "nonfinite"]

READ_FAILURES: Final = (
    AggregationError,
    PeerError,
    ScratchError,
    TransferError,
    UsageError,
    OSError,
)
"""What a read of a contribution may raise that costs its site; a defect of ours is not among them."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How a contribution's layout fits the global model: what it lacks and what it has too much."""

    missing: frozenset[str]
    extra: tuple[str, ...]


def check_layout(theirs: Layout, ours: Layout, policies: Policies, *, site: str) -> Fit:
    """Compare a contribution's header with the global model's; works before any tensor has arrived.

    Args:
        theirs: The contribution's.
        ours: The global model's.
        policies: What may differ.
        site: Whose it is, for the message.

    Returns:
        What differs and is allowed to. Excluded keys never count.

    Raises:
        SpecMismatchError: A key is missing, extra, or of another shape or dtype, against the policies.
    """
    excluded = policies.excluded((*ours.names, *theirs.names))
    has = frozenset(theirs.names)
    missing = [s.name for s in ours.specs if s.name not in has and s.name not in excluded]
    extra = sorted(has.difference(ours.names, excluded))
    if missing and policies.missing == "strict":
        _mismatch("keys are missing", site, missing[0], expected="present", got=_some(missing))
    if extra and policies.extra == "strict":
        _mismatch("keys the global model lacks", site, extra[0], expected="none", got=_some(extra))
    for spec in ours.specs:
        if spec.name in has and spec.name not in excluded:
            _check_spec(theirs.spec(spec.name), spec, policies, site)
    for name, entry in ours.aliases.items():
        if {name, entry} <= has - excluded and theirs.spec(name) != theirs.spec(entry):
            _mismatch("tied tensors come apart", site, name, expected=f"tied to {entry}", got="own")
    return Fit(frozenset(missing), tuple(extra))


def _check_spec(theirs: TensorSpec, ours: TensorSpec, policies: Policies, site: str) -> None:
    if theirs.shape != ours.shape:
        _mismatch("shape", site, ours.name, expected=ours.shape, got=theirs.shape)
    if theirs.dtype != ours.dtype and (
        policies.dtypes == "strict" or not castable(theirs.dtype, ours.dtype)
    ):
        _mismatch("dtype", site, ours.name, expected=ours.dtype, got=theirs.dtype)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _mismatch(what: str, site: str, tensor: str, *, expected: object, got: object) -> NoReturn:
    raise SpecMismatchError(what, expected=expected, got=got, site=site, tensor=tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a round is about; the same for every engine.

    Args:
        previous: The global model of the round, borrowed until the engine is closed. The result has its
            keys, shapes, dtypes and order; it is read where a key keeps its value and for differences.
        round: The round, from 0.
        job: The job.
        kind: What every contribution has to be.
        policies: What is accepted and how it is calculated.
    """

    previous: State
    round: int
    job: str
    kind: Kind = Kind.FULL
    policies: Policies = field(default_factory=Policies)

    def check_envelope(self, *, site: str, round: int, job: str, kind: Kind) -> None:  # noqa: A002
        """Compare what is said about a contribution; possible before a byte of it has been pulled.

        Raises:
            ContributionRejectedError: It belongs to another job or round, or is of the other kind.
        """
        for reason, expected, got in (
            (Reason.JOB, self.job, job),
            (Reason.ROUND, self.round, round),
            (Reason.KIND, self.kind, kind),
        ):
            if got != expected:
                raise ContributionRejectedError(
                    f"contribution of another {reason}",
                    expected=expected,
                    got=got,
                    site=site,
                    reason=reason,
                )

    def methods(self) -> dict[str, Method | None]:
        """Return the arithmetic of each entry of the global model; None for excluded ones.

        Raises:
            DtypeError: An entry has no arithmetic and is not excluded.
        """
        specs = self.previous.layout.specs
        excluded = self.policies.excluded(tuple(spec.name for spec in specs))
        diff = self.kind is Kind.DIFF
        return {
            spec.name: None if spec.name in excluded else method_of(spec, self.policies, diff=diff)
            for spec in specs
        }


class Intake:
    """Admits contributions to one round; both engines stand behind it.

    Args:
        terms: What is admitted.
        engine: Its engine's name, for the report.

    Raises:
        DtypeError: The global model has an entry without arithmetic that is not excluded.
    """

    def __init__(self, terms: Terms, engine: str) -> None:
        self.terms: Final = terms
        self.layout: Final = terms.previous.layout
        self.methods: Final = terms.methods()
        self.check_values: Final = terms.policies.nonfinite != "allow"
        self.weights: Final[dict[str, float]] = {}
        self.missing: Final[dict[str, frozenset[str]]] = {}
        self._engine: Final = engine
        self._dropped: Final[dict[str, tuple[str, ...]]] = {}
        self._rejected: Final[list[Rejection]] = []
        self.lost: AggregationError | None = None

    def admit(self, contribution: Contribution) -> None:
        """Check everything that can be checked without reading tensors.

        Raises:
            ContributionRejectedError: It broke a rule and is out; the round goes on.
            AggregationError: It broke a rule that costs the round, or the round was lost before.
        """
        site = contribution.site
        self.ensure_open()
        try:
            fit = self._check(contribution)
        except (ContributionRejectedError, SpecMismatchError) as error:
            raise self.reject(site, error) from error
        self.weights[site] = contribution.weight
        self.missing[site] = fit.missing
        if fit.extra:
            self._dropped[site] = fit.extra

    def _check(self, contribution: Contribution) -> Fit:
        site, state = contribution.site, contribution.state
        self.terms.check_envelope(
            site=site, round=contribution.round, job=contribution.job, kind=contribution.kind
        )
        if site in self.weights:
            raise ContributionRejectedError(
                "the site has contributed already", site=site, reason=Reason.DUPLICATE
            )
        fit = check_layout(state.layout, self.layout, self.terms.policies, site=site)
        if self.check_values and state.nonfinite:
            bad = sorted(name for name in state.nonfinite if self.methods.get(name) is not None)
            if bad:
                raise nonfinite(site, bad[0])
        return fit

    def reject(self, site: str, error: StreamoffError | OSError) -> AggregationError:
        """Take a site out and note why.

        Returns:
            What to raise, or to go on after: a ContributionRejectedError costs the site, any other
            AggregationError the round.
        """
        where = error.where if isinstance(error, StreamoffError) else {}
        default = Reason.SPEC if isinstance(error, SpecMismatchError) else Reason.READ
        reason = Reason(str(where.get("reason", default)))
        tensor = where.get("tensor")
        key = tensor if isinstance(tensor, str) else None
        if reason is not Reason.DUPLICATE:
            self.withdraw(site)
        self._rejected.append(Rejection(site, reason, str(error), key))
        policies = self.terms.policies
        if (reason is Reason.SPEC and policies.mismatch == "reject_round") or (
            reason is Reason.NONFINITE and policies.nonfinite == "reject_round"
        ):
            return self.lose(f"{reason} of site {site} costs the round", site=site, tensor=key)
        if isinstance(error, ContributionRejectedError):
            return error
        what = error.what if isinstance(error, StreamoffError) else f"cannot be read: {error}"
        rejected = ContributionRejectedError(
            what,
            expected=getattr(error, "expected", None),
            got=getattr(error, "got", None),
            site=site,
            reason=reason,
        )
        return rejected.located(**where)

    def withdraw(self, site: str) -> None:
        """Forget that a site was admitted."""
        self.weights.pop(site, None)
        self.missing.pop(site, None)
        self._dropped.pop(site, None)

    def lose(self, what: str, **facts: object) -> AggregationError:
        """Give the round up; every later call raises the same error."""
        error = AggregationError(what, hint="The previous model stands", round=self.terms.round)
        self.lost = error.located(**facts)
        return self.lost

    def overflow(self, tensor: str) -> AggregationError:
        """Give the round up because a result does not fit its dtype, or the previous model is not finite."""
        return self.lose("the result is NaN or infinite although no contribution is", tensor=tensor)

    def ensure_open(self) -> None:
        """Raise the error that cost the round, if one did."""
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        """Admit nothing more."""
        if self.lost is None:
            self.lost = AggregationError("the round is closed", round=self.terms.round)

    def read_base(self, block: Block, buffer: Bytes) -> Bytes:
        """Read a block of the previous model.

        Raises:
            AggregationError: It cannot be read; the round is lost.
        """
        raw = buffer[: block.nbytes]
        try:
            self.terms.previous.read_span(block.start, block.start + raw.nbytes, raw.data)
        except READ_FAILURES as error:
            raise self.lose("the previous model cannot be read", got=str(error)) from error
        return raw

    def voters(self) -> list[str]:
        """The sites of positive weight, in the order in which they are combined."""
        return sorted(site for site, weight in self.weights.items() if weight > 0.0)

    def contributors(self, voters: Iterable[str], name: str) -> tuple[str, ...]:
        """Those of ``voters`` that have a key."""
        return tuple(site for site in voters if name not in self.missing[site])

    def report(self, restarts: int = 0) -> RoundReport:
        """Return what has been said and decided so far."""
        voters = self.voters()
        lacking = frozenset[str]().union(*(self.missing[site] for site in voters))
        partial: dict[str, tuple[str, ...]] = {}
        kept: list[str] = []
        for name in (spec.name for spec in self.layout.specs if spec.name in lacking):
            sites = self.contributors(voters, name)
            if sites:
                partial[name] = sites
            else:
                kept.append(name)
        return RoundReport(
            engine=self._engine,
            round=self.terms.round,
            job=self.terms.job,
            weights={site: self.weights[site] for site in sorted(self.weights)},
            rejected=tuple(self._rejected),
            partial=partial,
            kept=tuple(kept),
            dropped={site: self._dropped[site] for site in sorted(self._dropped)},
            restarts=restarts,
        )


def nonfinite(site: str, tensor: str) -> ContributionRejectedError:
    """Return the error of a NaN or infinity in a contribution."""
    return ContributionRejectedError(
        "value is NaN or infinite",
        expected="finite values",
        site=site,
        tensor=tensor,
        reason=Reason.NONFINITE,
        hint="policy nonfinite='allow' averages it anyway",
    )
