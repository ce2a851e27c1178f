"""Many sites, each on a slow line of its own, to one server: how much of all the lines one server uses.

Two hosts in network namespaces, and a cable of 10 Mbit/s between them for every site.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks import netns
from benchmarks.children import Child
from benchmarks.machine import Machine
from benchmarks.meter import Spent
from benchmarks.report import Report
from benchmarks.transfer import scratch
from streamoff.sim.sizes import format_size
from streamoff.types import MIB

__all__ = ["measure"]

RATE: Final = "10mbit"
RATE_BYTES: Final = 1_250_000
SITES: Final = 64
QUICK_SITES: Final = 4
MODEL_BYTES: Final = 16 * MIB
QUICK_MODEL_BYTES: Final = MIB
PORT: Final = 7000
SERVER: Final = "server"


@contextmanager
def lines(directory: Path, sites: int, nbytes: int) -> Iterator[tuple[Child, Child]]:
    """Make the hosts and their cables; start a process in each, the server's and that of all sites."""
    with ExitStack() as stack:
        hosts = ["server", "sites"]
        server, clinics = stack.enter_context(netns.hosts(hosts, netns.congestion_controls()[-1]))
        places = {
            f"site-{net}": f"{netns.cable(server, clinics, net, RATE)[0]}:{PORT}"
            for net in range(1, sites + 1)
        }

        def start(host: str, endpoints: list[dict[str, object]], **more: object) -> Child:
            settings = {"endpoints": endpoints, "scratch": str(directory), **more}
            child = stack.enter_context(Child("peers", settings, prefix=netns.inside(host)))
            child.answer()
            return child

        listening = {"address": SERVER, "listen": True, "host": "0.0.0.0", "port": PORT, "dial": {}}  # noqa: S104 - of a namespace of our own
        dialling = [
            {"address": address, "listen": False, "dial": {SERVER: place}}
            for address, place in places.items()
        ]
        first = start(server, [listening])
        yield first, start(clinics, dialling, models={"payload": ("1", nbytes)})


def measure(*, quick: bool) -> Report:
    """Land one update of every site, all at once, if namespaces can be made."""
    sites, nbytes = (QUICK_SITES, QUICK_MODEL_BYTES) if quick else (SITES, MODEL_BYTES)
    base = Path(tempfile.gettempdir())
    machine = Machine.here(base)
    title = f"lines: {sites} sites with {format_size(nbytes)} each, on lines of 10 Mbit/s, landed on {machine.scratch}"
    lack = netns.lack()
    if lack is not None:
        return Report(title=title, machine=machine, figures={}, notes=[f"skipped: {lack}"])
    with scratch(base) as directory, lines(directory, sites, nbytes) as (server, clinics):
        sent = [clinics.order("serve", at=f"site-{n}", to=[SERVER]) for n in range(1, sites + 1)]
        got = Spent(**server.ask("pull", at=[SERVER] * sites, mode="disk"))
        for number in sent:
            clinics.answer(number)
    rate = sites * nbytes / got.seconds
    return Report(
        title=title,
        machine=machine,
        figures={
            "lines_used": rate / (sites * RATE_BYTES),
            "growth_mib": got.growth / MIB,
        },
        rows=[
            ("", "seconds", "MiB/s in all", "one after the other"),
            (
                f"{sites} sites",
                f"{got.seconds:.1f}",
                f"{rate / MIB:.0f}",
                f"{sites * nbytes / RATE_BYTES:.0f} s",
            ),
        ],
        notes=["lines_used: payload bytes in the time, to what all lines could carry in it"],
        samples={"receiver": got.to_json()},
        quick=quick,
    )
