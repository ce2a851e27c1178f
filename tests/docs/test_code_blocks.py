"""Every Python block of the README and the manual runs as it stands.

The blocks of a page run in order, in one namespace and in a temporary directory. A page whose blocks define tests is
given to pytest as one module instead. A block is left out only by a comment right before it that gives the reason:
``<!-- not run: reason -->``.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<ticks>```+|~~~+)[ \t]*(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)(?P=ticks)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
PYTHON = re.compile(r"(\{code(-block|-cell)?\}\s*)?(python|py|python3|ipython|pycon)\b")
LEFT_OUT = re.compile(r"<!--\s*not run:\s*\S.*?-->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """The code of one fence and the line of the page it begins on."""

    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """Return the Python blocks of a page that are to be run."""
    found = []
    for fence in FENCE.finditer(text):
        info = fence["info"].strip()
        if not PYTHON.match(info):
            continue
        assert info == "python", f"write ```python instead of ```{info}, so that the block is run"
        if not LEFT_OUT.search(text, 0, fence.start()):
            found.append(Block(dedent(fence["code"]), text.count("\n", 0, fence.start("code"))))
    return found


def run_page(page: Path, text: str) -> None:
    """Run the blocks of one page in the current directory."""
    code = blocks(text)
    if any(re.search(r"^(async )?def test_", block.code, re.MULTILINE) for block in code):
        Path("test_page.py").write_text("\n".join(block.code for block in code))
        run = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "--rootdir=.", "-Werror"]
        done = subprocess.run([*run, "test_page.py"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in code:
        # the empty lines make tracebacks point into the page
        exec(compile("\n" * block.line + block.code, page, "exec"), namespace)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]
)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    """A reader who copies the code of a page, from top to bottom, can run it."""
    monkeypatch.chdir(tmp_path)
    run_page(page, page.read_text(encoding="utf-8"))


def test_blocks_share_a_namespace_and_a_directory(tmp_path, monkeypatch):
    """A later block sees the names and files of an earlier one."""
    monkeypatch.chdir(tmp_path)
    text = "```python\nx = 1\nopen('f', 'w').close()\n```\n\n1. list\n\n   ```python\n   y = x\n   ```\n"
    assert [block.line for block in blocks(text)] == [1, 8]
    run_page(Path("page.md"), text)
    assert (tmp_path / "f").exists()


def test_a_failing_block_fails_with_its_line():
    """An error shows the page and the line."""
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(Path("page.md"), "# Title\n\n```python\n1 / 0\n```\n")
    last = caught.traceback[-1]
    assert (Path(last.path).name, last.lineno + 1) == ("page.md", 4)


def test_a_page_with_tests_is_run_by_pytest(tmp_path, monkeypatch):
    """A test in a page that fails fails here."""
    monkeypatch.chdir(tmp_path)
    run_page(Path("page.md"), "```python\ndef test_it():\n    pass\n```\n")
    with pytest.raises(AssertionError, match="1 failed"):
        run_page(Path("page.md"), "```python\ndef test_it():\n    assert False\n```\n")


@pytest.mark.parametrize(
    ("comment", "runs"),
    [
        ("<!-- not run: needs a cluster -->\n", False),
        ("<!-- not run: needs\na cluster -->\n\n", False),
        ("<!-- not run: -->\n", True),
        ("<!-- not run: needs a cluster -->\nSome text.\n", True),
        ("", True),
    ],
)
def test_a_block_is_left_out_only_for_a_reason(comment, runs):
    """The comment must give a reason and stand right before the block."""
    assert len(blocks(f"Text.\n\n{comment}```python\n1 / 0\n```\n")) == runs


@pytest.mark.parametrize("info", ["py", "{code-block} python", "pycon", "python title=x"])
def test_a_block_that_would_escape_is_refused(info):
    """Python under another name would not be run, so it is an error."""
    with pytest.raises(AssertionError, match="write ```python"):
        blocks(f"```{info}\n1 / 0\n```\n")


def test_other_languages_are_left_alone():
    """Shell and output blocks are no Python."""
    assert blocks("```console\n$ python -m streamoff\n```\n\n```\nplain\n```\n") == []
