"""Whole frames to bytes and back."""

from __future__ import annotations

import pytest
from hypothesis import given

from streamoff.wire.codec import decode, encode
from streamoff.wire.frames import FRAMES, Frame

from .samples import SAMPLES, frames

pytestmark = pytest.mark.core


def test_samples_cover_every_type() -> None:
    """There is a sample of every frame, so that no type escapes the tests below."""
    assert tuple(type(sample) for sample in SAMPLES) == FRAMES


@pytest.mark.parametrize("frame", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_sample_survives(frame: Frame) -> None:
    """Each type of frame arrives as it was sent."""
    assert decode(*encode(frame)) == frame


@given(frame=frames)
def test_any_frame_survives(frame: Frame) -> None:
    """Whatever may be sent arrives equal, field by field, across every integer boundary."""
    assert decode(*encode(frame)) == frame
