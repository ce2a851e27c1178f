"""Walking payload trees: what counts as a container, where the refs are, and putting others in their place."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from typing import Any, Final

from streamoff.errors import UnsupportedValueError, UsageError
from streamoff.payload.leaves import TensorRef

__all__ = [
    "DICTS",
    "KEYS",
    "MAX_DEPTH",
    "PLAIN",
    "Path",
    "children",
    "fields_of",
    "leaves",
    "replaced",
    "show",
    "step",
]

MAX_DEPTH: Final = 256
"""Nesting of a tree whose refs are looked for; no endpoint can be set to send a deeper one."""

Path = tuple[object, ...]
"""Keys and indices from the root of a tree to one of its values."""

PLAIN: Final = frozenset({str, float, bool, type(None), bytes})
"""Types whose values stand for themselves in a body."""
KEYS: Final = PLAIN - {float} | {int}
"""Types of the keys of a dict."""
DICTS: Final = frozenset({dict, OrderedDict})
"""Mappings of a tree; both arrive as a dict, in order."""
SEQUENCES: Final = frozenset({list, tuple, set, frozenset})

_SHOWN: Final = 48
"""Characters of one step of a path in a message."""


def show(path: Path) -> str:
    """Render a path as one would write it."""
    return "tree" + "".join(f"[{step(one)}]" for one in path)


def step(key: object) -> str:
    """Render a key: peers choose keys, and an int of 5,000 digits has no text at all."""
    if isinstance(key, int) and key.bit_length() > 8 * _SHOWN:
        return f"an int of {key.bit_length()} bits"
    if isinstance(key, (str, bytes)) and len(key) > _SHOWN:
        return f"{key[:_SHOWN]!r}..."
    return repr(key)


def children(value: object) -> Iterable[tuple[object, object]] | None:
    """The steps and values under a container of a payload tree; None if it is none.

    The one place that says what is looked into: packing, looking for refs and replacing them agree.
    """
    kind = type(value)
    if kind in PLAIN:
        return None
    if kind in DICTS:
        return value.items()  # type: ignore[attr-defined, no-any-return]
    if kind in SEQUENCES:
        return enumerate(value)  # type: ignore[arg-type]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorRef)):
        return [(name, getattr(value, name)) for name in fields_of(kind)]
    return None


def fields_of(kind: Any) -> list[str]:
    """The fields that make a dataclass; others follow from them."""
    return [item.name for item in dataclasses.fields(kind) if item.init]


def leaves(tree: object) -> Iterator[tuple[Path, TensorRef]]:
    """Every kept ref of a tree with its path, in order; looks into all containers and dataclasses.

    Raises:
        UnsupportedValueError: A ref in a container that no tree can have (a namedtuple, a defaultdict):
            there it would never be found again.
        UsageError: Deeper than :data:`MAX_DEPTH`, or a cycle.
    """
    todo: list[tuple[Path, object, str]] = [((), tree, "")]
    while todo:
        path, value, foreign = todo.pop()
        if isinstance(value, TensorRef):
            if foreign:
                raise UnsupportedValueError(
                    "a ref in a container that cannot travel", got=foreign, path=show(path)
                )
            yield path, value
            continue
        found = children(value)
        if found is None and type(value) not in PLAIN:
            found = _foreign(value)
            foreign = type(value).__qualname__ if found is not None else ""
        if found is None:
            continue
        if len(path) >= MAX_DEPTH:
            raise UsageError(
                "the tree is too deep",
                expected=f"at most {MAX_DEPTH} levels",
                got="more, or a cycle",
                path=show(path[:8]),
            )
        below = [((*path, key), item, foreign) for key, item in found]
        todo.extend(reversed(below))


def _foreign(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a container of a type that trees do not have, so that no ref is passed over."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple, AbstractSet)) else None


def replaced(tree: Any, ends: Mapping[TensorRef, object]) -> Any:
    """A copy of a tree with leaves replaced; what has none is shared, not copied.

    Raises:
        UnsupportedValueError: A set cannot hold, or a dataclass refuses, what a leaf became.
    """
    return _replaced(tree, ends, ())


def _replaced(tree: Any, ends: Mapping[TensorRef, object], path: Path) -> Any:
    if isinstance(tree, TensorRef):
        return ends.get(tree, tree)
    found = children(tree)
    if found is None:
        return tree
    changed = False
    items: dict[object, object] = {}
    for key, item in found:
        items[key] = new = _replaced(item, ends, (*path, key))
        changed = changed or new is not item
    if not changed:
        return tree
    try:
        return _rebuilt(tree, items)
    except Exception as error:
        raise UnsupportedValueError(
            f"{type(tree).__qualname__} cannot hold what its refs became ({error})", path=show(path)
        ) from error


def _rebuilt(tree: Any, items: dict[Any, object]) -> object:
    kind = type(tree)
    if kind in DICTS:
        return kind(items)
    if kind in SEQUENCES:
        return kind(items.values())
    return dataclasses.replace(tree, **items)
