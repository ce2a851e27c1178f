"""How a process makes a tier; each is loaded only where it runs."""

from __future__ import annotations

from typing import Literal

from .tier import Tier

__all__ = ["machines", "shell"]


def machines() -> Tier:
    """The machine tier."""
    from .machines import Machines

    return Machines()


def shell(backend: Literal["asyncio", "trio"]) -> Tier:
    """The shell tier; it loads torch."""
    from .shell import Shell

    return Shell(backend)
