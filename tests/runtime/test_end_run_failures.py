"""What ends badly under a job root: it ends alone, it is told once, and the root goes all the same."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest

from streamoff.errors import JobClosedError, TransferError
from streamoff.machines.job_root import CUT_GRACE_SECONDS, JobRootState
from streamoff.runtime.downloading import Terms
from streamoff.runtime.jobs import ConsumerEnd, Job, open_job
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, OutcomeStatus

from .world import (
    ComputedSource,
    Gate,
    Hooked,
    disk,
    files,
    settled_tasks,
    tasks,
    until_gone,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group, however deep."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]


async def raised_by(body: Callable[[], Awaitable[None]]) -> BaseException:
    """What a body raises."""
    with pytest.raises(BaseException) as caught:
        await body()
    return caught.value


async def fails_while_it_is_cut(error: Exception) -> None:
    """Two tasks: one ends as it is told, the other fails while it cleans up."""

    async def messy() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise error

    async with anyio.create_task_group() as group:
        group.start_soon(messy)
        group.start_soon(anyio.sleep_forever)


async def test_a_consumer_that_fails_while_it_is_cut_ends_alone(tmp_path):
    """An error raised while a consumer is cut is raised by the job; the others are cut as ever, and the root goes."""
    async with world() as w:
        jobs: list[Job] = []

        async def body() -> None:
            async with open_job("job", w.server, scratch=tmp_path, drain_window=1) as job:
                jobs.append(job)
                job.start(fails_while_it_is_cut, ValueError("messy"))
                job.start(anyio.sleep_forever)
                await settled_tasks()

        error = await raised_by(body)
        assert [str(one) for one in leaves(error)] == ["messy"]
        assert anyio.current_time() == 1
        report = jobs[0].report
        assert report.ends == {ConsumerEnd.FAILED: 1, ConsumerEnd.CUT: 1}
        assert report.state is JobRootState.GONE
        assert files(tmp_path) == []


async def test_the_first_cause_is_not_lost_to_what_follows_it(tmp_path):
    """A body that is cancelled because a consumer failed, and fails itself while it cleans up, hides nothing."""
    async with world() as w:

        async def broken() -> None:
            raise KeyError("first")

        async def body() -> None:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                job.start(broken)
                await fails_while_it_is_cut(ValueError("second"))

        error = await raised_by(body)
        assert {type(one) for one in leaves(error)} == {KeyError, ValueError}
        assert files(tmp_path) == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_whatever_a_consumer_raises_the_job_ends_in_order(tmp_path, kind):
    """An interrupt that strikes a consumer ends the body, leaves the others their window, and is raised afterwards."""
    async with world() as w:

        async def interrupted() -> None:
            await anyio.sleep(1)
            raise kind("struck here")

        jobs: list[Job] = []

        async def body() -> None:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                jobs.append(job)
                job.start(anyio.sleep, 4)
                job.start(interrupted)
                await anyio.sleep_forever()

        error = await raised_by(body)
        assert (type(error), str(error)) == (kind, "struck here")
        assert anyio.current_time() == 4
        assert jobs[0].report.ends == {ConsumerEnd.FINISHED: 1, ConsumerEnd.FAILED: 1}
        assert files(tmp_path) == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["on the loop", "in a thread"])
async def test_an_interrupt_that_strikes_a_download_goes_on_from_the_job(tmp_path, kind, where):
    """Struck inside a download, a job ends in order and raises the interrupt once; the source is told at once."""
    async with world(network=MemoryNetwork(bandwidth=8 * MIB)) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))

        def strike(*_: int) -> None:
            raise kind("struck here")

        async def body() -> None:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                jobs.append(job)
                if where == "on the loop":
                    terms = disk(job, progress=strike)
                else:
                    terms = Terms(landing=lambda layout: Hooked(job.landing(layout), write=strike))
                job.start(job.download, ref, terms, name="struck")
                job.start(anyio.sleep, 2, name="other")
                await anyio.sleep_forever()

        jobs: list[Job] = []
        error = await raised_by(body)
        assert (type(error), str(error)) == (kind, "struck here")
        assert anyio.current_time() == 2
        outcome = await tx.wait()
        assert outcome.status is OutcomeStatus.FAILED
        assert outcome.settled_at < 1
        assert jobs[0].report.ends == {ConsumerEnd.FINISHED: 1, ConsumerEnd.FAILED: 2}
        assert files(tmp_path) == []
        w.assert_idle()


async def test_an_interrupted_body_keeps_its_interrupt(tmp_path):
    """An interrupt of the body is raised together with what consumers failed of, never instead of it."""
    async with world() as w:

        async def broken() -> None:
            await anyio.sleep(1)
            raise ValueError("in the window")

        async def body() -> None:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                job.start(broken)
                raise KeyboardInterrupt

        error = await raised_by(body)
        assert [type(one) for one in leaves(error)] == [KeyboardInterrupt, ValueError]
        assert files(tmp_path) == []


@on_asyncio
@pytest.mark.parametrize("how", ["awaits a cancelled task", "its task is cancelled"])
async def test_a_cancellation_of_asyncios_own_in_a_consumer_ends_it_alone(tmp_path, how):
    """A consumer that is struck by a cancellation which is not its job's ends; the job and its others do not notice."""
    async with world() as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:
            inner = asyncio.ensure_future(asyncio.sleep(100))
            found: list[asyncio.Task[None] | None] = []

            async def struck() -> None:
                found.append(asyncio.current_task())
                await inner

            consumer = job.start(struck)
            other = job.start(anyio.sleep, 3)
            await settled_tasks()
            (inner if how == "awaits a cancelled task" else found[0]).cancel()  # type: ignore[union-attr]
            assert await consumer.wait() is ConsumerEnd.CANCELLED
            inner.cancel()
            await settled_tasks()
            assert job.state is JobRootState.OPEN
        assert anyio.current_time() == 3
        assert other.end is ConsumerEnd.FINISHED
        assert files(tmp_path) == []


@on_asyncio
async def test_nothing_is_removed_under_a_download_that_nobody_waits_for(tmp_path):
    """A download whose caller was cancelled twice still uses the root while its thread writes: it is waited for."""
    async with world() as w:
        gate = Gate()
        tx, ref = w.offer(ComputedSource(9 * MIB))
        async with tasks(gate):
            async with open_job("job", w.server, scratch=tmp_path, drain_window=1) as job:
                terms = Terms(landing=lambda layout: Hooked(job.landing(layout), write=gate))
                task = asyncio.ensure_future(job.download(ref, terms))
                await gate.reached()
                for _ in range(2):
                    task.cancel()
                    await settled_tasks()
                assert task.cancelled()
            assert anyio.current_time() == 1 + CUT_GRACE_SECONDS
            assert job.report.state is JobRootState.STUCK
            assert files(job.path)
            gate.open()
        await until_gone(job)
        assert (await tx.wait()).status is OutcomeStatus.FAILED
        assert files(tmp_path) == []


async def test_a_consumer_whose_download_ends_with_the_job_has_not_failed(tmp_path):
    """Who waits for a download when the job ends is told that the job is over; that is no error of the job's."""
    async with world(network=MemoryNetwork(bandwidth=MIB)) as w:
        tx, ref = w.offer(ComputedSource(20 * MIB))
        async with open_job("job", w.server, scratch=tmp_path) as job:
            consumer = job.start(job.download, ref, disk(job))
            await anyio.sleep(2.5)
        assert anyio.current_time() == 2.5
        assert (await tx.wait()).settled_at == 2.5
        assert consumer.end is ConsumerEnd.CANCELLED
        assert isinstance(consumer.error, JobClosedError)
        assert isinstance(consumer.error.__cause__, TransferError)
        assert job.report.ends == {ConsumerEnd.CANCELLED: 2}
        assert files(tmp_path) == []


async def test_a_consumer_that_pulls_for_ever_ends_with_the_job(tmp_path):
    """A consumer that downloads in a loop ends at its next download once the body is left, without an error."""
    async with world(network=MemoryNetwork(bandwidth=MIB)) as w:
        async with open_job("job", w.server, scratch=tmp_path) as job:

            async def pull() -> None:
                while True:
                    _, ref = w.offer(ComputedSource(MIB // 2))
                    state = await job.download(ref, disk(job))
                    state.release()
                    await anyio.sleep(1)

            consumer = job.start(pull)
            await anyio.sleep(4)
        assert 4 < anyio.current_time() < 6
        assert consumer.end is ConsumerEnd.CANCELLED
        assert files(tmp_path) == []


async def test_a_job_that_only_finalises_hides_no_error(tmp_path):
    """A consumer that starts a download after ``finalise`` has failed, as long as the body is not left."""
    async with world() as w:
        tx, ref = w.offer(ComputedSource(MIB))

        async def body() -> None:
            async with open_job("job", w.server, scratch=tmp_path) as job:
                job.finalise()
                job.start(partial(job.download, ref, disk(job)))
                await anyio.sleep_forever()

        assert isinstance(await raised_by(body), JobClosedError)
        tx.cancel()
