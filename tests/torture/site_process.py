"""A site in a process of its own, for the shell tier: it may be stopped or killed at any moment.

The process looks at its own ends, and at what it leaves, and writes what it found to a file.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import torch

from streamoff.fl.executors.in_process import InProcess, Result, Task
from streamoff.machines.download import DownloadState
from streamoff.payload.context import DecodeContext
from streamoff.runtime import link
from streamoff.runtime.jobs import open_job
from streamoff.scratch.janitor import JANITOR
from streamoff.testing.leaks import LeakCheck, leaving_no_tasks
from streamoff.transports.sockets import HostPort, TcpTransport, UnixTransport
from streamoff.transports.tls import Identity
from streamoff.types import Budgets, Verdict

from .shell_rounds import contribution, difference
from .shell_scenario import SERVER, ShellScenario
from .shell_stage import JOB, Stage
from .shell_watch import Watch, WatchedEndpoint, only_expected_logs
from .tier import ViolationError

__all__ = ["BUDGETS", "SiteOrders", "impatient", "live"]

BUDGETS = Budgets(
    acquire=6.0,
    idle=7.0,
    stall=1.0,
    backoff=(0.2, 0.4),
    reconnect_grace=2.0,
    settle=2.0,
    confirm=0.5,
)
"""In real time nobody waits for two minutes."""

Place = Path | HostPort


@contextmanager
def impatient() -> Iterator[None]:
    """Notice a silent link in a second and not in fifteen."""
    with ExitStack() as stack:
        for name, value in (("KEEPALIVE_SECONDS", 0.3), ("SILENCE_SECONDS", 1.2)):
            stack.callback(setattr, link, name, getattr(link, name))
            setattr(link, name, value)
        yield


@dataclass(frozen=True, slots=True)
class SiteOrders:
    """What a site's process is told.

    Args:
        index: Which site.
        scenario: What is run.
        backend: Of its event loop.
        place: Where the server is.
        identity: A directory with the site's certificate; None: there is no TLS.
        scratch: Where job roots are made.
        report: The file that says what it found.
    """

    index: int
    scenario: ShellScenario
    backend: str
    place: Place
    identity: Path | None
    scratch: Path
    report: Path


def live(orders: SiteOrders) -> None:
    """Live one life and write the report; the body of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    gc.freeze()
    told: dict[str, Any] = {"pid": os.getpid()}
    check = LeakCheck()
    try:
        with impatient(), only_expected_logs():
            site = SiteLife(orders)
            anyio.run(leaving_no_tasks(site.run), backend=orders.backend)
        told |= site.ends()
        _check_nothing_left(check)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
        told["violation"] = f"{type(error).__name__}: {error}"
    orders.report.with_suffix(".part").write_text(json.dumps(told))
    orders.report.with_suffix(".part").rename(orders.report)


def _check_nothing_left(check: LeakCheck) -> None:
    if not JANITOR.idle(10.0):
        raise ViolationError("a janitor that does not come to an end")
    if leaks := check.settle():
        raise ViolationError("a site leaves something", *leaks)


class SiteLife:
    """The life of a site."""

    def __init__(self, orders: SiteOrders) -> None:
        self._orders = orders
        self._watch = Watch()

    async def run(self) -> None:
        """Connect, and serve tasks until the server says goodbye or is gone for long."""
        orders, scenario = self._orders, self._orders.scenario
        place, site = orders.place, orders.scenario.sites[orders.index]
        identity = None if orders.identity is None else Identity.load(orders.identity)
        transport = (
            UnixTransport(peers={SERVER: place})
            if isinstance(place, Path)
            else TcpTransport(peers={SERVER: place}, tls=identity)
        )
        name = scenario.name(orders.index)
        async with WatchedEndpoint(
            name, self._watch, transports=[transport], budgets=BUDGETS
        ) as endpoint:
            await Stage.connect(endpoint, SERVER)
            if site.disk:
                async with open_job(JOB, endpoint, scratch=orders.scratch) as job:
                    await self._serve(endpoint, DecodeContext(tensors="disk", job=job))
            else:
                await self._serve(endpoint, DecodeContext())

    async def _serve(self, endpoint: WatchedEndpoint, context: DecodeContext) -> None:
        site = self._orders.scenario.sites[self._orders.index]
        executor = InProcess(
            endpoint, job=JOB, train=self._train, context=context, snapshot=site.snapshot
        )
        self._orders.report.with_suffix(".ready").touch()
        with anyio.move_on_after(30.0):
            await executor.run()

    async def _train(self, task: Task) -> Result:
        index, elements = self._orders.index, self._orders.scenario.elements
        site = self._orders.scenario.sites[index]
        if task.round == 1:
            zeros = {name: 0 * one for name, one in contribution(0, 0, elements).items()}
            if wrong := difference(task.params, zeros):
                raise ViolationError("a site got another model", wrong)
        await anyio.sleep(site.trains)
        if site.mood == "fails":
            raise RuntimeError("training failed")
        params: dict[str, Any] = dict(contribution(index, task.round, elements))
        if site.arrays:
            params["bias"] = params["bias"].numpy()
        return Result(params=params, weight=float(site.weight), metrics={"loss": 1.0})

    def ends(self) -> dict[str, Any]:
        """What became of everything that was published and pulled here.

        Raises:
            ViolationError: It is not as promised, as far as it can be told from here.
        """
        served = []
        for published in self._watch.published:
            outcome, slots = published.transaction.outcome, published.transaction.record.slots
            if outcome is None:
                raise ViolationError("a transaction that never settled", published.transaction.id)
            for slot, refs in zip(slots, outcome.slots.values(), strict=True):
                for ref, end in refs.items():
                    served.append([ref, slot.ticket.hex(), end.verdict is Verdict.SUCCEEDED])
                    self._watch.foreign[ref, slot.ticket] = True  # the parent compares
        scenario = replace(self._orders.scenario, quota=None)
        ends = self._watch.look_at_the_end(scenario, {"cut", "kill", "partition"})
        pulled = [
            [one.transfer.ref.id, one.transfer.ref.ticket.hex()]
            for one in self._watch.pulled
            if one.transfer.record.state is DownloadState.DONE
        ]
        return {"served": served, "pulled": pulled, "ends": dict(ends)}
