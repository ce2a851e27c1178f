"""Trees between two endpoints: everything arrives as it was sent, wherever it lands and however it is mixed."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from streamoff.errors import (
    GoneError,
    JobClosedError,
    LimitError,
    SourceChangedError,
    UnreachableError,
    UnsupportedTensorError,
    UsageError,
)
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Endpoint
from streamoff.runtime.jobs import Job, open_job
from streamoff.runtime.messages import MAX_UNACKED
from streamoff.tensors.lazy import LazyTensor
from streamoff.tensors.sources import StateDictSource
from streamoff.testing.virtual import run_virtual
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, OutcomeStatus

from ..soon import soon
from ..tensors.helpers import DTYPES, random_bits, same
from .helpers import (
    TOPIC,
    Pair,
    Picky,
    alike,
    assert_idle,
    connected,
    exchanged,
    received,
    tensors_of,
)
from .test_body import KEYS, PLAIN

pytestmark = pytest.mark.usefixtures("no_leaks")


def concrete(tree: Any) -> Any:
    """Materialise the lazy tensors of a tree."""
    if isinstance(tree, LazyTensor):
        return tree.materialize()
    if isinstance(tree, dict):
        return {key: concrete(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(concrete, tree))
    return tree


def lazies_in(tree: Any) -> Iterator[LazyTensor]:
    """The lazy tensors of a tree."""
    if isinstance(tree, LazyTensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from lazies_in(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from lazies_in(item)


# --- what arrives ---------------------------------------------------------------------------------

NAN_PAYLOADS = torch.tensor(
    [0x7F81, -0x7F, 0x7FFF, -1, 1, -0x8000, 0x0001, 0x7F80], dtype=torch.int16
)


def adam_state() -> dict[str, Any]:
    """The state of an optimiser: 0-dim steps of two dtypes, low precision, plain groups."""
    return {
        "state": {
            0: {
                "step": torch.tensor(7, dtype=torch.int64),
                "exp_avg": torch.full((3, 2), 0.1, dtype=torch.bfloat16),
                "exp_avg_sq": torch.ones(3, 2),
            },
            1: {"step": torch.tensor(7.0), "exp_avg": torch.zeros(4, dtype=torch.bfloat16)},
        },
        "param_groups": [
            {
                "lr": 1e-3,
                "betas": (0.9, 0.999),
                "amsgrad": False,
                "maximize": None,
                "params": [0, 1],
            }
        ],
    }


CASES: dict[str, Any] = {
    "no tensors": {"epoch": 3, "name": "x", "nested": {"list": [1, None, 2.5]}},
    "plain leaves beside tensors": {
        "epoch": 3,
        "lr": 1e-3,
        "name": "resnet",
        "none": None,
        "list": [1, 2],
        "nested": {"x": {"y": (True, b"b")}},
        "w": torch.ones(3),
    },
    "an optimiser's state": adam_state(),
    "a tensor alone": torch.arange(3),
    "an array alone": np.arange(3),
    "a module's state dict": OrderedDict(torch.nn.Linear(2, 3).state_dict()),
    "0-dim": {"step": torch.tensor(3), "loss": torch.tensor(1.5, dtype=torch.float64)},
    "empty tensors": {"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(2, 0, 3)},
    "empty arrays": [np.empty(0), np.empty((2, 0, 3), np.int8)],
    "bf16 bits": {
        "w": NAN_PAYLOADS.view(torch.bfloat16),
        "s": NAN_PAYLOADS[0].view(torch.bfloat16),
    },
    "every dtype": {name: random_bits(name, (3, 2), index) for index, name in enumerate(DTYPES)},
    "views": {
        "t": torch.arange(6.0).reshape(2, 3).T,
        "s": torch.arange(9)[::2],
        "e": torch.ones(1).expand(4),
    },
    "dataclasses and tuples": {"p": Pair((torch.ones(1), [np.ones(2)]), Pair(torch.zeros(2)))},
    "odd names": {
        "": torch.ones(1),
        "../x": torch.ones(2),
        "a\0b": torch.ones(3),
        "é😀": torch.ones(4),
    },
}


@pytest.mark.parametrize("name", CASES)
async def test_trees_land_in_memory(name: str) -> None:
    """Tensors, arrays and plain values arrive with their types and bits, in the places they had."""
    arrived, outcome = await exchanged(CASES[name])
    assert alike(CASES[name], arrived)
    assert outcome.status is OutcomeStatus.COMPLETED


@pytest.mark.parametrize("name", CASES)
async def test_trees_land_on_disk(name: str, tmp_path: Path) -> None:
    """On disk every tensor is lazy, every array is in memory, and the bits are the same."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        message, delivery = await received(site, server, CASES[name])
        arrived = await message.decode(DecodeContext(tensors="disk", job=job))
        if name not in {
            "no tensors",
            "an array alone",
            "empty arrays",
            "dataclasses and tuples",
        }:
            assert list(lazies_in(arrived))
        if name != "dataclasses and tuples":
            assert alike(CASES[name], concrete(arrived))
        await delivery.wait()


async def test_sets_of_tensors() -> None:
    """Tensors in a set arrive in a set."""
    tree = {"s": {torch.tensor(1), torch.tensor(2)}, "f": frozenset({torch.tensor(3)})}
    arrived, _ = await exchanged(tree)
    assert {int(one) for one in arrived["s"]} == {1, 2}
    assert type(arrived["f"]) is frozenset


async def test_tied_tensors_travel_once() -> None:
    """Two keys with the same tensor are sent once, and both arrive, equal."""
    weight = torch.arange(250_000, dtype=torch.float32)
    tree = {"embed": weight, "head": weight, "view": weight.detach()}
    arrived, outcome = await exchanged(tree)
    assert alike(tree, arrived)
    (end,) = outcome.slots["server"].values()
    assert end.nbytes < 1.1 * weight.nbytes


async def test_tensors_of_a_message_are_one_payload_and_arrays_another() -> None:
    """However many tensors a tree has, they are pulled as one."""
    _, outcome = await exchanged({**tensors_of(50), "arrays": [np.ones(1), np.ones(2)]})
    assert len(outcome.slots["server"]) == 2


async def test_foreign_lazy_tensors_are_sent() -> None:
    """An object that is not ours and has materialize() arrives as the tensor it makes."""

    class Foreign:
        def materialize(self) -> torch.Tensor:
            return torch.full((2,), 42.0)

    arrived, _ = await exchanged([Foreign(), torch.zeros(1)])
    assert alike([torch.full((2,), 42.0), torch.zeros(1)], arrived)


KINDS = ("lazy", "concrete", "kept", "array", "source")


@pytest.mark.parametrize("order", list(itertools.permutations(KINDS))[::11], ids="-".join)
async def test_a_tree_of_everything_in_any_order(order: tuple[str, ...], tmp_path: Path) -> None:
    """Lazy, concrete, kept, computed tensors and arrays under the same names keep their own values."""
    async with (
        connected("site-1", "site-2") as (server, one, two),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        first, _ = await received(one, server, {"w": torch.full((3,), 1.0), "v": torch.zeros(1)})
        lazy = await first.decode(DecodeContext(tensors="disk", job=job))
        held, source_delivery = await received(
            one, server, {"w": torch.full((3,), 3.0)}, receivers=[None]
        )
        values = {
            "lazy": {"w": lazy["w"]},
            "concrete": {"w": torch.full((3,), 2.0)},
            "kept": {"w": held.tree["w"]},
            "array": {"w": np.full(3, 4, np.float32)},
            "source": StateDictSource({"w": torch.full((3,), 5.0)}),
        }
        message, delivery = await received(server, two, {kind: values[kind] for kind in order})
        assert message.tree["kept"]["w"].ref == held.tree["w"].ref
        arrived = await message.decode()
        for number, kind in enumerate(("lazy", "concrete", "kept", "array", "source"), 1):
            assert float(arrived[kind]["w"].sum()) == 3 * number, kind
        assert list(arrived) == list(order)
        assert isinstance(arrived["array"]["w"], np.ndarray)
        assert (await delivery.wait()).status is OutcomeStatus.COMPLETED
        assert (await source_delivery.wait()).status is OutcomeStatus.COMPLETED


TENSORS = st.builds(
    random_bits,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 1000),
)
ARRAYS = st.builds(
    lambda kind, shape, byte: np.full(shape, byte).astype(kind),
    st.sampled_from(["?", "<i2", ">i4", "u8", "f2", ">f8", "c8"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 100),
)
TREES = st.recursive(
    PLAIN | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.builds(Pair, inner, inner)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_any_tree(backend: Any) -> None:
    """Whatever a tree is made of, it arrives at another endpoint as it was sent."""

    @given(TREES)
    @settings(max_examples=25, deadline=None)
    def check(tree: Any) -> None:
        arrived, outcome = run_virtual(exchanged, tree, backend=backend)
        assert alike(tree, arrived)
        assert outcome.status is OutcomeStatus.COMPLETED

    check()


# --- where it lands -------------------------------------------------------------------------------


async def test_one_call_does_not_change_another(tmp_path: Path) -> None:
    """Where tensors land is the call's choice: side by side, one is decoded to disk and one to memory."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        found: dict[str, Any] = {}
        one, first = await received(site, server, tensors_of(2))
        two, second = await received(site, server, tensors_of(2))

        async def decode(name: str, message: Any, context: DecodeContext) -> None:
            found[name] = await message.decode(context)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(decode, "disk", one, DecodeContext(tensors="disk", job=job))
            tasks.start_soon(decode, "memory", two, DecodeContext())
        assert all(isinstance(item, LazyTensor) for item in found["disk"].values())
        assert all(isinstance(item, torch.Tensor) for item in found["memory"].values())
        await first.wait()
        await second.wait()


async def test_no_job_is_memory_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Without an open job, tensors that were to land on disk land in memory, and the log says so once."""
    with caplog.at_level(logging.WARNING, "streamoff.payload"):
        async with connected("site-1") as (server, site):
            for _ in range(3):
                message, delivery = await received(site, server, tensors_of(1))
                arrived = await message.decode(DecodeContext(tensors="disk"))
                assert same(arrived["w0"], tensors_of(1)["w0"])
                await delivery.wait()
    warnings = [record for record in caplog.records if "there is no open job" in record.message]
    assert len(warnings) == 1


async def test_what_nobody_pulls_within_the_drain_window_is_gone(tmp_path: Path) -> None:
    """A transaction that serves files of a root has the drain window, and no longer: then its refs are gone."""
    net = MemoryNetwork()
    tree = {"w": torch.randn(MIB)}
    async with connected("site-1", net=net) as (server, site):
        async with open_job("job", server, scratch=tmp_path, drain_window=5.0) as job:
            lazy = await _landed(site, server, job, tree)
            net.conditions("server", "site-1").set(bandwidth=2 * MIB)  # two seconds
            message, delivery = await received(server, site, lazy)
            del lazy
        # the body has been left: what is served is still served, and no longer than the window
        assert delivery.outcome is not None
        assert delivery.outcome.status is OutcomeStatus.ABORTED
        with pytest.raises(GoneError):
            await message.decode()


async def _landed(sender: Endpoint, receiver: Endpoint, job: Job, tree: Any) -> Any:
    message, delivery = await received(sender, receiver, tree)
    arrived = await message.decode(DecodeContext(tensors="disk", job=job))
    await delivery.wait()
    return arrived


async def test_a_pull_within_the_drain_window_succeeds(tmp_path: Path) -> None:
    """A receiver that is pulling from a file of a root when its job ends gets all of it."""
    net = MemoryNetwork()
    tree = {"w": torch.randn(MIB)}
    found: dict[str, Any] = {}
    async with connected("site-1", net=net) as (server, site), anyio.create_task_group() as tasks:
        async with open_job("job", server, scratch=tmp_path, drain_window=5.0) as job:
            lazy = await _landed(site, server, job, tree)
            net.conditions("server", "site-1").set(bandwidth=2 * MIB)
            message, delivery = await received(server, site, lazy)

            async def pull() -> None:
                found.update(await message.decode())

            tasks.start_soon(pull)
            await anyio.sleep(0.5)
        assert job.report.removed
        assert 1.0 < job.report.drain_seconds < 5.0
        assert (await delivery.wait()).status is OutcomeStatus.COMPLETED
    assert alike(tree, found)


async def test_lazies_of_a_closed_job_are_refused(tmp_path: Path) -> None:
    """Sending a lazy tensor whose job is over fails before anything is sent."""
    async with connected("site-1") as (server, site):
        async with open_job("job", server, scratch=tmp_path) as job:
            lazy = await _landed(site, server, job, tensors_of(1))
        with pytest.raises(JobClosedError), site.receive(TOPIC):
            await server.send("site-1", TOPIC, lazy)


# --- sending --------------------------------------------------------------------------------------


async def test_a_tensor_that_changes_is_noticed() -> None:
    """A borrowed tensor that changes before it is pulled fails the transfer, by type, at both ends."""
    async with connected("site-1") as (server, site):
        weight = torch.ones(3)
        message, delivery = await received(site, server, {"w": weight})
        weight.add_(1)
        with pytest.raises(SourceChangedError) as caught:
            await message.decode()
        assert caught.value.where["site"] == "site-1"
        outcome = await delivery.wait()
        assert outcome.reason.startswith("source_changed")


async def test_a_tensor_may_change_when_the_delivery_has_settled() -> None:
    """After the outcome the tensors are the sender's again, and what arrived stays."""
    async with connected("site-1") as (server, site):
        weight = torch.ones(3)
        message, delivery = await received(site, server, {"w": weight})
        arrived = await message.decode()
        await delivery.wait()
        weight.add_(1)
        assert same(arrived["w"], torch.ones(3))


async def test_each_target_has_a_ticket_of_its_own() -> None:
    """Copies of one message differ in their tickets, and each receiver pulls all of it."""
    async with connected("site-1", "site-2") as (server, one, two):
        with one.receive(TOPIC) as first, two.receive(TOPIC) as second:
            delivery = await server.send(["site-1", "site-2"], TOPIC, tensors_of(2))
            messages = [await anext(first), await anext(second)]
            tickets = {message.tree["w0"].ref.ticket for message in messages}
            assert len(tickets) == 2
            for message in messages:
                assert alike(dict(tensors_of(2)), await message.decode())
        outcome = await delivery.wait()
        assert set(outcome.succeeded) == {"site-1", "site-2"}


async def test_nothing_is_sent_if_one_target_cannot_be_reached() -> None:
    """A target without a way fails the whole send before anybody gets a message; nothing stays open."""
    async with connected("site-1") as (server, site):
        source = StateDictSource(tensors_of(1))
        with site.receive(TOPIC) as box:
            with pytest.raises(UnreachableError):
                await server.send(["site-1", "ghost"], TOPIC, {"a": torch.ones(1), "s": source})
            assert_idle(server)
            with anyio.move_on_after(60) as scope:
                await anext(box)
            assert scope.cancelled_caught


async def test_a_post_that_fails_for_the_second_target_takes_the_first_back() -> None:
    """When there is no room for one more message, the targets before it get none either."""
    net = MemoryNetwork()
    async with connected("site-1", net=net) as (server, site):
        net.partition("server", "site-1")
        waiting = [await server.send("site-1", TOPIC, index) for index in range(MAX_UNACKED - 1)]
        source = StateDictSource(tensors_of(1))
        async with Endpoint("site-3", transports=[net]) as third:
            await third.connect("server")
            with third.receive(TOPIC) as box:
                with pytest.raises(LimitError, match="unacknowledged"):
                    await server.send(["site-3", "site-1"], TOPIC, source)
                assert server.statistics().publisher.open == 0
                assert server.statistics().mailbox.unacked == MAX_UNACKED - 1
                with pytest.raises(JobClosedError):
                    source.check()
                for delivery in waiting:
                    delivery.cancel()
                assert_idle(server)
                del box
        with site.receive(TOPIC):
            net.heal("server", "site-1")
            await anyio.sleep(1)


async def test_a_failed_send_gives_its_sources_back(tmp_path: Path) -> None:
    """Whatever a send fails on, the tensors, files and sources that it had borrowed are let go."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        lazy = await _landed(site, server, job, tensors_of(1))
        tree = {"lazy": lazy, "own": torch.ones(2)}
        with pytest.raises(UsageError):
            await server.send("site-1", TOPIC, tree, min_receivers=2)
        with pytest.raises(UsageError):
            await server.send("site-1", TOPIC, tree, receivers=["site-1", "site-2"])
        with pytest.raises(UsageError):
            await server.send("site-1", "", tree)
        with pytest.raises(UnsupportedTensorError):
            await server.send("site-1", TOPIC, {**tree, "bad": torch.zeros(1, device="meta")})
        assert_idle(server)
        del lazy, tree
        assert soon(lambda: job.ledger.used == 0)


@pytest.mark.parametrize("to", [[], ["site-1", "site-1"], ["no address!"]], ids=str)
async def test_targets_are_checked(to: list[str]) -> None:
    """No target, one target twice, or no address: refused."""
    async with connected("site-1") as (server, _):
        with pytest.raises(UsageError):
            await server.send(to, TOPIC, 1)


async def test_a_message_nobody_reads_fails_its_slot_at_once() -> None:
    """A target without a reader for the topic costs no budget: the verdict comes with its refusal."""
    async with connected("site-1") as (server, _):
        delivery = await server.send("site-1", "unheard", tensors_of(1))
        before = anyio.current_time()
        outcome = await delivery.wait()
        assert anyio.current_time() - before < 1
        (end,) = outcome.slots["site-1"].values()
        assert "nobody reads 'unheard'" in end.reason


async def test_a_message_that_cannot_be_decoded_is_declined() -> None:
    """A receiver that does not know a dataclass says so at once, and reads on."""
    net = MemoryNetwork()
    async with (
        Endpoint("server", transports=[net]) as server,
        Endpoint("site-1", transports=[net], dataclasses=[Picky]) as site,
    ):
        await site.connect("server")
        with server.receive(TOPIC) as box:
            before = anyio.current_time()
            delivery = await site.send("server", TOPIC, [torch.ones(1), Picky(1)])
            await site.send("server", TOPIC, "the next one")
            assert (await anext(box)).tree == "the next one"
            outcome = await delivery.wait()
            assert anyio.current_time() - before < 1
            (end,) = outcome.slots["server"].values()
            assert "not understood" in end.reason
        await anyio.sleep(1)
        assert_idle(site)


async def test_declining_fails_the_slot_with_its_reason() -> None:
    """A receiver that will not pull says why, and the sender knows at once."""
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, tensors_of(1))
        message.decline("too late")
        outcome = await delivery.wait()
        (end,) = outcome.slots["server"].values()
        assert "too late" in end.reason


async def test_dataclasses_are_registered_once() -> None:
    """What is no dataclass, or has the name of another, is refused where the endpoint is made."""
    with pytest.raises(UsageError, match="not a dataclass"):
        Endpoint("a", dataclasses=[int])
    with pytest.raises(UsageError, match="one name"):
        Endpoint("a", dataclasses=[Pair, Pair])
