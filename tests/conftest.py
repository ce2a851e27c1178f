"""The backend matrix: every async test runs on asyncio (debug) and on trio, in virtual time unless marked ``real_time``.

Tests marked ``asyncio`` are left to pytest-asyncio. Nothing is imported here that the machine and wire tests do without.
"""

from inspect import iscoroutinefunction
from typing import Any

import pytest

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know pytest-asyncio's settings where it is not installed: the machine and wire tests run without it."""
    if not pluginmanager.has_plugin("asyncio"):
        parser.addini("asyncio_mode", "unused")
        parser.addini("asyncio_default_fixture_loop_scope", "unused")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> None:
    """Give every async test to anyio's plugin, unless it says that it wants asyncio only."""
    if not collector.istestfunction(obj, name):
        return
    inner = obj.hypothesis.inner_test if hasattr(obj, "hypothesis") else obj
    marks = [*getattr(obj, "pytestmark", []), *collector.iter_markers()]
    if iscoroutinefunction(inner) and not any(mark.name == "asyncio" for mark in marks):
        pytest.mark.anyio(obj)
        pytest.mark.usefixtures("anyio_backend")(obj)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Return the backend of a test and its options; a new event loop for each test.

    The parameter is a pair where a test asks for the fixture ``virtual_time`` of our own plugin.
    """
    name: str = request.param if isinstance(request.param, str) else request.param[0]
    if request.node.get_closest_marker("real_time"):
        return name, {"debug": True} if name == "asyncio" else {}
    from streamoff.testing.virtual import virtual_backend

    return virtual_backend(name)
