"""The machine tier: a server, its sites and their machines, on a network that goes wrong.

The server has a job root and a round. It offers a model to its sites; each pulls it, trains, and offers a result,
which the server pulls under the root and folds. Everything in between may be lost, doubled, late, cut, killed,
restarted, cancelled or full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

from streamoff.errors import InvariantError, SourceFailedError, StreamoffError
from streamoff.machines import job_root as j, participation as p
from streamoff.machines.invariants import check_participation
from streamoff.machines.notice import NoticeBook
from streamoff.machines.participation import PARTICIPATION, Participation, ParticipationState
from streamoff.machines.story import Story
from streamoff.machines.tombstones import Tombstones
from streamoff.testing.lossy import LossyNetwork
from streamoff.testing.machines import Key, MachinePair
from streamoff.types import Address, Budgets, Capability, Outcome, Verdict

from .machine_parts import Root, Telling, require
from .machine_scenario import OF_RESULTS, Happening, MachineScenario, Site

__all__ = ["World"]

SERVER = Address("server")
STEPS = 100_000
REPEAT_SECONDS = 10.0
"""How often a message is repeated until it is acknowledged."""
UNACKED_SECONDS = 600.0
"""How long a message is repeated."""


class World:
    """One run of a scenario.

    Args:
        scenario: What it is made of.
    """

    def __init__(self, scenario: MachineScenario) -> None:
        self.scenario = scenario
        self.network = LossyNetwork(faults=scenario.faults, seed=scenario.seed)
        self.injected: Counter[str] = self.network.injected
        self.server = Server(self)
        self.sites = [SiteWorld(self, index, site) for index, site in enumerate(scenario.sites)]
        self.pairs: list[MachinePair] = []
        self.tellings: list[tuple[Telling, Callable[[], bool]]] = []
        self._books: dict[str, Tombstones[tuple[MachinePair, str], MachinePair]] = {}

    def run(self) -> Counter[str]:
        """Run it to its end and look at everything.

        Returns:
            How often things ended in which way.

        Raises:
            InvariantError: Something that must hold does not.
        """
        self.server.begin()
        for happening in self.scenario.happenings:
            if happening.what in OF_RESULTS:
                self.sites[happening.site].once_offered.append(happening)
            else:
                self.network.at(happening.at, partial(self.happen, happening))
        for _ in range(STEPS):
            if not self.network.step():
                return self._look_at_the_end()
        raise InvariantError("a world that does not end", got=self.network.now)

    def offer(self, source: str, receivers: list[str], refs: int, nbytes: int) -> MachinePair:
        """Open a transaction, whose tombstone goes into the book of its endpoint."""
        scenario = self.scenario
        pair = MachinePair(
            network=self.network,
            source=source,
            receivers=receivers,
            refs=refs,
            nbytes=nbytes,
            window=scenario.window,
            eager=scenario.eager,
            budgets=Budgets(deadline=scenario.deadline),
            capabilities=frozenset(Capability if scenario.capable else ()),
            start=False,
        )
        pair.on_settled = partial(self._bury, source, pair)
        self.pairs.append(pair)
        return pair

    def _bury(self, source: str, pair: MachinePair, _outcome: Outcome) -> None:
        capacity = self.scenario.tombstones
        book = self._books.setdefault(source, Tombstones(capacity=capacity))
        for ref in pair.transaction.refs:
            for forgotten in book.bury(self.network.now, (pair, ref), pair):
                forgotten.forget(ref)
        require(len(book) <= capacity, "a book that grows", pair.witness.story, len(book))

    def happen(self, happening: Happening) -> None:
        site = self.sites[happening.site]
        act = getattr(site, f"on_{happening.what}", None) or getattr(
            self.server, f"on_{happening.what}"
        )
        if act(happening.seconds):
            self.injected[happening.what] += 1

    # --- the end --------------------------------------------------------------------------------

    def _look_at_the_end(self) -> Counter[str]:
        ends: Counter[str] = Counter()
        for pair in self.pairs:
            pair.look_at_the_end()
            ends.update(record.state.value for record in pair.downloads.values())
            if pair.source_alive:
                ends[pair.outcome.reason.partition(":")[0]] += 1
        for telling, known in self.tellings:
            telling.look_at_the_end(known=known())
            ends[f"notice {telling.record.state.value}"] += 1
        for book in self._books.values():
            book.expire(self.network.now + book.lifetime)
            require(not len(book), "a tombstone that stays", Story("tombstones"))
        if self.server.alive:
            self.server.look_at_the_end()
            ends.update(f"site {one.record.state.value}" for one in self.server.parts)
        return ends


class Server:
    """The aggregator: a root, a round, and what it knows of dead sources."""

    def __init__(self, world: World) -> None:
        self.alive = True
        self.book = NoticeBook()
        self.parts: list[Part] = []
        self.closed = False
        self._world = world
        self._network = world.network
        self.root = Root(
            world.network,
            world.scenario.drain,
            cancel_downloads=lambda: self._each(lambda part: part.cancel("the job is closing")),
            cut_consumers=lambda: self._each(Part.cut),
            abort_serves=lambda: self.model.abort("deleted: the job is closing"),
        )

    def _each(self, act: Callable[[Part], None]) -> None:
        for part in self.parts:
            act(part)

    def begin(self) -> None:
        """Offer the model and open the round."""
        world, scenario = self._world, self._world.scenario
        sites = world.sites
        self.model = world.offer(
            SERVER, [site.address for site in sites], scenario.model_refs, scenario.model_bytes
        )
        bury = self.model.on_settled

        def served(outcome: Outcome) -> None:
            bury(outcome)
            self.root.leave("the model")

        self.model.on_settled = served
        self.root.use("the model")
        self.parts = [Part(self, world, site) for site in sites]
        for site in sites:
            site.await_task(self.model)
        self._network.at(scenario.round_timeout, lambda: self.close("the round is over"))
        self._look()

    def _look(self) -> None:
        """Give up sites that did not get the model; every five seconds, as the workflow does."""
        if not self.alive or self.closed:
            return
        for slot, part in enumerate(self.parts):
            verdicts = [serving.verdict for serving in self.model.transaction.of_slot(slot)]
            failed = [one.reason for one in verdicts if one.verdict is Verdict.FAILED]
            if failed and part.record.state is ParticipationState.AWAITED:
                part.step(p.Forfeited(f"the model did not reach it: {failed[0]}"))
        self._network.at(self._network.now + 5.0, self._look)

    def moved(self) -> None:
        """A site has moved on; when all are settled the round closes, and then the job."""
        if self.alive and all(part.record.settled for part in self.parts):
            self.close("everybody has answered")

    def close(self, why: str) -> None:
        """Close the round; the job ends once the last pull has."""
        if not self.alive:
            return
        if not self.closed:
            self.closed = True
            for part in self.parts:
                part.close(why)
            self.model.abort("deleted: the round is over")
        if all(part.record.settled for part in self.parts) and not self.root.draining:
            self._network.after((0.01, 3.0), self.root.close)

    def hear(self, site: SiteWorld, pair: MachinePair, message: int) -> None:
        """A result is offered, perhaps for the second time."""
        if self.alive:
            self.parts[site.index].hear(pair, message)

    def forfeit(self, site: SiteWorld, why: str) -> None:
        """A site says that it failed."""
        if self.alive:
            self.parts[site.index].step(p.Forfeited(why))

    def notice(self, origin: Address, pair: MachinePair, reason: str) -> str | None:
        """The owner of a source says that it is dead; the answer."""
        if not self.alive:
            return None
        self.book.enter(self._network.now, origin, pair.source, pair.transaction.refs, reason)
        pair.refuse(0, SourceFailedError(f"the source failed: {reason}"))
        return ""

    def on_server(self, seconds: float) -> bool:
        """The server is killed; a new instance may come."""
        if not self.alive:
            return False
        self.alive = self.root.alive = False
        world = self._world
        self.model.source_alive = False
        for site in world.sites:
            for pair in site.offers:
                pair.kill_receiver(0)
            self._network.cut(SERVER, site.address, seconds)
            self._network.cut(SERVER, site.source, seconds)
        if seconds < 400.0:
            self._network.at(self._network.now + seconds, self._reborn)
        return True

    def _reborn(self) -> None:
        """Everybody learns that a new instance is there, and that the old one will not come back."""
        self.model.reborn = True
        for site in self._world.sites:
            if site.alive:
                self.model.refuse(site.index, SourceFailedError("the source restarted"))
                for pair in site.offers:
                    if any(one.bound for one in pair.transaction.of_slot(0)):
                        pair.decline(0, "the receiver restarted")

    def on_finalise(self, _seconds: float) -> bool:
        """The job begins its end: no new downloads."""
        self.root.finalise()
        return self.alive

    def on_end(self, _seconds: float) -> bool:
        """END_RUN: the body of the job is left, whatever is under way."""
        if not self.alive or self.root.draining:
            return False
        self.root.close()
        self.closed = True
        for part in self.parts:
            part.close("the job is closing")
        return True

    def look_at_the_end(self) -> None:
        """The root is gone, and every site has a verdict that is true.

        Raises:
            InvariantError: It is not so.
        """
        self.root.look_at_the_end()
        for part in self.parts:
            part.look_at_the_end()


class Part:
    """Plays the shell of one site's part in the round, and of the consumer that pulls its result."""

    def __init__(self, server: Server, world: World, site: SiteWorld) -> None:
        self.record = Participation(site.address)
        self.story = Story(f"part of {site.address}")
        self.folded = False
        self._server = server
        self._world = world
        self._network = world.network
        self._site = site
        self._name = f"contribution {site.address}"
        self._seen: set[int] = set()
        self._offers: dict[int, MachinePair] = {}
        self._pulling: MachinePair | None = None
        self._current: Key | None = None
        self._folding = False
        self.stubborn = 0.0

    def hear(self, pair: MachinePair, message: int) -> None:
        """A result: one that came before is not looked at again."""
        if message not in self._seen:
            self._seen.add(message)
            self._offers[message] = pair
            self.step(p.Offered(message))

    def close(self, why: str) -> None:
        """The round closes: from now on nothing is awaited of the site but the end of what is being cut."""
        self.step(p.Closed(why))
        open_ = {ParticipationState.AWAITED, ParticipationState.LANDING}
        require(self.record.state not in open_, "open in a closed round", self.story, self.record)

    def step(self, event: p.ParticipationEvent) -> None:
        """Apply one event and carry out what follows."""
        before = self.record
        self.record, effects = PARTICIPATION.step(before, event)
        self.story.tell(self._network.now, event, before.state, self.record.state, effects)
        check_participation(self.record, self.story.lines())
        for effect in effects:
            match effect:
                case p.Pull(message=message):
                    self._pull(self._offers.pop(message))
                case p.Decline(message=message, reason=reason):
                    self._offers.pop(message).turn_down(0, reason)
                case p.CancelPull(reason=reason):
                    self.cancel(reason)
        if self.record.state is not before.state:
            self._server.moved()

    def _pull(self, pair: MachinePair) -> None:
        root = self._server.root
        if root.admission is j.Admission.NOTHING:
            pair.turn_down(0, "the job is closing")
            self.step(p.Failed("the job is closing"))
            return
        root.use(self._name)
        self._pulling = pair
        pair.on_report = self._landed
        self._next(pair, 0)

    def _next(self, pair: MachinePair, index: int) -> None:
        """Pull one ref after the other."""
        refs = pair.transaction.refs
        if index == len(refs):
            self._pulling, self._folding = None, True
            self._network.after((0.01, 5.0), self._fold)
            return
        root, key = self._server.root, (0, refs[index])
        self._current = key
        if root.admission is not j.Admission.ALL:
            self._fail(pair, "the job admits no downloads")
        elif (cause := pair.downloads[key].cause) is not None:  # a notice came before the start
            self._fail(pair, cause.what)
        else:
            pair.start(key)

    def _landed(self, key: Key, error: StreamoffError | None) -> None:
        pair = self._pulling
        if key != self._current or pair is None:
            return
        if error is None:
            self._next(pair, pair.transaction.refs.index(key[1]) + 1)
        elif not self._try_again(pair, key):
            self._fail(pair, error.what)

    def _try_again(self, pair: MachinePair, key: Key) -> bool:
        """A caller may try a download once more, where its site said so."""
        if not self._site.again or self._server.root.draining or self._server.closed:
            return False
        self._site.again -= 1
        self._network.after((0.1, 5.0), lambda: self._begin_again(pair, key))
        return True

    def _begin_again(self, pair: MachinePair, key: Key) -> None:
        if self._pulling is pair and self._server.alive:
            if self._server.root.draining or self._server.closed:
                self._fail(pair, "the job is closing")
            else:
                pair.start_again(key)

    def _fail(self, pair: MachinePair, why: str) -> None:
        self._pulling = None
        pair.turn_down(0, why)
        self._end(p.Failed(why))

    def _fold(self) -> None:
        if self._folding and self._server.alive:
            self._folding = False
            self.folded = True
            self._end(p.Counted())

    def _end(self, event: p.Counted | p.Failed) -> None:
        """The consumer has ended: the root is told after the round, as the shell does."""
        self.step(event)
        self._server.root.leave(self._name)

    def cancel(self, reason: str) -> None:
        """Stop what is being pulled."""
        if self._pulling is not None and self._server.alive:
            self._pulling.cancel(0, reason)

    def cut(self) -> None:
        """The window closed: a stubborn consumer goes on for a while."""
        if self._folding:
            self._folding = False
            self._network.at(
                self._network.now + self.stubborn, lambda: self._end(p.Failed("it was cut"))
            )
        elif self._pulling is not None:
            self._fail(self._pulling, "it was cut")

    def look_at_the_end(self) -> None:
        """It is settled, counted exactly if the engine has it, and then every byte of it is there.

        Raises:
            InvariantError: It is not so.
        """
        state = self.record.state
        require(self.record.settled, "a site without a verdict", self.story, self.record)
        accepted = state is ParticipationState.ACCEPTED
        require(accepted == self.folded, "counted and not folded", self.story, self.record)


class SiteWorld:
    """One site: it gets the model, trains, and offers what it has; its source may be a process of its own."""

    def __init__(self, world: World, index: int, site: Site) -> None:
        self.index = index
        self.site = site
        self.address = Address(f"site-{index}")
        self.source = self.address.child("trainer") if site.trainer else self.address
        self.alive = True
        self.offers: list[MachinePair] = []
        self.again = 0
        self.once_offered: list[Happening] = []
        self._world = world
        self._network = world.network
        self._random = Random(f"{world.scenario.seed}:{index}")
        self._tasked = False
        self._acked: set[int] = set()
        self._messages = 0

    # --- the model ------------------------------------------------------------------------------

    def await_task(self, model: MachinePair) -> None:
        """The server sends the task until this site has it."""
        if self._tasked or not self._world.server.alive or self._world.server.closed:
            return
        self._network.send(SERVER, self.address, lambda: self._take(model))
        self._network.at(self._network.now + REPEAT_SECONDS, lambda: self.await_task(model))

    def _take(self, model: MachinePair) -> None:
        if self._tasked or not self.alive:
            return
        self._tasked = True
        former, missing = model.on_report, set(model.transaction.refs)

        def told(key: Key, error: StreamoffError | None) -> None:
            former(key, error)
            if key[0] != self.index or not self.alive:
                return
            missing.discard(key[1])
            if error is not None:
                self._forfeit(error.what)
            elif not missing:
                self._network.at(self._network.now + self.site.trains, self._offer)

        model.on_report = told
        for ref in model.transaction.refs:
            model.start((self.index, ref))

    def _forfeit(self, why: str) -> None:
        message = self._new_message()
        self._repeat(message, lambda: self._world.server.forfeit(self, why), UNACKED_SECONDS)

    # --- the result -----------------------------------------------------------------------------

    def _offer(self) -> None:
        if not self.alive:
            return
        others = [one.address for one in self._world.sites if one is not self]
        watching = others[: self.site.observers]
        site = self.site
        pair = self._world.offer(self.source, [SERVER, *watching], site.refs, site.nbytes)
        self.offers.append(pair)
        for happening in self.once_offered:
            self._network.at(
                self._network.now + happening.at, partial(self._world.happen, happening)
            )
        self.once_offered.clear()
        message = self._new_message()
        self._repeat(message, lambda: self._world.server.hear(self, pair, message), 120.0)
        for slot, _ in enumerate(watching, start=1):
            for ref in pair.transaction.refs:
                after = self._network.now + self._random.uniform(0.0, 30.0)
                self._network.at(after, partial(self._watch, pair, (slot, ref)))

    @staticmethod
    def _watch(pair: MachinePair, key: Key) -> None:
        if not pair.downloads[key].ended:  # the source may have died before
            pair.start(key)

    def _new_message(self) -> int:
        self._messages += 1
        return 1000 * self.index + self._messages

    def _repeat(self, message: int, deliver: Callable[[], None], patience: float) -> None:
        """Send a message until it is acknowledged, or for as long as it makes sense."""
        server = self._world.server
        if message in self._acked or not self.alive or patience <= 0 or server.closed:
            return

        def arrive() -> None:
            if server.alive:
                self._network.send(SERVER, self.address, lambda: self._acked.add(message))
                deliver()

        self._network.send(self.address, SERVER, arrive)
        left = patience - REPEAT_SECONDS
        self._network.at(
            self._network.now + REPEAT_SECONDS, lambda: self._repeat(message, deliver, left)
        )

    # --- what may happen ------------------------------------------------------------------------

    def on_cut(self, seconds: float) -> bool:
        """The links to the server break."""
        self._network.cut(self.address, SERVER, seconds)
        if self.site.trainer:
            self._network.cut(self.source, SERVER, seconds)
        return True

    def on_silence(self, seconds: float) -> bool:
        """Nothing gets through to the server; after a while both ends take the link for lost."""
        self._network.cut(self.address, SERVER, seconds, unnoticed=15.0)
        if self.site.trainer:
            self._network.cut(self.source, SERVER, seconds, unnoticed=15.0)
        return True

    def on_crash(self, seconds: float) -> bool:
        """The whole site is killed; a new instance may come."""
        if not self.alive:
            return False
        self.alive = False
        for pair in self._world.pairs:
            if pair.source in {self.address, self.source}:
                pair.source_alive = False
            if self.address in pair.receivers:
                pair.kill_receiver(pair.receivers.index(self.address))
        for telling, _ in self._world.tellings:
            if telling.record.to == self.address or telling.story.title.endswith(self.address):
                telling.alive = False
        self._network.cut(self.address, SERVER, seconds)
        if seconds < 400.0:
            self._network.at(self._network.now + seconds, self._reborn)
        return True

    def _reborn(self) -> None:
        for pair in self._world.pairs:
            if pair.source in {self.address, self.source}:
                pair.reborn = True
                for slot in range(len(pair.receivers)):
                    pair.refuse(slot, SourceFailedError("the source restarted"))
            elif self.address in pair.receivers:
                slot = pair.receivers.index(self.address)
                if any(one.bound for one in pair.transaction.of_slot(slot)):
                    pair.decline(slot, "the receiver restarted")

    def on_trainer(self, _seconds: float) -> bool:
        """The trainer dies after it has offered; its owner tells everybody who might pull."""
        living = [pair for pair in self.offers if pair.source_alive]
        if not self.site.trainer or not self.alive or not living:
            return False
        for pair in living:
            pair.source_alive = False
            server = self._world.server
            self._tell(pair, SERVER, partial(server.notice, self.address, pair, "exit code 137"))
            for slot, receiver in enumerate(pair.receivers[1:], start=1):
                self._tell(pair, receiver, partial(self._refuse, pair, slot))
        return True

    def _tell(self, pair: MachinePair, to: Address, deliver: Callable[[], str | None]) -> None:
        heard: list[str] = []

        def hear() -> str | None:
            answer = deliver()
            if answer is not None:
                heard.append(answer)
            return answer

        telling = Telling(self._network, self.address, to, hear)
        self._world.tellings.append((telling, lambda: bool(heard)))

    @staticmethod
    def _refuse(pair: MachinePair, slot: int) -> str:
        pair.refuse(slot, SourceFailedError("the source failed: exit code 137"))
        return ""

    def _any_download(self) -> tuple[MachinePair, Key] | None:
        pairs = [pair for pair in self.offers if pair.transaction.outcome is None]
        if not pairs:
            return None
        return pairs[0], self._random.choice(list(pairs[0].downloads))

    def on_cancel(self, _seconds: float) -> bool:
        """Whoever pulls the result gives up."""
        found = self._any_download()
        if found is not None:
            found[0].cancel(found[1][0])
        return found is not None

    def on_full(self, _seconds: float) -> bool:
        """The disk under a download of the result is full."""
        found = self._any_download()
        if found is not None:
            found[0].fail_landing(found[1])
        return found is not None

    def on_hold(self, seconds: float) -> bool:
        """A download of the result must wait for its own disk."""
        found = self._any_download()
        if found is not None:
            found[0].hold(found[1], seconds)
        return found is not None

    def on_abort(self, _seconds: float) -> bool:
        """The site withdraws its result."""
        found = self._any_download()
        if found is not None:
            found[0].abort("deleted: withdrawn")
        return found is not None

    def on_again(self, _seconds: float) -> bool:
        """Whoever pulls the result tries again when it fails."""
        self.again += 1
        return True

    def on_twice(self, _seconds: float) -> bool:
        """The site sends a second result."""
        if not self.offers or not self.alive:
            return False
        self._offer()
        return True

    def on_stubborn(self, seconds: float) -> bool:
        """The consumer of this site's result does not stop when it is cut."""
        self._world.server.parts[self.index].stubborn = seconds
        return True
