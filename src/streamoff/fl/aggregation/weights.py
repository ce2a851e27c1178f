"""Weights of sites: what is a weight, and how weights become shares.

Engines weigh sites relative to the first of them, so that equal weights, and a single site, multiply by
exactly 1; then scale by a power of two so that the weights add up to at most 1. Powers of two leave the
mantissa alone: that scaling changes no bit of a mean, it only keeps sums from overflowing.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from streamoff.errors import UsageError, WeightError

__all__ = ["Scale", "weight_of", "weighted_metrics"]


def weight_of(value: object, *, site: str | None = None) -> float:
    """Validate one weight.

    Args:
        value: A Python or NumPy integer or float. A bool, a string, None, an array, a tensor or anything
            else is no weight: nothing is ever replaced by 1.0.
        site: Whose weight it is, for the message.

    Returns:
        The weight as a float, finite and at least 0.0.

    Raises:
        WeightError: The value is of another type, NaN, infinite, negative or too large for a float.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        kind = type(value).__name__
        raise WeightError("not a weight", expected="an int or a float", got=kind, site=site)
    try:
        weight = float(value)
    except OverflowError as error:
        raise WeightError(
            "weight is too large", expected="at most 1.8e308", got="an integer above it", site=site
        ) from error
    if not math.isfinite(weight) or weight < 0.0:
        raise WeightError("not a weight", expected="finite, 0 or more", got=weight, site=site)
    return abs(weight)


@dataclass(frozen=True, slots=True)
class Scale:
    """How weights become factors.

    Args:
        reference: The weight that becomes a power of two, above 0.
        exponent: Factors are relative weights times ``2**-exponent``.
    """

    reference: float
    exponent: int = 0

    @classmethod
    def of(cls, weights: Iterable[float], reference: float | None = None) -> Self:
        """Return the scale at which the factors add up to at least 0.5 and less than 1.

        Args:
            weights: Finite and not negative; their sum may exceed the largest float.
            reference: One of them, above 0; by default the first that is.

        Raises:
            WeightError: No weight is above 0.
        """
        positive = [weight for weight in weights if weight > 0.0]
        if not positive:
            raise WeightError(
                "the weights add up to 0",
                expected="a total above 0",
                hint="The previous model stands. Check that some site trained on at least one example",
            )
        plain = cls(positive[0] if reference is None else reference)
        largest = plain._relative(max(positive))[1]
        total = math.fsum(cls(plain.reference, largest).factor(weight) for weight in positive)
        return cls(plain.reference, largest + math.frexp(total)[1])

    def factor(self, weight: float) -> float:
        """Return the factor of a weight; 0.0 where it is too small against the others to count."""
        mantissa, exponent = self._relative(weight)
        return math.ldexp(mantissa, exponent - self.exponent)

    def _relative(self, weight: float) -> tuple[float, int]:
        mantissa, exponent = math.frexp(weight)
        reference, its_exponent = math.frexp(self.reference)
        return mantissa / reference, exponent - its_exponent


def weighted_metrics(
    metrics: Mapping[str, Mapping[str, object]], weights: Mapping[str, object]
) -> dict[str, float]:
    """Average the metrics of sites by the rules that hold for their models.

    Args:
        metrics: Site to metric name to number.
        weights: Site to weight; every site of ``metrics`` needs one.

    Returns:
        Metric name, sorted, to its mean over the sites of positive weight that report it, each metric with
        its own denominator. A site of weight 0 is ignored; a metric that only such sites report is left
        out. A value that is NaN or infinite makes its mean so: nothing is hidden.

    Raises:
        WeightError: A weight is missing or invalid, or they add up to 0.
        UsageError: A value is not a number.
    """
    checked = {site: weight_of(weights.get(site), site=site) for site in sorted(metrics)}
    Scale.of(checked.values())
    columns: dict[str, list[tuple[float, float]]] = {}
    for site, weight in checked.items():
        for name, value in metrics[site].items():
            number = _number(value, site=site, metric=name)
            if weight > 0.0:
                columns.setdefault(name, []).append((weight, number))
    return {name: _mean(columns[name]) for name in sorted(columns)}


def _mean(column: list[tuple[float, float]]) -> float:
    scale = Scale.of(weight for weight, _ in column)
    scaled = [(scale.factor(weight), value) for weight, value in column]
    total = math.fsum(weight for weight, _ in scaled)
    parts = [weight / total * value for weight, value in scaled]
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)


def _number(value: object, *, site: str, metric: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.number)):
        raise UsageError(
            "not a metric",
            expected="a number",
            got=type(value).__name__,
            site=site,
            metric=metric,
        )
    try:
        return float(value)
    except (OverflowError, TypeError) as error:
        raise UsageError(
            "not a metric", expected="a real number that fits a float", site=site, metric=metric
        ) from error
