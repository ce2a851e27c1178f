"""Reading ahead: while one block is calculated, the next one is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self, TypeVar

from streamoff.fl.aggregation.arithmetic import Bytes
from streamoff.fl.aggregation.buffers import reserve

__all__ = ["ReadAhead"]

T = TypeVar("T")


class ReadAhead:
    """Two buffers and one thread, whatever is read through them.

    A context manager: leaving it waits for a read in flight, because the buffers are its own.

    Args:
        nbytes: Size of each buffer.
    """

    def __init__(self, nbytes: int) -> None:
        self._buffers: Final = tuple(reserve(nbytes) for _ in range(2))
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="streamoff-read-ahead")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def each(self, reads: Iterable[Callable[[Bytes], T]]) -> Iterator[T]:
        """Call each read with a buffer, one ahead of the consumer.

        Yields:
            What the reads return, in order; a view of a buffer is valid until the next step.

        Raises:
            Exception: What a read raised, when its turn has come.
        """
        ahead: Future[T] | None = None
        for turn, read in enumerate(reads):
            future = self._thread.submit(read, self._buffers[turn % 2])
            if ahead is not None:
                yield ahead.result()
            ahead = future
        if ahead is not None:
            yield ahead.result()
