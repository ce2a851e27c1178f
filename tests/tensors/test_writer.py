"""Writers: a state dict of known layout, in pieces and any order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamoff.errors import IntegrityError, LandingError, UsageError
from streamoff.tensors.digests import PAGE
from streamoff.tensors.files import Storage
from streamoff.tensors.layout import Layout, plan
from streamoff.tensors.state import State
from streamoff.tensors.writer import FileWriter, MemoryWriter, StateWriter

from .helpers import assert_holds, random_bits, raw

STATE = {"w": random_bits("F32", (PAGE,), 1), "b": random_bits("U8", (1001,), 2)}
LAYOUT = plan([("w", "F32", (PAGE,)), ("b", "U8", (1001,))], {"round": "1"})
DATA = memoryview(raw(STATE["w"]) + raw(STATE["b"]))


@pytest.fixture(params=["file", "memory"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> StateWriter:
    """Return a writer of each kind."""
    return FileWriter(tmp_path / "out", LAYOUT) if request.param == "file" else MemoryWriter(LAYOUT)


def test_pieces_in_any_order_make_the_whole(writer: StateWriter) -> None:
    """Blocks of any size may come in any order, twice if need be."""
    starts = [*range(0, len(DATA), 70_001), 140_002]
    random.Random(3).shuffle(starts)
    for start in starts:
        writer.write(start, DATA[start : start + 70_001])
    state: State = writer.finish()
    assert_holds(state, STATE)
    assert state.layout.metadata == {"round": "1"}


def test_typed_buffers_are_bytes(writer: StateWriter) -> None:
    """A buffer of another format is written as the bytes that it is."""
    writer.write(0, memoryview(STATE["w"].view(torch.int32).numpy().data))
    writer.write(4 * PAGE, DATA[4 * PAGE :])
    assert_holds(writer.finish(), STATE)


def test_missing_bytes_are_not_published(writer: StateWriter) -> None:
    """A result with a hole is refused; filling the hole makes it whole."""
    writer.write(1, DATA[1:])
    with pytest.raises(UsageError, match="missing"):
        writer.finish()
    writer.write(0, DATA[:1])
    assert_holds(writer.finish(), STATE)


def test_nothing_is_written_outside(writer: StateWriter) -> None:
    """Neither the header nor what follows the data can be reached."""
    for start in (len(DATA), len(DATA) - 3, -LAYOUT.size - 1):
        with pytest.raises(UsageError):
            writer.write(start, memoryview(bytes(4)))


def test_a_finished_or_discarded_writer_takes_nothing(writer: StateWriter) -> None:
    """After the end every call is a typed error; discarding is idempotent."""
    writer.discard()
    writer.discard()
    for call in (lambda: writer.write(0, DATA[:1]), writer.finish):
        with pytest.raises(UsageError):
            call()


def test_the_previous_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """A target is replaced in one rename; a writer that gives up leaves the old one."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"previous")
    lost = FileWriter(path, LAYOUT)
    lost.write(0, DATA[:100])
    lost.discard()
    assert path.read_bytes() == b"previous"
    assert [*tmp_path.iterdir()] == [path]
    kept = FileWriter(path, LAYOUT, storage=Storage(durable=True))
    kept.write(0, DATA)
    kept.finish()
    assert torch.equal(load_file(path)["b"], STATE["b"])
    assert [*tmp_path.iterdir()] == [path]


def test_a_part_left_by_a_crash_is_replaced(tmp_path: Path) -> None:
    """What a dead process left does not block its successor, nor can the two mix their bytes."""
    path = tmp_path / "model"
    first = FileWriter(path, LAYOUT)
    second = FileWriter(path, LAYOUT)
    with pytest.raises(LandingError, match="replaced"):
        first.write(0, DATA)
    first.discard()
    second.write(0, DATA)
    assert_holds(second.finish(), STATE)


def test_written_pages_are_verified_when_read(tmp_path: Path) -> None:
    """A result file keeps page digests as a landed one does."""
    writer = FileWriter(tmp_path / "out", LAYOUT)
    for start in range(0, len(DATA), 100_000):
        writer.write(start, DATA[start : start + 100_000])
    state = writer.finish()
    content = bytearray(state.path.read_bytes())
    content[-1] ^= 1
    state.path.write_bytes(content)
    with pytest.raises(IntegrityError):
        state.tensor("b")


def test_a_directory_without_room_for_a_name_leaves_nothing(tmp_path: Path) -> None:
    """A path that cannot be made is a landing error."""
    with pytest.raises(LandingError, match="ENAMETOOLONG"):
        FileWriter(tmp_path / ("n" * 255), LAYOUT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", [plan([]), plan([("e", "F32", (0, 3))])])
def test_an_empty_result_is_a_result(tmp_path: Path, layout: Layout) -> None:
    """Layouts without bytes are finished at once."""
    for writer in (FileWriter(tmp_path / "e", layout), MemoryWriter(layout)):
        assert set(writer.finish().layout.names) == set(layout.names)
