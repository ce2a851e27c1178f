"""The promises of the machines under any order of events that their shells could produce."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from streamoff.errors import (
    GoneError,
    NoSpaceError,
    SourceFailedError,
    TransferError,
    UnexpectedMessageError,
)
from streamoff.machines import download as d, job_root as j, serving as s, transaction as t
from streamoff.machines.download import DOWNLOAD, Download, DownloadState
from streamoff.machines.invariants import check_download, check_job_root, check_transaction
from streamoff.machines.job_root import JOB_ROOT, JobRootState
from streamoff.machines.transaction import TransactionState
from streamoff.types import (
    Address,
    Budgets,
    ByteRange,
    OutcomeStatus,
    RangeSet,
    Verdict,
)

from . import samples

pytestmark = pytest.mark.core

LIMITS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
SECONDS = st.one_of(st.sampled_from([0.0, 0.5, 20.0, 120.0, 150.0]), st.floats(0.0, 200.0))
CHUNKS = [ByteRange(at, at + 20) for at in range(0, 100, 20)]
SETTLED = [t.TellCallbacks, t.ReleaseSource, t.RecordOutcome, t.WakeWaiters]


class TransactionPromises(RuleBasedStateMachine):
    """One release, one outcome that never changes, verdicts that never change, and an end in time."""

    @initialize(
        slots=st.integers(1, 4), refs=st.integers(1, 2), deadline=st.sampled_from([None, 300.0])
    )
    def begin(self, slots: int, refs: int, deadline: float | None) -> None:
        """Open a transaction and, in its words, an empty book of what links read."""
        self.now = 0.0
        self.record = samples.begin(slots, refs, budgets=Budgets(deadline=deadline))
        self.reading: list[tuple[int, str, ByteRange]] = []
        self.told: list[t.TransactionEffect] = []
        self.nonces = iter(range(10**6))

    def do(self, event: t.Event) -> None:
        """Apply one event; peers may talk nonsense, and that leaves no trace."""
        before = self.record
        snapshot = dict(before.servings)
        try:
            after, effects = t.step(before, event)
        except UnexpectedMessageError:
            return
        finally:
            assert dict(before.servings) == snapshot, "a record was changed in place"
        for key, was in before.servings.items():
            if was.final:
                assert after.servings[key] == was, "a verdict changed"
        if before.outcome is not None:
            assert after.outcome is before.outcome, "an outcome changed"
            assert not any(isinstance(effect, s.ServeRange) for effect in effects)
        self.record = after
        for effect in effects:
            if isinstance(effect, s.ServeRange):
                self.reading.append((effect.origin.stream, effect.ref, effect.range))
            elif type(effect) in SETTLED:
                self.told.append(effect)

    def pick(self, data: st.DataObject) -> tuple[int, str]:
        """A slot and a ref."""
        return (
            data.draw(st.integers(0, len(self.record.slots) - 1)),
            data.draw(st.sampled_from(self.record.refs)),
        )

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """A receiver opens, for the first time or again."""
        slot, ref = self.pick(data)
        nonce = next(self.nonces).to_bytes(8, "big")
        self.do(
            t.OpenRequested(
                self.now, slot, ref, origin(slot), nonce, RangeSet.of(CHUNKS), samples.CANCEL
            )
        )

    @rule(data=st.data(), chunk=st.sampled_from(CHUNKS))
    def pull(self, data: st.DataObject, chunk: ByteRange) -> None:
        """A receiver pulls any chunk in any order, also twice, also without having opened."""
        slot, ref = self.pick(data)
        self.do(t.PullRequested(self.now, slot, ref, origin(slot), chunk))

    @rule(data=st.data())
    def serve_all(self, data: st.DataObject) -> None:
        """A receiver pulls everything and the link reads it."""
        slot, ref = self.pick(data)
        for chunk in CHUNKS:
            self.do(t.PullRequested(self.now, slot, ref, origin(slot), chunk))
        while self.reading:
            self.do(t.RangeEnded(self.now, *self.reading.pop(0), served=True))

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), served=st.booleans())
    def end_range(self, data: st.DataObject, served: bool) -> None:
        """A link lets go of a chunk."""
        index = data.draw(st.integers(0, len(self.reading) - 1))
        self.do(t.RangeEnded(self.now, *self.reading.pop(index), served))

    @rule(data=st.data(), ok=st.booleans(), stale=st.booleans())
    def confirm(self, data: st.DataObject, ok: bool, stale: bool) -> None:
        """A receiver says its last word, perhaps of another life, perhaps too early, perhaps again."""
        slot, ref = self.pick(data)
        nonce = b"stale..." if stale else self.record.servings[slot, ref].nonce
        self.do(t.ConfirmRequested(self.now, slot, ref, origin(slot), ok, nonce, "disk full"))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A receiver gives up."""
        slot, _ = self.pick(data)
        self.do(t.CancelRequested(self.now, slot, origin(slot).address, "gave up"))
        assert all(serving.final for serving in self.record.of_slot(slot))

    @rule(data=st.data(), seconds=SECONDS)
    def hold(self, data: st.DataObject, seconds: float) -> None:
        """A receiver asks for patience."""
        slot, ref = self.pick(data)
        self.do(t.HoldRequested(self.now, slot, ref, seconds))

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        """Time passes, and every clock that is due fires at its instant."""
        end = self.now + seconds
        while (due := t.next_tick(self.record)) is not None and due <= end:
            self.now = max(self.now, due)
            self.do(t.Ticked(self.now))
            after = t.next_tick(self.record)
            assert after is None or after > due, "a clock that stands still"
        self.now = end

    @rule(reason=st.sampled_from(["deleted", "source_changed"]))
    @precondition(lambda self: self.now > 100.0)
    def abort(self, reason: str) -> None:
        """The producer ends it."""
        self.do(t.Aborted(self.now, reason))

    @invariant()
    def sound(self) -> None:
        """Every snapshot is consistent in itself."""
        check_transaction(self.record)
        assert self.record.in_flight == len(self.reading)
        settled = self.record.state is TransactionState.SETTLED
        assert [type(effect) for effect in self.told] == (SETTLED if settled else [])
        assert all(held <= self.record.budgets.hold * (1 + 1e-9) for held in self.record.held)

    def teardown(self) -> None:
        """Left alone, it settles by its clocks, once, and its outcome is the sum of its verdicts."""
        if not hasattr(self, "record"):
            return
        self.wait(10_000.0)
        self.sound()
        outcome = self.record.outcome
        assert outcome is not None
        verdicts = {serving.verdict.verdict for serving in self.record.servings.values()}
        assert (outcome.status is OutcomeStatus.COMPLETED) == (verdicts == {Verdict.SUCCEEDED})
        assert isinstance(outcome.slots, MappingProxyType)


def origin(slot: int) -> s.Origin:
    """Where the receiver of a slot speaks from; its stream is the slot's number."""
    return s.Origin(Address(f"site-{slot}"), slot)


class DownloadPromises(RuleBasedStateMachine):
    """Landed ranges never shrink, one report, an end that never changes, and an end in time."""

    @initialize(known=st.booleans(), mute=st.booleans(), deadline=st.sampled_from([None, 60.0]))
    def begin(self, known: bool, mute: bool, deadline: float | None) -> None:
        """A download that may know its source already, and whose source may lack capabilities."""
        self.now = 0.0
        self.theirs = frozenset() if mute else samples.CANCEL
        self.record = Download(samples.REF, Budgets(deadline=deadline), samples.CANCEL)
        self.told: list[d.DownloadEffect] = []
        self.link = True
        self.do(d.Started(0.0, self.theirs if known else None))

    def do(self, event: d.DownloadEvent) -> None:
        """Apply one event."""
        before = self.record
        self.record, effects = DOWNLOAD.step(before, event)
        assert not self.record.landed.missing(before.landed), "landed ranges shrank"
        if before.ended:
            assert self.record is before
            assert effects == ()
        self.told += effects

    @property
    def planned(self) -> bool:
        """Whether the header was checked."""
        return self.record.wanted.nbytes > samples.HEADER.nbytes

    @rule()
    def accept(self) -> None:
        """The source answers, in time, late or twice."""
        self.do(d.Accepted(self.now, samples.NONCE, samples.HEADER, self.theirs))

    @precondition(lambda self: self.record.wanted and not self.planned)
    @rule()
    def plan(self) -> None:
        """The header was checked, wherever the download stands by now."""
        self.do(d.Planned(self.now, samples.WHOLE, RangeSet((samples.HEADER,))))

    @precondition(lambda self: self.planned)
    @rule(chunk=st.sampled_from(CHUNKS))
    def land(self, chunk: ByteRange) -> None:
        """A chunk is safe, perhaps for the second time."""
        self.do(d.classify_landed(self.record, self.now, chunk))

    @precondition(lambda self: self.planned)
    @rule()
    def land_the_rest(self) -> None:
        """Everything is safe."""
        for chunk in CHUNKS:
            self.land(chunk)

    @rule(seconds=SECONDS)
    def hold(self, seconds: float) -> None:
        """The receiver waits for itself."""
        self.do(d.HoldAsked(self.now, seconds))

    @rule()
    def toggle_link(self) -> None:
        """The link breaks or comes back."""
        self.link = not self.link
        self.do(d.LinkRestored(self.now) if self.link else d.LinkLost(self.now))

    @precondition(lambda self: self.record.state is DownloadState.FINALISING)
    @rule(works=st.booleans())
    def finalise(self, works: bool) -> None:
        """Everything reaches its final place, or does not."""
        self.do(d.Finalised(self.now) if works else d.LandingFailed(self.now, NoSpaceError("full")))

    @precondition(lambda self: self.record.state is DownloadState.CONFIRMING)
    @rule()
    def acknowledge(self) -> None:
        """The producer knows."""
        self.do(d.ConfirmAcked(self.now))

    @precondition(lambda self: self.now > 60.0)
    @rule(how=st.sampled_from(["notice", "gone", "cancel", "disk"]))
    def spoil(self, how: str) -> None:
        """Something ends it from outside."""
        if how == "disk" and self.record.state is DownloadState.CONFIRMING:
            return
        ends: dict[str, d.DownloadEvent] = {
            "notice": d.Noticed(self.now, SourceFailedError("killed")),
            "gone": d.Refused(self.now, GoneError("settled")),
            "cancel": d.CancelRequested(self.now, "aborted"),
            "disk": d.LandingFailed(self.now, NoSpaceError("full")),
        }
        self.do(ends[how])

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        """Time passes, and every clock that is due fires at its instant."""
        end = self.now + seconds
        while (due := d.next_tick(self.record)) is not None and due <= end:
            self.now = max(self.now, due)
            event = d.classify_tick(self.record, self.now)
            assert event is not None, "a clock that fires for nothing"
            self.do(event)
        self.now = end

    @invariant()
    def sound(self) -> None:
        """Every snapshot is consistent in itself, and the caller hears once, at the end."""
        check_download(self.record)
        reports = [effect.error for effect in self.told if isinstance(effect, d.Report)]
        assert reports == ([self.record.cause] if self.record.ended else [])
        assert self.record.held <= self.record.budgets.hold * (1 + 1e-9)
        cancels = [effect for effect in self.told if isinstance(effect, d.SendCancel)]
        assert len(cancels) <= (0 if self.record.theirs == frozenset() else 1)

    def teardown(self) -> None:
        """Left alone it ends by its clocks, with the payload exactly if all of it has landed."""
        if not hasattr(self, "record"):
            return
        self.wait(10_000.0)
        if self.record.state is DownloadState.FINALISING:
            self.do(d.Finalised(self.now))
            self.wait(10_000.0)
        self.sound()
        assert self.record.ended
        if self.record.state is DownloadState.DONE:
            assert not self.record.missing
        else:
            assert isinstance(self.record.cause, TransferError)


class JobRootPromises(RuleBasedStateMachine):
    """The end comes in one order and in time; nothing is removed under a consumer that still reads."""

    @initialize(window=st.sampled_from([0.0, 5.0]))
    def begin(self, window: float) -> None:
        """Open a root."""
        self.now = 0.0
        self.left: set[str] = set()
        self.admission = j.Admission.ALL
        self.told: list[j.JobRootEffect] = []
        self.record = j.JobRoot("job-7", window)
        self.closed_at: float | None = None

    def do(self, event: j.JobRootEvent) -> None:
        """Apply one event."""
        before = self.record
        self.record, effects = JOB_ROOT.step(before, event)
        if before.state is JobRootState.GONE:
            assert self.record is before
        for effect in effects:
            match effect:
                case j.Admit(admission=admission):
                    order = list(j.Admission)
                    assert order.index(admission) > order.index(self.admission)
                    self.admission = admission
                case j.BuryRoot():
                    assert not self.left, "removed under a reader"
                case _:
                    pass
        self.told += effects

    @precondition(lambda self: self.admission is not j.Admission.NOTHING)
    @rule(name=st.sampled_from("abcd"))
    def join(self, name: str) -> None:
        """A consumer starts."""
        self.left.add(name)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A consumer ends; the last one frees the root."""
        self.left.discard(data.draw(st.sampled_from(sorted(self.left))))
        self.settle()

    def settle(self) -> None:
        """Say so when nothing uses the root any more."""
        if not self.left and self.record.state is not JobRootState.REMOVING:
            self.do(j.ConsumersEnded(self.now, 2**30))

    @rule()
    def finalise(self) -> None:
        """No new rounds."""
        self.do(j.Finalised(self.now))

    @rule()
    def close(self) -> None:
        """The body is left."""
        self.closed_at = self.now if self.closed_at is None else self.closed_at
        self.do(j.Closed(self.now))
        self.settle()

    @precondition(lambda self: self.record.state is JobRootState.REMOVING)
    @rule()
    def removed(self) -> None:
        """The janitor is done."""
        self.do(j.Removed(self.now))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.2, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        end = self.now + seconds
        while (due := j.next_tick(self.record)) is not None and due <= end:
            self.now = max(self.now, due)
            event = j.classify_tick(self.record, self.now, tuple(sorted(self.left)))
            assert event is not None
            self.do(event)
        self.now = end

    @invariant()
    def sound(self) -> None:
        """Every snapshot is consistent in itself."""
        check_job_root(self.record)
        kinds = [type(effect) for effect in self.told]
        for once in (j.CancelDownloads, j.CutConsumers, j.AbortServes, j.BuryRoot, j.HandOver):
            assert kinds.count(once) <= 1
        order = [kind for kind in kinds if kind is not j.Admit]
        expected = [j.CancelDownloads, j.CutConsumers, j.AbortServes]
        assert order[:3] == expected[: len(order[:3])] or order[:2] == [
            j.CancelDownloads,
            j.BuryRoot,
        ]

    def teardown(self) -> None:
        """Whoever has left a root gets a report within window, grace and removal; later it goes."""
        if not hasattr(self, "record"):
            return
        self.close()
        assert self.closed_at is not None
        limit = self.record.window + j.CUT_GRACE_SECONDS + j.removal_seconds(2**30)
        self.wait(max(0.0, self.closed_at + limit + 1e-6 - self.now))
        assert self.told.count(j.ReportRoot()) >= 1
        self.left.clear()
        self.settle()
        if self.record.state is JobRootState.REMOVING:
            self.removed()
        assert self.record.state is JobRootState.GONE


TestTransactionPromises = TransactionPromises.TestCase
TestTransactionPromises.settings = LIMITS
TestDownloadPromises = DownloadPromises.TestCase
TestDownloadPromises.settings = LIMITS
TestJobRootPromises = JobRootPromises.TestCase
TestJobRootPromises.settings = LIMITS
