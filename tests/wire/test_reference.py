"""The page on the wire says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from streamoff.errors import UsageError
from streamoff.types import Capability
from streamoff.wire.codec import ABANDON, CONTINUATION, MAGIC
from streamoff.wire.frames import PROTOCOL_VERSION, ErrorCode, FrameType
from streamoff.wire.limits import DEFAULT_LIMITS, MIN_PIECE, Limits, LinkLimits
from streamoff.wire.shapes import SHAPES

pytestmark = pytest.mark.core

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in PAGE.splitlines()
    if row.startswith("|")
]
ROUTED = ("to", "sender", "hops")


@pytest.mark.parametrize("kind", FrameType, ids=lambda kind: kind.name)
def test_each_frame_is_on_the_page(kind: FrameType) -> None:
    """Every frame has a row with its number, its name, exactly its fields in order, and its body."""
    (row,) = [row for row in ROWS if row[0] == str(kind.value) and row[1].isalpha()]
    shape = SHAPES[kind]
    assert row[1] == shape.name
    mine = [name for name, _ in shape.fields if name not in ROUTED]
    told = [name for name in re.findall(r"`(\w+)`", row[2]) if name in mine]
    assert list(dict.fromkeys(told)) == mine
    assert (row[3] == "none") == (shape.body is None)
    if shape.body is not None:
        assert f"`{shape.body}`" in row[3]


def _spans(kind: Any) -> dict[str, tuple[int, str]]:
    found = {}
    for item in fields(kind):
        if item.name != "link":
            with pytest.raises(UsageError) as caught:
                kind(**{item.name: -1})
            span = str(caught.value.expected).removeprefix("an integer from ")
            source = DEFAULT_LIMITS if kind is Limits else DEFAULT_LIMITS.link
            found[item.name] = (getattr(source, item.name), span)
    return found


def test_each_limit_is_on_the_page() -> None:
    """Every limit has a row with its default and the span it may be set to, and there is no other."""
    told = {
        row[0].strip("`"): (int(row[1].replace(",", "")), row[2].replace(",", ""))
        for row in ROWS
        if len(row) == 4 and row[1].replace(",", "").isdigit() and row[0].startswith("`")
    }
    assert told == {**_spans(LinkLimits), **_spans(Limits)}


def test_constants_are_on_the_page() -> None:
    """Magic, special types, the smallest piece, the version, codes and capabilities are as written."""
    assert f"`{MAGIC:#04X}`".replace("X", "x") in PAGE
    assert f"{CONTINUATION} continuation, 1 to 14 a frame with a header, {ABANDON} abandon" in PAGE
    assert f"at least {MIN_PIECE:,} bytes" in PAGE
    assert f"this page is version {PROTOCOL_VERSION}" in PAGE
    for name in (*ErrorCode, *Capability):
        assert f"`{name}`" in PAGE
