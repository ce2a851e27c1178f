"""What every server workflow does: round after round, broadcast, collect, close, aggregate.

Only a lost quorum, or a policy that says so, costs a round, and then the previous model stands. What a single
site can do is in ``open_round``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import anyio

from streamoff.errors import (
    JobClosedError,
    StreamoffError,
    UnreachableError,
)
from streamoff.fl.aggregation import open_engine
from streamoff.fl.aggregation.engine import Choice, Engine, choose_engine, preflight
from streamoff.fl.aggregation.intake import Terms
from streamoff.fl.aggregation.report import AggregationResult
from streamoff.fl.aggregation.weights import weighted_metrics
from streamoff.fl.envelope import ResultEnvelope, TaskEnvelope, result_topic, task_topic
from streamoff.fl.exchange import ExchangeFormat
from streamoff.fl.parameters import arrays_of, load_initial
from streamoff.fl.workflows.open_round import OpenRound, check_cut, reason_of, reclaimed
from streamoff.fl.workflows.rounds import Gate, Round
from streamoff.fl.workflows.settings import RunSettings
from streamoff.machines import participation as m
from streamoff.machines.job_root import JobRootState
from streamoff.machines.participation import ParticipationState
from streamoff.payload.endpoint import Delivery, Endpoint, Message, Messages
from streamoff.runtime.jobs import Job
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.space import free_space
from streamoff.tensors.layout import Layout
from streamoff.tensors.state import State
from streamoff.tensors.writer import MemoryWriter, StateWriter
from streamoff.types import Address

__all__ = ["LOOK_SECONDS", "RunSettings", "ServerRun"]

logger = logging.getLogger("streamoff.fl")

LOOK_SECONDS: Final = 5.0
"""How often a round looks whether sites that it waits for have got the model."""


class ServerRun:
    """One run of a server workflow.

    Args:
        job: An open job of the aggregator's endpoint.
        sites: All sites of the run.
        settings: Validated.
    """

    def __init__(self, job: Job, sites: tuple[Address, ...], settings: RunSettings) -> None:
        assert isinstance(job.endpoint, Endpoint)
        self._job = job
        self._endpoint: Endpoint = job.endpoint
        self._sites = sites
        self._settings = settings
        self._open: OpenRound | None = None
        self._accepted: dict[int, tuple[str, ...]] = {}

    async def work(self, gate: Gate) -> None:
        """Run all rounds, each when it is asked for; the iterator's task.

        Raises:
            UsageError: Another workflow of this job is running. Nothing was started.
        """
        results = self._endpoint.receive(result_topic(self._job.name))
        try:
            await self._hearing(gate, results)
        finally:
            with anyio.CancelScope(shield=True):
                results.close()
                async for message in results:
                    message.decline("the workflow is over")
                await self._say_goodbye()

    async def _hearing(self, gate: Gate, results: Messages) -> None:
        """Run the rounds while results are heard; an error of theirs is raised as it is."""
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen, results)
            try:
                await self._rounds(gate)
            except Exception as error:  # noqa: BLE001 - raised below, out of the group
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _rounds(self, gate: Gate) -> None:
        settings = self._settings
        await gate.wait_asked()
        state = gate.keep(await self._initial())
        for number in range(1, settings.rounds + 1):
            finished = await self._round(number, state)
            state = gate.keep(finished.state)
            if settings.to_disk:
                await reclaimed(self._endpoint)
            await gate.publish(finished)
        if settings.persistor is not None:
            await self._maths(partial(settings.persistor.save, stop=check_cut), state)

    # --- one round --------------------------------------------------------------------------------

    async def _round(self, number: int, state: State) -> Round:
        if self._job.state is not JobRootState.OPEN:
            raise JobClosedError(
                "the job admits no new rounds", job=self._job.name, state=self._job.state.value
            )
        opened = self._open = await self._open_round(number, state)
        delivery: Delivery | None = None
        try:
            delivery = await self._broadcast(opened, state)
            if self._settings.observer is not None:
                self._settings.observer.round_started(number, len(opened.sites))
            opened.close(await self._collect(opened, delivery))
            await opened.settle()
            opened.check_number(opened.count(ParticipationState.ACCEPTED))
            result = await self._maths(
                partial(opened.engine.finish, stop=check_cut), self._new_writer
            )
        finally:
            with anyio.CancelScope(shield=True):
                await opened.abandon()
                if delivery is not None:
                    delivery.cancel("the round is over")
                self._open = None
        return await self._judge(opened, result)

    async def _open_round(self, number: int, state: State) -> OpenRound:
        """Choose the engine and make sure that the round fits, before anything is sent."""
        sites = self._settings.select(number)
        terms = Terms(
            previous=state,
            round=number,
            job=self._job.name,
            kind=self._settings.kind,
            policies=self._settings.policies,
        )
        engine, places = await self._maths(self._engine, terms, len(sites))
        return OpenRound(self._job, self._settings, terms, engine, sites=sites, places=places)

    def _engine(self, terms: Terms, sites: int) -> tuple[Engine, int | None]:
        """The engine, and how many contributions may be on disk before it has folded them."""
        settings, nbytes = self._settings, terms.previous.layout.size
        if not settings.to_disk:
            auto = settings.aggregation == "auto"
            return open_engine("columnar" if auto else settings.aggregation, terms), None  # type: ignore[arg-type]
        quota, free = self._room()
        choice = choose_engine(
            settings.aggregation, sites=sites, model_bytes=nbytes, quota=quota, free=free
        )
        preflight(choice.engine, sites=sites, model_bytes=nbytes, quota=quota, free=free)
        if choice.notice is not None and terms.round == 1:
            logger.warning("job %s: %s", self._job.name, choice.notice)
        return open_engine(choice.engine, terms), _places(choice, nbytes, quota, free)

    def _room(self) -> tuple[int | None, int | None]:
        """What is left of the quota and of the file system; None: no quota, or it does not say."""
        ledger = self._job.ledger
        quota = None if ledger.quota is None else max(0, ledger.quota - ledger.used)
        return quota, free_space(self._job.path)

    async def _broadcast(self, opened: OpenRound, state: State) -> Delivery | None:
        """Send the task to every site that can be reached; one that cannot has failed."""
        settings, budgets = self._settings, self._endpoint.budgets
        task = TaskEnvelope(
            job=self._job.name,
            round=opened.number,
            rounds=settings.rounds,
            kind=settings.kind,
            params=await self._params(state),
        )
        # a site that is still busy with the last round has until the end of this one to come for the model
        patient = replace(budgets, acquire=max(budgets.acquire, settings.round_timeout))
        while True:
            for site in opened.awaited:
                if not self._endpoint.can_reach(site):
                    opened.forfeit(site, "unreachable when the round began")
            if not opened.awaited:
                return None
            try:
                return await self._endpoint.send(
                    opened.awaited, task_topic(self._job.name), task.tree(), budgets=patient
                )
            except (
                UnreachableError
            ) as error:  # lost meanwhile; nothing was sent to the others either
                logger.debug("job %s: %s", self._job.name, error)

    async def _params(self, state: State) -> Any:
        if self._settings.exchange is ExchangeFormat.NUMPY:
            return await self._maths(arrays_of, state)
        return state

    async def _collect(self, opened: OpenRound, delivery: Delivery | None) -> str:
        """Wait until everybody has answered, enough have and the cut-off is over, or time is up.

        Returns:
            Why a site that has not answered is late.
        """
        settings = self._settings
        end = opened.started + settings.round_timeout
        why = f"no result within {settings.round_timeout:g} s"
        enough = False
        while True:
            if delivery is not None:
                opened.look_at(delivery)
            opened.check_possible()
            now = anyio.current_time()
            accepted = opened.count(ParticipationState.ACCEPTED)
            if settings.cut_off is not None and not enough and accepted >= settings.min_responses:
                enough = True
                if now + settings.cut_off < end:
                    end = now + settings.cut_off
                    why = f"no result within {settings.cut_off:g} s of the first {accepted}"
            if opened.settled or now >= end:
                return why
            await opened.wait_changed(min(end, now + LOOK_SECONDS))

    async def _judge(self, opened: OpenRound, result: AggregationResult) -> Round:
        """Take the engine's word on who is in, and the quorum's on whether that is enough."""
        evaluate, report = self._settings.evaluate, result.report
        try:
            for rejection in report.rejected:
                opened.step(Address(rejection.site), m.Failed(rejection.message))
            opened.check_number(len(report.weights))
            accepted = {site: opened.metrics[Address(site)] for site in report.weights}
            metrics: Mapping[str, float] = weighted_metrics(accepted, report.weights)
            self._accepted[opened.number] = report.sites
            if evaluate is not None:
                metrics = await self._maths(evaluate, result.state, dict(self._accepted))
        except BaseException:
            result.state.release()
            raise
        return Round(
            number=opened.number,
            state=result.state,
            accepted=tuple(Address(site) for site in report.sites),
            failed=opened.failed,
            weights=report.weights,
            metrics=metrics,
            site_metrics=accepted,
            bytes_landed=sum(opened.landed.values()),
            seconds=anyio.current_time() - opened.started,
            report=report,
        )

    # --- results ----------------------------------------------------------------------------------

    async def _listen(self, results: Messages) -> None:
        async for message in results:
            self._hear(message)

    def _hear(self, message: Message) -> None:
        """Judge a result by its envelope, before a byte of it is pulled."""
        opened, site = self._open, message.sender
        if opened is None or site not in opened.sites or not _is_of(message.tree, opened.number):
            now = "no round" if opened is None else f"round {opened.number}"
            self._tell("not awaited", "job %s: a result of %s is not awaited", site)
            message.decline(f"the result is not awaited: {now} is open")
            return
        try:
            envelope = ResultEnvelope.of(message.tree, site=site)
        except StreamoffError as error:
            self._tell("refused", "job %s: a result was refused: %s", error)
            message.decline(error.what)
            opened.forfeit(site, reason_of(error))
            return
        opened.hear(message, envelope)

    def _tell(self, kind: str, text: str, about: object) -> None:
        self._endpoint.lines.tell(logger, logging.INFO, kind, text, self._job.name, about)

    # --- models -----------------------------------------------------------------------------------

    async def _initial(self) -> State:
        settings = self._settings
        load = partial(
            load_initial, to_disk=settings.to_disk, storage=self._job.storage, stop=check_cut
        )
        state: State = await self._maths(load, settings.initial, self._new_writer)
        return state

    def _new_writer(self, layout: Layout) -> StateWriter:
        """Where the next global model is written; in the worker thread."""
        if not self._settings.to_disk:
            return MemoryWriter(layout)
        what = f"a global model of {layout.size} bytes"
        return self._job.new_writer(layout, what, name="model.safetensors")

    async def _maths(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await run_in_thread(fn, *args, limiter=self._endpoint.resources.maths)

    async def _say_goodbye(self) -> None:
        """Tell the sites that there will be no more rounds.

        A site whose link is silent hears it when it is back, if that is soon enough; one whose link is lost
        does not, and whoever runs it ends it.
        """
        task = TaskEnvelope(job=self._job.name, round=0, rounds=self._settings.rounds)
        for site in self._sites:
            try:
                await self._endpoint.send(site, task_topic(self._job.name), task.tree())
            except StreamoffError as error:
                logger.debug("job %s: %s was not told the end: %s", self._job.name, site, error)


def _places(choice: Choice, nbytes: int, quota: int | None, free: int | None) -> int | None:
    """How many contributions fit beside the result, for an engine that frees each as it folds it."""
    room = min((one for one in (quota, free) if one is not None), default=None)
    if choice.engine == "columnar" or room is None:
        return None
    return max(1, room // max(1, nbytes) - 1)


def _is_of(tree: object, number: int) -> bool:
    """Whether a result says that it is of a round, or says nothing that makes sense."""
    if type(tree) is not dict or type(tree.get("round")) is not int:
        return True
    of: int = tree["round"]
    return of == number
