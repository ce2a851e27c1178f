"""Log lines that a peer can provoke."""

import logging

import anyio
import pytest

from streamoff.runtime.sparing import BURST, SECONDS_EACH, SparingLog


async def test_a_burst_is_said_and_then_little(caplog: pytest.LogCaptureFixture) -> None:
    """A few lines come at once, later ones one at a time, and each says how many were left out before it."""
    caplog.set_level("INFO", "streamoff.test")
    log = SparingLog(logging.getLogger("streamoff.test"), logging.INFO)
    for number in range(1000):
        log("line %d", number)
    assert caplog.messages == [f"line {number}" for number in range(BURST)]
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


def test_a_new_event_loop_starts_afresh(caplog: pytest.LogCaptureFixture) -> None:
    """A log that outlives its event loop is not silenced by the next one's clock."""
    caplog.set_level("INFO", "streamoff.test")
    log = SparingLog(logging.getLogger("streamoff.test"), logging.INFO)
    log._since = 1e9

    async def say() -> None:
        log("line")

    anyio.run(say)
    assert caplog.messages == ["line"]
