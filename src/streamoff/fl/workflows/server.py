"""What every server workflow does in a round: broadcast, collect, close, aggregate.

A site's part in a round is a machine of its own (``machines/participation``); this module carries it out. A
contribution that fails costs its site. Only a lost quorum, or a policy that says so, costs the round, and
then the previous model stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.from_thread

from streamoff.errors import (
    AggregationError,
    ContributionRejectedError,
    QuorumLostError,
    SpecMismatchError,
    StreamoffError,
    UnreachableError,
    WeightError,
)
from streamoff.fl.aggregation import open_engine
from streamoff.fl.aggregation.contribution import Contribution, Kind
from streamoff.fl.aggregation.engine import Choice, Engine, Requested, choose_engine, preflight
from streamoff.fl.aggregation.foreign import as_state
from streamoff.fl.aggregation.intake import Terms, check_layout
from streamoff.fl.aggregation.policies import Policies
from streamoff.fl.aggregation.report import AggregationResult
from streamoff.fl.aggregation.weights import weighted_metrics
from streamoff.fl.envelope import ResultEnvelope, TaskEnvelope, result_topic, task_topic
from streamoff.fl.exchange import ExchangeFormat
from streamoff.fl.parameters import arrays_of, load_initial, tensors_from
from streamoff.fl.persistor import FilePersistor
from streamoff.fl.workflows.rounds import Publish, Round, WorkflowObserver
from streamoff.machines import participation as m
from streamoff.machines.participation import PARTICIPATION, Participation, ParticipationState
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Delivery, Endpoint, Message
from streamoff.payload.resolve import pull, resolve_with, whole_state
from streamoff.runtime.jobs import Consumer, Job
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.space import free_space
from streamoff.tensors.layout import Layout
from streamoff.tensors.state import State
from streamoff.tensors.writer import FileWriter, MemoryWriter, StateWriter
from streamoff.types import Address

if TYPE_CHECKING:
    import torch

__all__ = ["RunSettings", "ServerRun"]

logger = logging.getLogger("streamoff.fl")

SITE_ERRORS = (ContributionRejectedError, SpecMismatchError, WeightError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of one run, validated by the workflow that made them.

    Args:
        select: Gives the sites of a round by its number.
        min_responses: Contributions a round needs.

    The others are those of :class:`streamoff.fl.workflows.fedavg.FedAvg`.
    """

    workflow: str
    initial: Mapping[str, torch.Tensor] | State | Path
    rounds: int
    select: Callable[[int], tuple[Address, ...]]
    min_responses: int
    cut_off: float | None
    round_timeout: float
    kind: Kind
    aggregation: Requested
    policies: Policies
    offload: bool
    exchange: ExchangeFormat
    persistor: FilePersistor | None
    evaluate: Callable[[State, Mapping[int, tuple[str, ...]]], Mapping[str, float]] | None
    observer: WorkflowObserver | None

    @property
    def to_disk(self) -> bool:
        """Whether contributions and models live on disk."""
        return self.offload and self.exchange.can_offload


@dataclass(slots=True, eq=False)
class _Open:
    """A round under way."""

    terms: Terms
    engine: Engine
    sites: dict[Address, Participation]
    started: float
    messages: dict[int, tuple[Message, ResultEnvelope]] = field(default_factory=dict)
    pulls: dict[Address, Consumer] = field(default_factory=dict)
    weights: dict[Address, float] = field(default_factory=dict)
    metrics: dict[Address, Mapping[str, float]] = field(default_factory=dict)
    landed: dict[Address, int] = field(default_factory=dict)
    changed: anyio.Event = field(default_factory=anyio.Event)
    lost: AggregationError | None = None

    @property
    def number(self) -> int:
        """The round, from 1."""
        return self.terms.round

    def count(self, *states: ParticipationState) -> int:
        """Sites in any of these states."""
        return sum(one.state in states for one in self.sites.values())


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
        self._open: _Open | None = None
        self._accepted: dict[int, tuple[str, ...]] = {}
        self._ids = 0

    async def work(self, publish: Publish) -> None:
        """Run all rounds; the iterator's task."""
        settings = self._settings
        with self._endpoint.receive(result_topic(self._job.name)) as results:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen, results)
                state = await self._initial()
                try:
                    for number in range(1, settings.rounds + 1):
                        finished = await self._round(number, state)
                        state.release()
                        state = finished.state
                        await publish(finished)
                    if settings.persistor is not None:
                        await self._maths(settings.persistor.save, state)
                finally:
                    state.release()
                    await self._say_goodbye()
                tasks.cancel_scope.cancel()

    # --- one round --------------------------------------------------------------------------------

    async def _round(self, number: int, state: State) -> Round:
        settings = self._settings
        sites = settings.select(number)
        terms = self._terms(number, state)
        engine = self._engine(terms, len(sites))
        opened = _Open(
            terms,
            engine,
            {site: Participation(site) for site in sites},
            anyio.current_time(),
        )
        self._open = opened
        delivery: Delivery | None = None
        try:
            delivery = await self._broadcast(opened, state)
            if settings.observer is not None:
                settings.observer.round_started(number, len(sites))
            await self._collect(opened)
            self._close(opened, "the round is closed")
            await self._settle_pulls(opened)
            result = await self._maths(partial(engine.finish, stop=_check_cut), self._new_writer)
        finally:
            with anyio.CancelScope(shield=True):
                self._close(opened, "the round was given up")
                await self._settle_pulls(opened)
                engine.close()
                if delivery is not None:
                    delivery.cancel("the round is over")
                self._open = None
        return await self._judge(opened, result)

    def _terms(self, number: int, state: State) -> Terms:
        return Terms(
            previous=state,
            round=number,
            job=self._job.name,
            kind=self._settings.kind,
            policies=self._settings.policies,
        )

    def _engine(self, terms: Terms, sites: int) -> Engine:
        """Choose the engine and make sure that the round fits, before anything is sent."""
        settings, nbytes = self._settings, terms.previous.layout.size
        room: dict[str, int | None] = {"quota": None, "free": None}
        if settings.to_disk:
            ledger = self._job.ledger
            room["quota"] = None if ledger.quota is None else max(0, ledger.quota - ledger.used)
            room["free"] = free_space(self._job.path)
        numbers = {"sites": sites, "model_bytes": nbytes}
        if settings.to_disk:
            choice = choose_engine(settings.aggregation, **numbers, **room)  # type: ignore[arg-type]
            preflight(choice.engine, **numbers, **room)  # type: ignore[arg-type]
        else:
            auto = settings.aggregation == "auto"
            choice = Choice("columnar") if auto else Choice(settings.aggregation)  # type: ignore[arg-type]
        if choice.notice is not None and terms.round == 1:
            logger.warning("job %s: %s", self._job.name, choice.notice)
        return open_engine(choice.engine, terms)

    async def _broadcast(self, opened: _Open, state: State) -> Delivery | None:
        """Send the task to every site that can be reached; one that cannot has failed."""
        for site in opened.sites:
            if not self._endpoint.can_reach(site):
                self._step(opened, site, m.Failed("unreachable when the round began"))
        targets = [site for site, one in opened.sites.items() if not one.settled]
        if not targets:
            return None
        task = TaskEnvelope(
            job=self._job.name,
            round=opened.number,
            rounds=self._settings.rounds,
            kind=self._settings.kind,
            params=await self._params(state),
        )
        return await self._endpoint.send(targets, task_topic(self._job.name), task.tree())

    async def _params(self, state: State) -> Any:
        if self._settings.exchange is ExchangeFormat.NUMPY:
            return await self._maths(arrays_of, state)
        return state

    async def _collect(self, opened: _Open) -> None:
        """Wait until everybody has answered, enough have and the cut-off is over, or time is up."""
        settings = self._settings
        end = opened.started + settings.round_timeout
        enough_at: float | None = None
        while True:
            self._check_quorum(opened)
            accepted = opened.count(ParticipationState.ACCEPTED)
            if all(one.settled for one in opened.sites.values()):
                return
            if accepted >= settings.min_responses and settings.cut_off is not None:
                enough_at = anyio.current_time() if enough_at is None else enough_at
                end = min(end, enough_at + settings.cut_off)
            if anyio.current_time() >= end:
                return
            opened.changed = anyio.Event()
            with anyio.CancelScope(deadline=end):
                await opened.changed.wait()

    def _check_quorum(self, opened: _Open) -> None:
        if opened.lost is not None:
            raise opened.lost
        possible = len(opened.sites) - opened.count(
            ParticipationState.FAILED, ParticipationState.LATE
        )
        if possible < self._settings.min_responses:
            raise self._quorum_lost(opened, possible)

    def _check_accepted(self, opened: _Open, accepted: int) -> None:
        """A site can still be lost while its file is read."""
        if accepted < self._settings.min_responses:
            raise self._quorum_lost(opened, accepted)

    def _quorum_lost(self, opened: _Open, possible: int) -> QuorumLostError:
        reasons = {site: one.reason for site, one in opened.sites.items() if one.reason}
        some = "; ".join(f"{site}: {why}" for site, why in list(reasons.items())[:8])
        return QuorumLostError(
            "too few contributions can still arrive; the previous model stands",
            expected=f"at least {self._settings.min_responses} of {len(opened.sites)}",
            got=f"{possible} ({some})" if some else possible,
            job=self._job.name,
            round=opened.number,
        )

    async def _judge(self, opened: _Open, result: AggregationResult) -> Round:
        """Take the engine's word on who is in, and the quorum's on whether that is enough."""
        settings, report = self._settings, result.report
        for rejection in report.rejected:
            site = Address(rejection.site)
            if site in opened.sites and site not in report.weights:
                self._step(opened, site, m.Failed(rejection.message))
        try:
            self._check_accepted(opened, len(report.weights))
            accepted = {site: opened.metrics.get(Address(site), {}) for site in report.weights}
            metrics: Mapping[str, float] = weighted_metrics(accepted, report.weights)
            self._accepted[opened.number] = report.sites
            if settings.evaluate is not None:
                metrics = await self._maths(settings.evaluate, result.state, dict(self._accepted))
        except BaseException:
            result.state.release()
            raise
        return Round(
            number=opened.number,
            state=result.state,
            accepted=tuple(Address(site) for site in report.sites),
            failed={
                site: one.reason
                for site, one in opened.sites.items()
                if one.state in {ParticipationState.FAILED, ParticipationState.LATE}
            },
            weights=report.weights,
            metrics=metrics,
            site_metrics=accepted,
            bytes_landed=sum(opened.landed.values()),
            seconds=anyio.current_time() - opened.started,
            report=report,
        )

    @staticmethod
    async def _settle_pulls(opened: _Open) -> None:
        """Wait for the pulls that were cut: nothing is added to an engine that finishes."""
        for consumer in tuple(opened.pulls.values()):
            await consumer.wait()

    def _close(self, opened: _Open, reason: str) -> None:
        for site in opened.sites:
            self._step(opened, site, m.Closed(reason))

    # --- results ----------------------------------------------------------------------------------

    async def _listen(self, results: Any) -> None:
        """Judge every result by its envelope, before a byte of it is pulled."""
        async for message in results:
            try:
                envelope = ResultEnvelope.of(message.tree, site=message.sender)
                opened = self._expected(message.sender, envelope)
            except StreamoffError as error:
                self._refuse(message, error)
                continue
            if envelope.error:
                self._step(opened, message.sender, m.Failed(f"the site failed: {envelope.error}"))
                continue
            self._ids += 1
            opened.messages[self._ids] = (message, envelope)
            self._step(opened, message.sender, m.Offered(self._ids))

    def _expected(self, site: Address, envelope: ResultEnvelope) -> _Open:
        opened = self._open
        number = opened.number if opened is not None else "none"
        if opened is None or envelope.round != opened.number or site not in opened.sites:
            raise ContributionRejectedError(
                "no result of this site is awaited for this round",
                expected=f"round {number} of job {self._job.name}",
                got=f"round {envelope.round} of job {envelope.job}",
                site=site,
                late=True,
            )
        opened.terms.check_envelope(
            site=site, round=envelope.round, job=envelope.job, kind=envelope.kind
        )
        return opened

    def _refuse(self, message: Message, error: StreamoffError) -> None:
        """Decline; a site of the open round that broke a rule has failed in it, a latecomer has not."""
        logger.info("job %s: a result of %s was refused: %s", self._job.name, message.sender, error)
        message.decline(error.what)
        opened = self._open
        if opened is not None and message.sender in opened.sites and "late" not in error.where:
            self._step(opened, message.sender, m.Failed(str(error)))

    def _step(self, opened: _Open, site: Address, event: m.ParticipationEvent) -> None:
        before = opened.sites[site]
        after, effects = PARTICIPATION.step(before, event)
        opened.sites[site] = after
        for effect in effects:
            match effect:
                case m.Pull():
                    opened.pulls[site] = self._job.start(
                        self._contribute, opened, site, effect.message, name=f"contribution {site}"
                    )
                case m.Decline():
                    opened.messages.pop(effect.message)[0].decline(effect.reason)
                case m.CancelPull():
                    if (consumer := opened.pulls.get(site)) is not None:
                        consumer.cancel()
        if after.state is not before.state:
            opened.changed.set()

    async def _contribute(self, opened: _Open, site: Address, number: int) -> None:
        """Pull one result and give it to the engine; whatever goes wrong costs this site."""
        _, envelope = opened.messages.pop(number)
        event: m.ParticipationEvent
        try:
            state = await self._land(opened, site, envelope)
            contribution = Contribution(
                site=site,
                weight=envelope.weight,
                state=state,
                kind=envelope.kind,
                round=envelope.round,
                job=envelope.job,
            )
            await self._maths(partial(opened.engine.add, stop=_check_cut), contribution)
            opened.weights[site] = envelope.weight
            opened.metrics[site] = envelope.metrics
            event = m.Counted()
        except AggregationError as error:
            event = m.Failed(str(error))
            if not isinstance(error, SITE_ERRORS):
                opened.lost = error
        except (StreamoffError, OSError) as error:
            event = m.Failed(str(error))
        self._step(opened, site, event)

    async def _land(self, opened: _Open, site: Address, envelope: ResultEnvelope) -> State:
        """Bring a contribution: one ref as a whole, anything else leaf by leaf."""
        settings = self._settings

        def accept(layout: Layout) -> None:
            check_layout(layout, opened.terms.previous.layout, settings.policies, site=site)

        def progress(landed: int, wanted: int) -> None:
            opened.landed[site] = landed
            if settings.observer is not None:
                settings.observer.transfer(site, landed, wanted)

        context = DecodeContext(
            tensors="disk" if settings.to_disk else "memory",
            job=self._job,
            check_finite=settings.policies.nonfinite != "allow",
            accept=accept,
            progress=progress,
        )
        batch = whole_state(envelope.params)
        if batch is not None and not batch.partial:
            batch.consume((), str(self._endpoint.address))
            if not batch.vouched:
                raise UnreachableError("the sender may not speak for the source", site=site)
            return await pull(self._endpoint, batch.ref, context)
        context = replace(context, accept=None)  # the engine checks what comes leaf by leaf
        params = await resolve_with(envelope.params, context, self._endpoint)
        state: State = as_state(tensors_from(params, site=site))
        return state

    # --- models -----------------------------------------------------------------------------------

    async def _initial(self) -> State:
        state: State = await self._maths(
            load_initial, self._settings.initial, self._new_writer, self._settings.to_disk
        )
        return state

    def _new_writer(self, layout: Layout) -> StateWriter:
        """Where the next global model is written; in the worker thread."""
        if not self._settings.to_disk:
            return MemoryWriter(layout)
        directory, dispose = self._job.new_directory(layout.size, "a global model")
        return FileWriter(
            directory / "model.safetensors", layout, guard=self._job.guard, dispose=dispose
        )

    async def _maths(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await run_in_thread(fn, *args, limiter=self._endpoint.resources.maths)

    async def _say_goodbye(self) -> None:
        """Tell the sites that there will be no more rounds; those that are gone need not know."""
        task = TaskEnvelope(job=self._job.name, round=0, rounds=self._settings.rounds)
        with anyio.CancelScope(shield=True):
            for site in self._sites:
                try:
                    await self._endpoint.send(site, task_topic(self._job.name), task.tree())
                except StreamoffError as error:
                    logger.debug("job %s: %s was not told the end: %s", self._job.name, site, error)


def _check_cut() -> None:
    """Raise in a worker thread whose task was cancelled."""
    anyio.from_thread.check_cancelled()
