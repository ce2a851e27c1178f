"""Waiting for what another thread is about to do: for as long as it takes, within a bound."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

__all__ = ["soon"]

PATIENCE_SECONDS: Final = 30.0


def soon(condition: Callable[[], object], patience: float = PATIENCE_SECONDS) -> bool:
    """Whether something that a thread has to do yet comes true.

    A worker thread lets go of what it had in hand a moment after its caller has the result, a collection of
    garbage that runs in another thread makes ours a no-op, and what a finaliser frees goes through the
    janitor's thread. So what was let go is gone soon, not at once.

    Blocks the event loop, and time stands still there: for what the loop itself has to do, wait in the loop.

    Args:
        condition: Looked at after a collection of garbage, again and again.
        patience: Seconds, real time, after which it is a defect.
    """
    give_up_at = time.monotonic() + patience
    while True:
        gc.collect()
        if condition():
            return True
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.001)
