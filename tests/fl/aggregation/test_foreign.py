"""Objects with ``materialize()`` that are not ours."""

from __future__ import annotations

import pytest
import torch

from streamoff.errors import (
    AggregationError,
    ContributionRejectedError,
    JobClosedError,
    UnsupportedTensorError,
)
from streamoff.fl.aggregation import InTime, as_state, materialized, open_engine
from streamoff.tensors.state import MemoryState, State
from streamoff.tensors.writer import MemoryWriter

from .support import ENGINES, aggregate, bits, contribution, landed, terms

each_engine = pytest.mark.parametrize("engine", ENGINES)


class Foreign:
    """Somebody else's lazy tensor: it has one method, and maybe says what it is."""

    def __init__(self, value: torch.Tensor, *, told: bool = True) -> None:
        self._value = value
        self.calls = 0
        if told:
            self.dtype = value.dtype
            self.shape = value.shape

    def materialize(self) -> object:
        """Return a new tensor."""
        self.calls += 1
        return self._value.clone()


@each_engine
@pytest.mark.parametrize("told", [True, False])
def test_anything_with_materialize_is_averaged_where_ours_is(engine, told, tmp_path):
    """Foreign lazy tensors, ours and plain tensors mix in one round and in one contribution."""
    value = {"a": torch.randn(5, 3), "b": torch.tensor(4), "c": torch.randn(7).bfloat16()}
    ours = landed(tmp_path, value)
    mixed = {"a": Foreign(value["a"], told=told), "b": value["b"], "c": ours["c"]}
    sites = [contribution("x", mixed), contribution("y", value), contribution("z", ours)]
    state = aggregate(
        engine, terms({k: torch.zeros_like(v) for k, v in value.items()}), sites
    ).state
    expected = aggregate(
        engine,
        terms({k: torch.zeros_like(v) for k, v in value.items()}),
        [contribution(site, value) for site in "xyz"],
    ).state
    assert bits(state) == bits(expected)


def test_a_large_foreign_tensor_is_materialised_once_per_pass():
    """Blocks of one tensor share one materialisation."""
    large = Foreign(torch.randn(3 << 20))
    state = as_state({"a": large, "b": Foreign(torch.randn(10))})
    aggregate(
        "columnar",
        terms({"a": torch.zeros(3 << 20), "b": torch.zeros(10)}),
        [contribution("x", state)],
    )
    assert large.calls == 1


@each_engine
def test_a_foreign_failure_costs_its_site(engine):
    """Whatever ``materialize()`` raises, the others are averaged and the cause is reported."""

    class Broken(Foreign):
        def materialize(self) -> object:
            raise ZeroDivisionError("not ours")

    class Liar(Foreign):
        def materialize(self) -> object:
            return torch.zeros(1, dtype=torch.int16)

    class Nothing(Foreign):
        def materialize(self) -> object:
            return None

    good = {"w": torch.ones(4)}
    for kind, message in (
        (Broken, "not ours"),
        (Liar, "another tensor"),
        (Nothing, "not a tensor"),
    ):
        with open_engine(engine, terms({"w": torch.zeros(4)})) as opened:
            opened.add(contribution("a", good))
            try:
                opened.add(contribution("b", {"w": kind(torch.ones(4))}))
            except ContributionRejectedError as error:
                assert engine == "in_time", error  # noqa: PT017 -- columnar sees it in finish
            result = opened.finish(MemoryWriter)
        assert bits(result.state) == bits(MemoryState(good))
        [rejection] = result.report.rejected
        assert rejection.site == "b"
        assert message in rejection.message


def test_what_is_no_model_is_refused():
    """Values that are neither tensors nor materialisable are refused by name; so is no mapping at all."""
    for leaf in (3, "text", None, [1.0], {"nested": torch.ones(1)}):
        with pytest.raises(UnsupportedTensorError) as caught:
            contribution("a", {"w": torch.ones(1), "epoch": leaf})
        assert caught.value.tensor == "epoch"
    for nothing in (None, [torch.ones(1)], torch.ones(1)):
        with pytest.raises(UnsupportedTensorError, match="not a model"):
            contribution("a", nothing)


def test_a_tensor_that_cannot_travel_is_refused():
    """Sparse tensors and dtypes without a place in a file are refused by name."""
    with pytest.raises(UnsupportedTensorError):
        as_state({"w": Foreign(torch.eye(2).to_sparse(), told=False)})
    with pytest.raises(UnsupportedTensorError) as caught:
        as_state({"w": Foreign(torch.ones(2, dtype=torch.complex128))})
    assert caught.value.tensor == "w"


def test_materialised_tensors_are_plain_memory():
    """Conjugate, negative and strided views come out resolved and contiguous."""
    view = torch.tensor([[1 + 1j, 2 - 2j]]).conj().T
    found = materialized("w", Foreign(view))
    assert found.is_contiguous()
    assert not found.is_conj()
    assert torch.equal(found, view.resolve_conj())


def test_a_foreign_state_is_a_state():
    """It reads in any cut, across tensors, and refuses after release."""
    values = {"a": torch.arange(6.0), "b": torch.arange(5, dtype=torch.int16), "e": torch.zeros(0)}
    state = as_state({name: Foreign(value) for name, value in values.items()})
    plain = MemoryState(values)
    assert isinstance(state, State)
    assert state.layout == plain.layout
    for start in range(0, 34, 3):
        for stop in range(start, 35):
            got, wanted = bytearray(stop - start), bytearray(stop - start)
            state.read_span(start, stop, memoryview(got))
            plain.read_span(start, stop, memoryview(wanted))
            assert got == wanted
    state.release()
    with pytest.raises(JobClosedError):
        state.tensor("a")
    with pytest.raises(JobClosedError):
        state.read_span(0, 4, memoryview(bytearray(4)))


def test_errors_of_ours_pass_through_materialize(tmp_path):
    """A lazy tensor of ours that was released says so itself."""
    ours = landed(tmp_path, {"w": torch.ones(2)})
    leaf = ours["w"]
    ours.release()
    with pytest.raises(JobClosedError):
        materialized("w", leaf)
    with InTime(terms({"w": torch.zeros(2)})) as engine, pytest.raises(AggregationError):
        engine.add(contribution("a", {"w": leaf, "v": leaf}))
