"""What an aggregation accepts and how it calculates: one frozen record of choices."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fnmatch import translate
from typing import Final, Literal, get_args

from streamoff.errors import UsageError

__all__ = ["Policies"]

Missing = Literal["strict", "partial"]
Extra = Literal["strict", "drop"]
Dtypes = Literal["strict", "cast"]
Mismatch = Literal["reject_site", "reject_round"]
Nonfinite = Literal["reject_site", "reject_round", "allow"]
Integers = Literal["average", "max", "first"]
Bools = Literal["majority", "any", "all", "first"]
Accumulator = Literal["float32", "float64"]

_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "missing": get_args(Missing),
    "extra": get_args(Extra),
    "dtypes": get_args(Dtypes),
    "mismatch": get_args(Mismatch),
    "nonfinite": get_args(Nonfinite),
    "integers": get_args(Integers),
    "bools": get_args(Bools),
    "accumulator": get_args(Accumulator),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The choices of one aggregation; the defaults refuse whatever is not exactly as agreed.

    Args:
        missing: ``strict`` refuses a site that lacks a key; ``partial`` averages each key over the sites
            that have it, with its own denominator, and reports it. A key that no site of positive weight
            has keeps its previous value.
        extra: ``strict`` refuses a site with a key the global model lacks; ``drop`` ignores the key and
            reports it.
        dtypes: ``strict`` wants the dtype of the global model; ``cast`` takes any floating dtype for a
            floating key. Integers, bools and complex numbers must match in both cases.
        mismatch: Whether a breach of the three rules above, or a shape that differs, costs the site or
            the round.
        nonfinite: What a NaN or infinity costs: the site, the round, or nothing.
        integers: ``average`` is the weighted mean in float64, rounded half to even; ``max`` the largest
            value; ``first`` the value of the first site by name.
        bools: ``majority`` is true where the true sites have more than half of the weight; ``any``,
            ``all`` and ``first`` are what they say.
        accumulator: In what floating keys are summed. float64 keys always use float64.
        exclude: Shell-style patterns (``*``, ``?``, ``[...]``, case-sensitive) of keys that are neither
            checked nor averaged and keep their previous value; a workflow does not even pull them.

    Raises:
        UsageError: A value is none of the choices, or a pattern is not a non-empty string.
    """

    missing: Missing = "strict"
    extra: Extra = "strict"
    dtypes: Dtypes = "strict"
    mismatch: Mismatch = "reject_site"
    nonfinite: Nonfinite = "reject_site"
    integers: Integers = "average"
    bools: Bools = "majority"
    accumulator: Accumulator = "float32"
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "exclude":
                if not isinstance(value, (tuple, list)) or not all(
                    isinstance(pattern, str) and pattern for pattern in value
                ):
                    raise UsageError(
                        "policy 'exclude'", expected="a sequence of non-empty patterns", got=value
                    )
                object.__setattr__(self, "exclude", tuple(value))
            elif value not in _CHOICES[item.name]:
                raise UsageError(
                    f"policy {item.name!r}",
                    expected=" | ".join(_CHOICES[item.name]),
                    got=value,
                )

    def excluded(self, names: tuple[str, ...]) -> frozenset[str]:
        """Return those of ``names`` that a pattern of :attr:`exclude` matches."""
        if not self.exclude:
            return frozenset()
        match = re.compile("|".join(f"(?:{translate(pattern)})" for pattern in self.exclude)).match
        return frozenset(name for name in names if match(name))
