"""The end of a job under load: one order, to the second, for whatever reason and with whatever uses its root."""

import itertools
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import anyio
import pytest

from streamoff.errors import JobClosedError, StreamoffError
from streamoff.machines.job_root import CUT_GRACE_SECONDS, JobRootState
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import ConsumerEnd, Job, open_job
from streamoff.runtime.publishing import Transaction
from streamoff.runtime.threads import run_in_thread, wait_from_thread
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.sources import FileSource, Source
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, OutcomeStatus, Slot

from .world import Attempt, ComputedSource, Gate, disk, files, memory, tasks

pytestmark = pytest.mark.usefixtures("no_leaks")

WINDOW = 5.0
LEFT_AT = 1.03125
CUT_AT = LEFT_AT + WINDOW
STUCK_AT = CUT_AT + CUT_GRACE_SECONDS
PULLS = 4


def offer(endpoint: BaseEndpoint, source: Source) -> Transaction:
    """One payload for whoever has its ticket."""
    return endpoint.publish([source], [Slot(secrets.token_bytes(16))])


class Load:
    """All that can use a root: consumers of every temper, downloads under way, and files being served."""

    def __init__(self, network: MemoryNetwork, gate: Gate, spawn: Callable[..., object]) -> None:
        self.network = network
        self.gate = gate
        self.spawn = spawn
        self.ended: dict[str, float] = {}
        self.pulled: list[Transaction] = []
        self.attempts: list[Attempt] = []

    async def start(self, job: Job, source: BaseEndpoint, receivers: list[BaseEndpoint]) -> None:
        """Put it all on a job; takes no time."""
        first = offer(source, ComputedSource(8 * MIB))
        state = await job.download(first.refs(0)[0], disk(job))
        assert isinstance(state, LazyStateDict)
        job.start(self.finishes, name="finishes")
        job.start(self.is_cut, name="is cut")
        job.start(self.ignores_it, state, name="ignores it")
        job.start(run_in_thread, self.gate, name="blocks")
        job.start(run_in_thread, self.reads, state, name="reads")
        self.network.conditions(source.address, job.endpoint.address).set(bandwidth=MIB)
        for _ in range(PULLS):
            self.pulled.append(offer(source, ComputedSource(20 * MIB)))
            self._attempt(partial(job.download, self.pulled[-1].refs(0)[0], disk(job)))
        for receiver, speed in zip(receivers, (4, 0.25), strict=True):
            self.network.conditions("server", receiver.address).set(bandwidth=speed * MIB)
            tx = offer(job.endpoint, FileSource(state))
            job.attach(tx)
            tx.on_settled.append(partial(self.note, f"served {receiver.address}"))
            transfer = receiver.transfer(tx.refs(0)[0], memory())
            self._attempt(partial(receiver.run_transfer, transfer))
        await self.gate.reached()

    def _attempt(self, call: Callable[[], object]) -> None:
        self.attempts.append(Attempt())
        self.spawn(self.attempts[-1].run, call)

    def note(self, what: str, *_: object) -> None:
        """Something ended now."""
        self.ended[what] = anyio.current_time()

    async def finishes(self) -> None:
        """End by itself within the window."""
        await anyio.sleep(3)
        self.note("finishes")

    async def is_cut(self) -> None:
        """Wait to be told."""
        try:
            await anyio.sleep_forever()
        finally:
            self.note("is cut")

    async def ignores_it(self, state: LazyStateDict) -> None:
        """Keep a state for half a minute, whatever it is told."""
        with anyio.CancelScope(shield=True):
            await anyio.sleep(30)
            with pytest.raises(JobClosedError):
                state.tensor("w")
        self.note("ignores it")

    def reads(self, state: LazyStateDict) -> None:
        """Read in a thread, ten blocks a second, for ever."""
        for _ in itertools.count():
            next(iter(state["w"].blocks(MIB)))
            wait_from_thread(anyio.sleep, 0.1)


async def end(reason: str, job: Job, scope: anyio.CancelScope) -> None:
    """Let the body end in some way; when the endpoint closes nobody tells it."""

    async def fail() -> None:
        raise KeyError(reason)

    match reason:
        case "raises":
            await fail()
        case "is cancelled":
            scope.cancel()
            await anyio.sleep_forever()
        case "a consumer fails":
            job.start(fail, name="fails")
            await anyio.sleep_forever()
        case "the endpoint closes":
            await job.closed.wait()


@pytest.mark.parametrize(
    "reason", ["is left", "raises", "is cancelled", "a consumer fails", "the endpoint closes"]
)
async def test_everything_ends_in_order_and_in_time(tmp_path, reason):
    """However a loaded job ends, each part of it ends as it should, at its second, and nothing goes under what stays."""
    gate, network = Gate(), MemoryNetwork()
    jobs: list[Job] = []
    returned: list[float] = []
    async with (
        BaseEndpoint("source", transports=[network]) as source,
        BaseEndpoint("quick", transports=[network]) as quick,
        BaseEndpoint("slow", transports=[network]) as slow,
        tasks(gate) as group,
    ):
        load = Load(network, gate, group.start_soon)
        time_to_go = anyio.Event()

        async def controller() -> None:
            with suppress(KeyError), anyio.CancelScope() as scope:
                async with open_job("job", server, scratch=tmp_path, drain_window=WINDOW) as job:
                    jobs.append(job)
                    await load.start(job, source, [quick, slow])
                    await time_to_go.wait()
                    await end(reason, job, scope)
            returned.append(anyio.current_time())

        async def look() -> None:
            try:
                await anyio.sleep_until(STUCK_AT + 0.5)
                while anyio.current_time() < 50:
                    assert jobs[0].state is JobRootState.STUCK
                    if anyio.current_time() < 30:
                        assert [name for name in files(jobs[0].path) if "payload" in name]
                    await anyio.sleep(1)
            finally:
                gate.open()

        async with BaseEndpoint("server", transports=[network]) as server:
            for site in (source, quick, slow):
                await site.connect("server")
            group.start_soon(controller)
            group.start_soon(look)
            await anyio.sleep(LEFT_AT)
            time_to_go.set()
            if reason != "the endpoint closes":
                await anyio.sleep(60)
    assert returned == [STUCK_AT]
    check_parts(load)
    check_report(jobs[0], failed=reason == "a consumer fails")
    assert list(tmp_path.iterdir()) == []


def check_parts(load: Load) -> None:
    """Each part ended when it should have."""
    assert 2 <= load.ended.pop("served quick") < 2.1
    assert load.ended == {
        "finishes": 3,
        "is cut": CUT_AT,
        "served slow": CUT_AT,
        "ignores it": 30,
    }
    pulls, (quick, slow) = load.attempts[:PULLS], load.attempts[PULLS:]
    for tx, attempt in zip(load.pulled, pulls, strict=True):
        assert tx.outcome is not None
        assert tx.outcome.status is OutcomeStatus.FAILED
        assert tx.outcome.settled_at == LEFT_AT
        assert isinstance(attempt.error, JobClosedError)
        assert attempt.ended == LEFT_AT
    assert quick.state is not None
    assert isinstance(slow.error, StreamoffError)
    assert CUT_AT < slow.ended < CUT_AT + 1  # behind the piece that is on its slow line


def check_report(job: Job, *, failed: bool) -> None:
    """The report tells all of it, and the story has the steps in their order."""
    report = job.report
    named = {(one.name.split()[0], one.end, one.seconds) for one in report.consumers}
    assert named == {
        ("download", ConsumerEnd.CANCELLED, LEFT_AT),
        ("is", ConsumerEnd.CUT, CUT_AT),
        ("reads", ConsumerEnd.CUT, CUT_AT),
        ("serving", ConsumerEnd.CUT, CUT_AT),
        ("ignores", ConsumerEnd.STUCK, STUCK_AT),
        ("blocks", ConsumerEnd.STUCK, STUCK_AT),
        *({("fails", ConsumerEnd.FAILED, 0.0)} if failed else ()),
    }
    assert report.ends == {
        ConsumerEnd.FINISHED: 3,
        ConsumerEnd.CANCELLED: PULLS,
        ConsumerEnd.CUT: 3,
        ConsumerEnd.STUCK: 2,
        **({ConsumerEnd.FAILED: 1} if failed else {}),
    }
    assert report.drain_seconds == STUCK_AT - LEFT_AT
    assert report.removal_seconds == 0  # in virtual time, since it was free to go
    assert (report.state, report.removed) == (JobRootState.GONE, True)
    steps = [line.split()[1] + line[line.index("]:") + 1 :] for line in job.story.lines()]
    assert steps == [
        "Closed: Admit, CancelDownloads",
        "WindowClosed: CutConsumers, AbortServes",
        "GraceClosed: HandOver, ReportRoot",
        "ConsumersEnded: BuryRoot",
        "Removed: ReportRoot",
    ]
