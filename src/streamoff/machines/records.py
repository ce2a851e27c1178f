"""Changing frozen records: what every transition does, so it has to be quick."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from itertools import repeat
from operator import attrgetter, call
from typing import TYPE_CHECKING, Any

__all__ = ["replace"]

if TYPE_CHECKING:
    from dataclasses import replace
else:

    @cache
    def _slots(kind: type) -> tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]] | None:
        """What reads all fields of a slotted dataclass at once, and what writes each; None without slots."""
        names = tuple(kind.__dataclass_fields__)
        if "__slots__" not in kind.__dict__ or len(names) < 2:
            return None
        return attrgetter(*names), {name: getattr(kind, name).__set__ for name in names}

    def replace(record: Any, /, **changes: Any) -> Any:
        """As ``dataclasses.replace``, in a third of the time for a frozen dataclass with slots.

        It copies slot by slot and runs no ``__init__``; so it is for records whose fields need no check.

        Args:
            record: Never changed.
            changes: New values by field name.

        Returns:
            A record of the same class.

        Raises:
            TypeError: No such field.
        """
        kind = type(record)
        slots = _slots(kind)
        if slots is None:
            return dataclasses.replace(record, **changes)
        read, write = slots
        copy = object.__new__(kind)
        any(
            map(call, write.values(), repeat(copy), read(record))
        )  # each returns None: all are called
        for name, value in changes.items():
            if name not in write:
                raise TypeError(f"{kind.__name__} has no field {name!r}")
            write[name](copy, value)
        return copy
