"""Failure notices: how long the sender tries, whom the receiver believes, and what it remembers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from streamoff.errors import LimitError, UnexpectedMessageError
from streamoff.machines import notice as n
from streamoff.machines.notice import NOTICE, NoticeState
from streamoff.types import Address

from . import samples

pytestmark = pytest.mark.core

SOURCE = Address("site-1.job-7.trainer")


def play(
    until: float, events: Mapping[float, n.NoticeEvent]
) -> tuple[n.Notice, dict[float, list[str]]]:
    """Start at 0 s, let clocks fire and ``events`` happen; when each effect came out."""
    record, effects = NOTICE.step(n.Notice(samples.SERVER), n.Started(0.0))
    told = {0.0: [type(effect).__name__ for effect in effects]}
    pending = dict(events)
    while True:
        due = n.next_tick(record)
        at = min([*pending, *(() if due is None else (due,))], default=math.inf)
        if at > until:
            return record, told
        event = pending.pop(at, None) or n.classify_tick(record, at)
        assert event is not None
        assert n.classify_tick(record, math.nextafter(at, -1.0)) is None
        record, effects = NOTICE.step(record, event)
        told.setdefault(at, []).extend(type(effect).__name__ for effect in effects)


def test_a_silent_receiver_is_tried_until_the_total_budget_ends() -> None:
    """Four attempts with growing pauses, and at 10 s to the instant it is given up."""
    record, told = play(100.0, {})
    assert {at: names for at, names in told.items() if names} == {
        0.0: ["SendNotice"],
        2.25: ["SendNotice"],
        4.75: ["SendNotice"],
        7.75: ["SendNotice"],
        10.0: ["ReportNotice"],
    }
    assert record.state is NoticeState.GIVEN_UP
    assert record.reason == "no answer to 4 attempts"
    assert n.next_tick(record) is None


def test_failures_that_come_fast_use_all_attempts() -> None:
    """Where every attempt fails at once, the fourth is the last."""
    quick = {at: n.AttemptExpired(at) for at in (0.1, 0.5, 1.5)}
    record, told = play(100.0, quick)
    sends = [at for at, names in told.items() if "SendNotice" in names]
    assert sends == [0.0, 0.35, 1.0, 2.5]
    assert record.attempts == n.NOTICE_ATTEMPTS
    assert told[10.0] == ["ReportNotice"]


@pytest.mark.parametrize("at", [1.9, 2.1, 5.0, 7.8, 9.9])
def test_an_answer_to_any_attempt_counts(at: float) -> None:
    """An acknowledgement is the end, whichever attempt it answers, up to the last instant of the budget."""
    record, told = play(100.0, {at: n.Acked(at)})
    assert max(told) == at
    assert record.state is NoticeState.ACKED


def test_an_answer_ends_the_trying() -> None:
    """An acknowledgement is reported once, also when it comes between two attempts, or twice."""
    for at in (1.0, 3.1):
        record, told = play(100.0, {at: n.Acked(at), at + 1.0: n.Acked(at + 1.0)})
        assert told[at] == ["ReportNotice"]
        assert told[at + 1.0] == []
        assert (record.state, record.reason) == (NoticeState.ACKED, "")


def test_a_rejection_is_not_repeated() -> None:
    """A receiver that does not believe us is asked once; its reason is what is reported."""
    record, told = play(100.0, {1.0: n.Rejected(1.0, "not the owner")})
    assert [at for at, names in told.items() if "SendNotice" in names] == [0.0]
    assert record.reason == "not the owner"


def test_the_last_attempt_has_no_less_time_than_the_others() -> None:
    """All attempts and their pauses fit the total, with a whole wait left for the last one."""
    assert len(n.NOTICE_PAUSES) == n.NOTICE_ATTEMPTS - 1
    last = (n.NOTICE_ATTEMPTS - 1) * n.NOTICE_WAIT_SECONDS + sum(n.NOTICE_PAUSES)
    assert n.NOTICE_TOTAL_SECONDS - last >= n.NOTICE_WAIT_SECONDS


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, []), (1, [1]), (256, [256]), (600, [256, 256, 88])]
)
def test_many_refs_are_split_into_notices(count: int, sizes: list[int]) -> None:
    """Refs travel at most 256 to a notice, each once and in order, none refused and none lost."""
    refs = [f"ref-{index}" for index in range(count)]
    batches = list(n.split(refs + refs))
    assert [len(batch) for batch in batches] == sizes
    assert [ref for batch in batches for ref in batch] == refs


@pytest.mark.parametrize("origin", [SOURCE, SOURCE.parent, Address("site-1")])
def test_the_source_and_its_ancestors_are_believed(origin: Address) -> None:
    """Whoever owns the source may declare it dead; the downloads to interrupt are named."""
    book = n.NoticeBook()
    keys = book.enter(0.0, origin, SOURCE, ("ref-1", "ref-2", "ref-1"), "exit code 137")
    assert keys == ((SOURCE, "ref-1"), (SOURCE, "ref-2"))
    assert book.reason(1.0, SOURCE, "ref-1") == "exit code 137"
    assert len(book) == 2


@pytest.mark.parametrize(
    "origin",
    ["site-2", "site-10", "site", "server", "site-1.job", "site-1.job-7.trainer.child"],
)
def test_a_forged_notice_changes_nothing(origin: str) -> None:
    """Neither a sibling nor a child nor a look-alike of the owner can declare a source dead."""
    book = n.NoticeBook()
    with pytest.raises(UnexpectedMessageError, match="does not own the source"):
        book.enter(0.0, Address(origin), SOURCE, ("ref-1",), "gotcha")
    assert len(book) == 0
    assert book.reason(0.0, SOURCE, "ref-1") is None


def test_only_the_named_refs_of_the_named_source_are_dead() -> None:
    """Another ref of the source and the same ref of another source are untouched."""
    book = n.NoticeBook()
    book.enter(0.0, SOURCE, SOURCE, ("ref-1",), "killed")
    assert book.reason(0.0, SOURCE, "ref-2") is None
    assert book.reason(0.0, Address("site-2"), "ref-1") is None


@pytest.mark.parametrize("count", [0, 257])
def test_a_notice_of_no_refs_or_too_many_is_refused(count: int) -> None:
    """The limit is named and nothing is entered."""
    book = n.NoticeBook()
    refs = tuple(f"ref-{index}" for index in range(count))
    with pytest.raises(LimitError, match=f"1 to 256, got {count}"):
        book.enter(0.0, SOURCE, SOURCE, refs, "killed")
    assert len(book) == 0


def test_a_long_reason_is_cut() -> None:
    """However long the reason, what is kept is bounded."""
    book = n.NoticeBook()
    book.enter(0.0, SOURCE, SOURCE, ("ref-1",), "x" * 100_000)
    assert book.reason(0.0, SOURCE, "ref-1") == "x" * n.REASON_CHARACTERS


def test_the_book_is_bounded_in_number_and_time() -> None:
    """Old entries go when the book is full, and every entry goes at the end of its time."""
    book = n.NoticeBook(capacity=4, lifetime=10.0)
    for index in range(6):
        book.enter(float(index), SOURCE, SOURCE, (f"ref-{index}",), "killed")
    assert len(book) == 4
    assert book.reason(6.0, SOURCE, "ref-1") is None
    assert book.reason(11.9, SOURCE, "ref-2") == "killed"
    assert book.reason(12.0, SOURCE, "ref-2") is None


def test_a_flood_of_one_site_makes_nobody_forget_another() -> None:
    """However many refs a site declares dead, under whatever names below its own, the words of others stay."""
    book = n.NoticeBook(capacity=1000, lifetime=1800.0)
    for site in range(10):
        source = Address(f"site-{site}")
        book.enter(0.0, source, source, tuple(f"r{number}" for number in range(50)), "killed")
    for batch in range(100):
        liar = Address(f"liar.{batch}")
        book.enter(1.0, liar, liar, tuple(f"r{batch}-{number}" for number in range(256)), "noise")
        assert len(book) <= 1000
    for site in range(10):
        for number in range(50):
            assert book.reason(2.0, Address(f"site-{site}"), f"r{number}") == "killed"
    assert book.reason(2.0, Address("liar.99"), "r99-255") == "noise"
    assert book.reason(2.0, Address("liar.0"), "r0-0") is None


def test_many_sites_share_a_full_book() -> None:
    """Where all have the same share, each new entry costs an old one, and the newest is always there."""
    book = n.NoticeBook(capacity=100, lifetime=1800.0)
    for number in range(1000):
        source = Address(f"site-{number}")
        book.enter(float(number), source, source, ("r1",), "killed")
        assert book.reason(float(number), source, "r1") == "killed"
    assert len(book) == 100
    assert len(book._families) == 100


def test_what_is_past_its_time_makes_room_first() -> None:
    """An entry that is still good is not given up for one that is not."""
    book = n.NoticeBook(capacity=4, lifetime=10.0)
    old, new = Address("site-1"), Address("site-2")
    book.enter(0.0, old, old, ("a", "b", "c"), "old")
    book.enter(9.0, new, new, ("d",), "new")
    book.enter(11.0, new, new, ("e", "f", "g"), "new")
    assert [book.reason(11.0, new, ref) for ref in "defg"] == ["new"] * 4
    assert len(book) == 4


def test_a_repeated_notice_refreshes_the_memory() -> None:
    """The owner saying it again makes the entry the newest, with the newer reason."""
    book = n.NoticeBook(capacity=2, lifetime=10.0)
    book.enter(0.0, SOURCE, SOURCE, ("ref-1",), "first")
    book.enter(1.0, SOURCE, SOURCE, ("ref-2",), "killed")
    book.enter(2.0, SOURCE, SOURCE, ("ref-1",), "second")
    book.enter(3.0, SOURCE, SOURCE, ("ref-3",), "killed")
    assert book.reason(11.0, SOURCE, "ref-1") == "second"
    assert book.reason(4.0, SOURCE, "ref-2") is None
