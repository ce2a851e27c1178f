"""Sizes as people write them."""

import pytest
from hypothesis import given, strategies as st

from streamoff.errors import UsageError
from streamoff.sim.sizes import format_number, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("20MB", 20_000_000),
        ("1kB", 1000),
        ("3B", 3),
        ("0.1KiB", 102),
    ],
)
def test_a_size_is_read_exactly(text: str, nbytes: int) -> None:
    """A number and a unit become bytes without a float in between."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "1e3", "1.MiB", "0", "0.0001B", "5 apples", "9999999TiB", "\u0661MiB", "nan"],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    """Text that is no size, or one that no file has, is the caller's error and is quoted."""
    with pytest.raises(UsageError):
        parse_size(text)


@given(st.integers(1, 2**50))
def test_a_written_size_reads_back_within_its_precision(nbytes: int) -> None:
    """What is written for people is the size, rounded to a tenth of its unit."""
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.06)


def test_a_difference_may_be_negative() -> None:
    """A size below zero is written with its sign."""
    assert format_size(-1536) == "-1.5 KiB"
    assert format_size(1023) == "1023 B"
    assert format_size(1024**2 - 1) == "1.0 MiB"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98333, "0.9833"),
        (4096.0, "4096"),
        (0.0, "0"),
        (1.49e-8, "1.49e-08"),
        (-2.5, "-2.5000"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_a_metric_is_written_for_people(value: float, text: str) -> None:
    """Whole numbers have no fraction, small ones an exponent, and what is no number is a word."""
    assert format_number(value) == text
