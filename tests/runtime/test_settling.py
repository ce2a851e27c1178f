"""How a transaction ends for its owner: callbacks, then sources, then the tombstone, then whoever waits, each once."""

import logging
import secrets
from collections.abc import Callable, Iterable
from functools import partial

import anyio
import pytest

from streamoff.errors import GoneError
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.publishing import Transaction
from streamoff.tensors.sources import StateDictSource
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Budgets, Outcome, OutcomeStatus, Slot

from .world import (
    Attempt,
    ComputedSource,
    Gate,
    World,
    assert_same,
    memory,
    puppet,
    settled_tasks,
    state_dict,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


def slots(endpoints: Iterable[BaseEndpoint]) -> list[Slot]:
    """One for each."""
    return [Slot(secrets.token_bytes(16), one.address) for one in endpoints]


async def all_pull(w: World, tx: Transaction) -> None:
    """Every site pulls its copy of the first ref, at the same time."""
    async with anyio.create_task_group() as group:
        for number, site in enumerate(w.sites):
            transfer = site.transfer(tx.refs(number)[0], memory())
            group.start_soon(site.run_transfer, transfer)


async def test_names_are_given_once() -> None:
    """No transaction and no ref gets a name that another one has or had, also in a later life of its endpoint."""
    network = MemoryNetwork()
    names: list[str] = []
    for _ in range(3):
        async with BaseEndpoint("site-1", transports=[network]) as site:
            for _ in range(50):
                sources = [ComputedSource(10) for _ in range(3)]
                tx = site.publish(sources, [Slot(secrets.token_bytes(16))])
                refs = tx.refs(0)
                names += [tx.id, *(ref.id for ref in refs)]
                assert [ref.size for ref in refs] == [one.layout.size for one in sources]
                assert (tx.outcome, site.statistics().publisher.bytes_served) == (None, 0)
            assert site.statistics().publisher.open == 50
    assert len(set(names)) == len(names) == 3 * 50 * 4


async def test_callbacks_come_before_the_sources_go_and_waiters_wake() -> None:
    """At the last of two confirmations callbacks run in order, once, with sources open; waiters wake afterwards."""
    seen: list[object] = []
    told: list[Outcome] = []
    woken: list[Outcome] = []

    async def wait(tx: Transaction) -> None:
        woken.append(await tx.wait())

    async with world(sites=2) as w, tasks() as group:
        source = ComputedSource(MIB)

        def callback(name: str, outcome: Outcome) -> None:
            tombstones = w.server.statistics().publisher.tombstones
            seen.append((name, source.closed, tombstones, tuple(woken)))
            told.append(outcome)

        callbacks = (partial(callback, "first"), partial(callback, "second"))
        tx = w.server.publish([source], slots(w.sites), on_settled=callbacks)
        for _ in range(3):
            group.start_soon(wait, tx)
        await all_pull(w, tx)
        outcome = await tx.wait()
        assert seen == [("first", False, 0, ()), ("second", False, 0, ())]
        assert source.closed
        assert outcome.status is OutcomeStatus.COMPLETED
        assert w.server.statistics().publisher.tombstones == 1
        await settled_tasks()
        assert all(one is outcome for one in (tx.outcome, *told, *woken, await tx.wait()))
        assert (len(told), len(woken)) == (2, 3)


class Unwilling(ComputedSource):
    """A source that cannot be closed."""

    def close(self) -> None:
        raise OSError("will not close")


@pytest.mark.parametrize("end", ["confirmed", "deleted", "acquire_timeout"])
async def test_what_fails_while_a_transaction_settles_skips_no_other_step(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Callbacks and sources that raise are logged; the other callbacks, sources, clocks and waiters have their turn."""
    caplog.set_level(logging.ERROR, "streamoff.publishing")
    told: list[str] = []

    def broken(_outcome: Outcome) -> None:
        raise RuntimeError("not my day")

    async with world() as w:
        last = ComputedSource(10)
        tx = w.server.publish(
            [Unwilling(10), last],
            slots(w.sites),
            on_settled=(broken, lambda outcome: told.append(outcome.reason)),
        )
        other, _ = w.offer(ComputedSource(10), site=w.server, to=None)
        if end == "confirmed":
            for ref in tx.refs(0):
                await w.site.run_transfer(w.site.transfer(ref, memory()))
        elif end == "deleted":
            tx.cancel()
        outcome = await tx.wait()
        assert told == [outcome.reason]
        assert outcome.reason == {"confirmed": "all_receivers_succeeded"}.get(end, end)
        assert last.closed
        assert w.server.statistics().publisher.tombstones >= 2
        assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
            "not my day",
            "will not close",
        ]
        assert all(tx.id in record.getMessage() for record in caplog.records)
        assert (await other.wait()).reason == "acquire_timeout"
        assert anyio.current_time() == 120


async def test_a_callback_may_use_the_endpoint() -> None:
    """A callback offers again and ends other transactions; its own is over, and what it offers is not part of it."""
    order: list[object] = []
    again: list[Transaction] = []

    async with world() as w:
        other = w.server.publish(
            [ComputedSource(10)],
            slots(w.sites),
            on_settled=(lambda _outcome: order.append("other"),),
        )

        def use(outcome: Outcome) -> None:
            order.append("own")
            tx.cancel("too late")
            tx.decline(0, "too late")
            other.cancel("not needed any more")
            again.append(w.server.publish([StateDictSource(state_dict())], slots(w.sites)))
            order.append(outcome.status)

        tx = w.server.publish([StateDictSource(state_dict())], slots(w.sites), on_settled=(use,))
        await all_pull(w, tx)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert order == ["own", "other", OutcomeStatus.COMPLETED]
        assert (await other.wait()).status is OutcomeStatus.ABORTED
        [new] = again
        assert new.outcome is None
        transfer = w.site.transfer(new.refs(0)[0], memory())
        assert_same(await w.site.run_transfer(transfer), state_dict())
        assert (await new.wait()).status is OutcomeStatus.COMPLETED


@pytest.mark.parametrize(("lasts", "settles"), [(3, 3), (30, 7)])
async def test_a_source_is_kept_while_it_is_read(lasts: float, settles: float) -> None:
    """A transaction that ends during a read settles when the read is over, or after its settle budget; not before."""
    gate = Gate()
    async with world() as w, tasks(gate) as group:
        source = ComputedSource(9 * MIB, gate)
        tx, ref = w.offer(source, budgets=Budgets(settle=7))
        attempt = Attempt()
        group.start_soon(attempt.run, partial(w.download, ref))
        await gate.reached()
        tx.cancel("no more")
        await settled_tasks()
        assert (source.closed, tx.outcome) == (False, None)
        assert w.site.statistics().publisher.settling == 1
        group.start_soon(_later, lasts, gate.open)
        outcome = await tx.wait()
        assert source.closed
        assert outcome.settled_at == anyio.current_time() == settles
        assert outcome.status is OutcomeStatus.ABORTED
        await attempt.over.wait()
        assert isinstance(attempt.error, GoneError)
        assert anyio.current_time() == lasts
        w.assert_idle()


async def _later(seconds: float, call: Callable[[], None]) -> None:
    await anyio.sleep(seconds)
    call()


@pytest.mark.parametrize(("lasts", "leaves"), [(1, 1), (30, 5)])
async def test_an_endpoint_that_closes_settles_what_is_being_read(
    lasts: float, leaves: float
) -> None:
    """An endpoint that is left during a read of its source waits for it within its close timeout; waiters have an outcome then."""
    gate = Gate()
    network = MemoryNetwork()
    ends: list[tuple[float, OutcomeStatus, bool]] = []

    async def wait(tx: Transaction) -> None:
        status = (await tx.wait()).status
        ends.append((anyio.current_time(), status, source.closed))

    async with BaseEndpoint("server", transports=[network]) as server, tasks(gate) as group:
        source = ComputedSource(9 * MIB, gate)
        async with BaseEndpoint("site-1", transports=[network]) as site:
            await site.connect("server")
            tx = site.publish([source], slots([server]))
            group.start_soon(wait, tx)
            attempt = Attempt()
            transfer = server.transfer(tx.refs(0)[0], memory())
            group.start_soon(attempt.run, partial(server.run_transfer, transfer))
            await gate.reached()
            group.start_soon(_later, lasts, gate.open)
        assert anyio.current_time() == leaves
        await settled_tasks()
        assert ends == [(leaves, OutcomeStatus.ABORTED, True)]
        await attempt.over.wait()
        assert attempt.error is not None


async def test_who_has_come_is_counted() -> None:
    """A receiver is counted on each ref that it has opened, until the transaction is over."""
    async with world() as w, puppet(w.network, "peer", "site-1") as peer:
        tx = w.site.publish(
            [ComputedSource(MIB), ComputedSource(MIB)],
            [Slot(secrets.token_bytes(16)), Slot(secrets.token_bytes(16))],
        )
        counts = [w.site.statistics().publisher.streams]
        for stream, ref in enumerate(tx.refs(1), 1):
            await peer.open(ref, stream)
            counts.append(w.site.statistics().publisher.streams)
        tx.cancel()
        counts.append(w.site.statistics().publisher.streams)
        assert counts == [0, 1, 2, 0]
        assert list((await tx.wait()).slots) == ["slot-0", "peer"]
