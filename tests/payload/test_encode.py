"""What becomes of the leaves of a tree: payloads, their names, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamoff.errors import (
    JobClosedError,
    LimitError,
    StreamoffError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from streamoff.payload.body import MAX_REFS
from streamoff.payload.encode import Encoded, encode
from streamoff.payload.tree import leaves
from streamoff.tensors.landing import MemoryLanding
from streamoff.tensors.lazy import LazyStateDict, open_state
from streamoff.tensors.sources import FileSource, StateDictSource
from streamoff.tensors.state import MemoryState
from streamoff.tensors.writer import FileWriter

from ..tensors.helpers import same, transfer
from .helpers import kept, tensors_of


def written(path: Path, tensors: dict[str, torch.Tensor]) -> LazyStateDict:
    """Write tensors to a file and open it lazily."""
    source = StateDictSource(tensors)
    writer = FileWriter(path, source.layout)
    for start in range(source.layout.data_start, source.layout.size, 1 << 20):
        buffer = memoryview(bytearray(min(1 << 20, source.layout.size - start)))
        source.read_into(start, buffer)
        writer.put(start, (buffer,))
    writer.finish()
    return open_state(path)


def names_of(encoded: Encoded) -> list[list[str]]:
    """The names in each payload."""
    return [sorted(one.source.layout.names) for one in encoded.own]


def array_through(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Encode one array, serve its payload and land it in memory."""
    (own,) = encode({"x": array}).own
    state = transfer(own.source, MemoryLanding())
    own.source.close()
    found: np.ndarray[Any, Any] = state.tensor("x").numpy()
    return found


# --- names ----------------------------------------------------------------------------------------


def test_one_state_dict_keeps_its_plain_keys() -> None:
    """The payload of a tree with one state dict is that state dict, wherever in the tree it is."""
    tree: Any = {"round": 1, "model": {"params": tensors_of(2), "n": 1}}
    tree["model"]["params"]["a/b~c"] = torch.ones(1)
    assert names_of(encode(tree)) == [["a/b~c", "w0", "w1"]]


def test_other_trees_are_named_by_path() -> None:
    """Tensors of several containers are named like JSON pointers, each name once."""
    t = torch.ones
    tree = {
        "a": {"x": t(1), "y/z": t(2)},
        "b": [t(3), {"~": t(4)}],
        7: t(5),
        None: t(6),
        b"k": t(7),
    }
    assert names_of(encode(tree)) == [
        sorted(["a/x", "a/y~1z", "b/0", "b/1/~0", "7", "None", "b'k'"])
    ]


def test_names_that_would_be_equal_are_numbered() -> None:
    """Keys that look alike, and the name that the format reserves, still give every tensor its own name."""
    t = torch.ones
    tree = {
        1: t(1),
        "1": t(2),
        "1#2": t(3),
        None: t(4),
        "None": t(5),
        "__metadata__": t(6),
        "": t(7),
    }
    encoded = encode({"x": [tree], "y": t(8)})
    assert len(names_of(encoded)[0]) == 8
    assert names_of(encode({"__metadata__": t(1)})) == [["__metadata__#2"]]
    assert names_of(encode(t(1))) == [["tensor"]]


def test_a_huge_int_key_has_a_name() -> None:
    """A key without a decimal text does not fail the tree."""
    assert len(names_of(encode({10**5000: torch.ones(1), 1: torch.ones(1)}))[0]) == 2


def test_many_paths_of_one_name_take_linear_time() -> None:
    """Numbering goes on where it stopped: 2**13 tensors that all want one name are named in one pass."""

    def tree(depth: int) -> Any:
        return torch.ones(1) if not depth else {1: tree(depth - 1), "1": tree(depth - 1)}

    (names,) = names_of(encode({"x": tree(13)}))
    assert len(set(names)) == 2**13


# --- arrays ---------------------------------------------------------------------------------------

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "array",
    [
        BASE,
        BASE[::-1],
        BASE[:, ::-2],
        BASE.T,
        np.asfortranarray(BASE),
        BASE[1:3, 2:4],
        np.broadcast_to(np.float32(3), (3, 2)),
        np.array(5.0),
        np.zeros((0,), np.int16),
        np.zeros((2, 0, 3)),
        BASE.astype(">f4"),
        np.arange(5, dtype=">i8")[::-1],
        np.frombuffer(bytes(16), np.uint8),
        np.frombuffer(b"x" + bytes(8), np.float32, 2, 1),
        np.zeros(4, [("a", "<f4"), ("b", "u1")])["a"],
        np.lib.stride_tricks.as_strided(BASE, (4, 4), (4, 4)),
    ],
    ids=[
        "plain",
        "negative stride",
        "negative steps",
        "transposed",
        "fortran",
        "window",
        "broadcast, read-only",
        "0-dim",
        "empty",
        "empty inside",
        "big-endian",
        "big-endian reversed",
        "read-only",
        "unaligned",
        "strides of no element",
        "overlapping",
    ],
)
def test_arrays_of_any_memory(array: np.ndarray[Any, Any]) -> None:
    """An array arrives with its values, shape and dtype (in native byte order) however it lies in memory."""
    found = array_through(array)
    assert (found.dtype, found.shape) == (array.dtype.newbyteorder("="), array.shape)
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8"]
)
def test_arrays_of_any_dtype(dtype: str) -> None:
    """Every dtype that safetensors knows travels, bit for bit."""
    array = np.frombuffer(np.random.default_rng(1).bytes(64), np.uint8)
    array = (array & 1).view(dtype) if dtype == "?" else array.view(dtype)
    assert array_through(array).tobytes() == array.tobytes()


def test_memory_maps_travel(tmp_path: Path) -> None:
    """An array on disk is an array."""
    array = np.memmap(tmp_path / "array", np.int32, "w+", shape=(3,))
    array[:] = [1, 2, 3]
    assert array_through(array).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, np.complex128),
        np.zeros(2, np.longdouble),
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, [("a", "f4")]),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.zeros(2, np.uint8).view(np.recarray),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype}",
)
def test_arrays_that_cannot_travel(array: np.ndarray[Any, Any]) -> None:
    """An array of another dtype, or of a class that would lose something, is refused with its path."""
    with pytest.raises(UnsupportedValueError, match="cannot travel") as caught:
        encode({"m": {"good": BASE, "bad": array}})
    assert caught.value.where["path"] == "tree['m']['bad']"


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
    ],
    ids=["dtype", "device", "layout"],
)
def test_tensors_that_cannot_travel(tensor: torch.Tensor) -> None:
    """A tensor that no payload holds is refused before anything is borrowed, with name and path."""
    with pytest.raises(UnsupportedTensorError) as caught:
        encode({"m": [torch.ones(1), {"bad": tensor}]})
    assert caught.value.where == {"tensor": "m/1/bad", "path": "tree['m'][1]['bad']"}


def test_a_failure_gives_everything_back(tmp_path: Path) -> None:
    """When the last payload of a tree is refused, the files and tensors of the others are let go."""
    lazies = written(tmp_path / "f.safetensors", {"x": torch.ones(3)})
    good = torch.ones(3)
    gone: list[Callable[[], object]] = [weakref.ref(good), weakref.ref(lazies)]
    with pytest.raises(UnsupportedTensorError):
        encode([lazies["x"], {"good": good, "bad": torch.zeros(1, device="meta")}])
    del good, lazies
    gc.collect()
    assert [one() for one in gone] == [None, None]


class Foreign:
    """A lazy tensor of somebody else."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def materialize(self) -> Any:
        if isinstance(self._made, Exception):
            raise self._made
        return self._made


def test_foreign_lazy_tensors_are_accepted() -> None:
    """An object with materialize() travels as the tensor that it makes."""
    (own,) = encode({"a": Foreign(torch.ones(2)), "b": torch.zeros(1)}).own
    state = transfer(own.source, MemoryLanding())
    assert same(state.tensor("a"), torch.ones(2))


@pytest.mark.parametrize(
    "made",
    [[1.0], None, OSError("gone"), KeyError("x")],
    ids=["a list", "nothing", "an OSError", "a KeyError"],
)
def test_foreign_lazy_tensors_that_make_none(made: object) -> None:
    """An object whose materialize() fails, or makes no tensor, is refused with its path."""
    with pytest.raises(UnsupportedValueError, match="materialize") as caught:
        encode(["x", Foreign(made)])
    assert caught.value.where["path"] == "tree[1]"


def test_an_attribute_named_materialize_makes_no_lazy_tensor() -> None:
    """What cannot be called makes no tensor: a tensor with such an attribute is itself, anything else is refused."""

    class Misleading:
        materialize = "not a method"

    tensor = torch.ones(2)
    tensor.__dict__["materialize"] = torch.zeros(3)
    (own,) = encode([tensor]).own
    assert same(transfer(own.source, MemoryLanding()).tensor("0"), torch.ones(2))
    with pytest.raises(UnsupportedValueError) as caught:
        encode(["x", Misleading()])
    assert caught.value.where["path"] == "tree[1]"


def test_classes_with_materialize_are_no_tensors() -> None:
    """The class of a lazy tensor is not one."""
    with pytest.raises(UnsupportedValueError):
        encode([Foreign])


# --- files, states and sources --------------------------------------------------------------------


def test_lazy_tensors_of_one_file_are_one_payload(tmp_path: Path) -> None:
    """Each landed file is served as it is, once, and the message says if it uses only part of it."""
    one = written(tmp_path / "one.safetensors", dict(tensors_of(3)))
    two = written(tmp_path / "two.safetensors", dict(tensors_of(2)))
    encoded = encode(
        {"a": one["w1"], "b": [two["w0"], one["w0"]], "c": two["w1"], "own": torch.ones(1)}
    )
    assert [(one.partial, one.path) for one in encoded.own] == [
        (True, tmp_path / "one.safetensors"),
        (False, tmp_path / "two.safetensors"),
        (False, None),
    ]


def test_whole_states_travel_as_dicts(tmp_path: Path) -> None:
    """A state dict on disk or in memory, or a source, is a dict of its tensors."""
    lazies = written(tmp_path / "f.safetensors", dict(tensors_of(2)))
    source = StateDictSource(tensors_of(3))
    encoded = encode({"disk": lazies, "memory": MemoryState(tensors_of(1)), "source": source})
    assert [sorted(one.source.layout.names) for one in encoded.own] == [
        ["w0", "w1"],
        ["w0"],
        ["w0", "w1", "w2"],
    ]
    assert not any(one.partial for one in encoded.own)
    assert encoded.own[2].source is source


def test_released_files_are_refused_at_once(tmp_path: Path) -> None:
    """A lazy tensor whose file was let go is refused where it is sent, not where it is pulled."""
    lazies = written(tmp_path / "f.safetensors", dict(tensors_of(1)))
    tensor = lazies["w0"]
    lazies.release()
    with pytest.raises(JobClosedError, match="released"):
        encode({"x": tensor})


def test_files_are_kept_until_they_are_served(tmp_path: Path) -> None:
    """Dropping the lazy tensors after they were sent does not free the file under the transaction."""
    lazies = written(tmp_path / "f.safetensors", dict(tensors_of(1)))
    tensor = lazies["w0"]
    alive = weakref.ref(tensor)
    encoded = encode({"x": tensor})
    del tensor, lazies
    gc.collect()
    assert alive() is not None
    encoded.close()
    gc.collect()
    assert alive() is None


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    """The number of refs is checked before any of them is opened."""
    lazies = written(tmp_path / "f.safetensors", dict(tensors_of(1)))
    tree = [lazies["w0"], *(FileSource(tmp_path / "f.safetensors") for _ in range(MAX_REFS))]
    with pytest.raises(LimitError, match="refs"):
        encode(tree)


# --- kept refs ------------------------------------------------------------------------------------


def test_a_kept_ref_is_partial_if_a_leaf_is_left_out() -> None:
    """Passing on part of a ref's leaves says so, so that nobody pulls what is not in the tree."""
    tree = kept({"a": torch.ones(1), "b": torch.ones(2)})
    assert [one.partial for one in encode(tree).kept] == [False]
    assert [one.partial for one in encode({"a": tree["a"]}).kept] == [True]


def test_encoding_does_not_consume() -> None:
    """A kept ref has a consumer when the message was sent, not when it was encoded."""
    tree = kept({"a": torch.ones(1)})
    encode(tree)
    encode(tree)
    (leaf,) = (leaf for _, leaf in leaves(tree))
    leaf.batch.consume([leaf], "somebody")
    with pytest.raises(StreamoffError, match="consumer"):
        encode(tree)
