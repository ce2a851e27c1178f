"""Messages: delivered once, in order, whatever the links do; refused by name where they cannot be."""

from contextlib import AsyncExitStack

import anyio
import anyio.lowlevel
import pytest

from streamoff.errors import LimitError, StreamoffError, UnreachableError, UsageError
from streamoff.runtime import messages
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.messages import MAX_QUEUED, MAX_TOPICS, Subscription
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address
from streamoff.wire.frames import Ack, AckOf, Error, ErrorCode, Message, MessageKind

from .world import World, puppet, settled_tasks, tasks, world

pytestmark = pytest.mark.usefixtures("no_leaks")

SERVER = Address("server")


def body(text: str) -> tuple[memoryview, ...]:
    """A body."""
    return (memoryview(text.encode()),)


def text(parcel) -> str:
    """What a body says."""
    return b"".join(parcel.body).decode()


class Answers:
    """Collects the answers to messages."""

    def __init__(self) -> None:
        self.all: list[StreamoffError | None] = []

    def __call__(self, error: StreamoffError | None) -> None:
        self.all.append(error)


async def take(subscription: Subscription, count: int) -> list[str]:
    """The next messages."""
    return [text(await anext(subscription)) for _ in range(count)]


async def test_messages_arrive_in_order_and_are_acknowledged():
    """A hundred messages come in the order they were posted, and each poster hears that."""
    answers = Answers()
    async with world() as w:
        inbox = w.server.mailbox.subscribe("results")
        for number in range(100):
            w.site.mailbox.post(SERVER, "results", body(str(number)), on_answer=answers)
        assert await take(inbox, 100) == [str(number) for number in range(100)]
        await settled_tasks()
        assert answers.all == [None] * 100
        assert w.site.statistics().mailbox.unacked == 0


async def test_a_message_says_where_it_comes_from():
    """A parcel names sender, topic, neighbour and whether refs are to be kept."""
    async with world() as w:
        inbox = w.server.mailbox.subscribe("results")
        w.site.mailbox.post(SERVER, "results", body("x"), pass_through=True)
        parcel = await anext(inbox)
        assert (parcel.sender, parcel.topic, parcel.pass_through) == ("site-1", "results", True)


@pytest.mark.parametrize("cut", ["before", "on the way", "behind the receiver"])
async def test_a_message_is_delivered_once_whatever_the_link_does(cut):
    """A link that is lost before, while or after a message passes costs a delay, never a loss or a second copy."""
    network = MemoryNetwork(latency=1)
    answers = Answers()
    async with world(network=network) as w:
        inbox = w.server.mailbox.subscribe("results")
        for number in range(5):
            w.site.mailbox.post(SERVER, "results", body(str(number)), on_answer=answers)
        await anyio.sleep({"before": 0, "on the way": 0.5, "behind the receiver": 1.5}[cut])
        network.cut("server", "site-1")
        await anyio.sleep(2)
        network.mend("server", "site-1")
        assert await take(inbox, 5) == list("01234")
        await anyio.sleep(30)
        assert len(inbox) == 0
        assert answers.all == [None] * 5


async def test_a_message_that_comes_twice_is_delivered_once_and_acknowledged_twice():
    """A repeated message is acknowledged again and not delivered again, also after its reader has left."""
    async with world(sites=0) as w, puppet(w.network) as site:
        inbox = w.server.mailbox.subscribe("results")
        message = Message(
            **site.route(), kind=MessageKind.REQUEST, topic="results", id=7, body=body("once")
        )
        for _ in range(2):
            await site.send(message)
            assert (await site.next(Ack)).of is AckOf.MESSAGE
        assert await take(inbox, 1) == ["once"]
        inbox.close()
        await site.send(message)
        assert (await site.next(Ack)).id == 7
        assert len(inbox) == 0


async def test_the_same_number_of_another_sender_is_another_message():
    """Numbers count per sender and life: two senders, or one that restarted, may use the same."""
    async with world(sites=0) as w:
        inbox = w.server.mailbox.subscribe("results")
        for name in ("site-1", "site-2", "site-1"):
            async with puppet(w.network, name) as site:
                await site.send(
                    Message(
                        **site.route(),
                        kind=MessageKind.REQUEST,
                        topic="results",
                        id=1,
                        body=body(name),
                    )
                )
                await site.next(Ack)
        assert await take(inbox, 3) == ["site-1", "site-2", "site-1"]


async def test_a_sender_that_restarts_behind_a_relay_is_heard():
    """Numbers start at random, so a restarted sender whose life nobody sees is not taken for its former self."""
    network = MemoryNetwork()
    starts = set()
    for _ in range(5):
        async with (
            BaseEndpoint("a", transports=[network]),
            BaseEndpoint("b", transports=[network]) as b,
        ):
            await b.connect("a")
            starts.add(b.mailbox.post(Address("a"), "topic", ()))
    assert len(starts) == 5


async def test_a_topic_that_nobody_reads_is_refused():
    """The poster of a message without a reader hears that, once, and it is not repeated."""
    answers = Answers()
    async with world() as w:
        w.site.mailbox.post(SERVER, "nothing", body("x"), on_answer=answers)
        await settled_tasks()
        [error] = answers.all
        assert isinstance(error, UnreachableError)
        assert "unknown_topic" in str(error)
        w.server.mailbox.subscribe("nothing")
        w.network.cut("server", "site-1")
        w.network.mend("server", "site-1")
        await anyio.sleep(10)
        assert w.server.statistics().mailbox.queued == 0


async def test_a_reader_that_does_not_read_is_busy():
    """A topic holds a bounded number of messages; the next poster is told that it is busy, other topics are not."""
    answers = Answers()
    async with world() as w:
        slow = w.server.mailbox.subscribe("slow")
        quick = w.server.mailbox.subscribe("quick")
        for number in range(MAX_QUEUED + 1):
            w.site.mailbox.post(SERVER, "slow", body(str(number)), on_answer=answers)
            if number % 500 == 0:
                await anyio.sleep(0.01)
        await settled_tasks()
        await anyio.sleep(1)
        refused = [error for error in answers.all if error is not None]
        assert len(slow) == MAX_QUEUED
        assert len(answers.all) == MAX_QUEUED + 1
        assert len(refused) == 1
        assert "busy" in str(refused[0])
        w.site.mailbox.post(SERVER, "quick", body("still here"))
        assert await take(quick, 1) == ["still here"]


async def test_bodies_that_wait_are_bounded_in_bytes(monkeypatch):
    """However few they are, messages that wait hold a bounded number of bytes."""
    monkeypatch.setattr(messages, "MAX_QUEUED_BYTES", 3 * MIB)
    answers = Answers()
    async with world() as w:
        inbox = w.server.mailbox.subscribe("large")
        for _ in range(5):
            w.site.mailbox.post(SERVER, "large", (memoryview(bytes(MIB)),), on_answer=answers)
        await settled_tasks()
        assert len(inbox) == 3
        assert [error is None for error in answers.all] == [True] * 3 + [False] * 2
        await take(inbox, 3)
        w.site.mailbox.post(SERVER, "large", (memoryview(bytes(MIB)),))
        assert len(await take(inbox, 1)) == 1


async def test_posting_is_refused_where_it_cannot_work():
    """No way, a topic that is none, and a body beyond the limit are errors of the call, and cost no link."""
    async with world() as w:
        with pytest.raises(UnreachableError):
            w.server.mailbox.post(Address("site-9"), "topic", ())
        for topic in ("", "t" * 257):
            with pytest.raises((UsageError, LimitError)):
                w.site.mailbox.post(SERVER, topic, ())
        with pytest.raises(LimitError, match="message"):
            w.site.mailbox.post(SERVER, "topic", (memoryview(bytes(16 * MIB + 1)),))
        await settled_tasks()
        assert w.site.statistics().links == 1
        assert w.site.statistics().mailbox.unacked == 0


async def test_what_is_not_acknowledged_is_bounded_and_given_up():
    """A receiver that never answers holds a bounded number of messages, for ten minutes at most."""
    answers = Answers()
    async with world(sites=0) as w, puppet(w.network, "mute") as mute:
        for _ in range(messages.MAX_UNACKED):
            w.server.mailbox.post(mute.address, "topic", (), on_answer=answers)
        with pytest.raises(LimitError, match="unacknowledged"):
            w.server.mailbox.post(mute.address, "topic", ())
        await anyio.sleep(messages.UNACKED_SECONDS)
        w.server.mailbox.post(mute.address, "topic", ())
        assert len(answers.all) == messages.MAX_UNACKED
        assert all(isinstance(error, UnreachableError) for error in answers.all)
        assert w.server.statistics().mailbox.unacked == 1


async def test_a_message_is_given_up_by_the_clock():
    """Whoever posted a message that nobody acknowledges hears that after ten minutes, with or without a next one."""
    heard: list[tuple[float, StreamoffError | None]] = []
    async with world(sites=0) as w, puppet(w.network, "mute") as mute:
        for _ in range(2):
            w.server.mailbox.post(
                mute.address,
                "topic",
                (),
                on_answer=lambda e: heard.append((anyio.current_time(), e)),
            )
            await anyio.sleep(100)
        await anyio.sleep(600)
        assert [at for at, _ in heard] == [600, 700]
        assert all(isinstance(error, UnreachableError) for _, error in heard)
        assert "within 600 s" in str(heard[0][1])
        statistics = w.server.statistics().mailbox
        assert (statistics.unacked, statistics.undelivered) == (0, 2)


async def test_the_end_of_an_endpoint_is_an_answer_to_what_it_sent():
    """Nobody waits for an acknowledgement that cannot come any more: leaving answers every message, once."""
    answers = Answers()
    network = MemoryNetwork()
    async with BaseEndpoint("a", transports=[network]) as a:
        inbox = a.mailbox.subscribe("topic")
        async with BaseEndpoint("b", transports=[network], close_timeout=1) as b:
            await b.connect("a")
            b.mailbox.post(Address("a"), "topic", body("heard"), on_answer=answers)
            await settled_tasks()
            network.partition("a", "b")
            b.mailbox.post(Address("a"), "topic", body("lost"), on_answer=answers)
        assert [error is None for error in answers.all] == [True, False]
        assert "the endpoint is closing" in str(answers.all[1])
        assert await take(inbox, 1) == ["heard"]
        network.heal("a", "b")


async def test_what_becomes_of_messages_is_counted(caplog):
    """Refusals at either end, repetitions and what waits are counted, and refusals are a line at both."""
    caplog.set_level("INFO", "streamoff.messages")
    network = MemoryNetwork(latency=1)
    async with world(network=network) as w:
        w.site.mailbox.post(SERVER, "nothing", body("x"))
        await anyio.sleep(2.1)
        assert w.server.statistics().mailbox.refused == 1
        assert w.site.statistics().mailbox.undelivered == 1
        assert caplog.messages == [
            "server refused a message of site-1 on 'nothing': nobody reads 'nothing'",
            "site-1: a message to server on 'nothing' was not delivered: the message was refused: unknown_topic: nobody reads 'nothing'",
        ]
        inbox = w.server.mailbox.subscribe("results")
        w.site.mailbox.post(SERVER, "results", body("123"))
        network.cut("server", "site-1")
        network.mend("server", "site-1")
        await anyio.sleep(20)
        now = w.server.statistics().mailbox
        assert (now.subscriptions, now.queued, now.queued_bytes, now.remembered) == (1, 1, 3, 1)
        assert w.site.statistics().mailbox.repeated == 1
        await take(inbox, 1)
        assert w.server.statistics().mailbox.queued_bytes == 0


async def test_a_callback_that_fails_costs_nothing():
    """What a callback of a message raises is logged; link and later messages are as before."""

    def broken(_error: object) -> None:
        raise ValueError("not the mailbox's problem")

    async with world() as w:
        inbox = w.server.mailbox.subscribe("topic")
        for number in range(3):
            w.site.mailbox.post(SERVER, "topic", body(str(number)), on_answer=broken)
        assert await take(inbox, 3) == ["0", "1", "2"]
        await settled_tasks()
        assert w.site.statistics().mailbox.unacked == 0
        assert w.site.statistics().links == 1


async def test_nobody_answers_for_another():
    """An acknowledgement or refusal from somebody else than the receiver is not believed."""
    answers = Answers()
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(world(sites=0))
        site = await stack.enter_async_context(puppet(w.network, "site-1"))
        liar = await stack.enter_async_context(puppet(w.network, "liar"))
        number = w.server.mailbox.post(site.address, "topic", (), on_answer=answers)
        await liar.send(Ack(**liar.route(), of=AckOf.MESSAGE, id=number))
        await liar.send(Error(**liar.route(), of=Message.type, id=number, code=ErrorCode.BUSY))
        await settled_tasks()
        assert answers.all == []
        await site.send(Ack(**site.route(), of=AckOf.MESSAGE, id=number))
        await settled_tasks()
        assert answers.all == [None]


async def test_a_topic_has_one_reader_and_topics_are_bounded():
    """A second subscription to a topic is refused until the first is closed, and so is one too many."""
    async with world(sites=0) as w:
        first = w.server.mailbox.subscribe("t0")
        with pytest.raises(UsageError, match="reader already"):
            w.server.mailbox.subscribe("t0")
        for number in range(1, MAX_TOPICS):
            w.server.mailbox.subscribe(f"t{number}")
        with pytest.raises(LimitError, match="topics"):
            w.server.mailbox.subscribe("one too many")
        first.close()
        first.close()
        w.server.mailbox.subscribe("t0")


async def test_reading_can_be_left_at_any_point():
    """Leaving the iteration early, from any task, loses no message and breaks nothing."""
    async with world() as w:
        inbox = w.server.mailbox.subscribe("topic")
        for number in range(4):
            w.site.mailbox.post(SERVER, "topic", body(str(number)))
        seen = []
        async for parcel in inbox:
            seen.append(text(parcel))
            break

        async def another() -> None:
            async for parcel in inbox:
                seen.append(text(parcel))
                return

        async with tasks() as group:
            group.start_soon(another)
        with anyio.move_on_after(0):
            await anext(inbox)
        seen += await take(inbox, 2)
        assert seen == ["0", "1", "2", "3"]
        with anyio.move_on_after(5) as scope:
            await anext(inbox)
        assert scope.cancelled_caught


async def test_several_readers_share_a_topic():
    """Tasks that read one subscription at once each get different messages, and none sleeps through one."""
    async with world() as w:
        inbox = w.server.mailbox.subscribe("topic")
        seen: list[str] = []

        async def reader() -> None:
            seen.append(text(await anext(inbox)))

        async with tasks() as group:
            for _ in range(4):
                group.start_soon(reader)
            await settled_tasks()
            for number in range(4):
                w.site.mailbox.post(SERVER, "topic", body(str(number)))
        assert sorted(seen) == ["0", "1", "2", "3"]


async def test_closing_ends_the_iteration():
    """A subscription that is closed, by its reader or by its endpoint's end, yields what is queued and ends."""
    async with world() as w:
        inbox = w.server.mailbox.subscribe("topic")
        ends: list[str] = []
        async with tasks() as group:

            async def reader() -> None:
                ends.extend([text(parcel) async for parcel in inbox])
                ends.append("end")

            group.start_soon(reader)
            w.site.mailbox.post(SERVER, "topic", body("last"))
            await settled_tasks()
            await settled_tasks()
            inbox.close()
        assert ends == ["last", "end"]


async def test_the_end_of_an_endpoint_ends_its_readers():
    """Whoever reads messages when the endpoint closes is told that there are no more."""
    network = MemoryNetwork()
    ended = []
    async with tasks() as group:
        async with BaseEndpoint("a", transports=[network]) as a:
            inbox = a.mailbox.subscribe("topic")

            async def reader() -> None:
                async for _ in inbox:
                    pass
                ended.append(True)

            group.start_soon(reader)
            await settled_tasks()
        await settled_tasks()
        assert ended == [True]


async def test_large_and_many_messages_do_not_hold_up_transfers():
    """Messages of megabytes pass beside a download, and both end well."""
    from .world import ComputedSource, assert_pattern

    async def chatter(w: World) -> None:
        for _ in range(20):
            w.site.mailbox.post(SERVER, "topic", (memoryview(bytes(MIB)),))
            await anyio.lowlevel.checkpoint()

    async with world() as w:
        inbox = w.server.mailbox.subscribe("topic")
        _, ref = w.offer(ComputedSource(20 * MIB))
        async with tasks() as group:
            group.start_soon(chatter, w)
            assert_pattern(await w.download(ref))
        assert len(await take(inbox, 20)) == 20
