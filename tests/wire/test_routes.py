"""Frames find their way, loops end, and nobody speaks for others."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from streamoff.types import Address
from streamoff.wire.frames import Pull
from streamoff.wire.routes import choose, forwarded, may_follow, may_speak

from .samples import ROUTE, calm

pytestmark = pytest.mark.core


def address(text: str | None) -> Address | None:
    """An address, or None."""
    return Address(text) if text else None


@pytest.mark.parametrize(
    ("to", "links", "uplink", "came_from", "expected"),
    [
        ("site-1", ["site-1", "site-2"], None, None, "site-1"),
        ("site-1.job-7.trainer", ["site-1"], None, None, "site-1"),
        ("site-1.job-7.trainer", ["site-1", "site-1.job-7"], None, None, "site-1.job-7"),
        ("site-10", ["site-1"], None, None, None),
        ("site-9", ["site-1"], "root", None, "root"),
        ("site-9", [], None, None, None),
        ("root", ["root", "site-1"], "root", None, "root"),
        ("relay.gone", ["site-1"], "root", None, None),
        ("relay.here.deep", ["relay.here"], "root", "root", "relay.here"),
        ("site-9", ["site-1"], "root", "root", None),
        ("site-1.gone", ["site-1"], "root", "site-1", None),
        ("site-9", ["site-1"], "root", "site-1", "root"),
    ],
)
def test_the_longest_prefix_wins(
    to: str, links: list[str], uplink: str | None, came_from: str | None, expected: str | None
) -> None:
    """A frame takes the most specific link, else the uplink, never back, and never up for what is below me."""
    chosen = choose(
        Address(to),
        set(map(Address, links)),
        address(uplink),
        me=Address("relay"),
        came_from=address(came_from),
    )
    assert chosen == expected


_names = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(
    lambda x: Address(".".join(x))
)


@calm
@given(to=_names, links=st.lists(_names), uplink=st.none() | _names, me=_names)
def test_a_choice_is_a_link(
    to: Address, links: list[Address], uplink: Address | None, me: Address
) -> None:
    """What is chosen is a link or the uplink, and no link covers the target more closely."""
    chosen = choose(to, links, uplink, me=me)
    closest = max((len(link) for link in links if link.covers(to)), default=0)
    if closest:
        assert chosen in links
        assert chosen is not None
        assert chosen.covers(to)
        assert len(chosen) == closest
    else:
        assert chosen in {uplink, None}


def test_hops_run_out() -> None:
    """Each endpoint that forwards takes a hop; a frame without hops is not forwarded, so loops end."""
    frame: Pull | None = Pull(**ROUTE, hops=2, stream=1, start=0, stop=1)
    seen = []
    while frame is not None:
        seen.append(frame)
        frame = forwarded(frame)
    assert [item.hops for item in seen] == [2, 1, 0]
    assert {(item.to, item.sender, item.stream) for item in seen} == {(*ROUTE.values(), 1)}


@pytest.mark.parametrize(
    ("sender", "peers", "good"),
    [
        ("site-1", ["site-1"], True),
        ("site-1.job-7.trainer", ["site-1"], True),
        ("site-1", ["site-0", "site-1"], True),
        ("site-2", ["site-1"], False),
        ("site-10", ["site-1"], False),
        ("site-1", ["site-1.job-7"], False),
        ("relay", ["site-1"], False),
        ("relay.below", ["relay.below"], True),
        ("relay", ["relay"], False),
        ("site-1", [], False),
    ],
)
def test_a_downlink_speaks_for_itself_and_below(
    sender: str, peers: list[str], *, good: bool
) -> None:
    """A downlink carries frames of its own addresses and what lies below them, and of nobody else."""
    spoken = may_speak(
        Address(sender), me=Address("relay"), uplink=False, peers=map(Address, peers)
    )
    assert spoken == good


@pytest.mark.parametrize("sender", ["site-1.job-7", "site-1.job-7.trainer"])
def test_a_downlink_above_me_does_not_speak_for_me(sender: str) -> None:
    """Even a peer whose address is above mine cannot speak for me or for what lies below me."""
    me = Address("site-1.job-7")
    assert not may_speak(Address(sender), me=me, uplink=False, peers=[Address("site-1")])
    assert may_speak(Address("site-1.job-8"), me=me, uplink=False, peers=[Address("site-1")])


@pytest.mark.parametrize(
    ("sender", "good"),
    [("server", True), ("site-2.job-7", True), ("site-1", False), ("site-1.job-7", False)],
)
def test_the_uplink_speaks_for_all_but_mine(sender: str, *, good: bool) -> None:
    """The uplink carries frames of everybody except me and what lies below me."""
    assert may_speak(Address(sender), me=SITE, uplink=True) == good


SITE = Address("site-1")


@pytest.mark.parametrize(
    ("source", "sender", "me", "uplink", "good"),
    [
        ("site-2", "server", "site-1", True, True),
        ("site-1.trainer", "server", "site-1", True, False),
        ("site-2", "site-2", "server", False, True),
        ("site-2.trainer", "site-2", "server", False, True),
        ("site-3", "site-2", "server", False, False),
        ("site-1.trainer-2", "site-1", "site-1.trainer", True, True),
        ("site-1.trainer.child", "site-1", "site-1.trainer", True, True),
        ("site-1.trainer", "site-1.trainer", "site-1.trainer", True, False),
    ],
)
def test_a_ref_is_followed_only_where_its_sender_may_point(
    source: str, sender: str, me: str, *, uplink: bool, good: bool
) -> None:
    """A message cannot make me pull from a source that its link may not speak for, unless an ancestor vouches."""
    follows = may_follow(
        Address(source),
        sender=Address(sender),
        me=Address(me),
        uplink=uplink,
        peers=[Address(sender)],
    )
    assert follows == good
