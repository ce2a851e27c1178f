"""Rounds with sites in processes of their own, over unix sockets or TCP, in real time, under signals."""

from __future__ import annotations

import functools
import json
import multiprocessing as mp
import os
import signal
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import anyio

from streamoff.scratch.reaper import reclaim
from streamoff.transports import authority
from streamoff.transports.sockets import HostPort, TcpTransport, UnixTransport
from streamoff.transports.tls import Identity
from streamoff.types import Address

from .shell_rounds import Rounds
from .shell_scenario import SERVER, ShellScenario, Signal
from .site_process import BUDGETS, SiteOrders, impatient, live
from .tier import ViolationError

__all__ = ["Processes", "prepare"]

_CONTEXT: Final = mp.get_context("forkserver")
LOOK_SECONDS: Final = 0.01
"""How often a process is looked at: no event tells that it is ready."""


@functools.cache
def prepare() -> None:
    """Start the process that the sites are forked from: it has loaded everything, and stays. Once is enough."""
    _CONTEXT.set_forkserver_preload(["tests.torture.site_process"])
    warm = _CONTEXT.Process(target=int)
    warm.start()
    warm.join()
    warm.close()


class Processes(Rounds):
    """As :class:`~tests.torture.shell_rounds.Rounds`; the sites report what they found when they end.

    Args:
        scenario: What it is made of.
        scratch: Where job roots are made, by all processes.
        control: Where sockets and reports are.
        backend: Of all event loops.
    """

    leave_seconds = 3.0
    most_seconds = 60.0

    def __init__(self, scenario: ShellScenario, scratch: Path, control: Path, backend: str) -> None:
        super().__init__(scenario, scratch)
        self.signals: Counter[str] = Counter()
        self._control = control
        self._backend = backend
        self._socket = control / "server"
        self._certificates = control / "certificates"
        self._transport = self._listening()
        self._alive: dict[int, ForkServerProcess] = {}
        self._reports: list[Path] = []

    def _listening(self) -> UnixTransport | TcpTransport:
        """What the server listens on; with TLS, everybody's certificate is made first."""
        scenario, tls = self.scenario, None
        if scenario.transport == "unix":
            return UnixTransport(listen=self._socket)
        if scenario.transport == "tls":
            authority.create(self._certificates)
            for name in (SERVER, *scenario.names):
                authority.issue(self._certificates, Address(name))
            tls = Identity.load(self._certificates / authority.ISSUED / SERVER)
        return TcpTransport(listen=HostPort("127.0.0.1", 0), tls=tls)

    def server_options(self) -> dict[str, Any]:
        """Real sockets, and no patience."""
        return {"transports": [self._transport], "budgets": BUDGETS}

    async def run(self) -> None:
        """Run it, look at what the sites found, and see that what killed ones left can be reclaimed."""
        with impatient():
            await super().run()
        if self._socket.exists():
            raise ViolationError("a socket file that stays")
        self._hear_sites()
        reclaim(self.scratch)

    # --- the sites ------------------------------------------------------------------------------

    async def run_sites(self) -> None:
        """Start every site's process, send the signals, and wait until all have ended."""
        try:
            async with anyio.create_task_group() as group:
                for one in self.scenario.signals:
                    group.start_soon(self._signal, one)
                async with anyio.create_task_group() as sites:
                    for index in range(len(self.scenario.sites)):
                        sites.start_soon(self._site, index)
                group.cancel_scope.cancel()
        finally:
            for index, process in self._alive.items():
                self.watch.silent.add(self.scenario.name(index))
                process.kill()
                process.join()

    async def _site(self, index: int) -> None:
        """The lives of a site's process."""
        restarts = self.scenario.sites[index].restarts
        for life in range(2):
            report = self._control / f"{index}-{life}"
            process = self._start(index, report)
            ready = report.with_suffix(".ready")
            while process.is_alive() and not ready.exists():  # noqa: ASYNC110 - there is no event
                await anyio.sleep(LOOK_SECONDS)
            self.ready(index)
            await anyio.wait_readable(process.sentinel)
            process.join()
            del self._alive[index]
            code = process.exitcode
            process.close()
            if code != -signal.SIGKILL:
                self._reports.append(report)
                return
            self.watch.silent.add(self.scenario.name(index))
            if restarts is None or self.over:
                return
            await anyio.sleep(0.2)

    def _start(self, index: int, report: Path) -> ForkServerProcess:
        place: Path | HostPort = self._socket
        if isinstance(self._transport, TcpTransport):
            assert self._transport.place is not None
            place = self._transport.place
        identity = self._certificates / authority.ISSUED / self.scenario.name(index)
        orders = SiteOrders(
            index=index,
            scenario=self.scenario,
            backend=self._backend,
            place=place,
            identity=identity if self.scenario.transport == "tls" else None,
            scratch=self.scratch,
            report=report,
        )
        process = _CONTEXT.Process(target=live, args=(orders,))
        process.start()
        self._alive[index] = process
        return process

    async def _signal(self, one: Signal) -> None:
        await self.wait_ready()
        await anyio.sleep(one.at)
        process = self._alive.get(one.site)
        if process is None or process.pid is None:
            return
        self.signals[f"SIG{one.kind.upper()}"] += 1
        if one.kind == "kill":
            os.kill(process.pid, signal.SIGKILL)
            return
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await anyio.sleep(one.seconds)
        finally:
            if self._alive.get(one.site) is process:
                os.kill(process.pid, signal.SIGCONT)

    # --- the end --------------------------------------------------------------------------------

    def _hear_sites(self) -> None:
        """Compare what the sites say with what is here.

        Raises:
            ViolationError: A site found something, or one end claims what the other does not have.
        """
        for report in self._reports:
            if not report.exists():
                raise ViolationError("a site that ends without a report", report.name)
            told = json.loads(report.read_text())
            if "violation" in told:
                raise ViolationError("a site found something", told["violation"])
            for ref, ticket, succeeded in told["served"]:
                if succeeded and not self.watch.delivered(ref, bytes.fromhex(ticket)):
                    raise ViolationError("a success at a site that the server does not have", ref)
            for ref, ticket in told["pulled"]:
                self.watch.foreign[ref, bytes.fromhex(ticket)] = True
