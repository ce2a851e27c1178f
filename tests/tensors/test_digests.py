"""Page digests are the same however the bytes came."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given, strategies as st

from streamoff.tensors.digests import PAGE, chunk_digest, page_count, page_digests
from streamoff.tensors.views import Views

CONTENT = random.Random(1).randbytes(2 * PAGE + 1000)


def _cut(content: bytes, sizes: list[int]) -> Views:
    views, at = [], 0
    for size in [*sizes, len(content)]:
        views.append(memoryview(content)[at : at + size])
        at += size
    return tuple(views)


@pytest.mark.parametrize("start", [0, 1, PAGE - 3, PAGE, 5 * PAGE + 7])
def test_a_chunk_digest_is_made_of_the_digests_of_pieces(start: int) -> None:
    """Another implementation needs nothing but XXH3 in its canonical byte order, and where pages end."""
    edges = [0, *range(PAGE - start % PAGE, len(CONTENT), PAGE), len(CONTENT)]
    pieces = [CONTENT[low:high] for low, high in pairwise(edges)]
    expected = xxhash.xxh3_128_digest(b"".join(map(xxhash.xxh3_64_digest, pieces)))
    assert chunk_digest(_cut(CONTENT, [7, 0, 300_000]), start) == expected


def test_a_chunk_digest_of_nothing_is_that_of_no_bytes() -> None:
    """A chunk without bytes has no pieces."""
    assert chunk_digest((), 5).hex() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("at", [0, PAGE - 1, PAGE, len(CONTENT) - 1])
def test_a_chunk_digest_depends_on_every_byte_and_on_their_order(at: int) -> None:
    """One byte that is different, or two pieces that change places, show."""
    other = bytearray(CONTENT)
    other[at] ^= 1
    swapped = CONTENT[PAGE : 2 * PAGE] + CONTENT[:PAGE] + CONTENT[2 * PAGE :]
    right = chunk_digest((memoryview(CONTENT),), 0)
    assert chunk_digest((memoryview(other),), 0) != right
    assert chunk_digest((memoryview(swapped),), 0) != right


@pytest.mark.parametrize(
    ("size", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2), (3 * PAGE, 3)]
)
def test_the_last_page_may_be_short(size: int, pages: int) -> None:
    """A file of any size has whole pages and at most one short one."""
    assert page_count(size) == pages
    assert set(page_digests((memoryview(bytes(size)),), 0, size)) == set(range(pages))


@given(
    start=st.integers(0, len(CONTENT)),
    stop=st.integers(0, len(CONTENT)),
    sizes=st.lists(st.integers(0, PAGE + 7), max_size=5),
)
def test_only_whole_pages_are_digested(start: int, stop: int, sizes: list[int]) -> None:
    """A run yields exactly the pages it holds whole, however it is cut."""
    start, stop = min(start, stop), max(start, stop)
    found = page_digests(_cut(CONTENT[start:stop], sizes), start, len(CONTENT))
    edges = [(page, page * PAGE, min((page + 1) * PAGE, len(CONTENT))) for page in range(3)]
    assert found == {
        page: xxhash.xxh3_64_intdigest(CONTENT[low:high])
        for page, low, high in edges
        if start <= low and high <= stop
    }
