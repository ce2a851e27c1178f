"""Both engines against the exact mean, for models, weights and orders that nobody picked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st

from streamoff.tensors.state import MemoryState, State

from .support import ENGINES, aggregate, bits, contribution, exact_mean, terms, tolerance

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8]
Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (2, 0), (2, 3), (1, 1, 5), (17,)]


@st.composite
def rounds(draw):
    """A model's specs, some sites' values and weights, and two orders of arrival."""
    specs = draw(
        st.dictionaries(
            st.text(min_size=1, max_size=4).filter(lambda text: text.isprintable()),
            st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)),
            max_size=4,
        )
    )
    weights = draw(
        st.lists(st.integers(0, 1000) | st.floats(0, 1e6), min_size=1, max_size=5).filter(any)
    )
    seed = draw(st.integers(0, 2**32))
    order = draw(st.permutations(range(len(weights))))
    return specs, weights, seed, order


def values_of(specs: Specs, seed: int, site: int) -> dict[str, torch.Tensor]:
    """Values of one site, exactly representable in their dtype."""
    generator = torch.Generator().manual_seed(seed + site)
    return {
        name: (
            torch.randint(0, 255, shape, generator=generator)
            if not dtype.is_floating_point
            else torch.randn(shape, generator=generator) * 10 ** (site - 2)
        ).to(dtype)
        for name, (dtype, shape) in specs.items()
    }


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60, deadline=None)
@given(case=rounds())
def test_the_mean_is_the_exact_one_to_stated_rounding(engine, case):
    """Each element is the exact weighted mean, off by no more than the accumulator's roundings."""
    specs, weights, seed, order = case
    names = [f"site-{number}" for number in range(len(weights))]
    given_values = [values_of(specs, seed, number) for number in range(len(weights))]
    previous = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in specs.items()}

    def run(order: Sequence[int]) -> State:
        sites = [contribution(names[n], given_values[n], weights[n]) for n in order]
        return aggregate(engine, terms(previous), sites).state

    state = run(order)
    if engine == "columnar":
        assert bits(state) == bits(run(range(len(weights))))
    for name, (dtype, shape) in specs.items():
        found = state.tensor(name)
        assert (found.dtype, tuple(found.shape)) == (dtype, shape)
        columns = [value[name].reshape(-1).tolist() for value in given_values]
        for index, element in enumerate(found.reshape(-1).tolist()):
            column = [values[index] for values in columns]
            check_element(element, column, weights, dtype)


def check_element(
    element: float, column: list[float], weights: list[float], dtype: torch.dtype
) -> None:
    """Compare one element with the exact mean of its column."""
    exact = exact_mean(column, weights)
    if not dtype.is_floating_point:
        assert abs(Fraction(element) - Fraction(exact)) <= Fraction(1, 2) + Fraction(1, 10**6)
        return
    accumulated = tolerance(column) if dtype is not torch.float64 else tolerance(column) * 2**-28
    cast = abs(exact) * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
    assert math.isclose(element, exact, rel_tol=0, abs_tol=accumulated * 1.01 + cast * 1.01)


@settings(max_examples=40, deadline=None)
@given(case=rounds())
def test_engines_agree_bit_for_bit_in_the_order_of_names(case):
    """Folding in the order of the sites' names and walking are the same arithmetic."""
    specs, weights, seed, _ = case
    previous = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in specs.items()}
    found = [
        bits(
            aggregate(
                engine,
                terms(previous),
                [
                    contribution(f"site-{n}", values_of(specs, seed, n), weight)
                    for n, weight in enumerate(weights)
                ],
            ).state
        )
        for engine in ENGINES
    ]
    assert found[0] == found[1]


@settings(max_examples=40, deadline=None)
@given(case=rounds())
def test_one_site_gives_its_own_model(case):
    """The mean of one contribution is that contribution, whatever its weight."""
    specs, weights, seed, _ = case
    weight = max(weights)
    values = values_of(specs, seed, 0)
    for engine in ENGINES:
        state = aggregate(engine, terms(values), [contribution("a", values, weight)]).state
        for name, value in values.items():
            assert torch.equal(state.tensor(name), value)
        assert state.layout == MemoryState(values).layout
