"""Stories: the recent past of a machine, short enough for an error message."""

from __future__ import annotations

import pytest

from streamoff.machines.download import DOWNLOAD, Accepted, DownloadState, LandedMore, Started
from streamoff.machines.story import STORY_LINES, Story
from streamoff.types import ByteRange

from . import samples

pytestmark = pytest.mark.core


def test_a_story_tells_moves_and_effects_in_order() -> None:
    """Each line has the time, the event, where it led and what came of it."""
    story = Story("ref-1")
    record = samples.download(DownloadState.IDLE)
    for event in (Started(1.5), Accepted(2.0, samples.NONCE, samples.HEADER, samples.CANCEL)):
        moved, effects = DOWNLOAD.step(record, event)
        story.tell(event.now, event, record.state, moved.state, effects)
        record = moved
    assert story.lines() == (
        "t=1.500 Started [idle -> opening]: SendOpen",
        "t=2.000 Accepted [opening -> streaming]: PullMissing",
    )
    assert story.title == "ref-1"


def test_what_changes_nothing_is_left_out() -> None:
    """An ignored event takes no line; an effect without a move does."""
    story = Story("ref-1")
    state = DownloadState.STREAMING
    story.tell(1.0, object(), state, state, ())
    story.tell(2.0, LandedMore(2.0, ByteRange(0, 1)), state, state, ("PullMissing",))
    assert story.lines() == ("t=2.000 LandedMore [streaming]: str",)


def test_a_move_without_effects_is_told() -> None:
    """The state alone is worth a line."""
    story = Story("ref-1")
    story.tell(1.0, object(), DownloadState.STREAMING, DownloadState.BACKOFF, ())
    assert story.lines() == ("t=1.000 object [streaming -> backoff]",)


def test_a_long_story_is_bounded_and_says_so() -> None:
    """Only the last lines are kept; how many are missing is counted."""
    story = Story("ref-1")
    for index in range(STORY_LINES + 5):
        story.tell(float(index), object(), DownloadState.IDLE, DownloadState.OPENING, ())
    lines = story.lines()
    assert len(lines) == STORY_LINES + 1
    assert lines[0] == "... 5 earlier transitions"
    assert lines[-1].startswith(f"t={STORY_LINES + 4}.000")
