"""The numbers: every dtype, every rule, through both engines."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from streamoff.errors import AggregationError, DtypeError
from streamoff.fl.aggregation import Kind
from streamoff.fl.aggregation.arithmetic import method_of
from streamoff.fl.aggregation.policies import Policies
from streamoff.tensors.dtypes import ITEMSIZE
from streamoff.types import TensorSpec

from .support import ENGINES, aggregate, bits, contribution, mean_of, terms

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]

each_engine = pytest.mark.parametrize("engine", ENGINES)


@each_engine
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_400_ones_average_to_exactly_one(engine, dtype):
    """A mean of ones is one in every float dtype: sums do not saturate in the dtype of the model."""
    values = [torch.ones(3, dtype=dtype)] * 400
    assert mean_of(engine, values).to(torch.float32).tolist() == [1.0, 1.0, 1.0]


@each_engine
@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
def test_low_precision_is_rounded_once(engine, dtype):
    """The mean of low-precision values is their float64 mean, cast once."""
    generator = torch.Generator().manual_seed(1)
    values = [(torch.rand(1000, generator=generator) + 0.5).to(dtype) for _ in range(8)]
    found = mean_of(engine, values)
    wide = torch.stack([value.to(torch.float64) for value in values]).mean(0)
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.float64), wide.to(dtype).to(torch.float64))


@each_engine
def test_float64_models_keep_their_precision(engine):
    """A float64 key accumulates in float64 whatever the setting."""
    values = [torch.tensor([1.0 + 2**-50], dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    assert mean_of(engine, values).item() == 1.0 + 2**-51


@each_engine
def test_float64_accumulators_are_more_exact_on_request(engine):
    """Cancellation that float32 sums lose survives with float64 accumulators."""
    values = [[1e8], [1.0], [-1e8]]
    found = {}
    for accumulator in ("float32", "float64"):
        sites = [contribution(f"s{n}", {"w": torch.tensor(v)}) for n, v in enumerate(values)]
        agreed = terms({"w": torch.zeros(1)}, accumulator=accumulator)
        found[accumulator] = aggregate(engine, agreed, sites).state.tensor("w").item()
    assert found["float64"] == pytest.approx(1 / 3, rel=1e-6)
    assert found["float32"] != pytest.approx(1 / 3, rel=1e-2)


@each_engine
def test_result_has_the_global_dtype_whoever_comes_first(engine):
    """A key that is bfloat16 at one site and float32 at another gives one value in any order."""
    for dtype in (torch.float32, torch.bfloat16):
        found = set()
        sites = {
            "a": torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
            "b": torch.tensor([1.001, 2.0], dtype=torch.float32),
            "c": torch.tensor([0.5, 0.25], dtype=torch.float16),
        }
        for order in itertools.permutations(sites):
            given = [contribution(site, {"w": sites[site]}) for site in order]
            agreed = terms({"w": torch.zeros(2, dtype=dtype)}, dtypes="cast", accumulator="float64")
            result = aggregate(engine, agreed, given).state.tensor("w")
            assert result.dtype == dtype
            found.add(tuple(result.tolist()))
        assert len(found) == 1
        exact = torch.tensor([(1.0 + float(torch.tensor(1.001)) + 0.5) / 3, 1.75])
        assert torch.tensor(found.pop()).to(dtype).equal(exact.to(dtype))


@each_engine
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_means_round_half_to_even(engine, dtype):
    """An integer mean is rounded once, halves to even, and keeps dtype and shape ()."""
    for values, mean in (((2, 3), 2), ((3, 4), 4), ((1, 1, 2), 1), ((5, 7, 100), 37)):
        found = mean_of(engine, [torch.tensor(value, dtype=dtype) for value in values])
        assert (found.dtype, found.shape, found.item()) == (dtype, (), mean)


@each_engine
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_limits_stay_inside_their_dtype(engine, dtype):
    """Means at the limits of a dtype do not wrap around, and are exact well below 2**53."""
    limits = torch.iinfo(dtype)
    for value in (max(limits.min, -(2**48)), min(limits.max, 2**48)):
        values = [torch.tensor([value], dtype=dtype)] * 3
        assert mean_of(engine, values, [0.1, 0.2, 0.3]).item() == value
    for limit in (limits.min, limits.max):
        values = [torch.tensor([limit], dtype=dtype)] * 3
        found = mean_of(engine, values, [0.1, 0.2, 0.3]).item()
        assert found == pytest.approx(limit, rel=2**-50)


@each_engine
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_can_take_the_largest_or_the_first(engine, dtype):
    """``max`` and ``first`` are exact in every integer dtype; first means by name, not by arrival."""
    high = torch.iinfo(dtype).max
    values = {"b": high - 2, "a": high - 1, "c": high, "d": 3}
    for rule, expected in (("max", high), ("first", high - 1)):
        sites = [
            contribution(site, {"n": torch.tensor(value, dtype=dtype)})
            for site, value in values.items()
        ]
        agreed = terms({"n": torch.tensor(0, dtype=dtype)}, integers=rule)
        assert aggregate(engine, agreed, sites).state.tensor("n").item() == expected


@each_engine
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("majority", [True, False, False, True]),
        ("any", [True, True, False, True]),
        ("all", [True, False, False, False]),
        ("first", [True, True, False, False]),
    ],
)
def test_bools_follow_their_rule(engine, rule, expected):
    """Bools vote by weight, are joined, or are taken from the first site; a tie is False."""
    sites = [
        contribution("b", {"m": torch.tensor([True, False, False, True])}, 2),
        contribution("a", {"m": torch.tensor([True, True, False, False])}, 1),
        contribution("c", {"m": torch.tensor([True, True, False, True])}, 1),
    ]
    agreed = terms({"m": torch.zeros(4, dtype=torch.bool)}, bools=rule)
    assert aggregate(engine, agreed, sites).state.tensor("m").tolist() == expected


@each_engine
def test_a_bool_byte_of_seven_has_one_vote(engine):
    """A site cannot outvote others with bytes that no bool has, nor get them into the result."""
    loud = torch.tensor([7], dtype=torch.uint8).view(torch.bool)
    quiet = torch.tensor([False])
    for rule, expected in (("majority", b"\0"), ("any", b"\1"), ("first", b"\1")):
        sites = [contribution("a", {"m": loud}), contribution("b", {"m": quiet}, 2)]
        agreed = terms({"m": torch.tensor([False])}, bools=rule)
        assert bits(aggregate(engine, agreed, sites).state)["m"] == expected


@each_engine
def test_complex_numbers_are_averaged_by_component(engine):
    """complex64 is a pair of float32: real and imaginary parts are averaged apart."""
    values = [torch.tensor([1 + 2j, 0j]), torch.tensor([3 - 4j, 1j])]
    assert mean_of(engine, values).tolist() == [2 - 1j, 0.5j]


@each_engine
def test_differences_are_added_to_the_global_model(engine):
    """The mean of the differences is added to the previous model, for floats and signed integers."""
    previous = {"w": torch.tensor([10.0, 20.0]), "n": torch.tensor([5, -(2**62)])}
    sites = [
        contribution(
            "a", {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([1, -3])}, 1, kind=Kind.DIFF
        ),
        contribution(
            "b", {"w": torch.tensor([4.0, -1.0]), "n": torch.tensor([4, 3])}, 2, kind=Kind.DIFF
        ),
    ]
    state = aggregate(engine, terms(previous, kind=Kind.DIFF), sites).state
    assert state.tensor("w").tolist() == [13.0, 20.0]
    assert state.tensor("n").tolist() == [8, -(2**62) + 1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint64], ids=str)
def test_differences_of_unsigned_numbers_are_refused_unless_excluded(dtype):
    """A dtype without negatives has no differences: refused by key when the round opens."""
    previous = {"mask": torch.ones(2, dtype=dtype), "w": torch.zeros(1)}
    for engine in ENGINES:
        with pytest.raises(DtypeError) as caught:
            aggregate(engine, terms(previous, kind=Kind.DIFF), [])
        assert caught.value.tensor == "mask"
        sites = [contribution("a", {"w": torch.ones(1)}, kind=Kind.DIFF)]
        agreed = terms(previous, kind=Kind.DIFF, exclude=["mask"])
        state = aggregate(engine, agreed, sites).state
        assert torch.equal(state.tensor("mask"), previous["mask"])


def test_a_dtype_without_a_mean_is_refused_unless_excluded():
    """Block scales (float8_e8m0fnu) travel, but a round with them opens only if they are excluded."""
    scales = torch.full((2,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    previous = {"block.scale": scales, "w": torch.zeros(1)}
    for engine in ENGINES:
        with pytest.raises(DtypeError) as caught:
            aggregate(engine, terms(previous), [])
        assert (caught.value.tensor, caught.value.got) == ("block.scale", "F8_E8M0")
        sites = [contribution("a", {"w": torch.ones(1)})]
        state = aggregate(engine, terms(previous, exclude=["*.scale"]), sites).state
        assert bits(state)["block.scale"] == b"\x7f\x7f"
        assert state.tensor("w").item() == 1.0


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_every_dtype_that_travels_has_a_stated_arithmetic(dtype):
    """Each dtype that lands has a method or is refused by key; none is left to chance."""
    spec = TensorSpec("w", dtype, (1,), 0, ITEMSIZE[dtype])
    if dtype == "F8_E8M0":
        with pytest.raises(DtypeError):
            method_of(spec, Policies(), diff=False)
    else:
        assert method_of(spec, Policies(), diff=False).width in {4, 8}


@each_engine
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_of_torch_changes_no_bit(engine, threads):
    """Elements at the ragged ends of vector loops come out as in one thread."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(70_001, generator=generator).to(torch.bfloat16) for _ in range(3)]
    values32 = [torch.randn(70_001, generator=generator) for _ in range(3)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [mean_of(engine, v, [0.1, 0.7, 0.3]) for v in (values, values32)]
        torch.set_num_threads(threads)
        again = [mean_of(engine, v, [0.1, 0.7, 0.3]) for v in (values, values32)]
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, alone, again))


@each_engine
def test_values_do_not_depend_on_their_place_in_a_tensor(engine):
    """The same values at every offset of a vector loop give the same bits: nothing is fused."""
    values = [torch.full((1037,), 0.1), torch.full((1037,), 0.7), torch.full((1037,), -0.3)]
    assert len(set(mean_of(engine, values, [0.3, 0.5, 0.7]).tolist())) == 1


@each_engine
@pytest.mark.parametrize("rule", ["average", "max", "first"])
def test_averaged_buffers_load_strictly(engine, rule):
    """A batch-norm counter keeps shape () and int64, so the result loads with ``strict=True``."""

    def network(batches: int) -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        for _ in range(batches):
            module(torch.randn(8, 3))
        return module

    sites = [contribution(f"s{n}", network(n + 3).state_dict()) for n in range(3)]
    module = network(0)
    state = aggregate(engine, terms(module.state_dict(), integers=rule), sites).state
    found = {name: state.tensor(name) for name in state.layout.names}
    module.load_state_dict(found, strict=True)
    counter = module.state_dict()["1.num_batches_tracked"]
    expected = {"average": 4, "max": 5, "first": 3}[rule]
    assert (counter.dtype, counter.shape, counter.item()) == (torch.int64, (), expected)


@each_engine
@pytest.mark.parametrize("step_dtype", [torch.float32, torch.int64], ids=str)
def test_optimiser_steps_are_averaged_only_if_asked(engine, step_dtype):
    """Adam's 0-dim steps keep dtype, shape and value when excluded; its bfloat16 moments are averaged."""

    def moments(step: int, value: float) -> dict[str, torch.Tensor]:
        return {
            "0.step": torch.tensor(step, dtype=step_dtype),
            "0.exp_avg": torch.full((3,), value, dtype=torch.bfloat16),
        }

    for exclude, step in ((["*.step"], 100), ([], 20)):
        sites = [contribution("a", moments(10, 1.0)), contribution("b", moments(30, 2.0))]
        state = aggregate(engine, terms(moments(100, 0.0), exclude=exclude), sites).state
        found = state.tensor("0.step")
        assert (found.dtype, found.shape, found.item()) == (step_dtype, (), step)
        assert state.tensor("0.exp_avg").dtype == torch.bfloat16
        assert state.tensor("0.exp_avg").tolist() == [1.5] * 3


@each_engine
def test_a_result_that_overflows_its_dtype_costs_the_round(engine):
    """Finite differences on a finite model that leave float16 are an error, not an infinite model."""
    previous = {"w": torch.tensor([60000.0], dtype=torch.float16)}
    site = contribution("a", {"w": torch.tensor([60000.0], dtype=torch.float16)}, kind=Kind.DIFF)
    with pytest.raises(AggregationError, match="NaN or infinite") as caught:
        aggregate(engine, terms(previous, kind=Kind.DIFF), [site])
    assert caught.value.tensor == "w"


@each_engine
def test_sums_of_the_largest_floats_do_not_overflow(engine):
    """The mean of the largest float32 over many sites is that float: weights are scaled first."""
    largest = torch.finfo(torch.float32).max
    assert mean_of(engine, [torch.tensor([largest])] * 32).item() == largest
    assert math.isfinite(mean_of(engine, [torch.tensor([-largest])] * 3, [0.1, 5, 3]).item())
