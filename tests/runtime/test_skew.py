"""Ends that cannot do the same: nothing is relied on that both have not named, and what is missing costs a bounded wait."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from streamoff.errors import SourceLostError, TransferTimeoutError
from streamoff.machines.transaction import TransactionState
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endings import End
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.tensors.sources import StateDictSource
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Capability, OutcomeStatus, Slot, Verdict
from streamoff.wire.frames import Cancel, Notice, Routed

from .ends import PLACES, Ends, ends
from .world import (
    Attempt,
    ComputedSource,
    Gate,
    assert_pattern,
    in_memory,
    memory,
    not_the_first,
    numbers,
    puppet,
    settled_tasks,
    state_dict,
    tasks,
    watched,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

WITHOUT_CANCEL = (Capability.NOTICE,)
WITHOUT_NOTICE = (Capability.CANCEL,)
NOTHING: tuple[Capability, ...] = ()


@asynccontextmanager
async def listening(e: Ends) -> AsyncIterator[list[Routed]]:
    """Every frame that the receiver sends while this is open."""
    sent: list[Routed] = []
    links = e.receiver.links
    send = links.send

    def note(frame: Routed) -> None:
        sent.append(frame)
        send(frame)

    e.receiver.downloads.wire.send = note
    try:
        yield sent
    finally:
        e.receiver.downloads.wire.send = send


# --- cancel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("lacks", ["the receiver", "the source", "both"])
async def test_without_cancel_the_idle_budget_frees_the_source(where: str, lacks: str) -> None:
    """Given up in the middle, a slot is kept until its idle budget ends, to the second, and the outcome says that."""
    mine = WITHOUT_CANCEL if lacks != "the source" else tuple(Capability)
    theirs = WITHOUT_CANCEL if lacks != "the receiver" else tuple(Capability)
    gate = Gate()
    async with ends(where, receiver=mine, source=theirs) as e, listening(e) as sent:
        tx = e.publish(ComputedSource(5 * MIB, not_the_first(gate)))
        attempt = Attempt()
        async with tasks(gate) as group:
            transfer = e.receiver.transfer(tx.refs(0)[0], memory())
            group.start_soon(attempt.run, partial(e.receiver.run_transfer, transfer))
            await gate.reached()
            served_at = anyio.current_time()
            await anyio.sleep(10)
            attempt.scope.cancel()
            await attempt.over.wait()
            assert attempt.cancelled  # at once, whoever lacks what
            assert attempt.ended == served_at + 10
            gate.open()
        outcome = await tx.wait()
        assert not any(isinstance(frame, Cancel) for frame in sent)
        assert outcome.reason == "idle_timeout"
        [verdicts] = outcome.slots.values()
        assert {end.reason for end in verdicts.values()} == {"idle_timeout"}
        assert outcome.settled_at == attempt.ended + 150  # when the source served the last of it
        assert e.receiver.statistics().downloads.ended == {End.CANCELLED: 1}
        assert e.source.statistics().publisher.ended == {End.TIMED_OUT: 1}


@pytest.mark.parametrize("where", ["behind a relay", "below a relay"])
async def test_a_cancel_on_the_chance_does_no_harm(where: str) -> None:
    """A source behind others that does not know cancel, and has not said so yet, ignores one: its budget frees it."""
    async with ends(where, source=WITHOUT_CANCEL) as e, listening(e) as sent:
        payload, _ = watched({"w": numbers(100)})
        tx = e.publish(payload)
        attempt = Attempt()
        async with tasks() as group:
            transfer = e.receiver.transfer(tx.refs(0)[0], memory())
            group.start_soon(attempt.run, partial(e.receiver.run_transfer, transfer))
            await anyio.sleep(e.way / 2)
            attempt.scope.cancel()
        assert sum(isinstance(frame, Cancel) for frame in sent) == 1
        assert tx.record.state is TransactionState.OPEN
        outcome = await tx.wait()
        assert outcome.reason == "idle_timeout"
        assert all(len(end.links.live) for end in (e.receiver, e.source))


@pytest.mark.parametrize("where", PLACES)
async def test_a_neighbour_that_knows_no_cancel_gets_none_and_the_rest_works(where: str) -> None:
    """Without any capability on either side transfers, holds and confirmations work as ever."""
    gate = Gate()
    async with ends(where, receiver=NOTHING, source=NOTHING) as e:
        tx = e.publish(ComputedSource(9 * MIB))
        attempt = Attempt()
        slow = Terms(landing=in_memory(finish=gate))
        async with tasks(gate) as group:
            transfer = e.receiver.transfer(tx.refs(0)[0], slow)
            group.start_soon(attempt.run, partial(e.receiver.run_transfer, transfer))
            await gate.reached()
            await anyio.sleep(300)  # holds keep the slot
            gate.open()
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_each_receiver_is_judged_by_what_it_can_do() -> None:
    """Of two receivers that give up, the one that knows cancel is off at once, the other at the end of its budget."""
    network = MemoryNetwork()
    async with (
        BaseEndpoint("server", transports=[network]) as server,
        BaseEndpoint("new", transports=[network]) as new,
        BaseEndpoint("old", transports=[network], capabilities=NOTHING) as old,
    ):
        for end in (new, old):
            await end.connect("server")
        await settled_tasks()
        slots = [Slot(bytes(15) + bytes([n]), end.address) for n, end in enumerate((new, old))]
        tx = server.publish([StateDictSource(state_dict(9))], slots)
        for number, end in enumerate((new, old)):
            attempt = Attempt()

            def give_up(*_: int, attempt: Attempt = attempt) -> None:
                attempt.scope.cancel()

            transfer = end.transfer(tx.refs(number)[0], memory(progress=give_up))
            await attempt.run(partial(end.run_transfer, transfer))
        await settled_tasks()
        states = [one.verdict.verdict for one in tx.record.servings.values()]
        assert states == [Verdict.FAILED, Verdict.PENDING]
        outcome = await tx.wait()
        assert outcome.settled_at == 150
        reasons = {name: next(iter(end.values())).reason for name, end in outcome.slots.items()}
        assert reasons == {"new": "cancelled: the receiver was cancelled", "old": "idle_timeout"}


# --- notice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["the receiver", "the source"])
async def test_a_neighbour_that_hears_no_notices_is_sent_none(lacks: str) -> None:
    """The owner of a dead source is told at once whom it cannot tell, and no frame is sent."""
    mine = WITHOUT_NOTICE if lacks == "the receiver" else tuple(Capability)
    theirs = WITHOUT_NOTICE if lacks == "the source" else tuple(Capability)
    async with ends("direct", receiver=mine, source=theirs) as e:
        before = anyio.current_time()
        told = await e.source.notify_failure(["server"], "site-1", ["r1"], "killed")
        assert anyio.current_time() == before
        assert told == {"server": "it hears no notices, or this end sends none"}
        assert e.receiver.statistics().downloads.known_dead == 0
        statistics = e.source.statistics().notifier
        assert (statistics.acknowledged, statistics.given_up) == (0, 1)


async def test_a_receiver_behind_others_that_hears_no_notices_says_so() -> None:
    """Nobody knows beforehand what a receiver behind a relay can do: it refuses, once, and is not asked again."""
    async with ends("below a relay", receiver=WITHOUT_NOTICE) as e:
        before = anyio.current_time()
        told = await e.source.notify_failure([e.receiver.address], "server", ["r1"], "killed")
        assert anyio.current_time() == before + 2 * e.way
        assert told == {"site-1.trainer": "refused"}
        assert all(end.links.live for end in (e.receiver, e.source))


@pytest.mark.parametrize("where", PLACES)
async def test_without_notices_a_dead_source_costs_the_retry_schedule(where: str) -> None:
    """A receiver that hears no notices gives a silent source up after its own schedule, with the true reason."""
    gate = Gate()
    async with ends(where, receiver=WITHOUT_NOTICE) as e:
        tx = e.publish(ComputedSource(5 * MIB, not_the_first(gate)))
        ref = tx.refs(0)[0]
        attempt = Attempt()
        async with tasks(gate) as group:
            transfer = e.receiver.transfer(ref, memory())
            group.start_soon(attempt.run, partial(e.receiver.run_transfer, transfer))
            await gate.reached()
            hung_at = anyio.current_time()
            told = await e.source.notify_failure(
                [e.receiver.address], e.source.address, [ref.id], "killed"
            )
            assert all(told.values())
            await attempt.over.wait()
            gate.open()
        assert isinstance(attempt.error, TransferTimeoutError)
        assert 94 - 2 * e.way <= attempt.ended - hung_at <= 94  # the last chunk came before that
        assert e.receiver.statistics().downloads.ended == {End.TIMED_OUT: 1}
        tx.cancel()


async def test_without_notices_a_trainer_that_is_gone_costs_the_grace() -> None:
    """A trainer whose link is gone behind a relay is given up 30 s after the relay has said so."""
    async with ends("behind a relay", receiver=WITHOUT_NOTICE, latency=0.25) as e:
        network = e.world.network
        network.conditions("site-1.trainer", "site-1").set(bandwidth=MIB)
        tx = e.publish(ComputedSource(9 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            transfer = e.receiver.transfer(tx.refs(0)[0], memory())
            group.start_soon(attempt.run, partial(e.receiver.run_transfer, transfer))
            await anyio.sleep(7)
            cut_at = anyio.current_time()
            network.cut("site-1", "site-1.trainer")
        assert isinstance(attempt.error, SourceLostError)
        assert attempt.ended - cut_at == 0.25 + 30
        network.mend("site-1", "site-1.trainer")
        tx.cancel()


async def test_a_peer_that_answers_no_notice_is_told_four_times() -> None:
    """A peer behind others that leaves notices unanswered gets four, and is reported after ten seconds."""
    async with world(sites=0) as w, puppet(w.network) as site:
        told: list[object] = []

        async def tell() -> None:
            told.append(await w.server.notify_failure(["site-1.t0"], "server", ["r1"], "killed"))

        async with tasks() as group:
            group.start_soon(tell)
            at = []
            for _ in range(4):
                await site.next(Notice)
                at.append(anyio.current_time())
        assert at == [0, 2.25, 4.75, 7.75]
        assert anyio.current_time() == 10
        assert told == [{"site-1.t0": "no answer to 4 attempts"}]
