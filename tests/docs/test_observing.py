"""The page on observing shows lines that are logged, loggers that exist and every number that is counted."""

import dataclasses
import re
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from streamoff.errors import StreamoffError
from streamoff.machines.story import STORY_LINES
from streamoff.runtime import sparing
from streamoff.runtime.downloads import DownloadStatistics
from streamoff.runtime.endings import End
from streamoff.runtime.endpoint import BaseEndpoint, EndpointStatistics
from streamoff.runtime.jobs import JobStatistics
from streamoff.runtime.messages import MailboxStatistics
from streamoff.runtime.notices import NotifierStatistics
from streamoff.runtime.publishing import PublisherStatistics
from streamoff.runtime.relay import RelayStatistics
from streamoff.runtime.resources import ResourceStatistics
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import MIB, Address, Ref, Slot
from streamoff.wire.frames import Notice

from ..runtime import ways_out
from ..runtime.ways_out import Stage, stage
from ..runtime.world import Attempt, ComputedSource, disk, memory, puppet, settled_tasks

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "observing.md"
SOURCE = Path(sparing.__file__).parents[1]
TEXT = PAGE.read_text(encoding="utf-8")
ID = re.compile(r"\b[rt][0-9a-f]{6,16}\b")


def shown() -> list[str]:
    """The lines on the page: level, logger, message; ids are all alike."""
    blocks = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [ID.sub("ID", line) for block in blocks for line in block.splitlines()]


def logged(caplog: pytest.LogCaptureFixture) -> set[str]:
    """What was logged, in the same form."""
    return {
        ID.sub("ID", f"{record.levelname} {record.name} {record.getMessage()}")
        for record in caplog.records
        if record.name.startswith("streamoff.")
    }


# --- what happens on the page ---------------------------------------------------------------------


async def not_begun(s: Stage) -> None:
    """Pull from sources that are dead, or not there."""
    _, ref = s.offer()
    await s.w.site.notify_failure(["server"], "site-1", [ref.id], "out of memory")
    for one in (ref, Ref(Address("site-9"), "r0123456789", secrets.token_bytes(16), 100)):
        with pytest.raises(StreamoffError):
            await s.job.download(one, disk(s.job))


async def refused(s: Stage) -> None:
    """Pull with a ticket that nobody gave out, again and again."""
    _, ref = s.offer()
    forged = Ref(ref.source, ref.id, secrets.token_bytes(16), ref.size)
    for _ in range(100):
        with pytest.raises(StreamoffError):
            await s.job.download(forged, disk(s.job))
    await anyio.sleep(10)


async def messages(s: Stage) -> None:
    """Send to a topic that nobody reads."""
    s.w.site.mailbox.post(Address("server"), "round-7", ())
    await anyio.sleep(1)


async def notices(s: Stage) -> None:
    """Declare a source dead to one who is there and one who is not."""
    await s.w.site.notify_failure(["server", "site-9"], "site-1", ["r0123456789"], "exit code 9")


async def links(s: Stage) -> None:
    """Lose a link, send nonsense, claim an address that is taken."""
    s.w.network.cut("server", "site-1")
    s.w.network.mend("server", "site-1")
    await anyio.sleep(1)
    async with puppet(s.w.network, "site-2") as liar:
        source = Address("site-1")
        await liar.send(
            Notice(**liar.route(), id=1, source=source, refs=("r0123456789",), reason="a lie")
        )
        await settled_tasks()
    async with puppet(s.w.network, "site-3", version=7):
        await settled_tasks()


SCENES: list[Callable[[Stage], Awaitable[None]]] = [
    ways_out.completed,
    ways_out.cancelled,
    ways_out.aborted,
    ways_out.landing_failed,
    ways_out.finish_failed,
    ways_out.timed_out,
    ways_out.source_failed,
    ways_out.source_changed,
    ways_out.link_lost,
    not_begun,
    refused,
    messages,
    notices,
    links,
]


async def relayed() -> None:
    """Lose a trainer behind a relay, and ask for one that is not there."""
    network = MemoryNetwork(bandwidth=MIB)
    async with (
        BaseEndpoint("server", transports=[network]) as server,
        BaseEndpoint("site-1", transports=[network], seed=1) as site,
        BaseEndpoint("site-1.trainer", transports=[network], seed=1) as trainer,
    ):
        await site.connect("server")
        await trainer.connect("site-1")
        tx = trainer.publish([ComputedSource(9 * MIB)], [Slot(secrets.token_bytes(16))])
        attempt = Attempt()
        async with anyio.create_task_group() as group:
            transfer = server.transfer(tx.refs(0)[0], memory())
            group.start_soon(attempt.run, partial(server.run_transfer, transfer))
            await anyio.sleep(5)
            network.cut("site-1", "site-1.trainer")
        network.mend("site-1", "site-1.trainer")
        tx.cancel("the trainer is lost")


async def test_every_line_on_the_page_is_logged_as_it_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the page shows happens, to the character, ids apart."""
    caplog.set_level("DEBUG", "streamoff")
    for scene in SCENES:
        async with stage(tmp_path) as s:
            await scene(s)
            await settled_tasks()
    await relayed()
    lines, said = shown(), logged(caplog)
    assert len(lines) >= 25
    missing = [line for line in lines if line not in said]
    assert not missing


def test_every_end_is_on_the_page() -> None:
    """No way for a download to end is left out, and none is made up."""
    table = TEXT.partition("| end | what it means |")[2].partition("\n\n")[0]
    told = {row.split("|")[1].strip() for row in table.splitlines()[2:]}
    of_transactions_only = {End.ABORTED, End.FAILED}
    assert told == {end.value for end in End if end not in of_transactions_only}


def test_every_logger_is_on_the_page() -> None:
    """Whoever sets a level finds every name, and no name that is none."""
    named = {
        name.strip('"') if name != "__name__" else "streamoff." + ".".join(module.parts)
        for path in SOURCE.rglob("*.py")
        for module in [path.relative_to(SOURCE).with_suffix("")]
        for name in re.findall(r"getLogger\(([^)]+)\)", path.read_text(encoding="utf-8"))
    }
    assert set(re.findall(r"^\| `(streamoff[\w.]*)` \|", TEXT, re.MULTILINE)) == named


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("`endpoint.statistics()`", EndpointStatistics),
        ("`.downloads`", DownloadStatistics),
        ("`.publisher`", PublisherStatistics),
        ("`.mailbox`", MailboxStatistics),
        ("`.notifier`", NotifierStatistics),
        ("`.relay`", RelayStatistics),
        ("`job.statistics()`", JobStatistics),
        ("`endpoint.resources.statistics()`", ResourceStatistics),
    ],
)
def test_every_number_is_on_the_page(heading: str, kind: type) -> None:
    """Each field of each snapshot is described, in its order, and in its docstring too where it has one of its own."""
    section = TEXT.partition(f"### {heading}\n")[2].partition("\n###")[0]
    told = re.findall(r"^\| `(\w+)` \| \S", section, re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(kind)]
    assert told == fields
    if "Args:" in (kind.__doc__ or ""):
        assert re.findall(r"^ {8}(\w+): ", kind.__doc__ or "", re.MULTILINE) == fields


def test_the_bounds_on_the_page_are_those_of_the_code() -> None:
    """How often a kind of line comes, how long it is and how long a story is are the constants of the code."""
    assert (
        f"may come {sparing.BURST}\ntimes at once and then once in {sparing.SECONDS_EACH:g} s"
        in TEXT
    )
    assert f"at most {sparing.MAX_CHARACTERS} characters long" in TEXT
    assert f"at most {STORY_LINES + 1} lines" in TEXT
