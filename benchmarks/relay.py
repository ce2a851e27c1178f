"""A model through one relay, beside a slow stream on the same relay, against a direct link.

Three ways take turns: over a direct link, through the relay alone, and through the relay while another
receiver, behind the same relay and from the same source, takes one chunk at a time with long pauses.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.children import Child
from benchmarks.machine import Machine
from benchmarks.meter import Spent
from benchmarks.pairs import PAIRS, QUICK_PAIRS, Sample, in_turns, ratios, spread
from benchmarks.peers import LOOPBACK
from benchmarks.report import Report, samples_of
from benchmarks.transfer import GPT2_MEDIUM_BYTES, QUICK_BYTES, TMPFS, scratch
from streamoff.sim.sizes import format_size
from streamoff.types import MIB

__all__ = ["measure"]

SLOW_BYTES: Final = 64 * MIB
QUICK_SLOW_BYTES: Final = 16 * MIB
PAUSE_SECONDS: Final = 0.25
"""What the slow receiver rests after each of its chunks: 16 MiB a second."""
DIRECT: Final = "site"
SITE: Final = "region.site"
SLOW: Final = "region.slow"


class Region:
    """A server, a relay below it, and behind the relay a source and a slow receiver.

    Args:
        server: Its process.
        relay: Its process.
        source: Of two endpoints: one dials the server, the other the relay.
        slow: Its process.
        size: Bytes of the payload.
    """

    def __init__(
        self, server: Child, relay: Child, source: Child, slow: Child, sizes: dict[str, int]
    ) -> None:
        self.size = sizes["payload"]
        self.relayed: list[Spent] = []
        self._server = server
        self._relay = relay
        self._source = source
        self._slow = slow

    def direct(self) -> Sample:
        """One transfer over a link of its own."""
        return self._transfer(DIRECT)

    def relay(self) -> Sample:
        """One transfer through the relay; what it took of the relay is kept."""
        watched = self._relay.order("watch")
        sample = self._transfer(SITE)
        self._relay.ask("rest")
        self.relayed.append(Spent(**self._relay.answer(watched)))
        return sample

    def beside_slow(self) -> Sample:
        """The same beside a slow stream, which is waited for afterwards."""
        served = self._source.order("serve", at=SITE, to=[SLOW], model="slow")
        pulled = self._slow.order("pull", at=[SLOW], mode="memory", pause=PAUSE_SECONDS)
        sample = self.relay()
        self._slow.answer(pulled)
        self._source.answer(served)
        return sample

    def _transfer(self, address: str) -> Sample:
        sent = self._source.order("serve", at=address, to=["server"])
        got = self._server.ask("pull", at=["server"], mode="disk")
        return Sample.of(got, self._source.answer(sent))


@contextmanager
def region(directory: Path, nbytes: int, slow_bytes: int) -> Iterator[Region]:
    """Start the four processes."""
    server = {
        "endpoints": [{"address": "server", "listen": True, "dial": {}}],
        "scratch": str(directory),
    }
    with Child("peers", server) as top:
        to_server = {"server": _place(top, "server")}
        relay = {"endpoints": [{"address": "region", "listen": True, "dial": to_server}]}
        with Child("peers", relay) as middle:
            to_relay = {"region": _place(middle, "region")}
            source = {
                "endpoints": [
                    {"address": DIRECT, "listen": False, "dial": to_server},
                    {"address": SITE, "listen": False, "dial": to_relay},
                ],
                "models": {"payload": ("gpt2-medium", nbytes), "slow": ("1", slow_bytes)},
            }
            slow = {
                "endpoints": [{"address": SLOW, "listen": False, "dial": to_relay}],
                "scratch": str(directory),
            }
            with Child("peers", source) as serving, Child("peers", slow) as resting:
                resting.answer()
                yield Region(top, middle, serving, resting, serving.answer()["sizes"])


def _place(child: Child, address: str) -> str:
    return f"{LOOPBACK}:{child.answer()['ports'][address]}"


def measure(*, quick: bool) -> Report:
    """Transfer GPT-2 medium's tensors to tmpfs in the three ways."""
    pairs = QUICK_PAIRS if quick else PAIRS
    nbytes, slow = (QUICK_BYTES, QUICK_SLOW_BYTES) if quick else (GPT2_MEDIUM_BYTES, SLOW_BYTES)
    with scratch(TMPFS) as directory, region(directory, nbytes, slow) as hosts:
        ways = {"direct": hosts.direct, "relay": hosts.relay, "beside slow": hosts.beside_slow}
        found = in_turns(pairs, hosts.size, ways)
        machine, size, relayed = Machine.here(directory), hosts.size, tuple(hosts.relayed)
    labels = {
        "direct": "direct",
        "relay": "through a relay",
        "beside slow": "through a relay, beside a slow stream",
    }
    return Report(
        title=f"relay: {format_size(size)} to tmpfs, medians of {pairs} turns (lowest-highest)",
        machine=machine,
        figures={
            "relay_vs_direct": statistics.median(ratios(found, "relay", "direct")),
            "beside_slow_vs_direct": statistics.median(ratios(found, "beside slow", "direct")),
            "relay_growth_mib": max(one.growth for one in relayed) / MIB,
            "relay_cpu_seconds_per_gib": statistics.median(one.cpu for one in relayed)
            / (size / 2**30),
        },
        rows=[
            ("", "MiB/s", "to direct", "CPU s/GiB of both ends"),
            *(
                (
                    labels[name],
                    spread(series.throughput, 0),
                    spread(ratios(found, name, "direct"), 2),
                    f"{series.cpu:.2f}",
                )
                for name, series in found.items()
            ),
        ],
        notes=[
            f"slow: {format_size(slow)} with {PAUSE_SECONDS:g} s of rest after each chunk, in a process of its own"
        ],
        samples={
            **samples_of({"disk": found}),
            "relay process": [one.to_json() for one in relayed],
        },
        quick=quick,
    )
