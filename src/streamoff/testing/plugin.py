"""The pytest plugin: the fixtures ``virtual_time`` and ``no_leaks``, for users of anyio's plugin and of pytest-asyncio.

It loads with every pytest run of an environment that has streamoff, so it imports neither anyio nor torch nor any other part
of streamoff until a test asks for one of its fixtures.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from streamoff.testing.leaks import LeakCheck
    from streamoff.testing.virtual import VirtualLoop, VirtualTime

__all__ = ["no_leaks", "virtual_time"]

_FIXTURE = "virtual_time"


@pytest.fixture
def virtual_time(request: pytest.FixtureRequest) -> "VirtualTime":
    """Run this async test in virtual time; the value shows the clock.

    Works with anyio's plugin on both backends and with pytest-asyncio. See
    `streamoff.testing.virtual` for what the clock waits for and what it cannot know.
    """
    from streamoff.errors import UsageError  # noqa: PLC0415
    from streamoff.testing.virtual import VirtualTime, is_virtual  # noqa: PLC0415

    if "anyio_backend" in request.fixturenames:
        if not is_virtual(request.getfixturevalue("anyio_backend")):
            raise UsageError(
                "anyio_backend is a fixture without parameters, so its value cannot be replaced",
                hint="Let it return streamoff.testing.virtual_backend('asyncio') or ('trio')",
            )
    elif request.node.get_closest_marker("asyncio") is None:
        raise UsageError("virtual_time is for async tests", got=request.node.name)
    elif not hasattr(request.config.hook, "pytest_asyncio_loop_factories"):
        raise UsageError("virtual_time needs pytest-asyncio 1.4 or newer")
    return VirtualTime()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator["LeakCheck"]:
    """Fail this test if it leaves a task, thread, descriptor, mapping or scratch directory, and name what it left.

    Name it before the fixtures that open things, so that it looks after they have closed them. The tasks of
    an async test are looked at when its body ends, for hypothesis tests not at all.
    """
    from streamoff.testing.leaks import LeakCheck, leaving_no_tasks  # noqa: PLC0415

    if iscoroutinefunction(request.node.obj):
        request.node.obj = leaving_no_tasks(request.node.obj)
    check = LeakCheck()
    yield check
    if leaks := check.settle():
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


class _VirtualFactory:
    """Tells pytest-asyncio which event loop to use, while a test in virtual time is being collected."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_asyncio_loop_factories(self) -> Mapping[str, "Callable[[], VirtualLoop]"]:
        from streamoff.testing.virtual import VirtualLoop  # noqa: PLC0415

        return {"virtual": VirtualLoop}


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Choose the loop of a pytest-asyncio test in virtual time, and of no other test."""
    if _FIXTURE not in metafunc.fixturenames:
        return (yield)
    factory = _VirtualFactory()
    metafunc.config.pluginmanager.register(factory)
    try:
        return (yield)
    finally:
        metafunc.config.pluginmanager.unregister(factory)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Put the backends of anyio's tests that ask for it in virtual time; last, since anyio adds tests here."""
    replaced: dict[str, Any] = {}
    for item in session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if _FIXTURE in getattr(item, "fixturenames", ()) and "anyio_backend" in params:
            backend = params["anyio_backend"]
            # one object for equal backends: fixtures of a wider scope are kept as long as the parameter stays
            params["anyio_backend"] = replaced.setdefault(repr(backend), _in_virtual_time(backend))


def _in_virtual_time(backend: str | tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    from streamoff.testing.virtual import is_virtual, virtual_backend  # noqa: PLC0415

    name, options = (backend, {}) if isinstance(backend, str) else backend
    if is_virtual(backend):
        return name, options
    kept = {key: value for key, value in options.items() if key != "use_uvloop"}
    return name, kept | virtual_backend(name, debug=options.get("debug", True))[1]
