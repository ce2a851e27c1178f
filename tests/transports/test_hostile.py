"""Peers that lie, flood, stall and trickle, over real sockets: typed ends, bounds, and nobody else disturbed.

Tests of waiting run in virtual time on unix sockets, whose bytes are there as soon as they are sent.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import secrets
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from streamoff.errors import TransferError, UnreachableError
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.link import SILENCE_SECONDS
from streamoff.runtime.pool import POOL_BYTES
from streamoff.tensors.digests import chunk_digest
from streamoff.transports import accepting, dialling
from streamoff.transports.sockets import HostPort, TcpTransport, UnixTransport
from streamoff.types import MIB, Address, Capability, Ref, Slot
from streamoff.wire.codec import PREFIX_BYTES
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
)
from streamoff.wire.limits import LinkLimits

from ..runtime.world import (
    Attempt,
    ComputedSource,
    assert_pattern,
    memory,
    settled_tasks,
)
from ..wire.hostile import forged, header_of
from .real import Consortium, settled
from .test_stream import raw

SERVER, SITE = Address("server"), Address("mallory")
ROUTE: dict[str, Any] = {"to": SERVER, "sender": SITE}


def hello(address: str = "mallory", **others: Any) -> Hello:
    """What a well-behaved peer says first."""
    return Hello(
        **{
            "address": Address(address),
            "instance": secrets.token_bytes(16),
            "capabilities": frozenset(Capability),
            "limits": LinkLimits(),
            **others,
        }
    )


def connect(path: Path) -> socket.socket:
    """A bare connection."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return sock


# --- in virtual time ----------------------------------------------------------------------------


class World:
    """A server on a unix socket, an honest site, and the way in for others."""

    def __init__(self, path: Path, server: BaseEndpoint, site: BaseEndpoint) -> None:
        self.path = path
        self.server = server
        self.site = site

    async def download(self, nbytes: int = 5 * MIB) -> float:
        """Pull something from the honest site; how long it took."""
        tx = self.site.publish([ComputedSource(nbytes)], [Slot(secrets.token_bytes(16))])
        began = anyio.current_time()
        transfer = self.server.transfer(tx.refs(0)[0], memory())
        assert_pattern(await self.server.run_transfer(transfer))
        return anyio.current_time() - began


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    """A server and an honest site that is connected."""
    path = directory / "s"
    async with (
        BaseEndpoint("server", transports=[UnixTransport(listen=path)]) as server,
        BaseEndpoint("site-1", transports=[UnixTransport(peers={"server": path})]) as site,
    ):
        await site.connect("server")
        yield World(path, server, site)


@contextmanager
def intruder(path: Path, first: bytes | None = None) -> Iterator[socket.socket]:
    """A peer by hand that has said hello, or whatever it says instead."""
    with connect(path) as sock:
        sock.sendall(raw(hello()) if first is None else first)
        sock.setblocking(False)
        yield sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed; takes what is there."""
    try:
        while True:
            if not sock.recv(65_536):
                return True
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.usefixtures("no_leaks")
async def test_who_says_half_a_hello_is_sent_away(short_path: Path):
    """A connection that says nothing, or a hello byte by byte, is closed after ten seconds."""
    async with world(short_path) as w:
        whole = raw(hello())
        with intruder(w.path, b"") as mute, intruder(w.path, b"") as slow:
            for second in range(9):
                slow.send(whole[second : second + 1])
                await anyio.sleep(1)
                assert not is_closed(mute)
                assert not is_closed(slow)
            await anyio.sleep(2)
            assert is_closed(mute)
            assert is_closed(slow)
        assert w.server.statistics().links == 1


@pytest.mark.usefixtures("no_leaks")
async def test_a_handshake_that_stands_still_is_given_up(consortium: Consortium):
    """With TLS, a dialler that says nothing is sent away after ten seconds, and a listener that says nothing is given up."""
    tls = consortium.identity("server")
    transport = TcpTransport(listen=HostPort("127.0.0.1", 0), tls=tls)
    async with BaseEndpoint("server", transports=[transport]):
        assert transport.place is not None
        with socket.create_connection((transport.place.host, transport.place.port)) as mute:
            mute.setblocking(False)
            await anyio.sleep(dialling.CONNECT_SECONDS - 0.5)
            assert not is_closed(mute)
            await anyio.sleep(1)
            assert is_closed(mute)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = {"server": HostPort("127.0.0.1", listener.getsockname()[1])}
        transport = TcpTransport(peers=peers, tls=consortium.identity("mallory"))
        async with BaseEndpoint("mallory", transports=[transport]) as site:
            began = anyio.current_time()
            with pytest.raises(UnreachableError, match="no answer in time"):
                await site.connect("server")
            assert anyio.current_time() - began == dialling.CONNECT_SECONDS


@pytest.mark.usefixtures("no_leaks")
async def test_a_thousand_half_open_connections_let_others_in(short_path: Path):
    """Behind a thousand connections that say nothing an honest one waits seconds, and descriptors stay bounded."""
    async with world(short_path) as w, contextlib.AsyncExitStack() as stack:
        before = open_descriptors()
        for _ in range(1000):
            sock = socket.socket(socket.AF_UNIX)
            stack.callback(sock.close)
            sock.setblocking(False)
            sock.connect(str(w.path))
        await settled_tasks()
        held = open_descriptors() - before - 1000
        assert held <= accepting.MAX_HANDSHAKES + 1
        began = anyio.current_time()
        peers = {"server": w.path}
        late = await stack.enter_async_context(
            BaseEndpoint("site-2", transports=[UnixTransport(peers=peers)])
        )
        await late.connect("server")
        rounds = 1000 // accepting.MAX_HANDSHAKES + 1
        assert anyio.current_time() - began <= rounds * (accepting.HASTE_SECONDS + 0.5)
        assert await w.download() < 1


@pytest.mark.usefixtures("no_leaks")
async def test_a_silent_peer_is_missed_after_fifteen_seconds(short_path: Path):
    """A peer that says hello and nothing more loses its link after 15 s; one that answers pings keeps it."""
    async with world(short_path) as w:
        with intruder(w.path) as sock:
            await settled_tasks()
            assert w.server.statistics().links == 2
            await anyio.sleep(SILENCE_SECONDS - 0.1)
            assert w.server.statistics().links == 2
            await anyio.sleep(1)
            assert w.server.statistics().links == 1
            assert is_closed(sock)
        await anyio.sleep(3600)  # nobody trains faster than that
        assert w.server.statistics().links == 1
        assert await w.download() < 1


@pytest.mark.usefixtures("no_leaks")
async def test_a_large_frame_on_a_slow_line_is_a_sign_of_life(short_path: Path):
    """A message that takes a minute to come in, with no other frame in between, keeps its link."""
    async with world(short_path) as w:
        inbox = w.server.mailbox.subscribe("t")
        body = memoryview(bytes(60_000))
        frame = Message(
            **ROUTE, kind=MessageKind.NOTIFY, topic="t", id=1, pass_through=False, body=(body,)
        )
        data = raw(frame)
        with intruder(w.path) as sock:
            for start in range(0, len(data), 1000):
                sock.send(data[start : start + 1000])
                await anyio.sleep(1)
            assert (await anext(inbox)).sender == SITE
        inbox.close()


@pytest.mark.usefixtures("no_leaks")
async def test_a_peer_that_advertises_and_never_sends_delays_nobody(short_path: Path):
    """Peers that begin chunks and stop cost the others nothing, and their own downloads a typed error."""
    async with world(short_path) as w, contextlib.AsyncExitStack() as stack:
        attempts = []
        async with anyio.create_task_group() as group:
            for number in range(12):  # more than the pool has buffers
                name = f"mallory-{number}"
                sock = stack.enter_context(intruder(w.path, raw(hello(name))))
                await settled_tasks()
                attempt = Attempt()
                ref = Ref(Address(name), "r", bytes(16), 64 * MIB)
                transfer = w.server.transfer(ref, memory())
                group.start_soon(attempt.run, lambda t=transfer: w.server.run_transfer(t))
                attempts.append(attempt)
                await settled_tasks()
                advertise(sock, name, transfer.stream)
            assert await w.download(40 * MIB) < 15
            for attempt in attempts:
                await attempt.over.wait()
                assert isinstance(attempt.error, TransferError)
        assert w.server.resources.pool.lent == 0
        assert w.server.statistics().links == 1


def advertise(sock: socket.socket, name: str, stream: int) -> None:
    """Answer an open, and begin the chunk that is asked for."""
    route: dict[str, Any] = {"to": SERVER, "sender": Address(name), "stream": stream}
    answer = Opened(
        **route, size=64 * MIB, header_bytes=100, header_digest=bytes(16), nonce=bytes(8)
    )
    body = (memoryview(bytes(4 * MIB)),)
    chunk = Chunk(**route, start=0, stop=4 * MIB, digest=chunk_digest(body, 0), body=body)
    sock.setblocking(True)
    sock.sendall(raw(answer) + raw(chunk)[:100_000])
    sock.setblocking(False)


# --- against a server in a thread ---------------------------------------------------------------


class Lines(logging.Handler):
    """Counts what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.texts.append(record.getMessage())


class Fortress:
    """A server with an honest site, in a thread of its own, so that peers can be blunt."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, w: World) -> None:
        self.portal = portal
        self.path = w.path
        self._world = w

    def download(self) -> float:
        """Pull something from the honest site, as all the while."""
        return self.portal.call(self._world.download)

    def ask(self, question: Callable[[BaseEndpoint], Any]) -> Any:
        """Ask the server something, in its loop."""
        return self.portal.call(question, self._world.server)

    def drained(self) -> None:
        """Wait until only the honest link is left and all memory is back."""
        server = self._world.server

        def busy() -> bool:
            return server.statistics().links != 1 or server.resources.pool.lent > 0

        self.portal.call(settled, lambda: not busy())

    def attack(self, data: bytes, *, greet: bool = True, patience: float = 0.05) -> bytes:
        """Send bytes after a hello, for as long as they are taken; what came back after the server's hello."""
        with connect(self.path) as sock:
            sock.settimeout(5)
            with contextlib.suppress(OSError):
                sock.sendall((raw(hello()) if greet else b"") + data)
            sock.settimeout(patience)
            answer = b""
            with contextlib.suppress(OSError):
                while got := sock.recv(65_536):
                    answer += got
            return answer


@pytest.fixture(params=["asyncio", "trio"])
def fortress(request: pytest.FixtureRequest, short_path: Path) -> Iterator[Fortress]:
    """A server in a thread, on each backend."""
    with (
        anyio.from_thread.start_blocking_portal(request.param) as portal,
        portal.wrap_async_context_manager(world(short_path)) as w,
    ):
        yield Fortress(portal, w)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What streamoff logs, at info and above."""
    handler, logger = Lines(), logging.getLogger("streamoff")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


FRAMES: list[Frame] = [
    hello(),
    Ping(id=1, reply=False),
    Message(**ROUTE, kind=MessageKind.NOTIFY, topic="t", id=1, body=(memoryview(b"x"),)),
    Open(**ROUTE, stream=1, ref="r", ticket=bytes(16), names=("a", "b")),
    Opened(**ROUTE, stream=1, size=8, header_bytes=8, header_digest=bytes(16), nonce=bytes(8)),
    Pull(**ROUTE, stream=1, start=0, stop=1),
    Chunk(**ROUTE, stream=1, start=0, stop=1, digest=bytes(16), body=(memoryview(b"x"),)),
    Hold(**ROUTE, stream=1, seconds=1.0),
    Confirm(**ROUTE, stream=1, ref="r", ticket=bytes(16), nonce=bytes(8), ok=True),
    Cancel(**ROUTE, stream=1, ref="r", ticket=bytes(16)),
    Ack(**ROUTE, of=AckOf.MESSAGE, id=1),
    Notice(**ROUTE, id=1, source=SITE, refs=("r",)),
    Unreachable(**ROUTE, address=SITE, about=1, of=FrameType.PULL),
    Error(**ROUTE, of=FrameType.PULL, id=1, code=ErrorCode.GONE),
]

WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63]),
    st.floats(allow_nan=True),
    st.text(max_size=300),
    st.binary(max_size=40),
    st.lists(st.integers(0, 3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3),
)


@st.composite
def distorted(draw: st.DrawFn) -> bytes:
    """A frame with one field, its prefix or its bytes changed."""
    frame = draw(st.sampled_from(FRAMES))
    how = draw(st.sampled_from(["field", "missing", "extra", "prefix", "cut", "bytes"]))
    header = header_of(frame)
    body = (memoryview(b"x"),) if isinstance(frame, (Chunk, Message)) else ()
    if how in {"field", "missing", "extra"}:
        name = draw(st.sampled_from(sorted(header)))
        if how == "missing":
            del header[name]
        elif how == "extra":
            header[draw(st.text(max_size=5))] = draw(WILD)
        else:
            header[name] = draw(WILD)
        head, views = forged(frame.type, header, body)
        return b"".join((head, *views))
    data = bytearray(raw(frame))
    if how == "prefix":
        at = draw(st.sampled_from([0, 1, 2, 4, 8, 12]))
        size = {0: "B", 1: "B", 2: "H"}.get(at, "I")
        most = {"B": 0xFF, "H": 0xFFFF, "I": 0xFFFFFFFF}[size]
        edges = [value for value in (0, 1, 2**31 - 1, 2**31, most) if value <= most]
        value = draw(st.one_of(st.sampled_from(edges), st.integers(0, most)))
        data[at : at + struct.calcsize(size)] = struct.pack(f">{size}", value)
    elif how == "cut":
        del data[draw(st.integers(0, len(data) - 1)) :]
    else:
        at = draw(st.integers(0, len(data) - 1))
        data[at] ^= draw(st.integers(1, 255))
    return bytes(data)


@pytest.mark.real_time
def test_every_field_of_every_frame_may_lie(fortress: Fortress, lines: list[str]):
    """Whatever is wrong in whatever frame, the honest site does not notice, and nothing is left of it."""
    tried = 0

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(distorted(), min_size=1, max_size=3), st.booleans())
    def attack(frames: list[bytes], greet: bool) -> None:
        nonlocal tried
        tried += 1
        fortress.attack(b"".join(frames), greet=greet, patience=0.005)

    attack()
    assert tried > 50
    fortress.drained()
    assert fortress.download() < 30
    defects = [line for line in lines if "defect" in line or "Traceback" in line]
    assert not defects
    assert len(lines) < 150


@pytest.mark.real_time
@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01" + bytes(500),
        bytes(100_000),
        secrets.token_bytes(4096),
        raw(Ping(id=1, reply=False)),
        raw(Pull(**ROUTE, stream=1, start=0, stop=1)),
        raw(hello("server")),
        raw(hello(version=7)),
        struct.pack(">BBHIII", 0xF5, 3, 65_535, 0, 2**32 - 1, 0),
        struct.pack(">BBHIII", 0xF5, 7, 10, 1, 4096, 2**32 - 1) + bytes(4106),
    ],
    ids=["http", "tls", "zeros", "noise", "ping", "pull", "myself", "old", "huge", "endless"],
)
def test_who_does_not_greet_is_closed(fortress: Fortress, nonsense: bytes):
    """Anything but a proper hello first, and the connection is closed at once; others go on."""
    with connect(fortress.path) as sock:
        sock.sendall(nonsense)
        sock.settimeout(8)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(65_536):
                pass
    fortress.drained()
    assert fortress.download() < 30


def many(frame: Frame, count: int) -> bytes:
    """A frame over and over."""
    return raw(frame) * count


FLOODS: dict[str, Callable[[], bytes]] = {
    "pings": lambda: many(Ping(id=1, reply=False), 40_000),
    "pulls": lambda: many(Pull(**ROUTE, stream=1, start=0, stop=1), 20_000),
    "opens": lambda: b"".join(
        raw(Open(**ROUTE, stream=n, ref=f"r{n}", ticket=bytes(16))) for n in range(10_000)
    ),
    "notices": lambda: b"".join(
        raw(Notice(**ROUTE, id=n, source=SITE, refs=tuple(f"{n}-{k}" for k in range(200))))
        for n in range(1000)
    ),
    "messages": lambda: b"".join(
        raw(
            Message(
                **ROUTE,
                kind=MessageKind.NOTIFY,
                topic=f"t{n}",
                id=n,
                body=(memoryview(bytes(3000)),),
            )
        )
        for n in range(5000)
    ),
    "strangers": lambda: b"".join(
        raw(Pull(to=Address(f"nobody-{n}"), sender=SITE, stream=n, start=0, stop=1))
        for n in range(10_000)
    ),
    "through": lambda: b"".join(
        raw(Pull(to=Address("site-1"), sender=SITE, stream=n, start=0, stop=MIB))
        for n in range(10_000)
    ),
    "chunks": lambda: b"".join(
        raw(
            Chunk(
                **ROUTE,
                stream=n,
                start=0,
                stop=MIB,
                digest=bytes(16),
                body=(memoryview(bytes(MIB)),),
            )
        )
        for n in range(24)
    ),
}


@pytest.mark.real_time
@pytest.mark.parametrize("what", FLOODS)
@pytest.mark.parametrize(
    ("fortress", "reads"),
    [
        pytest.param("asyncio", True, id="asyncio, reads answers"),
        pytest.param("trio", False, id="trio, reads nothing"),
    ],
    indirect=["fortress"],
)
def test_a_flood_is_bounded(fortress: Fortress, lines: list[str], what: str, reads: bool):
    """However much of something a peer sends, and whether it reads the answers, memory, descriptors and log stay small."""
    data = FLOODS[what]()
    fortress.download()
    gc.collect()
    descriptors, memory_before = open_descriptors(), anonymous_memory()
    with connect(fortress.path) as sock:
        sock.settimeout(0.5 if not reads else 10)
        stop = threading.Event()

        def drain() -> None:
            with contextlib.suppress(OSError):
                while not stop.is_set() and sock.recv(65_536):
                    pass

        reader = threading.Thread(target=drain) if reads else None
        if reader:
            reader.start()
        with contextlib.suppress(OSError):
            sock.sendall(raw(hello()) + data)
        assert fortress.download() < 30  # meanwhile
        assert open_descriptors() <= descriptors + 2
        assert fortress.ask(lambda server: server.resources.pool.used) <= POOL_BYTES
        stop.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        if reader:
            reader.join()
    fortress.drained()
    gc.collect()
    assert anonymous_memory() - memory_before < 64 * MIB
    assert len(lines) < 60, lines[:60]


def anonymous_memory() -> int:
    """Bytes of this process that are its own."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel does not tell RssAnon")


def open_descriptors() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.real_time
def test_connections_that_come_and_go_leave_few_lines(fortress: Fortress, lines: list[str]):
    """A thousand refused connections are told in a few lines, which count the rest."""
    descriptors = open_descriptors()
    for _ in range(1000):
        with connect(fortress.path) as sock:
            sock.sendall(b"nonsense, and more of it")
    fortress.portal.call(settled, lambda: open_descriptors() <= descriptors)
    assert len(lines) < 40


@pytest.mark.real_time
@pytest.mark.parametrize("order", ["replayed", "reordered", "doubled"])
def test_frames_out_of_order_end_in_errors_and_nothing_else(fortress: Fortress, order: str):
    """A conversation that is replayed, turned round or doubled is answered with errors, or costs its link."""
    offered = fortress.ask(
        lambda server: server.publish([ComputedSource(MIB)], [Slot(bytes(16), SITE)])
    )
    [ref] = offered.refs(0)
    story = [
        Open(**ROUTE, stream=1, ref=ref.id, ticket=ref.ticket),
        Pull(**ROUTE, stream=1, start=0, stop=100),
        Hold(**ROUTE, stream=1, seconds=1.0),
        Confirm(**ROUTE, stream=1, ref=ref.id, ticket=ref.ticket, nonce=bytes(8), ok=True),
        Cancel(**ROUTE, stream=1, ref=ref.id, ticket=ref.ticket),
    ]
    frames = {
        "replayed": story * 3,
        "reordered": story[::-1],
        "doubled": [frame for frame in story for _ in range(2)],
    }[order]
    fortress.attack(b"".join(map(raw, frames)))
    fortress.drained()
    outcome = fortress.ask(lambda _: offered.outcome)
    assert outcome is not None
    assert not outcome.succeeded
    assert fortress.download() < 30


@pytest.mark.real_time
async def test_a_plain_port_survives_what_the_internet_sends(caplog: pytest.LogCaptureFixture):
    """A TCP server that is scanned, half closed and reset keeps serving its sites."""
    caplog.set_level("INFO", "streamoff")
    transport = TcpTransport(listen=HostPort("127.0.0.1", 0))
    async with BaseEndpoint("server", transports=[transport]) as server:
        place = transport.place
        assert place is not None
        for number in range(60):
            sock = socket.create_connection((place.host, place.port))
            if number % 3 == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif number % 3 == 1:
                sock.shutdown(socket.SHUT_WR)
            else:
                sock.send(b"\0" * PREFIX_BYTES)
            sock.close()
        peers = {"server": place}
        async with BaseEndpoint("site-1", transports=[TcpTransport(peers=peers)]) as site:
            await site.connect("server")
            tx = site.publish([ComputedSource(5 * MIB)], [Slot(bytes(16))])
            transfer = server.transfer(tx.refs(0)[0], memory())
            assert_pattern(await server.run_transfer(transfer))
        assert server.resources.pool.lent == 0
    assert "defect" not in caplog.text
