"""Deliveries: a message is repeated until it is acknowledged, and never after its delivery has ended."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from streamoff.errors import TransferTimeoutError, UsageError
from streamoff.payload.endpoint import Messages
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import Budgets, Outcome, OutcomeStatus, Verdict

from .helpers import TOPIC, alike, assert_idle, connected, tensors_of

pytestmark = pytest.mark.usefixtures("no_leaks")


async def arrives_nothing(box: Messages) -> bool:
    """Whether nothing arrives within a minute."""
    with anyio.move_on_after(60) as scope:
        await anext(box)
    return scope.cancelled_caught


@pytest.mark.parametrize("what", ["message", "acknowledgement"])
async def test_a_message_survives_its_link_and_arrives_once(what: str) -> None:
    """A link that is lost under a message, or under its acknowledgement, costs nothing but time."""
    net = MemoryNetwork(latency=0.5)
    async with connected("site-1", net=net) as (server, site):
        with server.receive(TOPIC) as box:
            delivery = await site.send("server", TOPIC, dict(tensors_of(2)))
            await anyio.sleep(0.25 if what == "message" else 0.75)
            net.cut("site-1", "server")
            await anyio.sleep(1)
            net.mend("site-1", "server")
            message = await anext(box)
            assert await arrives_nothing(box)
            assert alike(dict(tensors_of(2)), await message.decode())
            assert (await delivery.wait()).status is OutcomeStatus.COMPLETED


async def test_a_cancelled_message_is_not_repeated() -> None:
    """After cancel() nobody gets a message whose tensors nobody could pull."""
    net = MemoryNetwork(latency=0.5)
    async with connected("site-1", net=net) as (server, site):
        with server.receive(TOPIC) as box:
            for tree in (dict(tensors_of(1)), "no tensors"):
                delivery = await site.send("server", TOPIC, tree)
                net.cut("site-1", "server")
                delivery.cancel("changed my mind")
                assert_idle(site)
                outcome = await delivery.wait()
                assert outcome.status is OutcomeStatus.ABORTED
                assert "changed my mind" in outcome.reason
                net.mend("site-1", "server")
                assert await arrives_nothing(box)


async def test_a_message_whose_transaction_expired_is_not_repeated() -> None:
    """When the acquire budget has ended a delivery, a receiver that comes back late gets no dead message."""
    net = MemoryNetwork(latency=0.5)
    async with connected("site-1", net=net) as (server, site):
        with server.receive(TOPIC) as box:
            delivery = await site.send("server", TOPIC, dict(tensors_of(1)))
            net.cut("site-1", "server")
            outcome = await delivery.wait()
            assert outcome.status is OutcomeStatus.FAILED
            assert_idle(site)
            net.mend("site-1", "server")
            assert await arrives_nothing(box)


async def test_a_message_without_tensors_settles_when_it_is_acknowledged() -> None:
    """The outcome of a plain message says who has it; it is made once."""
    async with connected("site-1", "site-2") as (server, one, two):
        with one.receive(TOPIC):
            delivery = await server.send(["site-1", "site-2"], TOPIC, "hello")
            before = delivery.outcome
            outcome = await delivery.wait()
            assert (before, delivery.outcome) == (None, outcome)
        assert outcome.status is OutcomeStatus.FAILED
        assert outcome.slots["site-1"]["message"].verdict is Verdict.SUCCEEDED
        assert "nobody reads" in outcome.slots["site-2"]["message"].reason
        delivery.cancel("too late to matter")
        assert delivery.outcome is outcome
        assert two.statistics().mailbox.queued == 0


async def test_the_outcome_of_a_message_is_the_same_kind_of_thing_without_tensors() -> None:
    """With tensors or without, an outcome has the quorum view that was asked for, and cannot be changed."""
    async with connected("site-1", "site-2") as (server, one, two):
        for tree in (dict(tensors_of(1)), "hello"):
            for impossible in (0, 3, 1.5):
                with pytest.raises(UsageError, match="min_receivers"):
                    await server.send(["site-1", "site-2"], TOPIC, tree, min_receivers=impossible)  # type: ignore[arg-type]
            for enough in (1, 2):
                with one.receive(TOPIC) as box:
                    delivery = await server.send(
                        ["site-1", "site-2"], TOPIC, tree, min_receivers=enough
                    )
                    await (await anext(box)).decode()
                    outcome = await delivery.wait()
                assert (outcome.status, outcome.quorum) == (OutcomeStatus.FAILED, enough == 1)
                with pytest.raises(TypeError):
                    outcome.slots["site-1"] = {}  # type: ignore[index]
                with pytest.raises(TypeError):
                    outcome.slots["site-1"]["message"] = None  # type: ignore[index]
        assert_idle(server)
        assert two.statistics().mailbox.queued == 0


async def test_callbacks_of_a_send_get_its_outcome() -> None:
    """Each callback is called once, in order, when the delivery settles: also when nobody takes the tensors."""
    told: list[tuple[str, Outcome]] = []

    def callback(name: str, outcome: Outcome) -> None:
        told.append((name, outcome))

    callbacks = (partial(callback, "first"), partial(callback, "second"))
    async with connected("site-1") as (server, site):
        with server.receive(TOPIC) as box:
            taken = await site.send("server", TOPIC, dict(tensors_of(2)), on_settled=callbacks)
            message = await anext(box)
            assert told == []
            await message.decode()
            outcome = await taken.wait()
            assert told == [("first", outcome), ("second", outcome)]
            told.clear()
            expired = await site.send("server", TOPIC, dict(tensors_of(1)), on_settled=callbacks)
            outcome = await expired.wait()
            assert outcome.reason == "acquire_timeout"
            assert told == [("first", outcome), ("second", outcome)]


async def test_a_message_without_tensors_is_waited_for_no_longer_than_acquire() -> None:
    """A receiver that does not answer is a timeout, and the message is withdrawn."""
    net = MemoryNetwork()
    async with connected("site-1", net=net) as (server, site):
        with server.receive(TOPIC) as box:
            net.partition("site-1", "server")
            delivery = await site.send("server", TOPIC, "hello", budgets=Budgets(acquire=7.0))
            start = anyio.current_time()
            with pytest.raises(TransferTimeoutError, match="nothing from server"):
                await delivery.wait()
            assert anyio.current_time() - start == 7.0
            assert delivery.outcome is not None
            assert delivery.outcome.status is OutcomeStatus.FAILED
            assert_idle(site)
            del box
            net.heal("site-1", "server")


async def test_waiting_can_be_cancelled() -> None:
    """Giving up the wait leaves the delivery as it is."""
    async with connected("site-1") as (server, site):
        with server.receive(TOPIC) as box:
            delivery = await site.send("server", TOPIC, dict(tensors_of(1)))
            with anyio.move_on_after(1):
                await delivery.wait()
            assert delivery.outcome is None
            assert alike(dict(tensors_of(1)), await (await anext(box)).decode())
            assert (await delivery.wait()).status is OutcomeStatus.COMPLETED


async def test_iteration_can_be_left_and_taken_up_again() -> None:
    """A cancelled wait for a message loses none, and a reader that leaves makes room for another."""
    async with connected("site-1") as (server, site):
        with server.receive(TOPIC) as box:
            with anyio.move_on_after(1):
                await anext(box)
            for number in range(3):
                await (await site.send("server", TOPIC, number)).wait()
            async for message in box:
                if message.tree == 1:
                    break
        with server.receive(TOPIC) as box:
            delivery = await site.send("server", TOPIC, 4)
            assert (await anext(box)).tree == 4
            await delivery.wait()
