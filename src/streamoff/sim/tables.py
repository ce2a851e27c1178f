"""Plain text for terminals: aligned columns, harmless characters."""

from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["aligned", "printable"]

WIDEST: Final = 72
"""A column grows to so many characters; longer cells stick out instead of pushing the others away."""


def aligned(rows: Sequence[Sequence[str]], *, left: frozenset[int] = frozenset()) -> Iterator[str]:
    """Yield rows as lines in which each column is as wide as its widest cell.

    Args:
        rows: Cells; every row has the same number.
        left: Columns that are aligned to the left; the others are aligned to the right.
    """
    widths = [min(max(map(len, column)), WIDEST) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def printable(text: str) -> str:
    """Escape the characters of a stranger's text that could steer a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
