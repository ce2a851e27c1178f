"""The iterator of a workflow: one round when it is asked for, and an end however it is left."""

from __future__ import annotations

import gc
from pathlib import Path

import anyio
import pytest

from streamoff.errors import AggregationError, JobClosedError, QuorumLostError, UsageError
from streamoff.fl.workflows.rounds import Rounds

from ..world import World, entries, federated, landed_bytes, plus, value_of

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_a_round_begins_when_it_is_asked_for(tmp_path: Path) -> None:
    """Between two rounds nothing is sent, however long the body takes."""
    async with World(tmp_path) as world:
        seen: list[float] = []

        async def train(task):
            seen.append(anyio.current_time())
            return await plus(1.0)(task)

        await world.site("site-1", train)
        async with world.open_job() as job, federated(3).run(job, ["site-1"]) as rounds:
            await anyio.sleep(7)
            async for _ in rounds:
                await anyio.sleep(10)
        assert seen == [7, 17, 27]


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_the_model_of_a_round_is_readable_until_the_next_is_here(
    tmp_path: Path, disk: bool
) -> None:
    """A model can be read until a newer one is here; the last one until the context is left."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with world.open_job() as job, federated(2, disk=disk).run(job, ["site-1"]) as rounds:
            first = await anext(rounds)
            assert value_of(first.state) == 1.0
            second = await anext(rounds)
            with pytest.raises(JobClosedError):
                first.state.tensor("layer")
            with pytest.raises(StopAsyncIteration):
                await anext(rounds)
            assert value_of(second.state) == 2.0
        with pytest.raises(JobClosedError):
            second.state.tensor("layer")


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_the_model_of_the_round_before_a_failed_one_stands(
    tmp_path: Path, disk: bool
) -> None:
    """When a round fails, the model that it was to improve can still be read, saved, or started from."""

    async def train(task):
        if task.round == 2:
            raise RuntimeError("no GPU")
        return await plus(3.0)(task)

    async with World(tmp_path) as world:
        await world.site("site-1", train)
        async with world.open_job() as job:
            async with federated(2, disk=disk).run(job, ["site-1"]) as rounds:
                last = await anext(rounds)
                with pytest.raises(QuorumLostError, match="previous model stands"):
                    await anext(rounds)
                assert value_of(last.state) == 3.0
            assert landed_bytes(job) == 0


async def test_a_cancelled_wait_loses_no_round(tmp_path: Path) -> None:
    """Who gives up waiting and asks again gets the very round, also if it was ready in between."""
    async with World(tmp_path) as world:
        hand = await world.hand("site-1")
        async with world.open_job() as job, federated(2).run(job, ["site-1"]) as rounds:
            for number in (1, 2):
                with anyio.move_on_after(5) as gave_up:
                    await anext(rounds)
                assert gave_up.cancelled_caught
                await hand.answer(round=number)
                await anyio.sleep(1)  # the round is finished, and nobody waits for it
                assert (await anext(rounds)).number == number
                await anyio.sleep(1)
                sent = hand.endpoint.mailbox.statistics().queued
                assert sent == number, "the next round waits to be asked for"
            with pytest.raises(StopAsyncIteration):
                await anext(rounds)


async def test_one_task_waits_at_a_time(tmp_path: Path) -> None:
    """A second task that asks for the round another one waits for is told so, and harms nobody."""
    async with World(tmp_path) as world:
        hand = await world.hand("site-1")
        async with world.open_job() as job, federated(1).run(job, ["site-1"]) as rounds:
            numbers: list[int] = []

            async def first() -> None:
                numbers.append((await anext(rounds)).number)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                await anyio.sleep(1)
                with pytest.raises(UsageError, match="another task"):
                    await anext(rounds)
                await hand.answer()
            assert numbers == [1]


async def test_rounds_that_were_not_entered_do_not_hang(tmp_path: Path) -> None:
    """Iterating without `async with` is a usage error, at once."""
    async with World(tmp_path) as world, world.open_job() as job:
        with pytest.raises(UsageError, match="not entered"):
            await anext(federated().run(job, ["site-1"]))


async def test_rounds_are_entered_once(tmp_path: Path) -> None:
    """A second run needs a second call."""
    async with World(tmp_path) as world, world.open_job() as job:
        rounds = federated().run(job, ["site-1"])
        async with rounds:
            pass
        with pytest.raises(UsageError, match="entered once"):
            await rounds.__aenter__()


async def test_entering_in_a_cancelled_scope_starts_nothing(tmp_path: Path) -> None:
    """A workflow whose entry was cancelled is not left running in the job."""
    async with World(tmp_path) as world, world.open_job() as job:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with federated().run(job, ["site-1"]):
                raise AssertionError("entered")
        assert not job.report.ends
        world.server.receive("streamoff.job-1.result").close()


async def test_rounds_that_are_never_iterated_still_release_the_sites(tmp_path: Path) -> None:
    """Who enters and leaves without a round lets the sites go: they wait for nobody."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        async with world.open_job() as job, federated().run(job, ["site-1"]):
            await anyio.sleep(3)
        await anyio.sleep(1)
        assert world.ended == {"site-1": 3.0}


async def leave_by_break(rounds: Rounds) -> None:
    """Leave in the body."""
    async with rounds:
        async for _ in rounds:
            break


async def leave_by_error(rounds: Rounds) -> None:
    """Leave with an error of the body."""

    async def body() -> None:
        async with rounds:
            async for _ in rounds:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()


async def leave_by_cancel(rounds: Rounds) -> None:
    """Leave while a round is waited for."""
    with anyio.move_on_after(60):
        async with rounds:
            async for _ in rounds:
                pass


async def leave_from_another_task(rounds: Rounds) -> None:
    """Enter, iterate and leave in three tasks."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rounds.__aenter__)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rounds.__anext__)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rounds.__aexit__, None, None, None)


async def drop_without_leaving(rounds: Rounds) -> None:
    """Enter, take a round and forget about it: the end of the job is the end."""
    await rounds.__aenter__()
    await anext(rounds)
    del rounds
    gc.collect()


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_error,
        leave_by_cancel,
        leave_from_another_task,
        drop_without_leaving,
    ],
)
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
async def test_leaving_at_any_point_settles_everything(tmp_path: Path, leave, disk: bool) -> None:
    """However and wherever an iteration is left, transactions settle, sites are told, and nothing stays."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))

        async def slow(task):
            if task.round == 2:
                await anyio.sleep(3600)
            return await plus(1.0)(task)

        await world.site("site-2", slow)
        async with world.open_job(drain_window=2.0) as job:
            await leave(federated(3, disk=disk).run(job, ["site-1", "site-2"]))
        assert not world.server.publisher.open
        assert job.report.removed
        assert entries(tmp_path) == []
        await anyio.sleep(1)
        assert "site-1" in world.ended


async def test_a_round_left_half_way_leaves_no_byte(tmp_path: Path) -> None:
    """What had landed, and what was landing, is removed while the job goes on; the site is told."""
    async with World(tmp_path) as world:
        await world.site("site-1", plus(1.0))
        hand = await world.hand("site-2")
        line = world.network.conditions("site-2", "server")
        told: list[str] = []

        async def answer() -> None:
            await hand.task()
            line.set(bandwidth=10)
            told.append(await hand.refused(await hand.answer()))

        world.tasks.start_soon(answer)
        async with world.open_job() as job:
            with anyio.move_on_after(5):
                async with federated().run(job, ["site-1", "site-2"]) as rounds:
                    await anext(rounds)
            assert landed_bytes(job) == 0
            await anyio.sleep(0.1)
            assert told == ["cancelled: the receiver was cancelled"]


async def test_after_the_end_there_is_nothing_to_iterate(tmp_path: Path) -> None:
    """Once left, the iterator is exhausted, also for a task that was waiting."""
    async with World(tmp_path) as world:
        await world.hand("site-1")
        ended: list[str] = []
        async with world.open_job() as job:
            rounds = federated().run(job, ["site-1"])
            await rounds.__aenter__()

            async def wait() -> None:
                async for _ in rounds:
                    raise AssertionError("a round")
                ended.append("waiting")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.sleep(1)
                await rounds.__aexit__(None, None, None)
            async for _ in rounds:
                raise AssertionError("a round")
            assert ended == ["waiting"]


async def test_an_error_is_raised_once_and_not_wrapped(tmp_path: Path) -> None:
    """A failed round raises its own typed error where it is awaited; then there are no more rounds."""
    async with World(tmp_path) as world, world.open_job() as job:
        async with federated().run(job, ["site-1"]) as rounds:
            with pytest.raises(QuorumLostError, match="site-1: unreachable"):
                await anext(rounds)
            with pytest.raises(StopAsyncIteration):
                await anext(rounds)
        assert not job.failures


async def test_a_job_that_ends_under_the_iteration_says_so(tmp_path: Path) -> None:
    """Whoever waits for a round when the job is closed from elsewhere gets an error, not silence."""
    async with World(tmp_path) as world:
        await world.hand("site-1")
        async with (
            world.open_job(drain_window=2.0) as job,
            federated().run(job, ["site-1"]) as rounds,
        ):

            async def close() -> None:
                await anyio.sleep(3)
                job.close()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(close)
                with pytest.raises(AggregationError, match="end of its job"):
                    await anext(rounds)
            assert anyio.current_time() == 5.0
            with pytest.raises(StopAsyncIteration):
                await anext(rounds)


async def test_entering_in_a_closing_job_is_refused(tmp_path: Path) -> None:
    """A job that drains takes no new workflow."""
    async with World(tmp_path) as world, world.open_job() as job:
        job.close()
        with pytest.raises(JobClosedError):
            async with federated().run(job, ["site-1"]):
                raise AssertionError("entered")
