"""Weights and the metrics they average."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from streamoff.errors import UsageError, WeightError
from streamoff.fl.aggregation import weight_of, weighted_metrics
from streamoff.fl.aggregation.weights import Scale

from .support import ENGINES, aggregate, contribution, exact_mean, terms

REFUSED = [
    True,
    False,
    np.True_,
    "1",
    None,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -1e-300,
    10**400,
    1j,
    Fraction(1, 2),
    Decimal(1),
    np.float32("nan"),
    np.int64(-1),
    np.array([1.0]),
    np.array(1.0),
    torch.tensor(1.0),
    [1.0],
]


@pytest.mark.parametrize("value", REFUSED, ids=repr)
def test_what_is_no_weight_is_refused_and_never_becomes_one(value):
    """Bools, strings, None, NaN, infinities, negatives, huge integers and arrays are refused by site."""
    with pytest.raises(WeightError) as caught:
        contribution("site-7", {"w": torch.ones(1)}, value)
    assert caught.value.site == "site-7"
    with pytest.raises(WeightError):
        weighted_metrics({"a": {"loss": 1.0}}, {"a": value})


@pytest.mark.parametrize(
    ("value", "weight"),
    [
        (0, 0.0),
        (3, 3.0),
        (2.5, 2.5),
        (5e-324, 5e-324),
        (10**300, 1e300),
        (np.int32(4), 4.0),
        (np.uint8(200), 200.0),
        (np.float16(0.5), 0.5),
        (np.float64(1.25), 1.25),
    ],
)
def test_python_and_numpy_numbers_are_weights(value, weight):
    """Finite numbers from 0 on are taken at their value, as a plain float."""
    found = weight_of(value)
    assert found == weight
    assert type(found) is float


def test_negative_zero_is_zero():
    """-0.0 is not negative, and no sign of it is left."""
    assert math.copysign(1.0, weight_of(-0.0)) == 1.0


@given(st.lists(st.floats(0, 1.7e308), min_size=1).filter(any))
def test_factors_add_up_to_at_most_one(weights):
    """Whatever the weights, also where their sum overflows, factors total 0.5 to 1, up to rounding."""
    scale = Scale.of(weights)
    total = math.fsum(map(scale.factor, weights))
    assert total * (1 + 1e-12) >= 0.5
    assert total <= 1.0


@given(st.floats(5e-324, 1.7e308), st.integers(1, 50))
def test_equal_weights_are_powers_of_two(weight, sites):
    """Sites of equal weight, whatever it is, and a single site are multiplied without rounding."""
    scale = Scale.of([weight] * sites)
    assert math.frexp(scale.factor(weight))[0] == 0.5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_of_zero_weights_is_refused(engine):
    """When every site reports 0 examples there is a typed error, not a NaN model."""
    sites = [contribution(site, {"w": torch.ones(2)}, 0) for site in ("a", "b")]
    with pytest.raises(WeightError, match="add up to 0"):
        aggregate(engine, terms({"w": torch.zeros(2)}), sites)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_site_of_weight_zero_is_ignored(engine):
    """With weights 0 and 3 the result is the second site's, even where the first holds NaN."""
    first = contribution("a", {"w": torch.tensor([math.nan, 9.0])}, 0)
    second = contribution("b", {"w": torch.tensor([1.5, -2.5])}, 3)
    result = aggregate(engine, terms({"w": torch.zeros(2)}), [first, second])
    assert result.state.tensor("w").tolist() == [1.5, -2.5]
    assert result.report.weights == {"a": 0.0, "b": 3.0}


@pytest.mark.parametrize("engine", ENGINES)
def test_extreme_weights_neither_overflow_nor_vanish(engine):
    """Weights whose sum exceeds the largest float, or that are subnormal, average like 1 and 1."""
    for weight in (1.7e308, 5e-324):
        sites = [
            contribution("a", {"w": torch.tensor([3.0e38])}, weight),
            contribution("b", {"w": torch.tensor([1.0e38])}, weight),
        ]
        result = aggregate(engine, terms({"w": torch.zeros(1)}), sites)
        assert result.state.tensor("w").tolist() == torch.tensor([2.0e38]).tolist()


def test_metrics_are_averaged_over_the_sites_that_report_them():
    """Each metric has its own denominator and sites of weight 0 count for nothing."""
    metrics = {
        "a": {"loss": 1.0, "accuracy": 0.5},
        "b": {"loss": 4.0},
        "c": {"loss": 1e9, "only": 1},
    }
    assert weighted_metrics(metrics, {"a": 1, "b": 2, "c": 0}) == {"accuracy": 0.5, "loss": 3.0}


def test_metrics_of_zero_weights_are_refused():
    """Metrics whose weights add up to 0 raise the error that models of such weights raise."""
    with pytest.raises(WeightError, match="add up to 0"):
        weighted_metrics({"a": {"loss": 1.0}, "b": {"loss": 2.0}}, {"a": 0, "b": 0})


def test_a_missing_weight_is_refused():
    """A site that reports a metric and no weight is named; its weight is not taken for 1."""
    with pytest.raises(WeightError) as caught:
        weighted_metrics({"a": {"loss": 1.0}, "b": {"loss": 1.0}}, {"a": 1})
    assert caught.value.site == "b"


@pytest.mark.parametrize("value", [True, "0.5", None, 1j, [1.0], 10**400], ids=repr)
def test_a_metric_that_is_no_number_is_refused(value):
    """A metric of another type is refused with its site and name."""
    with pytest.raises(UsageError) as caught:
        weighted_metrics({"a": {"loss": value}}, {"a": 1})
    assert (caught.value.site, caught.value.metric) == ("a", "loss")


def test_a_metric_that_is_nan_or_infinite_shows():
    """A NaN makes its mean NaN, an infinity infinite; other metrics are untouched."""
    metrics = {
        "a": {"x": math.nan, "y": math.inf, "z": 1.0},
        "b": {"x": 1.0, "y": 1.0, "z": 3.0},
    }
    found = weighted_metrics(metrics, {"a": 1, "b": 1})
    assert math.isnan(found["x"])
    assert (found["y"], found["z"]) == (math.inf, 2.0)


@given(
    st.lists(st.tuples(st.floats(0, 1e300), st.floats(-1e9, 1e9)), min_size=1, max_size=8).filter(
        lambda pairs: any(weight > 0 for weight, _ in pairs)
    )
)
def test_metric_means_are_exact_to_rounding_in_any_order(pairs):
    """The mean of a metric is the exact weighted mean to a few roundings, in any order of sites."""
    weights = {f"s{index}": weight for index, (weight, _) in enumerate(pairs)}
    metrics = {f"s{index}": {"m": value} for index, (_, value) in enumerate(pairs)}
    found = weighted_metrics(metrics, weights)["m"]
    values = [value for _, value in pairs]
    exact = exact_mean(values, list(weights.values()))
    assert math.isclose(found, exact, rel_tol=1e-12, abs_tol=1e-12 * max(map(abs, values)) + 1e-320)
    backwards = dict(reversed(metrics.items()))
    assert weighted_metrics(backwards, weights)["m"] == found
