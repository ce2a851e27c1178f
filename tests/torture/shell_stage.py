"""The stage of the shell tier: a server, its sites and a relay on a faulty network, and a job that may end early."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc

from streamoff.errors import StreamoffError
from streamoff.machines.job_root import CUT_GRACE_SECONDS, JobRootState
from streamoff.runtime.jobs import Job, open_job
from streamoff.runtime.resources import Resources
from streamoff.testing.network import FaultyNetwork
from streamoff.types import Budgets, Capability
from streamoff.wire.limits import Limits, LinkLimits

from .shell_scenario import REGION, SERVER, Ending, ShellScenario
from .shell_watch import Watch, WatchedEndpoint
from .tier import ViolationError, leaves

__all__ = ["ControllerError", "Stage"]

JOB: Final = "job"
READY_SECONDS: Final = 30.0
"""What sites get to be there, before it begins without them."""
ORPHANED_SECONDS: Final = 400.0
"""What sites get when the server is killed: more than their budgets take to settle everything."""
RELAY_SECONDS: Final = 3.0
"""After so long a relay that was killed is back."""


class ControllerError(Exception):
    """What a controller raises in the body of its job, where the scenario says so."""


class Stage:
    """One run; what the endpoints do is up to the subclass.

    Args:
        scenario: What it is made of.
        scratch: Where job roots are made.
    """

    leave_seconds = 60.0
    """What sites get to hear that the job is over, before they are ended."""
    most_seconds = 20_000.0
    """What a run may take: far more than all budgets together."""

    def __init__(self, scenario: ShellScenario, scratch: Path) -> None:
        self.scenario = scenario
        self.scratch = scratch
        self.network = FaultyNetwork(seed=scenario.seed, plan=scenario.plan)
        self.watch = Watch()
        self.limits = Limits(link=LinkLimits(chunk=scenario.chunk))
        self.jobs: list[Job] = []
        self.failure: Exception | None = None
        """What ended the job before its time, as far as a job may end so."""
        self._raises = False
        self._ready: set[int] = set()

    # --- for the subclass -----------------------------------------------------------------------

    def model_bytes(self) -> int:
        """What one update takes, for quotas."""
        raise NotImplementedError

    async def serve(self, server: WatchedEndpoint, job: Job) -> None:
        """The body of the server's job."""
        raise NotImplementedError

    async def take_part(self, index: int, endpoint: WatchedEndpoint) -> None:
        """What a site does until it has nothing more to do."""
        raise NotImplementedError

    def ready(self, index: int) -> None:
        """A site, or the server, reads its messages from now on."""
        self._ready.add(index)
        if len(self._ready) > len(self.scenario.sites):
            self._all_ready.set()

    async def wait_ready(self) -> None:
        """Wait until everybody is there, or has had the time to be."""
        with anyio.move_on_after(READY_SECONDS):
            await self._all_ready.wait()

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self._over.is_set()

    def server_options(self) -> dict[str, Any]:
        """How the server can be reached, and its limits."""
        return self.options(-1)

    def options(self, index: int) -> dict[str, Any]:
        """How an endpoint reaches the others, and its limits, budgets and capabilities."""
        mute = index >= 0 and self.scenario.sites[index].mute
        return {
            "transports": [self.network],
            "limits": self.limits,
            "budgets": Budgets(deadline=self.scenario.deadline),
            "capabilities": () if mute else tuple(Capability),
        }

    # --- running --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run it to its end.

        Raises:
            ViolationError: It does not end, or a promise is broken meanwhile.
        """
        self._over, self._closing, self._gone = anyio.Event(), anyio.Event(), anyio.Event()
        self._all_ready = anyio.Event()
        self._cancelled, self._left = anyio.CancelScope(), anyio.CancelScope()
        try:
            with anyio.fail_after(self.most_seconds):
                async with self.network, anyio.create_task_group() as tasks:
                    for ending in self.scenario.endings:
                        tasks.start_soon(self._end, ending)
                    await self._play(tasks)
                    tasks.cancel_scope.cancel()
        except TimeoutError:
            raise ViolationError("a run that does not end") from None
        self._check_idle()

    async def _play(self, tasks: anyio.abc.TaskGroup) -> None:
        """Let everybody do what they do until the job is over and the sites have left, or the server is killed."""
        with self.network.life(SERVER) as life:
            async with WatchedEndpoint(SERVER, self.watch, **self.server_options()) as server:
                tasks.start_soon(self._job, server)
                if self.scenario.relayed:
                    tasks.start_soon(self._relay)
                tasks.start_soon(self._sites)
                async with anyio.create_task_group() as waiting:
                    waiting.start_soon(self._wait_over, waiting.cancel_scope)
                    await self._closing.wait()
                    waiting.cancel_scope.cancel()
        if life.cancelled_caught:
            self._cancelled.cancel()
            with anyio.move_on_after(ORPHANED_SECONDS):
                await self._gone.wait()

    async def _wait_over(self, scope: anyio.CancelScope) -> None:
        await self._over.wait()
        with anyio.move_on_after(self.leave_seconds):
            await self._gone.wait()
        scope.cancel()

    async def _sites(self) -> None:
        await self.run_sites()
        self._gone.set()

    async def run_sites(self) -> None:
        """Let every site live."""
        async with anyio.create_task_group() as sites:
            for index in range(len(self.scenario.sites)):
                sites.start_soon(self._site, index)

    async def _job(self, server: WatchedEndpoint) -> None:
        quota = self.scenario.quota
        try:
            with self._cancelled:
                async with open_job(
                    JOB,
                    server,
                    scratch=self.scratch,
                    drain_window=self.scenario.drain,
                    quota=None if quota is None else int(quota * self.model_bytes()),
                    ram_backed="allow",
                ) as job:
                    self.jobs.append(job)
                    with self._left:
                        await self.serve(server, job)
                    self._leave()
        except Exception as error:
            if any(not isinstance(one, (StreamoffError, ControllerError)) for one in leaves(error)):
                raise
            self.failure = error
        finally:
            self._over.set()

    def _leave(self) -> None:
        if self._raises:
            raise ControllerError

    async def _end(self, ending: Ending) -> None:
        await anyio.sleep(ending.at)
        match ending.what:
            case "cancel":
                self._cancelled.cancel()
            case "leave":
                self._left.cancel()
            case "raise":
                self._raises = True
                self._left.cancel()
            case "finalise":
                for job in self.jobs[:1]:
                    job.finalise()
            case "close":
                self._closing.set()

    async def _relay(self) -> None:
        while True:
            with self.network.life(REGION):
                async with WatchedEndpoint(REGION, self.watch, **self.options(-1)) as relay:
                    await self.connect(relay, SERVER)
                    await anyio.sleep_forever()
            await anyio.sleep(RELAY_SECONDS)

    async def _site(self, index: int) -> None:
        """The lives of one site: a second one, if it was killed and comes back."""
        name, site = self.scenario.name(index), self.scenario.sites[index]
        for _ in range(2):
            with self.network.life(name) as life:
                async with WatchedEndpoint(name, self.watch, **self.options(index)) as endpoint:
                    await self.connect(endpoint, self.scenario.uplink(index))
                    await self.take_part(index, endpoint)
            if not life.cancelled_caught or site.restarts is None:
                return
            await anyio.sleep(site.restarts)

    @staticmethod
    async def connect(endpoint: WatchedEndpoint, to: str) -> None:
        """Dial until somebody answers."""
        while True:
            try:
                await endpoint.connect(to)
            except StreamoffError:
                await anyio.sleep(0.5)
            else:
                return

    # --- the end --------------------------------------------------------------------------------

    def _check_idle(self) -> None:
        """Nothing is lent, and every root is gone, in time."""
        statistics = Resources.current().statistics()
        busy = (
            statistics.active_downloads,
            statistics.buffers_lent,
            statistics.landing_threads,
            statistics.reading_threads,
        )
        if any(busy):
            raise ViolationError("resources in use when everything is over", statistics)
        for job in self.jobs:
            report = job.report
            if report.state is not JobRootState.GONE or not report.removed:
                raise ViolationError("a job root that is not gone", report, *job.story.lines())
            if report.drain_seconds > report.window + CUT_GRACE_SECONDS + 0.05:
                raise ViolationError("a drain that takes too long", report, *job.story.lines())
