"""Changing frozen records is what every transition does: quickly, and exactly as dataclasses do it."""

import dataclasses

import pytest

from streamoff.machines.download import DownloadState
from streamoff.machines.records import replace

from . import samples

pytestmark = pytest.mark.core


@dataclasses.dataclass(frozen=True)
class Loose:
    """A record without slots, as a user's own machine may have."""

    state: str = "a"
    count: int = 0


def test_a_copy_differs_in_what_was_changed_only():
    """A changed record equals what dataclasses would make of it, and the old one is as it was."""
    record = samples.download(DownloadState.STREAMING)
    before = repr(record)
    changed = replace(record, attempt=2, nonce=b"8" * 8)
    assert changed == dataclasses.replace(record, attempt=2, nonce=b"8" * 8)
    assert type(changed) is type(record)
    assert repr(record) == before


def test_an_unknown_field_is_refused():
    """A misspelt field raises and does not become an attribute."""
    with pytest.raises(TypeError, match="no field 'attemt'"):
        replace(samples.download(DownloadState.STREAMING), attemt=2)  # type: ignore[call-arg]


def test_a_record_without_slots_is_copied_all_the_same():
    """The quick way needs slots; without them the ordinary one is taken."""
    assert replace(Loose(), count=3) == Loose(count=3)
