"""How job roots are named, and reading a name back.

====================================================  ============================================
name                                                  what it is
====================================================  ============================================
``.new-streamoff_tensor_offload_<job>_<random>``      being made; renamed once its lease is held
``streamoff_tensor_offload_<job>_<random>``           a job root
``.gone-streamoff_tensor_offload_<job>_<random>``     buried: anybody may remove it
====================================================  ============================================
"""

import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from streamoff.errors import UsageError

__all__ = ["LEASE", "LEASE_PART", "MAX_JOB", "RootName", "Stage", "check_job"]

LEASE: Final = ".lease"
LEASE_PART: Final = ".lease.part"
"""The lease before it is locked and whole."""

MAX_JOB: Final = 255
"""Characters of a job id."""

_STEM: Final = "streamoff_tensor_offload"
_SLUG: Final = 48
_NAME: Final = re.compile(
    rf"(?P<stage>\.new-|\.gone-|){_STEM}"
    rf"_(?P<slug>[A-Za-z0-9_-]{{1,{_SLUG}}})_(?P<token>[0-9a-f]{{16}})"
)


class Stage(StrEnum):
    """What the prefix of a name says about the root."""

    NEW = ".new-"
    PLACED = ""
    GONE = ".gone-"


def check_job(job: str) -> str:
    """Validate a job id where it enters.

    Args:
        job: 1 to 255 printable characters; anything else about it is free, the name on disk is
            sanitised.

    Returns:
        The job id, unchanged.

    Raises:
        UsageError: It is no such string.
    """
    if not 1 <= len(job) <= MAX_JOB or not job.isprintable():
        raise UsageError(
            "not a job id", expected=f"1 to {MAX_JOB} printable characters", got=repr(job)
        )
    return job


@dataclass(frozen=True, slots=True)
class RootName:
    """The name of a job root, taken apart.

    Args:
        stage: Being made, in place or buried.
        slug: The job id with everything but letters, digits, ``-`` and ``_`` replaced, at most 48
            characters.
        token: 16 random hexadecimal digits.
    """

    stage: Stage
    slug: str
    token: str

    @classmethod
    def fresh(cls, job: str) -> Self:
        """A new random name for a root of ``job`` that is being made."""
        slug = re.sub(r"[^A-Za-z0-9_-]", "-", check_job(job))[:_SLUG]
        return cls(Stage.NEW, slug, secrets.token_hex(8))

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Take a directory name apart; None if it is not one of ours."""
        match = _NAME.fullmatch(name)
        return match and cls(Stage(match["stage"]), match["slug"], match["token"])

    def at(self, stage: Stage) -> Self:
        """The same root at another stage."""
        return type(self)(stage, self.slug, self.token)

    def __str__(self) -> str:
        return f"{self.stage}{_STEM}_{self.slug}_{self.token}"
