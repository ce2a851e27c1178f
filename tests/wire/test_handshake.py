"""Who may be on the other end of a link, and what both ends can rely on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from streamoff.errors import HandshakeError
from streamoff.types import Address, Capability
from streamoff.wire.frames import PROTOCOL_VERSION, Hello
from streamoff.wire.handshake import common, judge
from streamoff.wire.limits import LinkLimits

from .samples import calm, capabilities

pytestmark = pytest.mark.core

SITE = Address("site-1")


def hello(address: str, instance: bytes = b"1", **changes: Any) -> Hello:
    """A hello of an endpoint."""
    known: dict[str, Any] = {"capabilities": frozenset(Capability), "limits": LinkLimits()}
    return Hello(address=Address(address), instance=instance * 16, **{**known, **changes})


MINE = hello("server", b"0")


def test_two_strangers_agree() -> None:
    """A first link has what both name and both accept, and supersedes nothing."""
    theirs = hello(
        "site-1", capabilities=frozenset({Capability.CANCEL}), limits=LinkLimits(channels=3)
    )
    accepted = judge(MINE, theirs)
    assert accepted.capabilities == {Capability.CANCEL}
    assert accepted.limits == LinkLimits(channels=3)
    assert not accepted.supersedes


@calm
@given(left=capabilities, right=capabilities)
def test_a_capability_counts_only_if_both_name_it(
    left: frozenset[Capability], right: frozenset[Capability]
) -> None:
    """Both ends come to the same set, and nothing is in it that one of them did not name."""
    mine, theirs = hello("a", b"0", capabilities=left), hello("b", capabilities=right)
    agreed = judge(mine, theirs).capabilities
    assert agreed == judge(theirs, mine).capabilities == common(left, right)
    assert all(item in left and item in right for item in agreed)
    assert all(item in agreed for item in Capability if item in left and item in right)


def test_the_same_instance_comes_back() -> None:
    """A reconnecting endpoint keeps its transfers."""
    assert not judge(MINE, hello("site-1"), b"1" * 16).supersedes


def test_a_new_instance_supersedes() -> None:
    """An endpoint that started anew ends what its former instance had open."""
    assert judge(MINE, hello("site-1", b"2"), b"1" * 16).supersedes


def test_a_live_instance_is_superseded_only_by_its_own_certificate() -> None:
    """Nobody takes over the address of a live endpoint with another certificate."""
    with pytest.raises(HandshakeError, match="taken by a live endpoint"):
        judge(MINE, hello("site-1", b"2"), b"1" * 16, same_certificate=False)
    assert not judge(MINE, hello("site-1", b"1"), b"1" * 16, same_certificate=False).supersedes


def test_versions_must_be_equal() -> None:
    """Another protocol version is refused with both numbers and what to do."""
    with pytest.raises(HandshakeError, match=r"expected 1, got 2.*same release"):
        judge(MINE, hello("site-1", version=PROTOCOL_VERSION + 1))


@pytest.mark.parametrize("theirs", [hello("server"), hello("site-1", b"0")])
def test_an_endpoint_does_not_talk_to_itself(theirs: Hello) -> None:
    """A link to my own address or instance is refused."""
    with pytest.raises(HandshakeError, match="my own address"):
        judge(MINE, theirs)


def test_who_was_dialled_must_answer() -> None:
    """An endpoint that answers under another address than was dialled is refused."""
    assert not judge(MINE, hello("site-1"), dialled=SITE).supersedes
    with pytest.raises(HandshakeError, match="expected site-1, got site-2"):
        judge(MINE, hello("site-2"), dialled=SITE)


@pytest.mark.parametrize(
    ("address", "certified", "good"),
    [
        ("site-1", ["site-1"], True),
        ("site-1.job-7", ["site-1"], True),
        ("site-1", ["site-0", "site-1"], True),
        ("site-10", ["site-1"], False),
        ("site-1", ["site-1.job-7"], False),
        ("site-1", [], False),
    ],
)
def test_a_certificate_covers_its_addresses(
    address: str, certified: list[str], *, good: bool
) -> None:
    """A certificate is good for its addresses and what lies below, and for nothing that merely looks alike."""
    addresses = [Address(item) for item in certified]
    if good:
        assert not judge(MINE, hello(address), certified=iter(addresses)).supersedes
    else:
        with pytest.raises(HandshakeError, match="does not cover"):
            judge(MINE, hello(address), certified=iter(addresses))
