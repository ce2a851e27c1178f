"""Digests: one per page of a landed file, and one per chunk on the wire that is made of them.

Every byte is digested once at each end: what verifies a chunk leaves the digests of its pages behind. XXH3 finds
damage, not forgery: a peer that lies about bytes lies about their digest too.
"""

from __future__ import annotations

import sys
from array import array
from typing import Final

import xxhash

from streamoff.tensors.views import Views, nbytes

__all__ = [
    "DIGEST_BYTES",
    "PAGE",
    "PageDigests",
    "PieceDigester",
    "chunk_digest",
    "combined",
    "page_count",
    "page_digests",
    "piece_digests",
    "whole_pages",
]

PAGE: Final = 256 * 1024
"""Bytes of a payload that share a digest; reads of a landed file verify whole pages."""

DIGEST_BYTES: Final = 16
"""Length of a chunk's digest."""

PageDigests = array
"""One XXH3-64 per page, typecode "Q", indexed by page number."""


def chunk_digest(views: Views, start: int) -> bytes:
    """Return the digest of a chunk, 16 bytes.

    Args:
        views: Its bytes.
        start: Payload offset of the first one.
    """
    return combined(piece_digests(views, start))


def combined(pieces: PageDigests[int]) -> bytes:
    """Return the digest of the chunk whose pieces have these: XXH3-128 over them, each 8 bytes, big-endian."""
    if sys.byteorder == "little":
        pieces = pieces[:]
        pieces.byteswap()
    return xxhash.xxh3_128_digest(pieces)


def page_count(size: int) -> int:
    """Return the number of pages of a file of ``size`` bytes; the last one may be short."""
    return -(-size // PAGE)


class PieceDigester:
    """Digests a run of bytes piece by piece, as they come; a piece ends where a page ends.

    Args:
        start: Payload offset of the first byte.
    """

    def __init__(self, start: int) -> None:
        self._found: PageDigests[int] = array("Q")
        self._piece: Final = xxhash.xxh3_64()
        self._at = start
        self._begun = False

    def update(self, views: Views) -> None:
        """Digest the next bytes, in one pass."""
        for view in views:
            rest = view
            while rest:
                part = rest[: PAGE - self._at % PAGE]
                rest = rest[len(part) :]
                self._piece.update(part)
                self._at += len(part)
                self._begun = self._at % PAGE != 0
                if not self._begun:
                    self._close()

    def finish(self) -> PageDigests[int]:
        """Return the XXH3-64 of each piece, in order: all but the first and the last are whole pages."""
        if self._begun:
            self._begun = False
            self._close()
        return self._found

    def _close(self) -> None:
        self._found.append(self._piece.intdigest())
        self._piece.reset()


def piece_digests(views: Views, start: int) -> PageDigests[int]:
    """Digest a run of bytes piece by piece, in one pass; see :class:`PieceDigester`.

    Args:
        views: The bytes, from payload offset ``start`` on.
        start: Payload offset.
    """
    digester = PieceDigester(start)
    digester.update(views)
    return digester.finish()


def whole_pages(pieces: PageDigests[int], start: int, stop: int, size: int) -> dict[int, int]:
    """Return the digests of those pieces of a run that are whole pages, by page number.

    Args:
        pieces: Of the run.
        start: Its first byte.
        stop: Where it ends.
        size: Of the payload: a page that ends there is whole although it is short.
    """
    first = start // PAGE
    found = dict(enumerate(pieces, first))
    if start % PAGE:
        found.pop(first, None)
    if stop % PAGE and stop != size:
        found.pop(stop // PAGE, None)
    return found


def page_digests(views: Views, start: int, size: int) -> dict[int, int]:
    """Digest every whole page of a run, in one pass over its bytes; see :func:`whole_pages`."""
    pieces = piece_digests(views, start)
    return whole_pages(pieces, start, start + nbytes(views), size)
