"""The thread that removes directories, and the queue that finalisers may use."""

import gc
import logging
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest

from streamoff.activity import at_work
from streamoff.scratch.janitor import JANITOR

from ..disks import tmpfs
from .helpers import in_child

pytestmark = pytest.mark.core

LONG = 60.0


def tree(path: Path) -> Path:
    """A directory with one file in it."""
    path.mkdir()
    (path / "payload.safetensors").write_bytes(b"x" * 8192)
    return path


def test_directories_are_removed_in_order_and_counted(tmp_path: Path) -> None:
    """Each queued directory goes, its callback is called then, and the counts say so."""
    before = JANITOR.statistics()
    order: list[str] = []

    def note(path: Path) -> None:
        order.append(f"{path.name}{path.exists()}")

    for name in "abc":
        path = tree(tmp_path / name)
        JANITOR.reclaim(path, partial(note, path))
    assert JANITOR.idle(LONG)
    after = JANITOR.statistics()
    assert order == ["aFalse", "bFalse", "cFalse"]
    assert after.removed - before.removed == 3
    assert after.nbytes - before.nbytes >= 3 * 8192
    assert (after.pending, after.failed) == (0, before.failed)


def test_one_daemon_thread_however_often_it_is_started() -> None:
    """There is one janitor thread in a process, and it does not keep the process alive."""
    JANITOR.start()
    JANITOR.start()
    ours = [thread for thread in threading.enumerate() if thread.name == "streamoff-janitor"]
    assert len(ours) == 1
    assert ours[0].daemon


def test_waiting_for_a_path_tells_whether_it_is_gone(tmp_path: Path) -> None:
    """A removed or absent path is true; one that resists is false, and is remembered with the reason."""
    JANITOR.reclaim(tmp_path / "absent")
    assert JANITOR.wait(tmp_path / "absent", LONG)
    file = tmp_path / "file"
    file.touch()
    called: list[bool] = []
    JANITOR.reclaim(file, lambda: called.append(True))
    assert not JANITOR.wait(file, LONG)
    assert JANITOR.statistics().failures[-1][0] == file
    assert called == []
    assert file.exists()


def test_a_wait_that_is_too_short_is_false(tmp_path: Path) -> None:
    """While an errand before it holds the thread, waiting ends at its time with false."""
    blocked = threading.Event()
    JANITOR.reclaim(tree(tmp_path / "a"), lambda: blocked.wait(LONG))
    later = tree(tmp_path / "b")
    JANITOR.reclaim(later)
    assert not JANITOR.wait(later, 0.01)
    assert JANITOR.statistics().pending == 2
    blocked.set()
    assert JANITOR.wait(later, LONG)


def test_a_failing_callback_does_not_end_the_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in a callback is logged with its path, and the next errand is done."""

    def fail() -> None:
        raise RuntimeError("boom")

    with caplog.at_level(logging.ERROR):
        JANITOR.reclaim(tree(tmp_path / "a"), fail)
        JANITOR.reclaim(tree(tmp_path / "b"))
        assert JANITOR.wait(tmp_path / "b", LONG)
    assert [str(tmp_path / "a") in record.getMessage() for record in caplog.records] == [True]


def test_errands_count_as_work_until_they_are_done(tmp_path: Path) -> None:
    """From the moment it is queued until it is done, an errand keeps virtual time from jumping."""
    assert JANITOR.idle(LONG)
    before = at_work()
    blocked = threading.Event()
    JANITOR.reclaim(tree(tmp_path / "a"), lambda: blocked.wait(LONG))
    assert at_work() == before + 1
    blocked.set()
    assert JANITOR.idle(LONG)
    assert at_work() == before


def test_the_queue_can_be_used_while_any_lock_is_held(tmp_path: Path) -> None:
    """A finaliser that runs while its thread holds the janitor's or the logging lock does not block."""

    class Owner:
        def __init__(self, path: Path) -> None:
            weakref.finalize(self, JANITOR.reclaim, path)

    JANITOR.start()
    handlers = logging.getLogger().handlers
    owner = Owner(tree(tmp_path / "a"))
    for handler in handlers:
        handler.acquire()
    try:
        with JANITOR._lock:
            del owner
            gc.collect()
    finally:
        for handler in handlers:
            handler.release()
    assert JANITOR.wait(tmp_path / "a", LONG)


def test_garbage_cycles_in_many_threads_free_everything(tmp_path: Path) -> None:
    """Owners in reference cycles, collected in whatever thread, all reach the queue."""

    class Owner:
        def __init__(self, path: Path) -> None:
            self.cycle = self
            weakref.finalize(self, JANITOR.reclaim, path)

    def churn(n: int) -> None:
        for m in range(20):
            Owner(tree(tmp_path / f"{n}-{m}"))
            if m % 5 == 0:
                gc.collect()

    threads = [threading.Thread(target=churn, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert JANITOR.idle(LONG)
    assert list(tmp_path.iterdir()) == []


def test_what_an_errand_referred_to_is_let_go(tmp_path: Path) -> None:
    """When the janitor is idle it keeps neither the callback nor what that refers to."""

    class Big:
        def done(self) -> None:
            """Be a callback."""

    big = Big()
    watch = weakref.ref(big)
    JANITOR.reclaim(tree(tmp_path / "a"), big.done)
    del big
    assert JANITOR.idle(LONG)
    assert watch() is None


def test_a_forked_child_has_a_janitor_of_its_own(tmp_path: Path) -> None:
    """A child inherits no errands and no counts, and can start and use its own thread."""
    blocked = threading.Event()
    kept = tree(tmp_path / "kept")
    JANITOR.reclaim(tree(tmp_path / "first"), lambda: blocked.wait(LONG))
    JANITOR.reclaim(kept)

    def child() -> None:
        statistics = JANITOR.statistics()
        assert (statistics.removed, statistics.pending) == (0, 0)
        JANITOR.reclaim(tree(tmp_path / "mine"))
        assert JANITOR.wait(tmp_path / "mine", LONG)
        assert kept.exists()

    assert in_child(child) == 0
    assert kept.exists()
    blocked.set()
    assert JANITOR.wait(kept, LONG)


def test_a_fork_while_the_thread_is_being_started_does_not_block_the_child() -> None:
    """A lock that another thread held at the fork is a fresh one in the child."""
    with JANITOR._lock:
        assert in_child(JANITOR.start) == 0


def test_a_janitor_that_was_not_started_keeps_errands_for_later(tmp_path: Path) -> None:
    """Queueing starts no thread and counts no work; starting it does what is queued."""

    def child() -> None:  # a new process has a new janitor
        JANITOR.reclaim(tree(tmp_path / "a"))
        assert (threading.active_count(), at_work()) == (1, 0)
        assert JANITOR.statistics().pending == 1
        assert JANITOR.wait(tmp_path / "a", LONG)

    assert in_child(child) == 0


def test_a_process_removes_what_is_queued_before_it_ends(tmp_path: Path) -> None:
    """Leaving the interpreter normally right after queueing leaves nothing on disk."""
    for n in range(20):
        tree(tmp_path / f"{n}")
    script = (
        "import sys; from pathlib import Path; from streamoff.scratch.janitor import JANITOR;"
        "JANITOR.start(); [JANITOR.reclaim(path) for path in Path(sys.argv[1]).iterdir()]"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_stays_busy_is_given_up_and_reported(tmp_path: Path) -> None:
    """A mount in a directory is retried a bounded number of times; once it is gone, so is the rest."""
    before = JANITOR.statistics().failed
    busy = tree(tmp_path / "busy")
    with tmpfs(busy / "mounted"):
        JANITOR.reclaim(busy)
        assert not JANITOR.wait(busy, LONG)
        assert JANITOR.statistics().failed == before + 1
        assert not (busy / "payload.safetensors").exists()
    JANITOR.reclaim(busy)
    assert JANITOR.wait(busy, LONG)


def test_failures_are_remembered_up_to_a_bound(tmp_path: Path) -> None:
    """Only the last 16 failures are kept, however many there were."""
    files = [tmp_path / f"{n}" for n in range(20)]
    for file in files:
        file.touch()
        JANITOR.reclaim(file)
    assert JANITOR.idle(LONG)
    failures = JANITOR.statistics().failures
    assert [path for path, _ in failures] == files[-16:]


def test_pending_work_survives_a_slow_disk(tmp_path: Path) -> None:
    """Queueing returns at once although the thread is busy; nothing is lost."""
    blocked = threading.Event()
    JANITOR.reclaim(tmp_path / "none", lambda: blocked.wait(LONG))
    for n in range(100):
        JANITOR.reclaim(tree(tmp_path / f"{n}"))
    assert JANITOR.statistics().pending >= 100
    blocked.set()
    assert JANITOR.idle(LONG)
    assert list(tmp_path.iterdir()) == []
    assert JANITOR.statistics().pending == 0
