"""Log lines that others can provoke: told sparingly, on one line, and none of them lost without a count."""

import gc
import logging
import weakref

import anyio
import pytest

from streamoff.errors import TransferError
from streamoff.runtime.sparing import (
    BURST,
    MAX_CHARACTERS,
    SECONDS_EACH,
    Lines,
    SparingLog,
    printable,
)
from streamoff.runtime.timers import Timers

LOGGER = logging.getLogger("streamoff.test")


@pytest.fixture(autouse=True)
def _listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "streamoff.test")


async def test_a_burst_is_said_and_then_little(caplog: pytest.LogCaptureFixture) -> None:
    """A few lines come at once, later ones one at a time, and each says how many were left out before it."""
    log = SparingLog(LOGGER, logging.INFO)
    for number in range(1000):
        log("line %d", number)
    assert caplog.messages == [f"line {number}" for number in range(BURST)]
    assert log.left_out == 1000 - BURST
    caplog.clear()
    await anyio.sleep(SECONDS_EACH)
    log("again")
    log("and again")
    assert caplog.messages == [f"again ({1000 - BURST} more were not logged)"]
    caplog.clear()
    await anyio.sleep(3600)
    for number in range(BURST + 1):
        log("line %d", number)
    assert len(caplog.messages) == BURST
    assert caplog.messages[0] == "line 0 (1 more were not logged)"


async def test_the_last_line_of_a_storm_is_told_when_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a clock nothing waits for a next line that may never come: the last one is told, with the count."""
    timers = Timers()
    log = SparingLog(LOGGER, logging.INFO, timers)
    async with anyio.create_task_group() as group:
        group.start_soon(timers.run)
        for number in range(100):
            log("line %d", number)
        await anyio.sleep(SECONDS_EACH - 0.01)
        assert len(caplog.messages) == BURST
        await anyio.sleep(0.02)
        assert caplog.messages[BURST:] == [f"line 99 ({99 - BURST} more were not logged)"]
        await anyio.sleep(10 * SECONDS_EACH)
        assert len(caplog.messages) == BURST + 1
        assert log.left_out == 99 - BURST
        group.cancel_scope.cancel()


async def test_a_storm_of_hours_is_a_bounded_number_of_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ten lines a second for three hours are a burst and one line in five seconds, and every one is counted."""
    timers = Timers()
    lines = Lines(timers)
    async with anyio.create_task_group() as group:
        group.start_soon(timers.run)
        for number in range(1080):
            for _ in range(100):
                lines.tell(LOGGER, logging.INFO, "storm", "line %d", number)
            await anyio.sleep(10)
        group.cancel_scope.cancel()
    lines.close()
    told = len(caplog.messages)
    assert BURST < told <= BURST + 3 * 3600 / SECONDS_EACH + 1
    assert lines.left_out == 108_000 - told


async def test_one_kind_does_not_silence_another(caplog: pytest.LogCaptureFixture) -> None:
    """A kind that is told too often leaves the others, and equal kinds of other loggers, as they are."""
    caplog.set_level("INFO", "streamoff.other")
    lines = Lines(Timers())
    for _ in range(1000):
        lines.tell(LOGGER, logging.INFO, "noise", "noise")
    lines.tell(LOGGER, logging.INFO, "signal", "heard")
    lines.tell(logging.getLogger("streamoff.other"), logging.INFO, "noise", "heard as well")
    assert caplog.messages[BURST:] == ["heard", "heard as well"]


async def test_the_end_tells_what_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """When nothing will be logged any more, the last line that waits is told with the count of the others."""
    lines = Lines(Timers())
    for number in range(BURST + 3):
        lines.tell(LOGGER, logging.INFO, "storm", "line %d", number)
    lines.close()
    lines.close()
    assert caplog.messages[BURST:] == [f"line {BURST + 2} (2 more were not logged)"]
    assert lines.left_out == 2


async def test_what_nobody_listens_to_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Lines below the level of their logger use up nothing."""
    log = SparingLog(LOGGER, logging.DEBUG)
    for _ in range(1000):
        log("nobody hears")
    assert log.left_out == 0
    caplog.set_level("DEBUG", "streamoff.test")
    log("now somebody does")
    assert caplog.messages == ["now somebody does"]


async def test_what_peers_write_stays_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Line breaks, control characters and megabytes of a peer's words make neither lines nor colours nor floods."""
    log = SparingLog(LOGGER, logging.INFO)
    forged = "oops\nINFO streamoff.jobs all is well\x1b[31m\u2028"
    log("refused: %s", forged)
    log("refused: %s", TransferError(forged, site="site-1\n", story=("a", "b")))
    log("refused: %s and %d, %.1f", "x" * 1_000_000, 7, 0.25)
    for message in caplog.messages:
        assert message.isprintable()
        assert len(message) < MAX_CHARACTERS + 50
    assert "oops\\nINFO" in caplog.messages[0]
    assert "story" not in caplog.messages[1]
    assert caplog.messages[2].endswith("(1000000 characters) and 7, 0.2")


def test_text_that_can_be_printed_is_left_alone() -> None:
    """Names in any script are shown as they are."""
    for text in ("", "krank-haus_7", "больница", "病院", "ça va"):
        assert printable(text) == text


async def test_facts_come_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    """Handlers get what a line says in parts as well, also when it was told late."""
    timers = Timers()
    lines = Lines(timers)
    for number in range(BURST + 1):
        lines.tell(LOGGER, logging.INFO, "kind", "line", facts={"number": number})
    lines.close()
    numbers = [record.__dict__["facts"]["number"] for record in caplog.records]
    assert numbers == list(range(BURST + 1))


async def test_a_line_that_waits_keeps_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """What failed can be freed while its line waits for room: neither the error nor its frames are held."""

    class Weight:
        """Something large."""

    def fail() -> None:
        weight = Weight()
        alive.append(weakref.ref(weight))
        raise TransferError("it broke")

    alive: list[weakref.ref[Weight]] = []
    lines = Lines(Timers())
    for _ in range(BURST):
        lines.tell(LOGGER, logging.INFO, "kind", "line")
    try:
        fail()
    except TransferError as error:
        lines.tell(LOGGER, logging.INFO, "kind", "failed: %s", error, exc_info=error)
    gc.collect()
    assert alive[0]() is None
    lines.close()
    assert caplog.messages[-1] == "failed: it broke"


def test_a_new_event_loop_starts_afresh(caplog: pytest.LogCaptureFixture) -> None:
    """A log that outlives its event loop is not silenced by the next one's clock."""
    log = SparingLog(LOGGER, logging.INFO)
    log._since = 1e9

    async def say() -> None:
        log("line")

    anyio.run(say)
    assert caplog.messages == ["line"]
