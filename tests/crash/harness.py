"""Kill, start again, and compare: nothing of the dead stays, and nothing else goes."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Final

from streamoff.scratch.lease import State
from streamoff.scratch.reaper import reclaim, survey
from tests.crash import victims
from tests.crash.children import Child, Pipe
from tests.crash.moments import Moment, draw
from tests.crash.scene import Scene

__all__ = ["Harness", "Summary"]

OPERATIONS: Final = 120
"""File operations of one whole life of a job, and a few of the next."""
SECONDS: Final = 0.25
"""What one whole life takes, and a little of the next."""
KILLS: Final = {"job": 14, "two jobs": 2, "reaper": 2, "beside a forked child": 2}
"""What is killed, to how often."""
STARTS: Final = {"open_job": 12, "two open_jobs": 4, "scratch gc": 2}
"""What starts next, to how often."""


@dataclass(slots=True)
class Summary:
    """What a run did and found.

    Args:
        seed: Of all choices.
        kills: Processes killed.
        killed: Kind of victim to how many.
        moments: How the moment was chosen, to how often, where there was a choice.
        started: Kind of the next start to how often.
        roots: Dead roots that were found and reclaimed.
        reclaimed_bytes: Disk space of what was in them.
        half_made: Directories that got no lease; they go after ten minutes.
        seconds: All of it.
        left_bytes: In scratch after the next start, strangers and neighbours apart.
        left_entries: The same as entries; half made ones count if they outlive their ten minutes.
    """

    seed: int
    kills: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    started: Counter[str] = field(default_factory=Counter)
    roots: int = 0
    reclaimed_bytes: int = 0
    half_made: int = 0
    seconds: float = 0.0
    left_bytes: int = 0
    left_entries: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing was left."""
        return not (self.left_bytes or self.left_entries)

    def to_json(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            one.name: dict(value)
            if isinstance(value := getattr(self, one.name), Counter)
            else value
            for one in fields(self)
        }


class Harness:
    """One run in an empty directory.

    Args:
        place: The directory.
        kills: How many processes to kill.
        seed: Of what, when and how.
        tell: Called with a line of progress.
    """

    def __init__(self, place: Path, kills: int, seed: int, tell: Callable[[str], object]) -> None:
        self._scene = Scene(place)
        self._wanted = kills
        self._chance = random.Random(seed)
        self._tell = tell
        self.summary = Summary(seed)

    def run(self) -> Summary:
        """Kill, start, compare, again and again, beside a neighbour who must not notice.

        Raises:
            AssertionError: Something that is not dead was touched, or something failed that should not.
        """
        begun = time.monotonic()
        told, said = Pipe(), Pipe()
        hold = partial(victims.hold_a_job, self._scene.scratch, said.into, told.out)
        neighbour = Child(hold)
        try:
            self._scene.neighbours.add(said.line())
            while self.summary.kills < self._wanted:
                self._once()
        finally:
            os.write(told.into, b"\n")
            _expect(neighbour.wait(), 0, "the neighbour")
        _expect(self._scene.left(), [], "the neighbour's root")
        self.summary.seconds = time.monotonic() - begun
        return self.summary

    def _once(self) -> None:
        kind = _choose(self._chance, KILLS)
        moments = {
            "job": self._kill_job,
            "two jobs": self._kill_two_jobs,
            "reaper": self._kill_reaper,
            "beside a forked child": self._kill_beside_child,
        }[kind]()
        summary = self.summary
        summary.killed[kind] += 1
        dead = self._look()
        summary.roots += len(dead)
        summary.reclaimed_bytes += self._scene.nbytes(dead)
        self._start()
        self._compare()
        if summary.kills % 10 == 0 or summary.kills >= self._wanted:
            self._tell(
                f"kill {summary.kills} of {self._wanted}: {kind}, {' and '.join(moments)}; "
                f"{summary.roots} roots with {summary.reclaimed_bytes / 2**20:.1f} MiB reclaimed, "
                f"{summary.left_bytes} bytes in {summary.left_entries} entries left"
            )

    # --- killing ----------------------------------------------------------------------------------

    def _victim(self, call: Callable[[], object]) -> tuple[Child, Moment]:
        moment = draw(self._chance, OPERATIONS, SECONDS)
        self.summary.moments["by operation" if moment.operation else "by the clock"] += 1
        self.summary.kills += 1
        return Child(call, moment, self._scene.scratch), moment

    def _job(self) -> tuple[Child, Moment]:
        backend = self._chance.choice(["asyncio", "trio"])
        return self._victim(partial(victims.run_jobs, self._scene.scratch, backend))

    @staticmethod
    def _end(*victims_: tuple[Child, Moment]) -> list[str]:
        for child, moment in victims_:
            _expect(child.wait(), -signal.SIGKILL, f"a victim killed at {moment}")
        return [str(moment) for _, moment in victims_]

    def _kill_job(self) -> list[str]:
        return self._end(self._job())

    def _kill_two_jobs(self) -> list[str]:
        return self._end(self._job(), self._job())

    def _kill_reaper(self) -> list[str]:
        """It dies while it removes what a job left that died before."""
        first = self._kill_job()
        return first + self._end(self._victim(partial(victims.run_reapers, self._scene.scratch)))

    def _kill_beside_child(self) -> list[str]:
        """A child that was forked in a job outlives it: the root is the child's to read until it ends."""
        said = Pipe()
        owner = Child(partial(victims.fork_in_a_job, self._scene.scratch, said.into))
        said.close_mine()
        root, child = said.line().split()
        owner.kill()
        self.summary.kills += 1
        _expect(owner.wait(), -signal.SIGKILL, "the owner")
        _expect(self._states().get(root), State.LIVE, "a root whose owner's child lives")
        _expect(root in {path.name for path in reclaim(self._scene.scratch).kept}, True, root)
        os.kill(int(child), signal.SIGKILL)
        said.wait_closed()
        return ["once the child was there"]

    # --- looking and starting ---------------------------------------------------------------------

    def _states(self) -> dict[str, State]:
        return {one.path.name: one.judgement.state for one in survey(self._scene.scratch)}

    def _look(self) -> list[Path]:
        """What the victims left: dead, all of it, unless it was half made."""
        states, left = self._states(), self._scene.left()
        for path in left:
            wanted = State.LIVE if self._scene.half_made(path) else State.DEAD
            _expect(states.get(path.name), wanted, f"what {path} is taken for")
        return left

    def _start(self) -> None:
        """The next start, of some kind."""
        kind = _choose(self._chance, STARTS)
        self.summary.started[kind] += 1
        scratch = self._scene.scratch
        if kind == "scratch gc":
            dead = {path.name for path in self._scene.left() if not self._scene.half_made(path)}
            listed = self._scene.command("ls")
            found = {Path(item["path"]).name for item in listed if item["state"] == "dead"}
            _expect(found, dead, "what the list says is dead")
            report = self._scene.command("gc")
            _expect({Path(path).name for path in report["removed"]}, dead, "what was collected")
            return
        start = partial(victims.start_a_job, scratch, self._scene.may_stay)
        for child in [Child(start) for _ in range(2 if kind == "two open_jobs" else 1)]:
            _expect(child.wait(), 0, "the next start")

    def _compare(self) -> None:
        """After the start nothing dead is there, and everybody else as they were."""
        left = self._scene.left()
        half_made = [path for path in left if self._scene.half_made(path)]
        self.summary.left_bytes += self._scene.nbytes(left)
        self.summary.left_entries += len(left) - len(half_made)
        if half_made:
            self.summary.half_made += len(half_made)
            self._scene.age(half_made)
            reclaim(self._scene.scratch)
            self.summary.left_entries += len(self._scene.left())
        states = self._states()
        for name in self._scene.neighbours:
            _expect(states.get(name), State.LIVE, "the neighbour's root")
        self._scene.check_strangers()


def _choose(chance: random.Random, weights: dict[str, int]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]


def _expect(got: object, wanted: object, what: str) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: expected {wanted!r}, got {got!r}")
