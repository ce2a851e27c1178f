"""A state dict in memory behaves as one on disk does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamoff.errors import JobClosedError, UnsupportedTensorError, UsageError
from streamoff.tensors.landing import DiskLanding, MemoryLanding
from streamoff.tensors.sources import StateDictSource
from streamoff.tensors.state import MemoryState, State

from .helpers import raw, transfer

STATE = {"w": torch.randn(50, 3), "t": torch.randn(4, 6).t(), "n": torch.tensor(5)}


@pytest.fixture(params=["disk", "landed in memory", "made in memory"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> State:
    """Return the same tensors as each kind of state."""
    if request.param == "made in memory":
        return MemoryState(STATE)
    landing = DiskLanding(tmp_path) if request.param == "disk" else MemoryLanding()
    return transfer(StateDictSource(STATE), landing)


def test_every_state_reads_alike(state: State) -> None:
    """Tensors, parts of tensors and spans across them are the same bytes on disk and in memory."""
    assert isinstance(state, State)
    for name, tensor in STATE.items():
        assert torch.equal(state.tensor(name), tensor)
        part = memoryview(bytearray(5))
        state.read_into(name, 3, part)
        assert bytes(part) == raw(tensor)[3:8]
    data = memoryview(bytearray(state.layout.data_nbytes))
    state.read_span(0, len(data), data)
    assert bytes(data) == b"".join(raw(STATE[spec.name]) for spec in state.layout.specs)


def test_every_state_refuses_alike(state: State) -> None:
    """Unknown names, ranges outside a tensor and spans that do not fit are the same errors."""
    with pytest.raises(KeyError):
        state.read_into("nobody", 0, memoryview(bytearray(1)))
    with pytest.raises(KeyError):
        state.tensor("nobody")
    with pytest.raises(UsageError, match="outside the tensor"):
        state.read_into("n", 1, memoryview(bytearray(8)))
    with pytest.raises(UsageError, match="span"):
        state.read_span(0, 2, memoryview(bytearray(1)))


def test_every_state_is_released_alike(state: State) -> None:
    """After release every read is a JobClosedError."""
    state.release()
    state.release()
    one = memoryview(bytearray(1))
    for read in (
        lambda: state.read_into("w", 0, one),
        lambda: state.read_span(0, 1, one),
        lambda: state.tensor("w"),
    ):
        with pytest.raises(JobClosedError, match="released"):
            read()


def test_a_state_in_memory_is_a_mapping_of_its_tensors() -> None:
    """Its values are the tensors themselves; tied names share one."""
    tied = torch.ones(3)
    state = MemoryState({"a": tied, "b": tied, "c": torch.zeros(1)}, metadata={"k": "v"})
    assert set(state) == {"a", "b", "c"}
    assert len(state) == 3
    assert state["a"] is tied
    assert state["b"] is tied
    assert state.layout.metadata["k"] == "v"
    assert {state: 1}[state] == 1


def test_a_state_in_memory_may_change() -> None:
    """Its owner may train on: reads see the tensors as they are."""
    tensor = torch.zeros(2)
    state = MemoryState({"w": tensor})
    tensor.add_(1)
    buffer = memoryview(bytearray(8))
    state.read_into("w", 0, buffer)
    assert bytes(buffer) == raw(torch.ones(2))


def test_a_state_in_memory_takes_only_what_can_travel() -> None:
    """What has no place in a payload is refused by name."""
    with pytest.raises(UnsupportedTensorError):
        MemoryState({"w": torch.zeros(2, dtype=torch.complex128)})
