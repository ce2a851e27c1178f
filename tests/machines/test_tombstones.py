"""Tombstones: a memory that is bounded in number and in time, whoever asks however often."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from streamoff.errors import UsageError
from streamoff.machines.tombstones import TOMBSTONE_SECONDS, TOMBSTONES, Tombstones

pytestmark = pytest.mark.core


def test_an_entry_is_kept_for_its_time_to_the_instant() -> None:
    """It answers just before its end and is unknown at its end; looking does not extend it."""
    book: Tombstones[str, int] = Tombstones()
    assert book.bury(100.0, "a", 1) == ()
    end = 100.0 + TOMBSTONE_SECONDS
    assert (book.get(100.0, "a"), book.get(math.nextafter(end, 0.0), "a")) == (1, 1)
    assert book.age(100.5, "a") == 0.5
    assert (book.get(end, "a"), book.age(end, "a")) == (None, None)
    assert book.next_expiry() == end
    assert book.expire(end) == (1,)
    assert len(book) == 0
    assert book.next_expiry() is None


def test_the_oldest_goes_first_when_it_is_full() -> None:
    """One entry too many forgets the oldest, and the caller is told which."""
    book: Tombstones[int, str] = Tombstones(capacity=2)
    assert book.bury(0.0, 1, "one") == ()
    assert book.bury(0.0, 2, "two") == ()
    assert book.bury(0.0, 3, "three") == ("one",)
    assert len(book) == 2


def test_burying_again_makes_an_entry_the_newest() -> None:
    """A key has one entry; the replaced value is handed back like a forgotten one."""
    book: Tombstones[int, str] = Tombstones(capacity=2)
    book.bury(0.0, 1, "one")
    book.bury(1.0, 2, "two")
    assert book.bury(2.0, 1, "uno") == ("one",)
    assert book.bury(3.0, 3, "three") == ("two",)
    assert book.get(3.0, 1) == "uno"


def test_what_is_past_its_time_goes_when_something_new_comes() -> None:
    """A book that is only ever written to forgets by itself."""
    book: Tombstones[int, str] = Tombstones(lifetime=10.0)
    book.bury(0.0, 1, "one")
    book.bury(5.0, 2, "two")
    assert book.bury(10.0, 3, "three") == ("one",)
    assert book.expire(14.9) == ()


@pytest.mark.parametrize(("capacity", "lifetime"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0)])
def test_a_book_that_cannot_remember_is_refused(capacity: int, lifetime: float) -> None:
    """No room or no time is a mistake of the caller."""
    with pytest.raises(UsageError):
        Tombstones[int, int](capacity=capacity, lifetime=lifetime)


def test_a_noisy_job_does_not_make_another_forgetful() -> None:
    """Each job has its own book; overflowing one leaves the other."""
    quiet: Tombstones[int, int] = Tombstones()
    noisy: Tombstones[int, int] = Tombstones()
    quiet.bury(0.0, 1, 1)
    for key in range(TOMBSTONES + 100):
        noisy.bury(0.0, key, key)
    assert len(noisy) == TOMBSTONES
    assert quiet.get(1.0, 1) == 1


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), max_size=60),
)
def test_it_is_a_bounded_window_of_what_was_buried(
    capacity: int, burials: list[tuple[float, int]]
) -> None:
    """After any burials it holds the newest distinct keys that are young enough, and no others."""
    book: Tombstones[int, float] = Tombstones(capacity=capacity, lifetime=10.0)
    now = 0.0
    newest: dict[int, float] = {}
    for step, key in burials:
        now += step
        newest.pop(key, None)
        newest = {old: at for old, at in newest.items() if now < at + 10.0}
        newest[key] = now
        while len(newest) > capacity:
            newest.pop(next(iter(newest)))
        book.bury(now, key, now)
        assert len(book) == len(newest)
        assert {old: book.get(now, old) for old in range(10)} == {
            old: newest.get(old) for old in range(10)
        }


def test_the_oldest_can_be_dropped_alone():
    """Dropping takes the oldest and no other, also among those of one instant, and nothing from an empty book."""
    book: Tombstones[str, int] = Tombstones()
    for number, key in enumerate("abc"):
        book.bury(5.0, key, number)
    assert book.drop_oldest() == (0,)
    assert [book.get(6.0, key) for key in "abc"] == [None, 1, 2]
    assert book.drop_oldest() + book.drop_oldest() == (1, 2)
    assert book.drop_oldest() == ()
