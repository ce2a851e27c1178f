"""A receiver that gives up is heard in that instant plus the way, wherever the transfer stands and whoever gave up."""

import secrets
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from streamoff.errors import JobClosedError
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import Job, open_job
from streamoff.runtime.publishing import Transaction
from streamoff.tensors.layout import Layout
from streamoff.types import MIB, OutcomeStatus, Slot, Verdict

from .ends import NBYTES, PLACES, Ends, ends
from .world import (
    Attempt,
    Gate,
    Hooked,
    all_dead,
    files,
    numbers,
    settled_tasks,
    tasks,
    watched,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


class Stop:
    """Brings a transfer to one point, and says when it is there.

    Args:
        point: A time in ways after the open was sent, or what its landing is doing.
    """

    def __init__(self, point: str) -> None:
        self.point = point
        self.gate = Gate()
        self.landed = anyio.Event()

    def terms(self, job: Job) -> Terms:
        """Land on disk, and stop where it was asked for."""

        def last(start: int) -> None:
            if start >= 8 * MIB:
                self.gate()

        def first(start: int) -> None:
            if start:
                self.gate()

        hooks: dict[str, dict[str, Callable[..., object]]] = {
            "the header is checked": {"open": self.gate},
            "the first chunk lands": {"write": self.gate},
            "a later chunk lands": {"write": first},
            "the last chunk lands": {"write": last},
            "the file is finished": {"finish": self.gate},
        }

        def landing(layout: Layout) -> Hooked:
            return Hooked(job.landing(layout), **hooks.get(self.point, {}))

        return Terms(landing=landing, progress=self._look)

    def _look(self, landed: int, wanted: int) -> None:
        if landed == wanted:
            self.landed.set()

    async def reached(self, way: float) -> None:
        """Wait until the transfer is there."""
        if self.point == "the open is on its way":
            await anyio.sleep(way / 2)
        elif self.point == "the answer is on its way":
            await anyio.sleep(way * 3 / 2)
        elif self.point == "the confirmation is on its way":
            await self.landed.wait()
            await settled_tasks()
            await anyio.sleep(way / 2)
        else:
            await self.gate.reached()


BLOCKED = [
    "the header is checked",
    "the first chunk lands",
    "a later chunk lands",
    "the last chunk lands",
    "the file is finished",
]
POINTS = ["the open is on its way", "the answer is on its way", *BLOCKED]


async def assert_released(
    e: Ends, tx: Transaction, references: list[weakref.ref[Any]], at: float
) -> None:
    """The slot failed on every ref, and the source was let go, one way after ``at``."""
    outcome = await tx.wait()
    assert outcome.settled_at == at + e.way
    assert outcome.status is OutcomeStatus.FAILED
    assert outcome.reason == "receiver_failed"
    [verdicts] = outcome.slots.values()
    opened, never_opened = verdicts.values()
    assert opened.verdict is never_opened.verdict is Verdict.FAILED
    assert opened.reason.startswith("cancelled: ")
    assert never_opened.reason.startswith("declined: ")
    assert all_dead(references)


async def assert_nothing_left(e: Ends, job: Job) -> None:
    """No buffer, stream, file or charge of the attempt is left."""
    from streamoff.scratch.janitor import JANITOR

    await settled_tasks()
    e.world.assert_idle()
    await anyio.to_thread.run_sync(JANITOR.idle, 10)
    assert files(job.path) in ([".lease"], [])
    assert job.ledger.used == 0


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("point", POINTS)
async def test_the_source_is_let_go_at_once_wherever_the_transfer_stands(
    tmp_path: Path, point: str, where: str
) -> None:
    """A download that is cancelled at any point frees its source one way later, on every ref, and leaves nothing."""
    stop, attempt = Stop(point), Attempt()
    async with ends(where) as e, open_job("job", e.receiver, scratch=tmp_path) as job:
        tx, ref, references = e.offer()
        async with tasks(stop.gate) as group:
            group.start_soon(attempt.run, partial(job.download, ref, stop.terms(job)))
            await stop.reached(e.way)
            attempt.scope.cancel()
            at = anyio.current_time()
            await assert_released(e, tx, references, at)
            assert attempt.over.is_set() is (point not in BLOCKED)
            stop.gate.open()
        assert attempt.cancelled
        assert attempt.state is None
        await assert_nothing_left(e, job)


@pytest.mark.parametrize("where", PLACES)
async def test_a_confirmation_that_was_sent_stands(tmp_path: Path, where: str) -> None:
    """Cancelled after its last word, a download of one ref is a success for the source, and leaves nothing here."""
    stop, attempt = Stop("the confirmation is on its way"), Attempt()
    async with ends(where) as e, open_job("job", e.receiver, scratch=tmp_path) as job:
        source, references = watched({"w": numbers(NBYTES // 4)})
        tx = e.source.publish([source], [Slot(secrets.token_bytes(16), e.receiver.address)])
        del source
        async with tasks(stop.gate) as group:
            group.start_soon(attempt.run, partial(job.download, tx.refs(0)[0], stop.terms(job)))
            await stop.reached(e.way)
            attempt.scope.cancel()
            at = anyio.current_time()
            outcome = await tx.wait()
            assert outcome.settled_at == at + e.way / 2
            assert outcome.status is OutcomeStatus.COMPLETED
        assert attempt.cancelled
        assert attempt.state is None
        assert all_dead(references)
        await assert_nothing_left(e, job)


async def test_giving_up_after_one_ref_gives_up_the_others(tmp_path: Path) -> None:
    """A slot that has one ref and cancels the next one keeps its success on the first, and has failed."""
    async with ends("direct") as e, open_job("job", e.receiver, scratch=tmp_path) as job:
        tx, ref, references = e.offer()
        first = await job.download(ref, Terms(landing=job.landing))
        stop, attempt = Stop("the open is on its way"), Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(job.download, tx.refs(0)[1], stop.terms(job)))
            await stop.reached(e.way)
            attempt.scope.cancel()
            at = anyio.current_time()
        outcome = await tx.wait()
        assert outcome.settled_at == at + e.way
        [verdicts] = outcome.slots.values()
        assert [verdict.verdict for verdict in verdicts.values()] == [
            Verdict.SUCCEEDED,
            Verdict.FAILED,
        ]
        assert outcome.status is OutcomeStatus.FAILED
        assert all_dead(references)
        first.release()
        await assert_nothing_left(e, job)


# --- who gives up ---------------------------------------------------------------------------------


async def leave_the_job(job: Job, _endpoint: BaseEndpoint, _scope: anyio.CancelScope) -> None:
    """The job ends under the download."""
    job.close()


async def cancel_the_controller(
    _job: Job, _endpoint: BaseEndpoint, scope: anyio.CancelScope
) -> None:
    """Whoever opened the job is cancelled, and everything in it."""
    scope.cancel()


async def fail_beside_it(job: Job, _endpoint: BaseEndpoint, _scope: anyio.CancelScope) -> None:
    """Another task of the job fails, which ends the job."""

    async def broken() -> None:
        raise ZeroDivisionError

    job.start(broken)
    await settled_tasks()


WAYS_OUT = [leave_the_job, cancel_the_controller, fail_beside_it]


@pytest.mark.parametrize("where", ["direct", "behind a relay"])
@pytest.mark.parametrize("give_up", WAYS_OUT, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "point", ["the open is on its way", "a later chunk lands", "the file is finished"]
)
async def test_the_source_is_let_go_whoever_gives_up(
    tmp_path: Path,
    point: str,
    give_up: Callable[[Job, BaseEndpoint, anyio.CancelScope], Awaitable[None]],
    where: str,
) -> None:
    """A controller that is cancelled, a job that ends or fails: the source is let go one way later."""
    stop = Stop(point)
    async with ends(where) as e, tasks(stop.gate) as group:
        tx, ref, references = e.offer()
        opened: list[Job] = []
        scope = anyio.CancelScope()
        left = anyio.Event()

        async def controller() -> None:
            with scope:
                try:
                    async with open_job("job", e.receiver, scratch=tmp_path) as job:
                        opened.append(job)
                        await job.download(ref, stop.terms(job))
                except (ZeroDivisionError, JobClosedError):
                    pass
            left.set()

        group.start_soon(controller)
        while not opened:
            await anyio.lowlevel.checkpoint()
        await stop.reached(e.way)
        at = anyio.current_time()
        await give_up(opened[0], e.receiver, scope)
        await assert_released(e, tx, references, at)
        stop.gate.open()
        await left.wait()
        await assert_nothing_left(e, opened[0])
