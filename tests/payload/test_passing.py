"""Passing refs on: kept for one hop, the same ref again, one consumer, and only sources that may be named."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
import torch

from streamoff.errors import PeerRefusedError, SingleConsumerError, UsageError
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Endpoint
from streamoff.payload.leaves import Batch, TensorRef
from streamoff.payload.resolve import resolve, whole_state
from streamoff.payload.tree import leaves
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import OutcomeStatus

from ..soon import soon
from .helpers import TOPIC, alike, assert_idle, connected, received, tensors_of

pytestmark = pytest.mark.usefixtures("no_leaks")


@asynccontextmanager
async def with_trainer(net: MemoryNetwork) -> AsyncIterator[list[Endpoint]]:
    """A server, a site, and a trainer below the site that has a link of its own to the server."""
    async with (
        connected("site-1", net=net) as (server, site),
        Endpoint("site-1.trainer", transports=[net]) as trainer,
    ):
        await trainer.connect("site-1")
        await trainer.connect("server")
        yield [server, site, trainer]
        await anyio.sleep(1)
        assert_idle(trainer)


def refs_of(tree: Any) -> set[Any]:
    """The refs of all leaves."""
    return {leaf.ref for _, leaf in leaves(tree)}


async def test_a_ref_is_kept_for_one_hop_and_passed_on_as_it_is() -> None:
    """The next endpoint keeps the refs; the one after it gets the very same and pulls from the source."""
    async with with_trainer(MemoryNetwork()) as (server, site, trainer):
        tree = {"params": dict(tensors_of(2)), "round": 3}
        message, delivery = await received(server, site, tree, pass_through=True)
        assert message.pass_through
        kept = await message.decode()
        assert kept is message.tree
        assert site.statistics().publisher.open == 0

        onward, passed = await received(site, trainer, {"task": kept})
        assert not onward.pass_through
        assert refs_of(onward.tree) == refs_of(kept)
        assert (passed.transaction, site.statistics().publisher.open) == (None, 0)
        assert alike({"task": tree}, await onward.decode())
        assert (await passed.wait()).status is OutcomeStatus.COMPLETED
        outcome = await delivery.wait()
        assert outcome.status is OutcomeStatus.COMPLETED
        assert server.statistics().publisher.completed == 1


async def test_two_consumers_behind_one_relay_have_a_copy_each() -> None:
    """Sent once for each consumer, a model is let go with the last confirmation, round after round."""
    net = MemoryNetwork(latency=0.1)
    async with connected("site-1", net=net) as (server, site), AsyncExitStack() as stack:
        trainers = []
        for name in ("site-1.t0", "site-1.t1"):
            trainer = await stack.enter_async_context(Endpoint(name, transports=[net]))
            await trainer.connect("site-1")
            trainers.append(trainer)
        boxes = [stack.enter_context(one.receive(TOPIC)) for one in trainers]
        box = stack.enter_context(site.receive(TOPIC))
        held: list[weakref.ref[torch.Tensor]] = []
        for _ in range(6):
            tree = dict(tensors_of(3))
            held.extend(weakref.ref(tensor) for tensor in tree.values())
            deliveries = [
                await server.send("site-1", TOPIC, tree, receivers=[one.address], pass_through=True)
                for one in trainers
            ]
            del tree
            for trainer in trainers:
                await site.send(trainer.address, TOPIC, (await anext(box)).tree)
            for inbox, delivery in zip(boxes, deliveries, strict=True):
                await (await anext(inbox)).decode()
                assert (await delivery.wait()).status is OutcomeStatus.COMPLETED
            assert soon(lambda: not any(reference() is not None for reference in held))
            assert server.statistics().publisher.open == 0
        assert site.statistics().relay.bytes_forwarded > 0
        assert site.statistics().downloads.ended == {}
        await anyio.sleep(1)


async def test_the_mark_is_for_one_hop() -> None:
    """Without the mark on its own message, what the second endpoint sends is decoded where it arrives."""
    async with with_trainer(MemoryNetwork()) as (server, site, trainer):
        message, delivery = await received(server, site, tensors_of(1), pass_through=True)
        onward, _ = await received(site, trainer, message.tree, pass_through=True)
        assert onward.pass_through
        assert isinstance((await onward.decode())["w0"], TensorRef)
        assert alike(dict(tensors_of(1)), await onward.resolve(DecodeContext()))
        await delivery.wait()


async def test_a_kept_ref_can_be_resolved_after_all() -> None:
    """The endpoint that was asked to keep refs may end them itself."""
    async with connected("site-1") as (server, site):
        message, delivery = await received(server, site, tensors_of(2), pass_through=True)
        tree = await message.decode()
        arrived = await resolve(tree, DecodeContext(endpoint=site))
        assert alike(dict(tensors_of(2)), arrived)
        assert (await delivery.wait()).status is OutcomeStatus.COMPLETED


async def test_part_of_a_message_is_passed_on() -> None:
    """Who passes on only some of the leaves of a ref makes its consumer pull only those."""
    async with with_trainer(MemoryNetwork()) as (server, site, trainer):
        tree = {"large": torch.ones(100_000), "small": torch.ones(10)}
        message, delivery = await received(server, site, tree, pass_through=True)
        onward, _ = await received(site, trainer, [message.tree["small"]])
        assert alike([tree["small"]], await onward.decode())
        (end,) = (await delivery.wait()).slots.values()
        (verdict,) = end.values()
        assert verdict.nbytes < 10_000


async def test_passing_on_is_consuming() -> None:
    """A ref that was passed on has its consumer: it can be neither resolved here nor passed on again."""
    async with with_trainer(MemoryNetwork()) as (server, site, trainer):
        message, delivery = await received(server, site, tensors_of(1), pass_through=True)
        onward, _ = await received(site, trainer, message.tree)
        with pytest.raises(SingleConsumerError, match=r"passed on to site-1\.trainer"):
            await message.resolve(DecodeContext())
        with pytest.raises(SingleConsumerError, match=r"passed on to site-1\.trainer"):
            await site.send("site-1.trainer", TOPIC, message.tree)
        message.decline("not mine to decline any more")
        assert alike(dict(tensors_of(1)), await onward.decode())
        with pytest.raises(SingleConsumerError, match=r"after site-1\.trainer"):
            await onward.resolve(DecodeContext())
        assert (await delivery.wait()).status is OutcomeStatus.COMPLETED


async def test_a_resolved_ref_is_not_passed_on() -> None:
    """A ref that was pulled here is nobody else's, and the error says whose it was."""
    async with with_trainer(MemoryNetwork()) as (server, site, _):
        message, delivery = await received(server, site, tensors_of(1), pass_through=True)
        await message.resolve(DecodeContext())
        with pytest.raises(SingleConsumerError, match="after site-1") as caught:
            await site.send("site-1.trainer", TOPIC, message.tree)
        assert caught.value.where["site"] == "server"
        await delivery.wait()


async def test_a_kept_ref_goes_to_one_target() -> None:
    """A ref cannot be passed on to two: they would take each other's slot."""
    async with connected("site-1", "site-2", "site-3") as (server, one, two, three):
        message, delivery = await received(one, server, tensors_of(1), pass_through=True)
        with pytest.raises(SingleConsumerError, match="one target"):
            await server.send(["site-2", "site-3"], TOPIC, message.tree)
        assert two.statistics().mailbox.queued == three.statistics().mailbox.queued == 0
        assert alike(dict(tensors_of(1)), await message.resolve(DecodeContext()))
        await delivery.wait()


async def test_a_ref_comes_back_when_its_message_is_refused() -> None:
    """If the next endpoint does not take the message, the ref is free to be resolved or declined."""
    async with with_trainer(MemoryNetwork()) as (server, site, _):
        message, delivery = await received(server, site, tensors_of(1), pass_through=True)
        passed = await site.send("site-1.trainer", "unheard", message.tree)
        assert (await passed.wait()).status is OutcomeStatus.FAILED
        message.decline("the trainer is not there")
        (end,) = (await delivery.wait()).slots.values()
        (verdict,) = end.values()
        assert "the trainer is not there" in verdict.reason


async def test_a_slot_for_another_receiver() -> None:
    """With ``receivers`` the ticket is for who will pull, and for nobody on the way."""
    async with with_trainer(MemoryNetwork()) as (server, site, trainer):
        message, delivery = await received(
            server, site, tensors_of(1), receivers=["site-1.trainer"], pass_through=True
        )
        onward, _ = await received(site, trainer, message.tree)
        assert alike(dict(tensors_of(1)), await onward.decode())
        assert set((await delivery.wait()).slots) == {"site-1.trainer"}


async def test_a_ticket_for_another_is_refused() -> None:
    """An endpoint on the way cannot pull what was meant for the next."""
    async with with_trainer(MemoryNetwork()) as (server, site, _):
        message, delivery = await received(
            server, site, tensors_of(1), receivers=["site-1.trainer"]
        )
        with pytest.raises(PeerRefusedError, match="not your ticket"):
            await message.decode()
        delivery.cancel("nobody came")
        await delivery.wait()


async def test_receivers_are_one_per_target() -> None:
    """Another number of receivers than targets is a mistake; nothing is sent."""
    async with connected("site-1") as (server, site):
        with pytest.raises(UsageError, match="one per target"):
            await server.send("site-1", TOPIC, tensors_of(1), receivers=["a", "b"])
        assert site.statistics().mailbox.queued == 0


async def test_a_source_that_the_sender_may_not_name_is_not_spoken_to() -> None:
    """A message may not make its receiver pull from, or say anything to, a stranger's source."""
    async with connected("site-1", "site-2") as (server, one, two):
        honest, delivery = await received(two, server, tensors_of(1))
        stolen = honest.tree["w0"].ref
        forged = {"ok": torch.ones(1), "w0": TensorRef(Batch(stolen), "w0")}
        message, forged_delivery = await received(one, server, forged)
        assert whole_state({"w0": message.tree["w0"]}) is not None
        with pytest.raises(PeerRefusedError, match="may not speak for") as caught:
            await message.decode()
        assert "site-2" in str(caught.value)
        message.decline("no")
        await anyio.sleep(1)
        assert delivery.outcome is None
        assert alike(dict(tensors_of(1)), await honest.decode())
        assert (await delivery.wait()).status is OutcomeStatus.COMPLETED
        (end,) = (await forged_delivery.wait()).slots["server"].values()
        assert "declined: no" in end.reason


async def test_whole_state_is_all_or_nothing() -> None:
    """A flat dict is a whole state only while it has every leaf that the message had."""
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, {"a": torch.ones(1), "b": torch.ones(2)})
        batch = whole_state(message.tree)
        assert batch is not None
        assert batch.ref == message.tree["a"].ref
        assert whole_state({"a": message.tree["a"]}) is None
        assert whole_state({"renamed": message.tree["a"], "b": message.tree["b"]}) is None
        assert whole_state({**message.tree, "n": 1}) is None
        assert whole_state([message.tree]) is None
        assert whole_state({}) is None
        message.decline("only looking")
        await delivery.wait()
