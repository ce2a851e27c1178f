"""One model from one source to eight receivers at once, against eight raw copies of it.

The receivers are endpoints of one process: two cores are the source's and the receivers'. The raw copies are
made twice, eight at once in eight threads and one after the other; the faster of the two is the yardstick.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.children import Child
from benchmarks.machine import Machine
from benchmarks.pairs import PAIRS, QUICK_PAIRS, Sample, in_turns, ratios, spread
from benchmarks.peers import LOOPBACK
from benchmarks.report import Report, samples_of
from benchmarks.transfer import TMPFS, scratch
from streamoff.sim.sizes import format_size
from streamoff.types import MIB

__all__ = ["measure"]

RECEIVERS: Final = 8
MODEL_BYTES: Final = 256 * MIB
QUICK_MODEL_BYTES: Final = 64 * MIB
NAMES: Final = [f"site-{number}" for number in range(RECEIVERS)]


class Fan:
    """A source and the process of its receivers.

    Args:
        source: Its process; it listens, and the receivers have dialled it.
        receivers: Their process.
        size: Bytes of the payload.
        raw_port: Where raw copies are taken.
    """

    def __init__(self, source: Child, receivers: Child, size: int, raw_port: int) -> None:
        self.size = size
        self._source = source
        self._receivers = receivers
        self._raw_port = raw_port

    def ours(self) -> Sample:
        """One transaction with a slot for every receiver."""
        sent = self._source.order("serve", at="server", to=NAMES)
        got = self._receivers.ask("pull", at=NAMES, mode="disk")
        return Sample.of(got, self._source.answer(sent))

    def at_once(self) -> Sample:
        """A raw copy in a thread for each receiver."""
        return self._copies(at_once=True)

    def in_a_row(self) -> Sample:
        """A raw copy for each receiver, one after the other."""
        return self._copies(at_once=False)

    def _copies(self, *, at_once: bool) -> Sample:
        how = {"streams": RECEIVERS, "at_once": at_once}
        taken = self._receivers.order("copy_in", mode="disk", size=self.size, **how)
        sent = self._source.ask("copy_out", port=self._raw_port, piece=MIB, **how)
        return Sample.of(self._receivers.answer(taken), sent)


@contextmanager
def fan(directory: Path, nbytes: int) -> Iterator[Fan]:
    """Start both processes."""
    source = {
        "endpoints": [{"address": "server", "listen": True, "dial": {}}],
        "models": {"payload": ("gpt2-medium", nbytes)},
    }
    with Child("peers", source) as serving:
        ready = serving.answer()
        dial = {"server": f"{LOOPBACK}:{ready['ports']['server']}"}
        receivers = {
            "endpoints": [{"address": name, "listen": False, "dial": dial} for name in NAMES],
            "scratch": str(directory),
        }
        with Child("peers", receivers) as taking:
            raw_port = taking.answer()["raw_port"]
            yield Fan(serving, taking, ready["sizes"]["payload"], raw_port)


def measure(*, quick: bool) -> Report:
    """Broadcast GPT-2 medium's tensors, smaller, to tmpfs."""
    pairs = QUICK_PAIRS if quick else PAIRS
    with (
        scratch(TMPFS) as directory,
        fan(directory, QUICK_MODEL_BYTES if quick else MODEL_BYTES) as both,
    ):
        ways = {"ours": both.ours, "at once": both.at_once, "in a row": both.in_a_row}
        found = in_turns(pairs, both.size * RECEIVERS, ways)
        machine, size = Machine.here(directory), both.size
    ours = found["ours"]
    best = min(("at once", "in a row"), key=lambda way: statistics.median(found[way].seconds))
    labels = {
        "ours": "ours",
        "at once": f"raw, {RECEIVERS} at once",
        "in a row": f"raw, {RECEIVERS} in a row",
    }
    return Report(
        title=f"fanout: {format_size(size)} to {RECEIVERS} receivers on tmpfs, medians of {pairs} turns (lowest-highest)",
        machine=machine,
        figures={
            "fanout_vs_raw": statistics.median(ratios(found, "ours", best)),
            "fanout_cpu_vs_raw": ours.cpu / found[best].cpu,
            "receiver_growth_mib": ours.receiver_growth_mib,
            "source_growth_mib": ours.source_growth_mib,
        },
        rows=[
            ("", "MiB/s in all", "ours to this", "CPU s/GiB of both ends"),
            *(
                (
                    labels[name],
                    spread(series.throughput, 0),
                    spread(ratios(found, "ours", name), 2),
                    f"{series.cpu:.2f}",
                )
                for name, series in found.items()
            ),
        ],
        samples=samples_of({"disk": found}),
        quick=quick,
    )
