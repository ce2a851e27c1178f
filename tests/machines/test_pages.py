"""The manual's pages about machines are current, and their examples say what they claim."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.core

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script beside the pages."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("render_tables", DOCS / "render_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "render_tables", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A copy of the pages."""
    return Path(shutil.copytree(DOCS / "explanation" / "machines", tmp_path / "machines"))


def test_the_pages_are_current(renderer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """What the manual shows of every table is what the table is."""
    assert renderer.main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_page_is_found_shown_and_mended(
    renderer: ModuleType, pages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check names page and line and changes nothing; a run repairs it, and is then a no-op."""
    page = pages / "download.md"
    good = page.read_text(encoding="utf-8")
    page.write_text(good.replace("IDLE --> OPENING: Started", "IDLE --> DONE: Magic"), "utf-8")
    stale = page.read_text(encoding="utf-8")
    assert renderer.main(["--check"], pages) == 1
    said = capsys.readouterr().out
    assert "download.md" in said
    assert "-    IDLE --> DONE: Magic" in said
    assert "python docs/render_tables.py" in said
    assert page.read_text(encoding="utf-8") == stale
    assert renderer.main([], pages) == 0
    assert page.read_text(encoding="utf-8") == good
    assert renderer.main(["--check"], pages) == 0


def test_every_page_shows_its_table_and_picture(renderer: ModuleType, pages: Path) -> None:
    """No region can be lost from a page unnoticed."""
    for name, subject in renderer.SUBJECTS.items():
        regions = set(re.findall(r"<!-- generated: (\w+) -->", (pages / f"{name}.md").read_text()))
        expected = {"diagram", "cells", "events", "effects"} if subject.machine else set()
        assert regions == expected | ({"bounds"} if subject.bounds else set()), name


def test_an_unknown_region_is_refused(renderer: ModuleType) -> None:
    """A misspelt mark is said to be one."""
    text = "<!-- generated: picture -->\n<!-- end generated -->"
    with pytest.raises(SystemExit, match="unknown region 'picture'"):
        renderer.render(text, renderer.SUBJECTS["serving"])


def test_the_tutorial_prints_what_it_shows() -> None:
    """Every example of the tutorial runs, in order, and its output is the one on the page."""
    text = (DOCS / "tutorial" / "watch-a-transfer.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    printed = ""
    for language, block in re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL):
        if language == "text":
            assert block == printed
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        printed = out.getvalue()
