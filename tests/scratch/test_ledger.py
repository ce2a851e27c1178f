"""Accounting for the bytes of a job."""

import gc
import pickle
import threading
import weakref
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from streamoff.errors import NoSpaceError, QuotaExceededError, UsageError
from streamoff.scratch.ledger import Charge, Ledger
from streamoff.scratch.space import free_space

from ..disks import tmpfs

pytestmark = pytest.mark.core


def unknown() -> int | None:
    """A file system that does not tell its room."""
    return None


def test_charges_add_up_and_releases_come_off_once() -> None:
    """Used is what is charged now, peak the most there ever was; a second release changes nothing."""
    ledger = Ledger(None, unknown)
    one, two = ledger.charge(100, "one"), ledger.charge(50, "two")
    assert (ledger.used, ledger.peak, one.nbytes) == (150, 150, 100)
    one.release()
    one.release()
    assert (ledger.used, ledger.peak, one.nbytes) == (50, 150, 0)
    two.release()
    assert (ledger.used, ledger.peak) == (0, 150)


def test_the_quota_is_exact_and_its_error_has_the_numbers() -> None:
    """The last byte fits; one more is refused with needed, used and quota, and charges nothing."""
    ledger = Ledger(100, unknown)
    first = ledger.charge(60, "site-1")
    ledger.charge(40, "site-2")
    with pytest.raises(QuotaExceededError, match="site-3") as refused:
        ledger.charge(1, "site-3")
    error = pickle.loads(pickle.dumps(refused.value))
    assert (error.needed, error.used, error.quota) == (1, 100, 100)
    assert ledger.used == 100
    ledger.charge(0, "nothing")
    first.release()
    ledger.charge(60, "site-3")


def test_jobs_do_not_share_a_quota() -> None:
    """One job's full ledger leaves another job's alone."""
    full, other = Ledger(10, unknown), Ledger(10, unknown)
    full.charge(10, "a")
    other.charge(10, "b")
    with pytest.raises(QuotaExceededError):
        full.charge(1, "c")


def test_too_little_space_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """A charge beyond the room of a real small file system names what is needed and what is free."""
    with tmpfs(tmp_path / "ram", "size=64k") as mount:
        ledger = Ledger(None, lambda: free_space(mount))
        ledger.charge(64 * 1024, "fits").release()
        with pytest.raises(NoSpaceError, match="an update") as refused:
            ledger.charge(64 * 1024 + 1, "an update")
        assert (refused.value.needed, refused.value.free) == (65537, 65536)
        assert ledger.used == 0


def test_unknown_space_is_not_zero_space(tmp_path: Path) -> None:
    """On a file system that reports no size, any charge passes and the write decides."""
    with tmpfs(tmp_path / "ram", kind="ramfs") as mount:
        assert free_space(mount) is None
        assert Ledger(None, lambda: free_space(mount)).charge(2**50, "big").nbytes == 2**50


def test_no_space_at_all_still_admits_an_empty_charge() -> None:
    """Zero bytes fit on a full disk."""
    assert Ledger(None, lambda: 0).charge(0, "nothing").nbytes == 0


def test_what_is_promised_to_one_is_not_free_for_another() -> None:
    """Of a disk that does not change yet, each charge takes its part until the disk itself says so."""
    free = 100
    ledger = Ledger(None, lambda: free)
    first = ledger.charge(60, "first")
    assert ledger.room() == (None, 40)
    with pytest.raises(NoSpaceError, match="second") as refused:
        ledger.charge(41, "second")
    assert (refused.value.needed, refused.value.free) == (41, 40)
    free = 40
    first.taken()
    first.taken()
    assert ledger.room() == (None, 40)
    second = ledger.charge(40, "second")
    assert ledger.room() == (None, 0)
    second.release()
    second.taken()
    free = 100
    first.release()
    assert ledger.room() == (None, 100)


def test_room_is_what_the_quota_and_the_disk_leave() -> None:
    """What is left of both is told apart, and less than nothing is nothing."""
    free = 30
    ledger = Ledger(100, lambda: free)
    ledger.charge(30, "x")
    assert ledger.room() == (70, 0)
    free = 10
    assert ledger.room() == (70, 0)


def test_releases_are_counted() -> None:
    """One who waits sees that something was given back, and that a second release gave nothing."""
    ledger = Ledger(100, unknown)
    one, two = ledger.charge(60, "one"), ledger.charge(0, "two")
    one.taken()
    assert ledger.releases == 0
    one.release()
    one.release()
    two.release()
    assert ledger.releases == 1


@pytest.mark.parametrize("quota", [0, -1, True])
def test_a_quota_that_is_none_is_refused(quota: int) -> None:
    """A quota is a positive number of bytes, or absent."""
    with pytest.raises(UsageError, match="quota"):
        Ledger(quota, unknown)


@pytest.mark.parametrize("nbytes", [-1, True])
def test_a_charge_that_is_no_size_is_refused(nbytes: int) -> None:
    """A charge is a number of bytes."""
    ledger = Ledger(None, unknown)
    with pytest.raises(UsageError, match="charge"):
        ledger.charge(nbytes, "x")
    assert ledger.used == 0


def test_a_release_in_a_finaliser_does_not_block() -> None:
    """A charge released by the garbage collector while its thread holds the ledger's lock is counted."""

    class Owner:
        def __init__(self, charge: Charge) -> None:
            weakref.finalize(self, charge.release)

    ledger = Ledger(None, unknown)
    owner = Owner(ledger.charge(10, "x"))
    with ledger._lock:
        del owner
        gc.collect()
    assert ledger.used == 0


def test_threads_never_exceed_the_quota_together() -> None:
    """With many threads charging and releasing, the quota holds at every moment and nothing is lost."""
    ledger = Ledger(100, unknown)
    barrier = threading.Barrier(8)
    refusals: list[int] = []

    def work() -> None:
        barrier.wait()
        refused = 0
        for _ in range(300):
            try:
                charge = ledger.charge(30, "x")
            except QuotaExceededError:
                refused += 1
            else:
                charge.taken()
                charge.release()
        refusals.append(refused)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refusals) == 8
    assert ledger.used == 0
    assert 30 <= ledger.peak <= 100
    assert ledger.room() == (100, None)


@given(st.lists(st.tuples(st.sampled_from("crt"), st.integers(0, 60)), max_size=40))
def test_the_account_balances_after_any_history(history: list[tuple[str, int]]) -> None:
    """Whatever was charged, taken and released: used is the sum of what is held, within the quota."""
    ledger = Ledger(100, lambda: 100)
    held: list[Charge] = []
    for action, amount in history:
        if action == "c":
            try:
                held.append(ledger.charge(amount, "x"))
            except QuotaExceededError:
                assert sum(charge.nbytes for charge in held) + amount > 100
        elif held and action == "r":
            held[amount % len(held)].release()
        elif held:
            held[amount % len(held)].taken()
        assert ledger.used == sum(charge.nbytes for charge in held) <= ledger.peak <= 100
