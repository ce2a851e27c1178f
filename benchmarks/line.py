"""Control messages on a slow line, alone and beside a model that uses all of it.

Three hosts in network namespaces: a server, a relay, and behind the relay a site at the end of the slow line.
A message says when it was sent, by the clock that all namespaces share. What it waits for is mostly the queue that
TCP fills in front of the line, so every congestion control that may be used here has rows of its own.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks import netns
from benchmarks.children import Child
from benchmarks.machine import Machine
from benchmarks.pairs import spread
from benchmarks.report import Report
from benchmarks.transfer import TMPFS, scratch
from streamoff.sim.sizes import format_size
from streamoff.types import MIB

__all__ = ["measure"]

RATE: Final = "20mbit"
RATE_BYTES: Final = 2_500_000
SERVER, RELAY, SITE = "server", "region", "region.site"
PORT: Final = 7000
MODEL_BYTES: Final = 24 * MIB
QUICK_MODEL_BYTES: Final = 4 * MIB
BEAT_SECONDS: Final = 0.05
HEAD_START_SECONDS: Final = 0.5
"""What a model is under way before the first message beside it."""
ENDS: Final = {"to the site": (SERVER, SITE), "to the server": (SITE, SERVER)}


class Line:
    """The two ends of the line, at work.

    Args:
        ends: Address to process.
    """

    def __init__(self, ends: dict[str, Child]) -> None:
        self._ends = ends

    def alone(self, sender: str, receiver: str, beats: int) -> list[float]:
        """Seconds that each message takes on an idle line."""
        heard = self._ends[receiver].order("hear", at=receiver, count=beats)
        self._ends[sender].ask("beat", at=sender, to=receiver, count=beats, every=BEAT_SECONDS)
        latencies: list[float] = self._ends[receiver].answer(heard)["seconds"]
        return latencies

    def beside_model(self, sender: str, receiver: str, beats: int) -> list[float]:
        """The same beside a model that goes the same way and is not through when the last one is."""
        sent = self._ends[sender].order("serve", at=sender, to=[receiver])
        pulled = self._ends[receiver].order("pull", at=[receiver], mode="memory")
        time.sleep(HEAD_START_SECONDS)
        latencies = self.alone(sender, receiver, beats)
        self._ends[receiver].answer(pulled)
        self._ends[sender].answer(sent)
        return latencies


@contextmanager
def line(directory: Path, nbytes: int, congestion: str) -> Iterator[Line]:
    """Make the hosts and start a process in each; both ends have a model."""
    with ExitStack() as stack:
        names = ["server", "relay", "site"]
        server, relay, site = stack.enter_context(netns.hosts(names, congestion))
        top, _ = netns.cable(server, relay, 1)
        middle, _ = netns.cable(relay, site, 2, RATE)

        def start(host: str, address: str, listen: str | None, dial: dict[str, str]) -> Child:
            endpoint = {"address": address, "listen": True, "host": listen, "port": PORT}
            if listen is None:
                endpoint = {"address": address, "listen": False}
            settings = {
                "endpoints": [{**endpoint, "dial": dial}],
                "models": {} if address == RELAY else {"payload": ("1", nbytes)},
                "scratch": str(directory),
            }
            child = stack.enter_context(Child("peers", settings, prefix=netns.inside(host)))
            child.answer()
            return child

        first = start(server, SERVER, top, {})
        start(relay, RELAY, middle, {SERVER: f"{top}:{PORT}"})
        yield Line({SERVER: first, SITE: start(site, SITE, None, {RELAY: f"{middle}:{PORT}"})})


def measure(*, quick: bool) -> Report:
    """Send messages in both directions, if namespaces can be made."""
    nbytes = QUICK_MODEL_BYTES if quick else MODEL_BYTES
    machine = Machine.here(TMPFS)
    title = f"line: messages beside {format_size(nbytes)} at 20 Mbit/s behind a relay, seconds from end to end"
    lack = netns.lack()
    if lack is not None:
        return Report(title=title, machine=machine, figures={}, notes=[f"skipped: {lack}"])
    beats = int((nbytes / RATE_BYTES - 1) * 0.8 / BEAT_SECONDS)
    found: dict[str, dict[str, list[float]]] = {}
    for congestion in netns.congestion_controls():
        with scratch(TMPFS) as directory, line(directory, nbytes, congestion) as both:
            for way, ends in ENDS.items():
                found[f"{way}, {congestion}"] = {
                    "alone": both.alone(*ends, beats),
                    "beside": both.beside_model(*ends, beats),
                }
    return Report(
        title=title,
        machine=machine,
        figures={
            "control_latency_seconds": max(
                statistics.median(one["beside"]) for one in found.values()
            )
        },
        rows=[
            ("", "alone", "beside a model", "longer than 0.2 s"),
            *(
                (
                    way,
                    spread(one["alone"], 3),
                    spread(one["beside"], 3),
                    f"{sum(seconds > 0.2 for seconds in one['beside']) / beats:.1%}",
                )
                for way, one in found.items()
            ),
        ],
        notes=[f"medians of {beats} messages (lowest-highest)"],
        samples=found,
        quick=quick,
    )
