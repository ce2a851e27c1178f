"""Keeping the global model: one safetensors file that is always whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from streamoff.errors import UsageError
from streamoff.fl.aggregation.buffers import reserve
from streamoff.fl.aggregation.engine import Stop, never_stop
from streamoff.tensors.files import PageCache, Storage
from streamoff.tensors.layout import Layout
from streamoff.tensors.lazy import LazyStateDict, open_state
from streamoff.tensors.state import MemoryState, State
from streamoff.tensors.writer import FileWriter
from streamoff.types import CHUNK_BYTES

__all__ = ["FilePersistor"]


class FilePersistor:
    """Publishes models at one path.

    A model is written under ``<name>.part`` beside its target and renamed over it, so a reader of the
    target sees the previous model or the new one, and a failure leaves the previous one. The bytes are
    copied: the model may come from another file system. One persistor at a time may write a target.

    Args:
        target: The file, made with mode 0666 less the umask; its directory is made if need be. A symbolic
            link is followed, its file replaced.
        durable: Whether :meth:`save` returns only when the file and its name are on stable storage.
        page_cache: Whether the file may stay in the page cache; see :class:`~streamoff.tensors.files.Storage`.

    Raises:
        UsageError: A value of the wrong kind.
    """

    def __init__(
        self, target: Path | str, *, durable: bool = False, page_cache: PageCache = "keep"
    ) -> None:
        self.target: Final = Path(target)
        self._storage: Final = Storage(durable=durable, page_cache=page_cache, public=True)

    def load(self) -> LazyStateDict:
        """Open the published model; nothing but its header is read.

        Raises:
            OSError: There is none, or it cannot be read.
            HeaderError: It is no safetensors file.
            TruncatedFileError: It is not whole.
        """
        return open_state(self.target.resolve())

    def new_writer(self, layout: Layout) -> FileWriter:
        """Return a writer whose ``finish()`` publishes; an engine writes its result straight here.

        Raises:
            NoSpaceError: No room; the previous model is untouched.
            LandingError: The file cannot be made; so here.
        """
        path = self.target.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileWriter(path, layout, storage=self._storage)

    def save(
        self, model: State | Mapping[str, object], *, stop: Stop = never_stop
    ) -> LazyStateDict:
        """Publish a model.

        Args:
            model: A state, borrowed; or concrete tensors. A mapping that holds lazy tensors is refused:
                they belong to a job that ends, and to the site they came from.
            stop: Called between blocks of 4 MiB.

        Returns:
            The published model.

        Raises:
            UsageError: A value is not a concrete tensor; nothing was touched.
            LandingError: It cannot be written; the previous model is untouched.
            TransferError: It cannot be read; so here.
        """
        state = model if isinstance(model, State) else _concrete(model)
        layout = state.layout
        writer = self.new_writer(layout)
        buffer = reserve(min(CHUNK_BYTES, layout.data_nbytes)).data
        try:
            for start in range(0, layout.data_nbytes, CHUNK_BYTES):
                stop()
                part = buffer[: min(CHUNK_BYTES, layout.data_nbytes - start)]
                state.read_span(start, start + len(part), part)
                writer.write(start, part)
            stop()
            return writer.finish()
        except BaseException:
            writer.discard()
            raise


def _concrete(model: Mapping[str, object]) -> State:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                "only concrete tensors are persisted",
                expected="a torch.Tensor",
                got=type(value).__name__,
                hint="Materialise it first" if hasattr(value, "materialize") else None,
                tensor=name,
            )
        tensors[name] = value
    return MemoryState(tensors)
