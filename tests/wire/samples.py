"""Frames to test with: one plain sample of each type, and strategies for all of them."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import HealthCheck, settings, strategies as st

from streamoff.types import Address, Capability
from streamoff.wire.frames import (
    Ack,
    AckOf,
    Cancel,
    Chunk,
    Confirm,
    Error,
    ErrorCode,
    Frame,
    FrameType,
    Hello,
    Hold,
    Message,
    MessageKind,
    Notice,
    Open,
    Opened,
    Ping,
    Pull,
    Unreachable,
    Views,
)
from streamoff.wire.limits import LinkLimits

calm: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How properties are tested: by what holds, never by how long a busy machine takes."""

TO: Final = Address("server")
SENDER: Final = Address("site-1.job-7.trainer")
ROUTE: Final[dict[str, Any]] = {"to": TO, "sender": SENDER}
TICKET: Final = bytes(range(16))
NONCE: Final = bytes(range(8))
BOTH: Final = frozenset(Capability)


def views(*parts: bytes) -> Views:
    """A body of these pieces."""
    return tuple(map(memoryview, parts))


SAMPLES: Final[tuple[Frame, ...]] = (
    Hello(address=SENDER, instance=TICKET, capabilities=BOTH, limits=LinkLimits()),
    Ping(id=7, reply=True),
    Message(
        **ROUTE, kind=MessageKind.REQUEST, topic="round", id=3, body=views(b"tree", b"", b"more")
    ),
    Open(**ROUTE, stream=1, ref="r-1", ticket=TICKET, names=("a", "b.weight"), capabilities=BOTH),
    Opened(
        **ROUTE,
        stream=1,
        size=4096,
        header_bytes=512,
        header_digest=TICKET,
        nonce=NONCE,
        capabilities=BOTH,
    ),
    Pull(**ROUTE, stream=1, start=0, stop=4096),
    Chunk(**ROUTE, stream=1, start=100, stop=110, digest=TICKET, body=views(b"0123", b"456789")),
    Hold(**ROUTE, stream=1, seconds=5.0),
    Confirm(**ROUTE, stream=1, ref="r-1", ticket=TICKET, nonce=NONCE, ok=False, reason="disk full"),
    Cancel(**ROUTE, stream=1, ref="r-1", ticket=TICKET, reason="cancelled"),
    Ack(**ROUTE, of=AckOf.CONFIRM, id=1, status="succeeded"),
    Notice(**ROUTE, id=9, source=SENDER, refs=("r-1", "r-2"), reason="exit code -9"),
    Unreachable(**ROUTE, address=SENDER, about=3, of=FrameType.MESSAGE),
    Error(**ROUTE, of=FrameType.OPEN, id=1, code=ErrorCode.GONE, detail="settled 3 s ago"),
)

_segment = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
addresses = st.lists(_segment, min_size=1, max_size=3).map(lambda parts: Address(".".join(parts)))
EDGES: Final = (0, 1, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1)
ids = st.sampled_from(EDGES) | st.integers(0, 2**63 - 1)
sizes = st.sampled_from([edge for edge in EDGES if edge >= 8]) | st.integers(8, 2**63 - 1)
tickets = st.binary(min_size=16, max_size=16)
nonces = st.binary(min_size=8, max_size=8)
refs = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=64)
prose = st.text(st.characters(exclude_categories=["Cs"]), max_size=1024)
capabilities = st.frozensets(st.sampled_from(Capability))
bodies = st.lists(st.binary(max_size=64), max_size=5).map(lambda parts: views(*parts))
link_limits = st.builds(
    LinkLimits,
    frame=st.integers(128 * 1024, 16 * 2**20),
    message=st.integers(64 * 1024, 2**32 - 1),
    chunk=st.integers(64 * 1024, 2**32 - 1),
    names=st.integers(64 * 1024, 2**32 - 1),
    channels=st.integers(1, 1024),
)
_route: dict[str, Any] = {"to": addresses, "sender": addresses, "hops": st.integers(0, 8)}
_claim: dict[str, Any] = {"stream": ids, "ref": refs, "ticket": tickets}


@st.composite
def _openeds(draw: st.DrawFn) -> Opened:
    header, size = sorted((draw(sizes), draw(sizes)))
    made = {name: draw(strategy) for name, strategy in _route.items()}
    return Opened(
        **made,
        stream=draw(ids),
        size=size,
        header_bytes=header,
        header_digest=draw(tickets),
        nonce=draw(nonces),
        capabilities=draw(capabilities),
    )


@st.composite
def _pulls(draw: st.DrawFn) -> Pull:
    start, stop = sorted(draw(st.lists(ids, min_size=2, max_size=2, unique=True)))
    made = {name: draw(strategy) for name, strategy in _route.items()}
    return Pull(**made, stream=draw(ids), start=start, stop=stop)


@st.composite
def _chunks(draw: st.DrawFn) -> Chunk:
    body = draw(bodies.filter(lambda body: any(map(len, body))))
    nbytes = sum(map(len, body))
    start = draw(st.sampled_from([edge for edge in EDGES if edge < 2**62]))
    made = {name: draw(strategy) for name, strategy in _route.items()}
    return Chunk(
        **made,
        stream=draw(ids),
        start=start,
        stop=start + nbytes,
        digest=draw(tickets),
        body=body,
    )


frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(
        Hello,
        version=st.integers(1, 65_535),
        address=addresses,
        instance=tickets,
        capabilities=capabilities,
        limits=link_limits,
    ),
    st.builds(Ping, id=ids, reply=st.booleans()),
    st.builds(
        Message,
        **_route,
        kind=st.sampled_from(MessageKind),
        topic=prose.filter(lambda text: 0 < len(text) <= 256),
        id=ids,
        pass_through=st.booleans(),
        body=bodies,
    ),
    st.builds(
        Open,
        **_route,
        **_claim,
        names=st.none() | st.lists(prose, unique=True, max_size=8).map(tuple),
        capabilities=capabilities,
    ),
    _openeds(),
    _pulls(),
    _chunks(),
    st.builds(
        Hold,
        **_route,
        stream=ids,
        seconds=st.floats(0, 600, exclude_min=True),
    ),
    st.builds(Confirm, **_route, **_claim, nonce=nonces, ok=st.booleans(), reason=prose),
    st.builds(Cancel, **_route, **_claim, reason=prose),
    st.builds(Ack, **_route, of=st.sampled_from(AckOf), id=ids, status=prose, reason=prose),
    st.builds(
        Notice,
        **_route,
        id=ids,
        source=addresses,
        refs=st.lists(refs, unique=True, min_size=1, max_size=8).map(tuple),
        reason=prose,
    ),
    st.builds(Unreachable, **_route, address=addresses, about=ids, of=st.sampled_from(FrameType)),
    st.builds(
        Error,
        **_route,
        of=st.sampled_from(FrameType),
        id=ids,
        code=st.sampled_from(ErrorCode),
        detail=prose,
    ),
)
"""Every frame that may be sent."""
