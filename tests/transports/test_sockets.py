"""Whole transfers over TCP, TLS and unix sockets, and what can happen to a cable, a port and a path."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from streamoff.errors import (
    SourceFailedError,
    TransferError,
    UnreachableError,
    UsageError,
)
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.runtime.pool import POOL_BYTES
from streamoff.runtime.publishing import Transaction
from streamoff.runtime.resources import LANDING_THREADS
from streamoff.tensors.layout import plan
from streamoff.tensors.sources import Source, StateDictSource
from streamoff.tensors.views import Views
from streamoff.transports import accepting, dialling
from streamoff.transports.sockets import HostPort, TcpTransport, UnixTransport
from streamoff.types import CHUNK_BYTES, MIB, Address, OutcomeStatus, Ref, Slot
from streamoff.wire.frames import Ping

from ..runtime.world import (
    Attempt,
    ComputedSource,
    Gate,
    assert_pattern,
    assert_same,
    disk,
    files,
    in_memory,
    memory,
    pattern,
    state_dict,
    tasks,
)
from .real import (  # noqa: F401 - a fixture among them
    Cable,
    Consortium,
    Net,
    cable,
    closing,
    connected,
    every_loop,
    settled,
)

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_leaks")]

SERVER, SITE = Address("server"), Address("site-1")
OPENING_FRAMES = 64 * 1024
"""Hellos, headers and the like, generously."""


def offer(site: BaseEndpoint, source: Source, to: str = "server") -> tuple[Transaction, Ref]:
    """Publish one payload for one receiver."""
    tx = site.publish([source], [Slot(secrets.token_bytes(16), Address(to))])
    return tx, tx.refs(0)[0]


async def idle(*endpoints: BaseEndpoint) -> None:
    """Wait until nothing is under way, as it must be soon."""

    def busy(endpoint: BaseEndpoint) -> object:
        found, resources = endpoint.statistics(), endpoint.resources
        open_here = found.downloads.active or found.publisher.open or found.publisher.streams
        return open_here or resources.pool.lent or resources.active

    await settled(lambda: not any(map(busy, endpoints)))


# --- transfers ----------------------------------------------------------------------------------


async def test_a_payload_is_the_same_at_the_other_end(net: Net, scratch):
    """To disk and to memory, both ways over one link, from memory and from a computed source, bit for bit."""
    tensors = state_dict(11)
    async with connected(net) as (server, site), open_job("job", server, scratch=scratch) as job:
        tx, ref = offer(site, StateDictSource(tensors))
        assert_same(await job.download(ref, disk(job)), tensors)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED

        async with anyio.create_task_group() as group:
            attempts = [Attempt() for _ in range(3)]
            sources: list[Source] = [
                StateDictSource(tensors),
                ComputedSource(9 * MIB + 1),
                StateDictSource(tensors),
            ]
            refs = [offer(site, sources[0])[1], offer(site, sources[1])[1]]
            refs.append(offer(server, sources[2], to="site-1")[1])
            for end, attempt, one in zip((server, server, site), attempts, refs, strict=True):
                group.start_soon(
                    attempt.run, partial(end.run_transfer, end.transfer(one, memory()))
                )
        for attempt in attempts:
            assert attempt.state is not None, attempt.error
        assert_same(attempts[0].state, tensors)  # type: ignore[arg-type]
        assert_pattern(attempts[1].state)  # type: ignore[arg-type]
        assert_same(attempts[2].state, tensors)  # type: ignore[arg-type]
        await idle(server, site)


class Sparse:
    """A payload of gigabytes that has no bytes but those of its small tensors; the large ones are zeros."""

    blocking = False

    def __init__(self) -> None:
        large, larger = 2**31 + 1, 2**32 + 1
        self.layout = plan(
            [
                ("a", "U8", (large,)),
                ("b", "U8", (100_000,)),
                ("c", "U8", (larger,)),
                ("d", "U8", (100_001,)),
            ]
        )
        self._zeros = memoryview(bytes(CHUNK_BYTES))

    def small(self, name: str) -> bytes:
        return pattern(ord(name), ord(name) + self.layout.by_name[name].nbytes).tobytes()

    def views(self, start: int, stop: int) -> Views:
        out = bytearray(self._zeros[: stop - start])
        at = self.layout.data_start
        places = [(0, self.layout.header)]
        places += [(at + self.layout.by_name[name].start, self.small(name)) for name in ("b", "d")]
        for at, data in places:
            low, high = max(start, at), min(stop, at + len(data))
            if low < high:
                out[low - start : high - start] = data[low - at : high - at]
        return (memoryview(out),)

    def read_into(self, start: int, buffer: memoryview) -> None:
        raise AssertionError

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


async def test_a_payload_for_memory_is_received_into_its_tensors(net: Net):
    """Only the first chunk, which brings the layout along, passes through a buffer."""
    tensors = state_dict(21)
    async with connected(net) as (server, site):
        tx, ref = offer(site, StateDictSource(tensors))
        assert_same(await server.run_transfer(server.transfer(ref, memory())), tensors)
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        assert server.resources.pool.peak == 1


async def test_offsets_beyond_two_and_four_gibibytes_are_exact(unix: Net, tmp_path):
    """Tensors that lie behind 2**31 + 1 and 2**32 + 1 bytes of others arrive to the last byte."""
    async with connected(unix) as (server, site), open_job("job", server, scratch=tmp_path) as job:
        source = Sparse()
        assert source.layout.by_name["b"].start > 2**31
        assert source.layout.by_name["d"].start > 2**32
        _, ref = offer(site, source)
        state = await job.download(ref, disk(job, ["b", "d"]))
        for name in ("b", "d"):
            assert state.tensor(name).numpy().tobytes() == source.small(name)
        assert site.statistics().publisher.bytes_served < 2 * CHUNK_BYTES


async def taking_a_thread(free: threading.Event) -> None:
    """Hold a thread of the default limiter."""
    await anyio.to_thread.run_sync(free.wait)


async def test_user_code_that_fills_the_default_threads_holds_nothing_up(unix: Net):
    """While every thread of the program's own limiter is taken, transfers go on, on no more threads than their own."""
    free = threading.Event()
    at_once: list[int] = []
    working = threading.Semaphore(1000)

    def land(_: int) -> None:
        with working:
            at_once.append(1000 - working._value)
            time.sleep(0.001)

    async with connected(unix) as (server, site), anyio.create_task_group() as group:
        limiter = anyio.to_thread.current_default_thread_limiter()
        try:
            for _ in range(int(limiter.total_tokens)):
                group.start_soon(taking_a_thread, free)
            await settled(lambda: limiter.available_tokens == 0)
            attempts = [Attempt() for _ in range(12)]
            async with anyio.create_task_group() as downloads:
                for attempt in attempts:
                    _, ref = offer(site, ComputedSource(2 * MIB))
                    terms = Terms(landing=in_memory(write=land))
                    downloads.start_soon(
                        attempt.run, partial(server.run_transfer, server.transfer(ref, terms))
                    )
            for attempt in attempts:
                assert attempt.state is not None, attempt.error
            assert 1 <= max(at_once) <= LANDING_THREADS
        finally:
            free.set()


async def test_slow_sources_do_not_starve_control(unix: Net):
    """Thirty-two downloads whose sources take their time in threads all finish, and a message passes meanwhile."""
    gate = Gate()
    async with connected(unix) as (server, site), tasks(gate) as group:
        attempts = [Attempt() for _ in range(32)]
        for attempt in attempts:
            _, ref = offer(site, ComputedSource(200_000, gate))
            group.start_soon(
                attempt.run, partial(server.run_transfer, server.transfer(ref, memory()))
            )
        await gate.reached()
        inbox = server.mailbox.subscribe("beat")
        site.mailbox.post(SERVER, "beat", (memoryview(b"1"),))
        assert (await anext(inbox)).sender == SITE
        assert not any(attempt.over.is_set() for attempt in attempts)
        gate.open()
        for attempt in attempts:
            await attempt.over.wait()
            assert attempt.state is not None, attempt.error
        inbox.close()


# --- bounded ------------------------------------------------------------------------------------


async def test_a_receiver_that_lands_slowly_holds_its_source_back(net: Net):
    """While a landing stands still, what its source has got rid of is bounded, however large the payload."""
    gate = Gate()
    async with connected(net) as (server, site), tasks(gate) as group:
        tx, ref = offer(site, ComputedSource(256 * MIB))
        terms = Terms(landing=in_memory(write=gate))
        attempt = Attempt()
        group.start_soon(attempt.run, partial(server.run_transfer, server.transfer(ref, terms)))
        await gate.reached()
        await anyio.sleep(0.3)
        window = 9 * CHUNK_BYTES
        assert site.statistics().publisher.bytes_served <= window
        assert server.resources.pool.used <= POOL_BYTES
        attempt.scope.cancel()
        gate.open()
        await attempt.over.wait()
        assert (await tx.wait()).status is OutcomeStatus.FAILED
        await idle(server, site)


# --- cables -------------------------------------------------------------------------------------


@asynccontextmanager
async def cabled(net: Net) -> AsyncIterator[tuple[BaseEndpoint, BaseEndpoint, Cable]]:
    """A server and a site with a cable between them."""
    async with (
        BaseEndpoint("server", transports=[net.server("server")]) as server,
        cable(net.places["server"], net.directory) as line,
    ):
        transport = net.client("site-1", instead={"server": line.place})
        async with BaseEndpoint("site-1", transports=[transport], seed=1) as site:
            await site.connect("server")
            yield server, site, line


async def test_a_cut_cable_costs_what_was_under_way(net: Net, scratch):
    """Cut in the middle and mended, a download resumes by itself, and no landed range travels twice."""
    async with (
        cabled(net) as (server, site, line),
        open_job("job", server, scratch=scratch) as job,
    ):
        nbytes = 64 * MIB
        tx, ref = offer(site, ComputedSource(nbytes))
        told: list[int] = []
        landed_at_cut = 0

        async def mend() -> None:
            nonlocal landed_at_cut
            await line.reached.wait()
            landed_at_cut = told[-1]
            await settled(lambda: not server.statistics().links)
            line.mend()

        line.cut_after(52 * MIB)
        async with anyio.create_task_group() as group:
            group.start_soon(mend)
            state = await job.download(ref, disk(job, progress=lambda n, _: told.append(n)))
        assert_pattern(state)
        assert line.connections == 2
        assert told == sorted(told)
        assert landed_at_cut > 8 * MIB
        under_way = 9 * CHUNK_BYTES
        assert site.statistics().publisher.bytes_served <= ref.size + under_way
        assert (await tx.wait()).status is OutcomeStatus.COMPLETED
        await idle(server, site)


async def test_a_restarted_peer_ends_what_its_former_life_had_open(net: Net):
    """A new instance behind an address ends the downloads and the slots of the old one at once."""
    async with connected(net, "site-1") as (server, old):
        gate = Gate()
        tx, _ = offer(server, ComputedSource(9 * MIB), to="site-1")
        async with tasks(gate) as group:
            _, ref = offer(old, ComputedSource(64 * MIB, gate))
            attempt = Attempt()
            group.start_soon(
                attempt.run, partial(server.run_transfer, server.transfer(ref, memory()))
            )
            stuck = Attempt()
            [mine] = tx.refs(0)
            terms = Terms(landing=in_memory(write=gate))
            group.start_soon(stuck.run, partial(old.run_transfer, old.transfer(mine, terms)))
            await gate.reached()
            await settled(lambda: server.publisher.statistics().streams)
            async with BaseEndpoint("site-1", transports=[net.client("site-1")]) as new:
                await new.connect("server")
                await attempt.over.wait()
                assert isinstance(attempt.error, SourceFailedError)
                assert "restarted" in str(attempt.error)
                assert (await tx.wait()).status is OutcomeStatus.FAILED
            gate.open()
            stuck.scope.cancel()
            await stuck.over.wait()


def cancel_at(attempt: Attempt, nbytes: int, landed: int, _: int) -> None:
    """Cancel when more has landed."""
    if landed > nbytes:
        attempt.scope.cancel()


def set_at(event: anyio.Event, nbytes: int, landed: int, _: int) -> None:
    """Say that more has landed."""
    if landed > nbytes:
        event.set()


async def test_a_cancelled_transfer_leaves_the_link_in_order(net: Net):
    """Cancelled in the middle of chunks, over and over, a transfer leaves no byte of its own in the next one."""
    async with connected(net) as (server, site):
        for number in range(5):
            _, ref = offer(site, ComputedSource(40 * MIB))
            attempt = Attempt()
            terms = memory(progress=partial(cancel_at, attempt, number * 3 * MIB))
            await attempt.run(partial(server.run_transfer, server.transfer(ref, terms)))
            assert attempt.cancelled
            tensors = state_dict(1, seed=number)
            _, ref = offer(site, StateDictSource(tensors))
            assert_same(await server.run_transfer(server.transfer(ref, memory())), tensors)
        assert server.statistics().links == 1
        await idle(server, site)


async def test_a_peer_that_goes_away_in_the_middle_leaves_no_file(net: Net, scratch):
    """A source that closes early ends the download with a typed error; nothing appears under a final name."""
    async with BaseEndpoint("server", transports=[net.server("server")]) as server:
        async with open_job("job", server, scratch=scratch) as job:
            attempt = Attempt()
            async with anyio.create_task_group() as group:
                transport = net.client("site-1")
                async with BaseEndpoint("site-1", transports=[transport]) as site:
                    await site.connect("server")
                    await settled(lambda: server.statistics().links)
                    _, ref = offer(site, ComputedSource(256 * MIB))
                    half = anyio.Event()
                    terms = disk(job, progress=partial(set_at, half, 8 * MIB))
                    group.start_soon(attempt.run, partial(job.download, ref, terms))
                    await half.wait()
                await attempt.over.wait()
            assert isinstance(attempt.error, TransferError)
            assert not [name for name in files(scratch) if name.endswith(".safetensors")]
        assert files(scratch) == []


# --- places -------------------------------------------------------------------------------------


def test_places_are_read_and_written():
    """A place is a host and a port, with brackets around an IPv6 address; anything else is refused."""
    for text in ("localhost:80", "10.0.0.1:65535", "[::1]:0", "[fe80::1%eth0]:9"):
        assert str(HostPort.parse(text)) == text
    for text in ("", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "host:²"):
        with pytest.raises(UsageError):
            HostPort.parse(text)


def test_plain_tcp_leaves_the_machine_only_when_told_so():
    """Without TLS only loopback is allowed, for listening and for dialling, unless it is allowed explicitly."""
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        TcpTransport(listen=HostPort(host, 0), peers={"server": HostPort(host, 1)})
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org"):
        with pytest.raises(UsageError, match="unencrypted"):
            TcpTransport(listen=HostPort(host, 0))
        with pytest.raises(UsageError, match="unencrypted"):
            TcpTransport(peers={"server": HostPort(host, 1)})
        TcpTransport(peers={"server": HostPort(host, 1)}, plain_anywhere=True)


async def test_who_cannot_be_reached_is_said(tcp: Net, unix: Net):
    """An unknown peer, a closed port, a missing or stale socket: each is an UnreachableError with the place."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = HostPort("127.0.0.1", free.getsockname()[1])
    stale = unix.directory / "stale"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(stale))
    for transport in (
        TcpTransport(),
        UnixTransport(),
        TcpTransport(peers={"server": closed}),
        TcpTransport(peers={"server": HostPort("host.invalid", 1)}, plain_anywhere=True),
        UnixTransport(peers={"server": unix.directory / "missing"}),
        UnixTransport(peers={"server": stale}),
    ):
        async with BaseEndpoint("site-1", transports=[transport]) as site:
            with pytest.raises(UnreachableError) as caught:
                await site.connect("server")
            assert "server" in str(caught.value)


async def test_every_address_of_a_host_is_tried(tcp: Net):
    """A name that stands for several addresses is reached at the one that answers."""
    async with BaseEndpoint("server", transports=[tcp.server("server")]) as server:
        peers = {"server": HostPort("localhost", tcp.places["server"].port)}
        async with BaseEndpoint("site-1", transports=[TcpTransport(peers=peers)]) as site:
            await site.connect("server")
            assert server.statistics().links or site.statistics().links


async def test_ipv6_works_as_well():
    """A server on ::1 is found there, and its place is told with brackets."""
    transport = TcpTransport(listen=HostPort("::1", 0))
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with BaseEndpoint("server", transports=[transport]):
        assert transport.place is not None
        assert str(transport.place).startswith("[::1]:")
        peers = {"server": transport.place}
        async with BaseEndpoint("site-1", transports=[TcpTransport(peers=peers)]) as site:
            await site.connect("server")
    assert transport.place is None


async def test_a_port_is_taken_once_and_free_at_once_afterwards(tcp: Net):
    """A second server on a port is refused; after the first has gone, with links open, the port is free."""
    transport = tcp.server("server")
    place = tcp.places["server"]
    for _ in range(3):
        async with BaseEndpoint("server", transports=[transport]):
            with pytest.raises(UsageError, match="cannot listen"):
                async with BaseEndpoint("other", transports=[TcpTransport(listen=place)]):
                    pass
            async with BaseEndpoint("site-1", transports=[tcp.client("site-1")]) as site:
                await site.connect("server")


async def test_a_socket_file_is_private_and_goes_with_its_server(unix: Net):
    """The file has the mode asked for, whatever the umask, which is left alone; it is removed at the end."""
    for mode in (0o600, 0o660):
        path = unix.directory / f"m{mode:o}"
        former = os.umask(0)
        try:
            async with BaseEndpoint(
                "server", transports=[UnixTransport(listen=path, mode=mode)]
            ) as _:
                assert stat.S_IMODE(path.stat().st_mode) == mode
                assert os.umask(0) == 0
        finally:
            os.umask(former)
        assert not path.exists()


async def test_a_socket_that_nobody_listens_on_is_replaced_and_nothing_else(unix: Net):
    """A stale file is replaced; a live socket, a file and a directory at the path are refused and stay."""
    path = unix.directory / "s"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    async with BaseEndpoint("server", transports=[UnixTransport(listen=path)]) as server:
        with pytest.raises(UsageError, match="in use"):
            async with BaseEndpoint("other", transports=[UnixTransport(listen=path)]):
                pass
        peers = {"server": path}
        async with BaseEndpoint("site-1", transports=[UnixTransport(peers=peers)]) as site:
            await site.connect("server")
            await settled(lambda: server.statistics().links)
    for make in (Path.touch, Path.mkdir):
        make(path)
        with pytest.raises(UsageError, match="in use"):
            async with BaseEndpoint("server", transports=[UnixTransport(listen=path)]):
                pass
        assert path.exists()
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(UsageError, match="at most 100 bytes"):
        UnixTransport(listen=unix.directory / ("x" * 100))
    with pytest.raises(UsageError, match="cannot listen"):
        async with BaseEndpoint(
            "server", transports=[UnixTransport(listen=unix.directory / "no" / "s")]
        ):
            pass


async def test_a_server_removes_no_socket_but_its_own(unix: Net):
    """A server whose file was replaced by another server's leaves that one alone when it goes."""
    path = unix.directory / "s"
    async with BaseEndpoint("server", transports=[UnixTransport(listen=path)]):
        path.unlink()
        with closing(socket.socket(socket.AF_UNIX)) as _, socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    assert path.is_socket()


async def test_a_full_queue_of_a_unix_socket_is_waited_for(unix: Net):
    """A listener that does not accept for a while is dialled until it does."""
    path = unix.directory / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        first = socket.socket(socket.AF_UNIX)
        first.connect(str(path))
        with closing(first):
            transport = UnixTransport(peers={"server": path})
            async with anyio.create_task_group() as group:
                dialled: list[object] = []

                async def dial() -> None:
                    link = await transport.dial(SITE, SERVER)
                    dialled.append(link)
                    await link.send(Ping(id=1, reply=False), lambda: iter(()))
                    await link.aclose()

                group.start_soon(dial)
                await anyio.sleep(0.05)
                assert not dialled
                listener.accept()[0].close()
                other, _ = await anyio.to_thread.run_sync(listener.accept)
                await settled(lambda: dialled)
                assert await anyio.to_thread.run_sync(other.recv, 1) == b"\xf5"
                other.close()


async def test_dialling_can_be_given_up_at_any_point(tcp: Net, monkeypatch):
    """A dial that is cancelled while it looks up, connects or shakes hands leaves no descriptor."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = HostPort("127.0.0.1", listener.getsockname()[1])
        held = [socket.socket() for _ in range(4)]
        with closing(*held):
            for one in held:
                one.setblocking(False)
                one.connect_ex((place.host, place.port))
            identity = tcp.consortium.identity("site-1")
            for transport in (
                TcpTransport(peers={"server": place}),
                TcpTransport(peers={"server": place}, tls=identity),
                TcpTransport(peers={"server": HostPort("localhost", place.port)}),
            ):
                for seconds in (0, 0.001, 0.02):
                    with anyio.move_on_after(seconds):
                        link = await transport.dial(SITE, SERVER)
                        await link.aclose()


# --- descriptors --------------------------------------------------------------------------------


def in_a_process(script: str, *arguments: object) -> str:
    """Run a script in a process of its own; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_without_descriptors_goes_on_when_there_are_some(short_path: Path):
    """When descriptors run out nothing is accepted, one line says so, links live on, and later all is well."""
    said = in_a_process(
        """
        import logging, resource, socket, sys
        from pathlib import Path
        import anyio
        from streamoff.runtime.endpoint import BaseEndpoint
        from streamoff.transports.sockets import UnixTransport

        lines = []
        class Collect(logging.Handler):
            def emit(self, record):
                lines.append(record.getMessage())
        logging.getLogger("streamoff").addHandler(Collect())

        async def main():
            path = Path(sys.argv[1]) / "s"
            def site(name):
                return BaseEndpoint(name, transports=[UnixTransport(peers={"server": path})])
            async with BaseEndpoint("server", transports=[UnixTransport(listen=path)]) as server, site("site-1") as first:
                await first.connect("server")
                used = len(list(Path("/proc/self/fd").iterdir()))
                resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, 4096))
                hogs = []
                try:
                    while True:
                        hogs.append(socket.socket())
                except OSError:
                    pass
                hogs.pop().close()
                one = socket.socket(socket.AF_UNIX)
                one.setblocking(False)
                one.connect(str(path))
                with anyio.fail_after(30):
                    while not any("no connection can be accepted" in line for line in lines):
                        await anyio.sleep(0.01)
                await anyio.sleep(0.2)
                assert len(lines) < 10, lines
                inbox = server.mailbox.subscribe("t")
                first.mailbox.post(server.address, "t", ())
                await anext(inbox)
                for hog in hogs:
                    hog.close()
                one.close()
                async with site("site-2") as second:
                    await second.connect("server")
                    with anyio.fail_after(10):
                        while server.statistics().links < 2:
                            await anyio.sleep(0.01)
        anyio.run(main)
        print("well")
        """,
        short_path,
    )
    assert said == "well\n"


def test_many_updates_need_few_descriptors(short_path: Path):
    """With 64 descriptors in all, hundreds of landed updates are held lazily and read; few are ever open."""
    said = in_a_process(
        """
        import resource, secrets, sys
        from pathlib import Path
        import anyio, torch
        from streamoff.runtime.endpoint import BaseEndpoint
        from streamoff.runtime.downloading import Terms
        from streamoff.runtime.jobs import open_job
        from streamoff.tensors.sources import StateDictSource
        from streamoff.transports.sockets import UnixTransport
        from streamoff.types import Slot

        async def main():
            base = Path(sys.argv[1])
            peers = {"server": base / "s"}
            async with (
                BaseEndpoint("server", transports=[UnixTransport(listen=base / "s")]) as server,
                BaseEndpoint("site-1", transports=[UnixTransport(peers=peers)]) as site,
                open_job("job", server, scratch=base) as job,
            ):
                await site.connect("server")
                before = len(list(Path("/proc/self/fd").iterdir()))
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
                most, held = 0, []
                async def one(number):
                    nonlocal most
                    tensors = {"w": torch.full((3000,), float(number))}
                    tx = site.publish([StateDictSource(tensors)], [Slot(secrets.token_bytes(16))])
                    terms = Terms(landing=lambda layout: job.landing(layout))
                    held.append((number, await job.download(tx.refs(0)[0], terms)))
                    most = max(most, len(list(Path("/proc/self/fd").iterdir())) - before)
                for start in range(0, 500, 25):
                    async with anyio.create_task_group() as group:
                        for number in range(start, start + 25):
                            group.start_soon(one, number)
                assert len(held) == 500
                for number, state in held:
                    assert state.tensor("w")[0] == number
                print(most < 20, most)
        anyio.run(main)
        """,
        short_path,
    )
    assert said.startswith("True"), said


def test_constants_fit_together():
    """Handshakes that wait are fewer than a listener's queue, and make room well before a dial is given up."""
    assert accepting.MAX_HANDSHAKES < accepting.BACKLOG
    rounds = accepting.BACKLOG / accepting.MAX_HANDSHAKES
    assert accepting.HASTE_SECONDS * rounds < dialling.CONNECT_SECONDS
