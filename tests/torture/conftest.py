"""Large libraries are loaded once and taken out of the garbage collector's rounds: every test collects."""

import asyncio.constants
import gc

import hypothesis  # noqa: F401 - it looks for referrers while it loads, which freezing hides
import pytest
import torch  # noqa: F401 - its tens of thousands of objects are what is frozen

gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def short_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let asyncio's debug mode remember one frame per handle: reading ten takes most of the time of a test."""
    monkeypatch.setattr(asyncio.constants, "DEBUG_STACK_DEPTH", 1)
