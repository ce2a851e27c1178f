"""A round under way: who takes part, whose result is being pulled, and what the engine has.

A site's part in a round is a machine of its own (``machines/participation``); this module carries it out. A
contribution that fails costs its site. Only a policy that says so costs the round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import anyio
import anyio.from_thread

from streamoff.errors import (
    AggregationError,
    ContributionRejectedError,
    InvariantError,
    JobClosedError,
    PeerRefusedError,
    QuorumLostError,
    SpecMismatchError,
    StreamoffError,
)
from streamoff.fl.aggregation.contribution import Contribution
from streamoff.fl.aggregation.engine import Engine
from streamoff.fl.aggregation.foreign import as_state
from streamoff.fl.aggregation.intake import Terms, check_layout
from streamoff.fl.envelope import ResultEnvelope
from streamoff.fl.parameters import by_batch, layout_of, refs_of, sole_batch
from streamoff.fl.workflows.settings import RunSettings
from streamoff.machines import participation as m
from streamoff.machines.participation import PARTICIPATION, Participation, ParticipationState
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Delivery, Endpoint, Message
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.payload.resolve import pull
from streamoff.runtime.jobs import Consumer, Job
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.janitor import JANITOR
from streamoff.tensors.layout import Layout
from streamoff.tensors.state import State
from streamoff.types import Address, Verdict

__all__ = ["RECLAIM_SECONDS", "OpenRound", "check_cut", "reclaimed"]

logger = logging.getLogger("streamoff.fl")

RECLAIM_SECONDS: Final = 10.0
"""The longest wait for the disk of what was released; it goes on without it then."""
MAX_REASONS: Final = 8
"""Sites whose reasons a lost quorum spells out; the others are counted."""
REASON_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True)
class _Offer:
    """A result that may be pulled: its envelope and its tensors, all still at their source.

    Args:
        message: To decline it.
        envelope: Without its parameters.
        whole: The one payload that they are, if they are one; the leaves say no more than that.
        refs: The leaves otherwise.
    """

    message: Message
    envelope: ResultEnvelope
    whole: Batch | None
    refs: Mapping[str, TensorRef]

    @property
    def batches(self) -> Iterable[Batch]:
        """Every payload it comes from."""
        return by_batch(self.refs) if self.whole is None else (self.whole,)


class OpenRound:
    """One round, from its broadcast to its closing; of one event loop.

    Args:
        job: Its consumers pull.
        settings: Of the run.
        terms: What the round is about.
        engine: Gets the contributions, one at a time.
        sites: Who takes part.
        places: Contributions that may be on disk and not folded yet; None: all of them.
    """

    def __init__(
        self,
        job: Job,
        settings: RunSettings,
        terms: Terms,
        engine: Engine,
        *,
        sites: Iterable[Address],
        places: int | None,
    ) -> None:
        assert isinstance(job.endpoint, Endpoint)
        self.terms = terms
        self.engine = engine
        self.sites = {site: Participation(site) for site in sites}
        self.started = anyio.current_time()
        self.metrics: dict[Address, Mapping[str, float]] = {}
        self.landed: dict[Address, int] = {}
        self.lost: AggregationError | None = None
        self._job = job
        self._endpoint: Endpoint = job.endpoint
        self._settings = settings
        self._limited = places is not None
        self._places = anyio.CapacityLimiter(math.inf if places is None else places)
        self._offers: dict[int, _Offer] = {}
        self._offered = 0
        self._pulls: dict[Address, Consumer] = {}
        self._landings: dict[Address, anyio.CancelScope] = {}
        self._added: set[Address] = set()
        self._changed = anyio.Event()

    @property
    def number(self) -> int:
        """The round, from 1."""
        return self.terms.round

    @property
    def settled(self) -> bool:
        """Whether nothing more is awaited of any site."""
        return all(one.settled for one in self.sites.values())

    def count(self, *states: ParticipationState) -> int:
        """Sites in any of these states."""
        return sum(one.state in states for one in self.sites.values())

    @property
    def awaited(self) -> tuple[Address, ...]:
        """Sites that have sent nothing yet."""
        return tuple(
            site for site, one in self.sites.items() if one.state is ParticipationState.AWAITED
        )

    @property
    def failed(self) -> dict[str, str]:
        """Sites that are out, and why."""
        return {site: one.reason for site, one in self.sites.items() if one.reason}

    async def wait_changed(self, deadline: float) -> None:
        """Wait until a site has moved on, at most until ``deadline``."""
        self._changed = anyio.Event()
        with anyio.CancelScope(deadline=deadline):
            await self._changed.wait()

    # --- quorum -----------------------------------------------------------------------------------

    def check_possible(self) -> None:
        """Make sure that the round can still succeed.

        Raises:
            QuorumLostError: Too many sites are out.
            AggregationError: A contribution cost the round.
        """
        out = self.count(ParticipationState.FAILED, ParticipationState.LATE)
        self.check_number(len(self.sites) - out)

    def check_number(self, possible: int) -> None:
        """As :meth:`check_possible`, for a number of contributions."""
        if self.lost is not None:
            raise self.lost
        if possible >= self._settings.min_responses:
            return
        reasons = [f"{site}: {why}" for site, why in self.failed.items()]
        more = f"; and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
        raise QuorumLostError(
            "too few contributions; the previous model stands",
            expected=f"at least {self._settings.min_responses} of {len(self.sites)}",
            got=possible,
            hint="; ".join(reasons[:MAX_REASONS]) + more or None,
            job=self._job.name,
            round=self.number,
        )

    # --- events -----------------------------------------------------------------------------------

    def hear(self, message: Message, envelope: ResultEnvelope) -> None:
        """Judge a result of this round by what it says of itself, before a byte of it is pulled."""
        site = message.sender
        try:
            self.terms.check_envelope(
                site=site, round=envelope.round, job=envelope.job, kind=envelope.kind
            )
            refs = {} if envelope.error else refs_of(envelope.params, site=site)
        except StreamoffError as error:
            message.decline(error.what)
            self.forfeit(site, reason_of(error))
            return
        if envelope.error:
            message.decline("a result with an error")
            self.forfeit(site, f"the site failed: {envelope.error}")
            return
        self._offered += 1
        whole = sole_batch(refs)
        if whole is not None:
            message.tree, refs = None, {}
        envelope = replace(envelope, params=None)
        self._offers[self._offered] = _Offer(message, envelope, whole, refs)
        self.step(site, m.Offered(self._offered))

    def forfeit(self, site: Address, reason: str) -> None:
        """No result of a site can come, unless one has."""
        self.step(site, m.Forfeited(reason[:REASON_CHARACTERS] or "no reason given"))

    def look_at(self, delivery: Delivery) -> None:
        """Give up the sites that did not, and cannot any more, get the model."""
        if delivery.transaction is None:
            return
        slots = {target: slot for slot, target in enumerate(delivery.targets)}
        for site in self.awaited:
            if site not in slots:
                continue
            for serving in delivery.transaction.record.of_slot(slots[site]):
                if serving.verdict.verdict is Verdict.FAILED:
                    self.forfeit(site, f"the model did not reach it: {serving.verdict.reason}")

    def close(self, reason: str) -> None:
        """Take no more results; what has landed still counts."""
        for site in self.sites:
            self.step(site, m.Closed(reason))

    async def settle(self) -> None:
        """Wait for the pulls: nothing is added to an engine that finishes."""
        for consumer in tuple(self._pulls.values()):
            await consumer.wait()

    async def abandon(self) -> None:
        """Close, cut what is still being done, and wait for it; no-op if nothing is."""
        self.close("the round was given up")
        for consumer in self._pulls.values():
            consumer.cancel()
        await self.settle()
        self.engine.close()

    def step(self, site: Address, event: m.ParticipationEvent) -> None:
        """Let one site move on, and carry out what follows."""
        before = self.sites[site]
        after, effects = PARTICIPATION.step(before, event)
        self.sites[site] = after
        for effect in effects:
            match effect:
                case m.Pull():
                    self._pull(site, self._offers.pop(effect.message))
                case m.Decline():
                    self._offers.pop(effect.message).message.decline(effect.reason)
                case m.CancelPull():
                    self._landings[site].cancel()
        if after.state is not before.state:
            self._changed.set()

    # --- one contribution -------------------------------------------------------------------------

    def _pull(self, site: Address, offer: _Offer) -> None:
        self._landings[site] = anyio.CancelScope()
        try:
            consumer = self._job.start(self._contribute, site, offer, name=f"contribution {site}")
        except JobClosedError as error:
            offer.message.decline(error.what)
            self.step(site, m.Failed(reason_of(error)))
            return
        self._pulls[site] = consumer

    async def _contribute(self, site: Address, offer: _Offer) -> None:
        """Pull one result and give it to the engine; whatever goes wrong costs this site."""
        reason = "it was cut"
        try:
            await self._count(site, offer)
        except InvariantError:
            raise
        except Exception as error:  # what a peer sends must not end the job
            if not isinstance(error, (StreamoffError, OSError)):
                logger.exception("job %s: the contribution of %s", self._job.name, site)
            reason = reason_of(error)
            self.lost = self.lost or self._cost(site, error)
        finally:
            if site in self._added:
                self.step(site, m.Counted())
            else:
                for batch in offer.batches:
                    batch.decline(reason)
                self.step(site, m.Failed(reason))

    async def _count(self, site: Address, offer: _Offer) -> None:
        state: State | None = None
        has_place = False
        try:
            with self._landings[site]:
                await self._places.acquire()
                has_place = True
                state = await self._land(site, offer)
            if state is not None:
                await self._add(site, offer.envelope, state)
        finally:
            if has_place:
                self._places.release()

    async def _land(self, site: Address, offer: _Offer) -> State:
        """Bring a contribution: one payload as a whole, anything else part by part."""
        if offer.whole is not None:
            names = self._averaged(offer.whole.names)
            return await self._pull_payload(site, offer.whole, names, partial(self._accept, site))
        states: list[State] = []
        tensors: dict[str, object] = {}
        try:
            for batch, whole in by_batch(offer.refs).items():
                accept = partial(self._accept_part, site, whole)
                averaged = self._averaged(whole)
                part = {name: leaf for name, leaf in whole.items() if name in averaged}
                names = frozenset(leaf.name for leaf in part.values())
                state = await self._pull_payload(site, batch, names, accept)
                states.append(state)
                assert isinstance(state, Mapping)
                tensors |= {name: state[leaf.name] for name, leaf in part.items()}
            return as_state(tensors)
        except BaseException:
            for state in states:
                state.release()
            raise

    def _averaged(self, names: Iterable[str]) -> frozenset[str]:
        """The parameters that are not excluded: the others are not even pulled."""
        known = tuple(names)
        return frozenset(known) - self._settings.policies.excluded(known)

    async def _pull_payload(
        self,
        site: Address,
        batch: Batch,
        names: frozenset[str],
        accept: Callable[[Layout], object],
    ) -> State:
        if not batch.vouched:
            raise PeerRefusedError(
                "the site may not speak for the source of its result",
                got=f"a ref to {batch.ref.source}",
                site=site,
            )
        batch.consume((), str(self._endpoint.address))
        whole = not batch.partial and names >= batch.names
        return await pull(
            self._endpoint,
            batch.ref,
            self._context(site, accept),
            names=None if whole else names,
            to_disk=self._settings.to_disk and batch.kind is not LeafKind.NDARRAY,
        )

    def _context(self, site: Address, accept: Callable[[Layout], object]) -> DecodeContext:
        settings = self._settings

        def progress(landed: int, wanted: int) -> None:
            self.landed[site] = landed
            if settings.observer is not None:
                settings.observer.transfer(site, landed, wanted)

        return DecodeContext(
            tensors="disk" if settings.to_disk else "memory",
            job=self._job,
            check_finite=settings.policies.nonfinite != "allow",
            accept=accept,
            progress=progress,
        )

    def _accept(self, site: Address, layout: Layout) -> None:
        check_layout(layout, self.terms.previous.layout, self._settings.policies, site=site)

    def _accept_part(self, site: Address, part: Mapping[str, TensorRef], layout: Layout) -> None:
        """What other payloads have may be missing from this one; the engine looks at all of it."""
        policies = replace(self._settings.policies, missing="partial")
        check_layout(layout_of(part, layout), self.terms.previous.layout, policies, site=site)

    async def _add(self, site: Address, envelope: ResultEnvelope, state: State) -> None:
        contribution = Contribution(
            site=site,
            weight=envelope.weight,
            state=state,
            kind=envelope.kind,
            round=envelope.round,
            job=envelope.job,
        )
        self.metrics[site] = envelope.metrics

        def add() -> None:
            self.engine.add(contribution, stop=check_cut)
            self._added.add(site)

        try:
            await run_in_thread(add, limiter=self._endpoint.resources.maths)
        finally:
            if site not in self._added:
                state.release()
        if self._limited:
            await reclaimed(self._endpoint)

    def _cost(self, site: Address, error: Exception) -> AggregationError | None:
        """The error of the round, if this one of a site costs it."""
        if isinstance(error, SpecMismatchError):
            if self._settings.policies.mismatch != "reject_round":
                return None
            lost = AggregationError(
                f"spec of site {site} costs the round: {error.what}",
                expected=error.expected,
                got=error.got,
                hint="The previous model stands",
                round=self.number,
            )
            return lost.located(site=site, tensor=error.where.get("tensor"))
        if isinstance(error, AggregationError) and not isinstance(error, ContributionRejectedError):
            return error
        return None


async def reclaimed(endpoint: Endpoint) -> None:
    """Wait, bounded, until the disk of what was released is free."""
    await run_in_thread(JANITOR.idle, RECLAIM_SECONDS, limiter=endpoint.resources.roots)


def reason_of(error: Exception) -> str:
    """An error as one line of bounded length: what, expected, got and where, without its story."""
    text = str(error) if isinstance(error, (StreamoffError, OSError)) else repr(error)
    return text.partition("\n")[0][:REASON_CHARACTERS]


def check_cut() -> None:
    """Raise in a worker thread whose task was cancelled."""
    anyio.from_thread.check_cancelled()
