"""The vocabulary: validated where it is made, and sets of ranges that behave like sets of bytes."""

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, strategies as st

from streamoff.errors import LimitError, UsageError
from streamoff.types import Address, Budgets, ByteRange, RangeSet, Ref, Slot

TICKET = bytes(16)
BOUNDS = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)
RANGES = BOUNDS.map(lambda pair: ByteRange(pair[0], pair[1]))


def covered(ranges: RangeSet) -> set[int]:
    """The bytes of a set, one by one."""
    return {at for item in ranges for at in range(item.start, item.stop)}


@pytest.mark.parametrize("text", ["site-1", "server.job_7.trainer", "a" * 64, "0"])
def test_addresses_are_segments_joined_by_dots(text: str) -> None:
    """A valid address is itself, and making it again gives the same object."""
    address = Address(text)
    assert address == text
    assert Address(address) is address


@pytest.mark.parametrize(
    "text", ["", ".", "a..b", "a.", "-a", "a b", "ä", "a" * 65, ".".join("abc" * 90), "a/b", "a\n"]
)
def test_other_text_is_no_address(text: str) -> None:
    """Anything else is refused where it enters."""
    with pytest.raises(UsageError, match="not an address"):
        Address(text)


def test_an_address_covers_itself_and_what_lies_below() -> None:
    """Prefixes count by segment, not by letter."""
    site = Address("site-1")
    assert site.covers("site-1")
    assert site.covers("site-1.job-7")
    assert not site.covers("site-10")
    assert site.parent is None
    assert site.child("job-7").parent == site


@given(st.lists(RANGES, max_size=8), st.lists(RANGES, max_size=8))
def test_sets_of_ranges_are_sets_of_bytes(mine: list[ByteRange], theirs: list[ByteRange]) -> None:
    """Union, difference, size and membership agree with sets of single bytes; ranges stay disjoint."""
    added = RangeSet()
    for item in mine:
        added = added.add(item)
    assert added == RangeSet.of(mine)
    wanted = RangeSet.of(theirs)
    assert covered(added.missing(wanted)) == covered(wanted) - covered(added)
    assert added.nbytes == len(covered(added))
    assert all(added.covers(item) for item in mine)
    flat = [bound for item in added for bound in item]
    assert flat == sorted(set(flat))


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2)])
def test_a_range_has_its_bounds_in_order(bounds: tuple[int, int]) -> None:
    """Negative and reversed bounds are refused."""
    with pytest.raises(UsageError, match="byte range"):
        ByteRange(*bounds)


def test_ranges_can_be_copied_and_pickled() -> None:
    """Errors carry ranges across processes."""
    item = ByteRange(3, 5)
    assert copy.deepcopy(item) == item
    assert pickle.loads(pickle.dumps(item)) == item


@pytest.mark.parametrize(
    "fields",
    [{"id": ""}, {"id": "x" * 65}, {"id": "a\n"}, {"ticket": b""}, {"size": 7}, {"size": 2**63}],
)
def test_a_ref_is_checked_where_it_is_made(fields: dict[str, Any]) -> None:
    """Ids, tickets and sizes out of their bounds are refused."""
    good: dict[str, Any] = {"source": Address("a"), "id": "r1", "ticket": TICKET, "size": 8}
    Ref(**good)
    with pytest.raises(UsageError):
        Ref(**{**good, **fields})


def test_a_ticket_is_not_shown() -> None:
    """Logs and errors that show a ref or a slot do not give its ticket away."""
    secret = b"0123456789abcdef"
    assert "0123" not in repr(Ref(Address("a"), "r1", secret, 8))
    assert "0123" not in repr(Slot(secret))


@pytest.mark.parametrize(
    "fields",
    [
        {"stall": 0},
        {"idle": float("nan")},
        {"hold": float("inf")},
        {"acquire": True},
        {"settle": "1"},
        {"confirm": (5.0,)},
        {"backoff": 2.0},
        {"backoff": [2.0, 4.0]},
        {"backoff": (2.0, -4.0)},
    ],
)
def test_a_budget_is_a_finite_number_of_seconds(fields: dict[str, Any]) -> None:
    """Anything else is refused by name."""
    with pytest.raises(UsageError, match=next(iter(fields))):
        Budgets(**fields)


def test_the_producer_outlasts_the_receivers_retries() -> None:
    """A producer that would give up a receiver that still tries is refused; the bound is exact."""
    schedule = Budgets().retry_schedule
    assert schedule == 4 * 20 + (2 + 4 + 8) + 30
    with pytest.raises(UsageError, match="retry schedule"):
        Budgets(idle=schedule)
    assert Budgets(idle=schedule + 1).idle == schedule + 1
    with pytest.raises(LimitError, match="backoff"):
        Budgets(backoff=(1.0,) * 17, idle=1e6)
