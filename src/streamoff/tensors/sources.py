"""What serves a payload: tensors in memory, or an existing safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from streamoff.errors import JobClosedError
from streamoff.tensors.files import Guard
from streamoff.tensors.layout import DEFAULT_LIMITS, HeaderLimits, Layout
from streamoff.tensors.lazy import LazyStateDict, LazyTensor
from streamoff.tensors.reader import FileReader
from streamoff.tensors.views import Views

if TYPE_CHECKING:
    import torch

    from streamoff.tensors.memory import TensorBytes

__all__ = ["FileSource", "Source", "StateDictSource"]

_SMALL: Final = 16 * 1024
"""Mean bytes of a tensor under which a chunk is so many pieces that copying it takes milliseconds."""

_MANY: Final = 256
"""Fewer tensors than this are never too many, however small."""


@runtime_checkable
class Source(Protocol):
    """Bytes of one payload, by range; ranges count from the header's first byte."""

    @property
    def layout(self) -> Layout:
        """Names, dtypes, shapes and places."""
        ...

    @property
    def blocking(self) -> bool:
        """Whether :meth:`read_into` may take longer than copying its bytes: then use a thread."""
        ...

    def views(self, start: int, stop: int) -> Views | None:
        """Return a range without copying, or None: :meth:`read_into` is the way. Never blocks.

        The views share the source's memory: use them before the source is closed.

        Raises:
            UsageError: The range is not inside the payload.
            SourceChangedError: What the range is made of changed.
        """
        ...

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the payload's bytes from ``start`` on.

        Raises:
            UsageError: The range is not inside the payload.
            SourceChangedError: What the range is made of changed.
            JobClosedError: The source is closed, or its file is gone.
            TransferError: The bytes cannot be had.
        """
        ...

    def check(self) -> None:
        """Make sure that nothing changed since the source was made. May block as reading does.

        Raises:
            SourceChangedError: Something did.
            JobClosedError: The source is closed, or its file is gone.
        """
        ...

    def close(self) -> None:
        """Let go of what is borrowed. Idempotent, does not block."""
        ...


class StateDictSource:
    """Serves tensors from their own memory; nothing is serialised.

    The tensors are borrowed until :meth:`close`. Changing one in the meantime is noticed by its version
    counter, best effort: writes past torch (through NumPy, say) move no counter.

    Args:
        tensors: Name to dense tensor or parameter, on any device, of any strides; tied ones travel once.
        metadata: Free strings for the header.
        limits: What the receiver will accept.

    Raises:
        UnsupportedTensorError: A tensor or a name that cannot travel, named; nothing was borrowed.
        LimitError: More tensors, or a larger header, than a receiver accepts.
        UsageError: Metadata that is not the caller's to set.
        HeaderError: Metadata that is not text.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str] | None = None,
        *,
        limits: HeaderLimits = DEFAULT_LIMITS,
    ) -> None:
        from streamoff.tensors.memory import borrow  # noqa: PLC0415 -- imports torch

        payload = borrow(tensors, metadata, limits)
        self._bytes: TensorBytes | None = payload
        self._layout: Final = payload.layout
        count = len(payload.layout.specs)
        small = count > _MANY and payload.layout.data_nbytes < count * _SMALL
        self._blocking: Final = small or not payload.direct

    @property
    def layout(self) -> Layout:
        """Names, dtypes, shapes and places."""
        return self._layout

    @property
    def blocking(self) -> bool:
        """Whether some tensor must be gathered or fetched from a device, or there are many small ones."""
        return self._blocking

    def views(self, start: int, stop: int) -> Views | None:
        """Return a range of the tensors' own memory; see :class:`Source`."""
        payload = self._open()
        payload.check(start, stop)
        return payload.views(start, stop)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Copy a range; see :class:`Source`."""
        payload = self._open()
        payload.check(start, start + buffer.nbytes)
        payload.read_into(start, buffer)

    def check(self) -> None:
        """Compare every version counter; see :class:`Source`."""
        self._open().check(0, self._layout.size)

    def close(self) -> None:
        """Give the tensors back."""
        self._bytes = None

    def _open(self) -> TensorBytes:
        if self._bytes is None:
            raise JobClosedError("the source is closed")
        return self._bytes


class FileSource:
    """Serves an existing safetensors file by positional reads; the file must not change meanwhile.

    Args:
        file: The file, opened for each read; or a lazy state dict or tensor, which is kept until the source
            is closed and whose pages are verified and guarded as it does itself.
        guard: Entered around each read of a plain file.
        limits: What the receiver will accept.

    Raises:
        TruncatedFileError: The file ends before its header or its data does.
        HeaderError: Not a safetensors file.
        LimitError: A header above a limit.
        OSError: The file cannot be opened or read.
    """

    def __init__(
        self,
        file: Path | LazyStateDict | LazyTensor,
        guard: Guard | None = None,
        *,
        limits: HeaderLimits = DEFAULT_LIMITS,
    ) -> None:
        self._owner = None if isinstance(file, Path) else file
        self._reader: Final = (
            FileReader.frozen(file, limits, guard) if isinstance(file, Path) else file.reader
        )
        self._closed = False

    @property
    def layout(self) -> Layout:
        """Names, dtypes, shapes and places."""
        return self._reader.layout

    @property
    def blocking(self) -> bool:
        """Reading a file may take any time."""
        return True

    def views(self, start: int, stop: int) -> Views | None:  # noqa: ARG002 -- the protocol's
        """Return None: a file is read into a buffer."""
        return None

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Read a range; see :class:`Source`."""
        self._check_open()
        self._reader.read(start, buffer)

    def check(self) -> None:
        """Compare size, mtime and inode; see :class:`Source`."""
        self._check_open()
        self._reader.check()

    def close(self) -> None:
        """Let go of the file."""
        self._closed = True
        self._owner = None

    def _check_open(self) -> None:
        if self._closed:
            raise JobClosedError("the source is closed", path=self._reader.path)
