"""Federated aggregation in bounded memory: pull updates by reference, land them on disk, average lazily.

The names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamoff.payload.context import DecodeContext
    from streamoff.payload.endpoint import Delivery, Endpoint, Message
    from streamoff.payload.resolve import resolve
    from streamoff.runtime.jobs import Job, JobReport, open_job
    from streamoff.tensors.lazy import LazyStateDict, LazyTensor, open_state
    from streamoff.transports.memory import MemoryNetwork
    from streamoff.types import Address, Budgets, Outcome, Ref

__all__ = [
    "Address",
    "Budgets",
    "DecodeContext",
    "Delivery",
    "Endpoint",
    "Job",
    "JobReport",
    "LazyStateDict",
    "LazyTensor",
    "MemoryNetwork",
    "Message",
    "Outcome",
    "Ref",
    "open_job",
    "open_state",
    "resolve",
]

__version__ = "0.1.0"

_HOMES = {
    "Address": "streamoff.types",
    "Budgets": "streamoff.types",
    "DecodeContext": "streamoff.payload.context",
    "Delivery": "streamoff.payload.endpoint",
    "Endpoint": "streamoff.payload.endpoint",
    "Job": "streamoff.runtime.jobs",
    "JobReport": "streamoff.runtime.jobs",
    "LazyStateDict": "streamoff.tensors.lazy",
    "LazyTensor": "streamoff.tensors.lazy",
    "MemoryNetwork": "streamoff.transports.memory",
    "Message": "streamoff.payload.endpoint",
    "Outcome": "streamoff.types",
    "Ref": "streamoff.types",
    "open_job": "streamoff.runtime.jobs",
    "open_state": "streamoff.tensors.lazy",
    "resolve": "streamoff.payload.resolve",
}


def __getattr__(name: str) -> object:
    """Load a public name from its home at first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
