"""Limits are validated where they are made, and the smaller of two counts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given

from streamoff.errors import LimitError, UsageError
from streamoff.types import MIB
from streamoff.wire.limits import DEFAULT_LIMITS, MIN_PIECE, Limits, LinkLimits, check_limit

from .samples import calm, link_limits

pytestmark = pytest.mark.core


@pytest.mark.parametrize("kind", [Limits, LinkLimits])
@pytest.mark.parametrize("value", [0, -1, 2**40, 1.5, "1", True, None])
def test_each_limit_has_a_span(kind: Any, value: object) -> None:
    """No limit can be set to nothing, to the absurd or to another type; the error names it."""
    for item in fields(kind):
        if item.name != "link":
            with pytest.raises(UsageError, match=f"limit '{item.name}'"):
                kind(**{item.name: value})


def test_the_promised_defaults() -> None:
    """The documented bounds hold without any configuration."""
    link = DEFAULT_LIMITS.link
    assert (link.frame, link.message, link.chunk) == (2 * MIB, 16 * MIB, 8 * MIB)
    assert (DEFAULT_LIMITS.depth, DEFAULT_LIMITS.tensor_header) == (64, 32 * MIB)
    assert (DEFAULT_LIMITS.topic, DEFAULT_LIMITS.reason, DEFAULT_LIMITS.refs) == (256, 1024, 256)
    assert DEFAULT_LIMITS.tensors == 200_000
    assert DEFAULT_LIMITS.header < 64 * 1024
    assert DEFAULT_LIMITS.hops == 8


def test_the_smallest_frame_has_room_for_a_piece() -> None:
    """Under any limits that can be set, a frame with the largest header still carries body."""
    with pytest.raises(UsageError) as caught:
        LinkLimits(frame=0)
    smallest = int(str(caught.value.expected).split()[3])
    assert smallest - 65_535 - 16 >= MIN_PIECE


@calm
@given(left=link_limits, right=link_limits)
def test_agreement_is_the_smaller_of_each(left: LinkLimits, right: LinkLimits) -> None:
    """Two ends agree on the same limits whichever of them decides, and neither is exceeded."""
    agreed = left.agree(right)
    assert agreed == right.agree(left)
    for item in fields(LinkLimits):
        pair = (getattr(left, item.name), getattr(right, item.name))
        assert getattr(agreed, item.name) == min(pair)


def test_an_excess_is_a_typed_error() -> None:
    """An excess names the limit and both numbers; the limit itself is none."""
    check_limit("depth", 64, 64, "levels")
    with pytest.raises(
        LimitError, match="limit 'depth' exceeded: expected at most 64 levels, got 65"
    ):
        check_limit("depth", 64, 65, "levels")
