"""What a test, or any stretch of a program, left behind: tasks, threads, descriptors, mappings, scratch directories.

Two snapshots are compared by identity: what is there now and was not there before has leaked, unless it is known to
stay for a reason. Descriptors and mappings are read from ``/proc`` and not checked where there is none.
"""

import asyncio
import functools
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from streamoff.scratch.lease import Owner
from streamoff.scratch.names import LEASE, RootName

__all__ = ["STAYING_THREADS", "LeakCheck", "leaving_no_tasks"]

STAYING_THREADS: Final[Mapping[str, str]] = {
    "Trio thread ": "trio keeps idle worker threads for ten seconds, for all runs of the process",
    "streamoff-janitor": "one per process, for its whole life",
}
"""Beginnings of the names of threads that may stay, and why."""

_Found = dict[Hashable, str]


class LeakCheck:
    """Compares what there is now with what there was when this was made.

    Made inside a running event loop it also looks at that loop's tasks, and is then to be asked inside the same loop.

    Args:
        scratch: A directory where every new entry is a leak, for example the test's own temporary directory. In the
            default scratch directory, which others use too, only the job roots of this process are looked at.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        self._scratch = scratch
        self._before = self._look()

    def leaks(self) -> list[str]:
        """Describe what is there and was not there before, most telling first; collects garbage first."""
        gc.collect()
        return [
            f"{kind}: {text}"
            for kind, found in self._look().items()
            for key, text in found.items()
            if key not in self._before[kind]
        ]

    def settle(self, patience: float = 2.0) -> list[str]:
        """Describe what is still there after threads have had time to end and files to be removed; blocks.

        Args:
            patience: Real seconds, at most; nothing is waited for once nothing has leaked.

        Returns:
            As `leaks`.
        """
        deadline = time.monotonic() + patience
        while (leaks := self.leaks()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return leaks

    def _look(self) -> dict[str, _Found]:
        return {
            "task": dict(_tasks()),
            "thread": dict(_threads()),
            "descriptor": dict(_descriptors()),
            "mapping": dict(_mappings()),
            "scratch": dict(self._scratch_entries()),
        }

    def _scratch_entries(self) -> Iterator[tuple[Hashable, str]]:
        if self._scratch is not None:
            for path in self._scratch.iterdir():
                yield path, str(path)
        for path in Path(tempfile.gettempdir()).iterdir():
            if RootName.parse(path.name) and _is_ours(path):
                yield path, str(path)


def leaving_no_tasks(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Wrap an async test so that it fails when tasks it started outlive it.

    Args:
        test: A coroutine function, of whatever plugin and backend.

    Returns:
        A coroutine function of the same signature. What the test itself raises goes first.
    """

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        before = dict(_tasks())
        await test(*args, **kwargs)
        leaked: list[str] = []
        for _ in range(_STEPS_TO_END):
            leaked = [text for task, text in _tasks() if task not in before]
            if not leaked:
                return
            await _step()
        raise AssertionError("the test left tasks running:\n  " + "\n  ".join(leaked))

    return checked


_STEPS_TO_END: Final = 10
"""Loop iterations that a cancelled task gets: its end takes a few of them, and no time."""


async def _step() -> None:
    if _in_trio():
        await sys.modules["trio"].lowlevel.checkpoint()
    else:
        await asyncio.sleep(0)


def _in_trio() -> bool:
    return "trio" in sys.modules and sys.modules["trio"].lowlevel.in_trio_task()


def _tasks() -> Iterator[tuple[Hashable, str]]:
    """Yield the tasks of the running loop, if there is one, apart from the running one."""
    if _in_trio():
        trio = sys.modules["trio"]
        todo = [trio.lowlevel.current_root_task()]
        while todo:
            task = todo.pop()
            todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
            if task is not trio.lowlevel.current_task():
                yield task, task.name
        return
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return
    for each in tasks - {asyncio.current_task()}:
        yield each, f"{each.get_name()} ({getattr(each.get_coro(), '__qualname__', '?')})"


def _threads() -> Iterator[tuple[Hashable, str]]:
    for thread in threading.enumerate():
        idle_in_pool = thread in getattr(thread, "idle_workers", ())  # anyio's, until the loop ends
        if not idle_in_pool and not thread.name.startswith(tuple(STAYING_THREADS)):
            yield thread, f"{thread.name}{' (daemon)' if thread.daemon else ''}"


def _descriptors() -> Iterator[tuple[Hashable, str]]:
    try:
        entries = list(Path("/proc/self/fd").iterdir())
    except FileNotFoundError:
        return
    for entry in entries:
        try:
            target = entry.readlink()
        except FileNotFoundError:  # the one that read the listing
            continue
        yield (entry.name, target), f"{entry.name} -> {target}"


def _mappings() -> Iterator[tuple[Hashable, str]]:
    """Yield files of job roots that are mapped into memory, removed ones included."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return
    for line in maps.splitlines():
        _, _, path = line.partition("/")
        if any(RootName.parse(part) for part in Path(path).parts):
            yield line.split(maxsplit=1)[0], f"/{path}"


def _is_ours(root: Path) -> bool:
    try:
        owner = Owner.parse((root / LEASE).read_bytes())
    except OSError:
        return False
    return owner is not None and owner.askable and owner.pid == os.getpid()
