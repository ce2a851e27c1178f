"""Showing a simulation while it runs."""

import io
import os
import pty
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from streamoff.cli.progress import SLOTS, STOPPING, Bars, Lines, Nothing, watching
from streamoff.sim.config import SimulationConfig
from streamoff.sim.observer import Observer, Silent
from streamoff.sim.report import RoundRow

MIB = 1024 * 1024


def a_row(number: int, *, failed: dict[str, str] | None = None) -> RoundRow:
    """Return a round of two sites."""
    return RoundRow(
        round=number,
        seconds=1.25,
        accepted=("site-1", "site-2"),
        failed=failed or {},
        bytes_landed=3 * MIB,
        metrics={"accuracy": 0.95678},
    )


class Screen:
    """Bars on a console of 80 columns without colours, and what they look like."""

    def __init__(self, rounds: int = 5, width: int = 80) -> None:
        self._out = io.StringIO()
        self._console = Console(file=self._out, width=width, color_system=None)
        self.bars = Bars(rounds, self._console)

    def look(self) -> list[str]:
        """Return the lines printed since the last look, and the bars below them."""
        self._console.print(self.bars)
        lines = [line.rstrip() for line in self._out.getvalue().splitlines()]
        self._out.seek(0)
        self._out.truncate()
        return lines


def test_bars_follow_a_round() -> None:
    """There is a bar for the rounds, for the round's sites and for each transfer, with numbers."""
    screen = Screen()
    (rounds,) = screen.look()
    assert rounds.split()[0] == "rounds"
    assert "0/5" in rounds
    screen.bars.round_started(1, 2)
    assert screen.look()[1].endswith("0/2 sites  nothing has landed yet")
    screen.bars.transfer("site-2", 0, 4 * MIB)
    screen.bars.transfer("site-1", MIB, 4 * MIB)
    screen.bars.transfer("site-2", 4 * MIB, 4 * MIB)
    _, sites, second, first = screen.look()
    assert sites.startswith("round 1 ")
    assert sites.endswith("1/2 sites  5.0 MiB of 8.0 MiB landed")
    assert second.startswith("  site-2 ")
    assert second.endswith("4.0 MiB of 4.0 MiB")
    assert first.endswith("1.0 MiB of 4.0 MiB")
    screen.bars.round_ended(a_row(1))
    line, rounds = screen.look()
    assert line == "round 1/5: 2 accepted, 3.0 MiB landed, 1.2 s, accuracy 0.9568"
    assert "1/5" in rounds


def test_a_failed_site_leaves_a_line_above_the_bars() -> None:
    """A failure is told with its reason, whatever characters are in it."""
    screen = Screen()
    screen.bars.round_started(1, 3)
    screen.bars.round_ended(a_row(1, failed={"site-3": "lost [site=site-3]"}))
    failed, line, _ = screen.look()
    assert failed == "round 1/5: site-3 failed: lost [site=site-3]"
    assert "1 failed" in line


def test_no_more_transfers_have_a_bar_than_fit() -> None:
    """With many sites the bars are those of transfers under way; a finished one makes room."""
    screen = Screen()
    screen.bars.round_started(1, 100)
    for number in range(20):
        screen.bars.transfer(f"site-{number}", 1, 10)
    _, _, *shown, more = screen.look()
    assert [line.split()[0] for line in shown] == [f"site-{number}" for number in range(SLOTS)]
    assert more.strip() == "and 4 more under way"
    screen.bars.transfer("site-3", 10, 10)
    screen.bars.transfer("site-17", 2, 10)
    _, _, *shown, more = screen.look()
    names = [line.split()[0] for line in shown]
    assert names[3] == "site-17"
    assert "site-3" not in names
    assert more.strip() == "and 3 more under way"


def test_bars_fit_a_narrow_terminal() -> None:
    """Nothing wraps: every row stays one line."""
    screen = Screen(width=40)
    screen.bars.round_started(1, 2)
    screen.bars.transfer("site-with-a-rather-long-name-for-a-small-screen", MIB, 4 * MIB)
    lines = screen.look()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 40


def test_an_empty_payload_is_complete() -> None:
    """A transfer of nothing has no bar to divide by zero."""
    screen = Screen()
    screen.bars.round_started(1, 1)
    screen.bars.transfer("site-1", 0, 0)
    assert screen.look()[1].endswith("1/1 sites  0 B of 0 B landed")


def test_elsewhere_there_is_a_line_per_round(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a terminal the rounds are told on stderr and stdout stays for the report."""
    config = SimulationConfig(rounds=2, output=tmp_path / "model")
    with watching(config, quiet=False) as observer:
        assert isinstance(observer, Lines)
        observer.round_started(1, 3)
        observer.transfer("site-1", 1, 2)
        observer.round_ended(a_row(1, failed={"site-3": "lost"}))
        observer.stopping()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "round 1/2: site-3 failed: lost",
        "round 1/2: 2 accepted, 1 failed, 3.0 MiB landed, 1.2 s, accuracy 0.9568",
        STOPPING.rstrip(),
    ]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With --quiet nothing is told while the simulation runs."""
    with watching(SimulationConfig(output=tmp_path / "model"), quiet=True) as observer:
        assert isinstance(observer, Nothing)
        observer.round_ended(a_row(1))
        observer.stopping()
    assert capsys.readouterr() == ("", "")


def test_every_observer_is_one(tmp_path: Path) -> None:
    """Whatever shows a simulation has the methods that the engine calls."""
    observers: list[Observer] = [Silent(), Lines(1), Screen().bars]
    for observer in observers:
        observer.round_started(1, 1)
        observer.transfer("site-1", 1, 1)
        observer.round_ended(a_row(1))


ON_A_TERMINAL = """
    import os, sys
    from pathlib import Path
    from streamoff.cli.progress import watching
    from streamoff.sim.config import SimulationConfig
    out = sys.stdout
    with watching(SimulationConfig(output=Path(sys.argv[1])), quiet=False) as observer:
        print(type(observer).__name__)
        observer.round_started(1, 1)
        observer.transfer("site-1", 1, 2)
        assert sys.stdout is out
        sys.stderr.write("a warning\\n")
        if sys.argv[2:] == ["fail"]:
            raise KeyError
        if sys.argv[2:] == ["stop"]:
            observer.stopping()
            os._exit(3)
    print("rich" in sys.modules)
"""


def on_a_terminal(
    *arguments: str | Path, stderr: int | None = None, without: str = ""
) -> tuple[str, int]:
    """Run the script above on a pseudo-terminal and return what it showed and its exit code."""
    ours, theirs = pty.openpty()
    block = f"import sys; sys.modules[{without!r}] = None\n" if without else ""
    with subprocess.Popen(
        [sys.executable, "-c", block + textwrap.dedent(ON_A_TERMINAL), *map(str, arguments)],
        stdout=theirs,
        stderr=theirs if stderr is None else stderr,
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(ours)
    return shown.decode(), process.returncode


def test_a_terminal_gets_bars(tmp_path: Path) -> None:
    """On a terminal the bars appear, warnings go above them, and the cursor comes back at the end."""
    shown, code = on_a_terminal(tmp_path / "model")
    assert code == 0
    assert "Bars" in shown
    assert "round 1" in shown
    assert "a warning" in shown
    assert shown.endswith("True\r\n")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_the_terminal_is_restored_when_the_job_fails(tmp_path: Path) -> None:
    """An error takes the bars away, too."""
    shown, code = on_a_terminal(tmp_path / "model", "fail")
    assert code == 1
    assert "KeyError" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_the_terminal_is_in_order_when_the_job_is_being_stopped(tmp_path: Path) -> None:
    """From the first signal on the bars are gone: a second one may end the process at once."""
    shown, code = on_a_terminal(tmp_path / "model", "stop")
    assert code == 3
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert shown.endswith(STOPPING.replace("\n", "\r\n"))


def test_a_log_file_keeps_its_lines(tmp_path: Path) -> None:
    """When stderr is a file, what is written there does not go to the screen instead."""
    with (tmp_path / "log").open("wb") as log:
        shown, code = on_a_terminal(tmp_path / "model", stderr=log.fileno())
    assert code == 0
    assert (tmp_path / "log").read_text() == "a warning\n"
    assert "a warning" not in shown


def test_without_rich_a_terminal_gets_lines(tmp_path: Path) -> None:
    """Bars are an extra: without it the simulation is shown by lines."""
    shown, code = on_a_terminal(tmp_path / "model", without="rich")
    assert code == 0
    assert "Lines" in shown
