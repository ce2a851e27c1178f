"""Whole transfers: what arrives is what was offered, bit for bit, wherever it lands and however it is cut."""

import random
import secrets
import subprocess
import sys
from functools import partial

import anyio
import pytest
import torch

from streamoff.errors import PeerRefusedError, UsageError
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.runtime.link import Link, Listener
from streamoff.tensors.landing import MemoryLanding
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.sources import FileSource, StateDictSource
from streamoff.transports.memory import MemoryLink, MemoryNetwork
from streamoff.types import CHUNK_BYTES, MIB, Address, OutcomeStatus, Slot
from streamoff.wire.assembly import split
from streamoff.wire.codec import encode
from streamoff.wire.frames import Chunk
from streamoff.wire.limits import Limits, LinkLimits

from .world import (
    Attempt,
    ComputedSource,
    assert_pattern,
    assert_same,
    disk,
    files,
    memory,
    numbers,
    state_dict,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("mebibytes", [0.001, 1, 4, 9.5])
async def test_a_payload_lands_on_disk_bit_for_bit(tmp_path, mebibytes):
    """Small or large, a payload on disk is what was offered, and its file goes with the job."""
    tensors = state_dict(mebibytes)
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(tensors)
        state = await job.download(ref, disk(job))
        assert isinstance(state, LazyStateDict)
        assert_same(state, tensors)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert [path.rsplit("/")[-1] for path in files(job.path)] == [
            ".lease",
            "payload.safetensors",
        ]
        w.assert_idle()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mebibytes", [0.001, 1, 4, 9.5])
async def test_a_payload_lands_in_memory_bit_for_bit(mebibytes):
    """Small or large, a payload in memory is what was offered."""
    tensors = state_dict(mebibytes)
    async with world() as w:
        tx, ref = w.offer(tensors)
        assert_same(await w.download(ref), tensors)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        w.assert_idle()


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"scalar": torch.tensor(3.5)},
        {"none": torch.empty(0, 4)},
        {"a": torch.empty(0), "b": torch.empty(0)},
    ],
    ids=["nothing", "a scalar", "no elements", "twice no elements"],
)
async def test_payloads_of_next_to_nothing_arrive(tmp_path, where, tensors):
    """No tensors at all, tensors without elements and scalars are payloads like any other."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(tensors)
        state = await job.download(ref, disk(job) if where == "disk" else memory())
        assert_same(state, tensors)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


@pytest.mark.parametrize("where", ["memory", "disk"])
async def test_only_the_tensors_asked_for_travel(tmp_path, where):
    """A receiver that wants some tensors gets these and the header, and nothing else is served."""
    tensors = {f"t{index}": numbers(MIB // 4, index) for index in range(6)} | {"s": torch.tensor(1)}
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(tensors)
        names = ["t1", "t4", "s"]
        state = await job.download(ref, disk(job, names) if where == "disk" else memory(names))
        assert_same(state, {name: tensors[name] for name in names})
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        served = w.site.publisher.statistics().bytes_served
        assert 2 * MIB < served < 2 * MIB + 64 * 1024


async def test_an_empty_choice_of_tensors_is_a_choice(tmp_path):
    """Wanting no tensor brings the header and a state without tensors."""
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        for terms in (memory([]), disk(job, [])):
            tx, ref = w.offer(state_dict())
            assert_same(await job.download(ref, terms), {})
            assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_an_unknown_tensor_is_refused_by_name():
    """Wanting a tensor that is not there fails that download with the name, and the offer stands for another."""
    async with world() as w:
        tx, ref = w.offer(state_dict())
        with pytest.raises(PeerRefusedError, match="absent"):
            await w.download(ref, memory(["absent"]))
        assert_same(await w.download(ref), state_dict())
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_names_that_no_link_would_carry_are_refused_where_they_are_asked_for():
    """A request that breaks a limit of the wire is refused to its caller and costs no link."""
    async with world() as w:
        _, ref = w.offer(state_dict())
        with pytest.raises(UsageError):
            w.server.transfer(ref, memory(["\ud800"]))
        assert_same(await w.download(ref), state_dict())
        assert w.server.statistics().links == 1


async def test_one_transaction_hands_over_many_refs(tmp_path):
    """Thirty refs of one transaction land each for itself, and the outcome is told once all have."""
    payloads = [{"w": numbers(1000 + index, index)} for index in range(30)]
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:
        sources = [StateDictSource(tensors) for tensors in payloads]
        tx = w.site.publish(sources, [Slot(secrets.token_bytes(16), Address("server"))])
        states = []
        for index, ref in enumerate(tx.refs(0)):
            assert tx.outcome is None
            states.append(await job.download(ref, disk(job)))
            assert_same(states[-1], payloads[index])
        outcome = await tx.wait()
        assert outcome.status is OutcomeStatus.COMPLETED
        assert outcome.succeeded == ("server",)
        assert len(outcome.slots["server"]) == 30


async def test_several_receivers_share_one_offer():
    """Each of three receivers takes its own slot of one transaction, with its own ticket."""
    tensors = state_dict(2)
    async with world(sites=3) as w:
        tickets = [Slot(secrets.token_bytes(16), site.address) for site in w.sites]
        tx = w.server.publish([StateDictSource(tensors)], tickets)
        async with anyio.create_task_group() as group:
            attempts = [Attempt() for _ in w.sites]
            for index, site in enumerate(w.sites):
                [ref] = tx.refs(index)
                call = partial(site.run_transfer, site.transfer(ref, memory()))
                group.start_soon(attempts[index].run, call)
        for attempt in attempts:
            assert attempt.state is not None
            assert_same(attempt.state, tensors)
        outcome = await tx.wait()
        assert outcome.status is OutcomeStatus.COMPLETED
        assert sorted(outcome.succeeded) == ["site-1", "site-2", "site-3"]


async def test_a_landed_file_is_served_on(tmp_path):
    """What has landed on disk is served from there to the next receiver, verified on the way."""
    tensors = state_dict(5)
    async with world(sites=2) as w, open_job("job", w.server, scratch=tmp_path) as job:
        _, ref = w.offer(tensors)
        state = await job.download(ref, disk(job))
        assert isinstance(state, LazyStateDict)
        tx = w.server.publish([FileSource(state)], [Slot(secrets.token_bytes(16))])
        job.attach(tx)
        site = w.sites[1]
        again = await site.run_transfer(site.transfer(tx.refs(0)[0], memory()))
        assert_same(again, tensors)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        w.assert_idle()


async def test_a_computed_source_is_read_in_threads():
    """A source that may block is read through pooled buffers, all of which come back."""
    async with world() as w:
        source = ComputedSource(11 * MIB + 5)
        tx, ref = w.offer(source)
        assert_pattern(await w.download(ref))
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert source.closed
        assert 1 <= w.server.resources.pool.peak <= 8
        w.assert_idle()


async def test_a_large_tensor_is_cut_into_chunks():
    """One tensor of 40 MiB over a link that allows chunks of 1 MiB travels in as many pieces as that takes."""
    limits = Limits(link=LinkLimits(chunk=MIB))
    seen = Tally()
    async with world(network=CountingNetwork(seen), limits=limits) as w:
        tx, ref = w.offer(ComputedSource(40 * MIB))
        assert_pattern(await w.download(ref))
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
    assert seen.chunks >= 40
    assert seen.largest_chunk == MIB
    assert seen.largest_frame <= LinkLimits().frame


async def test_no_chunk_and_no_frame_exceeds_its_size():
    """However large the tensors, a chunk carries at most 4 MiB and a frame on the wire at most 2 MiB."""
    tensors = {f"t{index}": numbers(10 * MIB // 4, index) for index in range(4)}
    seen = Tally()
    async with world(network=CountingNetwork(seen)) as w:
        _, ref = w.offer(tensors)
        assert_same(await w.download(ref), tensors)
    assert seen.largest_chunk == CHUNK_BYTES
    assert seen.largest_frame <= 2 * MIB == LinkLimits().frame
    assert seen.bytes >= 40 * MIB


async def test_small_tensors_share_chunks():
    """Sixteen tensors of 1 MiB are as few chunks of 4 MiB as one tensor of their size would be."""
    tensors = {f"t{index:02}": numbers(MIB // 4, index) for index in range(16)}
    seen = Tally()
    async with world(network=CountingNetwork(seen)) as w:
        _, ref = w.offer(tensors)
        assert_same(await w.download(ref), tensors)
    assert seen.chunks == 5  # with the header, a little over four of them


async def test_chunks_do_not_wait_for_each_other():
    """Over a line with a second of latency sixteen chunks take three round trips: one for the first, two for the rest."""
    async with world(network=MemoryNetwork(latency=1)) as w:
        tx, ref = w.offer(ComputedSource(63 * MIB))
        attempt = Attempt()
        await attempt.run(partial(w.download, ref))
        assert attempt.state is not None
        assert_pattern(attempt.state)
        trips = 4  # opening takes the first chunk along; confirming is one, too
        assert attempt.seconds == 2 * trips
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_nothing_bears_its_final_name_before_it_is_whole(tmp_path):
    """While chunks land there is only an unfinished file; the final name appears with the last of them."""
    seen: set[str] = set()
    async with world() as w, open_job("job", w.server, scratch=tmp_path) as job:

        def look(_landed: int, _wanted: int) -> None:
            seen.update(path.rsplit("/")[-1] for path in files(job.path))

        _, ref = w.offer(state_dict(17))
        state = await job.download(ref, disk(job, progress=look))
        assert seen == {".lease", "payload.safetensors.part"}
        assert files(job.path)[-1].endswith("/payload.safetensors")
        state.release()


async def test_every_byte_is_served_once():
    """A transfer without trouble serves exactly the payload, no byte twice."""
    async with world() as w:
        _, ref = w.offer(state_dict(21))
        await w.download(ref)
        assert w.site.publisher.statistics().bytes_served == ref.size


async def test_a_header_of_several_chunks_is_brought_whole():
    """A header that is larger than a chunk is pulled in pieces, each once."""
    tensors = {f"{'x' * 900}-{index}": torch.tensor(index) for index in range(6000)}
    async with world() as w:
        tx, ref = w.offer(tensors)
        state = await w.download(ref)
        assert len(state.layout.header) > CHUNK_BYTES
        assert torch.equal(state.tensor(f"{'x' * 900}-4711"), torch.tensor(4711))
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert w.site.publisher.statistics().bytes_served == ref.size


async def test_many_downloads_at_once_keep_their_bytes_apart(tmp_path):
    """Sixty-four downloads of mixed sizes, to disk and memory, over four links, each bring their own bytes."""
    random_sizes = random.Random(7)
    sizes = [random_sizes.choice([0.001, 0.2, 1, 3, 5]) for _ in range(64)]
    async with world(sites=4) as w, open_job("job", w.server, scratch=tmp_path) as job:
        attempts = []
        async with anyio.create_task_group() as group:
            for index, size in enumerate(sizes):
                tensors = state_dict(size, seed=index)
                _, ref = w.offer(tensors, site=w.sites[index % 4])
                attempt = Attempt()
                attempts.append((attempt, tensors))
                terms = disk(job) if index % 2 else memory()
                group.start_soon(attempt.run, partial(job.download, ref, terms))
        for attempt, tensors in attempts:
            assert attempt.state is not None
            assert_same(attempt.state, tensors)
        w.assert_idle()
        assert all(site.publisher.statistics().completed == 16 for site in w.sites)


async def test_progress_is_told_and_a_progress_callback_may_fail():
    """Landed ranges are told with what is wanted in all, and a callback that raises stops nothing."""
    told: list[tuple[int, int]] = []

    def progress(landed: int, wanted: int) -> None:
        told.append((landed, wanted))
        raise ValueError("not the transfer's problem")

    async with world() as w:
        _, ref = w.offer(state_dict(9))
        await w.download(ref, memory(progress=progress))
    assert told[-1] == (ref.size, ref.size)
    assert [landed for landed, _ in told] == sorted(landed for landed, _ in told)
    assert len(told) == 3


async def test_a_receiver_may_refuse_a_header():
    """What the receiver raises over a layout ends the download with that error; the producer hears the reason."""

    def refuse(layout: object) -> None:
        raise UsageError("not the model I expected")

    async with world() as w:
        tx, ref = w.offer(state_dict(9))
        with pytest.raises(UsageError, match="not the model I expected"):
            await w.download(ref, memory(accept=refuse))
        outcome = await tx.wait()
        assert outcome.status is OutcomeStatus.FAILED
        [verdict] = outcome.slots["server"].values()
        assert "not the model I expected" in verdict.reason
        w.assert_idle()


async def test_unknown_errors_of_a_landing_end_their_own_download():
    """A landing that raises what nobody foresaw ends its download with a typed error, and nothing else."""
    async with world() as w:
        tx, ref = w.offer(state_dict())
        other, spare = w.offer(state_dict())

        def broken(_layout: object) -> MemoryLanding:
            raise ZeroDivisionError("by chance")

        with pytest.raises(OSError, match="ZeroDivisionError: by chance"):
            await w.download(ref, Terms(landing=broken))
        assert (await tx.wait()).status is OutcomeStatus.FAILED
        assert_same(await w.download(spare), state_dict())
        assert (await other.wait()).status is OutcomeStatus.COMPLETED


async def test_a_second_download_of_a_finished_ref_is_told_so():
    """Who pulls a ref that has been handed over is told that it is gone, and gets no empty success."""
    async with world() as w:
        tx, ref = w.offer(state_dict())
        await w.download(ref)
        await tx.wait()
        with pytest.raises(Exception, match="gone") as caught:
            await w.download(ref)
        assert type(caught.value).__name__ == "GoneError"
        assert w.site.publisher.statistics().bytes_served == ref.size


async def test_the_source_is_let_go_when_all_have_it():
    """Once every receiver has confirmed, nothing of ours keeps the tensors."""
    from .world import all_dead, watched

    async with world() as w:
        source, references = watched(state_dict(5))
        tx, ref = w.offer(source)
        del source
        await w.download(ref)
        await tx.wait()
        assert all_dead(references)


class Tally:
    """What a network has carried."""

    def __init__(self) -> None:
        self.chunks = self.bytes = self.largest_chunk = self.largest_frame = 0

    def count(self, chunk: Chunk) -> None:
        """Cut a chunk as a socket would and look at the pieces."""
        size = chunk.stop - chunk.start
        self.chunks += 1
        self.bytes += size
        self.largest_chunk = max(self.largest_chunk, size)
        for head, views in split(encode(chunk), channel=1):
            self.largest_frame = max(self.largest_frame, len(head) + sum(map(len, views)))


class CountingLink(MemoryLink):
    """A link that counts the chunks it receives."""

    tally: Tally

    async def receive(self):
        inbound = await super().receive()
        if isinstance(inbound.frame, Chunk):
            self.tally.count(inbound.frame)
        return inbound


class CountingNetwork(MemoryNetwork):
    """A network whose accepted links count."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def listen(self, address: Address, accept: Listener) -> None:
        def counting(link: Link) -> anyio.Event:
            assert isinstance(link, MemoryLink)
            counted = CountingLink(link._out, link._into)
            counted.tally = self._tally
            return accept(counted)

        super().listen(address, counting)


async def test_two_event_loops_in_one_process_do_not_share(tmp_path):
    """Endpoints need no process-wide state: their resources belong to their event loop."""

    def another_loop() -> int:
        async def run() -> int:
            async with world() as w:
                _, ref = w.offer(state_dict(2))
                assert_same(await w.download(ref), state_dict(2))
                return id(w.server.resources)

        return anyio.run(run)

    async with world() as w:
        other = await anyio.to_thread.run_sync(another_loop)
        assert id(w.server.resources) != other
        _, ref = w.offer(state_dict(2))
        assert_same(await w.download(ref), state_dict(2))


async def test_an_endpoint_can_be_used_again_and_again():
    """An endpoint object is entered anew after it was left, under the same address."""
    network = MemoryNetwork()
    for _ in range(3):
        async with (
            BaseEndpoint("a", transports=[network]) as a,
            BaseEndpoint("b", transports=[network]) as b,
        ):
            await b.connect("a")
            tx = b.publish([StateDictSource(state_dict())], [Slot(secrets.token_bytes(16))])
            assert_same(await a.run_transfer(a.transfer(tx.refs(0)[0], memory())), state_dict())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_outlives_its_event_loop_ends_without_a_word(tmp_path, backend):
    """Lazy tensors, jobs and endpoints that are let go after their loop has closed warn of nothing and touch no loop."""
    script = """
import gc, secrets, sys, tempfile, anyio, torch
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.runtime.link import Link, Listener
from streamoff.tensors.sources import StateDictSource
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import Slot

async def main(kept, job_kept):
    network = MemoryNetwork()
    async with BaseEndpoint("a", transports=[network]) as a, BaseEndpoint("b", transports=[network]) as b:
        await b.connect("a")
        async with open_job("job", a, scratch=sys.argv[2]) as job:
            for _ in range(3):
                source = StateDictSource({"w": torch.arange(1000)})
                tx = b.publish([source], [Slot(secrets.token_bytes(16))])
                kept.append(await job.download(tx.refs(0)[0], Terms(landing=job.landing)))
                await tx.wait()
            kept[0].release()
            job_kept.append((job, a, b, network, kept[1]["w"]))

kept, job_kept = [], []
options = {"debug": True} if sys.argv[1] == "asyncio" else {}
anyio.run(main, kept, job_kept, backend=sys.argv[1], backend_options=options)
kept.clear()
gc.collect()
job_kept.clear()
gc.collect()
print("silent")
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, backend, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "silent\n", "")
    assert list(tmp_path.iterdir()) == []
