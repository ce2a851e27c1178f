"""What is checked before anything is added, and what the report says of it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from streamoff.errors import (
    AggregationError,
    ContributionRejectedError,
    JobClosedError,
    SpecMismatchError,
    UsageError,
)
from streamoff.fl.aggregation import Contribution, Kind, Policies, Reason, check_layout, open_engine
from streamoff.tensors.state import MemoryState
from streamoff.tensors.writer import FileWriter, MemoryWriter

from .support import ENGINES, JOB, ROUND, aggregate, bits, contribution, landed, terms

each_engine = pytest.mark.parametrize("engine", ENGINES)

PREVIOUS = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "n": torch.tensor(0)}
GOOD = {"a": torch.ones(2, 3), "b": torch.full((4,), 2.0), "n": torch.tensor(7)}


@each_engine
@pytest.mark.parametrize(
    ("key", "value", "got"),
    [
        ("a", torch.ones(3), "(3,)"),
        ("a", torch.ones(1, 3), "(1, 3)"),
        ("a", torch.ones(6), "(6,)"),
        ("a", torch.tensor(1.0), "()"),
        ("b", torch.ones(3), "(3,)"),
        ("n", torch.tensor([7]), "(1,)"),
        ("a", torch.ones(2, 3, dtype=torch.float64), "F64"),
        ("n", torch.tensor(7, dtype=torch.int32), "I32"),
    ],
    ids=str,
)
def test_another_shape_or_dtype_costs_the_site_and_touches_nothing(engine, key, value, got):
    """A broadcastable or longer tensor is refused with key, expected and actual; others are unharmed."""
    with open_engine(engine, terms(PREVIOUS)) as opened:
        opened.add(contribution("a", GOOD))
        with pytest.raises(ContributionRejectedError) as caught:
            opened.add(contribution("b", {**GOOD, key: value}))
        result = opened.finish(MemoryWriter)
    assert (caught.value.site, caught.value.tensor) == ("b", key)
    assert got in str(caught.value)
    assert str(caught.value.expected) in str(caught.value)
    assert bits(result.state) == bits(MemoryState(GOOD))
    [rejection] = result.report.rejected
    assert (rejection.site, rejection.reason, rejection.tensor) == ("b", Reason.SPEC, key)
    assert got in rejection.message


@each_engine
def test_casting_never_crosses_kinds(engine):
    """The ``cast`` policy takes floats for floats; integers for floats stay refused."""
    previous = {"w": torch.zeros(1), "n": torch.tensor(0)}
    with open_engine(engine, terms(previous, dtypes="cast")) as opened:
        opened.add(contribution("a", {"w": torch.ones(1).half(), "n": torch.tensor(1)}))
        for bad in (
            {"w": torch.tensor([1]), "n": torch.tensor(1)},
            {"w": torch.ones(1, dtype=torch.complex64), "n": torch.tensor(1)},
            {"w": torch.ones(1), "n": torch.tensor(1, dtype=torch.int32)},
        ):
            with pytest.raises(ContributionRejectedError, match="dtype"):
                opened.add(contribution("b", bad))


def without(*names: str) -> dict[str, torch.Tensor]:
    """The good tensors without some."""
    return {name: value for name, value in GOOD.items() if name not in names}


@each_engine
def test_a_missing_key_is_refused_by_default(engine):
    """A site that lacks a key is out: no parameter silently leaves the average."""
    with open_engine(engine, terms(PREVIOUS)) as opened:
        with pytest.raises(ContributionRejectedError, match="missing") as caught:
            opened.add(contribution("b", without("b")))
        assert (caught.value.site, caught.value.tensor) == ("b", "b")


@each_engine
def test_a_partial_key_has_its_own_denominator_and_is_reported(engine):
    """With ``partial`` a key is averaged over the sites that have it; one that none has is kept."""
    previous = {**PREVIOUS, "lonely": torch.tensor([9.0])}
    sites = [
        contribution("x", {**GOOD, "b": torch.full((4,), 8.0)}, 1),
        contribution("y", without("b"), 5),
        contribution("z", {**GOOD, "b": torch.full((4,), 2.0)}, 2),
    ]
    result = aggregate(engine, terms(previous, missing="partial"), sites)
    assert result.state.tensor("b").tolist() == [4.0] * 4
    assert result.state.tensor("lonely").item() == 9.0
    assert result.report.partial == {"b": ("x", "z")}
    assert result.report.kept == ("lonely",)


@each_engine
def test_a_key_that_only_a_site_of_weight_zero_has_is_kept(engine):
    """A denominator of zero does not arise: the key keeps its previous value and is reported."""
    previous = {**PREVIOUS, "b": torch.full((4,), 9.0)}
    sites = [contribution("x", GOOD, 0), contribution("y", without("b"), 1)]
    result = aggregate(engine, terms(previous, missing="partial"), sites)
    assert result.state.tensor("b").tolist() == [9.0] * 4
    assert result.report.kept == ("b",)


@each_engine
def test_an_extra_key_is_refused_or_dropped_and_reported(engine):
    """A key that the global model lacks costs the site, or is left out and said so."""
    odd = {**GOOD, "zz": torch.ones(1)}
    with open_engine(engine, terms(PREVIOUS)) as opened:
        with pytest.raises(ContributionRejectedError) as caught:
            opened.add(contribution("b", odd))
        assert caught.value.tensor == "zz"
    result = aggregate(engine, terms(PREVIOUS, extra="drop"), [contribution("b", odd)])
    assert set(result.state.layout.names) == set(PREVIOUS)
    assert result.report.dropped == {"b": ("zz",)}


@each_engine
def test_excluded_keys_are_neither_checked_nor_averaged(engine):
    """An excluded key may be missing, of another shape, or NaN; it keeps its previous value."""
    sites = [
        contribution("x", {**GOOD, "b": torch.full((1,), math.nan)}),
        contribution("y", without("b")),
    ]
    result = aggregate(engine, terms(PREVIOUS, exclude=["b"]), sites)
    assert result.state.tensor("b").tolist() == [0.0] * 4
    assert result.state.tensor("a").tolist() == GOOD["a"].tolist()
    assert (result.report.partial, result.report.kept) == ({}, ())


@each_engine
def test_a_mismatch_can_cost_the_round(engine):
    """With ``reject_round`` one bad spec ends the round: nothing more is taken, nothing is written."""
    with open_engine(engine, terms(PREVIOUS, mismatch="reject_round")) as opened:
        opened.add(contribution("a", GOOD))
        with pytest.raises(AggregationError, match="costs the round") as caught:
            opened.add(contribution("b", without("a")))
        assert not isinstance(caught.value, ContributionRejectedError)
        with pytest.raises(AggregationError, match="costs the round"):
            opened.add(contribution("c", GOOD))
        with pytest.raises(AggregationError, match="costs the round"):
            opened.finish(MemoryWriter)


@each_engine
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"round_number": ROUND - 1}, Reason.ROUND),
        ({"round_number": ROUND + 1}, Reason.ROUND),
        ({"job": "job-0"}, Reason.JOB),
        ({"kind": Kind.DIFF}, Reason.KIND),
    ],
    ids=str,
)
def test_what_was_made_for_another_round_job_or_purpose_is_refused(
    engine, change, reason, tmp_path
):
    """A late or early result, one of another job, or a difference among models is out and its bytes go."""
    gone: list[Path] = []
    state = _disposable(tmp_path, GOOD, gone)
    with open_engine(engine, terms(PREVIOUS)) as opened:
        opened.add(contribution("a", GOOD))
        with pytest.raises(ContributionRejectedError) as caught:
            opened.add(contribution("b", state, **change))
        report = opened.finish(MemoryWriter).report
    assert (caught.value.site, caught.value.reason) == ("b", reason)
    assert gone == [tmp_path / "b"]
    assert report.sites == ("a",)
    assert [(item.site, item.reason) for item in report.rejected] == [("b", reason)]


@each_engine
def test_an_envelope_can_be_checked_before_the_pull(engine):
    """The terms alone tell whether a result belongs here: no tensor is needed for it."""
    agreed = terms(PREVIOUS)
    agreed.check_envelope(site="a", round=ROUND, job=JOB, kind=Kind.FULL)
    with pytest.raises(ContributionRejectedError) as caught:
        agreed.check_envelope(site="a", round=ROUND - 1, job=JOB, kind=Kind.FULL)
    assert (caught.value.expected, caught.value.got) == (ROUND, ROUND - 1)


@each_engine
def test_a_second_contribution_of_a_site_is_refused_and_the_first_stays(engine):
    """A site counts once; the duplicate is reported and the first one averaged."""
    other = {name: value * 5 for name, value in GOOD.items()}
    with open_engine(engine, terms(PREVIOUS)) as opened:
        opened.add(contribution("a", GOOD, 2))
        with pytest.raises(ContributionRejectedError) as caught:
            opened.add(contribution("a", other))
        result = opened.finish(MemoryWriter)
    assert caught.value.reason is Reason.DUPLICATE
    assert bits(result.state) == bits(MemoryState(GOOD))
    assert result.report.weights == {"a": 2.0}


@each_engine
def test_a_rejected_site_may_try_again(engine):
    """A refused contribution does not use up the site's place in the round."""
    with open_engine(engine, terms(PREVIOUS)) as opened:
        with pytest.raises(ContributionRejectedError):
            opened.add(contribution("a", without("a")))
        opened.add(contribution("a", GOOD))
        assert opened.finish(MemoryWriter).report.sites == ("a",)


@each_engine
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seen_at_landing", [True, False])
def test_a_nonfinite_value_costs_site_or_round_or_nothing(engine, value, seen_at_landing):
    """One NaN or infinity is surfaced with site and key, and policy decides what it costs."""
    values = torch.ones(4)
    values[2] = value

    def sites() -> list[Contribution]:
        bad = MemoryState(
            {**GOOD, "b": values.clone()},
            nonfinite=frozenset({"b"}) if seen_at_landing else frozenset(),
        )
        return [contribution("a", GOOD), contribution("b", bad), contribution("c", GOOD, 3)]

    with open_engine(engine, terms(PREVIOUS)) as opened:
        for item in sites():
            try:
                opened.add(item)
            except ContributionRejectedError as error:
                assert (error.site, error.tensor) == ("b", "b")  # noqa: PT017 -- columnar may see it later
        result = opened.finish(MemoryWriter)
    assert bits(result.state) == bits(MemoryState(GOOD))
    [rejection] = result.report.rejected
    assert (rejection.site, rejection.reason, rejection.tensor) == ("b", Reason.NONFINITE, "b")
    assert result.report.weights == {"a": 1.0, "c": 3.0}

    with pytest.raises(AggregationError, match="costs the round") as caught:
        aggregate(engine, terms(PREVIOUS, nonfinite="reject_round"), sites())
    assert (caught.value.site, caught.value.tensor) == ("b", "b")

    allowed = aggregate(engine, terms(PREVIOUS, nonfinite="allow"), sites())
    found = allowed.state.tensor("b")
    assert found[[0, 1, 3]].isfinite().all()
    assert not found[2].isfinite()
    assert allowed.report.rejected == ()


@each_engine
def test_a_value_too_large_for_the_accumulator_is_not_finite(engine):
    """A float64 value beyond float32 would become infinite: it counts as such."""
    huge = {"w": torch.tensor([1e300], dtype=torch.float64)}
    good = {"w": torch.tensor([1.0], dtype=torch.float64)}
    agreed = terms({"w": torch.zeros(1)}, dtypes="cast")
    with open_engine(engine, agreed) as opened:
        try:
            opened.add(contribution("a", huge))
        except ContributionRejectedError as error:
            assert error.reason is Reason.NONFINITE  # noqa: PT017 -- columnar sees it in finish
        opened.add(contribution("b", good))
        result = opened.finish(MemoryWriter)
    assert result.state.tensor("w").item() == 1.0
    assert [item.site for item in result.report.rejected] == ["a"]


@each_engine
def test_keys_are_paired_by_name_not_by_order(engine, tmp_path):
    """Sites with the same keys in any insertion order, in any file layout, give the same bits."""
    values = {f"k{n}": torch.randn(50 + n) for n in range(4)} | {"h": torch.randn(9).half()}
    previous = {name: torch.zeros_like(value) for name, value in values.items()}
    results = set()
    for order in itertools.islice(itertools.permutations(values), 0, 120, 17):
        shuffled = {name: values[name] for name in order}
        scaled = {name: values[name] * 3 for name in reversed(order)}
        sites = [
            contribution("x", shuffled, 2),
            contribution("y", landed(tmp_path, scaled), 1),
        ]
        result = aggregate(engine, terms({name: previous[name] for name in order}), sites)
        results.add(tuple(sorted(bits(result.state).items())))
    assert len(results) == 1


@each_engine
def test_tied_tensors_that_come_apart_are_refused(engine):
    """A site that trained two names of one tensor into different values is refused by name."""
    tied = torch.ones(3)
    previous = {"embed": tied, "head": tied}
    with open_engine(engine, terms(previous)) as opened:
        opened.add(contribution("a", {"embed": (same := torch.ones(3) * 4), "head": same}))
        with pytest.raises(ContributionRejectedError, match="tied") as caught:
            opened.add(contribution("b", {"embed": torch.ones(3), "head": torch.zeros(3)}))
        assert caught.value.site == "b"
        state = opened.finish(MemoryWriter).state
    assert state.tensor("head").tolist() == state.tensor("embed").tolist() == [4.0] * 3


@each_engine
def test_a_site_may_tie_what_the_global_model_keeps_apart(engine):
    """A tied contribution to an untied model fills both entries."""
    previous = {"embed": torch.zeros(3), "head": torch.zeros(3)}
    tied = torch.ones(3)
    state = aggregate(
        engine, terms(previous), [contribution("a", {"embed": tied, "head": tied})]
    ).state
    assert state.tensor("head").tolist() == state.tensor("embed").tolist() == [1.0] * 3


@each_engine
def test_an_empty_model_averages_to_an_empty_model(engine):
    """A model without tensors, or with tensors without elements, is a valid round."""
    assert aggregate(engine, terms({}), [contribution("a", {})]).state.layout.names == ()
    hollow = {"e": torch.zeros(0, 4)}
    state = aggregate(engine, terms(hollow), [contribution("a", {"e": torch.ones(0, 4)})]).state
    assert state.tensor("e").shape == (0, 4)


@each_engine
def test_a_round_without_contributions_is_an_error(engine):
    """Nothing in, nothing out: the previous model stands."""
    with pytest.raises(AggregationError, match="no contribution"):
        aggregate(engine, terms(PREVIOUS), [])


@each_engine
def test_a_closed_round_takes_nothing_and_releases_what_it_is_given(engine):
    """After the result, a late contribution is refused and its state released."""
    with open_engine(engine, terms(PREVIOUS)) as opened:
        opened.add(contribution("a", GOOD))
        opened.finish(MemoryWriter)
        late = MemoryState(GOOD)
        with pytest.raises(AggregationError, match="closed"):
            opened.add(contribution("b", late))
        with pytest.raises(AggregationError, match="closed"):
            opened.finish(MemoryWriter)
    with pytest.raises(JobClosedError):
        late.tensor("a")


@each_engine
def test_leaving_a_round_early_releases_every_contribution(engine, tmp_path):
    """Whatever ends a round, the disk of its contributions is handed back."""
    gone: list[Path] = []
    with open_engine(engine, terms(PREVIOUS)) as opened:
        opened.add(contribution("a", _disposable(tmp_path, GOOD, gone)))
    assert gone == [tmp_path / "b"]


def test_a_layout_can_be_checked_before_the_data_arrives():
    """Headers alone tell what does not fit, naming site, key and both shapes."""
    ours = MemoryState(PREVIOUS).layout
    theirs = MemoryState({**GOOD, "a": torch.ones(3, 2)}).layout
    with pytest.raises(SpecMismatchError) as caught:
        check_layout(theirs, ours, Policies(), site="s")
    assert (caught.value.site, caught.value.tensor) == ("s", "a")
    assert (caught.value.expected, caught.value.got) == ((2, 3), (3, 2))
    fit = check_layout(
        MemoryState(without("a") | {"x": torch.ones(1)}).layout,
        ours,
        Policies(missing="partial", extra="drop"),
        site="s",
    )
    assert (fit.missing, fit.extra) == (frozenset({"a"}), ("x",))


@pytest.mark.parametrize(
    "change", [{"round_number": -1}, {"round_number": True}, {"round_number": "3"}, {"job": ""}]
)
def test_an_envelope_of_the_wrong_type_is_refused(change):
    """Round and job are checked where a contribution is made."""
    with pytest.raises(UsageError):
        contribution("a", GOOD, **change)
    with pytest.raises(UsageError):
        contribution("a", GOOD, kind="both")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(UsageError):
        contribution("", GOOD)


def _disposable(directory: Path, tensors, gone: list[Path]):
    """A file state that tells when its directory is handed back."""
    (directory / "b").mkdir()
    state = MemoryState(tensors)
    writer = FileWriter(directory / "b" / "x.safetensors", state.layout, dispose=gone.append)
    content = memoryview(bytearray(state.layout.data_nbytes))
    state.read_span(0, len(content), content)
    writer.write(0, content)
    return writer.finish()
