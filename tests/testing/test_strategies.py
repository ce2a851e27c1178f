"""Strategies draw what is allowed, all of it, and shrink to nothing going wrong; and transfers survive what they draw."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, find, given, settings, strategies as st

from streamoff.errors import StreamoffError, UsageError
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.testing import FaultPlan, FaultyNetwork, Kill, LinkFaults, MachinePair, run_virtual
from streamoff.testing.faults import CHANCES
from streamoff.testing.lossy import Faults
from streamoff.testing.strategies import budgets, fault_plans, link_faults, pair_faults
from streamoff.types import MIB, Budgets, Verdict

from ..runtime.world import Attempt, assert_same, state_dict, tasks, world

CALM = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
LINES = [("site-1", "server"), ("site-2", "server")]


@CALM
@given(link_faults(kinds={"loss", "cut"}, most=0.3))
def test_link_faults_keep_to_what_was_asked(faults: LinkFaults) -> None:
    """Only the chances that were named are above 0, and none above the largest."""
    assert {name for name in CHANCES if getattr(faults, name)} <= {"loss", "cut"}
    assert max(faults.loss, faults.cut) <= 0.3


@CALM
@given(fault_plans(LINES, within=10.0, lasting=5.0, killed=["site-1"], most=3))
def test_plans_keep_to_what_was_asked(plan: FaultPlan) -> None:
    """Events begin in time, end in time, and happen to what was named."""
    assert len(plan.events) <= 3
    for event in plan.events:
        assert 0.0 <= event.at <= 10.0
        if isinstance(event, Kill):
            assert event.address == "site-1"
        else:
            assert (event.one, event.other) in LINES
            assert event.seconds <= 5.0


@pytest.mark.parametrize("kind", ["Cut", "Partition", "Slow", "Kill"])
def test_every_kind_of_event_is_drawn(kind: str) -> None:
    """No kind of fault is left out, and the least plan that has one has nothing else."""
    plan = find(
        fault_plans(LINES, within=10.0, killed=["site-2"]),
        lambda plan: any(type(event).__name__ == kind for event in plan.events),
        settings=settings(max_examples=500, database=None),
    )
    assert [type(event).__name__ for event in plan.events] == [kind]
    assert plan.events[0].at == 0.0


def test_the_least_that_is_drawn_is_nothing() -> None:
    """Strategies shrink to a network, and a link, that do nothing wrong."""
    quick = settings(max_examples=200, database=None)
    assert find(fault_plans(LINES, within=1.0), lambda _: True, settings=quick) == FaultPlan()
    least = find(pair_faults(), lambda _: True, settings=quick)
    assert (least.drop, least.latency) == (0.0, (0.0, 0.0))


@CALM
@given(budgets())
def test_budgets_are_consistent(drawn: Budgets) -> None:
    """No producer gives up a receiver that is still trying; a budget that did would be refused."""
    assert drawn.idle > drawn.retry_schedule


def test_nonsense_is_refused() -> None:
    """A kind that is none, and a network without lines, are mistakes of the test."""
    with pytest.raises(UsageError):
        link_faults(kinds=["hunger"])
    with pytest.raises(UsageError):
        fault_plans([], within=1.0)


@CALM
@given(pair_faults(), budgets(), st.integers(0, 1000))
def test_a_pair_survives_whatever_is_drawn(faults: Faults, drawn: Budgets, seed: int) -> None:
    """Both machines end, in time, and neither claims what the other does not have."""
    MachinePair(receivers=2, nbytes=9 * MIB, faults=faults, budgets=drawn, seed=seed).run()


@CALM
@given(
    fault_plans(
        [("site-1", "server")],
        within=5.0,
        faults=link_faults(kinds={"cut", "corruption", "loss"}),
    ),
    st.integers(0, 1000),
)
def test_a_transfer_survives_whatever_is_drawn(plan: FaultPlan, seed: int) -> None:
    """What arrives is what was sent, and the source counts no success that the receiver does not have."""

    async def transfer() -> None:
        tensors = state_dict(1)
        async with (
            FaultyNetwork(seed=seed, plan=plan) as network,
            world(sites=0, network=network) as w,
            BaseEndpoint("site-1", transports=[network], seed=1) as site,
        ):
            try:
                await site.connect("server")
            except StreamoffError:
                return
            tx, ref = w.offer(tensors, site=site)
            attempt = Attempt()
            async with tasks() as group:
                group.start_soon(attempt.run, lambda: w.download(ref))
                outcome = await tx.wait()
                await attempt.over.wait()
        if attempt.state is not None:
            assert_same(attempt.state, tensors)
        [ends] = outcome.slots.values()
        succeeded = all(end.verdict is Verdict.SUCCEEDED for end in ends.values())
        assert attempt.state is not None or not succeeded

    run_virtual(transfer)
