"""Trust: who is believed on a TLS link, who is not, and who hears why."""

from __future__ import annotations

import datetime as dt
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import ByteReceiveStream

from streamoff.errors import (
    HandshakeError,
    LimitError,
    LinkLostError,
    PeerRefusedError,
    StreamoffError,
    UnexpectedMessageError,
    UnreachableError,
    UsageError,
)
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.pool import BufferPool
from streamoff.tensors.sources import StateDictSource
from streamoff.transports import authority
from streamoff.transports.sockets import HostPort, TcpTransport
from streamoff.transports.stream import StreamLink
from streamoff.transports.tls import (
    ANSWER_BYTES,
    BURST_BYTES,
    RECORD_BYTES,
    Identity,
    TlsStream,
    addresses_of,
    secure,
)
from streamoff.types import MIB, Address, Ref, Slot
from streamoff.wire.frames import Chunk, Ping, Pull

from ..runtime.world import assert_same, memory, state_dict
from .real import (  # noqa: F401 - a fixture among them
    Consortium,
    Net,
    connected,
    every_loop,
    link_pair,
    send,
    settled,
    socket_pair,
)
from .test_stream import assert_equal, chunk, raw, ready

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_leaks")]

SERVER = Address("server")


@asynccontextmanager
async def server_of(tls: Net) -> AsyncIterator[BaseEndpoint]:
    """A server that listens over TLS."""
    async with BaseEndpoint("server", transports=[tls.server("server")]) as server:
        yield server


def dialler(
    tls: Net, address: str, identity: Identity | None, *, expect: str = "server"
) -> BaseEndpoint:
    """An endpoint with an identity that may not be its own."""
    peers = {expect: tls.places["server"]}
    return BaseEndpoint(address, transports=[TcpTransport(peers=peers, tls=identity)])


async def refused(site: BaseEndpoint, to: str = "server") -> str:
    """Connect, which must fail at the handshake; what is said."""
    async with site:
        with pytest.raises(HandshakeError) as caught:
            await site.connect(to)
        assert site.statistics().links == 0
    return str(caught.value)


# --- certificates -------------------------------------------------------------------------------


async def test_who_is_not_believed_is_refused_and_told_why(tls: Net, tmp_path, caplog):
    """A foreign authority, an expired or premature certificate, and one of another address open no link."""
    caplog.set_level("INFO", "streamoff")
    ours = tls.consortium
    foreign = Consortium(tmp_path / "foreign")
    mixed = Identity(
        foreign.identity("site-1").certificate,
        foreign.identity("site-1").key,
        ours.identity("site-1").authority,
    )
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(days=2)
    async with server_of(tls) as server:
        # the server is not of the site's consortium: the site refuses
        said = await refused(dialler(tls, "site-1", foreign.identity("site-1")))
        assert "in certificate chain" in said
        # the site is not of the server's consortium: the server refuses, and the site hears of it
        assert "by the peer" in await refused(dialler(tls, "site-1", mixed))
        assert "by the peer" in await refused(dialler(tls, "old", ours.expired("old")))
        early = ours.identity("early", now=soon)
        assert "by the peer" in await refused(dialler(tls, "early", early))
        # believed, but not for the address that it claims
        liar = dialler(tls, "site-2", ours.identity("site-1"))
        assert "does not cover the address" in await refused(liar)
        # believed, but not who was dialled
        other = dialler(tls, "site-1", ours.identity("site-1"), expect="boss")
        assert "another endpoint answered" in await refused(other, "boss")
        assert server.statistics().links == 0
    log = caplog.text
    assert "certificate has expired" in log
    assert "not yet valid" in log
    assert "the certificate does not cover the address" in log


async def test_an_identity_cannot_issue_identities(tls: Net, tmp_path):
    """What a site signs with the key of its own certificate opens no link, also with the whole chain shown."""
    site = tls.consortium.identity("site-1")
    shutil.copy(site.certificate, tmp_path / "authority.pem")
    shutil.copy(site.key, tmp_path / "authority.key")
    forged = authority.issue(tmp_path, Address("site-2")).directory
    chain = (forged / "certificate.pem").read_bytes() + site.certificate.read_bytes()
    (forged / "certificate.pem").write_bytes(chain)
    rogue = Identity(forged / "certificate.pem", forged / "key.pem", site.authority)
    async with server_of(tls) as server:
        assert "by the peer" in await refused(dialler(tls, "site-2", rogue))
        assert server.statistics().links == 0


async def test_a_peer_without_a_certificate_or_with_an_older_protocol_is_refused(tls: Net):
    """TLS is mutual and 1.3: less is refused at once, on a socket that is closed."""
    async with server_of(tls) as server:
        place = tls.places["server"]
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        identity = tls.consortium.identity("site-1")
        older.load_cert_chain(identity.certificate, identity.key)

        def attempt(context: ssl.SSLContext) -> None:
            with (
                socket.create_connection((place.host, place.port)) as sock,
                context.wrap_socket(sock) as secured,
            ):
                secured.recv(1)

        for context in (bare, older):
            with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
                await anyio.to_thread.run_sync(attempt, context)
        assert server.statistics().links == 0


async def test_plain_and_encrypted_ends_tell_each_other_apart(tls: Net):
    """An end without TLS at one with it, and the other way round, is a typed error at once."""
    async with server_of(tls), dialler(tls, "site-1", None) as plain:
        with pytest.raises(StreamoffError) as caught:
            await plain.connect("server")
        assert isinstance(caught.value, (LinkLostError, UnreachableError)) or (
            "TLS on both sides" in str(caught.value)
        )
    transport = TcpTransport(listen=HostPort("127.0.0.1", 0))
    async with BaseEndpoint("server", transports=[transport]):
        tls.places["server"] = transport.place
        said = await refused(dialler(tls, "site-1", tls.consortium.identity("site-1")))
        assert "TLS refused" in said


async def test_a_renewed_certificate_counts_from_the_next_link_on(tls: Net, tmp_path):
    """Files that are replaced are read again: nobody has to restart an endpoint for it."""
    place = tmp_path / "site-1"
    shutil.copytree(tls.consortium.identity("site-1").certificate.parent, place)
    identity = Identity.load(place)
    async with server_of(tls) as server:
        async with dialler(tls, "site-1", identity) as site:
            await site.connect("server")
            first = await fingerprint(server, "site-1")
        await settled(lambda: not server.statistics().links)
        tls.consortium.identity("site-1", force=True)
        renewed = tls.consortium.directory / authority.ISSUED / "site-1"
        for name in ("key.pem", "certificate.pem"):
            shutil.copy(renewed / name, place / f"{name}.new")
            (place / f"{name}.new").replace(place / name)
        async with dialler(tls, "site-1", identity) as site:
            await site.connect("server")
            assert await fingerprint(server, "site-1") != first


async def fingerprint(server: BaseEndpoint, peer: str) -> bytes:
    """Of the certificate behind a live link."""
    await settled(lambda: Address(peer) in server.links.live)
    found = server.links.live[Address(peer)].link.fingerprint
    assert found is not None
    return found


def test_files_that_cannot_be_used_are_refused_where_they_are_named(
    consortium: Consortium, tmp_path
):
    """A missing file, nonsense, or a key of another certificate is a usage error that names the files."""
    good, other = consortium.identity("site-1"), consortium.identity("site-2")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate", encoding="utf-8")
    for wrong in (
        (tmp_path / "missing.pem", good.key, good.authority),
        (good.certificate, other.key, good.authority),
        (nonsense, good.key, good.authority),
        (good.certificate, good.key, nonsense),
    ):
        with pytest.raises(UsageError, match="TLS files cannot be used"):
            Identity(*wrong)


def test_addresses_are_read_from_alternative_names_only():
    """What counts in a certificate is its streamoff URIs; none, or one that is no address, is refused."""
    names = (("DNS", "site-1"), ("URI", "https://a.example"), ("URI", "streamoff:site-1.job"))
    assert addresses_of({"subjectAltName": names}) == (Address("site-1.job"),)
    for wrong in (
        (),
        (("DNS", "site-1"),),
        (("URI", "streamoff:"),),
        (("URI", "streamoff:a..b"),),
        (("URI", "streamoff:site-1"), ("URI", "streamoff:*")),
    ):
        with pytest.raises(HandshakeError, match="names no address"):
            addresses_of({"subjectAltName": wrong, "subject": ((("commonName", "site-1"),),)})


# --- addresses ----------------------------------------------------------------------------------


async def test_a_downlink_speaks_for_its_certificate_and_for_nobody_else(tls: Net):
    """A site may speak for what lies below its certificate's address; a word for another costs the link."""
    async with connected(tls, "site-1", "site-2") as (server, site, other):
        for sender, allowed in (("site-1.trainer", True), ("site-2", False)):
            driver = site.links.live[SERVER]
            driver.send_nowait(Pull(to=SERVER, sender=Address(sender), stream=5, start=0, stop=1))
            if allowed:
                await settled(lambda: server.statistics().publisher.refused == 1)  # it was heard
                assert driver.cause is None
                assert server.statistics().links == 2
            else:
                lost = server.links.live[Address("site-1")]
                await settled(lambda: lost.cause is not None)  # noqa: B023 - used at once
                assert isinstance(lost.cause, UnexpectedMessageError)
        assert other.links.live[SERVER].cause is None


async def test_of_two_live_instances_the_newer_needs_the_same_certificate(tls: Net):
    """A second endpoint of an address is let in with the certificate of the first, not with another one."""
    async with connected(tls) as (server, first):
        former = tls.consortium.identity("site-1")
        copy = tls.directory / "copy"
        shutil.copytree(former.certificate.parent, copy)
        another = tls.consortium.identity("site-1", force=True)
        assert "taken by a live endpoint" in await refused(dialler(tls, "site-1", another))
        assert first.links.live[SERVER].cause is None
        assert server.links.live[Address("site-1")].cause is None
        async with dialler(tls, "site-1", Identity.load(copy)) as restarted:
            await restarted.connect("server")
            await settled(
                lambda: server.links.live[Address("site-1")].theirs.instance == restarted.instance
            )


async def test_a_stolen_ref_is_worth_nothing_without_its_ticket_and_address(tls: Net):
    """Who learns a ref is refused without its ticket, and with it at another address; no clock moves for him."""
    tensors = state_dict(1)
    async with connected(tls, "site-1", "thief") as (server, site, thief):
        slot = Slot(b"t" * 16, Address("site-1"))
        tx = server.publish([StateDictSource(tensors)], [slot])
        ref = tx.refs(0)[0]
        due = tx.timer.due if tx.timer is not None else None
        for stolen in (ref, Ref(ref.source, ref.id, b"x" * 16, ref.size)):
            with pytest.raises(PeerRefusedError, match="bad_ticket"):
                await thief.run_transfer(thief.transfer(stolen, memory()))
        assert tx.timer is not None
        assert tx.timer.due == due
        assert_same(await site.run_transfer(site.transfer(ref, memory())), tensors)
        assert (await tx.wait()).succeeded == ("site-1",)


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("goodbye", [True, False])
async def test_nothing_is_lost_when_a_peer_that_only_writes_goes_away(
    consortium: Consortium, goodbye
):
    """A client that writes, never reads and closes, with or without a goodbye, loses none of its last bytes."""
    near, far = socket_pair(socket.AF_INET)
    identity = consortium.identity("site-1")
    data = [raw(chunk(MIB - 100_000, start=number)) for number in range(8)]

    def write() -> None:
        near.setblocking(True)
        context = identity.context(server=False)
        with context.wrap_socket(near, suppress_ragged_eofs=False) as secured:
            for one in data:
                secured.sendall(one)
            if goodbye:
                secured.setblocking(False)
                with pytest.raises(ssl.SSLWantReadError):
                    secured.unwrap()

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, write)
        stream, _ = await secure(far, consortium.identity("server"), server=True)
        link = StreamLink(stream, BufferPool())
        for number in range(8):
            inbound = await link.receive()
            assert isinstance(inbound.frame, Chunk)
            assert inbound.frame.start == number
            inbound.release()
        with pytest.raises(LinkLostError, match="closed the link" if goodbye else "goodbye"):
            await link.receive()
        await link.aclose()
    assert link.received == sum(map(len, data))


async def test_a_handshake_that_is_not_finished_leaves_nothing(consortium: Consortium):
    """A peer that goes away, or says nothing, in the middle of a handshake costs no descriptor."""
    identity = consortium.identity("server")
    near, far = socket_pair(socket.AF_INET)
    near.close()
    with pytest.raises((LinkLostError, HandshakeError)):
        await secure(far, identity, server=True)
    assert far.fileno() == -1
    near, far = socket_pair(socket.AF_INET)
    with anyio.move_on_after(0.05) as scope:
        await secure(far, identity, server=True)
    assert scope.cancelled_caught
    near.settimeout(5)
    assert near.recv(10) == b""
    near.close()


async def test_an_idle_link_wakes_up_at_once_when_bytes_are_decrypted_already(
    consortium: Consortium,
):
    """Two frames in one record both arrive: what is decrypted but not read is not waited for."""
    async with link_pair("tls", consortium) as (near, far):
        await send(near, Ping(id=1, reply=False), *(Ping(id=n, reply=False) for n in range(2, 50)))
        with anyio.fail_after(20):
            for number in range(1, 50):
                assert (await far.receive()).frame == Ping(id=number, reply=False)
        await send(near, ready(chunk(10)))
        (await far.receive()).release()


async def test_what_lies_encrypted_in_memory_is_bounded(consortium: Consortium):
    """Whatever a peer has sent and however slowly it reads, few records wait in memory, and every byte arrives."""
    most = BURST_BYTES + 2 * RECORD_BYTES
    sent = chunk(8 * MIB)
    async with link_pair("tls", consortium, buffer=MIB) as (near, far):
        streams = [near._stream, far._stream]
        waiting: list[int] = []

        async def watch() -> None:
            while True:
                for stream in streams:
                    assert isinstance(stream, TlsStream)
                    waiting.extend((stream._incoming.pending, stream._outgoing.pending))
                    waiting.append(len(stream._unsent))
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            group.start_soon(send, near, ready(sent))
            await anyio.sleep(0.05)
            inbound = await far.receive()
            group.cancel_scope.cancel()
        assert_equal(inbound.frame, sent)
        inbound.release()
    assert 0 < max(waiting) <= most


async def test_a_peer_that_renews_its_keys_and_wants_ours_renewed_is_answered(
    consortium: Consortium,
):
    """Bytes under new keys are read, the answer goes out although nothing else does, and what is sent after it is read."""
    site = consortium.identity("site-1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        files = ("-cert", site.certificate, "-key", site.key, "-CAfile", site.authority)
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{listener.getsockname()[1]}"]
        async with await anyio.open_process([*command, "-tls1_3", *map(str, files)]) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            assert client.stderr is not None
            near = await anyio.to_thread.run_sync(lambda: listener.accept()[0])
            stream, peer = await secure(near, consortium.identity("server"), server=True)
            assert peer.addresses == (Address("site-1"),)
            with anyio.fail_after(30):
                await client.stdin.send(b"before\n")
                assert await _read(stream, 7) == b"before\n"
                await client.stdin.send(b"K\n")  # renew, and ask for the same
                await _told(client.stderr, b"KEYUPDATE")
                await client.stdin.send(b"after\n")
                assert await _read(stream, 6) == b"after\n"
                assert not stream._outgoing.pending
                assert stream.send_nowait([memoryview(b"an answer\n")]) == 10
                await _told(client.stdout, b"an answer\n")
                await stream.aclose()
                await client.stdin.aclose()
                await client.wait()


async def test_answers_that_are_not_read_are_bounded(consortium: Consortium):
    """A peer that asks for new keys for ever, and reads no answer, ends the link with a typed error."""
    async with link_pair("tls", consortium, buffer=16 * 1024) as (near, _):
        stream = near._stream
        assert isinstance(stream, TlsStream)
        view = memoryview(bytes(MIB))
        while stream.send_nowait([view]):
            pass  # until the kernel takes no more
        for _ in range(
            3
        ):  # no client at hand asks without reading, so its answers are put there by hand
            assert stream.receive_nowait([memoryview(bytearray(1))]) == 0
            stream._outgoing.write(bytes(ANSWER_BYTES // 3 + 1))
        with pytest.raises(LimitError, match="answers not read"):
            stream.receive_nowait([memoryview(bytearray(1))])


async def _read(stream: TlsStream, nbytes: int) -> bytes:
    view = memoryview(bytearray(nbytes))
    got = 0
    while got < nbytes:
        read = stream.receive_nowait([view[got:]])
        got += read
        if not read:
            await stream.receivable()
    return bytes(view)


async def _told(output: ByteReceiveStream, what: bytes) -> None:
    told = b""
    while what not in told:
        told += await output.receive()
