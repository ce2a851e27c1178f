"""What streamoff's own tests use, for the tests of those who embed it.

Everything here is imported when it is first used: the pytest plugin lives in this package and loads with every run of
pytest in an environment that has streamoff.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamoff.testing.leaks import LeakCheck
    from streamoff.testing.virtual import VirtualLoop, VirtualTime, run_virtual, virtual_backend

_HOMES = {
    "LeakCheck": "leaks",
    "VirtualLoop": "virtual",
    "VirtualTime": "virtual",
    "run_virtual": "virtual",
    "virtual_backend": "virtual",
}

__all__ = ["LeakCheck", "VirtualLoop", "VirtualTime", "run_virtual", "virtual_backend"]


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
