"""The page that explains scratch states the bounds that the code has."""

import re
from pathlib import Path

import pytest

from streamoff.scratch import janitor, lease, names, removal
from streamoff.scratch.names import RootName

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "scratch.md"


@pytest.mark.core
def test_every_bound_on_the_page_is_the_one_in_the_code() -> None:
    """Changing a bound without its row on the page fails here."""
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|", PAGE.read_text().split("## Every bound")[1], re.MULTILINE
    )
    stated = {name: [int(number) for number in re.findall(r"\d+", text)] for name, text in rows}
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
    assert len(stated) == 11  # with the heading and the control files


def test_the_bound_of_control_files_is_the_one_in_the_code() -> None:
    """The row of the control files is checked apart, because their module needs an event loop."""
    from streamoff.runtime.control_files import CONTROL_FILE_LIMIT

    assert f"| control files | {CONTROL_FILE_LIMIT} bytes |" in PAGE.read_text()
