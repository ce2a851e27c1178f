"""Model parameters between the forms they have on the way: states, tensors, arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamoff.errors import ContributionRejectedError, UnsupportedTensorError
from streamoff.tensors.layout import Layout
from streamoff.tensors.lazy import open_state
from streamoff.tensors.state import MemoryState, State
from streamoff.tensors.writer import StateWriter
from streamoff.types import CHUNK_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["arrays_of", "copy_state", "load_initial", "tensors_from"]

NewWriter = Callable[[Layout], StateWriter]


def load_initial(
    initial: Mapping[str, torch.Tensor] | State | Path, new_writer: NewWriter, to_disk: bool
) -> State:
    """The first global model as the workflow keeps it; blocks.

    A file that stays is used where it is if models live on disk; everything else is copied once, so that
    the caller's tensors are never touched.
    """
    if isinstance(initial, (str, Path)):
        opened = open_state(initial)
        return opened if to_disk else copy_state(opened, new_writer)
    state = initial if isinstance(initial, State) else MemoryState(initial)
    return copy_state(state, new_writer)


def copy_state(state: State, new_writer: NewWriter) -> State:
    """Copy a state block by block; at most 4 MiB are in memory beside it."""
    layout = state.layout
    writer = new_writer(layout)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, layout.data_nbytes)))
    try:
        for start in range(0, layout.data_nbytes, CHUNK_BYTES):
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


def tensors_from(params: object, *, site: str) -> dict[str, Any]:
    """Parameters that came leaf by leaf, as tensors or lazy tensors by name.

    Raises:
        ContributionRejectedError: They are no mapping of names to tensors.
    """
    import torch  # noqa: PLC0415 - only arrays need it here

    if type(params) is not dict:
        raise ContributionRejectedError(
            "no parameters", expected="a dict of tensors", got=type(params).__name__, site=site
        )
    tensors: dict[str, Any] = {}
    for name, value in params.items():
        if type(name) is not str:
            raise ContributionRejectedError("a parameter name", expected="str", got=name, site=site)
        tensors[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if not isinstance(tensors[name], torch.Tensor) and not hasattr(value, "materialize"):
            raise ContributionRejectedError(
                "a parameter that is no tensor", got=type(value).__name__, site=site, tensor=name
            )
    return tensors
