"""How much is asked for at once."""

from __future__ import annotations

import pytest

from streamoff.runtime.pace import CHUNK_SECONDS, MIN_PULL_BYTES, Pace
from streamoff.types import MIB


def pace(first: int = MIB, most: int = 4 * MIB) -> Pace:
    """A pace under a stall budget of 20 s, from time 0 on."""
    made = Pace(most=most, first=first, stall=20.0)
    made.begin(0.0)
    return made


def after(one: Pace, rate: float, chunks: int) -> int:
    """The pull size after so many chunks at a rate in bytes per second."""
    now = 0.0
    for _ in range(chunks):
        seconds = one.nbytes / rate
        now += seconds
        one.came(now, one.nbytes, seconds)
    return one.nbytes


@pytest.mark.parametrize("rate", [1e5, 1.25e6, 5e6, 12.5e6, 1e9])
@pytest.mark.parametrize("first", [MIN_PULL_BYTES, MIB, 4 * MIB])
def test_any_line_gets_what_it_brings_in_a_quarter_of_a_second(rate: float, first: int):
    """From whatever size it begins with, a pull soon is the largest power of two that comes in time, within bounds."""
    nbytes = after(pace(first), rate, 8)
    assert MIN_PULL_BYTES <= nbytes <= 4 * MIB
    assert nbytes == MIN_PULL_BYTES or nbytes / rate <= CHUNK_SECONDS
    assert nbytes == 4 * MIB or 2 * nbytes / rate > CHUNK_SECONDS
    assert nbytes & (nbytes - 1) == 0
    assert after(pace(first), rate, 9) == nbytes  # and stays


def test_a_chunk_that_waited_for_others_makes_pulls_smaller_near_the_stall_budget():
    """A chunk that came quickly but late halves the pull; one that is merely not soon lets it be."""
    one = pace()
    one.came(6.0, MIB, 0.01)
    assert one.nbytes == MIB // 2
    one.came(8.0, MIB // 2, 0.01)
    assert one.nbytes == MIB // 2
    one.came(8.1, MIB // 2, 0.01)
    assert one.nbytes == MIB


def test_a_chunk_whose_memory_was_taken_back_asks_for_a_quarter():
    """Slowing down goes to the least, and no further; a link with tiny chunks has them at any pace."""
    one, tiny = pace(), pace(most=10_000)
    sizes = []
    for _ in range(4):
        one.slow_down()
        sizes.append(one.nbytes)
    assert sizes == [MIB // 4, MIN_PULL_BYTES, MIN_PULL_BYTES, MIN_PULL_BYTES]
    assert (tiny.nbytes, after(tiny, 1.0, 3)) == (10_000, 10_000)
