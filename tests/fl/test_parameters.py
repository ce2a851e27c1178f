"""Model parameters between their forms: copied once, checked before a pull, named when they do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from streamoff.errors import (
    ContributionRejectedError,
    PeerRefusedError,
    UnsupportedTensorError,
    UsageError,
)
from streamoff.fl.parameters import (
    arrays_of,
    by_batch,
    copy_state,
    layout_of,
    load_initial,
    refs_of,
    sole_batch,
)
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.tensors.layout import plan
from streamoff.tensors.lazy import open_state
from streamoff.tensors.state import MemoryState
from streamoff.tensors.writer import FileWriter, MemoryWriter
from streamoff.types import CHUNK_BYTES, Address, Ref

from .world import entries, model

# --- initial models -------------------------------------------------------------------------------


def test_an_initial_mapping_is_copied_once() -> None:
    """Changing the caller's tensors afterwards changes nothing of the model."""
    initial = model(1.0)
    state = load_initial(initial, MemoryWriter, to_disk=False)
    initial["bias"].fill_(9)
    assert state.tensor("bias").tolist() == [1.0] * 3


def test_an_initial_file_is_used_where_it_is_if_models_live_on_disk(tmp_path: Path) -> None:
    """A file needs no copy on disk, and releasing the state leaves it there."""
    path = tmp_path / "model.safetensors"
    save_file(model(2.0), path)

    def no_writer(layout):
        raise AssertionError("copied")

    state = load_initial(path, no_writer, to_disk=True)
    assert state.tensor("bias").tolist() == [2.0] * 3
    state.release()
    assert path.exists()


def test_an_initial_file_is_read_into_memory_if_models_live_there(tmp_path: Path) -> None:
    """Once read, the file may go."""
    path = tmp_path / "model.safetensors"
    save_file(model(2.0), path)
    state = load_initial(path, MemoryWriter, to_disk=False)
    path.unlink()
    assert state.tensor("bias").tolist() == [2.0] * 3


def test_an_initial_state_stays_the_callers() -> None:
    """A state that was given is copied and not released."""
    given = MemoryState(model(3.0))
    state = load_initial(given, MemoryWriter, to_disk=False)
    state.release()
    assert given.tensor("bias").tolist() == [3.0] * 3


@pytest.mark.parametrize("initial", [None, 7, [torch.zeros(1)], torch.zeros(1)])
def test_what_is_no_model_is_refused(initial: object) -> None:
    """An initial model is tensors by name, a state or a file."""
    with pytest.raises(UsageError, match="initial"):
        load_initial(initial, MemoryWriter, to_disk=False)  # type: ignore[arg-type]


def test_a_copy_is_block_by_block_and_can_be_cut(tmp_path: Path) -> None:
    """A copy of three blocks asks three times whether to go on; cut in the second, it leaves nothing."""
    content = torch.arange(3 * CHUNK_BYTES // 4 - 5, dtype=torch.int32)
    state = MemoryState({"w": content})
    asked: list[int] = []

    def stop() -> None:
        asked.append(1)

    copy = copy_state(state, lambda layout: FileWriter(tmp_path / "m.safetensors", layout), stop)
    assert torch.equal(copy.tensor("w"), content)
    assert len(asked) == 3
    copy.release()

    def cut() -> None:
        if len(asked) > 4:
            raise InterruptedError
        asked.append(1)

    with pytest.raises(InterruptedError):
        copy_state(state, lambda layout: FileWriter(tmp_path / "n.safetensors", layout), cut)
    assert "n.safetensors" not in str(entries(tmp_path))


# --- arrays ---------------------------------------------------------------------------------------

NUMPY_HAS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", NUMPY_HAS, ids=str)
def test_arrays_keep_dtype_shape_and_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Every dtype that NumPy has goes there and back unchanged: matrices, scalars, nothing at all."""
    tensors = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "nothing": torch.empty(0, 4, dtype=dtype),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    for state in (MemoryState(tensors), open_state(tmp_path / "m.safetensors")):
        arrays = arrays_of(state)
        assert arrays.keys() == tensors.keys()
        for name, tensor in tensors.items():
            back = torch.from_numpy(np.asarray(arrays[name]))
            assert back.dtype == dtype
            assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_dtype_that_numpy_lacks_is_refused_by_key(dtype: torch.dtype) -> None:
    """The refusal names the tensor, its dtype and the setting that carries it."""
    state = MemoryState({"w": torch.zeros(2), "low": torch.zeros(2).to(dtype)})
    with pytest.raises(UnsupportedTensorError, match="server_expected_format='pytorch'") as caught:
        arrays_of(state)
    assert caught.value.where["tensor"] == "low"
    assert caught.value.got == dtype


# --- refs -----------------------------------------------------------------------------------------


def batch(*names: str, partial: bool = False) -> tuple[Batch, dict[str, TensorRef]]:
    """A payload and its leaves."""
    made = Batch(
        Ref(Address("site-1"), f"ref-{'-'.join(names) or 'none'}", b"t" * 16, 100), partial=partial
    )
    made.names.update(names)
    return made, {name: TensorRef(made, name) for name in names}


@pytest.mark.parametrize("params", [None, 3, "text", [], (), [torch.zeros(1)], torch.zeros(1)])
def test_parameters_are_a_dict(params: object) -> None:
    """Anything else is refused before a pull, and the message says what came."""
    with pytest.raises(ContributionRejectedError, match=f"got {type(params).__name__}"):
        refs_of(params, site="site-1")


@pytest.mark.parametrize("value", [1, 1.5, "text", None, [1], {"w": 1}, np.float32(1)], ids=repr)
def test_a_leaf_that_is_no_tensor_is_refused_by_key(value: object) -> None:
    """Numbers, text and containers beside tensors are no parameters; the refusal names the key."""
    _, leaves = batch("w")
    with pytest.raises(ContributionRejectedError) as caught:
        refs_of(leaves | {"epoch": value}, site="site-1")
    assert caught.value.where == {"site": "site-1", "tensor": "epoch"}


def test_a_key_that_is_no_text_is_refused() -> None:
    """Parameters have names."""
    made, _ = batch("w")
    with pytest.raises(ContributionRejectedError, match="a parameter name: expected str, got int"):
        refs_of({1: TensorRef(made, "w")}, site="site-1")


def test_one_payload_name_for_name_is_pulled_whole() -> None:
    """A state dict that is one payload is recognised, arrays included; nothing else is."""
    whole, leaves = batch("a", "b")
    assert sole_batch(leaves) is whole
    arrays = {name: TensorRef(whole, name, LeafKind.NDARRAY) for name in leaves}
    assert sole_batch(arrays) is whole
    assert sole_batch({}) is None
    assert sole_batch({"a": leaves["a"]}) is None, "the message uses more of the payload"
    assert sole_batch({"a": leaves["b"], "b": leaves["a"]}) is None, "under other names"
    _, partly = batch("a", "b", partial=True)
    assert sole_batch(partly) is None
    _, others = batch("c")
    assert sole_batch(leaves | others) is None


def test_parameters_are_grouped_by_their_payloads() -> None:
    """Each payload is listed once, with its own leaves, under the names of the parameters."""
    one, leaves = batch("a", "b")
    two, others = batch("c")
    parts = by_batch({"x": leaves["a"], "y": others["c"], "z": leaves["b"]})
    assert {made: dict(part) for made, part in parts.items()} == {
        one: {"x": leaves["a"], "z": leaves["b"]},
        two: {"y": others["c"]},
    }


def test_a_part_is_laid_out_under_the_names_of_the_parameters() -> None:
    """The header of a payload is compared by what its tensors are called here; ties count once."""
    payload = plan([("p", "F32", (2, 3)), ("q", "I64", ()), ("r", "F16", (9,))], {"@": "x"})
    made, leaves = batch("p", "q")
    layout = layout_of({"w": leaves["p"], "n": leaves["q"], "again": leaves["p"]}, payload)
    assert {spec.name: (spec.dtype, spec.shape) for spec in layout.specs} == {
        "w": ("F32", (2, 3)),
        "n": ("I64", ()),
    }
    with pytest.raises(PeerRefusedError, match="the payload lacks a tensor"):
        layout_of({"w": TensorRef(made, "nowhere")}, payload)
