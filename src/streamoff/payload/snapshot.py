"""Copies of a tree's own tensors, on disk, so that the originals may change while they are served."""

from __future__ import annotations

from dataclasses import replace

import anyio

from streamoff.errors import JobClosedError
from streamoff.payload.encode import Encoded, Own
from streamoff.runtime.jobs import Job
from streamoff.runtime.threads import run_in_thread
from streamoff.tensors.lazy import LazyStateDict
from streamoff.tensors.sources import FileSource, Source
from streamoff.tensors.writer import FileWriter
from streamoff.types import CHUNK_BYTES

__all__ = ["snapshot_of"]


async def snapshot_of(encoded: Encoded, job: Job) -> Encoded:
    """Copy what is borrowed from memory to files under the job's root; what lies in files stays as it is.

    The copying is a consumer of the root: it shares the drain window.

    Args:
        encoded: A tree whose sources are open; those that were copied are closed.
        job: Whose root and quota.

    Raises:
        QuotaExceededError, NoSpaceError, LandingError: No room. Nothing is left of the snapshot.
        SourceChangedError: A tensor changed while it was copied. Nothing is left.
        JobClosedError: The job is closing. Nothing is left.

    Cancellation: as a failure; a block that is being written is waited for.
    """
    made: list[LazyStateDict] = []
    refs = list(encoded.refs)
    try:
        for index, one in enumerate(refs):
            if isinstance(one, Own) and one.borrowed:
                made.append(await _as_consumer(job, one.source))
                refs[index] = Own(_CopySource(made[-1]), path=made[-1].path)
                one.source.close()
    except BaseException:
        for state in made:
            state.release()
        raise
    return replace(encoded, refs=tuple(refs))


class _CopySource(FileSource):
    """Serves a copy that nobody else has: its file is freed when the transaction settles."""

    def __init__(self, state: LazyStateDict) -> None:
        super().__init__(state)
        self._state = state

    def close(self) -> None:
        """Free the file."""
        super().close()
        self._state.release()


async def _as_consumer(job: Job, source: Source) -> LazyStateDict:
    made: list[LazyStateDict] = []
    failures: list[Exception] = []

    async def copy() -> None:
        try:
            made.append(await _copied(job, source))
        except Exception as error:  # noqa: BLE001 - the sender's failure, not the job's
            failures.append(error)

    consumer = job.start(copy, name=f"a snapshot of {source.layout.size} bytes")
    try:
        await consumer.wait()
    except BaseException:
        consumer.cancel()
        with anyio.CancelScope(shield=True):
            await consumer.wait()
        for state in made:
            state.release()
        raise
    if failures:
        raise failures[0]
    if not made:
        raise JobClosedError("the job closed while a snapshot was made", job=job.name)
    return made[0]


async def _copied(job: Job, source: Source) -> LazyStateDict:
    """Copy a source block by block, one thread hop each; a small one in one hop in all."""
    copy = _Copy(job, source)
    limiter = job.endpoint.resources.landing
    try:
        if source.layout.size <= CHUNK_BYTES:
            return await run_in_thread(copy.whole, limiter=limiter)
        await run_in_thread(copy.begin, limiter=limiter)
        for start in copy.blocks():
            await run_in_thread(copy.block, start, limiter=limiter)
        return await run_in_thread(copy.finish, limiter=limiter)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await run_in_thread(copy.discard, limiter=limiter)
        raise


class _Copy:
    """A file in the making; all methods block."""

    def __init__(self, job: Job, source: Source) -> None:
        self._job = job
        self._source = source
        self._layout = source.layout
        self._writer: FileWriter | None = None
        self._buffer = memoryview(b"")

    def begin(self) -> FileWriter:
        what = f"a snapshot of {self._layout.size} bytes"
        self._writer = self._job.new_writer(self._layout, what)
        return self._writer

    def blocks(self) -> range:
        return range(self._layout.data_start, self._layout.size, CHUNK_BYTES)

    def block(self, start: int) -> None:
        assert self._writer is not None
        stop = min(start + CHUNK_BYTES, self._layout.size)
        views = self._source.views(start, stop)
        if views is None:
            if not self._buffer:
                self._buffer = memoryview(bytearray(CHUNK_BYTES))
            views = (self._buffer[: stop - start],)
            self._source.read_into(start, views[0])
        self._writer.put(start, views)

    def finish(self) -> LazyStateDict:
        """Publish it, if what was copied first is still what it was when the last was copied."""
        assert self._writer is not None
        self._source.check()
        return self._writer.finish()

    def whole(self) -> LazyStateDict:
        self.begin()
        for start in self.blocks():
            self.block(start)
        return self.finish()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
