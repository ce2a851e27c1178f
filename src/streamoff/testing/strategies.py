"""Hypothesis strategies for what may go wrong; they need hypothesis, which streamoff does not install.

    @given(plan=fault_plans([("site-1", "server")], within=60.0), seed=st.integers(0, 2**32))
    def test_my_controller_survives(plan, seed): ...

What hypothesis finds it makes smaller by itself: fewer events, shorter ones, chances of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from streamoff.errors import UsageError
from streamoff.testing.faults import (
    CHANCES,
    NO_FAULTS,
    Cut,
    Fault,
    FaultPlan,
    Kill,
    LinkFaults,
    Partition,
    Slow,
)
from streamoff.testing.lossy import Faults
from streamoff.types import Budgets

__all__ = ["budgets", "fault_plans", "link_faults", "pair_faults"]

_LEAST_BANDWIDTH = 1024.0


def _seconds(most: float) -> SearchStrategy[float]:
    return st.floats(0.0, most, allow_nan=False)


def _spans(most: float) -> SearchStrategy[tuple[float, float]]:
    return st.tuples(_seconds(most), _seconds(most)).map(lambda pair: (min(pair), max(pair)))


def link_faults(
    *, kinds: Iterable[str] = CHANCES, most: float = 0.05, seconds: float = 1.0
) -> SearchStrategy[LinkFaults]:
    """What one direction of a link does wrong.

    Args:
        kinds: Names of the chances that may be above 0; see :class:`~streamoff.testing.LinkFaults`.
        most: The largest chance per frame.
        seconds: The longest delay, and the longest that a link stays away.

    Returns:
        A strategy that shrinks to a link that does nothing wrong.
    """
    allowed = frozenset(kinds)
    if not allowed <= set(CHANCES):
        raise UsageError("kinds", expected=", ".join(CHANCES), got=sorted(allowed))
    chances = {name: st.just(0.0) | st.floats(0.0, most) for name in CHANCES if name in allowed}
    return st.builds(
        LinkFaults,
        **chances,
        down=_spans(seconds),
        delay=st.just((0.0, 0.0)) | _spans(seconds),
        bandwidth=st.just(math.inf) | st.floats(_LEAST_BANDWIDTH, 1e9),
    )


def fault_plans(
    lines: Sequence[tuple[str, str]],
    *,
    within: float,
    lasting: float = 60.0,
    killed: Sequence[str] = (),
    most: int = 5,
    faults: SearchStrategy[LinkFaults] | None = None,
) -> SearchStrategy[FaultPlan]:
    """Plans for a :class:`~streamoff.testing.FaultyNetwork`.

    Args:
        lines: Pairs of endpoints whose lines may be cut, parted or slowed down; at least one.
        within: Events begin in the first so many seconds.
        lasting: The longest that one lasts.
        killed: Endpoints that may be killed.
        most: Events in one plan.
        faults: Of every link, besides the events; none by default.

    Returns:
        A strategy that shrinks to a plan in which nothing happens.
    """
    if not lines:
        raise UsageError("lines", expected="at least one pair of endpoints", got=lines)
    ends, at, seconds = st.sampled_from(lines), _seconds(within), _seconds(lasting)
    bandwidth, delay = st.floats(_LEAST_BANDWIDTH, 1e9), _seconds(lasting / 10)
    events: list[SearchStrategy[Fault]] = [
        st.builds(_cut, ends, at, seconds),
        st.builds(_partition, ends, at, seconds),
        st.builds(_slow, ends, at, seconds, bandwidth, delay),
    ]
    if killed:
        events.append(st.builds(Kill, at, st.sampled_from(killed)))
    return st.builds(
        FaultPlan,
        faults=st.just(NO_FAULTS) if faults is None else faults,
        events=st.lists(st.one_of(events), max_size=most).map(tuple),
    )


def _cut(ends: tuple[str, str], at: float, seconds: float) -> Cut:
    return Cut(at, ends[0], ends[1], seconds)


def _partition(ends: tuple[str, str], at: float, seconds: float) -> Partition:
    return Partition(at, ends[0], ends[1], seconds)


def _slow(ends: tuple[str, str], at: float, seconds: float, bandwidth: float, delay: float) -> Slow:
    return Slow(at, ends[0], ends[1], seconds, bandwidth, delay)


def pair_faults(*, most: float = 0.2, seconds: float = 3.0) -> SearchStrategy[Faults]:
    """What goes wrong between the two ends of a :class:`~streamoff.testing.MachinePair`.

    Args:
        most: The largest chance per message; links break, chunks stick and landings fail a tenth as often.
        seconds: The longest latency, and the longest that reading and landing take.

    Returns:
        A strategy that shrinks to a calm link.
    """
    often, seldom = st.floats(0.0, most), st.floats(0.0, most / 10)
    return st.builds(
        Faults,
        drop=often,
        duplicate=often,
        latency=_spans(seconds),
        reading=_spans(seconds),
        wedge=seldom,
        cut=seldom,
        landing=_spans(seconds),
        landing_fails=seldom,
    )


def budgets() -> SearchStrategy[Budgets]:
    """Budgets that are consistent: no producer gives up a receiver that is still trying."""
    some = st.floats(0.1, 60.0)
    return st.tuples(
        st.lists(some, max_size=4).map(tuple), some, some, some, some, some, st.floats(1.0, 600.0)
    ).map(_budgets)


def _budgets(drawn: tuple[tuple[float, ...], float, float, float, float, float, float]) -> Budgets:
    backoff, stall, grace, acquire, settle, spare, hold = drawn
    schedule = (len(backoff) + 1) * stall + sum(backoff) + grace
    return Budgets(
        acquire=acquire,
        idle=schedule + spare,
        stall=stall,
        backoff=backoff,
        hold=hold,
        reconnect_grace=grace,
        settle=settle,
    )
