"""Bodies: what is packed is what is unpacked, and what is not a body is refused cheaply and by type."""

from __future__ import annotations

import enum
import gc
import math
import random
import struct
import tracemalloc
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from streamoff.errors import LimitError, MalformedFrameError, StreamoffError, UnsupportedValueError
from streamoff.payload.body import MAX_REFS, MAX_SAME_HASH, MAX_VALUES, Tag, join, unpack
from streamoff.payload.encode import encode
from streamoff.types import MIB
from streamoff.wire.limits import DEFAULT_LIMITS, Limits, LinkLimits

from .helpers import KNOWN, Derived, Pair, Picky, a_ref, alike, body_of, through, tokens

INTS = [0, 1, -1, 10, 127, -128, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]
BIG = [2**64, -(2**63) - 1, 10**40, -(10**40), 2**4096, -(2**4096) + 1, 255 << 64, 10**5000]
PRIME = 2**61 - 1
"""Of CPython's hash of numbers: multiples of it all have hash 0."""

NAN = struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\xff")[0]


# --- round trips ----------------------------------------------------------------------------------


def kind_of(value: object) -> str:
    """A name for a test that is the same in every process."""
    if isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict of {type(key).__name__} to {type(item).__name__}"
    return type(value).__name__


@pytest.mark.parametrize("value", [*INTS, *BIG], ids=lambda value: f"{value.bit_length()} bits")
def test_ints_of_any_size(value: int) -> None:
    """An int arrives as the same int, however large."""
    assert alike(through({"n": value, value: [value]}), {"n": value, value: [value]})


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        NAN,
        5e-324,
        "",
        "\0",
        "é😀",
        b"",
        b"\xff",
    ],
    ids=repr,
)
def test_plain_values(value: object) -> None:
    """A plain value arrives with its type and every bit, at the root and in every container."""
    assert alike(through(value), value)
    tree = {"list": [value], "tuple": (value,), "pair": Pair(value, value)}
    assert alike(through(tree), tree)


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
)
def test_numpy_scalars(dtype: str) -> None:
    """A NumPy scalar arrives as the same NumPy scalar, not as a Python number."""
    for value in np.array([0, 1, 100], dtype):
        assert alike(through([value]), [value])


def test_numpy_scalars_of_either_byte_order() -> None:
    """The byte order of an array does not show in its scalars."""
    assert alike(through(np.array([1.5], ">f4")[0]), np.float32(1.5))


@pytest.mark.parametrize(
    "tree",
    [
        [],
        (),
        set(),
        frozenset(),
        {},
        [[], [[]], ()],
        {"a": {"b": {"c": [1, (2, {3}), frozenset({(4, frozenset({5}))})]}}},
        {"set": {1, "1", b"1", None, 1.5, (1, "x")}},
        Pair(Pair(1, [Pair(2)]), {"x": Pair(3)}),
        {"set": {Pair(1), Pair(2)}},
        Derived(4),
    ],
    ids=kind_of,
)
def test_containers(tree: object) -> None:
    """Containers arrive as what they were, empty or nested; derived fields are derived again."""
    assert alike(through(tree), tree)


def test_dict_order_is_kept() -> None:
    """Keys arrive in the order they were put in."""
    keys = [f"k{index}" for index in range(100)]
    random.Random(1).shuffle(keys)
    assert list(through(dict.fromkeys(keys))) == keys


def test_an_ordered_dict_is_a_dict() -> None:
    """What a module's state_dict() returns travels as the dict it is."""
    assert alike(through(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


def test_keys_of_all_kinds() -> None:
    """Keys keep their types: 1, "1", b"1" and None are four keys, and True stays True where 1 is not."""
    tree = {
        1: "int",
        "1": "str",
        b"1": "bytes",
        None: "none",
        "None": "str",
        "": "empty",
        -1: "neg",
    }
    assert alike(through(tree), tree)
    assert alike(through({True: 1, 0: 2, "True": 3}), {True: 1, 0: 2, "True": 3})


def test_depth_up_to_the_limit() -> None:
    """The deepest tree that an endpoint can be set to take goes both ways."""
    limits = Limits(depth=256)
    tree: Any = 7
    for level in range(256):
        tree = [tree] if level % 2 else {"a": tree}
    assert through(tree, limits) == tree
    with pytest.raises(LimitError, match="depth"):
        encode([tree], limits)
    with pytest.raises(LimitError, match="depth"):
        unpack(join([], encode(tree, limits).tree), {}, DEFAULT_LIMITS)


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), np.complex64(1 + 2j)])
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
HASHABLE = st.recursive(
    PLAIN,
    lambda inner: (
        st.tuples(inner, inner) | st.frozensets(inner, max_size=3) | st.builds(Pair, inner)
    ),
    max_leaves=4,
)
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=20,
)


@given(TREES)
@settings(max_examples=300, deadline=None)
def test_any_plain_tree(tree: Any) -> None:
    """Whatever a tree is made of, what is unpacked is what was packed."""
    assert alike(through(tree), tree)


# --- refused where it is packed -------------------------------------------------------------------

Point = namedtuple("Point", "x y")  # noqa: PYI024 - the untyped one is what users have


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        1j,
        bytearray(b"x"),
        memoryview(b"x"),
        Decimal(1),
        Point(1, 2),
        defaultdict(list),
        torch.Size([1, 2]),
        Colour.RED,
        range(3),
        int,
        Pair,
        iter(()),
        "\ud800",
        np.datetime64("2020-01-01"),
        np.str_("x"),
        np.longdouble(1),
        {1.5: "a float key"},
        {(1, 2): "a tuple key"},
        {"\udfff": "a key that is not Unicode"},
        {np.int64(1): "a NumPy key"},
        {Colour.RED: "an enum key"},
    ],
    ids=kind_of,
)
def test_what_cannot_travel_is_refused_with_its_path(value: object) -> None:
    """A value or key that has no place in a tree is refused, and the error says where it is."""
    with pytest.raises(UnsupportedValueError) as caught:
        encode({"a": [0, {"b": value}]})
    assert str(caught.value.where["path"]).startswith("tree['a'][1]['b']")


def test_a_cycle_is_refused() -> None:
    """A tree that contains itself is too deep, not endless."""
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(LimitError, match="cycle"):
        encode(loop)


def test_a_tree_that_unfolds_is_refused() -> None:
    """Shared parts are sent each time they appear, so 2**40 values in forty lists are too many."""
    tree: Any = []
    for _ in range(40):
        tree = [tree, tree]
    with pytest.raises(LimitError, match="values"):
        encode(tree)


@pytest.mark.parametrize(
    "large",
    [b"x" * 64 * MIB, "x" * 64 * MIB, 1 << (8 * 64 * MIB)],
    ids=["bytes", "text", "int"],
)
def test_a_tree_that_is_too_large_is_refused_before_it_is_copied(large: object) -> None:
    """A leaf above the limit of a message costs no second copy of it."""
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match="message"):
            encode({"x": large})
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_size_counts_names_and_is_checked_before_anything_is_borrowed() -> None:
    """A tree of tensors whose names alone are above the limit is refused by encode itself."""
    limits = Limits(link=LinkLimits(message=64 * 1024))
    tree = {f"{index}" + "n" * 1000: torch.zeros(1) for index in range(40)}
    with pytest.raises(LimitError, match="message"):
        encode(tree, limits)


def test_too_many_refs() -> None:
    """A message has at most so many refs."""
    with pytest.raises(LimitError, match="refs"):
        join([(a_ref(), False)] * (MAX_REFS + 1), b"\xc0")


def test_an_error_about_a_huge_key_is_short() -> None:
    """A path with an int of thousands of digits, or a text of megabytes, can be shown."""
    for key in (10**5000, "x" * MIB, b"x" * MIB):
        with pytest.raises(UnsupportedValueError) as caught:
            encode({key: object()})
        assert len(str(caught.value)) < 500


# --- refused where it is unpacked -----------------------------------------------------------------

SAME_HASH = [PRIME << (61 * n) | 0 for n in range(1, MAX_SAME_HASH + 3)]
COMPLEX = [(n, -1_000_003 * n) for n in range(1, 2 * MAX_SAME_HASH)]


def _big(value: int) -> tuple[Any, ...]:
    return Tag.BIG.value, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


def _complex(imaginary: int, real: int) -> tuple[Any, ...]:
    return Tag.SCALAR.value, "<c16", np.complex128(complex(real, imaginary)).tobytes()


BAD: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "an unknown tag": (11,),
    "a negative tag": (-1,),
    "trailing bytes": (None, None),
    "an int without a value": (Tag.INT,),
    "an int that is text": (Tag.INT, "1"),
    "an int that is a bool": (Tag.INT, True),
    "a big int that is text": (Tag.BIG, "1"),
    "a list that is cut short": (Tag.LIST, 2, None),
    "a count of 2**40": (Tag.LIST, 2**40),
    "a count of -1": (Tag.LIST, -1),
    "a count that is a bool": (Tag.LIST, True, None),
    "a count that is a float": (Tag.LIST, 1.0, None),
    "a count of pairs": (Tag.DICT, 1, None),
    "a msgpack list": ([],),
    "a msgpack list in a list": (Tag.LIST, 1, [[]]),
    "a msgpack map": ({},),
    "an extension": (msgpack.ExtType(5, b"x"),),
    "a timestamp": (msgpack.Timestamp(1, 1),),
    "a key twice": (Tag.DICT, 2, "a", None, "a", None),
    "keys that are equal": (Tag.DICT, 2, True, None, Tag.INT, 1, None),
    "a float key": (Tag.DICT, 1, 1.5, None),
    "a list as key": (Tag.DICT, 1, Tag.LIST, 0, None),
    "a tensor as key": (Tag.DICT, 1, Tag.TENSOR, 0, "w", None),
    "an item twice": (Tag.SET, 2, "a", "a"),
    "items that are equal": (Tag.SET, 2, True, Tag.INT, 1),
    "a list in a set": (Tag.SET, 1, Tag.LIST, 0),
    "a list in a tuple in a frozenset": (Tag.FROZENSET, 1, Tag.TUPLE, 1, Tag.LIST, 0),
    "an unknown dataclass": (Tag.DATACLASS, "Unheard", 0),
    "a class that is no dataclass": (Tag.DATACLASS, "int", 0),
    "a field missing": (Tag.DATACLASS, "Pair", 1, "left", None),
    "a field twice": (Tag.DATACLASS, "Pair", 3, "left", None, "left", None, "right", None),
    "a field too many": (Tag.DATACLASS, "Derived", 2, "count", True, "twice", True),
    "a dataclass that refuses": (Tag.DATACLASS, "Picky", 1, "count", "no int"),
    "a ref that is not there": (Tag.TENSOR, 0, "w"),
    "a ref of negative number": (Tag.NDARRAY, -1, "w"),
    "an object dtype": (Tag.SCALAR, "|O", b"\0" * 8),
    "a structured dtype": (Tag.SCALAR, "f4,f4", b"\0" * 8),
    "a subarray dtype": (Tag.SCALAR, "(2,)f4", b"\0" * 8),
    "a dtype with a warning": (Tag.SCALAR, "a4", b"\0" * 4),
    "no dtype": (Tag.SCALAR, "{'names'", b"\0" * 4),
    "a scalar of other length": (Tag.SCALAR, "<f8", b"\0" * 4),
    "keys of one hash": (
        Tag.DICT,
        len(SAME_HASH),
        *(token for value in SAME_HASH for token in (*_big(value), None)),
    ),
    "complex items of one hash": (
        Tag.SET,
        len(COMPLEX),
        *(token for pair in COMPLEX for token in _complex(*pair)),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_nonsense_is_refused(name: str) -> None:
    """A tree that no packer makes is refused with its place, and nothing is built from it."""
    with pytest.raises(MalformedFrameError, match="message body"):
        unpack(tokens(*BAD[name]), KNOWN)


def test_the_crafted_keys_do_collide() -> None:
    """The keys that are refused for their hash really share one; a few such keys are welcome."""
    assert len({hash(value) for value in SAME_HASH}) == 1
    assert len({hash(complex(real, imaginary)) for imaginary, real in COMPLEX}) == 1
    few = dict.fromkeys(SAME_HASH[:MAX_SAME_HASH])
    assert alike(through(few), few)


@pytest.mark.parametrize(
    "head",
    [
        (-1,),
        (True,),
        ("1",),
        (1,),
        (1, "site-1", "r", b"x" * 16, 1000),
        (1, "no address!", "r", b"x" * 16, 1000, False),
        (1, "site-1", "", b"x" * 16, 1000, False),
        (1, "site-1", "r", b"x" * 15, 1000, False),
        (1, "site-1", "r", "x" * 16, 1000, False),
        (1, "site-1", "r", b"x" * 16, 7, False),
        (1, "site-1", "r", b"x" * 16, 2**63, False),
        (1, "site-1", "r", b"x" * 16, 1000, 0),
        (2**62,),
    ],
    ids=repr,
)
def test_refs_that_are_none_are_refused(head: tuple[Any, ...]) -> None:
    """Every field of a ref is checked, and so is their number."""
    with pytest.raises(MalformedFrameError):
        unpack(tokens(None, refs=head), KNOWN)


def test_more_refs_than_allowed_are_refused() -> None:
    """The number of refs is limited where they are read, too."""
    refs = [MAX_REFS + 1, *(["site-1", "r", b"x" * 16, 1000, False] * (MAX_REFS + 1))]
    with pytest.raises(LimitError, match="refs"):
        unpack(tokens(None, refs=refs), KNOWN)


def test_leaves_of_one_ref_are_of_one_kind() -> None:
    """A ref whose leaves are tensors and ndarrays is nobody's: it could not be pulled once."""
    head = (1, "site-1", "r", b"x" * 16, 1000, False)
    leaves = (Tag.LIST, 2, Tag.TENSOR, 0, "a", Tag.NDARRAY, 0, "b")
    with pytest.raises(MalformedFrameError, match="as others of its ref"):
        unpack(tokens(*leaves, refs=head), KNOWN)


def test_text_that_is_not_utf8_is_refused() -> None:
    """Text is Unicode or it is not text."""
    with pytest.raises(MalformedFrameError, match="not a scalar"):
        unpack((memoryview(b"\x00\xa2\xff\xfe"),), KNOWN)


def test_a_depth_bomb_is_refused() -> None:
    """A million nested lists are refused at the limit, not at the interpreter's."""
    body = (memoryview(b"\x00" + b"\x02\x01" * 1_000_000 + b"\xc0"),)
    with pytest.raises(LimitError, match="depth"):
        unpack(body, KNOWN)


def test_a_body_of_many_values_is_limited() -> None:
    """A few bytes make an object of hundreds: too many values are refused, however few bytes they are."""
    body = (memoryview(b"\x00\x02" + msgpack.packb(MAX_VALUES) + b"\xc0" * MAX_VALUES),)
    with pytest.raises(LimitError, match="values"):
        unpack(body, KNOWN)


def test_nonsense_about_huge_keys_is_refused_in_few_words() -> None:
    """An error about an int key of thousands of digits is an error about the body, and short."""
    huge = _big(10**5000)
    for body in (
        tokens(Tag.DICT, 2, *huge, None, *huge, None),
        tokens(Tag.DICT, 1, *huge, 99),
        tokens(Tag.DICT, 1, "x" * MIB, 99),
        tokens(Tag.DATACLASS, "x" * MIB, 0),
        tokens(Tag.SCALAR, "f4," * MIB, b""),
    ):
        with pytest.raises(MalformedFrameError) as caught:
            unpack(body, KNOWN)
        assert len(str(caught.value)) < 500


def _peak(call: Callable[[], object]) -> int:
    """Bytes that a call has allocated at most, and the typed error it may raise swallowed."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        try:
            call()
        except StreamoffError as error:
            assert len(str(error)) < 2000  # noqa: PT017 - that it raises is not the point
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


SAMPLE: dict[str, Any] = {
    "params": {f"layer.{index}": torch.zeros(2) for index in range(20)},
    "array": np.arange(3),
    "plain": [1, 2.5, None, "text", b"bytes", 10**40, {1, 2}, (True,), frozenset({"a"})],
    "scalar": np.float32(1),
    "pair": Pair(1, {"nested": Derived(2)}),
}
VALID = b"".join(body_of(SAMPLE))


@given(st.binary(max_size=4096))
@settings(max_examples=300, deadline=None)
def test_random_bytes(data: bytes) -> None:
    """Whatever bytes come, the answer is a tree or a typed error, and cheap."""
    assert _peak(lambda: unpack((memoryview(data),), KNOWN)) < 8 * MIB


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_bodies(data: st.DataObject) -> None:
    """A valid body with bytes changed, cut out, put in or cut off is a tree or a typed error, and cheap."""
    body = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(body)))
        stop = at + data.draw(st.integers(0, 8))
        body[at:stop] = data.draw(st.binary(max_size=9))
    assert _peak(lambda: unpack((memoryview(bytes(body)),), KNOWN)) < 8 * MIB


def test_every_truncation() -> None:
    """A body cut anywhere is refused as such."""
    for length in range(len(VALID)):
        with pytest.raises(MalformedFrameError):
            unpack((memoryview(VALID[:length]),), KNOWN)


def test_any_cut_of_a_body_into_views() -> None:
    """A body that comes in pieces is the same body."""
    for size in (1, 7, 100):
        pieces = [memoryview(VALID[at : at + size]) for at in range(0, len(VALID), size)]
        tree, batches = unpack(tuple(pieces), KNOWN)
        assert list(tree) == list(SAMPLE)  # type: ignore[call-overload]
        assert [sorted(batch.names)[:1] for batch in batches] == [["layer.0"], ["array"]]


def test_picky_is_picky() -> None:
    """The dataclass that refuses above takes what it should."""
    assert through(Picky(3)) == Picky(3)
