"""The page on the landing format says what the code does."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from streamoff.tensors.digests import DIGEST_BYTES, PAGE
from streamoff.tensors.dtypes import ITEMSIZE
from streamoff.tensors.landing import PAYLOAD_NAME
from streamoff.tensors.layout import ALIASES, HeaderLimits
from streamoff.types import CHUNK_BYTES

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "landing-format.md").read_text("utf-8")


def test_every_limit_is_on_the_page() -> None:
    """Changing a limit without its row, or adding one, fails here."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+)", TEXT, re.MULTILINE)
    assert {name: int(number) for name, number in rows} == asdict(HeaderLimits())


def test_every_dtype_is_on_the_page() -> None:
    """The list of dtypes is the table in the code."""
    listed = TEXT.split("**Dtypes**")[1].split("Bits travel")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == set(ITEMSIZE)


def test_sizes_and_names_are_on_the_page() -> None:
    """Chunk, page, digest, file name and metadata key are the constants in the code."""
    for stated in (
        f"by default of {CHUNK_BYTES} bytes",
        f"each page of {PAGE} bytes",
        f"its digest of {DIGEST_BYTES} bytes",
        f"Multiples of {PAGE} bytes",
        f"  {PAYLOAD_NAME}.part ",
        f"`{ALIASES}`",
    ):
        assert stated in TEXT
