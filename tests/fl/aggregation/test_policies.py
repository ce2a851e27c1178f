"""The record of choices."""

from __future__ import annotations

import dataclasses

import pytest

from streamoff.errors import UsageError
from streamoff.fl.aggregation import Policies


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Policies)])
@pytest.mark.parametrize("value", ["lenient", True, 1, None, [""], [1]], ids=repr)
def test_a_choice_that_does_not_exist_is_refused(name, value):
    """A policy takes its own words only, and the message lists them."""
    with pytest.raises(UsageError, match=name):
        Policies(**{name: value})


def test_policies_are_frozen():
    """A record cannot change after a round has looked at it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policies().missing = "partial"  # type: ignore[misc]  # that is the test


def test_exclude_patterns_are_shell_style_and_case_sensitive():
    """``*`` crosses dots, ``?`` and sets work, letters keep their case and nothing is anchored loosely."""
    names = ("head.weight", "head.bias", "Head.weight", "body.0", "body.10", "xhead.weight")
    patterns = Policies(exclude=("head.*", "body.?"))
    assert patterns.excluded(names) == {"head.weight", "head.bias", "body.0"}
    assert Policies().excluded(names) == frozenset()
