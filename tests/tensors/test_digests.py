"""Page digests are the same however the bytes came."""

from __future__ import annotations

import random

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


def test_a_chunk_digest_is_plain_xxh3() -> None:
    """Another implementation needs nothing but XXH3-128 in its canonical byte order."""
    assert chunk_digest(()).hex() == "99aa06d3014798d86001c324468d497f"
    assert chunk_digest(_cut(CONTENT, [7, 0, 300_000])) == xxhash.xxh3_128_digest(CONTENT)


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
    """A run yields exactly the pages it holds whole, and feeds every byte to the chunk's digest."""
    start, stop = min(start, stop), max(start, stop)
    chunk = xxhash.xxh3_128()
    found = page_digests(_cut(CONTENT[start:stop], sizes), start, len(CONTENT), also=chunk)
    edges = [(page, page * PAGE, min((page + 1) * PAGE, len(CONTENT))) for page in range(3)]
    assert found == {
        page: xxhash.xxh3_64_intdigest(CONTENT[low:high])
        for page, low, high in edges
        if start <= low and high <= stop
    }
    assert chunk.digest() == xxhash.xxh3_128_digest(CONTENT[start:stop])
