"""The page that explains scratch states the bounds that the code has."""

import re
from pathlib import Path

import pytest

from streamoff.scratch import janitor, lease, names, removal
from streamoff.scratch.names import RootName
from streamoff.types import CHUNK_BYTES, MIB

APART = {
    "control files",
    "wait for space",
    "a release is noticed, other programs' within",
    "more patience for those who wait when one gives up",
    "pauses between attempts that seemed to fit",
}
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "scratch.md"


def bounds() -> dict[str, list[float]]:
    """The numbers in every row of the table, by the name of the bound."""
    table = PAGE.read_text().split("## Every bound")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)[1:]
    return {name: [float(one) for one in re.findall(r"\d+(?:\.\d+)?", text)] for name, text in rows}


@pytest.mark.core
def test_every_bound_on_the_page_is_the_one_in_the_code() -> None:
    """Changing a bound without its row on the page fails here."""
    stated = bounds()
    milliseconds = [round(pause * 1000) for pause in removal.PAUSES]
    assert stated["touch of the lease"] == [lease.TOUCH_EVERY]
    assert stated["silence that counts as death"] == [lease.EXPIRY]
    assert stated["lease record"] == [lease._RECORD_LIMIT]
    assert stated["job id"] == [names.MAX_JOB]
    assert stated["job id in the name"] == [len(RootName.fresh("x" * names.MAX_JOB).slug)]
    assert stated["retries of a removal"] == [len(removal.PAUSES), *milliseconds]
    assert stated["depth of a removal, with two descriptors a level"] == [removal.MAX_DEPTH]
    assert stated["failures the janitor remembers"] == [janitor._REMEMBERED]
    assert stated["wait for the janitor at exit"] == [janitor.EXIT_GRACE]
    assert stated["written and not on its way to the disk, with `drop`"] == [CHUNK_BYTES // MIB]
    assert len(stated.keys() - APART) == 10  # all of them are above


def test_the_bounds_of_what_needs_an_event_loop_are_the_ones_in_the_code() -> None:
    """Changing a bound of control files or of the wait for space without its row fails here."""
    from streamoff.runtime import space
    from streamoff.runtime.control_files import CONTROL_FILE_LIMIT

    stated = bounds()
    looks = [int(space.NOTICE_SECONDS * 1000), int(space.LOOK_SECONDS)]
    assert stated["control files"] == [CONTROL_FILE_LIMIT]
    assert stated["wait for space"] == [space.SPACE_WAIT_SECONDS]
    assert stated["a release is noticed, other programs' within"] == looks
    assert stated["more patience for those who wait when one gives up"] == [space.GRACE_SECONDS]
    assert stated["pauses between attempts that seemed to fit"] == [0.1, space.MAX_PAUSE_SECONDS]
    assert 2 * space.NOTICE_SECONDS == 0.1  # the first pause is doubled before it is taken
