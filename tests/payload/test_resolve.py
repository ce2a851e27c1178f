"""Ending refs: all or some, once, side by side; and what is left when it fails: nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from streamoff.errors import (
    GoneError,
    IntegrityError,
    JobClosedError,
    PeerRefusedError,
    QuotaExceededError,
    SingleConsumerError,
    SpecMismatchError,
    TransferError,
    UnsupportedValueError,
    UsageError,
)
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Endpoint
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.payload.resolve import resolve
from streamoff.runtime.jobs import open_job
from streamoff.tensors.layout import Layout
from streamoff.tensors.lazy import LazyTensor
from streamoff.tensors.sources import StateDictSource
from streamoff.tensors.views import Views
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, OutcomeStatus, Ref, Slot

from ..soon import soon
from ..tensors.helpers import same
from .helpers import alike, connected, received, tensors_of, until

pytestmark = pytest.mark.usefixtures("no_leaks")


def large_tensors() -> list[torch.Tensor]:
    """Tensors of a mebibyte and more that anything still holds."""
    return [
        one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.nbytes >= MIB
    ]


def verdicts(outcome: Any) -> Iterator[Any]:
    """The verdict of every slot on every ref."""
    for refs in outcome.slots.values():
        yield from refs.values()


# --- one consumer ---------------------------------------------------------------------------------


async def test_a_message_is_resolved_once() -> None:
    """A second consumer of the same leaves is refused, and says who was first."""
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, tensors_of(2))
        assert alike(dict(tensors_of(2)), await message.decode())
        for again in (message.tree, {"w1": message.tree["w1"]}):
            with pytest.raises(SingleConsumerError, match="server after server"):
                await resolve(again, DecodeContext(endpoint=server))
        assert (await delivery.wait()).status is OutcomeStatus.COMPLETED


async def test_two_consumers_at_once() -> None:
    """Of two tasks that resolve the same message, one gets it and the other is told, before any byte."""
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, tensors_of(2))
        ends: list[Any] = []

        async def consume() -> None:
            try:
                ends.append(await message.decode())
            except SingleConsumerError as error:
                ends.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            tasks.start_soon(consume)
        assert sorted(type(end).__name__ for end in ends) == ["SingleConsumerError", "dict"]
        await delivery.wait()


async def test_a_refused_resolve_takes_nothing() -> None:
    """When one ref of a tree has a consumer already, the others are left free."""
    async with connected("site-1") as (server, site):
        one, first = await received(site, server, tensors_of(1))
        two, second = await received(site, server, tensors_of(1))
        await one.decode()
        with pytest.raises(SingleConsumerError):
            await resolve([two.tree, one.tree], DecodeContext(endpoint=server))
        assert alike(dict(tensors_of(1)), await two.decode())
        await first.wait()
        await second.wait()


async def test_an_impossible_resolve_takes_nothing() -> None:
    """Without anybody to pull, or with names that are not there, the refs stay free."""
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, tensors_of(1))
        with pytest.raises(UsageError, match="nobody to pull"):
            await resolve(message.tree, DecodeContext())
        with pytest.raises(UsageError, match="no such tensors"):
            await message.decode(only=["w0", "w7"])
        with pytest.raises(UsageError, match="collection of names"):
            await message.decode(only="w0")
        assert alike(dict(tensors_of(1)), await message.decode(only=["w0"]))
        await delivery.wait()


# --- some of it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["names", "question", "subtree"])
@pytest.mark.parametrize("where", ["memory", "disk"])
async def test_part_of_a_tree(how: str, where: Any, tmp_path: Path) -> None:
    """Only what is asked for is pulled and landed; the rest of that ref cannot be had later."""
    tree = {
        "a": {"big": torch.ones(MIB)},
        "b": {"small": torch.ones(10), "x": torch.zeros(3)},
        "n": 1,
    }
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        context = DecodeContext(tensors=where, job=job)
        message, delivery = await received(site, server, tree)
        if how == "subtree":
            arrived = {**message.tree, "b": await resolve(message.tree["b"], context)}
        elif how == "names":
            arrived = await message.decode(context, only=["b/small", "b/x"])
        else:
            arrived = await message.decode(context, only=lambda leaf: leaf.name.startswith("b/"))
        small = arrived["b"]["small"]
        assert same(small.materialize() if where == "disk" else small, torch.ones(10))
        assert isinstance(arrived["a"]["big"], TensorRef)
        with pytest.raises(SingleConsumerError):
            await message.decode(context)
        outcome = await delivery.wait()
        (end,) = verdicts(outcome)
        assert end.nbytes < 10_000
        assert job.ledger.peak < 10_000


async def test_nothing_asked_for_is_nothing_done() -> None:
    """Asking for no leaf leaves the tree as it is, and free."""
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, tensors_of(1))
        assert await message.decode(only=[]) is message.tree
        assert await message.decode(only=lambda _: False) is message.tree
        assert alike(dict(tensors_of(1)), await message.decode())
        await delivery.wait()


async def test_refs_are_pulled_side_by_side() -> None:
    """The payloads of a message come at the same time, not one after the other."""
    net = MemoryNetwork()
    async with connected("site-1", "site-2", net=net) as (server, one, two):
        for site in ("site-1", "site-2"):
            net.conditions(site, "server").set(bandwidth=MIB)
        first, a = await received(one, server, {"w": torch.ones(MIB)})
        second, b = await received(two, server, {"w": torch.zeros(MIB)})
        before = anyio.current_time()
        arrived = await resolve([first.tree, second.tree], DecodeContext(endpoint=server))
        assert 4 <= anyio.current_time() - before < 6
        assert alike([{"w": torch.ones(MIB)}, {"w": torch.zeros(MIB)}], arrived)
        await a.wait()
        await b.wait()


async def test_arrays_land_in_memory(tmp_path: Path) -> None:
    """On a call to disk tensors are lazy and arrays are arrays."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        message, delivery = await received(site, server, {"t": torch.ones(2), "a": np.ones(2)})
        arrived = await message.decode(DecodeContext(tensors="disk", job=job))
        assert isinstance(arrived["t"], LazyTensor)
        assert alike(np.ones(2), arrived["a"])
        await delivery.wait()


async def test_a_payload_is_downloaded_by_its_ref(tmp_path: Path) -> None:
    """One payload is pulled as a whole or in part, to disk or memory, without a tree around it."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        for only in (None, ["w1"]):
            message, delivery = await received(site, server, tensors_of(3))
            ref = message.tree["w0"].ref
            with pytest.raises(UsageError, match="collection of names"):
                await server.download(ref, only="w1")
            state = await server.download(ref, DecodeContext(tensors="disk", job=job), only=only)
            assert set(state.layout.names) == set(only or tensors_of(3))
            assert same(state.tensor("w1"), tensors_of(3)["w1"])
            state.release()
            await delivery.wait()


# --- contexts -------------------------------------------------------------------------------------


async def test_a_context_is_checked() -> None:
    """Another destination, or the job of another endpoint than the one that shall pull, is a mistake."""
    with pytest.raises(UsageError, match="'memory' or 'disk'"):
        DecodeContext(tensors="gpu")  # type: ignore[arg-type]


async def test_the_job_of_another_endpoint(tmp_path: Path) -> None:
    """A context whose endpoint and job do not belong together is refused, and takes nothing."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", site, scratch=tmp_path) as job,
    ):
        message, delivery = await received(site, server, tensors_of(1))
        with pytest.raises(UsageError, match="another endpoint"):
            await message.decode(DecodeContext(endpoint=server, job=job))
        assert alike(dict(tensors_of(1)), await message.decode())
        await delivery.wait()


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("error", [SpecMismatchError, ValueError, KeyError])
async def test_a_layout_is_refused_before_anything_is_allocated(
    where: Any, error: type[Exception], tmp_path: Path
) -> None:
    """Whatever the check of a layout raises, the transfer ends typed, the source is told, nothing was made."""
    seen: list[tuple[tuple[str, ...], set[int], list[Path]]] = []

    def accept(layout: Layout) -> None:
        held = {one.data_ptr() for one in large_tensors()}
        seen.append((layout.names, held, list(job.path.glob("transfer-*"))))
        raise error("not this one")

    weight = torch.ones(MIB)
    assert soon(lambda: {one.data_ptr() for one in large_tensors()} == {weight.data_ptr()})
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        message, delivery = await received(site, server, {"w": weight})
        with pytest.raises(SpecMismatchError, match="not this one"):
            await message.decode(DecodeContext(tensors=where, job=job, accept=accept))
        assert seen == [(("w",), {weight.data_ptr()}, [])]
        assert job.ledger.peak == 0
        (end,) = verdicts(await delivery.wait())
        assert end.reason
        # and the endpoint lives on
        again, second = await received(site, server, tensors_of(1))
        assert alike(dict(tensors_of(1)), await again.decode())
        await second.wait()


@pytest.mark.parametrize("where", ["memory", "disk"])
async def test_nonfinite_tensors_are_noted(where: Any, tmp_path: Path) -> None:
    """With ``check_finite`` the message knows which tensors hold a NaN or an infinity."""
    tree = {
        "ok": torch.ones(3),
        "nan": torch.tensor([1, float("nan")]),
        "inf": torch.tensor(float("-inf")),
    }
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        for check in (True, False):
            message, delivery = await received(site, server, tree)
            await message.decode(DecodeContext(tensors=where, job=job, check_finite=check))
            assert message.nonfinite == ({"nan", "inf"} if check else set())
            await delivery.wait()


async def test_progress_is_told() -> None:
    """A callback sees landed bytes grow to all that was wanted."""
    seen: list[tuple[int, int]] = []
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, {"w": torch.ones(3 * MIB)})
        await message.decode(
            DecodeContext(progress=lambda landed, wanted: seen.append((landed, wanted)))
        )
        await delivery.wait()
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 12 * MIB


# --- failures -------------------------------------------------------------------------------------


class Torn:
    """A source whose memory is overwritten after it was read, as a buggy trainer's would be."""

    blocking = False

    def __init__(self, inner: StateDictSource) -> None:
        self._inner = inner
        self._last: bytearray | None = None
        self.served = 0

    @property
    def layout(self) -> Layout:
        return self._inner.layout

    def views(self, start: int, stop: int) -> Views:
        if self._last is not None and self.served > 1:
            self._last[0] ^= 0xFF
        self._last = bytearray(stop - start)
        self._inner.read_into(start, memoryview(self._last))
        self.served += 1
        return (memoryview(self._last),)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._inner.read_into(start, buffer)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()
        self._last = None


async def test_a_failure_holds_no_tensor_and_a_retry_succeeds() -> None:
    """Who keeps the error of a transfer that failed half-way keeps none of what had landed."""
    weight = torch.arange(6 * MIB, dtype=torch.float32)
    async with connected("site-1") as (server, site):
        landing = server.resources.landing
        holders = [object() for _ in range(int(landing.total_tokens))]

        def hold_landing_after_the_first(_landed: int, _wanted: int) -> None:
            if holders and not landing.borrowed_tokens:
                for holder in holders:
                    landing.acquire_on_behalf_of_nowait(holder)

        async def let_land() -> None:
            await until(lambda: landing.borrowed_tokens and torn.served >= 4)
            while holders:
                landing.release_on_behalf_of(holders.pop())

        torn = Torn(StateDictSource({"w": weight}))
        message, delivery = await received(site, server, {"params": torn})
        errors: list[BaseException] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_land)
            try:
                await message.decode(DecodeContext(progress=hold_landing_after_the_first))
            except IntegrityError as error:
                errors.append(error)
        assert errors
        assert soon(lambda: {one.data_ptr() for one in large_tensors()} == {weight.data_ptr()})
        assert (await delivery.wait()).status is OutcomeStatus.FAILED
        # with the error still in hand
        again, second = await received(site, server, {"params": {"w": weight}})
        arrived = await again.decode()
        assert same(arrived["params"]["w"], weight)
        assert soon(lambda: len(large_tensors()) == 2)
        await second.wait()
        assert str(errors[0])


async def test_a_sender_that_gives_up_half_way(tmp_path: Path) -> None:
    """A transfer that ends half-way leaves no file and no charge, and says who ended it."""
    net = MemoryNetwork()
    async with (
        connected("site-1", net=net) as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        net.conditions("site-1", "server").set(bandwidth=4 * MIB)
        message, delivery = await received(site, server, {"w": torch.ones(6 * MIB)})

        async def give_up() -> None:
            await anyio.sleep(3)
            delivery.cancel("the trainer left")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            with pytest.raises(GoneError, match="the trainer left"):
                await message.decode(DecodeContext(tensors="disk", job=job))
        await anyio.sleep(0.1)
        assert not list(job.path.glob("transfer-*"))
        assert job.ledger.used == 0


async def test_the_first_failure_ends_the_others_at_once() -> None:
    """When one ref of a tree fails, every other source knows at once and no budget is waited for."""
    async with connected("site-1", "site-2", "site-3") as (server, one, two, three):
        messages, deliveries = [], []
        for site in (one, two, three):
            message, delivery = await received(site, server, {"w": torch.ones(MIB)})
            messages.append(message)
            deliveries.append(delivery)
        deliveries[0].cancel("gone")
        await anyio.sleep(1)
        before = anyio.current_time()
        with pytest.raises(GoneError):
            await resolve([one.tree for one in messages], DecodeContext(endpoint=server))
        for delivery in deliveries:
            await delivery.wait()
        assert anyio.current_time() - before < 1
        assert soon(lambda: not [one for one in large_tensors() if one.sum() != MIB])


async def test_a_cancelled_resolve_leaves_nothing(tmp_path: Path) -> None:
    """Cancelling a resolve cancels at every source and removes what had landed."""
    net = MemoryNetwork()
    async with (
        connected("site-1", "site-2", net=net) as (server, one, two),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        net.conditions("site-2", "server").set(bandwidth=MIB)
        first, a = await received(one, server, {"w": torch.ones(MIB)})
        second, b = await received(two, server, {"w": torch.ones(4 * MIB)})
        with anyio.move_on_after(2) as scope:
            await resolve([first.tree, second.tree], DecodeContext(tensors="disk", job=job))
        assert scope.cancelled_caught
        assert (await a.wait()).status is OutcomeStatus.COMPLETED
        (end,) = verdicts(await b.wait())
        assert "cancelled" in end.reason
        await anyio.sleep(0.1)
        assert not list(job.path.glob("transfer-*"))
        assert job.ledger.used == 0


async def test_a_closing_job_declines(tmp_path: Path) -> None:
    """A download that a closing job does not admit is declined: its source need not wait."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path) as job,
    ):
        message, delivery = await received(site, server, tensors_of(1))
        job.finalise()
        with pytest.raises(JobClosedError):
            await message.decode(DecodeContext(tensors="disk", job=job))
        before = anyio.current_time()
        await delivery.wait()
        assert anyio.current_time() - before < 1


async def test_a_quota_refuses_before_it_is_spent(tmp_path: Path) -> None:
    """A payload that does not fit the job's quota is refused on its header."""
    async with (
        connected("site-1") as (server, site),
        open_job("job", server, scratch=tmp_path, quota=MIB) as job,
    ):
        message, delivery = await received(site, server, {"w": torch.ones(MIB)})
        with pytest.raises(QuotaExceededError):
            await message.decode(DecodeContext(tensors="disk", job=job))
        assert not list(job.path.glob("transfer-*"))
        await delivery.wait()


async def _forged(server: Endpoint, site: Endpoint, tree: Any, make: Any) -> Any:
    """Offer a payload, and take the message that a dishonest site makes of its ref."""
    transaction = site.publish([StateDictSource(tree)], [server_slot()], budgets=site.budgets)
    (ref,) = transaction.refs(0)
    message, delivery = await received(site, server, make(ref))
    return message, delivery, transaction


def server_slot() -> Slot:
    """A place for the server."""
    return Slot(b"t" * 16, Address("server"))


def leaf(ref: Ref, name: str, kind: LeafKind = LeafKind.TENSOR) -> TensorRef:
    """A leaf as a dishonest sender makes it."""
    batch = Batch(ref, names={name})
    return TensorRef(batch, name, kind)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda ref: {"x": leaf(ref, "missing")}, TransferError),
        (lambda ref: {"x": leaf(ref, "w", LeafKind.NDARRAY)}, PeerRefusedError),
        (lambda ref: {leaf(ref, "w", LeafKind.NDARRAY)}, (PeerRefusedError, UnsupportedValueError)),
        (
            lambda ref: {"x": leaf(Ref(ref.source, ref.id, ref.ticket, ref.size + 8), "w")},
            IntegrityError,
        ),
        (
            lambda ref: {"x": leaf(Ref(ref.source, ref.id, b"x" * 16, ref.size), "w")},
            PeerRefusedError,
        ),
        (
            lambda ref: {"x": leaf(Ref(ref.source, "unknown", ref.ticket, ref.size), "w")},
            PeerRefusedError,
        ),
    ],
    ids=[
        "a name too many",
        "an array of bf16",
        "an array in a set",
        "another size",
        "another ticket",
        "another ref",
    ],
)
async def test_messages_that_lie_about_their_refs(make: Any, error: Any) -> None:
    """A message whose refs are not what it says fails typed, lands nothing, and harms nobody."""
    async with connected("site-1") as (server, site):
        weight = torch.ones(MIB, dtype=torch.bfloat16)
        message, delivery, transaction = await _forged(server, site, {"w": weight}, make)
        with pytest.raises(error):
            await message.decode()
        assert soon(lambda: {one.data_ptr() for one in large_tensors()} == {weight.data_ptr()})
        await delivery.wait()
        transaction.cancel("seen")
        await transaction.wait()


async def test_a_set_that_cannot_hold_an_array() -> None:
    """An array cannot be in a set: a message that says so fails with the place."""
    async with connected("site-1") as (server, site):
        message, delivery, transaction = await _forged(
            server, site, {"w": torch.ones(1)}, lambda ref: [{leaf(ref, "w", LeafKind.NDARRAY)}]
        )
        with pytest.raises(UnsupportedValueError, match="set cannot hold") as caught:
            await message.decode()
        assert caught.value.where["path"] == "tree[0]"
        await delivery.wait()
        assert (await transaction.wait()).status is OutcomeStatus.COMPLETED


async def test_many_leaves(tmp_path: Path) -> None:
    """Thousands of tensors in one message cost one pull, whole or a part of them."""
    base = torch.arange(8_000, dtype=torch.int32)
    tree = {"p": {f"layer.{n}": base[2 * n : 2 * n + 2] for n in range(4_000)}}
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, tree)
        arrived = await message.decode()
        assert all(int(one[0]) == 2 * n for n, one in enumerate(arrived["p"].values()))
        await delivery.wait()
        message, delivery = await received(site, server, tree)
        arrived = await message.decode(only=[f"layer.{n}" for n in range(2_000)])
        assert sum(isinstance(one, torch.Tensor) for one in arrived["p"].values()) == 2_000
        await delivery.wait()
