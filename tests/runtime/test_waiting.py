"""Waits, retries and resumption, to the exact virtual second; what has landed is never sent again."""

import secrets
from functools import partial

import anyio
import pytest

from streamoff.errors import (
    PeerRefusedError,
    SourceLostError,
    TransferTimeoutError,
    UnreachableError,
)
from streamoff.runtime.downloading import Terms
from streamoff.runtime.jobs import open_job
from streamoff.runtime.link import SILENCE_SECONDS
from streamoff.runtime.threads import wait_from_thread
from streamoff.tensors.digests import chunk_digest
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, Budgets, OutcomeStatus, Ref, Slot
from streamoff.wire.frames import Cancel, Chunk, Open, Opened, Pull

from .world import (
    CAPABILITIES,
    Attempt,
    ComputedSource,
    Gate,
    Hooked,
    Puppet,
    assert_pattern,
    assert_same,
    digest,
    disk,
    in_memory,
    memory,
    not_the_first,
    puppet,
    settled_tasks,
    state_dict,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


def ref_of(site: Puppet, size: int = 1000) -> Ref:
    """A ref whose source is a puppet."""
    return Ref(site.address, "r1", secrets.token_bytes(16), size)


def opened(site: Puppet, ref: Ref, stream: int, header: bytes) -> Opened:
    """A source's answer."""
    return Opened(
        **site.route(),
        stream=stream,
        size=ref.size,
        header_bytes=len(header),
        header_digest=digest(header),
        nonce=bytes(8),
        capabilities=CAPABILITIES,
    )


# --- the retry schedule ---------------------------------------------------------------------------


async def test_a_source_that_never_answers_is_asked_four_times():
    """Opens go out after 0, 22, 46 and 74 seconds, the download fails after 94, and says so to the source."""
    async with world(sites=0) as w, puppet(w.network) as site:
        ref = ref_of(site)
        attempt = Attempt()
        async with anyio.create_task_group() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            opens = []
            for _ in range(4):
                frame = await site.next(Open)
                opens.append((anyio.current_time(), frame.stream))
            await attempt.over.wait()
            await site.next(Cancel)
        assert [at - attempt.began for at, _ in opens] == [0, 22, 46, 74]
        assert len({stream for _, stream in opens}) == 4
        assert attempt.seconds == 94
        assert isinstance(attempt.error, TransferTimeoutError)
        assert attempt.error.where["site"] == "site-1"
        w.assert_idle()


async def test_progress_starts_the_schedule_afresh():
    """A source that brings the header and then nothing is given the whole schedule from there."""
    payload = ComputedSource(10 * MIB)
    header = payload.layout.header
    async with world(sites=0) as w, puppet(w.network) as site:
        ref = ref_of(site, payload.layout.size)
        attempt = Attempt()
        async with anyio.create_task_group() as group:
            group.start_soon(attempt.run, partial(w.download, ref, memory(["w"])))
            stream = (await site.next(Open)).stream
            await anyio.sleep(19)
            await site.send(opened(site, ref, stream, header))
            pull = await site.next(Pull)
            assert (pull.start, pull.stop) == (0, len(header))
            await anyio.sleep(19)
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
            await attempt.over.wait()
        assert attempt.seconds == 19 + 19 + 94
        w.assert_idle()


async def test_a_deadline_is_kept_to_the_second():
    """A transfer with a deadline of 33.5 s ends then, however much patience is left otherwise."""
    async with world(sites=0) as w, puppet(w.network) as site:
        attempt = Attempt()
        terms = memory(budgets=Budgets(deadline=33.5))
        await attempt.run(partial(w.download, ref_of(site), terms))
        assert attempt.seconds == 33.5
        assert isinstance(attempt.error, TransferTimeoutError)


async def test_a_deadline_is_kept_while_a_disk_is_slow():
    """A blocking landing does not hold a deadline up: the transfer ends when the landing lets go."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(state_dict(9))
        attempt = Attempt()
        terms = Terms(landing=in_memory(write=gate), budgets=Budgets(deadline=30))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            outcome = await tx.wait()
            assert anyio.current_time() == 30
            assert outcome.status is OutcomeStatus.FAILED
            await anyio.sleep(7)
            gate.open()
        assert attempt.seconds == 37
        assert isinstance(attempt.error, TransferTimeoutError)
        w.assert_idle()


async def test_no_way_to_the_source_is_said_at_once():
    """A ref whose source cannot be reached fails before anything is sent."""
    async with world() as w:
        ref = Ref(Address("site-9"), "r1", secrets.token_bytes(16), 100)
        with pytest.raises(UnreachableError):
            w.server.transfer(ref, memory())


async def test_a_wrong_clock_on_the_wall_changes_nothing(monkeypatch):
    """Budgets count monotonic seconds: a wall clock that leaps a day forth and back expires nothing."""
    import time

    async with world() as w:
        tx, ref = w.offer(state_dict())
        monkeypatch.setattr(time, "time", lambda: 4e9)
        await anyio.sleep(100)
        assert_same(await w.download(ref), state_dict())
        monkeypatch.setattr(time, "time", lambda: 1e9)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


# --- links that go and come -----------------------------------------------------------------------


@pytest.mark.parametrize("reads", [1, 2, 4, 6])
async def test_a_cut_link_resumes_where_it_was(tmp_path, reads):
    """After a link was cut in the middle the download goes on, and no landed range is served again."""
    count = 0
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:

        async def cut() -> None:
            w.network.cut("server", "site-1")

        def look(_start: int) -> None:
            nonlocal count
            count += 1
            if count == reads:
                wait_from_thread(cut)

        tx, ref = w.offer(ComputedSource(20 * MIB, look))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
            await anyio.sleep(3)
            w.network.mend("server", "site-1")
        assert attempt.state is not None
        assert_pattern(attempt.state)
        assert 3 <= attempt.seconds < 10
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert (
            count == 6 + 1
        )  # the header is in the first of six chunks; one was on the way when the link was cut
        again = w.site.publisher.statistics().bytes_served - ref.size
        assert again == (4 * MIB if reads < 6 else ref.size - 20 * MIB)
        w.assert_idle()


async def test_a_range_that_is_being_landed_when_the_link_goes_is_not_asked_for_again():
    """What a slow disk still holds counts as here: after a resumption it is not served a second time."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(2 * MIB))
        attempt = Attempt()
        terms = Terms(landing=in_memory(write=gate))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            await gate.reached()
            for _ in range(3):
                w.network.cut("server", "site-1")
                await anyio.sleep(1)
                w.network.mend("server", "site-1")
                await anyio.sleep(10)
            gate.open()
        assert attempt.state is not None
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert w.site.publisher.statistics().bytes_served == ref.size
        w.assert_idle()


async def test_a_cut_that_lasts_ends_the_download_after_the_grace():
    """A link that is cut and does not come back is waited for 30 s, to the second, and named in the error."""
    network = MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(9.5)
            w.network.cut("server", "site-1")
            await attempt.over.wait()
        assert attempt.seconds == 9.5 + 30
        assert isinstance(attempt.error, SourceLostError)
        assert attempt.error.where["site"] == "site-1"
        outcome = await tx.wait()
        assert outcome.reason == "idle_timeout"
        assert (
            outcome.settled_at == 8 + 150
        )  # two chunks of 4 MiB were served, the second after 8 s
        w.assert_idle()


@pytest.mark.parametrize("partition", [5.0, 14.0])
async def test_a_partition_shorter_than_the_silence_is_only_a_delay(partition):
    """A link that is silent for less than 15 s lives, and what was under way arrives."""
    network = MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w:
        await anyio.sleep(5)  # a ping has just been heard
        tx, ref = w.offer(state_dict(10))
        attempt = Attempt()
        async with anyio.create_task_group() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(0.1)
            link = w.server.links.live[Address("site-1")]
            network.partition("server", "site-1")
            await anyio.sleep(partition)
            network.heal("server", "site-1")
        assert attempt.state is not None
        assert_same(attempt.state, state_dict(10))
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert w.server.links.live[Address("site-1")] is link
        assert w.site.publisher.statistics().bytes_served == ref.size


async def test_a_partition_longer_than_the_silence_costs_the_link_and_not_the_download():
    """A link silent for 15 s is lost; when the network heals within the grace the download goes on."""
    network = MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        attempt = Attempt()
        async with anyio.create_task_group() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(9)
            link = w.server.links.live[Address("site-1")]
            network.partition("server", "site-1")
            await anyio.sleep(25)
            assert link.cause is not None
            network.heal("server", "site-1")
        assert attempt.state is not None
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        w.assert_idle()


async def test_a_partition_that_lasts_ends_the_download_after_silence_and_grace():
    """Without a word from the source a download ends after 15 s of silence and 30 s of grace, exactly."""
    async with world() as w:
        gate = Gate()
        _, ref = w.offer(ComputedSource(9 * MIB, gate))
        attempt = Attempt()
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await gate.reached()
            gate.open()
            assert anyio.current_time() == 0
            w.network.partition("server", "site-1")
            await attempt.over.wait()
        heard = attempt.ended - SILENCE_SECONDS - 30
        assert heard == 0
        assert isinstance(attempt.error, SourceLostError)
        w.network.heal("server", "site-1")


async def test_what_a_link_that_is_replaced_had_under_way_is_asked_for_again():
    """When the peer comes back over a new link before the old one is missed, the download resumes at once."""
    network = MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        attempt = Attempt()
        async with anyio.create_task_group() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(9)
            first = w.server.links.live[Address("site-1")]
            w.site.links.live[Address("server")].lose(UnreachableError("half of the link is gone"))
            await anyio.sleep(3)
            assert w.server.links.live[Address("site-1")] is not first
        assert attempt.state is not None
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert attempt.seconds < 20 + 4 + 1  # the transfer itself, one chunk again, and no stall


async def test_a_peer_that_dials_again_is_asked_again_at_once():
    """A second link of the same peer takes the place of the first, and what was asked for there is asked for here."""
    async with world(sites=0) as w, puppet(w.network, instance=bytes(16)) as first:
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref_of(first)))
            await first.next(Open)
            await anyio.sleep(3)
            async with puppet(w.network, instance=bytes(16)) as second:
                await second.next(Open)
                assert anyio.current_time() == 3
                await settled_tasks()
                assert not first.alive()
                assert w.server.statistics().links == 1
                attempt.scope.cancel()
                await second.next(Cancel)


# --- slow lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [4_000, 20_000, 60_000])
async def test_a_slow_line_that_moves_bytes_never_times_out(rate):
    """A transfer that takes twenty times the stall budget, and more, succeeds: bytes keep coming."""
    seconds = 25 * 20.0
    nbytes = int(rate * seconds)
    network = MemoryNetwork()
    async with world(network=network) as w:
        network.conditions("site-1", "server").set(bandwidth=rate)
        tx, ref = w.offer(ComputedSource(nbytes))
        attempt = Attempt()
        await attempt.run(partial(w.download, ref))
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert seconds <= attempt.seconds < seconds + 120
        assert w.server.statistics().links == 1
        w.assert_idle()


async def test_a_line_that_turns_slow_and_fast_again_is_followed():
    """When a line slows down to a hundredth the transfer asks for less at a time, and for more when it recovers."""
    network = MemoryNetwork()
    async with world(network=network) as w:
        line = network.conditions("site-1", "server")
        line.set(bandwidth=4 * MIB)
        tx, ref = w.offer(ComputedSource(80 * MIB))
        attempt = Attempt()
        async with anyio.create_task_group() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(5)
            line.set(bandwidth=40_000)
            await anyio.sleep(300)
            line.set(bandwidth=4 * MIB)
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert attempt.seconds < 5 + 300 + 30


async def test_control_frames_overtake_chunks_on_a_slow_line():
    """A cancel behind megabytes of chunks on a slow line is with the producer at once, and its queue is void."""
    network = MemoryNetwork()
    async with world(network=network) as w:
        network.conditions("server", "site-1").set(bandwidth=100_000)
        tx = w.server.publish(
            [ComputedSource(40 * MIB)], [slot()], budgets=Budgets(settle=1000, idle=1000)
        )
        other = w.server.publish([ComputedSource(MIB // 4)], [slot()])
        attempt = Attempt()
        async with anyio.create_task_group() as group:
            call = w.site.run_transfer
            group.start_soon(attempt.run, partial(call, w.site.transfer(tx.refs(0)[0], memory())))
            await anyio.sleep(15)
            attempt.scope.cancel()
            assert (await tx.wait()).status is OutcomeStatus.FAILED
            assert anyio.current_time() == 15
            small = Attempt()
            await small.run(partial(call, w.site.transfer(other.refs(0)[0], memory())))
        assert small.state is not None
        assert small.seconds < 5  # not behind 40 MiB that nobody wants


def slot() -> Slot:
    """A slot for whoever has the ticket."""
    return Slot(secrets.token_bytes(16))


# --- our own slowness -----------------------------------------------------------------------------


async def test_a_slow_disk_of_ours_is_no_fault_of_the_source():
    """While our own landing blocks the producer is asked to hold: 300 s later the transfer still succeeds."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = Terms(landing=in_memory(write=gate))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            await gate.reached()
            await anyio.sleep(300)
            assert tx.outcome is None
            gate.open()
        assert attempt.state is not None
        assert_pattern(attempt.state)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert w.server.statistics().links == 1
        w.assert_idle()


async def test_the_patience_with_a_slow_disk_of_ours_has_an_end():
    """Holds are granted for 600 s in all; then the receiver gives up, and the producer knows at once."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = Terms(landing=in_memory(write=gate))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            outcome = await tx.wait()
            assert outcome.status is OutcomeStatus.FAILED
            assert 600 < outcome.settled_at <= 600 + 124 + 20
            gate.open()
        assert isinstance(attempt.error, TransferTimeoutError)
        w.assert_idle()


async def test_a_slow_last_flush_keeps_the_slot(tmp_path):
    """A receiver that takes 500 s to put the payload in its place says so: the producer waits, and has its success."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = Terms(landing=lambda layout: Hooked(job.landing(layout), finish=gate))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(job.download, ref, terms))
            await gate.reached()
            await anyio.sleep(500)
            assert tx.outcome is None
            gate.open()
        assert attempt.seconds == 500
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        outcome = await tx.wait()
        assert outcome.status is OutcomeStatus.COMPLETED
        assert outcome.settled_at == 500
        w.assert_idle()


async def test_a_last_flush_that_does_not_end_is_given_up_by_both_ends():
    """Holds are granted for 600 s in all; a flush that takes longer fails at the receiver, and the producer knows why."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = Terms(landing=in_memory(finish=gate))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            outcome = await tx.wait()
            assert outcome.settled_at == 600 + 124
            [verdict] = outcome.slots["server"].values()
            assert verdict.reason == "cancelled: the landing does not end"
            await anyio.sleep(7)
            gate.open()
        assert attempt.seconds == 600 + 124 + 7
        assert isinstance(attempt.error, TransferTimeoutError)
        w.assert_idle()


async def test_a_deadline_is_kept_in_the_last_flush():
    """An absolute deadline ends a transfer that has all its bytes and waits for its own disk."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = Terms(landing=in_memory(finish=gate), budgets=Budgets(deadline=30))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            outcome = await tx.wait()
            assert outcome.settled_at == 30
            gate.open()
        assert isinstance(attempt.error, TransferTimeoutError)
        assert "deadline" in attempt.error.what
        w.assert_idle()


async def test_a_slow_last_flush_keeps_the_slot_over_a_link_that_comes_and_goes():
    """A link that is lost and mended while the receiver flushes costs nothing: later holds arrive, and the word counts."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = Terms(landing=in_memory(finish=gate))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            await gate.reached()
            await anyio.sleep(10)
            w.network.cut("server", "site-1")
            await anyio.sleep(60)
            w.network.mend("server", "site-1")
            await anyio.sleep(300)
            gate.open()
        assert attempt.state is not None, attempt.error
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        w.assert_idle()


async def test_a_full_pool_of_ours_is_no_silence_of_the_peer():
    """While all buffers wait for our slow disk the links live on, and every transfer ends well."""
    async with world(sites=3) as w:
        gate = Gate()
        terms = Terms(landing=in_memory(write=not_the_first(gate)))
        offers = [w.offer(ComputedSource(40 * MIB), site=site) for site in w.sites]
        attempts = [Attempt() for _ in offers]
        async with tasks(gate) as group:
            for attempt, (_, ref) in zip(attempts, offers, strict=True):
                group.start_soon(attempt.run, partial(w.download, ref, terms))
                await gate.reached()  # the first has the pool to itself, and fills it
                await anyio.sleep(20)
            assert w.server.resources.pool.lent == w.server.resources.pool.count
            assert w.server.statistics().links == 3
            gate.open()
        for attempt, (tx, _) in zip(attempts, offers, strict=True):
            assert attempt.state is not None, attempt.error
            assert_pattern(attempt.state)
            assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        w.assert_idle()


async def test_a_source_that_hangs_in_its_own_disk_costs_its_own_download_only():
    """A read that hangs ends its download after the schedule; the link stays, and so do downloads of others."""
    async with world(sites=2) as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB, gate))
        other, spare = w.offer(ComputedSource(9 * MIB), site=w.sites[1])
        attempt = Attempt()
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await gate.reached()
            assert_pattern(await w.download(spare))
            assert (await other.wait()).settled_at == 0
            await attempt.over.wait()
            assert attempt.seconds == 94
            assert w.server.statistics().links == 2
            await anyio.sleep(10)
            gate.open()
            assert (await tx.wait()).settled_at == 104
        w.assert_idle()


# --- the producer's budgets -----------------------------------------------------------------------


async def test_a_transaction_that_settles_slowly_delays_no_other():
    """While one waits a minute for a read that hangs, another ends at its own second, and is told then."""
    gate = Gate()
    told: list[float] = []
    async with world() as w, puppet(w.network, "peer", "site-1") as peer, tasks(gate):
        slow, ref = w.offer(ComputedSource(9 * MIB, gate), to="peer")
        other, _ = w.offer(ComputedSource(MIB), to="peer")
        other.on_settled.append(lambda _outcome: told.append(anyio.current_time()))
        await peer.open(ref)
        await peer.pull(ref, 0, 1000)
        await gate.reached()
        await anyio.sleep(90)
        slow.cancel("not wanted any more")
        assert w.site.publisher.statistics().settling == 1
        assert (await other.wait()).settled_at == 120
        assert told == [120]
        assert slow.outcome is None
        assert (await slow.wait()).settled_at == 90 + 60
        gate.open()


async def test_an_offer_that_nobody_takes_expires():
    """A slot that nobody opens fails after the acquire budget of 120 s, and its source is let go."""
    async with world() as w:
        source = ComputedSource(MIB)
        tx, ref = w.offer(source)
        outcome = await tx.wait()
        assert outcome.settled_at == 120
        assert outcome.reason == "acquire_timeout"
        assert source.closed
        with pytest.raises(Exception, match="acquire_timeout"):
            await w.download(ref)


async def test_a_receiver_that_goes_quiet_is_given_up():
    """A slot whose receiver opens, pulls a range and then is silent fails 150 s after that range."""
    async with world(sites=1) as w, puppet(w.network, "peer", "site-1") as peer:
        tx, ref = w.offer(ComputedSource(9 * MIB), to="peer")
        await anyio.sleep(30)
        await peer.open(ref)
        await anyio.sleep(30)
        await peer.pull(ref, 0, 1000)
        await peer.next(Chunk)
        outcome = await tx.wait()
        assert outcome.settled_at == 60 + 150
        assert outcome.reason == "idle_timeout"


async def test_asking_for_the_same_range_again_is_no_progress():
    """A receiver that pulls one range over and over is served, and given up 150 s after the first time."""
    async with world(sites=1) as w, puppet(w.network, "peer", "site-1") as peer:
        tx, ref = w.offer(ComputedSource(9 * MIB), to="peer")
        await peer.open(ref)
        while tx.outcome is None:
            await peer.pull(ref, 0, 1000)
            await peer.next(Chunk)
            with anyio.move_on_after(7):
                await tx.wait()
        assert tx.outcome.settled_at == 150
        assert tx.outcome.reason == "idle_timeout"


async def test_an_idle_budget_below_the_acquire_budget_is_kept():
    """Once a slot is taken its idle budget counts, also where an unclaimed slot would be kept for longer."""
    budgets = Budgets(acquire=5000, idle=200)
    async with world(sites=1) as w, puppet(w.network, "peer", "site-1") as peer:
        tx, ref = w.offer(ComputedSource(9 * MIB), to="peer", budgets=budgets)
        await anyio.sleep(10)
        await peer.open(ref)
        outcome = await tx.wait()
        assert outcome.settled_at == 210
        assert outcome.reason == "idle_timeout"


async def test_a_deadline_of_the_producer_ends_a_transfer_that_moves():
    """An absolute deadline ends the transaction while bytes still move, and the receiver hears of it."""
    network = MemoryNetwork(bandwidth=MIB)
    async with world(network=network) as w:
        tx, ref = w.offer(ComputedSource(100 * MIB), budgets=Budgets(deadline=25.1))
        attempt = Attempt()
        await attempt.run(partial(w.download, ref))
        assert attempt.seconds == 25.25  # the piece that was on the wire was finished
        assert (await tx.wait()).reason == "deadline"
        assert "deadline" in str(attempt.error)
        w.assert_idle()


async def test_defaults_let_nothing_be_pinned_for_good():
    """With the defaults a source is released within minutes, whatever its receivers do or fail to do."""
    async with world(sites=1) as w, puppet(w.network, "peer", "site-1") as peer:
        silent, ref = w.offer(ComputedSource(MIB), to="peer")
        unclaimed, _ = w.offer(ComputedSource(MIB), to="peer")
        unconfirmed, all_of_it = w.offer(ComputedSource(MIB), to="peer")
        await peer.open(ref, stream=1)
        await peer.open(all_of_it, stream=2)
        await peer.pull(all_of_it, 0, all_of_it.size, stream=2)
        await peer.next(Chunk)
        for tx in (silent, unclaimed, unconfirmed):
            outcome = await tx.wait()
            assert outcome.status is OutcomeStatus.FAILED
            assert outcome.settled_at <= 150


async def test_a_refused_download_says_what_the_source_said():
    """A wrong ticket is an error of the receiver's with the source's words, at once."""
    async with world() as w:
        tx, ref = w.offer(state_dict())
        forged = Ref(ref.source, ref.id, secrets.token_bytes(16), ref.size)
        attempt = Attempt()
        await attempt.run(partial(w.download, forged))
        assert isinstance(attempt.error, PeerRefusedError)
        assert attempt.seconds == 0
        assert tx.outcome is None
