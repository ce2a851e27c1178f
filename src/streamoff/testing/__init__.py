"""What streamoff's own tests use, for the tests of those who embed it.

Everything here is imported when it is first used: the pytest plugin lives in this package and loads with every run of
pytest in an environment that has streamoff.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamoff.testing.faults import Cut, FaultPlan, Kill, LinkFaults, Partition, Slow
    from streamoff.testing.leaks import LeakCheck
    from streamoff.testing.machines import Faults, MachinePair
    from streamoff.testing.network import FaultyNetwork
    from streamoff.testing.virtual import VirtualLoop, VirtualTime, run_virtual, virtual_backend
    from streamoff.transports.memory import Conditions, MemoryNetwork

_HOMES = {
    "Conditions": "streamoff.transports.memory",
    "Cut": "streamoff.testing.faults",
    "FaultPlan": "streamoff.testing.faults",
    "Faults": "streamoff.testing.machines",
    "FaultyNetwork": "streamoff.testing.network",
    "Kill": "streamoff.testing.faults",
    "LeakCheck": "streamoff.testing.leaks",
    "LinkFaults": "streamoff.testing.faults",
    "MachinePair": "streamoff.testing.machines",
    "MemoryNetwork": "streamoff.transports.memory",
    "Partition": "streamoff.testing.faults",
    "Slow": "streamoff.testing.faults",
    "VirtualLoop": "streamoff.testing.virtual",
    "VirtualTime": "streamoff.testing.virtual",
    "run_virtual": "streamoff.testing.virtual",
    "virtual_backend": "streamoff.testing.virtual",
}

__all__ = [
    "Conditions",
    "Cut",
    "FaultPlan",
    "Faults",
    "FaultyNetwork",
    "Kill",
    "LeakCheck",
    "LinkFaults",
    "MachinePair",
    "MemoryNetwork",
    "Partition",
    "Slow",
    "VirtualLoop",
    "VirtualTime",
    "run_virtual",
    "virtual_backend",
]


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
