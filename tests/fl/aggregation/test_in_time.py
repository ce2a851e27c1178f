"""Folding on arrival: what is freed when, what it costs, and what is never published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamoff.errors import (
    AggregationError,
    ContributionRejectedError,
    IntegrityError,
    JobClosedError,
    LandingError,
)
from streamoff.fl.aggregation import InTime, Kind, Reason
from streamoff.tensors.state import MemoryState
from streamoff.tensors.writer import FileWriter, MemoryWriter

from .support import aggregate, bits, contribution, terms, verified
from .test_columnar import Cut, FailingWriter, corrupt, model, stop_at

PREVIOUS = {name: torch.zeros_like(value) for name, value in model(0).items()}


def owned(directory: Path, tensors: dict[str, torch.Tensor], gone: list[Path]):
    """A landed state in a directory of its own."""
    directory.mkdir()
    state = MemoryState(tensors)
    writer = FileWriter(directory / "p.safetensors", state.layout, dispose=gone.append)
    content = memoryview(bytearray(state.layout.data_nbytes))
    state.read_span(0, len(content), content)
    writer.write(0, content)
    return writer.finish()


def test_a_contribution_is_folded_and_freed_while_another_is_on_its_way(tmp_path):
    """The first site's disk is free before the second has arrived; the mean is as if it had waited."""
    gone: list[Path] = []
    with InTime(terms(PREVIOUS)) as engine:
        engine.add(contribution("a", owned(tmp_path / "a", model(1), gone), 2))
        assert gone == [tmp_path / "a"]
        engine.add(contribution("b", owned(tmp_path / "b", model(2), gone), 3))
        found = engine.finish(MemoryWriter).state
    waited = aggregate(
        "columnar",
        terms(PREVIOUS),
        [contribution("b", model(2), 3), contribution("a", model(1), 2)],
    ).state
    assert bits(found) == bits(waited)


def test_in_the_order_of_names_the_bits_are_those_of_the_walk():
    """Folding in the order of the sites' names gives exactly the columnar result, for any weights."""
    weights = [0.1, 1e-5, 300, 7, 2.5e8]
    sites = [(f"s{n}", model(n, large=1000), weight) for n, weight in enumerate(weights)]
    previous = {name: torch.zeros_like(value) for name, value in sites[0][1].items()}
    folded = aggregate("in_time", terms(previous), [contribution(*site) for site in sites])
    walked = aggregate("columnar", terms(previous), [contribution(*site) for site in sites])
    assert bits(folded.state) == bits(walked.state)


def test_another_order_of_arrival_differs_in_the_last_bits_only():
    """Whatever the order, folding is within a few roundings of the walk, and repeatable."""
    sites = [(f"s{n}", model(n, large=1000), 0.3 + n) for n in range(6)]
    previous = {name: torch.zeros_like(value) for name, value in sites[0][1].items()}
    walked = aggregate("columnar", terms(previous), [contribution(*s) for s in sites]).state
    backwards = [
        aggregate("in_time", terms(previous), [contribution(*s) for s in reversed(sites)]).state
        for _ in range(2)
    ]
    assert bits(backwards[0]) == bits(backwards[1])
    for name in ("large", "small.7"):
        torch.testing.assert_close(
            backwards[0].tensor(name), walked.tensor(name), rtol=1e-6, atol=1e-6
        )


class FaultyState(MemoryState):
    """Fails at its n-th read, as a disk does."""

    def __init__(self, tensors: dict[str, torch.Tensor], fail_at: int) -> None:
        super().__init__(tensors)
        self.left = fail_at

    def read_span(self, start: int, stop: int, buffer: memoryview) -> None:
        """Read, or fail."""
        self.left -= 1
        if self.left < 0:
            raise IntegrityError("page changed since it landed")
        super().read_span(start, stop, buffer)


def reads_of_a_pass() -> int:
    """How many reads one pass over the model takes."""
    state = FaultyState(model(1), 10**6)
    aggregate("in_time", terms(PREVIOUS, nonfinite="allow"), [contribution("a", state)])
    return 10**6 - state.left


def test_a_half_added_contribution_is_never_published():
    """Wherever a read fails: before anything was added it costs the site, afterwards the round."""
    once = reads_of_a_pass()
    assert once > 3
    alone = bits(aggregate("in_time", terms(PREVIOUS), [contribution("a", model(1))]).state)
    for fail_at in range(2 * once):
        with InTime(terms(PREVIOUS)) as engine:
            engine.add(contribution("a", model(1)))
            bad = contribution("b", FaultyState(model(2), fail_at), 4)
            with pytest.raises(AggregationError) as caught:
                engine.add(bad)
            if fail_at <= once:  # looking at it, or reading its first block again
                assert isinstance(caught.value, ContributionRejectedError)
                result = engine.finish(MemoryWriter)
                assert bits(result.state) == alone
                assert [(r.site, r.reason) for r in result.report.rejected] == [("b", Reason.READ)]
                continue
            assert not isinstance(caught.value, ContributionRejectedError)
            assert caught.value.site == "b"
            with pytest.raises(AggregationError, match="part of it had been added"):
                engine.add(contribution("c", model(3)))
            with pytest.raises(AggregationError, match="part of it had been added"):
                engine.finish(MemoryWriter)


def test_bad_bytes_cost_their_site_and_not_the_round(tmp_path):
    """A page that rotted on disk is found before the first block is added."""
    with InTime(terms(PREVIOUS)) as engine:
        engine.add(contribution("a", model(1)))
        for name in ("large", "wide", "small.9"):
            with pytest.raises(ContributionRejectedError, match="page changed"):
                engine.add(contribution("b", corrupt(verified(tmp_path, model(2)), name)))
        assert bits(engine.finish(MemoryWriter).state) == bits(MemoryState(model(1)))


def test_a_cut_in_the_middle_of_a_contribution_costs_the_round():
    """Cut while looking, nothing has happened; cut while adding, nothing is published any more."""
    outcomes = set()
    for call in range(40):
        with InTime(terms(PREVIOUS)) as engine:
            engine.add(contribution("a", model(1)))
            state = MemoryState(model(2))
            try:
                engine.add(contribution("b", state), stop=stop_at(call))
            except Cut:
                with pytest.raises(JobClosedError):
                    state.tensor("large")
            else:
                break
            try:
                result = engine.finish(MemoryWriter)
            except AggregationError:
                outcomes.add("lost")
            else:
                assert bits(result.state) == bits(MemoryState(model(1)))
                assert result.report.sites == ("a",)
                outcomes.add("alone")
    assert outcomes == {"lost", "alone"}


def test_a_writer_that_fails_costs_the_round():
    """Dividing destroys the sums: after a full disk the engine refuses to publish anything."""
    with InTime(terms(PREVIOUS)) as engine:
        engine.add(contribution("a", model(1)))
        with pytest.raises(LandingError, match="full"):
            engine.finish(FailingWriter)
        with pytest.raises(AggregationError, match="could not be written"):
            engine.finish(MemoryWriter)


def test_sums_are_rescaled_without_a_trace():
    """Weights that grow by many orders of magnitude on the way leave the bits of the walk."""
    sites = [(f"s{n:02}", {"w": torch.randn(500)}, 10.0 ** (n - 6)) for n in range(12)]
    previous = {"w": torch.zeros(500)}
    folded = aggregate("in_time", terms(previous), [contribution(*site) for site in sites])
    walked = aggregate("columnar", terms(previous), [contribution(*site) for site in sites])
    assert bits(folded.state) == bits(walked.state)


def test_differences_and_partial_keys_agree_with_the_walk():
    """Own denominators and the previous model are handled as the walk does."""
    previous = model(0, large=1000)
    first, second = model(1, large=1000), model(2, large=1000)
    del second["small.3"]
    del first["large"]
    found = [
        bits(
            aggregate(
                engine,
                terms(previous, kind=Kind.DIFF, missing="partial"),
                [
                    contribution("a", first, 2, kind=Kind.DIFF),
                    contribution("b", second, 5, kind=Kind.DIFF),
                ],
            ).state
        )
        for engine in ("columnar", "in_time")
    ]
    assert found[0] == found[1]
