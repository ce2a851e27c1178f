"""Tensors on disk that know their dtype, shape and place, and cost no memory until they are read."""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, Self, SupportsIndex, TypeVar

from streamoff.errors import UsageError
from streamoff.tensors.digests import PageDigests
from streamoff.tensors.dtypes import itemsize, torch_dtype
from streamoff.tensors.files import DEFAULT_STORAGE, Dispose, Guard, Storage
from streamoff.tensors.layout import DEFAULT_LIMITS, HeaderLimits, Layout
from streamoff.tensors.reader import FileReader, read_layout
from streamoff.tensors.state import span, within
from streamoff.tensors.views import as_bytes
from streamoff.types import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Hop", "LazyStateDict", "LazyTensor", "open_state"]

T = TypeVar("T")


class Hop(Protocol):
    """Runs a blocking call in a thread and waits for it without blocking the event loop."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]:
        """Await the result of ``call``."""
        ...


async def _hop(call: Callable[[], T], /) -> T:
    from anyio import to_thread  # noqa: PLC0415 -- this layer needs no event loop until it is asked

    return await to_thread.run_sync(call)


class _Files:
    """What a lazy state dict and its tensors share; when the last of them is gone, so is the disk."""

    def __init__(
        self,
        reader: FileReader,
        hop: Hop,
        dispose: Dispose | None,
    ) -> None:
        self.reader: Final = reader
        self.hop: Final = hop
        self._finalizer: Final = (
            weakref.finalize(self, _dispose, dispose, reader.path.parent, os.getpid())
            if dispose is not None
            else None
        )
        if self._finalizer is not None:
            self._finalizer.atexit = (
                False  # at exit the job root's owner, or the next start, removes
            )

    def read(self, start: int, buffer: memoryview, tensor: str | None = None) -> None:
        """Fill ``buffer`` with data-relative bytes."""
        self.reader.read(self.reader.layout.data_start + start, buffer, tensor=tensor)

    def release(self) -> None:
        self.reader.close()
        if self._finalizer is not None:
            self._finalizer()


def _dispose(dispose: Dispose, directory: Path, pid: int) -> None:
    """Hand the directory over, unless this is a forked child: the files are its parent's."""
    if os.getpid() == pid:
        dispose(directory)


class _Stays:
    """Refuses to leave the process: what lies on this disk means nothing elsewhere."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} cannot be copied, pickled or persisted",
            hint="Materialise it first, or send it: its file is served",
        )


class LazyTensor(_Stays):
    """One tensor on disk.

    Args:
        name: As in the state dict; for a tied tensor its own name.
        spec: Its entry.
        files: Shared with its state dict; holding the tensor keeps the file.
    """

    __slots__ = ("__weakref__", "_files", "_spec", "name")

    def __init__(self, name: str, spec: TensorSpec, files: _Files) -> None:
        self.name: Final = name
        self._spec: Final = spec
        self._files: Final = files

    @property
    def dtype(self) -> torch.dtype:
        """Element type; importing torch."""
        return torch_dtype(self._spec.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; () for a scalar."""
        return self._spec.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self._spec.nbytes

    @property
    def reader(self) -> FileReader:
        """The file it lies in; tensors of one file share it."""
        return self._files.reader

    def numel(self) -> int:
        """Number of elements."""
        return self._spec.numel

    def materialize(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Read the tensor into new memory: blocking, a copy of its own each time.

        Args:
            device: Where it shall live; the CPU by default.

        Raises:
            JobClosedError: Its job is closed, or its state dict was released.
            IntegrityError: The bytes on disk are not those that landed.
            TruncatedFileError: The file is shorter than its header says.
            LandingError: The system cannot read it.
            MemoryError: There is no room for it.
        """
        from streamoff.tensors.memory import byte_view, empty  # noqa: PLC0415 -- imports torch

        tensor = empty(self._spec)
        self._files.read(self._spec.start, byte_view(tensor), self.name)
        return tensor if device is None else tensor.to(device)

    async def load(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Materialise in a thread; see :meth:`materialize`.

        Cancellation: waits for the read, whose result is dropped.
        """
        return await self._files.hop(lambda: self.materialize(device))

    def blocks(self, max_bytes: int) -> Iterator[torch.Tensor]:
        """Read the tensor block by block, in row-major order.

        Args:
            max_bytes: Of one block, > 0; a block is at least one element.

        Yields:
            Flat CPU tensors with memory of their own.

        Raises:
            UsageError: ``max_bytes`` is not positive.
            Others: As :meth:`materialize`.
        """
        if max_bytes < 1:
            raise UsageError("block size", expected="above 0 bytes", got=max_bytes)
        return self._blocks(max(max_bytes // itemsize(self._spec.dtype), 1))

    def _blocks(self, step: int) -> Iterator[torch.Tensor]:
        from streamoff.tensors.memory import byte_view, empty  # noqa: PLC0415 -- imports torch

        size = itemsize(self._spec.dtype)
        for at in range(0, self._spec.numel, step):
            count = min(step, self._spec.numel - at)
            start = self._spec.start + at * size
            block = empty(TensorSpec(self.name, self._spec.dtype, (count,), 0, count * size))
            self._files.read(start, byte_view(block), self.name)
            yield block

    def read_into(self, buffer: memoryview, start: int = 0) -> None:
        """Fill ``buffer`` with bytes of the tensor (row-major), from byte ``start`` on: blocking.

        Raises:
            UsageError: The range is not inside the tensor.
            Others: As :meth:`materialize`.
        """
        within(self._spec, start, as_bytes(buffer).nbytes)
        self._files.read(self._spec.start + start, buffer, self.name)

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self._spec.dtype}, shape={self.shape})"


class LazyStateDict(_Stays, Mapping[str, LazyTensor]):
    """A landed payload: name to lazy tensor, in file order, tied names last.

    Owns the directory of its file if ``dispose`` is given: ``release()``, leaving the ``with`` block, or
    the last reference to it and its tensors going away hands the directory to ``dispose``, once.

    Args:
        path: The safetensors file.
        layout: Its layout.
        pages: Page digests; None: reads are not verified.
        nonfinite: Names of tensors known to hold a NaN or an infinity.
        guard: Entered around each read.
        dispose: Takes the directory; called on whichever thread lets go, so it must not block.
        hop: How ``load`` leaves the event loop; a thread of anyio's by default.
        storage: Whether reads leave the file in the page cache.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        *,
        pages: PageDigests[int] | None = None,
        nonfinite: frozenset[str] = frozenset(),
        guard: Guard | None = None,
        dispose: Dispose | None = None,
        hop: Hop | None = None,
        storage: Storage = DEFAULT_STORAGE,
    ) -> None:
        reader = FileReader(path, layout, pages=pages, guard=guard, storage=storage)
        self._files: Final = _Files(reader, hop or _hop, dispose)
        self._nonfinite: Final = nonfinite

    @property
    def path(self) -> Path:
        """The file."""
        return self._files.reader.path

    @property
    def layout(self) -> Layout:
        """Names, dtypes, shapes and places."""
        return self._files.reader.layout

    @property
    def nonfinite(self) -> frozenset[str]:
        """Names of tensors that hold a NaN or an infinity, if the landing looked; else empty."""
        return self._nonfinite

    @property
    def reader(self) -> FileReader:
        """Verified positional reads of the file, header included; keep the dict while using it."""
        return self._files.reader

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of one tensor; see ``State``."""
        self[name].read_into(buffer, start)

    def read_span(self, start: int, stop: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of the data section in one read; see ``State``."""
        self._files.read(start, span(self.layout, start, stop, buffer))

    def tensor(self, name: str) -> torch.Tensor:
        """Materialise one tensor."""
        return self[name].materialize()

    def release(self) -> None:
        """Free the disk now; reads raise JobClosedError from here on. Idempotent, does not block."""
        self._files.release()

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(name, self.layout.spec(name), self._files)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.by_name or name in self.layout.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    __eq__ = object.__eq__  # two state dicts are equal if they are one: comparing would read both
    __hash__ = object.__hash__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"LazyStateDict({len(self)} tensors, {self.layout.data_nbytes} bytes)"


def open_state(
    path: Path | str,
    *,
    limits: HeaderLimits = DEFAULT_LIMITS,
    storage: Storage = DEFAULT_STORAGE,
) -> LazyStateDict:
    """Open any existing safetensors file lazily; it stays the caller's, and its pages unverified.

    Args:
        path: The file.
        limits: Of its header.
        storage: Whether reads leave it in the page cache.

    Raises:
        TruncatedFileError: The file ends before its header or its data does.
        HeaderError: Not a safetensors file.
        LimitError: A header above a limit.
        OSError: The file cannot be opened or read.
    """
    path = Path(path)
    return LazyStateDict(path, read_layout(path, limits), storage=storage)
