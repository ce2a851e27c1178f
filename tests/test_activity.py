"""The count of work under way that virtual time waits for."""

import contextlib
import os
import threading

import pytest

from streamoff.activity import Work, at_work, resting, working

pytestmark = pytest.mark.core


def test_blocks_nest_and_count_until_they_are_left() -> None:
    """Each open block counts once, and an exception ends it like any other exit."""
    before = at_work()
    with working(), working():
        assert at_work() == before + 2
    assert at_work() == before
    with pytest.raises(RuntimeError, match="boom"), working():
        raise RuntimeError("boom")
    assert at_work() == before


def test_work_may_end_in_another_thread_and_only_once() -> None:
    """Work handed to another thread is counted until that thread ends it, and ends once."""
    before = at_work()
    work = Work()
    assert at_work() == before + 1
    thread = threading.Thread(target=work.end)
    thread.start()
    thread.join()
    work.end()
    assert at_work() == before


def test_no_addition_is_lost_between_threads() -> None:
    """Threads that begin and end work at the same time leave an exact count."""
    before = at_work()
    barrier = threading.Barrier(4)

    def churn() -> None:
        barrier.wait()
        for _ in range(2000):
            with working():
                pass

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_work() == before


def test_a_forked_child_starts_with_nothing_under_way() -> None:
    """A child does not inherit the work of its parent's threads, and leaving the block there is harmless."""
    with working():
        pid = os.fork()
        if pid == 0:
            os._exit(at_work())
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_work_that_waits_for_the_program_is_not_counted() -> None:
    """A resting piece of work leaves the count and comes back when it goes on, also after an error."""
    before = at_work()
    with working():
        with contextlib.suppress(RuntimeError), resting():
            assert at_work() == before
            raise RuntimeError
        assert at_work() == before + 1
