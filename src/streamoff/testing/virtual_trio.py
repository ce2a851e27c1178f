"""Virtual time on trio; see `streamoff.testing.virtual` for the rules."""

import math

import trio
import trio.testing

from streamoff.activity import at_work
from streamoff.runtime.threads import resting_threads
from streamoff.testing.virtual import Patience

__all__ = ["VirtualClock"]

_PROBE = 3600.0
"""Real seconds, never waited: any longer than what `trio.testing.wait_all_tasks_blocked` may ask for."""


class VirtualClock(trio.abc.Clock, trio.abc.Instrument):
    """A clock for ``trio.run(clock=...)`` that jumps to the next deadline when the run is idle.

    It starts at 0.0 with every run. A deadline expires at exactly its own time. The run loop asks it how long to wait
    only when no task can run; what ran in between it learns as an instrument of the same run.
    """

    is_virtual = True

    def __init__(self) -> None:
        self._patience = Patience()
        self._restart()

    def _restart(self) -> None:
        self._now = 0.0
        self._looked = False  # at every descriptor, since a task last ran or work last ended
        self._target: float | None = None
        self._patience.reset()

    def start_clock(self) -> None:
        """Begin a run at 0.0."""
        self._restart()
        trio.lowlevel.add_instrument(self)

    def current_time(self) -> float:
        """Return virtual seconds since the run started."""
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the real seconds to wait for events before asking again; called when no task can run."""
        if deadline <= self._now:
            return 0
        if deadline == math.inf:
            return math.inf
        if self.occupied():
            self._looked = False
            return self._patience.pause()
        self._patience.reset()
        if not self._looked:
            self._looked = True
            return 0
        self._target = deadline
        return _PROBE

    def before_io_wait(self, timeout: float) -> None:
        """Jump, unless somebody waits for the run to be idle: then the run loop has shortened the probe."""
        target, self._target = self._target, None
        if target is None or timeout != _PROBE:
            return
        self._now = target
        self._looked = False
        trio.lowlevel.current_trio_token().run_sync_soon(_wake_up, idempotent=True)

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        """Take note that something ran, so that descriptors are looked at again."""
        self._looked = False

    def occupied(self) -> bool:
        """Whether real work is under way that this run, or streamoff, waits for."""
        resting = len(resting_threads(trio.lowlevel.current_trio_token()))
        return at_work() > 0 or trio.testing.active_thread_count() > resting


def _wake_up() -> None:
    """Do nothing: being scheduled ends the run loop's wait."""
