"""The page on cancellation says what the code says."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "cancellation.md"
ROW = re.compile(r"^\| [^|]+ \| (?P<bound>[^|]+) \| `(?P<constant>[\w.]+)` \|$", re.MULTILINE)
UNITS = {"KiB": 1024, "MiB": 1024**2, "s": 1, "": 1}


def rows() -> list[tuple[str, str]]:
    """The rows of the table of bounds that name a constant."""
    return [
        (row["constant"], row["bound"]) for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(("constant", "bound"), rows())
def test_a_bound_on_the_page_is_the_bound_in_the_code(constant, bound):
    """Every number in the table of bounds is the constant that it names."""
    module, _, name = constant.rpartition(".")
    value = getattr(importlib.import_module(f"streamoff.{module}"), name)
    number, unit = re.findall(r"([\d.]+) ?(KiB|MiB|s)?(?=$|,)", bound.strip())[-1]
    assert value == float(number) * UNITS[unit]


def test_the_table_of_bounds_is_found():
    """The table has not slipped past the expression that reads it."""
    assert len(rows()) >= 25
