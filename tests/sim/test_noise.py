"""Noise by index."""

import numpy as np
import pytest

from streamoff.sim.noise import BLOCK, uniform


@pytest.mark.parametrize("first", [0, 7, 2**32 - 50, 2**40 - 1])
def test_any_range_can_be_had_alone(first: int) -> None:
    """An element's noise depends on its index, not on the range it was asked for with."""
    whole = uniform(99, first, 100, scale=1.0)
    for at in (0, 1, 49, 50, 51, 99):
        assert uniform(99, first + at, 1, scale=1.0)[0] == whole[at]


def test_noise_is_uniform_within_its_scale() -> None:
    """Noise lies in [-scale, scale), with the mean and the variance of uniform numbers."""
    noise = uniform(3, 0, BLOCK, scale=0.25)
    assert noise.dtype == np.float32
    assert -0.25 <= noise.min() < -0.249
    assert 0.249 < noise.max() < 0.25
    assert abs(noise.mean()) < 0.25 * 4 / np.sqrt(3 * BLOCK)
    assert noise.var() == pytest.approx(0.25**2 / 3, rel=0.03)


@pytest.mark.parametrize("other", [1, 2**32, 2**63])
def test_keys_give_unrelated_noise(other: int) -> None:
    """A change of any half of the key changes all noise; it does not shift or permute it."""
    one, two = (uniform(key, 0, BLOCK, scale=1.0) for key in (0, other))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.03
    assert len(np.intersect1d(one, two)) < BLOCK / 50


def test_the_upper_half_of_an_index_counts() -> None:
    """Elements that are 2**32 apart do not have the same noise."""
    one, two = (uniform(5, first, 1000, scale=1.0) for first in (0, 2**32))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.15
