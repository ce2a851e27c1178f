"""Many sites in one event loop: what they cost is bounded, and who is stalled costs the others nothing."""

import secrets
import threading
from functools import partial
from pathlib import Path

import anyio
import pytest

from streamoff.runtime.jobs import open_job
from streamoff.runtime.resources import (
    LANDING_THREADS,
    READING_THREADS,
    ROOT_THREADS,
    Resources,
)
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, OutcomeStatus, Ref, Slot

from .world import (
    Attempt,
    ComputedSource,
    assert_pattern,
    disk,
    memory,
    not_the_first,
    settled_tasks,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

TASKS_PER_LINK_END = 3
"""A link's reader and writer, and the task that keeps it."""
TASKS_PER_ENDPOINT = 1
"""The clock."""
TASKS_PER_ROOT = 4
"""The supervisor, its lease, a look for dead roots, and who lets through what waits for space."""


def count_tasks() -> int:
    """Tasks of the running loop."""
    return len(anyio.get_running_tasks())


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def watch(peaks: dict[str, int], done: anyio.Event) -> None:
    """Note the most there ever was, at every turn of the loop."""
    resources = Resources.current()
    while not done.is_set():
        for name, value in {
            "threads": threading.active_count(),
            "descriptors": descriptors(),
            "landing": int(resources.landing.borrowed_tokens),
            "reading": int(resources.reading.borrowed_tokens),
            "buffers": resources.pool.lent,
        }.items():
            peaks[name] = max(peaks.get(name, 0), value)
        await anyio.lowlevel.checkpoint()


async def test_four_hundred_sites_cost_what_they_should(tmp_path):
    """400 sites hand 1 MiB each to one server at once: tasks, threads, descriptors and buffers stay within bounds."""
    sites = 400
    before = count_tasks()
    async with world(sites=sites) as w:
        await settled_tasks()
        idle_tasks, idle_threads = count_tasks(), threading.active_count()
        idle_descriptors = descriptors()
        idle = 2 * sites * TASKS_PER_LINK_END + (sites + 1) * TASKS_PER_ENDPOINT
        assert idle_tasks - before == idle
        peaks: dict[str, int] = {}
        done = anyio.Event()
        busy = 0
        async with open_job("job", w.server, scratch=tmp_path) as job, tasks() as watching:
            watching.start_soon(watch, peaks, done)
            offers = [w.offer(ComputedSource(MIB), site=site) for site in w.sites]
            attempts = [Attempt() for _ in offers]
            async with tasks() as group:
                for attempt, (_, ref) in zip(attempts, offers, strict=True):
                    group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
                busy = count_tasks()
            done.set()
            for attempt, (tx, _) in zip(attempts, offers, strict=True):
                assert attempt.state is not None
                assert tx.outcome is not None
                assert tx.outcome.status is OutcomeStatus.COMPLETED
            assert attempts[123].state is not None
            assert_pattern(attempts[123].state)
            assert job.report.bytes_landed > sites * MIB
        # a download is the caller's task (the test's own here) and the transfer's; one task watches
        assert busy - idle_tasks <= 2 * sites + TASKS_PER_ROOT + 1
        workers = LANDING_THREADS + READING_THREADS + ROOT_THREADS
        assert peaks["threads"] - idle_threads <= workers + 1
        assert peaks["landing"] <= LANDING_THREADS
        assert peaks["reading"] <= READING_THREADS
        lease_and_listing = 2
        assert peaks["descriptors"] - idle_descriptors <= workers + lease_and_listing
        assert w.server.resources.pool.used == 0
        assert w.server.resources.pool.peak <= 8 * 4  # buffers of 1 MiB: the pool has 32 MiB
        w.assert_idle()


async def test_five_hundred_sites_are_served(tmp_path):
    """A server hands 1 MiB to each of 500 sites, one transaction in all, and each has it."""
    async with world(sites=500) as w:
        slots = [Slot(secrets.token_bytes(16), site.address) for site in w.sites]
        tx = w.server.publish([ComputedSource(MIB)], slots)
        arrived = 0

        async def pull(index: int) -> None:
            nonlocal arrived
            site = w.sites[index]
            state = await site.run_transfer(site.transfer(tx.refs(index)[0], memory()))
            if index % 100 == 0:
                assert_pattern(state)
            arrived += 1

        async with tasks() as group:
            for index in range(500):
                group.start_soon(pull, index)
        assert arrived == 500
        outcome = await tx.wait()
        assert outcome.status is OutcomeStatus.COMPLETED
        assert len(outcome.succeeded) == 500
        w.assert_idle()


async def finish_times(sites: int, *, partitioned: int) -> list[float]:
    """When the downloads of the sites that are not partitioned finish."""
    network = MemoryNetwork(latency=0.01, bandwidth=2 * MIB)
    async with world(sites=sites, network=network) as w:
        await anyio.sleep_until(100)  # greeting takes time: both runs begin at the same instant
        stalled, healthy = w.sites[:partitioned], w.sites[partitioned:]
        offers = [w.offer(ComputedSource(9 * MIB), site=site) for site in (*stalled, *healthy)]
        attempts = [Attempt() for _ in offers]
        async with tasks() as group:
            for attempt, (_, ref) in zip(attempts, offers, strict=True):
                group.start_soon(attempt.run, partial(w.download, ref))
            await anyio.sleep(1)
            for site in stalled:
                network.partition("server", site.address)
            for attempt in attempts[partitioned:]:
                await attempt.over.wait()
            for attempt in attempts[:partitioned]:
                assert not attempt.over.is_set()
                attempt.scope.cancel()
        for site in stalled:
            network.heal("server", site.address)
        for attempt in attempts[partitioned:]:
            assert attempt.state is not None
            assert_pattern(attempt.state)
        # asyncio fires timers within a nanosecond of each other together
        return [round(attempt.seconds, 8) for attempt in attempts[partitioned:]]


async def test_stalled_sites_cost_the_others_nothing():
    """With 70 of 100 sites cut off, the other 30 finish at the same virtual second as if they were alone."""
    alone = await finish_times(30, partitioned=0)
    beside = await finish_times(100, partitioned=70)
    assert beside == alone


def memory_kib(field: str) -> int:
    """A field of this process's memory status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise KeyError(field)


def start_high_water_mark_afresh() -> None:
    """What the process used at most is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")


async def test_memory_in_flight_is_the_pool_whatever_the_number_of_sites(tmp_path):
    """200 sites that compute what is read of them, 1 GiB in all, cost the pool and a little."""
    async with world(sites=200) as w, open_job("job", w.server, scratch=tmp_path) as job:
        offers = [w.offer(ComputedSource(5 * MIB), site=site) for site in w.sites]

        async def pull(ref: Ref) -> None:
            state = await job.download(ref, disk(job))
            state.release()

        before = memory_kib("VmRSS")
        start_high_water_mark_afresh()
        async with tasks() as group:
            for _, ref in offers:
                group.start_soon(pull, ref)
        grown = (memory_kib("VmHWM") - before) * 1024
        assert job.report.bytes_landed > 200 * 5 * MIB
        assert grown < w.server.resources.pool.capacity + 32 * MIB
        w.assert_idle()


async def test_receivers_of_different_speeds_share_no_copy(tmp_path):
    """One payload for a fast, a slow and a slower receiver: nothing that one has had is kept for the others."""
    network, nbytes = MemoryNetwork(), 96 * MIB
    async with world(sites=3, network=network) as w:
        slots = [Slot(secrets.token_bytes(16), site.address) for site in w.sites]
        tx = w.server.publish([ComputedSource(nbytes)], slots)
        ends: list[float] = []

        async def pull(index: int, rate: float) -> None:
            site = w.sites[index]
            network.conditions("server", site.address).set(bandwidth=rate)
            scratch = tmp_path / site.address
            scratch.mkdir()
            async with open_job("job", site, scratch=scratch) as job:
                await job.download(tx.refs(index)[0], disk(job))
                ends.append(anyio.current_time())

        before = memory_kib("VmRSS")
        start_high_water_mark_afresh()
        async with tasks() as group:
            for index, rate in enumerate((64 * MIB, 8 * MIB, MIB)):
                group.start_soon(pull, index, rate)
        grown = (memory_kib("VmHWM") - before) * 1024
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert [round(end) for end in sorted(ends)] == [2, 12, 96]
        assert grown < w.server.resources.pool.capacity + 32 * MIB


async def test_a_slow_receiver_holds_no_memory(tmp_path):
    """A receiver whose disk is slow has no more under way than its share of the pool, however fast the source."""
    from streamoff.runtime.downloading import Terms

    from .world import Gate, in_memory

    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(100 * MIB))
        attempt = Attempt()
        async with tasks(gate) as group:
            terms = Terms(landing=in_memory(write=not_the_first(gate)))
            group.start_soon(attempt.run, partial(w.download, ref, terms))
            await gate.reached()
            await anyio.sleep(10)
            assert w.server.resources.pool.used <= w.server.resources.pool.capacity
            assert w.site.publisher.statistics().bytes_served <= (8 + 1 + 1) * 4 * MIB
            gate.open()
        assert attempt.state is not None
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_rounds_leave_nothing_behind(tmp_path):
    """Fifty sites and ten rounds: after each there are as many tasks, threads, descriptors and timers as after the first."""
    async with world(sites=50) as w:
        counts = []
        for number in range(10):
            async with open_job(f"round-{number}", w.server, scratch=tmp_path) as job:
                attempts = [Attempt() for _ in w.sites]
                async with tasks() as group:
                    for attempt, site in zip(attempts, w.sites, strict=True):
                        _, ref = w.offer(ComputedSource(50_000), site=site)
                        group.start_soon(attempt.run, partial(job.download, ref, disk(job)))
                for attempt in attempts:
                    assert attempt.state is not None
                    attempt.state = None
            await anyio.sleep(1)
            w.assert_idle()
            counts.append(
                (
                    count_tasks(),
                    descriptors(),
                    w.server.resources.pool.used,
                    len(list(tmp_path.iterdir())),
                )
            )
        assert set(counts[1:]) == {counts[0]}
        assert w.server.statistics().timers <= 50 + 64 + 8
