"""Failure notices: told by the owner of a source, believed from the owner only, and remembered for those who come late."""

import secrets
from functools import partial

import anyio
import pytest

from streamoff.errors import LimitError, MalformedFrameError, SourceFailedError, UsageError
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, Ref
from streamoff.wire.frames import Ack, AckOf, Notice, Open

from .world import (
    Attempt,
    ComputedSource,
    assert_pattern,
    assert_same,
    disk,
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
