"""Samples: in which order they are taken, and what is made of them."""

import mmap

import pytest

from benchmarks.meter import Meter, Spent
from benchmarks.pairs import Sample, Series, in_turns, ratios, spread
from streamoff.sim.memory import resident_bytes
from streamoff.types import MIB


def sample(seconds: float, growth: int = 0, cpu: float = 0.5) -> Sample:
    """A transfer of some length."""
    spent = Spent(seconds=seconds, cpu=cpu, growth=growth, faults=0)
    return Sample(receiver=spent, source=spent)


def test_turns_alternate_their_order_after_one_to_warm_up():
    """Each way comes first as often as last, and the first turn is not counted."""
    order: list[str] = []

    def way(name: str) -> Sample:
        order.append(name)
        return sample(1.0)

    found = in_turns(4, MIB, {"a": lambda: way("a"), "b": lambda: way("b")})
    assert "".join(order) == "ba" + "abba" * 2
    assert {name: len(series.samples) for name, series in found.items()} == {"a": 4, "b": 4}


def test_a_single_turn_is_not_warmed_up():
    """What is done once only is done once."""
    count = 0

    def way() -> Sample:
        nonlocal count
        count += 1
        return sample(1.0)

    in_turns(1, MIB, {"a": way})
    assert count == 1


def test_ratios_are_taken_within_a_turn():
    """A slow turn of the machine slows both ways and leaves the ratio as it is."""
    ours = Series(MIB, [sample(2.0), sample(20.0)])
    theirs = Series(MIB, [sample(1.0), sample(10.0)])
    assert ratios({"ours": ours, "theirs": theirs}) == [0.5, 0.5]
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0-3.0)"


def test_a_series_says_what_a_gibibyte_takes():
    """Throughput is per second and CPU per GiB of both ends; growth is the largest of all samples."""
    series = Series(
        2048 * MIB, [sample(2.0, growth=MIB, cpu=1.0), sample(4.0, growth=3 * MIB, cpu=1.0)]
    )
    assert series.throughput == [1024.0, 512.0]
    assert series.cpu == 1.0
    assert series.receiver_growth_mib == 3.0


def test_a_meter_sees_fresh_memory():
    """Pages that are touched inside the block are in the growth and in the faults."""
    with Meter(resident_bytes()[1]) as meter:
        fresh = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        fresh.madvise(mmap.MADV_NOHUGEPAGE)
        fresh.write(b"\1" * (32 * MIB))
    fresh.close()
    assert meter.spent.growth >= 30 * MIB  # the rest of the process may shrink meanwhile
    assert meter.spent.faults >= 32 * MIB // mmap.PAGESIZE
    assert meter.spent.seconds > 0
    assert meter.spent.cpu > 0


@pytest.mark.parametrize("floor", [0, 5 * MIB])
def test_growth_is_counted_from_the_floor(floor):
    """What the process had before its first transfer is not growth, and everything else is."""
    with Meter(floor) as meter:
        pass
    assert meter.spent.growth + floor >= resident_bytes()[1] - MIB
