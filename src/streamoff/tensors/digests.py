"""Digests: one per chunk on the wire, one per page of a landed file.

XXH3 finds damage, not forgery: a peer that lies about bytes lies about their digest too.
"""

from __future__ import annotations

from array import array
from typing import Final

import xxhash

from streamoff.tensors.views import Views

__all__ = ["DIGEST_BYTES", "PAGE", "PageDigests", "chunk_digest", "page_count", "page_digests"]

PAGE: Final = 256 * 1024
"""Bytes of a landed file that share a digest; reads verify whole pages."""

DIGEST_BYTES: Final = 16
"""Length of a chunk's digest."""

PageDigests = array
"""One XXH3-64 per page, typecode "Q", indexed by page number."""


def chunk_digest(views: Views) -> bytes:
    """Return the XXH3-128 of a run of bytes, 16 bytes, big-endian."""
    hasher = xxhash.xxh3_128()
    for view in views:
        hasher.update(view)
    return hasher.digest()


def page_count(size: int) -> int:
    """Return the number of pages of a file of ``size`` bytes; the last one may be short."""
    return -(-size // PAGE)


def page_digests(
    views: Views, start: int, size: int, *, also: xxhash.xxh3_128 | None = None
) -> dict[int, int]:
    """Digest every whole page of a run, in one pass over its bytes.

    Args:
        views: The bytes, from offset ``start`` of the file on.
        start: Offset in the file.
        size: Size of the file: a page that ends there is whole although it is short.
        also: Fed with every byte of the run in the same pass, while it is warm in the cache.

    Returns:
        Page number to XXH3-64; pages only part of which is in the run are left out.
    """
    found: dict[int, int] = {}
    page = xxhash.xxh3_64()
    at, whole = start, start % PAGE == 0
    for view in views:
        rest = view
        while rest:
            piece = rest[: PAGE - at % PAGE]
            rest = rest[len(piece) :]
            at += len(piece)
            if also is not None:
                also.update(piece)
            if whole:
                page.update(piece)
            if at % PAGE == 0 or at == size:
                if whole:
                    found[(at - 1) // PAGE] = page.intdigest()
                page.reset()
                whole = True
    return found
