"""Walking a tree: every ref is found or refused, and replacing refs touches nothing else."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch

from streamoff.errors import UnsupportedValueError, UsageError
from streamoff.payload.leaves import TensorRef
from streamoff.payload.tree import leaves, replaced

from .helpers import Derived, Pair, Picky, kept

Point = namedtuple("Point", "x y")  # noqa: PYI024 - the untyped one is what users have


def zero() -> torch.Tensor:
    """A tensor; which one does not matter here."""
    return torch.zeros(1)


def test_refs_are_found_in_every_container() -> None:
    """Refs in lists, tuples, sets, dicts and dataclasses, nested in any way, are found with their paths."""
    tree = kept(
        {
            "flat": zero(),
            "list": [1, zero(), (zero(),)],
            "set": {"x"},
            "frozen": frozenset({zero()}),
            "pair": Pair({"deep": [zero()]}, zero()),
            3: zero(),
        }
    )
    paths = [path for path, _ in leaves(tree)]
    assert paths == [
        ("flat",),
        ("list", 1),
        ("list", 2, 0),
        ("frozen", 0),
        ("pair", "left", "deep", 0),
        ("pair", "right"),
        (3,),
    ]


def test_what_is_found_is_replaced() -> None:
    """Looking for refs and replacing them agree on what a container is."""
    tree = kept({"a": [zero(), {zero()}], "p": Pair((zero(),)), "f": frozenset({zero()})})
    tree = OrderedDict(tree)
    ends = {leaf: number for number, (_, leaf) in enumerate(leaves(tree))}
    new = replaced(tree, ends)
    assert new == OrderedDict(a=[0, {1}], p=Pair((2,)), f=frozenset({3}))
    assert not list(leaves(new))


def test_what_has_no_refs_is_shared() -> None:
    """Replacing copies only the way to a ref."""
    tree = {"plain": {"x": [1, 2]}, "odd": object(), "ref": [kept(zero()), {"y": 1}]}
    (leaf,) = (leaf for _, leaf in leaves(tree))
    new = replaced(tree, {leaf: "end"})
    assert new["ref"] == ["end", {"y": 1}]
    assert new["plain"] is tree["plain"]
    assert new["odd"] is tree["odd"]
    assert isinstance(tree["ref"], list)
    assert tree["ref"][0] is leaf
    assert replaced(tree, {}) is tree


def test_derived_fields_are_derived_from_what_arrived() -> None:
    """A field that no constructor takes is neither looked at nor carried over."""
    tree = [kept(zero()), Derived(2)]
    (leaf,) = (leaf for _, leaf in leaves(tree))
    assert replaced(tree, {leaf: 1}) == [1, Derived(2)]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda ref: Point(ref, 1),
        lambda ref: defaultdict(list, {"a": ref}),
        lambda ref: type("Names", (list,), {})([ref]),
        lambda ref: {"x": Point([{"deep": ref}], 2)},
    ],
    ids=["namedtuple", "defaultdict", "list subclass", "deep in a namedtuple"],
)
def test_a_ref_in_a_foreign_container_is_refused(wrap: Any) -> None:
    """A ref where it could never be replaced is an error with its path, not a ref that is forgotten."""
    with pytest.raises(UnsupportedValueError, match="cannot travel") as caught:
        list(leaves({"here": wrap(kept(zero()))}))
    assert str(caught.value.where["path"]).startswith("tree['here']")


def test_foreign_containers_without_refs_do_not_matter() -> None:
    """What a caller has put beside its refs is the caller's."""
    tree = {"shape": torch.Size([1, 2]), "point": Point(1, 2), "ref": kept(zero())}
    assert len(list(leaves(tree))) == 1


def test_a_cycle_is_an_error() -> None:
    """Looking for refs in a tree that contains itself ends."""
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(UsageError, match="too deep"):
        list(leaves(loop))


def test_a_set_that_cannot_hold_an_end_says_so() -> None:
    """What a leaf became may have no place in a set; the error has the path."""
    tree = {"s": {kept(zero())}}
    (leaf,) = (leaf for _, leaf in leaves(tree))
    with pytest.raises(UnsupportedValueError, match="cannot hold") as caught:
        replaced(tree, {leaf: []})
    assert caught.value.where["path"] == "tree['s']"


def test_a_dataclass_that_refuses_an_end_says_so() -> None:
    """A dataclass that checks its fields may not take what a ref became."""
    made = Picky(1)
    made.count = leaf = kept(zero())
    with pytest.raises(UnsupportedValueError, match="count is no int"):
        replaced(made, {leaf: "text"})


def test_copies_share_their_refs() -> None:
    """A tree that is copied, deep or not, has the same refs: one consumer in all, not one per copy."""
    tree = kept({"a": [zero()]})
    leaf = tree["a"][0]
    assert isinstance(leaf, TensorRef)
    assert copy.deepcopy(tree)["a"][0] is leaf
    assert copy.copy(leaf) is leaf


def test_refs_are_not_pickled() -> None:
    """A kept ref does not leave the process by a side door."""
    with pytest.raises(UsageError, match="pickled"):
        pickle.dumps(kept(zero()))
