"""Model parameters between the forms they have on the way: states, tensors, arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamoff.errors import (
    ContributionRejectedError,
    PeerRefusedError,
    UnsupportedTensorError,
    UsageError,
)
from streamoff.fl.aggregation.buffers import reserve
from streamoff.fl.aggregation.engine import NewWriter, Stop, never_stop
from streamoff.payload.leaves import Batch, TensorRef
from streamoff.tensors.files import DEFAULT_STORAGE, Storage
from streamoff.tensors.layout import Layout, plan
from streamoff.tensors.lazy import open_state
from streamoff.tensors.state import MemoryState, State
from streamoff.types import CHUNK_BYTES, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = [
    "arrays_of",
    "by_batch",
    "copy_state",
    "layout_of",
    "load_initial",
    "refs_of",
    "sole_batch",
]


def load_initial(
    initial: Mapping[str, torch.Tensor] | State | Path,
    new_writer: NewWriter,
    *,
    to_disk: bool,
    storage: Storage = DEFAULT_STORAGE,
    stop: Stop = never_stop,
) -> State:
    """The first global model as the workflow keeps it; blocks.

    A file that stays is used where it is if models live on disk; everything else is copied once, so that
    the caller's tensors are never touched.

    Args:
        initial: Tensors by name, a state, or a safetensors file.
        new_writer: Where a copy goes.
        to_disk: Whether models live on disk.
        storage: Whether reads leave a file in the page cache.
        stop: Called between blocks of 4 MiB.

    Raises:
        UsageError: It is none of these.
        UnsupportedTensorError: A tensor that has no place in a safetensors file.
        OSError, HeaderError, TruncatedFileError: The file is not there or not whole.
        LandingError, QuotaExceededError: The copy cannot be written.
    """
    if isinstance(initial, (str, Path)):
        opened = open_state(initial, storage=storage)
        return opened if to_disk else copy_state(opened, new_writer, stop)
    if not isinstance(initial, (State, Mapping)):
        raise UsageError(
            "initial", expected="tensors by name, a state or a file", got=type(initial).__name__
        )
    state = initial if isinstance(initial, State) else MemoryState(initial)
    return copy_state(state, new_writer, stop)


def copy_state(state: State, new_writer: NewWriter, stop: Stop = never_stop) -> State:
    """Copy a state block by block; at most 4 MiB are in memory beside it.

    Args:
        state: Borrowed.
        new_writer: Makes the writer of the copy; it is discarded if anything fails.
        stop: Called between blocks.
    """
    layout = state.layout
    writer = new_writer(layout)
    buffer = reserve(min(CHUNK_BYTES, layout.data_nbytes)).data
    try:
        for start in range(0, layout.data_nbytes, CHUNK_BYTES):
            stop()
            part = buffer[: min(CHUNK_BYTES, layout.data_nbytes - start)]
            state.read_span(start, start + len(part), part)
            writer.write(start, part)
        return writer.finish()
    except BaseException:
        writer.discard()
        raise


def arrays_of(state: State) -> dict[str, np.ndarray[Any, Any]]:
    """A model as ndarrays, as NumPy exchange wants it.

    Raises:
        UnsupportedTensorError: A dtype that NumPy does not have, by name.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name in state.layout.names:
        tensor = state.tensor(name)
        try:
            arrays[name] = tensor.numpy()
        except TypeError as error:
            raise UnsupportedTensorError(
                "NumPy has no such dtype",
                got=tensor.dtype,
                tensor=name,
                hint="Set server_expected_format='pytorch'",
            ) from error
    return arrays


def refs_of(params: object, *, site: str) -> dict[str, TensorRef]:
    """Parameters of a message, all of them still at their source.

    Raises:
        ContributionRejectedError: They are no mapping of names to tensors; nothing has been pulled.
    """
    if type(params) is not dict:
        raise ContributionRejectedError(
            "no parameters", expected="a dict of tensors", got=type(params).__name__, site=site
        )
    for name, value in params.items():
        if type(name) is not str:
            kind = type(name).__name__
            raise ContributionRejectedError("a parameter name", expected="str", got=kind, site=site)
        if not isinstance(value, TensorRef):
            raise ContributionRejectedError(
                "a parameter that is no tensor",
                got=type(value).__name__,
                site=site,
                tensor=name,
                hint="Send what else there is to say as metrics",
            )
    return params


def by_batch(refs: Mapping[str, TensorRef]) -> dict[Batch, dict[str, TensorRef]]:
    """Parameters by the payload they lie in."""
    parts: dict[Batch, dict[str, TensorRef]] = {}
    for name, leaf in refs.items():
        parts.setdefault(leaf.batch, {})[name] = leaf
    return parts


def sole_batch(refs: Mapping[str, TensorRef]) -> Batch | None:
    """The one payload that the parameters are, name for name, or None if they are anything else."""
    if not refs or any(leaf.name != name for name, leaf in refs.items()):
        return None
    batches = by_batch(refs)
    batch = next(iter(batches))
    whole = len(batches) == 1 and not batch.partial and refs.keys() >= batch.names
    return batch if whole else None


def layout_of(refs: Mapping[str, TensorRef], payload: Layout) -> Layout:
    """The layout of parameters that are part of a payload; of tied ones, the first.

    Raises:
        PeerRefusedError: The payload lacks one.
    """
    entries: dict[TensorSpec, str] = {}
    for name, leaf in refs.items():
        if leaf.name not in payload.names:
            raise PeerRefusedError(
                "the payload lacks a tensor that the message names", tensor=leaf.name
            )
        entries.setdefault(payload.spec(leaf.name), name)
    return plan((name, spec.dtype, spec.shape) for spec, name in entries.items())
