"""Giving up, at every point of a transfer: the producer knows at once, nothing is left, and nobody else notices."""

import asyncio
import random
import secrets
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from streamoff.errors import GoneError, StreamoffError, TransferError
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endings import End
from streamoff.runtime.jobs import Job, open_job
from streamoff.runtime.publishing import Transaction
from streamoff.runtime.resources import LANDING_THREADS
from streamoff.tensors.digests import chunk_digest
from streamoff.tensors.sources import StateDictSource
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Capability, Outcome, OutcomeStatus, Ref, Slot, Verdict
from streamoff.wire.frames import Cancel, Chunk, Confirm, Error, ErrorCode, Open, Opened, Pull

from .world import (
    CAPABILITIES,
    Attempt,
    ComputedSource,
    Gate,
    Hooked,
    Puppet,
    World,
    all_dead,
    assert_pattern,
    assert_same,
    digest,
    disk,
    files,
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


def payload() -> dict[str, torch.Tensor]:
    """Three chunks."""
    return {"w": numbers(9 * MIB // 4), "b": numbers(10)}


async def assert_given_up(
    w: World, tx: Transaction, references: Iterable[weakref.ref[Any]], job: Job | None = None
) -> None:
    """The producer was told, let go of its tensors, and nothing of the attempt is left at the receiver."""
    outcome = await tx.wait()
    assert outcome.status is OutcomeStatus.FAILED
    assert outcome.reason == "receiver_failed"
    for verdict in outcome.slots["server"].values():
        assert verdict.verdict is Verdict.FAILED
        assert verdict.reason.startswith(("cancelled", "declined"))
    await settled_tasks()
    assert all_dead(references)
    w.assert_idle()
    assert not w.server.downloads.wire.streams
    if job is not None:
        assert await gone(job)
        assert job.ledger.used == 0


def opened(site: Puppet, ref: Ref, stream: int, header: bytes) -> Opened:
    """The answer of a source that is a puppet."""
    return Opened(
        **site.route(),
        stream=stream,
        size=ref.size,
        header_bytes=len(header),
        header_digest=digest(header),
        nonce=bytes(8),
        capabilities=CAPABILITIES,
    )


async def gone(job: Job) -> bool:
    """Whether the janitor has removed everything but the lease."""
    from streamoff.scratch.janitor import JANITOR

    await anyio.to_thread.run_sync(JANITOR.idle, 10)
    return files(job.path) == [".lease"]


PHASES = ["open", "write", "later write", "finish"]


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_download_is_cancelled_while_its_landing_works(tmp_path, phase, where):
    """Cancelled while it plans, lands or finishes, a download ends with the call in its thread, and leaves nothing."""
    gate = Gate()
    hook: Any = not_the_first(gate) if phase == "later write" else gate
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        source, references = watched(payload())
        tx, ref = w.offer(source)
        del source
        attempt = Attempt()

        def landing(layout):
            real = job.landing(layout) if where == "disk" else None
            return Hooked(real, **{phase.split()[-1]: hook})

        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(job.download, ref, Terms(landing=landing)))
            await gate.reached()
            attempt.scope.cancel()
            outcome = await tx.wait()  # told while the call still blocks
            assert outcome.settled_at == 0
            assert not attempt.over.is_set()
            await anyio.sleep(3)
            gate.open()
        assert attempt.cancelled
        assert attempt.seconds == 3
        await assert_given_up(w, tx, references, job)


async def test_a_download_is_cancelled_before_it_began():
    """A download started in a scope that is cancelled already gives its slot up at once."""
    async with world() as w:
        source, references = watched(payload())
        tx, ref = w.offer(source)
        del source
        attempt = Attempt()
        attempt.scope.cancel()
        await attempt.run(partial(w.download, ref))
        assert attempt.cancelled
        assert (await tx.wait()).settled_at == 0
        await assert_given_up(w, tx, references)


async def test_a_slot_is_given_up_also_before_the_first_step_of_its_task():
    """What is given up before its task ran was asked for all the same: the producer hears both."""
    async with world() as w:
        tx, ref = w.offer(payload())
        attempt = Attempt()
        async with tasks() as group:

            def start_late(call: Callable[..., Any], *args: Any) -> None:
                async def late() -> None:
                    await anyio.sleep(5)
                    await call(*args)

                group.start_soon(late)

            transfer = w.server.transfer(ref, memory())
            group.start_soon(attempt.run, partial(w.server.run_transfer, transfer, start_late))
            await anyio.sleep(1)
            attempt.scope.cancel()
            assert (await tx.wait()).settled_at == 1
        assert attempt.cancelled
        w.assert_idle()


@pytest.mark.parametrize("ended", ["a cancelled scope", "a notice"])
async def test_a_transfer_that_ended_before_its_task_began_runs_to_its_end(ended):
    """What ends a transfer between its making and its first step is not lost, and breaks nothing."""
    async with world() as w:
        tx, ref = w.offer(payload())
        transfer = w.server.transfer(ref, memory())
        if ended == "a notice":
            transfer.fail(TransferError("dead"))
        else:
            transfer.cancel("nobody waits")
        await transfer.run()
        with pytest.raises(TransferError):
            transfer.result()
        assert tx.outcome is None
        assert w.server.statistics().links == 1


async def test_a_download_is_cancelled_before_the_source_answers():
    """Cancel works before the first byte: the link has told what the source can do."""
    network = MemoryNetwork(latency=2)
    async with world(network=network) as w:
        source, references = watched(payload())
        tx, ref = w.offer(source)
        del source
        attempt = Attempt()
        start = anyio.current_time()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(3)  # the open has arrived, its answer has not
            attempt.scope.cancel()
        assert attempt.seconds == 3
        assert (await tx.wait()).settled_at == start + 3 + 2
        await assert_given_up(w, tx, references)


async def test_a_download_is_cancelled_while_its_open_is_on_the_way():
    """An open and its cancel arrive in order: the slot fails, and the source is let go."""
    network = MemoryNetwork(latency=2)
    async with world(network=network) as w:
        source, references = watched(payload())
        tx, ref = w.offer(source)
        del source
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(1)
            attempt.scope.cancel()
        assert attempt.seconds == 1
        await assert_given_up(w, tx, references)


async def test_a_download_is_cancelled_in_the_middle_of_a_chunk():
    """On a slow line the chunk that is on its way is abandoned, and what was queued behind it is void."""
    network = MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w:
        source, references = watched(payload())
        tx, ref = w.offer(source)
        del source
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(5.6)
            attempt.scope.cancel()
        assert attempt.seconds == 5.6
        assert (await tx.wait()).settled_at == 5.6
        await anyio.sleep(0.5)
        await assert_given_up(w, tx, references)
        assert w.site.publisher.statistics().bytes_served == 4 * MIB


@pytest.mark.parametrize("chunk", range(4))
async def test_a_download_is_cancelled_at_every_chunk_boundary(tmp_path, chunk):
    """Cancelled when so many chunks have landed, a download leaves no file, no charge, no buffer and no slot."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(ComputedSource(13 * MIB))
        attempt = Attempt()

        def stop(landed: int, _wanted: int) -> None:
            if landed >= chunk * 4 * MIB:
                attempt.scope.cancel()

        await attempt.run(partial(job.download, ref, disk(job, progress=stop)))
        assert attempt.cancelled
        await assert_given_up(w, tx, [], job)


async def test_a_download_is_cancelled_while_it_waits_to_try_again():
    """Cancelled in a pause between two attempts, a download tells the source that nobody will come."""
    gate = Gate()
    async with world() as w:
        tx, ref = w.offer(ComputedSource(9 * MIB, gate))
        attempt = Attempt()
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await gate.reached()
            await anyio.sleep(21)
            attempt.scope.cancel()
            await attempt.over.wait()
            assert attempt.seconds == 21
            gate.open()
        await assert_given_up(w, tx, [])


async def test_a_download_is_cancelled_while_its_link_is_gone():
    """Without a link the cancel cannot be told: the receiver is free at once, the producer after its budget."""
    async with world(network=MemoryNetwork(bandwidth=MIB)) as w:
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(5)
            w.network.cut("server", "site-1")
            await anyio.sleep(5)
            attempt.scope.cancel()
        assert attempt.seconds == 10
        w.network.mend("server", "site-1")
        outcome = await tx.wait()
        assert outcome.reason == "idle_timeout"
        assert outcome.settled_at == 4 + 150
        w.assert_idle()


async def test_a_whole_payload_is_delivered_or_let_go_while_it_is_confirmed():
    """Cancelled while its confirmation is on the way, a download ends; the producer has its success."""
    network = MemoryNetwork(latency=1)
    async with world(network=network) as w:
        source, references = watched(payload())
        tx, ref = w.offer(source)
        del source
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            while w.site.publisher.statistics().bytes_served < ref.size:  # noqa: ASYNC110 - a counter
                await anyio.sleep(0.25)
            await anyio.sleep(0.5)
            attempt.scope.cancel()
        assert attempt.cancelled
        assert attempt.state is None
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        await settled_tasks()
        assert all_dead(references)
        w.assert_idle()


async def test_a_cancel_fails_the_slot_on_every_ref():
    """Giving up one ref of a transaction gives up all that the slot had, and no other slot."""
    async with world(sites=2) as w:
        tensors = [state_dict(9, seed) for seed in range(3)]
        slots = [Slot(secrets.token_bytes(16), site.address) for site in w.sites]
        tx = w.server.publish([StateDictSource(one) for one in tensors], slots)
        first, second = w.sites
        attempt = Attempt()
        terms = memory(progress=lambda *_: attempt.scope.cancel())
        await attempt.run(partial(first.run_transfer, first.transfer(tx.refs(0)[1], terms)))
        await settled_tasks()
        for ref in tx.refs(0):
            with pytest.raises(GoneError):
                await first.run_transfer(first.transfer(ref, memory()))
        for ref, one in zip(tx.refs(1), tensors, strict=True):
            assert_same(await second.run_transfer(second.transfer(ref, memory())), one)
        outcome = await tx.wait()
        assert outcome.status is OutcomeStatus.FAILED
        assert outcome.succeeded == ("site-2",)
        assert {end.verdict for end in outcome.slots["site-1"].values()} == {Verdict.FAILED}


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_a_source_that_refuses_a_request_is_told_that_no_other_follows(code):
    """A slot that was taken and is given up for a refused request is cancelled; a refused slot is left alone."""
    source = ComputedSource(MIB)
    header = source.layout.header
    async with world(sites=0) as w, puppet(w.network) as site:
        ref = Ref(site.address, "r1", secrets.token_bytes(16), source.layout.size)
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            stream = (await site.next(Open)).stream
            await site.send(opened(site, ref, stream, header))
            await site.next(Pull)
            await site.send(Error(**site.route(), of=Pull.type, id=stream, code=code, detail="no"))
            await attempt.over.wait()
            await settled_tasks()
        assert isinstance(attempt.error, StreamoffError)
        told = [frame.reason for frame in site.frames if isinstance(frame, Cancel)]
        assert len(told) == (code.value in {"bad_range", "limit", "unknown_stream"})
        assert all("no" in reason for reason in told)


async def test_a_second_pull_of_one_ref_leaves_the_other_refs_alone():
    """A slot that asks for a finished ref again is refused, and goes on with what it has not got yet."""
    async with world() as w:
        sources = [StateDictSource(state_dict(1, seed)) for seed in (1, 2)]
        tx = w.site.publish(sources, [Slot(secrets.token_bytes(16))])
        first, second = tx.refs(0)
        await w.download(first)
        with pytest.raises(GoneError):
            await w.download(first)
        assert_same(await w.download(second), state_dict(1, 2))
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_without_the_capability_no_cancel_is_sent():
    """A producer that does not know cancel is not sent one: its budgets end the slot."""
    async with world(capabilities=[Capability.NOTICE]) as w:
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = memory(progress=lambda *_: attempt.scope.cancel())
        await attempt.run(partial(w.download, ref, terms))
        assert attempt.cancelled
        assert (await tx.wait()).reason == "idle_timeout"
        w.assert_idle()


async def test_other_receivers_do_not_notice():
    """Seven of eight downloads from one site are cancelled; the eighth brings its bytes as if it were alone."""
    network = MemoryNetwork(bandwidth=8 * MIB)
    async with world(network=network) as w:
        offers = [w.offer(ComputedSource(9 * MIB)) for _ in range(8)]
        attempts = [Attempt() for _ in offers]
        async with tasks() as group:
            for attempt, (_, ref) in zip(attempts, offers, strict=True):
                group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(3)
            for attempt in attempts[1:]:
                attempt.scope.cancel()
        assert attempts[0].state is not None
        assert_pattern(attempts[0].state)
        assert (await offers[0][0].wait()).status is OutcomeStatus.COMPLETED
        for tx, _ in offers[1:]:
            assert (await tx.wait()).status is OutcomeStatus.FAILED
        w.assert_idle()


async def test_the_producer_cancels():
    """A transaction that its owner cancels ends every download of it, with the owner's words."""
    gate = Gate()
    async with world() as w:
        tx, ref = w.offer(ComputedSource(9 * MIB, not_the_first(gate)))
        attempt = Attempt()
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await gate.reached()
            tx.cancel("the round is over")
            tx.cancel("twice is once")
            gate.open()
        outcome = await tx.wait()
        assert outcome.status is OutcomeStatus.ABORTED
        assert outcome.reason == "deleted: the round is over"
        assert isinstance(attempt.error, StreamoffError)
        assert "the round is over" in str(attempt.error)
        w.assert_idle()


async def test_giving_up_what_has_ended_changes_nothing():
    """Given up at either end after its success, once or twice, a transfer stays one, and nobody is told again."""
    told: list[Outcome] = []
    async with world() as w:
        tx, ref = w.offer(state_dict())
        tx.on_settled.append(told.append)
        transfer = w.server.transfer(ref, memory())
        state = await w.server.run_transfer(transfer)
        outcome = await tx.wait()
        for _ in range(2):
            transfer.cancel("too late")
            transfer.fail(TransferError("too late"))
            tx.cancel("too late")
            tx.decline(0, "too late")
            await settled_tasks()
        assert (tx.outcome, told) == (outcome, [outcome])
        assert outcome.status is OutcomeStatus.COMPLETED
        assert transfer.cause is None
        assert_same(state, state_dict())
        assert w.site.publisher.statistics().completed == 1
        assert w.server.statistics().downloads.ended == {End.COMPLETED: 1}
        w.assert_idle()


async def test_waiting_for_an_outcome_can_be_given_up():
    """Who stops waiting for an outcome leaves the transaction as it is."""
    async with world() as w:
        tx, ref = w.offer(state_dict())
        with anyio.move_on_after(5):
            await tx.wait()
        assert_same(await w.download(ref), state_dict())
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_an_outer_cancel_waits_for_the_clean_end(tmp_path):
    """A deadline around a download cuts it, waits for the thread that writes, and no file appears afterwards."""
    gate = Gate()
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(payload())
        hook = Terms(landing=lambda layout: Hooked(job.landing(layout), write=gate))
        async with tasks(gate) as group:

            async def later() -> None:
                await gate.reached()
                await anyio.sleep(8)
                gate.open()

            group.start_soon(later)
            with anyio.move_on_after(5) as scope:
                await job.download(ref, hook)
            assert scope.cancelled_caught
            assert anyio.current_time() == 8
        assert (await tx.wait()).settled_at == 5
        assert await gone(job)


async def test_several_writes_are_in_flight_when_all_is_cancelled(tmp_path):
    """Cancelled with as many writes at work as there are threads, all end, and no file is left."""
    gate = Gate()
    async with world(sites=8) as w, open_job("job", w.server, scratch=tmp_path) as job:
        offers = [w.offer(ComputedSource(9 * MIB), site=site) for site in w.sites]
        hook = Terms(landing=lambda layout: Hooked(job.landing(layout), write=gate))
        async with tasks(gate) as group:
            attempts = [Attempt() for _ in offers]
            for attempt, (_, ref) in zip(attempts, offers, strict=True):
                group.start_soon(attempt.run, partial(job.download, ref, hook))
            while gate.waiting < LANDING_THREADS:
                await anyio.lowlevel.checkpoint()
            assert gate.waiting == w.server.resources.landing.borrowed_tokens
            for attempt in attempts:
                attempt.scope.cancel()
            for tx, _ in offers:
                assert (await tx.wait()).settled_at == 0
            gate.open()
        assert all(attempt.cancelled for attempt in attempts)
        assert await gone(job)
        assert job.ledger.used == 0
        w.assert_idle()


@pytest.mark.parametrize("seed", range(20))
async def test_a_cancel_in_any_instant_is_delivered_or_the_payload_is(seed):
    """Over many random instants a cancelled download either was cancelled or has its payload: never neither, nor both."""
    chance = random.Random(seed)
    network = MemoryNetwork(latency=0.001)
    async with world(network=network) as w:
        ends = set()
        for _ in range(25):
            tx, ref = w.offer(state_dict(0.01))
            attempt = Attempt()
            async with tasks() as group:
                group.start_soon(attempt.run, partial(w.download, ref))
                await anyio.sleep(chance.choice([0, 1, 2, 3, 4, 5, 6, 7]) * 0.001)
                for _ in range(chance.randrange(8)):
                    await anyio.lowlevel.checkpoint()
                attempt.scope.cancel()
            assert attempt.error is None
            assert attempt.cancelled is (attempt.state is None)
            ends.add(attempt.cancelled)
            outcome = await tx.wait() if tx.record.servings[0, ref.id].bound else None
            if not attempt.cancelled:
                assert outcome is not None
                assert outcome.status is OutcomeStatus.COMPLETED
            tx.cancel()
            await settled_tasks()
        assert True in ends
        w.assert_idle()


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_cancellation_that_is_asyncios_own_is_understood(tmp_path):
    """A timeout of asyncio's around a download works like one of anyio's."""
    gate = Gate()
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(ComputedSource(9 * MIB, not_the_first(gate)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await job.download(ref, disk(job))
        gate.open()
        assert (await tx.wait()).status is OutcomeStatus.FAILED
        assert await gone(job)
        w.assert_idle()


async def test_the_first_cause_is_reported_and_not_the_cancellation_after_it():
    """A download that failed and is cancelled while it cleans up still reports what went wrong first."""
    gate = Gate()
    async with world() as w:
        tx, ref = w.offer(payload())

        def broken(_start: int) -> None:
            raise OSError(28, "No space left on device", "/scratch/x")

        landing = Terms(landing=lambda _: Hooked(write=broken, discard=gate))
        transfer = w.server.transfer(ref, landing)
        attempt = Attempt()
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.server.run_transfer, transfer))
            await gate.reached()
            attempt.scope.cancel()
            await settled_tasks()
            gate.open()
        with pytest.raises(OSError, match="No space left on device"):
            transfer.result()
        outcome = await tx.wait()
        [verdict] = outcome.slots["server"].values()
        assert "No space left" in verdict.reason
        w.assert_idle()


async def test_late_frames_after_a_cancel_are_dropped():
    """An answer and chunks that arrive after a download was cancelled change nothing and hold nothing."""
    source = ComputedSource(MIB)
    header = source.layout.header
    async with world(sites=0) as w, puppet(w.network) as site:
        ref = Ref(site.address, "r1", secrets.token_bytes(16), source.layout.size)
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            stream = (await site.next(Open)).stream
            attempt.scope.cancel()
            await attempt.over.wait()
            await site.send(opened(site, ref, stream, header))
            await site.send(
                Chunk(
                    **site.route(),
                    stream=stream,
                    start=0,
                    stop=len(header),
                    digest=chunk_digest((memoryview(header),), 0),
                    body=(memoryview(header),),
                )
            )
            await settled_tasks()
        assert not any(isinstance(frame, (Pull, Confirm)) for frame in site.frames)
        assert w.server.statistics().links == 1
        w.assert_idle()
