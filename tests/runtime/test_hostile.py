"""Peers that lie, guess, flood or talk nonsense: refused by name, bounded, and of no concern to anybody else."""

import json
import secrets
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from streamoff.errors import (
    GoneError,
    HandshakeError,
    HeaderError,
    IntegrityError,
    LimitError,
    PeerRefusedError,
    SourceFailedError,
    StreamoffError,
    UnreachableError,
)
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.link import Inbound, Link, Placement
from streamoff.runtime.pace import MIN_PULL_BYTES
from streamoff.runtime.publishing import MAX_PULLS
from streamoff.tensors.digests import chunk_digest
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, ByteRange, OutcomeStatus, Ref, Slot
from streamoff.wire.frames import (
    Ack,
    AckOf,
    Cancel,
    Chunk,
    Confirm,
    Error,
    ErrorCode,
    FrameType,
    Hold,
    Open,
    Opened,
    Pull,
    Unreachable,
)

from .world import (
    CAPABILITIES,
    Attempt,
    ComputedSource,
    Puppet,
    assert_same,
    digest,
    memory,
    puppet,
    settled_tasks,
    state_dict,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


# --- receivers ------------------------------------------------------------------------------------


async def test_a_stranger_without_a_ticket_is_refused_and_moves_no_clock():
    """Guessing tickets for hours serves nothing, keeps no offer alive and ends no slot."""
    async with world() as w, puppet(w.network, "stranger", "site-1") as stranger:
        tx, ref = w.offer(state_dict(), to=None)
        for number in range(11):
            forged = secrets.token_bytes(16)
            route = stranger.route("site-1")
            await stranger.send(Open(**route, stream=number, ref=ref.id, ticket=forged))
            assert (await stranger.next(Error)).code is ErrorCode.BAD_TICKET
            await stranger.send(Cancel(**route, stream=number, ref=ref.id, ticket=forged))
            await stranger.send(
                Confirm(**route, stream=number, ref=ref.id, ticket=forged, nonce=bytes(8), ok=True)
            )
            assert (await stranger.next(Error)).code is ErrorCode.UNKNOWN_REF
            await stranger.pull(ref, 0, 100, stream=number)
            assert (await stranger.next(Error)).code is ErrorCode.UNKNOWN_STREAM
            await anyio.sleep(10)
        outcome = await tx.wait()
        assert outcome.reason == "acquire_timeout"
        assert outcome.settled_at == 120
        assert w.site.publisher.statistics().bytes_served == 0


async def test_a_ticket_at_the_wrong_address_is_refused():
    """A slot that names its receiver is not served to another who has the ticket."""
    async with world() as w, puppet(w.network, "thief", "site-1") as thief:
        tx, ref = w.offer(state_dict(), to="server")
        await thief.send(Open(**thief.route("site-1"), stream=1, ref=ref.id, ticket=ref.ticket))
        assert (await thief.next(Error)).code is ErrorCode.BAD_TICKET
        await thief.send(Cancel(**thief.route("site-1"), stream=1, ref=ref.id, ticket=ref.ticket))
        assert_same(await w.download(ref), state_dict())
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED


async def test_a_ticket_belongs_to_the_first_who_presents_it():
    """Where a slot names nobody, the first address that opens it keeps it; a second is refused."""
    async with world() as w, puppet(w.network, "late", "site-1") as late:
        tx, ref = w.offer(ComputedSource(9 * MIB), to=None)
        async with tasks() as group:
            attempt = Attempt()
            refused = []

            async def intrude() -> None:
                route = late.route("site-1")
                await late.send(Open(**route, stream=1, ref=ref.id, ticket=ref.ticket))
                refused.append((await late.next(Error)).code)

            terms = memory(progress=lambda *_: group.start_soon(intrude) if not refused else None)
            await attempt.run(partial(w.download, ref, terms))
        assert attempt.state is not None
        assert set(refused) == {ErrorCode.BAD_TICKET}
        assert (await tx.wait()).succeeded == ("server",)


async def test_ranges_outside_the_payload_are_refused():
    """Pulls beyond the end, or of more than a buffer holds, are refused; the slot and the offer stand."""
    async with world() as w, puppet(w.network, "peer", "site-1") as peer:
        offers: list[Any] = [ComputedSource(9 * MIB), state_dict(9)]
        for stream, source in enumerate(offers):
            tx, ref = w.offer(source, to="peer")
            await peer.open(ref, stream)
            for start, stop in [
                (0, ref.size + 1),
                (ref.size, ref.size + 1),
                (2**62, 2**63 - 1),
                (0, 4 * MIB + 1),
                (0, 8 * MIB),
            ]:
                await peer.pull(ref, start, stop, stream)
                error = await peer.next(Error)
                assert (error.code, error.id) == (ErrorCode.BAD_RANGE, stream)
            await peer.pull(ref, ref.size - 5, ref.size, stream)
            assert (await peer.next(Chunk)).stop == ref.size
            assert tx.outcome is None
            tx.cancel()
            assert (await peer.next(Error)).code is ErrorCode.GONE


async def test_a_flood_of_pulls_is_bounded():
    """Of a thousand pulls at once a bounded number waits; the others are refused, and other slots are served."""
    async with world(network=MemoryNetwork(bandwidth=64 * MIB)) as w:
        async with puppet(w.network, "flood", "site-1") as flood:
            tx, ref = w.offer(ComputedSource(9 * MIB), to="flood")
            other, spare = w.offer(state_dict(2))
            await flood.open(ref)
            for _ in range(1000):
                await flood.pull(ref, 0, MIB)
            await anyio.lowlevel.checkpoint()
            refused = 0
            while refused < 1000 - MAX_PULLS - 2:
                assert (await flood.next(Error)).code is ErrorCode.LIMIT
                refused += 1
                assert len(tx.queued) <= MAX_PULLS
            assert_same(await w.download(spare), state_dict(2))
            assert (await other.wait()).status is OutcomeStatus.COMPLETED
            for _ in range(MAX_PULLS):
                await flood.next(Chunk)
            tx.cancel()
            await tx.wait()
        w.assert_idle()


async def test_a_receiver_that_opens_again_and_again_holds_one_stream():
    """Each open of a slot voids the former: streams and queues do not add up."""
    async with world() as w, puppet(w.network, "peer", "site-1") as peer:
        tx, ref = w.offer(ComputedSource(9 * MIB), to="peer")
        nonces = set()
        for stream in range(1, 200):
            nonces.add((await peer.open(ref, stream=stream)).nonce)
        assert len(nonces) == 1
        assert w.site.publisher.statistics().streams == 1
        await peer.pull(ref, 0, 100, stream=7)
        assert (await peer.next(Error)).code is ErrorCode.UNKNOWN_STREAM
        tx.cancel()


async def test_one_stream_id_for_two_refs_is_the_later_one():
    """A receiver that opens another ref under a stream in use has given up the former stream."""
    async with world() as w, puppet(w.network, "peer", "site-1") as peer:
        first, one = w.offer(ComputedSource(MIB), to="peer")
        second, two = w.offer(ComputedSource(2 * MIB), to="peer")
        await peer.open(one, stream=1)
        await peer.open(two, stream=1)
        assert w.site.publisher.statistics().streams == 1
        await peer.pull(two, 0, two.size, stream=1)
        assert (await peer.next(Chunk)).stop == two.size
        first.cancel()
        second.cancel()


async def test_a_stale_confirmation_proves_nothing():
    """A confirmation with another nonce settles nothing, and one before the bytes were served is nonsense."""
    async with world() as w, puppet(w.network, "peer", "site-1") as peer:
        tx, ref = w.offer(ComputedSource(MIB), to="peer")
        opened = await peer.open(ref)
        confirm: dict[str, Any] = {"stream": 1, "ref": ref.id, "ticket": ref.ticket, "ok": True}
        await peer.send(Confirm(**peer.route("site-1"), **confirm, nonce=bytes(8)))
        await settled_tasks()
        assert tx.outcome is None
        assert peer.alive()
        await peer.send(Confirm(**peer.route("site-1"), **confirm, nonce=opened.nonce))
        await settled_tasks()
        assert tx.outcome is None
        assert not peer.alive()
        tx.cancel()


async def test_a_confirmation_is_acknowledged_every_time_and_counts_once():
    """A receiver that repeats its confirmation gets the same verdict, also after the transaction is over."""
    async with world() as w, puppet(w.network, "peer", "site-1") as peer:
        tx, ref = w.offer(ComputedSource(MIB), to="peer")
        opened = await peer.open(ref)
        await peer.pull(ref, 0, ref.size)
        await peer.next(Chunk)
        for _ in range(3):
            await peer.send(
                Confirm(
                    **peer.route("site-1"),
                    stream=1,
                    ref=ref.id,
                    ticket=ref.ticket,
                    nonce=opened.nonce,
                    ok=True,
                )
            )
            ack = await peer.next(Ack)
            assert (ack.of, ack.status) == (AckOf.CONFIRM, "succeeded")
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert w.site.publisher.statistics().completed == 1
        await peer.send(Open(**peer.route("site-1"), stream=2, ref=ref.id, ticket=ref.ticket))
        assert (await peer.next(Error)).code is ErrorCode.GONE
        await peer.pull(ref, 0, 100, stream=1)
        assert (await peer.next(Error)).code is ErrorCode.UNKNOWN_STREAM


async def test_a_hold_does_not_keep_a_slot_for_ever():
    """A receiver that asks for patience every minute and does nothing else is given up within the hold budget."""
    async with world() as w, puppet(w.network, "peer", "site-1") as peer:
        tx, ref = w.offer(ComputedSource(MIB), to="peer")
        await peer.open(ref)
        while tx.outcome is None:
            await peer.send(Hold(**peer.route("site-1"), stream=1, seconds=600))
            with anyio.move_on_after(59.5):
                await tx.wait()
        assert tx.outcome.reason == "idle_timeout"
        assert tx.outcome.settled_at == 600 + 150


async def test_tombstones_are_forgotten_in_time_and_in_number(monkeypatch):
    """What is remembered of settled transactions is bounded by number, by receivers and by half an hour."""
    from streamoff.runtime import publishing

    monkeypatch.setattr(publishing, "MAX_REMEMBERED", 50)
    async with world() as w:
        refs = []
        for _ in range(60):
            tx, ref = w.offer(state_dict(0.001))
            tx.cancel()
            refs.append(ref)
        assert w.site.publisher.statistics().tombstones == 50
        with pytest.raises(PeerRefusedError, match="unknown_ref"):
            await w.download(refs[0])
        with pytest.raises(GoneError):
            await w.download(refs[-1])
        await anyio.sleep(1801)
        with pytest.raises(PeerRefusedError, match="unknown_ref"):
            await w.download(refs[-1])


# --- sources --------------------------------------------------------------------------------------


class Source:
    """A source by hand, for one download."""

    def __init__(self, site: Puppet, ref: Ref, header: bytes) -> None:
        self.site = site
        self.ref = ref
        self.header = header
        self.stream = 0

    async def answer(self, **changes) -> None:
        """Wait for an open and answer it."""
        self.stream = (await self.site.next(Open)).stream
        await self.say(**changes)

    async def say(self, **changes) -> None:
        """Answer, whether or not somebody asked."""
        fields: dict[str, Any] = {
            "stream": self.stream,
            "size": self.ref.size,
            "header_bytes": len(self.header),
            "header_digest": digest(self.header),
            "nonce": bytes(8),
            "capabilities": CAPABILITIES,
        }
        await self.site.send(Opened(**self.site.route(), **(fields | changes)))

    async def chunk(self, start: int, data: bytes, **changes) -> None:
        """Send a chunk."""
        fields: dict[str, Any] = {
            "stream": self.stream,
            "start": start,
            "stop": start + len(data),
            "digest": chunk_digest((memoryview(data),), start),
            "body": (memoryview(data),),
        }
        await self.site.send(Chunk(**self.site.route(), **(fields | changes)))

    async def fail(self, code: ErrorCode, detail: str = "") -> None:
        """Refuse."""
        await self.site.send(
            Error(**self.site.route(), of=FrameType.PULL, id=self.stream, code=code, detail=detail)
        )


def payload(nbytes: int = 1000) -> bytes:
    """A safetensors payload of one tensor."""
    text = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    header = text.encode()
    header += b" " * (-len(header) % 8)
    data = (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]
    return len(header).to_bytes(8, "little") + header + data


async def attempted(
    w, site: Puppet, whole: bytes, act, *, size: int | None = None, header: int | None = None
):
    """Let a download meet a source by hand; return how it ended."""
    start = 8 + int.from_bytes(whole[:8], "little") if header is None else header
    ref = Ref(site.address, "r1", secrets.token_bytes(16), size or len(whole))
    source = Source(site, ref, whole[:start])
    attempt = Attempt()
    async with tasks() as group:
        group.start_soon(attempt.run, partial(w.download, ref))
        await act(source)
        await attempt.over.wait()
    await settled_tasks()
    w.assert_idle()
    return attempt


async def test_a_source_by_hand_can_be_honest():
    """The puppet of these tests is understood when it says what a source says."""
    whole = payload()
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer()
            pull = await site.next(Pull)
            await source.chunk(pull.start, whole[pull.start : pull.stop])
            await site.next(Confirm)
            await site.send(
                Ack(**site.route(), of=AckOf.CONFIRM, id=source.stream, status="succeeded")
            )

        attempt = await attempted(w, site, whole, act)
        assert attempt.state is not None
        assert bytes(attempt.state.tensor("w").numpy().data) == whole[-1000:]


async def test_a_source_by_hand_can_send_the_first_bytes_unpulled():
    """What an open takes along with the answer needs no pull; a small payload is whole with it."""
    whole = payload()
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer(first=len(whole))
            await source.chunk(0, whole)
            await site.next(Confirm)
            await site.send(
                Ack(**site.route(), of=AckOf.CONFIRM, id=source.stream, status="succeeded")
            )

        attempt = await attempted(w, site, whole, act)
        assert attempt.state is not None
        assert bytes(attempt.state.tensor("w").numpy().data) == whole[-1000:]
        assert not any(isinstance(frame, Pull) for frame in site.frames)


LIES: dict[str, tuple[dict[str, Any], type[StreamoffError], str]] = {
    "another size": ({"size": 4096}, IntegrityError, "another payload"),
    "a huge header": ({"header_bytes": 2**30, "size": 2**31}, LimitError, "safetensors header"),
    "more than was offered": ({"first": 999}, LimitError, "bytes unasked"),
    "another header": (
        {"header_digest": bytes(16)},
        IntegrityError,
        "not the one that was announced",
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_source_that_announces_something_else_is_refused(lie):
    """A payload of another size, an outsize header, or one that differs from its digest ends the download."""
    changes, kind, text = LIES[lie]
    whole = payload()
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer(**changes)
            if lie == "another header":
                pull = await site.next(Pull)
                await source.chunk(pull.start, whole[pull.start : pull.stop])
            await site.next(Cancel)

        size = changes.get("size") if lie == "a huge header" else None
        attempt = await attempted(w, site, whole, act, size=size)
        assert isinstance(attempt.error, kind)
        assert text in str(attempt.error)
        assert attempt.error.where["site"] == "site-1"
        assert site.alive()


async def test_a_chunk_with_another_digest_is_refused():
    """Bytes that do not have the digest they are sent with are not landed, and end the download."""
    whole = payload()
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer()
            pull = await site.next(Pull)
            await source.chunk(pull.start, whole[pull.start : pull.stop], digest=bytes(16))
            await site.next(Cancel)

        attempt = await attempted(w, site, whole, act)
        assert isinstance(attempt.error, IntegrityError)


@pytest.mark.parametrize(
    "header",
    [
        b'{"w":{"dtype":"U8","shape":[1000],"data_offsets":[0,999]}}',
        b'{"w":{"dtype":"U8","shape":[9],"data_offsets":[0,1000]}}',
        b"[" * 900_000,
        b'{"w":' * 200_000,
        b"\xff" * 4000,
        b"",
    ],
    ids=["short", "wrong shape", "deep list", "deep map", "no text", "nothing"],
)
async def test_a_header_that_is_none_is_refused(header):
    """Whatever comes as a header, however deep or large, it is refused before anything is allocated for it."""
    whole = len(header).to_bytes(8, "little") + header + bytes(1000)
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer()
            pull = await site.next(Pull)
            await source.chunk(pull.start, whole[pull.start : pull.stop])
            await site.next(Cancel)

        attempt = await attempted(w, site, whole, act)
        assert isinstance(attempt.error, HeaderError)
        assert site.alive()


async def test_what_was_not_asked_for_is_dropped():
    """Chunks of other ranges, of other streams or once too often are dropped and cost nothing; the download goes on."""
    whole = payload(9000)
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer()
            pull = await site.next(Pull)
            for start, stop in [(0, 10), (5, 5000), (1, len(whole)), (0, len(whole) - 1)]:
                await source.chunk(start, bytes(stop - start))
            await source.chunk(0, whole, stream=4711)
            await source.say(size=7777)
            await source.chunk(pull.start, whole[pull.start : pull.stop])
            await source.chunk(pull.start, bytes(pull.stop - pull.start))
            await site.next(Confirm)
            await source.say(size=7777)
            await source.chunk(pull.start, whole[pull.start : pull.stop])
            await site.send(Ack(**site.route(), of=AckOf.CONFIRM, id=source.stream))

        attempt = await attempted(w, site, whole, act)
        assert attempt.state is not None
        assert bytes(attempt.state.tensor("w").numpy().data) == whole[-9000:]
        assert w.server.statistics().links == 1


async def test_as_much_is_asked_for_at_once_as_comes_in_a_quarter_of_a_second():
    """A buffer waits for a chunk that comes slowly, so less is asked for at once; and more again when the line is fast."""
    whole = payload(24 * MIB)
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer()
            transfer = w.server.downloads.of(source.stream, Address("site-1"))
            assert transfer is not None

            async def bring(seconds: float) -> int:
                pull = await site.next(Pull)
                body = (memoryview(whole)[pull.start : pull.stop],)
                digest = chunk_digest(body, pull.start)
                facts: dict[str, Any] = {"stream": source.stream, "digest": digest, "body": body}
                chunk = Chunk(**site.route(), **facts, start=pull.start, stop=pull.stop)
                transfer.on_chunk(Inbound(chunk, seconds=seconds))
                while not transfer.record.landed.covers(ByteRange(pull.start, pull.stop)):
                    await anyio.lowlevel.checkpoint()  # a thread lands it
                return pull.stop - pull.start

            assert await bring(1.0) == 4 * MIB  # so a quarter of it comes in time
            assert await bring(0.0) == MIB  # quick: twice as much
            assert [await bring(0.25) for _ in range(7)] == [MIB] * 7  # seven were asked for before
            assert await bring(100.0) == 2 * MIB
            assert [await bring(0.25) for _ in range(7)] == [MIB] * 7
            assert await bring(0.25) == MIN_PULL_BYTES
            await source.fail(ErrorCode.SOURCE_FAILED)

        attempt = await attempted(w, site, whole, act)
        assert isinstance(attempt.error, SourceFailedError)


async def test_memory_is_lent_for_what_was_asked_and_until_it_is_asked_again():
    """A chunk may be received in the tensors if it was asked for; whoever still receives it at a retry, or at the end, must stop."""
    whole = payload(6 * MIB)
    given_up: list[str] = []
    async with world(sites=0) as w, puppet(w.network) as site:

        def lend(source: Source, start: int, stop: int) -> Placement | None:
            transfer = w.server.downloads.of(source.stream, Address("site-1"))
            assert transfer is not None
            outline: dict[str, Any] = {"stream": source.stream, "digest": bytes(16), "body": ()}
            return transfer.place(Chunk(**site.route(), **outline, start=start, stop=stop))

        async def act(source: Source) -> None:
            await source.answer()
            first = await site.next(Pull)
            assert lend(source, first.start, first.stop) is None  # there are no tensors yet
            await source.chunk(first.start, whole[first.start : first.stop])
            pull = await site.next(Pull)
            assert lend(source, pull.start, pull.stop - 1) is None
            transfer = w.server.downloads.of(source.stream, Address("site-1"))
            assert transfer is not None
            transfer._asked[pull.start - 10] = pull.stop
            assert lend(source, pull.start - 10, pull.stop) is None  # ten bytes of it count already
            del transfer._asked[pull.start - 10]
            placement = lend(source, pull.start, pull.stop)
            assert placement is not None
            assert placement.views is not None
            assert sum(view.nbytes for view in placement.views) == pull.stop - pull.start
            placement.begin(partial(given_up.append, "retry"))
            await source.answer()  # another attempt, after a silence
            assert given_up == ["retry"]
            pull = await site.next(Pull)
            placement = lend(source, pull.start, pull.stop)
            assert placement is not None
            placement.begin(partial(given_up.append, "end"))
            await source.fail(ErrorCode.SOURCE_FAILED)

        attempt = await attempted(w, site, whole, act)
        assert isinstance(attempt.error, SourceFailedError)
        assert given_up == ["retry", "end"]


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_every_refusal_of_a_source_is_understood(code):
    """Whatever code a source refuses with, the download fails at once with a typed error that quotes it."""
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer()
            await site.next(Pull)
            await source.fail(code, "these words")

        attempt = await attempted(w, site, payload(), act)
        assert isinstance(attempt.error, StreamoffError)
        assert "these words" in str(attempt.error)
        assert code.value in str(attempt.error)
        assert attempt.seconds == 0


async def test_a_late_refusal_of_a_former_attempt_changes_nothing():
    """A refusal of an open that was given up, in the instant of the next one or later, ends neither that nor others."""
    whole = payload()
    async with world() as w, puppet(w.network, "peer") as peer:

        async def act(source: Source) -> None:
            former = (await peer.next(Open)).stream  # not answered: it is asked again
            source.stream = (await peer.next(Open)).stream
            assert source.stream != former
            late = Source(peer, source.ref, source.header)
            late.stream = former
            for code in ErrorCode:
                await late.fail(code, "too late")
            await late.say(size=7777)
            _, spare = w.offer(state_dict())
            assert_same(await w.download(spare), state_dict())
            await source.say()
            pull = await peer.next(Pull)
            await late.fail(ErrorCode.GONE, "too late")
            await source.chunk(pull.start, whole[pull.start : pull.stop])
            await peer.next(Confirm)
            await peer.send(Ack(**peer.route(), of=AckOf.CONFIRM, id=source.stream))

        attempt = await attempted(w, peer, whole, act)
        assert attempt.state is not None
        assert bytes(attempt.state.tensor("w").numpy().data) == whole[-1000:]
        assert attempt.seconds == 22
        assert w.server.statistics().links == 2


async def test_a_source_that_ends_early_ends_the_download():
    """A source that says, in the middle, that it has nothing more leaves no state, and no file under a final name."""
    whole = payload(9 * MIB)
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer()
            pull = await site.next(Pull)
            await source.chunk(pull.start, whole[pull.start : pull.stop])
            await site.next(Pull)
            await source.fail(ErrorCode.GONE, "that was all")

        attempt = await attempted(w, site, whole, act)
        assert isinstance(attempt.error, GoneError)
        assert attempt.state is None


async def test_a_payload_that_changes_between_two_attempts_is_noticed():
    """A source that answers the second open with another header has another payload: the download ends."""
    whole = payload(9 * MIB)
    async with world(sites=0) as w, puppet(w.network) as site:

        async def act(source: Source) -> None:
            await source.answer()
            pull = await site.next(Pull)
            await source.chunk(pull.start, whole[pull.start : pull.stop])
            await source.answer(header_digest=bytes(16))

        attempt = await attempted(w, site, whole, act)
        assert isinstance(attempt.error, IntegrityError)
        assert "changed between two attempts" in str(attempt.error)


async def test_nobody_answers_for_another():
    """Frames of a download that come from another than its source change nothing."""
    whole = payload()
    async with world(sites=0) as w, puppet(w.network) as site, puppet(w.network, "liar") as liar:

        async def act(source: Source) -> None:
            source.stream = (await site.next(Open)).stream
            theirs = Source(liar, source.ref, source.header)
            theirs.stream = source.stream
            await theirs.say(size=5000)
            await theirs.fail(ErrorCode.GONE, "a lie")
            await liar.send(
                Unreachable(
                    **liar.route(), address=site.address, about=source.stream, of=FrameType.OPEN
                )
            )
            await liar.send(Ack(**liar.route(), of=AckOf.CONFIRM, id=source.stream))
            await settled_tasks()
            await source.say()
            pull = await site.next(Pull)
            await source.chunk(pull.start, whole[pull.start : pull.stop])
            await site.next(Confirm)
            await site.send(Ack(**site.route(), of=AckOf.CONFIRM, id=source.stream))

        attempt = await attempted(w, site, whole, act)
        assert attempt.state is not None
        assert liar.alive()


async def test_a_link_that_speaks_for_somebody_else_is_dropped():
    """A peer that sends frames in another's name loses its link; the other does not."""
    async with world() as w, puppet(w.network, "liar") as liar:
        await liar.send(
            Open(
                to=Address("server"), sender=Address("site-1"), stream=1, ref="r", ticket=bytes(16)
            )
        )
        await settled_tasks()
        assert not liar.alive()
        assert [str(peer) for peer in w.server.links.live] == ["site-1"]


async def test_nonsense_from_behind_a_neighbour_costs_the_neighbour_nothing():
    """A frame that makes no sense is held against its sender, not against the link it came along."""
    async with world(sites=0) as w, puppet(w.network, "site-1") as site:
        tx = w.server.publish(
            [ComputedSource(MIB)], [Slot(secrets.token_bytes(16), Address("site-1.far"))]
        )
        [ref] = tx.refs(0)
        far: dict[str, Any] = {"to": Address("server"), "sender": Address("site-1.far")}
        await site.send(Open(**far, stream=1, ref=ref.id, ticket=ref.ticket))
        opened = await site.next(Opened)
        await site.send(
            Confirm(**far, stream=1, ref=ref.id, ticket=ref.ticket, nonce=opened.nonce, ok=True)
        )
        await settled_tasks()
        assert site.alive()
        assert w.server.statistics().links == 1
        assert tx.outcome is None


# --- hellos ---------------------------------------------------------------------------------------


async def test_who_does_not_greet_is_not_let_in():
    """A link whose first frame is no hello is closed; one that says nothing is closed after ten seconds."""
    async with world(sites=0) as w:
        rude = Puppet("rude", await w.network.dial(Address("rude"), Address("server")))
        await rude.send(Cancel(**rude.route(), stream=1, ref="r", ticket=bytes(16)))
        mute = Puppet("mute", await w.network.dial(Address("mute"), Address("server")))
        async with tasks() as group:
            group.start_soon(rude.listen)
            group.start_soon(mute.listen)
            await anyio.sleep(9.5)
            assert not rude.alive()
            assert mute.alive()
            await anyio.sleep(1)
            assert not mute.alive()
        await rude.link.aclose()
        await mute.link.aclose()
        assert w.server.statistics().links == 0


async def test_another_version_is_told_apart():
    """An endpoint of another protocol version is refused on both sides, with both numbers."""
    network = MemoryNetwork()
    async with world(sites=0, network=network) as w:
        old = Puppet("old", await network.dial(Address("old"), Address("server")))
        await old.greet(version=99)
        async with tasks() as group:
            group.start_soon(old.listen)
            await settled_tasks()
            assert not old.alive()
        await old.link.aclose()
        assert w.server.statistics().links == 0

        accepted: list[Any] = []

        def accept(link: Link) -> anyio.Event:
            accepted.append(link)
            return anyio.Event()

        network.listen(Address("elder"), accept)
        async with BaseEndpoint("young", transports=[network]) as young, tasks() as group:

            async def answer() -> None:
                while not accepted:
                    await anyio.lowlevel.checkpoint()
                await Puppet("elder", accepted[0]).greet(version=99)

            group.start_soon(answer)
            with pytest.raises(HandshakeError, match="99"):
                await young.connect("elder")
        with pytest.raises(UnreachableError):
            await w.server.connect("nobody")
