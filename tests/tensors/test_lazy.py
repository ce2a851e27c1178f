"""Lazy tensors: reading, owning the disk, and staying in the process."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file

from streamoff.errors import (
    IntegrityError,
    JobClosedError,
    LandingError,
    TruncatedFileError,
    UsageError,
)
from streamoff.tensors.landing import DiskLanding
from streamoff.tensors.lazy import LazyStateDict, LazyTensor, open_state
from streamoff.tensors.sources import FileSource, StateDictSource

from .helpers import DTYPES, random_bits, raw, run_script, same, transfer

T = TypeVar("T")

STATE = {
    "w": random_bits("F32", (700, 300), 1),
    "b": random_bits("BF16", (301,), 2),
    "s": torch.tensor(7),
    "e": torch.empty(0, 5),
}


def _land(directory: Path, **options: Any) -> LazyStateDict:
    state = transfer(
        StateDictSource({**STATE, "tied": STATE["w"]}), DiskLanding(directory, **options)
    )
    assert isinstance(state, LazyStateDict)
    return state


def test_a_lazy_tensor_knows_itself_without_reading(tmp_path: Path) -> None:
    """Dtype, shape and size come from the header; the mapping keeps file order, ties last."""
    state = _land(tmp_path)
    assert list(state) == ["s", "e", "w", "b", "tied"]
    assert len(state) == 5
    assert "tied" in state
    assert "nobody" not in state
    lazy = state["w"]
    assert (lazy.name, lazy.dtype, lazy.shape) == ("w", torch.float32, (700, 300))
    assert (lazy.nbytes, lazy.numel()) == (840_000, 210_000)
    assert repr(lazy) == "LazyTensor('w', F32, shape=(700, 300))"
    assert repr(state) == "LazyStateDict(5 tensors, 840610 bytes)"
    with pytest.raises(KeyError):
        state["nobody"]
    assert state.get("nobody") is None


def test_materialising_gives_a_new_tensor_each_time(tmp_path: Path) -> None:
    """Two reads share no memory, with each other or with the file."""
    state = _land(tmp_path)
    first, second = state["w"].materialize(), state["w"].materialize("cpu")
    first.zero_()
    assert same(second, STATE["w"])
    assert same(state["w"].materialize(), STATE["w"])
    assert same(state["tied"].materialize(), STATE["w"])


async def test_loading_leaves_the_event_loop(tmp_path: Path) -> None:
    """``load`` reads in a thread, on either backend."""
    assert same(await _land(tmp_path)["b"].load(), STATE["b"])


async def test_loading_uses_the_threads_it_is_given(tmp_path: Path) -> None:
    """The owner of the threads decides which one reads."""
    hops: list[str] = []

    async def hop(call: Callable[[], T], /) -> T:
        hops.append("hop")
        return call()

    state = _land(tmp_path, hop=hop)
    waiting: Awaitable[torch.Tensor] = state["s"].load()
    assert same(await waiting, STATE["s"])
    assert hops == ["hop"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_the_tensor_in_order(tmp_path: Path, dtype: str) -> None:
    """Blocks are flat, whole elements, at most as large as asked, and add up bit for bit."""
    tensor = random_bits(dtype, (13, 7), 3)
    state = transfer(StateDictSource({"t": tensor}), DiskLanding(tmp_path))
    assert isinstance(state, LazyStateDict)
    for limit in (1, 9, 64, 10_000):
        blocks = list(state["t"].blocks(limit))
        assert all(block.nbytes <= max(limit, tensor.element_size()) for block in blocks)
        assert same(torch.cat(blocks).reshape(13, 7), tensor)


def test_bytes_are_read_from_anywhere(tmp_path: Path) -> None:
    """Any byte range of a tensor, and any span across tensors, can be read into a buffer."""
    state = _land(tmp_path)
    whole = raw(STATE["w"])
    for start, stop in [(0, 1), (262_143, 262_145), (839_999, 840_000), (840_000, 840_000)]:
        buffer = memoryview(bytearray(stop - start))
        state["w"].read_into(buffer, start)
        assert bytes(buffer) == whole[start:stop]
        state.read_into("w", start, buffer)
        assert bytes(buffer) == whole[start:stop]
    everything = memoryview(bytearray(state.layout.data_nbytes))
    state.read_span(0, len(everything), everything)
    assert bytes(everything) == raw(STATE["s"]) + whole + raw(STATE["b"])


def test_ranges_outside_a_tensor_are_refused(tmp_path: Path) -> None:
    """A range that leaves its tensor never reads the neighbour."""
    state = _land(tmp_path)
    for start, length in [(-1, 1), (600, 3), (603, 0)]:
        with pytest.raises(UsageError, match="outside the tensor"):
            state["b"].read_into(memoryview(bytearray(length)), start)
    for start, stop, length in [(0, 4, 3), (-1, 2, 3), (0, 10**7, 10**7)]:
        with pytest.raises(UsageError, match="span"):
            state.read_span(start, stop, memoryview(bytearray(length)))
    with pytest.raises(UsageError, match="block size"):
        state["b"].blocks(0)


@pytest.mark.parametrize("size", ["one byte less", "half", "four bytes", "nothing"])
def test_a_cut_file_is_called_truncated(tmp_path: Path, size: str) -> None:
    """The error says truncated, names tensor and path, and gives the expected and the actual size."""
    state = _land(tmp_path)
    full = state.layout.size
    left = {"one byte less": full - 1, "half": full // 2, "four bytes": 4, "nothing": 0}[size]
    os.truncate(state.path, left)
    name = "b" if size == "one byte less" else "w"
    with pytest.raises(TruncatedFileError, match="truncated") as caught:
        state[name].materialize()
    error = caught.value
    assert (error.where["tensor"], error.where["path"], error.got) == (name, state.path, left)
    assert str(full) in str(error)


def test_a_flipped_bit_is_found_when_it_is_read(tmp_path: Path) -> None:
    """Bytes that changed on disk are an IntegrityError that names the tensor, not a wrong number."""
    state = _land(tmp_path)
    with state.path.open("r+b") as file:
        file.seek(state.layout.data_start + 400_000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    for read in (state["w"].materialize, lambda: list(state["w"].blocks(65536))):
        with pytest.raises(IntegrityError, match="page changed") as caught:
            read()
        assert caught.value.where["tensor"] == "w"


def test_a_file_that_is_gone_is_a_closed_job(tmp_path: Path) -> None:
    """A lazy tensor whose file was removed raises JobClosedError, never FileNotFoundError."""
    state = _land(tmp_path)
    state.path.unlink()
    with pytest.raises(JobClosedError, match="gone"):
        state["w"].materialize()


def test_an_unreadable_file_is_a_landing_error(tmp_path: Path) -> None:
    """What the system refuses is mapped, with the path."""
    state = _land(tmp_path)
    state.path.unlink()
    state.path.mkdir()
    with pytest.raises(LandingError, match="cannot read"):
        state["w"].materialize()


def test_every_read_passes_the_guard(tmp_path: Path) -> None:
    """The job root sees each read begin and end, and can refuse it."""
    inside: list[str] = []
    closed = False

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        if closed:
            raise JobClosedError("the job is closed", job="j")
        inside.append("in")
        yield
        inside.append("out")

    state = _land(tmp_path, guard=guard)
    state["w"].materialize()
    FileSource(state).read_into(0, memoryview(bytearray(8)))
    assert inside == ["in", "out"] * 2
    closed = True
    for read in (state["w"].materialize, FileSource(state).check):
        with pytest.raises(JobClosedError, match="the job is closed"):
            read()


def test_the_last_reference_hands_the_directory_over(tmp_path: Path) -> None:
    """The dict, each tensor and each source keep the disk; when all are gone it goes, once."""
    handed: list[Path] = []
    state = _land(tmp_path, dispose=handed.append)
    lazy, source = state["w"], FileSource(state["b"])
    del state
    gc.collect()
    assert handed == []
    del lazy
    gc.collect()
    assert handed == []
    source.close()
    del source
    gc.collect()
    assert handed == [tmp_path]


def test_releasing_hands_the_directory_over_at_once(tmp_path: Path) -> None:
    """``release`` and leaving ``with`` free the disk, once, and later reads are typed errors."""
    handed: list[Path] = []
    with _land(tmp_path, dispose=handed.append) as state:
        lazy, source = state["w"], FileSource(state["b"])
    state.release()
    assert handed == [tmp_path]
    for read in (lazy.materialize, state["b"].materialize, source.check):
        with pytest.raises(JobClosedError, match="released"):
            read()
    del state, lazy, source, read
    gc.collect()
    assert handed == [tmp_path]


FORKED = """
import gc, os, pathlib, sys
from streamoff.tensors.layout import plan
from streamoff.tensors.writer import FileWriter
out = FileWriter(pathlib.Path(sys.argv[1]) / "f", plan([]), dispose=lambda path: print("gone", flush=True))
state = out.finish()
if os.fork() == 0:
    state.release()
    del state
    gc.collect()
    os._exit(0)
os.wait()
print("parent", flush=True)
del state
gc.collect()
"""


def test_a_forked_child_frees_nothing(tmp_path: Path) -> None:
    """A child that inherits a lazy state dict leaves its parent's files alone."""
    assert run_script(FORKED, tmp_path) == "parent\ngone\n"


AT_EXIT = """
import pathlib, sys
from streamoff.tensors.layout import plan
from streamoff.tensors.writer import FileWriter
out = FileWriter(pathlib.Path(sys.argv[1]) / "f", plan([]), dispose=lambda path: print("gone", flush=True))
kept = out.finish()
cycle = [kept]
cycle.append(cycle)
"""


def test_nothing_is_handed_over_while_the_interpreter_ends(tmp_path: Path) -> None:
    """At exit no callback runs into threads that are already gone; leftovers are reclaimed later."""
    assert run_script(AT_EXIT, tmp_path) == ""


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_lazy_tensors_stay_in_the_process(tmp_path: Path, how: Callable[[Any], Any]) -> None:
    """Pickling and copying are refused with what to do instead."""
    state = _land(tmp_path)
    for value in (state, state["w"]):
        with pytest.raises(UsageError, match="Materialise"):
            how(value)


def test_state_dicts_are_compared_by_identity(tmp_path: Path) -> None:
    """Comparing never reads a file, and a state dict can be a key."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    one, other = _land(tmp_path / "1"), _land(tmp_path / "2")
    assert one != other
    assert {one: 1}[one] == 1


def test_any_safetensors_file_opens_lazily_and_stays(tmp_path: Path) -> None:
    """A file of somebody else's is read by name and left alone."""
    path = tmp_path / "theirs.safetensors"
    save_file({name: STATE[name] for name in ("w", "b", "s")}, path)
    state = open_state(str(path))
    assert same(state.tensor("w"), STATE["w"])
    state.release()
    del state
    gc.collect()
    assert path.exists()
    with pytest.raises(FileNotFoundError):
        open_state(tmp_path / "absent")


def test_a_lazy_tensor_passes_for_the_duck_type(tmp_path: Path) -> None:
    """Custom aggregators call ``materialize()`` without arguments and get a tensor."""
    value: Any = _land(tmp_path)["w"]
    assert callable(value.materialize)
    assert isinstance(value, LazyTensor)
    assert isinstance(value.materialize(), torch.Tensor)
