"""Every end is one line and one count, on both sides, and says whose it was, why, and what was cleaned up."""

import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamoff.errors import (
    InvariantError,
    SourceFailedError,
    StreamoffError,
    UnreachableError,
)
from streamoff.machines import transaction
from streamoff.machines.story import STORY_LINES
from streamoff.runtime.endings import LEVELS, End, some
from streamoff.runtime.jobs import open_job
from streamoff.runtime.sparing import BURST
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, Ref, Slot
from streamoff.wire.frames import Confirm, Open

from . import ways_out
from .ways_out import Stage, stage
from .world import (
    Attempt,
    ComputedSource,
    Gate,
    disk,
    memory,
    puppet,
    settled_tasks,
    tasks,
    world,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
def _listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "streamoff")


def ends(caplog: pytest.LogCaptureFixture, what: str) -> list[logging.LogRecord]:
    """The lines about ends of one sort."""
    return [one for one in caplog.records if one.__dict__.get("facts", {}).get("what") == what]


def the_end(caplog: pytest.LogCaptureFixture, what: str) -> dict[str, Any]:
    """The facts of the only line about an end of one sort."""
    [record] = ends(caplog, what)
    facts: dict[str, Any] = record.__dict__["facts"]
    message = record.getMessage()
    assert message.isprintable()
    assert record.levelno == LEVELS.get(End(facts["end"]), logging.INFO)
    assert f"{what} {facts['end']} after {facts['seconds']:.2f} s [" in message
    for name in ("job", "site", "ref"):
        if name in facts:
            assert f"{name}={facts[name]}" in message
    assert facts["cleaned"] in message
    assert len(facts["story"]) <= STORY_LINES + 1
    return facts


@dataclass(frozen=True)
class Case:
    """One way out, and what its lines say: the end, the cause and the clean-up here, the end and the cause there."""

    play: Callable[[Stage], Awaitable[None]]
    here: End
    cause: str
    cleaned: str
    there: End
    why: str = ""


CASES = [
    Case(
        ways_out.completed,
        End.COMPLETED,
        "bytes",
        "the source has acknowledged it",
        End.COMPLETED,
    ),
    Case(
        ways_out.cancelled,
        End.CANCELLED,
        "the receiver was cancelled",
        "the source was told; 4194304 of 9437264 bytes discarded",
        End.FAILED,
        "server: cancelled: the receiver was cancelled",
    ),
    Case(
        ways_out.aborted,
        End.REFUSED,
        "the round is over",
        "the source knows; 4194304 of 9437264 bytes discarded",
        End.ABORTED,
        "deleted: the round is over",
    ),
    Case(
        ways_out.landing_failed,
        End.LANDING_FAILED,
        "No space left on device",
        "the source was told; 0 of 9437264 bytes discarded",
        End.FAILED,
        "server: cancelled: landing failed (No space left on device)",
    ),
    Case(
        ways_out.finish_failed,
        End.LANDING_FAILED,
        "Input/output error",
        "the source was told; 9437264 of 9437264 bytes discarded",
        End.FAILED,
        "server: receiver: landing failed (Input/output error)",
    ),
    Case(
        ways_out.timed_out,
        End.TIMED_OUT,
        "no progress and no retries left",
        "the source was told",
        End.FAILED,
        "cancelled: no progress and no retries left",
    ),
    Case(
        ways_out.source_failed,
        End.SOURCE_FAILED,
        "the source failed: out of memory",
        "the source knows; 4194304 of 9437264 bytes discarded",
        End.ABORTED,
        "deleted: out of memory",
    ),
    Case(
        ways_out.source_changed,
        End.SOURCE_FAILED,
        "source_changed",
        "the source knows",
        End.SOURCE_FAILED,
        "source_changed",
    ),
    Case(
        ways_out.link_lost,
        End.LINK_LOST,
        "the link to the source did not come back",
        "no way to tell the source; 4194304 of 9437264 bytes discarded",
        End.TIMED_OUT,
        "idle_timeout",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.play.__name__)
async def test_an_end_is_one_line_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: Case
) -> None:
    """Whatever the end: one line and one count at the receiver, one at the source, with the true cause in both."""
    async with stage(tmp_path) as s:
        await case.play(s)
        await settled_tasks()
        pulled, served = the_end(caplog, "download"), the_end(caplog, "transaction")
        assert (pulled["end"], served["end"]) == (case.here.value, case.there.value)
        assert (pulled["job"], pulled["site"], served["site"]) == ("job-42", "site-1", "server")
        assert pulled["ref"] == served["ref"]
        assert case.cause in pulled["cause"]
        assert pulled["cleaned"].startswith(case.cleaned)
        assert case.why in served["cause"]
        assert served["cleaned"].endswith("the source was let go")
        assert bool(pulled["story"]) is bool(served["story"]) is (case.here is not End.COMPLETED)
        assert s.w.server.statistics().downloads.ended == {case.here: 1}
        assert s.w.site.statistics().publisher.ended == {case.there: 1}


async def test_a_download_that_is_not_begun_is_a_line_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refs of sources that are known to be dead, or that nobody reaches, fail with a line that says that nothing was sent."""
    async with stage(tmp_path) as s:
        _, ref = s.offer()
        nowhere = Ref(Address("site-9"), "r1", secrets.token_bytes(16), 100)
        await s.w.site.notify_failure(["server"], "site-1", [ref.id], "killed")
        with pytest.raises(SourceFailedError) as dead:
            await s.job.download(ref, disk(s.job))
        with pytest.raises(UnreachableError):
            await s.job.download(nowhere, disk(s.job))
        facts = [record.__dict__["facts"] for record in ends(caplog, "download")]
        assert [one["end"] for one in facts] == ["source failed", "link lost"]
        assert {one["cleaned"] for one in facts} == {"nothing was sent"}
        assert {one["job"] for one in facts} == {dead.value.where["job"]} == {"job-42"}
        assert s.w.server.statistics().downloads.ended == {
            End.SOURCE_FAILED: 1,
            End.LINK_LOST: 1,
        }


async def test_a_source_that_knows_no_cancel_is_not_said_to_have_been_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line tells the truth where the capability is missing: the source waits for its budget."""
    async with world(capabilities=[]) as w, open_job("job-42", w.server, scratch=tmp_path) as job:
        tx, ref = w.offer(ComputedSource(9 * MIB))
        attempt = Attempt()
        terms = disk(job, progress=lambda *_: attempt.scope.cancel())
        await attempt.run(partial(job.download, ref, terms))
        assert the_end(caplog, "download")["cleaned"].startswith("the source knows no cancel")
        await tx.wait()
        assert the_end(caplog, "transaction")["end"] == "timed out"


async def test_a_defect_is_told_with_its_traceback_and_the_source_hears_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of ours ends its own download: its waiter gets it, the log has it once, and the source is let go."""
    async with stage(tmp_path) as s:
        tx, ref = s.offer()
        transfer = s.w.server.transfer(ref, memory(), "job-42")

        async def broken() -> None:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(transfer, "_work", broken)
        with pytest.raises(ZeroDivisionError):
            await s.w.server.run_transfer(transfer)
        outcome = await tx.wait()
        assert outcome.settled_at == 0
        facts = the_end(caplog, "download")
        assert (facts["end"], facts["cause"]) == ("defect", "ZeroDivisionError('ours')")
        [record] = [one for one in caplog.records if one.exc_info]
        assert record.levelno == logging.ERROR


async def test_the_story_of_a_transfer_is_in_its_error(tmp_path: Path) -> None:
    """An error that ends a download tells how it came to that, in a bounded number of lines."""
    async with stage(tmp_path, MemoryNetwork()) as s:
        gate = Gate()
        _, ref = s.w.offer(ComputedSource(9 * MIB, gate))
        async with tasks(gate) as group:
            attempt = Attempt()
            group.start_soon(attempt.run, partial(s.job.download, ref, disk(s.job)))
            for _ in range(100):
                s.w.network.cut("server", "site-1")
                await anyio.sleep(0.2)
                s.w.network.mend("server", "site-1")
                await anyio.sleep(0.7)
            await attempt.over.wait()
            gate.open()
        assert isinstance(attempt.error, StreamoffError)
        assert len(attempt.error.story) == STORY_LINES + 1
        assert "earlier transitions" in attempt.error.story[0]
        assert "Exhausted" in attempt.error.story[-1]


async def test_nonsense_about_a_transaction_tells_its_story(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a peer is accused of comes with what the transaction went through, and is one line in the log."""
    async with world() as w, puppet(w.network, "peer", "site-1") as peer:
        tx, ref = w.offer(ComputedSource(MIB), to="peer")
        answer = await peer.open(ref)
        link = w.site.links.live[Address("peer")]
        await peer.send(
            Confirm(
                **peer.route("site-1"),
                stream=1,
                ref=ref.id,
                ticket=ref.ticket,
                nonce=answer.nonce,
                ok=True,
                reason="",
            )
        )
        await settled_tasks()
        assert link.cause is not None
        assert any("OpenRequested" in line for line in link.cause.story)
        [dropped] = [one for one in caplog.messages if "drops the link" in one]
        assert "OpenRequested" not in dropped
        assert f"transaction={tx.id}" in dropped
        tx.cancel()


async def test_a_defect_of_a_machine_tells_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the producer's machine carries what led to it."""
    async with world() as w:
        tx, _ = w.offer(ComputedSource(MIB))

        def broken(*_: object) -> None:
            raise InvariantError("cannot be")

        tx.decline(0, "nobody wants it")
        monkeypatch.setattr(transaction, "step", broken)
        with pytest.raises(InvariantError) as caught:
            tx.cancel("x")
        assert caught.value.where["transaction"] == tx.id
        assert any("CancelRequested" in line for line in caught.value.story)


# --- bounds ---------------------------------------------------------------------------------------


async def test_a_storm_of_failures_is_few_lines_and_exact_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Five hundred failing downloads are a burst of lines, with the number of the others; statistics know them all."""
    async with stage(tmp_path, MemoryNetwork()) as s:
        ref = Ref(Address("site-1"), "gone", secrets.token_bytes(16), 100)
        for _ in range(500):
            with pytest.raises(StreamoffError):
                await s.job.download(ref, disk(s.job))
        assert len(ends(caplog, "download")) == BURST
        assert s.w.server.statistics().downloads.ended == {End.REFUSED: 500}
        assert s.w.site.statistics().publisher.refused == 500
        assert len([one for one in caplog.messages if "refused open" in one]) == BURST
        await anyio.sleep(60)
        last = ends(caplog, "download")[-1].getMessage()
        assert last.endswith(f"({500 - BURST - 1} more were not logged)")
        assert s.w.server.statistics().lines_left_out == 500 - BURST - 1


async def test_a_transaction_of_a_thousand_receivers_is_one_short_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many receivers fail, the line names the first few and counts the others."""
    async with world() as w:
        slots = [Slot(secrets.token_bytes(16), Address(f"site-{number}")) for number in range(1024)]
        tx = w.server.publish([ComputedSource(MIB)], slots)
        await tx.wait()
        message = ends(caplog, "transaction")[0].getMessage()
        assert len(message) < 1200
        assert "and 1020 more" in message
        assert w.server.statistics().publisher.slots_failed == 1024


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "a0"), (4, "a0, a1, a2, a3"), (9, "a0, a1, a2, a3 and 5 more")]
)
def test_many_names_are_some_names(count: int, text: str) -> None:
    """A list of names is cut where it gets long, and says by how much."""
    assert some(f"a{number}" for number in range(count)) == text


# --- counts ---------------------------------------------------------------------------------------


async def test_statistics_of_a_download_count_what_it_took(tmp_path: Path) -> None:
    """Retries, bytes and ends are counted, while a download runs and after it."""
    async with world(sites=0) as w, puppet(w.network) as site:
        ref = Ref(site.address, "r1", secrets.token_bytes(16), 1000)
        attempt = Attempt()
        async with tasks() as group:
            group.start_soon(attempt.run, partial(w.download, ref))
            for _ in range(3):
                await site.next(Open)
            before = w.server.statistics().downloads
            assert (before.active, before.retries, before.ended) == (1, 2, {})
            await attempt.over.wait()
        after = w.server.statistics().downloads
        assert (after.active, after.retries, after.ended) == (0, 3, {End.TIMED_OUT: 1})


async def test_statistics_of_links_count_what_came_and_went() -> None:
    """Links made, lost and refused are counted."""
    async with world(sites=2) as w:
        before = w.server.statistics()
        assert (before.links, before.links_made, before.links_lost) == (2, 2, 0)
        w.network.cut("server", "site-1")
        w.network.mend("server", "site-1")
        await anyio.sleep(10)
        after = w.server.statistics()
        assert (after.links, after.links_made, after.links_lost) == (2, 3, 1)


async def test_statistics_of_a_job_count_what_uses_it(tmp_path: Path) -> None:
    """What lands, works, serves and has ended under a job is counted."""
    async with stage(tmp_path) as s:
        gate = anyio.Event()
        s.job.start(gate.wait)
        tx, ref = s.offer()
        async with tasks() as group:
            group.start_soon(s.attempt, ref)
            await anyio.sleep(5)
            now = s.job.statistics()
            assert (now.downloads, now.consumers, now.serves) == (1, 1, 0)
            assert now.bytes_used >= 9 * MIB
        await tx.wait()
        gate.set()
        await settled_tasks()
        then = s.job.statistics()
        assert (then.downloads, then.consumers) == (0, 0)
        assert then.ends == {"finished": 2}
        assert then.bytes_landed == ref.size
