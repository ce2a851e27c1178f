"""Seeds in processes of their own: a run that hangs or dies costs its seed and no other."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from .tier import Failure, Tally, Tier, run_seeds

__all__ = ["run_in_processes"]

TELL_SECONDS = 0.25
"""How often a worker says how far it is."""


@dataclass(slots=True)
class _Worker:
    """One process, and the seeds that it has not finished."""

    process: SpawnProcess
    pipe: Connection
    current: Any
    stop: int


def run_in_processes(
    make: Callable[[], Tier], first: int, last: int, jobs: int
) -> Iterator[Tally | Failure]:
    """Run the seeds ``first`` to ``last`` in several processes.

    Args:
        make: Makes the tier; picklable.
        first: The first seed.
        last: The last seed.
        jobs: Processes, at least 1.

    Yields:
        What was counted since the last time, and failures as they come.
    """
    count = last - first + 1
    edges = [first + count * job // jobs for job in range(jobs + 1)]
    workers = [_start(make, edges[job], edges[job + 1]) for job in range(jobs)]
    try:
        while workers:
            for ready in wait([worker.pipe for worker in workers]):
                worker = next(one for one in workers if one.pipe is ready)
                try:
                    told = worker.pipe.recv()
                except EOFError:
                    workers.remove(worker)
                    yield from _buried(make, worker, workers)
                    continue
                yield from told
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def _start(make: Callable[[], Tier], first: int, stop: int) -> _Worker:
    context = mp.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    current = context.Value("q", first, lock=False)
    process = context.Process(target=_work, args=(make, first, stop, far, current))
    process.start()
    far.close()
    return _Worker(process, near, current, stop)


def _buried(make: Callable[[], Tier], worker: _Worker, workers: list[_Worker]) -> Iterator[Failure]:
    """A worker has ended: if that was not its end, its seed failed, and another goes on behind it."""
    worker.process.join()
    worker.pipe.close()
    seed = worker.current.value
    if worker.process.exitcode == 0:
        return
    tier = make()
    why = f"the process ended with {worker.process.exitcode}; its stacks are above"
    yield Failure(tier.name, seed, "a run that hangs or dies", repr(tier.draw(seed)), why)
    if seed + 1 < worker.stop:
        workers.append(_start(make, seed + 1, worker.stop))


def _work(make: Callable[[], Tier], first: int, stop: int, pipe: Connection, current: Any) -> None:
    tier, tally, told = make(), Tally(), time.monotonic()

    def seeds() -> Iterator[int]:
        for seed in range(first, stop):
            current.value = seed
            faulthandler.dump_traceback_later(tier.patience, exit=True)
            yield seed

    for _, outcome in run_seeds(tier, seeds()):
        if isinstance(outcome, Failure):
            pipe.send([outcome])
            continue
        tally.add(outcome)
        if time.monotonic() - told > TELL_SECONDS:
            pipe.send([tally])
            tally, told = Tally(), time.monotonic()
    faulthandler.cancel_dump_traceback_later()
    with suppress(BrokenPipeError):
        pipe.send([tally])
