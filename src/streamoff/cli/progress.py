"""Showing a simulation while it runs: bars on a terminal, a line per round elsewhere.

The bars need rich (the extra ``cli``), which is imported only when they are shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from streamoff.sim.config import SimulationConfig
from streamoff.sim.observer import Observer, Silent
from streamoff.sim.report import RoundRow, SimulationReport
from streamoff.sim.sizes import format_number, format_size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Bars", "Display", "Lines", "Nothing", "watching"]

REFRESHES: Final = 2
"""A second. A refresh of sixteen bars takes 10 ms of the interpreter."""
SLOTS: Final = 16
"""Transfers that have a bar at a time."""
BAR_WIDTH: Final = 32
LABEL_WIDTH: Final = 10


STOPPING: Final = "streamoff simulate: stopping; a second signal leaves at once\n"


class Display(Observer, Protocol):
    """An observer of a run that signals may stop."""

    def stopping(self) -> None:
        """A signal came: leave the terminal in order, and say what happens next."""
        ...


@contextmanager
def watching(config: SimulationConfig, *, quiet: bool) -> Iterator[Display]:
    """Choose how a simulation is shown, and show it during the block.

    Yields:
        An observer for the engine.
    """
    if quiet:
        yield Nothing()
    elif sys.stdout.isatty() and find_spec("rich") is not None:
        with _live(config) as bars:
            yield bars
    else:
        yield Lines(config.rounds)


@contextmanager
def _live(config: SimulationConfig) -> Iterator[Bars]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout)
    bars = Bars(config.rounds, console)
    live = Live(
        bars,
        console=console,
        refresh_per_second=REFRESHES,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=sys.stderr.isatty(),  # else a log file would lose its lines to the screen
    )
    bars.hide = live.stop
    with live:
        yield bars


def round_line(row: RoundRow, rounds: int) -> str:
    """Return one line about a round that ended."""
    facts = [
        f"{len(row.accepted)} accepted",
        *([f"{len(row.failed)} failed"] if row.failed else []),
        f"{format_size(row.bytes_landed)} landed",
        f"{row.seconds:.1f} s",
        *(f"{name} {format_number(value)}" for name, value in row.metrics.items()),
    ]
    return f"round {row.round}/{rounds}: " + ", ".join(facts)


class Nothing(Silent):
    """A display that shows nothing."""

    def stopping(self) -> None:
        """Do nothing."""


class Lines(Silent):
    """An observer that writes a line per round to stderr, and one per contribution that failed.

    Args:
        rounds: How many rounds there will be.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def round_ended(self, row: RoundRow) -> None:
        """Write the lines of a round."""
        for site, reason in row.failed.items():
            sys.stderr.write(f"round {row.round}/{self._rounds}: {site} failed: {reason}\n")
        sys.stderr.write(round_line(row, self._rounds) + "\n")

    def stopping(self) -> None:
        """Say so."""
        sys.stderr.write(STOPPING)


class Bars:
    """An observer that keeps what the bars show; rich asks for them from its own thread.

    Args:
        rounds: How many rounds there will be.
        console: Where lines of ended rounds go, above the bars.
    """

    hide: Callable[[], object]
    """Takes the bars off the screen; set by whoever puts them there."""

    def __init__(self, rounds: int, console: Console) -> None:
        self._rounds = rounds
        self._console = console
        self._began = time.monotonic()
        self._ended = 0
        self._sites = 0
        self._number: int | None = None  # of the round under way
        self._landed: dict[str, tuple[int, int]] = {}
        self._slots: dict[str, None] = {}

    def round_started(self, number: int, sites: int) -> None:
        """Show a new round."""
        self._number, self._sites = number, sites
        self._landed, self._slots = {}, {}

    def transfer(self, site: str, landed_bytes: int, total_bytes: int) -> None:
        """Move a transfer's bar; while others wait for a place, a finished one leaves its own."""
        self._landed[site] = (landed_bytes, total_bytes)
        if site in self._slots:
            return
        if len(self._slots) >= SLOTS:
            done = next((name for name in self._slots if self._is_done(name)), None)
            if done is None:
                return
            slots = {site if name == done else name: None for name in self._slots}
            self._slots = slots
        else:
            self._slots = {**self._slots, site: None}

    def round_ended(self, row: RoundRow) -> None:
        """Show the round as ended and leave a line about it above the bars."""
        self._ended += 1
        self._number = None
        self._landed, self._slots = {}, {}
        for site, reason in row.failed.items():
            self._console.print(
                f"round {row.round}/{self._rounds}: {site} failed: {reason}", markup=False
            )
        self._console.print(round_line(row, self._rounds), markup=False, highlight=False)

    def finished(self, report: SimulationReport) -> None:
        """Do nothing: the report is printed when the bars are gone."""

    def stopping(self) -> None:
        """Take the bars away, so that the cursor is back whatever happens next, and say so."""
        self.hide()
        sys.stderr.write(STOPPING)

    def _is_done(self, site: str) -> bool:
        landed, total = self._landed[site]
        return landed >= total

    def __rich__(self) -> RenderableType:
        """Return the bars as they are now."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True, min_width=LABEL_WIDTH)
        grid.add_column()
        grid.add_column(no_wrap=True)
        for row in self._rows():
            bar = ProgressBar(row.total, row.done, width=BAR_WIDTH) if row.total else ""
            grid.add_row(
                Text(row.label, overflow="ellipsis"), bar, Text(row.text, overflow="ellipsis")
            )
        return grid

    def _rows(self) -> Iterator[_Row]:
        clock = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - self._began))
        yield _Row("rounds", self._ended, self._rounds, f"{self._ended}/{self._rounds}  {clock}")
        if self._number is None:
            return
        # The event loop goes on meanwhile: take what there is once, the slots first.
        slots, landed = list(self._slots), dict(self._landed)
        done = sum(1 for have, size in landed.values() if have >= size)
        amount = f"{format_size(_sum(landed, 0))} of {format_size(_sum(landed, 1))} landed"
        if not landed:
            amount = "nothing has landed yet"
        yield _Row(
            f"round {self._number}", done, self._sites, f"{done}/{self._sites} sites  {amount}"
        )
        for site in slots:
            if site in landed:
                have, size = landed[site]
                yield _Row(f"  {site}", have, size, f"{format_size(have)} of {format_size(size)}")
        hidden = sum(
            1 for site, (have, size) in landed.items() if have < size and site not in slots
        )
        if hidden:
            yield _Row("", 0, 0, f"and {hidden} more under way")


class _Row(NamedTuple):
    """A label, a bar (none if ``total`` is 0) and a text."""

    label: str
    done: int
    total: int
    text: str


def _sum(landed: Mapping[str, tuple[int, int]], index: int) -> int:
    return sum(pair[index] for pair in landed.values())
