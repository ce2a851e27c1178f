"""Errors: facts as attributes, one message made of them, whole across processes."""

import inspect
import pickle
from pathlib import Path

import pytest

from streamoff import errors
from streamoff.errors import NoSpaceError, StreamoffError

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, StreamoffError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[StreamoffError]) -> None:
    """Type, message, facts and story are the same on the other side of a process boundary."""
    error = kind("it broke", expected=3, got=4, site="site-1", story=("one", "two"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.site == "site-1"
    assert again.story == ("one", "two")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_exported_and_documented(kind: type[StreamoffError]) -> None:
    """The taxonomy is public: each class is listed and says in a sentence what it is."""
    assert kind.__name__ in errors.__all__
    assert inspect.getdoc(kind)


def test_the_message_says_what_was_expected_what_came_and_where() -> None:
    """One line has it all, with the advice at the end."""
    error = NoSpaceError("no room", expected=10, got=3, site="site-1", path=None, hint="Free some")
    assert str(error) == "no room: expected 10, got 3 [site=site-1]. Free some"
    assert isinstance(error, OSError)


def test_a_message_says_what_is_known_and_no_more() -> None:
    """What was expected is left out where nothing was; what came stands alone then."""
    assert str(StreamoffError("it broke", got="abc")) == "it broke: abc"
    assert str(StreamoffError("it broke", expected=3)) == "it broke: expected 3, got None"


def test_a_log_has_the_message_without_its_story() -> None:
    """One line, without what the reader knows from elsewhere."""
    error = StreamoffError(
        "it broke", got=4, site="site-1", path="/x", hint="Mend it", story=("a",)
    )
    assert error.line() == "it broke: 4 [site=site-1, path=/x]. Mend it"
    assert error.line("site") == "it broke: 4 [path=/x]. Mend it"
    assert error.line("site", "path") == "it broke: 4. Mend it"
    assert str(error).startswith(error.line() + "\n")


def test_outer_layers_add_what_inner_ones_could_not_know() -> None:
    """A fact that is there stays; one that is missing is added."""
    error = StreamoffError("it broke", site="inner").located(site="outer", ref="r1")
    assert (error.site, error.ref) == ("inner", "r1")
    with pytest.raises(AttributeError):
        _ = error.tensor


def test_a_path_reads_as_one() -> None:
    """A path in a message can be copied as it stands, unless it holds what would garble the line."""
    assert str(StreamoffError("full", path=Path("/var/scratch"))) == "full [path=/var/scratch]"
    assert "\n" not in str(StreamoffError("full", path=Path("/var/\nfake=1")))


def test_a_hostile_fact_does_not_flood_the_message() -> None:
    """Names that peers choose are cut, and what cannot be printed is quoted."""
    error = StreamoffError("it broke", tensor="x" * 100_000, got="a\x00b")
    assert len(str(error)) < 600
    assert "\x00" not in str(error)
