"""Job roots: one directory, one nursery, one end.

A shielded supervisor task per root runs the nursery, so that an outer cancellation cuts the body at once
while the consumers still get the drain window. What happens on the way out is the job-root table's word;
this module carries it out.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeVarTuple, Unpack

import anyio
from anyio.abc import TaskGroup

from streamoff.errors import (
    JobClosedError,
    JobExistsError,
    NoSpaceError,
    QuotaExceededError,
    StreamoffError,
    TransferError,
    UsageError,
)
from streamoff.machines import job_root as m
from streamoff.machines.download import DownloadState
from streamoff.machines.job_root import JOB_ROOT, Admission, JobRoot, JobRootState
from streamoff.machines.story import Story
from streamoff.runtime.control_files import write_control_file
from streamoff.runtime.downloading import Terms, Transfer
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.guard import ReadGuard
from streamoff.runtime.publishing import Transaction
from streamoff.runtime.signal import Signal
from streamoff.runtime.space import SPACE_WAIT_SECONDS, SpaceQueue
from streamoff.runtime.threads import run_in_thread
from streamoff.scratch.directory import RamBacked, RootDirectory
from streamoff.scratch.janitor import JANITOR
from streamoff.scratch.lease import TOUCH_EVERY
from streamoff.scratch.ledger import Charge, Ledger
from streamoff.scratch.reaper import reclaim
from streamoff.scratch.space import free_space
from streamoff.tensors.files import PageCache, Storage
from streamoff.tensors.landing import PAYLOAD_NAME, DiskLanding
from streamoff.tensors.layout import Layout, subset
from streamoff.tensors.state import State
from streamoff.tensors.writer import FileWriter
from streamoff.types import OutcomeStatus, Ref

__all__ = [
    "DRAIN_WINDOW_SECONDS",
    "MAX_REPORTED",
    "Consumer",
    "ConsumerEnd",
    "ConsumerReport",
    "Job",
    "JobReport",
    "JobStatistics",
    "open_job",
]

logger = logging.getLogger("streamoff.jobs")

DRAIN_WINDOW_SECONDS: Final = 5.0
MAX_REPORTED: Final = 256
"""Consumers that a report names; the others are counted."""
STUCK_REPORT: Final = "report.json"
"""The file in a stuck root that names what keeps it."""
REAP_SECONDS: Final = 600.0
"""How often a scratch directory is searched for dead roots, at most."""
MAX_REAPED: Final = 16
READ_POLL_SECONDS: Final = 0.01
"""While only reads in foreign threads are left, how often they are looked at."""

Ts = TypeVarTuple("Ts")


class ConsumerEnd(StrEnum):
    """How a consumer of a job root ended."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CUT = "cut"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """One consumer: its name, how it ended, and how many seconds after its start."""

    name: str
    end: ConsumerEnd
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class JobStatistics:
    """A snapshot of one job root.

    Args:
        state: Of the root.
        downloads: That land under it now.
        consumers: At work now.
        serves: Transactions that serve its files now.
        reads: Of its files, at this moment.
        ends: How many of all these have ended in which way.
        bytes_used: Scratch it is charged for.
        bytes_peak: The most of it at once.
        bytes_landed: Of downloads that brought their payload.
    """

    state: JobRootState
    downloads: int
    consumers: int
    serves: int
    reads: int
    ends: Mapping[ConsumerEnd, int]
    bytes_used: int
    bytes_peak: int
    bytes_landed: int


@dataclass(frozen=True, slots=True)
class JobReport:
    """How a job ended.

    Args:
        job: Its name.
        state: Of the root: gone, stuck, or still something else.
        consumers: Those that did not simply finish, at most :data:`MAX_REPORTED`.
        ends: How many consumers ended in which way, downloads and served transactions included; who was
            stuck stays so, whatever became of it later.
        window: The drain window, seconds.
        drain_seconds: From leaving the body until nothing used the root, or until it was stuck.
        removal_seconds: What the directory took to go once nothing used it.
        removed: Whether it is gone.
        bytes_peak: The most scratch the job was charged for at once.
        bytes_landed: Bytes landed in all.
    """

    job: str
    state: JobRootState
    consumers: tuple[ConsumerReport, ...]
    ends: dict[ConsumerEnd, int]
    window: float
    drain_seconds: float
    removal_seconds: float
    removed: bool
    bytes_peak: int
    bytes_landed: int


@dataclass(slots=True, eq=False)
class Consumer:
    """A task under a job root; ``await consumer.wait()`` waits for its end."""

    name: str
    started: float
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope, repr=False)
    ended: anyio.Event = field(default_factory=anyio.Event, repr=False)
    end: ConsumerEnd = ConsumerEnd.RUNNING
    error: BaseException | None = None
    result: Any = None

    async def wait(self) -> ConsumerEnd:
        """Wait until it has ended.

        Cancellation: leaves the consumer as it is.
        """
        await self.ended.wait()
        return self.end

    def cancel(self) -> None:
        """Cancel it."""
        self.scope.cancel()


class Job:
    """An open job root; made by :func:`open_job`."""

    def __init__(
        self,
        name: str,
        endpoint: BaseEndpoint,
        root: RootDirectory,
        *,
        window: float,
        ledger: Ledger,
        storage: Storage,
        space_wait: float,
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.ledger = ledger
        self.storage = storage
        self.space = SpaceQueue(
            ledger, root.path, patience=space_wait, limiter=endpoint.resources.roots
        )
        self.guard = ReadGuard(name)
        self.opened = anyio.Event()
        self.closed = anyio.Event()
        self.record = JobRoot(job=name, window=window)
        self.story = Story(f"job root {name}")
        self.body = anyio.CancelScope()
        self.failures: list[BaseException] = []
        self.bytes_landed = 0
        self._root = root
        self._admission = Admission.ALL
        self._nursery: TaskGroup | None = None
        self._closing = anyio.Event()
        self._changed = Signal()
        self._consumers: set[Consumer] = set()
        self._downloads: dict[Transfer, float] = {}
        self._serves: dict[Transaction, float] = {}
        self._reported: deque[ConsumerReport] = deque(maxlen=MAX_REPORTED)
        self._ends: Counter[ConsumerEnd] = Counter()
        self._closed_at: float | None = None
        self._drained_at: float | None = None
        self._freed_at: float | None = None
        self._gone_at: float | None = None
        self._removed = False

    # --- for users --------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The root directory."""
        return self._root.path

    @property
    def state(self) -> JobRootState:
        """Where the root stands."""
        return self.record.state

    def start(
        self,
        fn: Callable[[Unpack[Ts]], Awaitable[object]],
        *args: *Ts,
        name: str | None = None,
    ) -> Consumer:
        """Start a consumer: a task that may use the root's files and is drained with it.

        Args:
            fn: An async callable. If it raises, the body of the job is cancelled and ``open_job`` raises; a
                :exc:`~streamoff.errors.JobClosedError` of a job that is closing is how it learns of the end,
                and no failure.
            args: Its arguments.
            name: For the report; the function's name by default.

        Raises:
            JobClosedError: The root is draining. Nothing was started.
        """
        self._admit(Admission.SERVES)
        assert self._nursery is not None
        label = name or str(getattr(fn, "__qualname__", fn))
        consumer = Consumer(label, anyio.current_time())
        self._consumers.add(consumer)
        self._nursery.start_soon(self._host, consumer, partial(fn, *args))
        return consumer

    def finalise(self) -> None:
        """Begin the end: no new rounds or downloads; what the job serves and forwards goes on."""
        self._step(m.Finalised(anyio.current_time()))

    def close(self) -> None:
        """Begin the drain, as leaving the body does. Idempotent, does not wait."""
        self._closing.set()

    async def download(self, ref: Ref, terms: Terms) -> State:
        """Land one payload under this root.

        Raises:
            JobClosedError: No new downloads are admitted: nothing was sent. Or the job closed before it had
                landed: its source was told.
            TransferError: How the transfer ended.

        Cancellation: cancels the transfer at its source and removes what had landed.
        """
        self._admit(Admission.ALL)
        transfer = self.endpoint.transfer(ref, terms, self.name)
        try:
            return await self.endpoint.run_transfer(transfer, self._start_download)
        except TransferError as error:
            if self._closing.is_set() and _is_cancelled(transfer):
                raise JobClosedError(error.what, job=self.name, story=error.story) from error
            raise

    def landing(
        self,
        layout: Layout,
        *,
        names: Collection[str] | None = None,
        check_finite: bool = False,
    ) -> DiskLanding:
        """Make a place for one payload under the root and charge the ledger; in a worker thread.

        Raises:
            QuotaExceededError: The job's quota does not allow it. Nothing was made.
            NoSpaceError: The disk has no room. Nothing was made.
            JobClosedError: The root is gone.
        """
        nbytes = layout.size if names is None else subset(layout, names).size
        what = f"an update of {nbytes} bytes under job {self.name}"
        directory, charge, dispose = self._new_directory(nbytes, what)
        return DiskLanding(
            directory,
            check_finite=check_finite,
            guard=self.guard,
            dispose=dispose,
            storage=self.storage,
            hop=partial(_hop, self.endpoint.resources.reading),
            taken=charge.taken,
            in_ram=self._root.filesystem.ram_backed,
        )

    def new_writer(self, layout: Layout, what: str, *, name: str = PAYLOAD_NAME) -> FileWriter:
        """Make a file under the root, and charge the ledger; in a worker thread.

        Args:
            layout: What it will hold.
            what: What it is for, as errors name it.
            name: Of the file; it has a directory of its own.

        Raises:
            QuotaExceededError, NoSpaceError, JobClosedError: As :meth:`landing`.
            LandingError: The file cannot be made. Nothing is left.
        """
        directory, charge, dispose = self._new_directory(layout.size, what)
        try:
            return FileWriter(
                directory / name,
                layout,
                storage=self.storage,
                replace=False,
                guard=self.guard,
                dispose=dispose,
                hop=partial(_hop, self.endpoint.resources.reading),
                taken=charge.taken,
            )
        except BaseException:
            dispose(directory)
            raise

    def _new_directory(
        self, nbytes: int, what: str
    ) -> tuple[Path, Charge, Callable[[Path], object]]:
        """A directory that was charged for, and what disposes of both."""
        root = self._root
        try:
            charge = self.ledger.charge(nbytes, what)
        except (QuotaExceededError, NoSpaceError) as error:
            error.located(path=root.path)
            raise
        try:
            directory = root.new_transfer()
        except StreamoffError as error:
            charge.release()
            error.located(needed=nbytes)
            raise
        return directory, charge, lambda path: root.reclaim(path, charge.release)

    def serves(self, tx: Transaction) -> bool:
        """Whether a transaction serves a file of this root, and so has until the end of the window."""
        return tx in self._serves

    def attach(self, tx: Transaction) -> None:
        """A transaction serves a file of this root: it shares the drain window.

        Raises:
            JobClosedError: The root is draining.
        """
        self._admit(Admission.SERVES)
        tx.job = self.name
        if tx.outcome is None and tx not in self._serves:
            self._serves[tx] = anyio.current_time()
            tx.on_settled.append(lambda _outcome: self._served(tx))

    def statistics(self) -> JobStatistics:
        """A snapshot."""
        return JobStatistics(
            state=self.record.state,
            downloads=len(self._downloads),
            consumers=len(self._consumers),
            serves=len(self._serves),
            reads=self.guard.reads,
            ends=MappingProxyType(dict(self._ends)),
            bytes_used=self.ledger.used,
            bytes_peak=self.ledger.peak,
            bytes_landed=self.bytes_landed,
        )

    @property
    def report(self) -> JobReport:
        """How it stands, or how it ended."""
        return JobReport(
            job=self.name,
            state=self.record.state,
            consumers=tuple(self._reported),
            ends=dict(self._ends),
            window=self.record.window,
            drain_seconds=_seconds(self._closed_at, self._drained_at),
            removal_seconds=_seconds(self._freed_at, self._gone_at),
            removed=self._removed,
            bytes_peak=self.ledger.peak,
            bytes_landed=self.bytes_landed,
        )

    # --- downloads and consumers ------------------------------------------------------------------

    def _start_download(
        self, run: Callable[[Transfer], Awaitable[object]], transfer: Transfer
    ) -> None:
        """It uses the root until its own task has ended, whatever becomes of whoever waits for it."""
        assert self._nursery is not None
        self._downloads[transfer] = anyio.current_time()
        self._nursery.start_soon(self._host_download, run, transfer)

    async def _host_download(
        self, run: Callable[[Transfer], Awaitable[object]], transfer: Transfer
    ) -> None:
        try:
            await run(transfer)
        except BaseException as error:  # noqa: BLE001 - an interrupt; it is raised where the body is
            self._fail(_beside(anyio.get_cancelled_exc_class(), error))
        finally:
            self._note_download(transfer, self._downloads.pop(transfer))
            self._changed.notify()

    def _admit(self, wanted: Admission) -> None:
        allowed = {
            Admission.ALL: {Admission.ALL, Admission.SERVES},
            Admission.SERVES: {Admission.SERVES},
            Admission.NOTHING: set[Admission](),
        }[self._admission]
        if wanted not in allowed or self._closing.is_set():
            raise JobClosedError(
                "the job admits no more work", job=self.name, state=self.state.value
            )

    async def _host(self, consumer: Consumer, call: Callable[[], Awaitable[object]]) -> None:
        try:
            with consumer.scope:
                consumer.result = await call()
                consumer.end = ConsumerEnd.FINISHED
            if consumer.scope.cancelled_caught:
                consumer.end = self._cut_or_cancelled()
        except BaseException as error:  # noqa: BLE001 - it is reported, and raised where the body is
            self._failed(consumer, error)
        finally:
            self._consumers.discard(consumer)
            self._note(consumer.name, consumer.end, consumer.started, consumer.error)
            consumer.ended.set()
            self._changed.notify()

    def _failed(self, consumer: Consumer, error: BaseException) -> None:
        """Whatever a consumer raises, a cancellation that is not ours included, ends it and no other.

        What an ended job refuses is how one that blocks, or waits for a download, learns that it is over.
        """
        failure = _beside(anyio.get_cancelled_exc_class(), error)
        consumer.error = failure
        over = consumer.scope.cancel_called or self._closing.is_set()
        if failure is None or (over and _beside(JobClosedError, failure) is None):
            consumer.end = self._cut_or_cancelled()
            return
        consumer.end = ConsumerEnd.FAILED
        self._fail(failure)

    def _fail(self, failure: BaseException | None) -> None:
        """Let the body end, and raise this there, once."""
        if failure is not None and not any(failure is one for one in self.failures):
            self.failures.append(failure)
            self.body.cancel()

    def _cut_or_cancelled(self) -> ConsumerEnd:
        return ConsumerEnd.CUT if self.record.cut else ConsumerEnd.CANCELLED

    def _note_download(self, transfer: Transfer, started: float) -> None:
        error = transfer.cause
        end = ConsumerEnd.CANCELLED if _is_cancelled(transfer) else ConsumerEnd.FAILED
        self.bytes_landed += 0 if error is not None else transfer.record.landed.nbytes
        self._note(_name(transfer), ConsumerEnd.FINISHED if error is None else end, started, error)

    def _served(self, tx: Transaction) -> None:
        started = self._serves.pop(tx, anyio.current_time())
        outcome = tx.record.outcome
        status = OutcomeStatus.ABORTED if outcome is None else outcome.status
        end = {
            OutcomeStatus.COMPLETED: ConsumerEnd.FINISHED,
            OutcomeStatus.FAILED: ConsumerEnd.FAILED,
            OutcomeStatus.ABORTED: self._cut_or_cancelled(),
        }[status]
        self._note(f"serving {tx.id}", end, started, tx.record.cause)
        self._changed.notify()

    def _note(
        self, name: str, end: ConsumerEnd, started: float, error: BaseException | str | None
    ) -> None:
        if not self.record.stuck:  # what ends later has been told as stuck
            self._tell(name, end, started, error)

    def _tell(
        self,
        name: str,
        end: ConsumerEnd,
        started: float,
        error: BaseException | str | None = None,
    ) -> None:
        self._ends[end] += 1
        if end is not ConsumerEnd.FINISHED:
            seconds = anyio.current_time() - started
            what = error.what if isinstance(error, StreamoffError) else str(error or "")
            self._reported.append(ConsumerReport(name, end, seconds, what))

    def _users(self) -> list[tuple[str, float]]:
        """What uses the root now: its name, and since when, as far as that is known."""
        now = anyio.current_time()
        return [
            *((consumer.name, consumer.started) for consumer in self._consumers),
            *((_name(transfer), started) for transfer, started in self._downloads.items()),
            *((f"serving {tx.id}", started) for tx, started in self._serves.items()),
            *[("a read of a landed file", now)] * self.guard.reads,
        ]

    def _left(self) -> tuple[str, ...]:
        """What still uses the root, by name."""
        return tuple(name for name, _ in self._users())

    # --- the supervisor ---------------------------------------------------------------------------

    async def supervise(self) -> None:
        """Run the nursery and, when the body is left, the drain; whatever happens, waiters are woken."""
        try:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._keep_lease)
                    nursery.start_soon(self._reap)
                    nursery.start_soon(self.space.watch)
                    self.opened.set()
                    await self._closing.wait()
                    await self._drain()
                    if self.record.state is JobRootState.STUCK:
                        await self._leave_word()
                        await self._bury_late()
                    nursery.cancel_scope.cancel()  # nothing is left but the housekeeping
        finally:
            self.endpoint.jobs.discard(self)
            self._abandon()
            self._end()

    def _abandon(self) -> None:
        """After a defect, or while its loop is torn down: no task is left, so let go of the root without a wait."""
        if self._freed_at is not None or self.guard.reads:
            return
        self.guard.close()
        try:
            JANITOR.reclaim(self._root.bury())
        except OSError as error:
            logger.warning("job %s: %s", self.name, error)

    def _end(self) -> None:
        """The name is free and whoever waits for the end goes on; what is stuck may still be there."""
        self.endpoint.open_jobs.discard(self.name)
        self.closed.set()

    async def _keep_lease(self) -> None:
        while True:
            await anyio.sleep(TOUCH_EVERY)
            try:
                await run_in_thread(self._root.touch, limiter=self.endpoint.resources.roots)
            except OSError as error:
                logger.warning("job %s: its lease cannot be touched: %s", self.name, error)

    async def _reap(self) -> None:
        """Remove what crashed owners left beside this root; once in a while, and never a live one."""
        base, now = self._root.path.parent, anyio.current_time()
        reaped = self.endpoint.resources.reaped
        if now - reaped.get(base, -math.inf) < REAP_SECONDS:
            return
        while len(reaped) >= MAX_REAPED:
            del reaped[next(iter(reaped))]
        reaped[base] = now
        try:
            report = await run_in_thread(reclaim, base, limiter=self.endpoint.resources.roots)
        except (StreamoffError, OSError) as error:
            logger.warning("%s cannot be searched for dead job roots: %s", base, error)
            return
        if report.removed:
            logger.info("%s: removed %d dead job roots", base, len(report.removed))

    async def _drain(self) -> None:
        self._closed_at = anyio.current_time()
        self._step(m.Closed(self._closed_at))
        while self.record.state in {JobRootState.DRAINING, JobRootState.CUTTING}:
            left = self._left()
            now = anyio.current_time()
            if not left:
                self._drained_at = now
                self._step(m.ConsumersEnded(now, self.ledger.used))
                break
            event = m.classify_tick(self.record, now, left)
            if event is not None:
                self._step(event)
                continue
            await self._wait_for_change()
        if self.record.state is JobRootState.REMOVING:
            await self._remove()
        self._end()

    async def _wait_for_change(self) -> None:
        due = self.record.due if self.record.due is not None else math.inf
        if self.guard.reads:
            due = min(due, anyio.current_time() + READ_POLL_SECONDS)
        with anyio.CancelScope(deadline=due):
            await self._changed.wait()

    async def _remove(self) -> None:
        self._freed_at = anyio.current_time()
        until = time.monotonic() + m.removal_seconds(self.ledger.used)
        self._removed = await run_in_thread(
            self._bury, until, limiter=self.endpoint.resources.roots
        )
        now = anyio.current_time()
        self._gone_at = now
        self._step(m.Removed(now) if self._removed else m.RemovalExpired(now))

    def _bury(self, until: float) -> bool:
        """Rename the root out of the way and wait, at most ``until`` then, for the janitor to remove it.

        The janitor works in real time, and a turn for a thread may have been waited for.
        """
        self.guard.close()
        try:
            gone = self._root.bury()
        except OSError as error:
            logger.warning("job %s: %s", self.name, error)
            return False
        JANITOR.reclaim(gone)
        return JANITOR.wait(gone, max(0.0, until - time.monotonic()))

    async def _leave_word(self) -> None:
        """Say in the root itself who keeps it, for whoever finds it there."""
        word = {"job": self.name, "state": self.record.state.value, "stuck": self.record.stuck}
        try:
            await write_control_file(self.path / STUCK_REPORT, json.dumps(word).encode())
        except (StreamoffError, OSError) as error:
            logger.warning("job %s: its root does not say who keeps it: %s", self.name, error)

    async def _bury_late(self) -> None:
        """Wait for the last of what is stuck, then let the root go."""
        while self._left():
            await self._wait_for_change()
        self._step(m.ConsumersEnded(anyio.current_time(), 0))
        await self._remove()
        logger.info("job %s: what was stuck has ended; its root is gone", self.name)

    def _step(self, event: m.JobRootEvent) -> None:
        before = self.record
        self.record, effects = JOB_ROOT.step(before, event)
        self.story.tell(event.now, event, before.state, self.record.state, effects)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: m.JobRootEffect) -> None:
        match effect:
            case m.Admit():
                self._admission = effect.admission
            case m.CancelDownloads():
                for transfer in tuple(self._downloads):
                    transfer.cancel(f"job {self.name} is closing")
            case m.CutConsumers():
                self.guard.close()  # a thread that reads block by block stops at its next one
                for consumer in tuple(self._consumers):
                    consumer.scope.cancel()
            case m.AbortServes():
                for tx in tuple(self._serves):
                    tx.cancel(f"job {self.name} is closing")
            case m.HandOver():
                self._drained_at = anyio.current_time()
                for name, since in self._users():
                    self._tell(name, ConsumerEnd.STUCK, since)
            case m.ReportRoot():
                self._log()
            case m.BuryRoot():
                pass  # the drain goes on with the removal

    def _log(self) -> None:
        report = self.report
        ends = ", ".join(f"{count} {end.value}" for end, count in report.ends.items())
        stuck = report.state is JobRootState.STUCK
        logger.log(
            logging.INFO if report.removed else logging.WARNING,
            "job %s is %s after %.2f s of drain: %s%s%s",
            self.name,
            report.state.value,
            report.drain_seconds,
            ends or "nothing used it",
            f"; stuck: {', '.join(self.record.stuck)}" if stuck else "",
            "" if report.removed or stuck else f"; {self.path} is not removed yet",
        )


class open_job:  # noqa: N801 - reads as what it does: async with open_job(...) as job
    """Open a job root: ``async with open_job("job-42", endpoint) as job``.

    Args:
        name: Names the job: in the directory, in reports and in errors.
        endpoint: Whose it is; it must be open.
        drain_window: Seconds that consumers get when the body is left; 0 cuts at once.
        scratch: Where the root is made; None follows :mod:`tempfile` (``TMPDIR``).
        quota: Bytes of scratch the job may use; None for no limit but the disk.
        space_wait: Seconds that an update waits, while its source is asked to be patient, for quota or disk
            space that others release; 0 refuses it at once. What exceeds the whole quota, or the whole disk,
            never waits.
        ram_backed: What to do if scratch turns out to be memory: ``"warn"``, ``"refuse"`` or ``"allow"``.
        durable: Whether a file counts as landed, or written, only when it is on stable storage.
        page_cache: ``"drop"`` keeps what was written and read out of the page cache, so that a small memory
            limit of a container is enough; ``"keep"`` leaves that to the kernel.

    Raises:
        JobExistsError: The endpoint has an open job of this name.
        UsageError: Not a job name, a window or a quota.
        ScratchError: The root cannot be made. Nothing is left.

    Leaving the body, for whatever reason, drains: downloads are cancelled at their sources, consumers and
    served files get the window, what is left is cut, and the root is removed. This returns within the
    window and a quarter of a second, and the removal has a bound of its own. A consumer that raised makes
    this raise; several become an :class:`ExceptionGroup`.

    Cancellation: cuts the body at once; the drain is shielded and bounded.
    """

    def __init__(
        self,
        name: str,
        endpoint: BaseEndpoint,
        *,
        drain_window: float = DRAIN_WINDOW_SECONDS,
        scratch: Path | str | None = None,
        quota: int | None = None,
        space_wait: float = SPACE_WAIT_SECONDS,
        ram_backed: RamBacked = "warn",
        durable: bool = False,
        page_cache: PageCache = "keep",
    ) -> None:
        for what, seconds in (("drain_window", drain_window), ("space_wait", space_wait)):
            if isinstance(seconds, bool) or not 0 <= seconds < math.inf:
                raise UsageError(what, expected="seconds, 0 or more", got=seconds)
        self._name = name
        self._endpoint = endpoint
        self._window = float(drain_window)
        self._scratch = scratch
        self._quota = quota
        self._space_wait = float(space_wait)
        self._ram_backed: RamBacked = ram_backed
        self._storage = Storage(durable=durable, page_cache=page_cache)

    async def __aenter__(self) -> Job:
        """Make the root and start its supervisor."""
        if self._name in self._endpoint.open_jobs:
            raise JobExistsError("the job is open already", job=self._name)
        self._endpoint.open_jobs.add(self._name)
        try:
            roots = self._endpoint.resources.roots
            root = await run_in_thread(self._make_root, limiter=roots)
            try:
                ledger = Ledger(self._quota, partial(free_space, root.path))
                job = Job(
                    self._name,
                    self._endpoint,
                    root,
                    window=self._window,
                    ledger=ledger,
                    storage=self._storage,
                    space_wait=self._space_wait,
                )
                self._endpoint.start_job(job, job.supervise)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await run_in_thread(_remove_root, root, limiter=roots)
                raise
        except BaseException:
            self._endpoint.open_jobs.discard(self._name)
            raise
        try:
            with anyio.CancelScope(shield=True):
                await job.opened.wait()
        except BaseException:
            # asyncio's own cancellation, or an interrupt: the job ends before it began
            job.close()
            with anyio.CancelScope(shield=True):
                await job.closed.wait()
            raise
        self._job = job
        job.body.__enter__()
        return job

    def _make_root(self) -> RootDirectory:
        return RootDirectory.create(self._name, self._scratch, ram_backed=self._ram_backed)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Drain, remove, report."""
        job = self._job
        job.close()
        try:
            with anyio.CancelScope(shield=True):
                await job.closed.wait()
        finally:
            left = _leave(job.body, error)
        failures = job.failures
        if not failures and (left is None or left is error):
            return left is None
        if left is not None and not isinstance(left, anyio.get_cancelled_exc_class()):
            failures = [left, *failures]
        raise (
            failures[0]
            if len(failures) == 1
            else BaseExceptionGroup(f"job {self._name} failed", failures)
        )


def _leave(scope: anyio.CancelScope, error: BaseException | None) -> BaseException | None:
    """Leave a cancel scope with an error, and return what is left of it without that cancellation."""
    try:
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        return None if scope.__exit__(kind, error, trace) else error
    except BaseException as left:  # noqa: BLE001 - part of a group, or the scope's own complaint
        return left


def _seconds(start: float | None, stop: float | None) -> float:
    """From ``start`` to ``stop`` or, if that has not come, to now; 0 before the start."""
    if start is None:
        return 0.0
    return (anyio.current_time() if stop is None else stop) - start


def _name(transfer: Transfer) -> str:
    return f"download {transfer.ref.id} from {transfer.ref.source}"


def _is_cancelled(transfer: Transfer) -> bool:
    """Whether it ended because somebody cancelled it, and for no reason of its own."""
    record = transfer.record
    return record.state is DownloadState.CANCELLED and transfer.cause is record.cause


async def _hop(limiter: anyio.CapacityLimiter, call: Callable[[], Any]) -> Any:
    return await run_in_thread(call, limiter=limiter)


def _beside(kind: type[BaseException], error: BaseException) -> BaseException | None:
    """What an error is apart from ``kind``, also inside groups; None if it is nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(kind)[1]
    return None if isinstance(error, kind) else error


def _remove_root(root: RootDirectory) -> None:
    JANITOR.reclaim(root.bury())
