"""Chunks that are landed as they come, where nothing blocks: in tensors, and in files that are memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from streamoff.errors import IntegrityError
from streamoff.tensors.digests import PieceDigester, combined, whole_pages
from streamoff.tensors.finite import FiniteCheck
from streamoff.tensors.layout import Layout
from streamoff.tensors.views import Views, nbytes
from streamoff.types import ByteRange

__all__ = ["Place", "Target", "verify"]


class Target(Protocol):
    """What a place needs of a writer."""

    @property
    def layout(self) -> Layout:
        """What is being written."""
        ...

    def views(self, start: int, stop: int) -> Views | None:
        """Its own memory for a range of the payload; None: it has none, or in too many pieces."""
        ...

    def lay(self, offset: int, views: Views) -> None:
        """Put bytes in place that do not count yet."""
        ...

    def count(self, item: ByteRange, pages: Mapping[int, int]) -> None:
        """Count a range that was laid, with the digests of its whole pages."""
        ...


def verify(start: int, stop: int, *, given: bytes, actual: bytes) -> None:
    """Compare the digests of a chunk.

    Raises:
        IntegrityError: They differ.
    """
    if given != actual:
        raise IntegrityError(
            "chunk damaged on the way",
            expected=given.hex(),
            got=actual.hex(),
            start=start,
            stop=stop,
        )


class Place:
    """Where one chunk is landed while it comes; what has come counts when all of it was right.

    A pass over the bytes is made when they are here, and in the cache: they are digested, looked at, and, unless
    they were received in ``views``, copied to where they belong. An abandoned place costs nothing.

    Args:
        target: Writes.
        start: Payload offset of the chunk, behind the header.
        stop: Where it ends.
        finite: Looks for NaN and infinities; None: nobody does.
    """

    def __init__(
        self, target: Target, start: int, stop: int, finite: FiniteCheck | None = None
    ) -> None:
        self.views: Final = target.views(start, stop)
        """Memory that the chunk may be received in; None: in a buffer, whose content :meth:`came` copies."""
        self._target: Final = target
        self._item: Final = ByteRange(start, stop)
        self._at = start
        self._digester: Final = PieceDigester(start)
        self._finite: Final = finite
        self._seen: Final = None if finite is None else finite.apart()

    def came(self, views: Views) -> None:
        """Take the next bytes of the chunk.

        Args:
            views: The bytes: the next of ``views``, or of a buffer.

        Raises:
            LandingError: The system refused.
            UsageError: The landing is over.
        """
        self._digester.update(views)
        if self.views is None:
            self._target.lay(self._at, views)
        if self._seen is not None:
            self._seen.feed(self._at - self._target.layout.data_start, views)
        self._at += nbytes(views)

    def done(self, digest: bytes) -> None:
        """Count the chunk as landed, once all of it has come.

        Args:
            digest: :func:`~streamoff.tensors.digests.chunk_digest` of it.

        Raises:
            IntegrityError: The bytes do not have the digest. Nothing was landed.
            LandingError: The system refused.
            UsageError: The landing is over.
        """
        start, stop = self._item.start, self._item.stop
        pieces = self._digester.finish()
        verify(start, self._at, given=digest, actual=combined(pieces))
        self._target.count(self._item, whole_pages(pieces, start, stop, self._target.layout.size))
        if self._finite is not None and self._seen is not None:
            self._finite.adopt(self._seen)
