"""Failure notices: told by the owner of a source, believed from the owner only, and remembered for those who come late."""

import secrets
from functools import partial
from pathlib import Path

import anyio
import pytest

from streamoff.errors import LimitError, MalformedFrameError, SourceFailedError, UsageError
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.runtime.sparing import BURST
from streamoff.scratch.janitor import JANITOR
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, OutcomeStatus, Ref
from streamoff.wire.frames import Ack, AckOf, Notice, Open

from .ends import PLACES, ends
from .world import (
    Attempt,
    ComputedSource,
    Gate,
    Hooked,
    assert_pattern,
    assert_same,
    disk,
    files,
    in_memory,
    memory,
    puppet,
    settled_tasks,
    state_dict,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


def ref_of(source: str, name: str = "r1") -> Ref:
    """A ref of a source that need not exist."""
    return Ref(Address(source), name, secrets.token_bytes(16), 1000)


async def test_an_ancestor_of_the_source_ends_its_downloads_at_once(tmp_path):
    """When the owner says that a trainer is dead, downloads from it end in that instant, and no byte is left."""
    async with (
        world(sites=0) as w,
        puppet(w.network, "site-1") as site,
        open_job("job", w.server, scratch=tmp_path) as job,
    ):
        ref = ref_of("site-1.trainer")
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
            await site.next(Open)
            await anyio.sleep(3)
            await site.send(
                Notice(
                    **site.route(),
                    id=5,
                    source=ref.source,
                    refs=(ref.id,),
                    reason="exit code 9",
                )
            )
            ack = await site.next(Ack)
            assert (ack.of, ack.id) == (AckOf.NOTICE, 5)
            await attempt.over.wait()
        assert attempt.seconds == 3
        assert isinstance(attempt.error, SourceFailedError)
        assert "exit code 9" in str(attempt.error)
        assert attempt.error.where["site"] == "site-1.trainer"
        w.assert_idle()


async def test_a_source_may_say_it_of_itself():
    """A source that gives up its own refs is believed."""
    async with world(network=MemoryNetwork(bandwidth=MIB)) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(5)
            told = await w.site.notify_failure(["server"], "site-1", [ref.id], "out of memory")
        assert told == {"server": ""}
        assert isinstance(attempt.error, SourceFailedError)
        assert 5 <= attempt.seconds <= 5.25
        tx.cancel()
        w.assert_idle()


async def test_a_download_that_starts_afterwards_fails_before_its_first_request():
    """A notice is remembered for half an hour: who comes later is told at once, and nothing is sent."""
    async with world(sites=0) as w, puppet(w.network, "site-1") as site:
        ref = ref_of("site-1.trainer")
        await site.send(
            Notice(**site.route(), id=1, source=ref.source, refs=(ref.id,), reason="it crashed")
        )
        await site.next(Ack)
        await anyio.sleep(1799)
        with pytest.raises(SourceFailedError, match="it crashed"):
            w.server.transfer(ref, memory())
        await anyio.sleep(2)
        w.server.transfer(ref, memory())
        assert not any(isinstance(frame, Open) for frame in site.frames)


async def test_only_what_is_named_is_dead():
    """A notice about one ref leaves other refs of the source, and equal names of other sources, alone."""
    async with world(sites=2) as w:
        dead, spared = w.offer(state_dict()), w.offer(state_dict(2))
        other = w.offer(state_dict(3), site=w.sites[1])
        await w.site.notify_failure(["server"], "site-1", [dead[1].id, other[1].id], "lost")
        with pytest.raises(SourceFailedError):
            await w.download(dead[1])
        assert_same(await w.download(spared[1]), state_dict(2))
        assert_same(await w.download(other[1]), state_dict(3))
        dead[0].cancel()


@pytest.mark.parametrize("source", ["site-2", "site-2.trainer", "server", "site"])
async def test_a_forged_notice_is_not_believed_and_costs_the_link(source):
    """Who declares somebody dead that is neither itself nor below it is not believed, and loses its link."""
    async with world(sites=0) as w, puppet(w.network, "site-1") as liar:
        await liar.send(
            Notice(**liar.route(), id=1, source=Address(source), refs=("r1",), reason="a lie")
        )
        await settled_tasks()
        assert not liar.alive()
        assert w.server.statistics().downloads.known_dead == 0
        assert not liar.frames


async def test_a_forged_notice_ends_no_download():
    """A download goes on while a stranger declares its source dead."""
    async with world(network=MemoryNetwork(bandwidth=MIB)) as w:
        tx, ref = w.offer(ComputedSource(8 * MIB))
        attempt = Attempt()
        async with tasks() as group, puppet(w.network, "liar") as liar:
            group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(2)
            await liar.send(
                Notice(**liar.route(), id=1, source=ref.source, refs=(ref.id,), reason="a lie")
            )
            await attempt.over.wait()
        assert attempt.state is not None
        assert_pattern(attempt.state)
        await tx.wait()


async def test_many_refs_are_told_in_several_notices():
    """More refs than a notice holds are split, and every one of them is known afterwards."""
    async with world() as w:
        refs = [f"r{number}" for number in range(1000)]
        assert await w.site.notify_failure(["server"], "site-1", refs, "lost") == {"server": ""}
        assert w.server.statistics().downloads.known_dead == 1000
        with pytest.raises(SourceFailedError):
            w.server.transfer(ref_of("site-1", "r999"), memory())


async def test_a_notice_of_too_many_refs_is_refused():
    """Nobody can make a notice of more refs than the limit, or of none."""
    async with world(sites=0) as w, puppet(w.network, "site-1") as site:
        for refs in ((), tuple(f"r{number}" for number in range(257))):
            with pytest.raises((LimitError, MalformedFrameError, UsageError)):
                await site.send(Notice(**site.route(), id=1, source=site.address, refs=refs))


async def test_what_is_remembered_of_notices_is_bounded():
    """Ten thousand refs declared dead leave a bounded memory, the newest of them."""
    async with world() as w:
        for batch in range(40):
            refs = [f"r{batch}-{number}" for number in range(250)]
            await w.site.notify_failure(["server"], "site-1", refs, "lost")
        assert w.server.statistics().downloads.known_dead == 4096
        with pytest.raises(SourceFailedError):
            w.server.transfer(ref_of("site-1", "r39-249"), memory())


async def test_receivers_are_told_side_by_side_within_ten_seconds():
    """A receiver that does not answer costs the others nothing, and the whole is over after ten seconds."""
    async with world(sites=3) as w:
        w.network.partition("server", "site-2")
        await anyio.sleep(0.5)
        told = await w.server.notify_failure(
            ["site-1", "site-2", "site-3"], "server.aggregator", ["r1"], "killed"
        )
        assert anyio.current_time() == 0.5 + 10
        assert told[Address("site-1")] == told[Address("site-3")] == ""
        assert "no answer" in told[Address("site-2")]
        w.network.heal("server", "site-2")


async def test_a_notice_is_repeated_over_a_link_that_comes_back():
    """A notice that was lost with a link arrives when it is sent again."""
    async with world(network=MemoryNetwork(latency=0.1)) as w:
        told: list[dict[Address, str]] = []

        async def tell() -> None:
            told.append(await w.site.notify_failure(["server"], "site-1", ["r1"], "lost"))

        async with tasks() as group:
            group.start_soon(tell)
            await anyio.sleep(0.05)
            w.network.cut("server", "site-1")
            w.network.mend("server", "site-1")
        assert told == [{"server": ""}]
        assert anyio.current_time() < 4


async def test_nobody_is_declared_dead_by_somebody_else():
    """A notice about a source that is not one's own is refused where it is made."""
    async with world() as w:
        for source in ("server", "site-2", "site-10"):
            with pytest.raises(UsageError, match="not mine"):
                await w.site.notify_failure(["server"], source, ["r1"], "no")


async def test_an_endpoint_that_closes_waits_for_no_answer():
    """A notice under way when the endpoint closes ends with a report of who was not told."""
    network = MemoryNetwork()
    async with BaseEndpoint("server", transports=[network]), tasks() as group:
        told: list[dict[Address, str]] = []
        async with BaseEndpoint("site-1", transports=[network], close_timeout=1) as site:
            await site.connect("server")
            network.partition("server", "site-1")

            async def tell() -> None:
                told.append(await site.notify_failure(["server"], "site-1", ["r1"], "lost"))

            group.start_soon(tell)
            await anyio.sleep(1)
        await settled_tasks()
        assert "no answer" in told[0][Address("server")]
        assert anyio.current_time() <= 3
        network.heal("server", "site-1")


# --- in a transfer's way --------------------------------------------------------------------------


PIECE = 0.25
"""Seconds that a piece of a chunk takes on a line of a mebibyte a second; nothing overtakes it."""


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("chunks", [0, 1, 2])
async def test_a_notice_ends_a_transfer_that_streams_in_one_way(where: str, chunks: int) -> None:
    """However far it has come, a download ends when the owner's word arrives, ahead of the bytes, and keeps nothing."""
    async with ends(where) as e:
        hop = Address("server" if where == "direct" else "site-1")
        e.world.network.conditions(e.source.address, hop).set(bandwidth=MIB)
        if where == "below a relay":
            e.world.network.conditions("server", "site-1").set(bandwidth=MIB)
        tx = e.publish(ComputedSource(21 * MIB))
        ref = tx.refs(0)[0]
        attempt = Attempt()
        async with tasks() as group:
            transfer = e.receiver.transfer(ref, memory())
            group.start_soon(attempt.run, partial(e.receiver.run_transfer, transfer))
            while tx.record.of_slot(0)[0].served.nbytes < chunks * 4 * MIB:  # noqa: ASYNC110
                await anyio.sleep(0.5)
            await anyio.sleep(2.1 + e.way)
            said_at = anyio.current_time()
            told = await e.source.notify_failure(
                [e.receiver.address], e.source.address, [ref.id], "killed"
            )
            assert told == {e.receiver.address: ""}
        assert isinstance(attempt.error, SourceFailedError)
        assert said_at + e.way <= attempt.ended <= said_at + e.way + PIECE
        tx.cancel()
        await tx.wait()
        await anyio.sleep(10)
        e.world.assert_idle()


async def test_a_notice_waits_for_the_thread_that_lands_and_for_nothing_else(
    tmp_path: Path,
) -> None:
    """While a thread writes, the download has ended already; it returns when the thread has, and the file is gone."""
    gate = Gate()
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = Terms(landing=lambda layout: Hooked(job.landing(layout), write=gate))
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(job.download, ref, terms))
            await gate.reached()
            await w.site.notify_failure(["server"], "site-1", [ref.id], "killed")
            await anyio.sleep(3)
            assert not attempt.over.is_set()
            gate.open()
        assert attempt.seconds == 3
        assert isinstance(attempt.error, SourceFailedError)
        await anyio.to_thread.run_sync(JANITOR.idle, 10)
        assert files(job.path) == [".lease"]
        assert job.ledger.used == 0
        tx.cancel()
        await settled_tasks()
        w.assert_idle()


@pytest.mark.parametrize("phase", ["finish", "confirm"])
async def test_a_payload_that_is_here_is_delivered_whatever_became_of_its_source(
    phase: str,
) -> None:
    """A notice that comes when the last byte has landed takes nothing away."""
    gate = Gate()
    async with world(network=MemoryNetwork(latency=0.5)) as w:
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        done = anyio.Event()

        def look(landed: int, wanted: int) -> None:
            if landed == wanted:
                done.set()

        terms = (
            Terms(landing=in_memory(finish=gate)) if phase == "finish" else memory(progress=look)
        )
        async with tasks(gate) as group:
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            await (gate.reached() if phase == "finish" else done.wait())
            await w.site.notify_failure(["server"], "site-1", [ref.id], "killed")
            gate.open()
        assert attempt.state is not None, attempt.error
        assert_pattern(attempt.state)
        await tx.wait()


async def test_every_download_of_a_dead_source_ends_and_no_other() -> None:
    """One notice ends all it names at once; what else comes from the same source goes on."""
    async with world(network=MemoryNetwork(bandwidth=4 * MIB)) as w:
        offers = [w.offer(ComputedSource(9 * MIB)) for _ in range(6)]
        attempts = [Attempt() for _ in offers]
        async with tasks() as group:
            for attempt, (_, ref) in zip(attempts, offers, strict=True):
                group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(3)
            dead = [ref.id for _, ref in offers[:4]]
            await w.site.notify_failure(["server"], "site-1", dead, "killed")
        assert len({attempt.ended for attempt in attempts[:4]}) == 1
        assert all(isinstance(attempt.error, SourceFailedError) for attempt in attempts[:4])
        assert all(attempt.state is not None for attempt in attempts[4:])
        for tx, _ in offers[:4]:
            tx.cancel()


async def test_receivers_of_a_broadcast_are_told_side_by_side() -> None:
    """Twenty receivers that wait for a dead source hear of it in the same instant, and each of them once."""
    async with world(sites=20, network=MemoryNetwork(latency=0.5)) as w:
        ref = ref_of("server.aggregator")
        attempts = [Attempt() for _ in w.sites]
        async with tasks() as group:
            for attempt, site in zip(attempts, w.sites, strict=True):
                transfer = site.transfer(ref, memory())
                group.start_soon(attempt.run, partial(site.run_transfer, transfer))
            await anyio.sleep(10)
            said_at = anyio.current_time()
            told = await w.server.notify_failure(
                [site.address for site in w.sites], ref.source, [ref.id], "killed"
            )
            assert anyio.current_time() == said_at + 1
        assert set(told.values()) == {""}
        assert {attempt.ended for attempt in attempts} == {said_at + 0.5}
        assert w.server.statistics().notifier.acknowledged == 20


@pytest.mark.parametrize("first", ["the notice", "the download"])
async def test_a_notice_and_a_start_in_the_same_instant_end_alike(first: str) -> None:
    """Whichever comes first, the download fails at once; if it was the notice, before its first request."""
    async with world(sites=0) as w, puppet(w.network, "site-1") as site:
        ref = ref_of("site-1.trainer")
        notice = Notice(**site.route(), id=1, source=ref.source, refs=(ref.id,), reason="killed")
        attempt = Attempt()
        async with tasks() as group:

            async def start() -> None:
                await attempt.run(partial(w.download, ref))

            if first == "the notice":
                await site.send(notice)
                await site.next(Ack)
                group.start_soon(start)
            else:
                group.start_soon(start)
                await site.next(Open)
                await site.send(notice)
            await attempt.over.wait()
        assert attempt.seconds == 0
        assert isinstance(attempt.error, SourceFailedError)
        await settled_tasks()
        assert not any(isinstance(frame, Open) for frame in site.frames)


# --- who is believed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["site-1", "site-1.t1", "site-1.t1.child", "server", "site-2", "site-1.t00"]
)
async def test_a_trainer_behind_a_relay_can_only_declare_itself_dead(source: str) -> None:
    """What a downlink of a relay says of the relay, of its neighbours or of others changes nothing and costs nobody a link."""
    network = MemoryNetwork()
    async with (
        BaseEndpoint("server", transports=[network]) as server,
        BaseEndpoint("site-1", transports=[network]) as site,
        BaseEndpoint("site-1.t1", transports=[network]) as honest,
    ):
        await site.connect("server")
        await honest.connect("site-1")
        async with puppet(network, "site-1.t0", "site-1") as liar:
            await liar.send(
                Notice(
                    **liar.route(), id=1, source=Address(source), refs=("r1", "r2"), reason="a lie"
                )
            )
            await settled_tasks()
            assert server.statistics().downloads.known_dead == 0
            assert server.statistics().frames_ignored == 1
            assert liar.alive()
            assert (server.statistics().links, site.statistics().links) == (1, 3)
            await liar.send(
                Notice(**liar.route(), id=2, source=liar.address, refs=("r1",), reason="it is so")
            )
            assert (await liar.next(Ack)).id == 2
            assert server.statistics().downloads.known_dead == 1


async def test_a_notice_under_a_strange_name_costs_the_link() -> None:
    """A site that speaks as another, or as the server, is not heard, and loses its link."""
    for name in ("site-2", "server", "site-10", "site"):
        async with world(sites=0) as w, puppet(w.network, "site-1") as liar:
            await liar.send(
                Notice(
                    to=Address("server"),
                    sender=Address(name),
                    id=1,
                    source=Address(name),
                    refs=("r1",),
                    reason="a lie",
                )
            )
            await settled_tasks()
            assert not liar.alive()
            assert w.server.statistics().downloads.known_dead == 0


# --- floods ---------------------------------------------------------------------------------------


async def test_a_flood_of_notices_costs_a_bounded_memory_and_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Thousands of notices leave the bound, hardly a line, what others have said, and a download that does not notice."""
    caplog.set_level("INFO", "streamoff")
    async with world(sites=1, network=MemoryNetwork(bandwidth=4 * MIB)) as w:
        tx, ref = w.offer(ComputedSource(9 * MIB))
        await w.site.notify_failure(["server"], "site-1", ["lost"], "killed")
        attempt = Attempt()
        async with tasks() as group, puppet(w.network, "flood") as flood:
            group.start_soon(attempt.run, partial(w.download, ref))
            for batch in range(200):
                refs = tuple(f"r{batch}-{number}" for number in range(256))
                source = Address(f"flood.{batch}")
                await flood.send(
                    Notice(**flood.route(), id=batch, source=source, refs=refs, reason="x" * 1000)
                )
                await flood.next(Ack)
            assert w.server.statistics().downloads.known_dead == 4096
            await attempt.over.wait()
        assert attempt.state is not None
        assert_pattern(attempt.state)
        with pytest.raises(SourceFailedError):
            w.server.transfer(ref_of("site-1", "lost"), memory())
        heard = [one for one in caplog.messages if "says that" in one]
        assert len(heard) <= BURST + 3
        assert max(map(len, heard)) < 1000
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_a_receiver_that_cannot_be_reached_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Who was not told, and why, is what comes back and what the log says."""
    caplog.set_level("INFO", "streamoff.notices")
    async with world(sites=2) as w:
        told = await w.server.notify_failure(
            ["site-1", "site-9", "site-1.gone"], "server", ["r1"], "killed"
        )
        assert anyio.current_time() == 10
        assert told == {
            "site-1": "",
            "site-9": "no answer to 4 attempts",
            "site-1.gone": "no answer to 4 attempts, the way ends before it",
        }
        [line] = [one for one in caplog.messages if "not told" in one]
        assert "told 1 of 3 receivers that server is dead (killed)" in line
        assert "site-9: no answer to 4 attempts" in line
