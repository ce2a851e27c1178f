"""Three hosts in network namespaces, over TLS: a cable that is pulled, and a slow line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

import pytest

from streamoff.transports.tls import Identity
from streamoff.types import CHUNK_BYTES, MIB

from .real import Consortium

pytestmark = pytest.mark.real_time

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 60


def ip(*arguments: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, encoding="utf-8")


class Host:
    """A process in a namespace of its own; what it says is waited for."""

    def __init__(self, name: str, role: str, identity: Identity, places: dict[str, str]) -> None:
        self.name = name
        self.said: list[dict[str, Any]] = []
        self._queue: SimpleQueue[dict[str, Any]] = SimpleQueue()
        module = "tests.transports.netns_host"
        directory = str(identity.certificate.parent)
        self.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-m", module),
                *(role, directory, json.dumps(places), str(40 * MIB)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=REPOSITORY,
        )
        self._log: list[str] = []
        self._threads = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._collect, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))

    def _collect(self) -> None:
        assert self.process.stderr is not None
        self._log += self.process.stderr

    def hear(self, event: str, accept: Callable[[dict[str, Any]], object] = bool) -> dict[str, Any]:
        """Wait for something to be said."""
        while True:
            try:
                fact = self._queue.get(timeout=PATIENCE_SECONDS)
            except Empty:
                pytest.fail(f"{self.name} did not say {event!r}:\n{''.join(self._log[-30:])}")
            self.said.append(fact)
            if fact["event"] == event and accept(fact):
                return fact

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """Network namespaces with loopback."""
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield


def cable(one: str, other: str, net: int) -> None:
    """A cable between two namespaces, with an address at each end."""
    ip("link", "add", f"v{net}", "netns", one, "type", "veth", "peer", "name", f"v{net}", "netns", other)  # fmt: skip
    for name, host in ((one, 1), (other, 2)):
        ip("-n", name, "address", "add", f"10.213.{net}.{host}/24", "dev", f"v{net}")
        ip("-n", name, "link", "set", f"v{net}", "up")


@pytest.fixture
def names() -> Iterator[tuple[str, str, str]]:
    """Three hosts in a line, the relay in the middle; skipped where namespaces are not allowed."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("iproute2 is not installed")
    probe = f"streamoff-probe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], check=False, capture_output=True, text=True, encoding="utf-8"
    )
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    ip("netns", "delete", probe)
    names = tuple(f"streamoff-{role}-{os.getpid()}" for role in ("server", "relay", "site"))
    with namespaces(*names):
        server, relay, site = names
        cable(server, relay, 1)
        cable(relay, site, 2)
        yield server, relay, site


def test_a_cable_that_is_pulled_and_a_slow_line(
    names: tuple[str, str, str], consortium: Consortium
) -> None:
    """Behind a relay, a transfer survives a pulled cable without sending twice what has landed, and messages overtake it."""
    server_name, relay_name, site_name = names
    places = {"server": "10.213.1.1:7000", "region": "10.213.2.1:7000"}
    with (
        Host(server_name, "server", consortium.identity("server"), places) as server,
        Host(relay_name, "relay", consortium.identity("region"), places) as relay,
        Host(site_name, "site", consortium.identity("region.site-1"), places) as site,
    ):
        for host in (server, relay, site):
            host.hear("connected")
        relay.hear("links", lambda fact: fact["count"] == 2)

        # slow enough for the cable to be pulled in the middle
        line = ["tc", "-n", site_name, "qdisc"]
        shape = ["dev", "v2", "root", "tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"]
        subprocess.run([*line, "add", *shape], check=True)
        site.tell("offer")
        server.hear("landed", lambda fact: fact["bytes"] >= 8 * MIB)
        ip("-n", relay_name, "link", "set", "v2", "down")
        relay.hear("links", lambda fact: fact["count"] == 1)
        ip("-n", relay_name, "link", "set", "v2", "up")
        server.hear("done")
        told = [fact["bytes"] for fact in server.said if fact["event"] == "landed"]
        assert told == sorted(told)
        settled = site.hear("settled")
        assert settled["status"] == "completed"
        assert settled["served"] <= settled["size"] + 9 * CHUNK_BYTES

        # 20 Mbit/s: what is said while a chunk travels is heard before the chunk is there
        shape[shape.index("200mbit")] = "20mbit"
        subprocess.run([*line, "change", *shape], check=True)
        server.said.clear()
        site.tell("beat")
        server.hear("landed", lambda fact: fact["bytes"] >= 8 * MIB)
        beats = [fact for fact in server.said if fact["event"] == "beat"]
        overtaking = [beat for beat in beats if beat["landed"] < beat["served"]]
        assert len(beats) >= 5
        assert len(overtaking) >= len(beats) * 3 // 4
