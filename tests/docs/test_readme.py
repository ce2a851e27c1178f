"""The README and the manual say what is so: commands, options, report fields, links, and the shape of the table."""

import re
import signal
from argparse import Action, ArgumentParser
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from benchmarks.memory import ENGINES, SHAPES
from streamoff.cli.exits import ExitCode
from streamoff.cli.parser import build_parser
from streamoff.sim.report import (
    MemoryUse,
    ModelFile,
    RoundRow,
    ScratchUse,
    SimulationReport,
    TransactionCounts,
)

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SIMULATE = (ROOT / "docs/how-to/simulate.md").read_text(encoding="utf-8")
PAGES = ["README.md", "CONTRIBUTING.md"]

DEMO = "python -m pip install tox && python -m tox run -e demo"
CHECK = "python -m pip install tox && python -m tox run"


def test_the_readme_has_the_two_commands_word_for_word():
    """The demo and the checks are one line each, and CI runs the second one unchanged."""
    fences = re.findall(r"^```sh\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert fences == [DEMO, CHECK]
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1] == CHECK


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/memory.md"])
def test_the_memory_table_is_the_one_that_the_benchmark_prints(page):
    """Its head and its rows are those of ``python -m benchmarks memory``, and every cell is a number."""
    text = (ROOT / page).read_text(encoding="utf-8")
    head = "| MiB above the start, model of 512.0 MiB | 2 sites | 8 sites | 16 sites |\n"
    lines = text[text.index(head) :].splitlines()[2:]
    table = lines[: len(ENGINES) * len(SHAPES)]
    labels = {line.split("|")[1].strip() for line in table}
    assert labels == {
        f"{engine}, {shapes}"
        for engine, shapes in product(
            ("offload, columnar", "offload, in-time", "no offload"), ("1000 tensors", "one tensor")
        )
    }
    for line in table:
        assert all(float(cell) > 0 for cell in line.split("|")[2:-1])


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_front_pages_lead_somewhere(page):
    """A relative link names a file of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def options(parser: ArgumentParser) -> Iterator[Action]:
    """The options of a parser, without help."""
    yield from (one for one in parser._actions if one.option_strings and one.dest != "help")


def test_every_option_of_simulate_is_on_its_page():
    """The table of options has those of the parser, with their defaults, and no others."""
    commands = next(one for one in build_parser()._actions if one.dest == "command")
    assert isinstance(commands.choices, dict)
    parser = commands.choices["simulate"]
    documented = set(re.findall(r"--[a-z-]+", "".join(_cells(SIMULATE, "option"))))
    assert documented == {name for one in options(parser) for name in one.option_strings}
    rows = dict(zip(_cells(SIMULATE, "option"), _cells(SIMULATE, "option", 1), strict=True))
    for action in options(parser):
        if isinstance(action.default, int | str | Path) and not isinstance(action.default, bool):
            cell = next(rows[row] for row in rows if action.option_strings[0] in row)
            assert cell.strip("`") == str(action.default)


def test_every_exit_code_is_on_the_page():
    """The table of exit codes has every code that a command can choose."""
    documented = {int(code) for code in _cells(SIMULATE, "code")}
    assert documented == {*ExitCode, 128 + signal.SIGPIPE}


def test_every_field_of_the_report_is_on_the_page():
    """The table of the JSON report has the fields of a real one, and no others."""
    row = RoundRow(round=1, seconds=1.0, accepted=("a",), failed={}, bytes_landed=1, metrics={})
    report = SimulationReport(
        recipe="r",
        backend="b",
        engine="e",
        sites=1,
        rounds=(row,),
        model=ModelFile(path=Path("/m"), bytes=1, sha256="0"),
        memory=MemoryUse(baseline_bytes=1, peak_bytes=2),
        scratch=ScratchUse(peak_bytes=1, left_bytes=0, left_entries=0),
        transactions=TransactionCounts(completed=1, failed=0, open=0),
    )
    documented = re.findall(r"`([^`]+)`", "".join(_cells(SIMULATE, "field")))
    assert sorted(documented) == sorted(paths(report.to_json()))


def paths(value: object, at: str = "") -> Iterator[str]:
    """The fields of plain JSON values, as the page writes them."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from paths(one, f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        yield at
        yield from paths(value[0], f"{at}[]")
    else:
        yield at


def _cells(text: str, head: str, column: int = 0) -> list[str]:
    """One column of the table whose first column is called ``head``."""
    table = re.search(rf"^\| {head} \|.*?\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return [line.split(" | ")[column].strip("| ") for line in table[1].splitlines()[1:]]
