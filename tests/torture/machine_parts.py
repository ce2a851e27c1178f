"""The shells of a job root and of failure notices, for the machine tier."""

from __future__ import annotations

from collections.abc import Callable

from streamoff.errors import InvariantError
from streamoff.machines import job_root as j, notice as n
from streamoff.machines.invariants import check_job_root
from streamoff.machines.job_root import JOB_ROOT, JobRoot, JobRootState
from streamoff.machines.notice import NOTICE, Notice
from streamoff.machines.story import Story
from streamoff.testing.lossy import LossyNetwork
from streamoff.types import Address

__all__ = ["RemovalSpan", "Root", "Telling", "require"]

RemovalSpan = (0.01, 2.0)
"""Seconds that the janitor takes for the root; its bound is 1 s for so little."""


def require(holds: bool, what: str, story: Story, got: object = None) -> None:
    """Raise unless it holds.

    Raises:
        InvariantError: With the story.
    """
    if not holds:
        raise InvariantError(what, got=got, story=story.lines())


class Root:
    """Plays the shell of one job root; whoever uses it is known by name.

    Args:
        network: The clock.
        window: The drain window.
        cancel_downloads: Ends what is landing.
        cut_consumers: Ends what else runs.
        abort_serves: Ends what is served from the root.
    """

    def __init__(
        self,
        network: LossyNetwork,
        window: float,
        *,
        cancel_downloads: Callable[[], None],
        cut_consumers: Callable[[], None],
        abort_serves: Callable[[], None],
    ) -> None:
        self.record = JobRoot("job", window)
        self.story = Story("job root")
        self.users: dict[str, None] = {}
        self.admission = j.Admission.ALL
        self.alive = True
        self.buried = 0
        self.reported = 0
        self.closed_at: float | None = None
        self.ended_at: float | None = None
        self._network = network
        self._cancel_downloads = cancel_downloads
        self._cut_consumers = cut_consumers
        self._abort_serves = abort_serves
        network.join(self)

    @property
    def draining(self) -> bool:
        """Whether the body has been left."""
        return self.closed_at is not None

    def use(self, name: str) -> None:
        """Somebody uses the root from now on."""
        require(
            self.admission is not j.Admission.NOTHING, "admitted while draining", self.story, name
        )
        self.users[name] = None

    def leave(self, name: str) -> None:
        """Somebody does not use it any more; no-op for who never did."""
        if name in self.users:
            del self.users[name]
            self._look()

    def finalise(self) -> None:
        """Begin the end."""
        self.step(j.Finalised(self._network.now))

    def close(self) -> None:
        """Leave the body."""
        if self.closed_at is None:
            self.closed_at = self._network.now
        self.step(j.Closed(self._network.now))
        self._look()

    def _look(self) -> None:
        waiting = {JobRootState.DRAINING, JobRootState.CUTTING, JobRootState.STUCK}
        if not self.users and self.record.state in waiting:
            self.step(j.ConsumersEnded(self._network.now, 0))

    def step(self, event: j.JobRootEvent) -> None:
        """Apply one event and carry out what follows."""
        if not self.alive:
            return
        before = self.record
        self.record, effects = JOB_ROOT.step(before, event)
        self.story.tell(event.now, event, before.state, self.record.state, effects)
        check_job_root(self.record, self.story.lines())
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: j.JobRootEffect) -> None:
        match effect:
            case j.Admit(admission=admission):
                self.admission = admission
            case j.CancelDownloads():
                self._cancel_downloads()
            case j.CutConsumers():
                self._cut_consumers()
            case j.AbortServes():
                self._abort_serves()
            case j.BuryRoot():
                require(not self.users, "removed under somebody", self.story, list(self.users))
                self.buried += 1
                self._network.after(RemovalSpan, self._removed)
            case j.ReportRoot():
                self.reported += 1
                self.ended_at = self._network.now
            case j.HandOver():
                pass

    def _removed(self) -> None:
        if self.record.state is JobRootState.REMOVING:
            self.step(j.Removed(self._network.now))

    def next_due(self) -> float | None:
        """When its clock is due."""
        return j.next_tick(self.record) if self.alive else None

    def tick(self) -> None:
        """Do what is due now."""
        if not self.alive:
            return
        event = j.classify_tick(self.record, self._network.now, tuple(self.users))
        if event is not None:
            self.step(event)

    def link_lost(self, one: str, other: str) -> None:
        """Links are nothing to a directory."""

    def link_restored(self, one: str, other: str) -> None:
        """Links are nothing to a directory."""

    def look_at_the_end(self) -> None:
        """The root is gone, once, in time.

        Raises:
            InvariantError: It is not.
        """
        require(self.record.state is JobRootState.GONE, "a root that stays", self.story)
        require(self.buried == 1, "not buried exactly once", self.story, self.buried)
        require(self.reported in {1, 2}, "not reported", self.story, self.reported)
        if self.reported == 1 and self.closed_at is not None and self.ended_at is not None:
            took = self.ended_at - self.closed_at
            most = self.record.window + j.CUT_GRACE_SECONDS + j.removal_seconds(0)
            require(took <= most + 1e-6, "a drain that takes too long", self.story, took)


class Telling:
    """Plays the shell of one failure notice on its way to one receiver.

    Args:
        network: The clock and the way.
        sender: Who owns the dead source.
        to: The receiver.
        deliver: Gives the receiver the notice; returns what to answer: nothing, or why it is not believed.
    """

    def __init__(
        self,
        network: LossyNetwork,
        sender: Address,
        to: Address,
        deliver: Callable[[], str | None],
    ) -> None:
        self.record = Notice(to)
        self.story = Story(f"notice to {to}")
        self.alive = True
        self.reported: list[str] = []
        self._network = network
        self._sender = sender
        self._deliver = deliver
        self._began = network.now
        network.join(self)
        self._step(n.Started(network.now))

    def _step(self, event: n.NoticeEvent) -> None:
        if not self.alive:
            return
        before = self.record
        self.record, effects = NOTICE.step(before, event)
        self.story.tell(event.now, event, before.state, self.record.state, effects)
        for effect in effects:
            match effect:
                case n.SendNotice(to=to):
                    self._network.send(self._sender, to, self._heard)
                case n.ReportNotice(reason=reason):
                    self.reported.append(reason)
                    took = self._network.now - self._began
                    require(
                        took <= n.NOTICE_TOTAL_SECONDS + 1e-6,
                        "a notice without end",
                        self.story,
                        took,
                    )

    def _heard(self) -> None:
        why = self._deliver()
        if why is not None:
            self._network.send(self.record.to, self._sender, lambda: self._answered(why))

    def _answered(self, why: str) -> None:
        now = self._network.now
        self._step(n.Rejected(now, why) if why else n.Acked(now))

    def next_due(self) -> float | None:
        """When its clock is due."""
        return n.next_tick(self.record) if self.alive else None

    def tick(self) -> None:
        """Do what is due now."""
        event = n.classify_tick(self.record, self._network.now) if self.alive else None
        if event is not None:
            self._step(event)

    def link_lost(self, one: str, other: str) -> None:
        """A notice is repeated by its clock, whatever the link does."""

    def link_restored(self, one: str, other: str) -> None:
        """A notice is repeated by its clock, whatever the link does."""

    def look_at_the_end(self, *, known: bool) -> None:
        """It was reported once; who is said to know does.

        Raises:
            InvariantError: It was not, or a lie.
        """
        if self.alive:
            require(len(self.reported) == 1, "not one report", self.story, self.reported)
            told = self.reported == [""]
            require(known or not told, "acknowledged by one who does not know", self.story)
