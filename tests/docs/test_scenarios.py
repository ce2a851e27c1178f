"""The page on the tests: the scenarios are complete, and every test and file that it names is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests/README.md").read_text(encoding="utf-8")

SCENARIOS = 92
NODE = re.compile(r"\btests/[\w/]+\.py::\w+(?:::\w+)*")


def rows() -> Iterator[list[str]]:
    """The scenarios: number, promise, tests, difference."""
    for line in PAGE.splitlines():
        if re.match(r"\| \d", line):
            yield [cell.strip() for cell in line.split("|")[1:-1]]


def nodes(file: str) -> set[str]:
    """The node ids of a file's tests, without parameters, as its text has them."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found: set[str] = set()

    def walk(body: list[ast.stmt], above: str) -> None:
        for item in body:
            if isinstance(item, ast.ClassDef):
                walk(item.body, f"{above}::{item.name}")
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{above}::{item.name}")

    walk(tree.body, file)
    return found


def test_every_scenario_is_there_once():
    """The scenarios are numbered from 1 to the last, in order, and each says what must hold."""
    assert [int(number) for number, *_ in rows()] == list(range(1, SCENARIOS + 1))
    assert all(promise for _, promise, _, _ in rows())


def test_a_scenario_names_tests_or_says_why_there_are_none():
    """Without a test there is a reason; with some, each is a whole node id."""
    for number, _, tests, difference in rows():
        if tests == "none":
            assert difference, number
        else:
            assert all(NODE.fullmatch(one.strip("`")) for one in tests.split("<br>")), number


def test_every_test_that_is_named_exists():
    """Whatever looks like a test on the page is a test of the file it names."""
    named = set(NODE.findall(PAGE))
    assert named
    files = {node.partition("::")[0] for node in named}
    assert [file for file in files if not (ROOT / file).is_file()] == []
    there = set[str]().union(*map(nodes, files))
    assert sorted(named - there) == []
    assert [node for node in named if not node.rpartition("::")[2].startswith("test_")] == []


def test_links_of_the_page_lead_somewhere():
    """A relative link names a file or folder of the repository."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "tests" / link).exists()] == []


def test_every_folder_of_tests_is_on_the_page():
    """A new folder says what is special about it."""
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert {folder for folder in folders if f"[{folder}]({folder})" not in PAGE} == set()
