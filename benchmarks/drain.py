"""Giving up 64 downloads that are under way: how long until the last effect, at both ends.

The source is a process of its own behind a unix socket; the receiver lands on disk in this one. Whoever gives up
what, nothing may be left, and a job that is left returns when its window closes.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio

from benchmarks.children import Child
from benchmarks.drain_source import SERVER, SOURCE
from benchmarks.machine import Machine
from benchmarks.report import Report
from benchmarks.transfer import TMPFS, scratch
from streamoff.errors import StreamoffError
from streamoff.machines.job_root import JobRootState
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import Job, open_job
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.janitor import JANITOR
from streamoff.transports.sockets import UnixTransport
from streamoff.types import MIB, Address, Budgets, Ref, RefId

__all__ = ["measure"]

DOWNLOADS: Final = 64
NBYTES: Final = 32 * MIB
REPEATS: Final = 5
WINDOW: Final = 0.25
"""Drain window of every job, seconds; a consumer that never ends uses all of it."""
GRACE: Final = 0.25
"""What a lost link gets to come back, seconds; figures count from its end."""
IDLE_SECONDS: Final = 60.0

Spawn = Callable[..., object]


class Pull:
    """One download, in a task of its own."""

    def __init__(self, ref: Ref) -> None:
        self._ref = ref
        self.scope = anyio.CancelScope()
        self.active = anyio.Event()
        self.over = anyio.Event()
        self.ended = 0.0

    async def run(self, job: Job) -> None:
        """Pull until something ends it."""
        terms = Terms(
            landing=job.landing,
            budgets=Budgets(reconnect_grace=GRACE),
            progress=lambda _landed, _wanted: self.active.set(),
        )
        try:
            with self.scope:
                await job.download(self._ref, terms)
        except StreamoffError:
            pass
        finally:
            self.ended = anyio.current_time()
            self.over.set()


@dataclass(slots=True)
class Run:
    """What one run found.

    Args:
        seconds: From its cause to the last effect of it on each download, at both ends if both hear of it.
        overrun: Seconds that ``open_job`` took beyond its window, its removal apart.
        left: Entries in the scratch directory afterwards.
    """

    seconds: list[float] = field(default_factory=list)
    overrun: float = 0.0
    left: int = 0


class Stage:
    """A server with a source behind it.

    Args:
        server: The receiver.
        source: The process that offers.
        cable: The process between the two, if there is one.
    """

    def __init__(self, server: BaseEndpoint, source: Child, cable: Child | None) -> None:
        self.server = server
        self.source = source
        self.cable = cable
        self.pulls: list[Pull] = []
        self.causes: list[float] = []
        self.held = threading.Event()

    async def ask(self, what: str, **facts: Any) -> dict[str, Any]:
        """Have the source do something."""
        return await run_in_thread(partial(self.source.ask, what, **facts))

    async def pull(self, job: Job, spawn: Spawn) -> None:
        """Start all downloads, and return when each of them has landed something."""
        said = await self.ask("offer", count=DOWNLOADS)
        self.pulls = [
            Pull(Ref(Address(SOURCE), RefId(ref), bytes.fromhex(ticket), size))
            for ref, ticket, size in said["refs"]
        ]
        for pull in self.pulls:
            spawn(pull.run, job)
        for pull in self.pulls:
            await pull.active.wait()

    def now(self) -> None:
        """What ends all of them happens now."""
        self.causes = [anyio.current_time()] * len(self.pulls)

    async def over(self) -> None:
        """Wait until all of them have ended here."""
        for pull in self.pulls:
            await pull.over.wait()

    async def effects(self, *, at_source: bool, grace: float) -> list[float]:
        """From each cause to its last effect."""
        ends = [pull.ended for pull in self.pulls]
        if at_source:
            settled = (await self.ask("settled"))["at"]
            ends = [max(both) for both in zip(ends, settled, strict=True)]
        return [end - cause - grace for end, cause in zip(ends, self.causes, strict=True)]


# --- what ends them -------------------------------------------------------------------------------


async def leave(stage: Stage, job: Job, spawn: Spawn) -> None:
    """The end of the job, with a consumer that never ends."""
    await stage.pull(job, spawn)
    stage.now()


async def leave_stuck(stage: Stage, job: Job, spawn: Spawn) -> None:
    """The end of the job, with a thread that cannot be cut as well."""
    stage.held.clear()
    job.start(partial(run_in_thread, stage.held.wait), name="stuck")
    await leave(stage, job, spawn)


async def abort(stage: Stage, job: Job, _spawn: Spawn) -> None:
    """A controller that is cancelled while it waits for its downloads."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as body:
            await stage.pull(job, body.start_soon)
            stage.now()
            scope.cancel()


async def cancel(stage: Stage, job: Job, spawn: Spawn) -> None:
    """One download after the other is given up while the rest goes on."""
    await stage.pull(job, spawn)
    stage.causes = []
    for pull in stage.pulls:
        stage.causes.append(anyio.current_time())
        pull.scope.cancel()
        await pull.over.wait()


async def notice(stage: Stage, job: Job, spawn: Spawn) -> None:
    """The source says that nothing of it can be had."""
    await stage.pull(job, spawn)
    said = await stage.ask("fail")
    stage.causes = [said["at"]] * len(stage.pulls)
    await stage.over()


async def kill(stage: Stage, job: Job, spawn: Spawn) -> None:
    """The process of the source is killed."""
    await stage.pull(job, spawn)
    stage.now()
    stage.source.kill()
    await stage.over()


async def cut(stage: Stage, job: Job, spawn: Spawn) -> None:
    """The link is cut, and does not come back."""
    assert stage.cable is not None
    await stage.pull(job, spawn)
    stage.now()
    stage.cable.kill()
    await stage.over()


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to end downloads.

    Args:
        figure: The name of its 99th percentile, in milliseconds.
        what: For people.
        end: Does it, in the body of a job.
        at_source: Whether the source hears of it at once, too.
        once: Whether it costs the source or the cable: the next run needs new ones.
        grace: Seconds that it takes by promise.
    """

    figure: str
    what: str
    end: Callable[[Stage, Job, Spawn], Awaitable[None]]
    at_source: bool = True
    once: bool = False
    grace: float = 0.0


SCENARIOS: Final = (
    Scenario("abort_p99_ms", "abort: the controller is cancelled", abort),
    Scenario("cancel_p99_ms", "receiver cancels one by one", cancel),
    Scenario("notice_p99_ms", "failure notice", notice, at_source=False),
    Scenario("kill_p99_ms", "source SIGKILL", kill, at_source=False, once=True, grace=GRACE),
    Scenario("cut_p99_ms", "link cut", cut, at_source=False, once=True, grace=GRACE),
    Scenario("end_run_p99_ms", "end of the job", leave),
    Scenario("end_run_stuck_p99_ms", "end of the job, a thread stuck", leave_stuck),
)


async def run(stage: Stage, scenario: Scenario, roots: Path) -> Run:
    """Open a job, let its downloads get under way, end them, and look at what that took."""
    found = Run()
    async with anyio.create_task_group() as outside:
        async with open_job(
            "drain", stage.server, scratch=roots, drain_window=WINDOW, ram_backed="allow"
        ) as job:
            job.start(anyio.sleep_forever)
            await scenario.end(stage, job, outside.start_soon)
            left_at = anyio.current_time()
        returned = anyio.current_time() - job.report.removal_seconds
        found.overrun = returned - left_at - WINDOW
    found.seconds = await stage.effects(at_source=scenario.at_source, grace=scenario.grace)
    stage.held.set()
    while job.state is not JobRootState.GONE:  # noqa: ASYNC110 - a state
        await anyio.sleep(0.01)
    await run_in_thread(JANITOR.idle, IDLE_SECONDS)
    found.left = len(os.listdir(roots))  # noqa: PTH208 - how many
    if not scenario.once:
        await stage.ask("withdraw")
    return found


@asynccontextmanager
async def stage_of(place: Path, *, cable: bool) -> AsyncIterator[Stage]:
    """A server, a source, and a cable between them if asked."""
    here, there = place / "cable", place / "server"
    async with AsyncExitStack() as stack:
        transport = UnixTransport(listen=there)
        server = await stack.enter_async_context(BaseEndpoint(SERVER, transports=[transport]))
        between: Child | None = None
        if cable:
            between = stack.enter_context(Child("cable", {"here": str(here), "there": str(there)}))
            await run_in_thread(between.answer)
        settings = {"socket": str(here if cable else there), "nbytes": NBYTES}
        source = stack.enter_context(Child("drain_source", settings))
        await run_in_thread(source.answer)
        yield Stage(server, source, between)


# --- the suite ------------------------------------------------------------------------------------


async def _measure(repeats: int, place: Path) -> dict[str, list[Run]]:
    roots = place / "scratch"
    roots.mkdir()
    found: dict[str, list[Run]] = {scenario.figure: [] for scenario in SCENARIOS}
    async with stage_of(place, cable=False) as stage:
        await run(stage, SCENARIOS[0], roots)  # the first one warms up
        for _ in range(repeats):
            for scenario in SCENARIOS:
                if not scenario.once:
                    found[scenario.figure].append(await run(stage, scenario, roots))
    for number in range(repeats):
        for scenario in SCENARIOS:
            if scenario.once:
                own = place / f"{scenario.figure}-{number}"
                own.mkdir()
                async with stage_of(own, cable=scenario.end is cut) as stage:
                    found[scenario.figure].append(await run(stage, scenario, roots))
    return found


def measure(*, quick: bool) -> Report:
    """End downloads in every way, again and again."""
    repeats = 1 if quick else REPEATS
    with scratch(TMPFS) as directory:
        found = anyio.run(_measure, repeats, directory)
        machine = Machine.here(directory)
    runs = [one for several in found.values() for one in several]
    millis = {name: _millis(several) for name, several in found.items()}
    return Report(
        title=(
            f"drain: {DOWNLOADS} downloads of {NBYTES // MIB} MiB under way from another process,"
            f" {repeats} times"
        ),
        machine=machine,
        figures={
            **{name: _percentile(values, 99) for name, values in millis.items()},
            "overrun_seconds": max(one.overrun for one in runs),
            "left_entries": max(one.left for one in runs),
        },
        rows=[
            ("milliseconds to the last effect", "p50", "p99", "most", "job beyond its window"),
            *(_row(scenario, millis[scenario.figure], found) for scenario in SCENARIOS),
        ],
        notes=[
            f"SIGKILL and cut count from the end of the grace for links, {GRACE * 1000:.0f} ms here",
            f"a job's window is {WINDOW * 1000:.0f} ms here; what is stuck gets 200 ms more",
        ],
        samples={name: [asdict(one) for one in several] for name, several in found.items()},
        quick=quick,
    )


def _row(
    scenario: Scenario, millis: list[float], found: Mapping[str, list[Run]]
) -> tuple[str, ...]:
    beyond = max(one.overrun for one in found[scenario.figure]) * 1000
    return (
        scenario.what,
        *(f"{value:.1f}" for value in (statistics.median(millis), _percentile(millis, 99))),
        f"{max(millis):.1f}",
        f"{beyond:.0f}",
    )


def _millis(runs: list[Run]) -> list[float]:
    return [seconds * 1000 for one in runs for seconds in one.seconds]


def _percentile(values: list[float], percent: int) -> float:
    """The smallest value that so many percent do not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]
