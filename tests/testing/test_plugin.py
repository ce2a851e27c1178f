"""The pytest plugin in projects of its users; each runs in a process of its own."""

import subprocess
import sys

import pytest

ANYIO_CONFIG = "[pytest]\nfilterwarnings = error\n"
ASYNCIO_CONFIG = (
    "[pytest]\nasyncio_mode = strict\nasyncio_default_fixture_loop_scope = function\n"
    "filterwarnings = error\n"
)


@pytest.fixture
def project(pytester, monkeypatch):
    """Write a project of one test module and run it; returns the result."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(config: str, test: str, conftest: str = "") -> pytest.RunResult:
        pytester.makeini(config)
        pytester.makeconftest(conftest)
        pytester.makepyfile(test_it=test)
        args = [] if "asyncio_mode" in config else ["-p", "no:asyncio"]
        result: pytest.RunResult = pytester.runpytest_subprocess("-v", *args)
        return result

    return run


def test_anyio_users_get_virtual_time_on_both_backends(project):
    """With anyio's own backend matrix, asking for the fixture is all it takes."""
    result = project(
        ANYIO_CONFIG,
        """
        import anyio, pytest
        pytestmark = pytest.mark.anyio

        async def test_waits(virtual_time):
            await anyio.sleep(3600)
            assert virtual_time.now == 3600

        async def test_starts_again(virtual_time):
            with anyio.move_on_after(2.5):
                await anyio.sleep(10)
            assert virtual_time.now == 2.5
        """,
    )
    result.assert_outcomes(passed=4)


def test_the_other_tests_of_a_module_keep_real_time(project):
    """Tests beside it that do not ask for virtual time run as they always did."""
    result = project(
        ANYIO_CONFIG,
        """
        import asyncio, anyio, pytest, trio
        from streamoff.testing import VirtualLoop
        from streamoff.testing.virtual_trio import VirtualClock
        pytestmark = pytest.mark.anyio

        def is_virtual(backend):
            if backend == "asyncio":
                return isinstance(asyncio.get_running_loop(), VirtualLoop)
            return isinstance(trio.lowlevel.current_clock(), VirtualClock)

        async def test_before(anyio_backend_name):
            assert not is_virtual(anyio_backend_name)

        async def test_virtual(anyio_backend_name, virtual_time):
            assert is_virtual(anyio_backend_name)

        async def test_after(anyio_backend_name):
            assert not is_virtual(anyio_backend_name)
        """,
    )
    result.assert_outcomes(passed=6)


def test_anyio_fixtures_share_the_virtual_clock(project):
    """Async fixtures of such a test run in the same virtual time, function- and module-wide."""
    result = project(
        ANYIO_CONFIG,
        """
        import anyio, pytest
        pytestmark = pytest.mark.anyio

        @pytest.fixture(scope="module")
        async def slow(anyio_backend):
            await anyio.sleep(100)
            yield anyio.current_time()
            await anyio.sleep(100)

        @pytest.fixture
        async def slower(slow):
            await anyio.sleep(1000)
            yield slow + 1000
            await anyio.sleep(1000)

        async def test_time(slower, virtual_time):
            assert slower == virtual_time.now == 1100
        """,
    )
    result.assert_outcomes(passed=2)


def test_anyio_users_may_choose_their_backends(project):
    """A backend fixture of the project's own is respected, with its options."""
    result = project(
        ANYIO_CONFIG,
        """
        import asyncio, anyio, pytest

        @pytest.mark.anyio
        async def test_it(virtual_time, anyio_backend_name):
            assert anyio_backend_name == "asyncio"
            assert not asyncio.get_running_loop().get_debug()
            await anyio.sleep(600)
            assert virtual_time.now == 600
        """,
        """
        import pytest

        @pytest.fixture(params=[("asyncio", {"debug": False})], ids=["plain"])
        def anyio_backend(request):
            return request.param
        """,
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_it?plain?*PASSED*"])


def test_a_backend_without_parameters_is_told_what_to_do(project):
    """A backend that cannot be replaced makes an error that says how to put it right, and that helps."""
    test = """
        import anyio, pytest

        @pytest.mark.anyio
        async def test_it(virtual_time):
            await anyio.sleep(600)
            assert virtual_time.now == 600
        """
    conftest = """
        import pytest
        from streamoff.testing import virtual_backend

        @pytest.fixture
        def anyio_backend():
            return BACKEND
        """
    result = project(ANYIO_CONFIG, test, conftest.replace("BACKEND", "'trio'"))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*streamoff.testing.virtual_backend*"])
    result = project(ANYIO_CONFIG, test, conftest.replace("BACKEND", "virtual_backend('trio')"))
    result.assert_outcomes(passed=1)


def test_anyio_auto_mode(project):
    """Tests that anyio's plugin collects by itself get virtual time as well."""
    result = project(
        ANYIO_CONFIG + "anyio_mode = auto\n",
        """
        import anyio

        async def test_it(virtual_time):
            await anyio.sleep(600)
            assert virtual_time.now == 600
        """,
    )
    result.assert_outcomes(passed=2)


def test_pytest_asyncio_users_get_virtual_time(project):
    """In strict mode, with fixtures, and without a change to the names of tests or to the loops of others."""
    result = project(
        ASYNCIO_CONFIG,
        """
        import asyncio, pytest, pytest_asyncio
        from streamoff.testing import VirtualLoop

        @pytest_asyncio.fixture
        async def slow():
            await asyncio.sleep(0.001)
            before = asyncio.get_running_loop().time()
            yield before
            await asyncio.sleep(0.001)

        @pytest.mark.asyncio
        async def test_before(slow):
            assert not isinstance(asyncio.get_running_loop(), VirtualLoop)

        @pytest.mark.asyncio
        async def test_virtual(slow, virtual_time):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(600):
                    await asyncio.Event().wait()
            assert virtual_time.now == slow + 600

        @pytest.mark.asyncio
        async def test_threads(virtual_time):
            import time
            late = asyncio.create_task(asyncio.sleep(600))
            await asyncio.to_thread(time.sleep, 0.05)
            assert not late.done()
            await late

        @pytest.mark.asyncio
        async def test_after(slow):
            assert not isinstance(asyncio.get_running_loop(), VirtualLoop)
        """,
    )
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*::test_virtual PASSED*"])


def test_virtual_time_is_refused_where_it_means_nothing(project):
    """A test that is not async is told so."""
    result = project(ANYIO_CONFIG, "def test_it(virtual_time):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*virtual_time is for async tests*"])


def test_a_leaked_task_fails_an_anyio_test(project):
    """On both backends, a test that leaves a task is failed and the task named."""
    result = project(
        ANYIO_CONFIG,
        """
        import asyncio, anyio, pytest
        pytestmark = pytest.mark.anyio

        async def straggler():
            await anyio.sleep_forever()

        async def test_leaves(no_leaks, anyio_backend_name):
            if anyio_backend_name == "trio":
                import trio
                trio.lowlevel.spawn_system_task(straggler)
            else:
                kept.append(asyncio.create_task(straggler()))

        kept = []

        async def test_leaves_nothing(no_leaks):
            async with anyio.create_task_group() as group:
                group.start_soon(straggler)
                group.cancel_scope.cancel()
        """,
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*left tasks running*", "*straggler*"])


def test_a_leaked_task_fails_a_pytest_asyncio_test(project):
    """In strict mode, a test that leaves a task is failed and the task named."""
    result = project(
        ASYNCIO_CONFIG,
        """
        import asyncio, pytest

        async def straggler():
            await asyncio.Event().wait()

        @pytest.mark.asyncio
        async def test_leaves(no_leaks, virtual_time):
            kept.append(asyncio.create_task(straggler()))

        kept = []

        @pytest.mark.asyncio
        async def test_leaves_nothing(no_leaks):
            await asyncio.to_thread(int)
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*left tasks running*", "*straggler*"])


def test_what_a_plain_test_leaves_is_named(project):
    """A thread and a descriptor make an error after the test that left them, and only after that one."""
    result = project(
        ANYIO_CONFIG,
        """
        import os, threading

        leave = threading.Event()

        def test_clean(no_leaks):
            assert no_leaks.leaks() == []

        def test_leaves(no_leaks):
            threading.Thread(target=leave.wait, name="lingerer", daemon=True).start()
            os.open("/dev/zero", os.O_RDONLY)

        def test_after(no_leaks):
            pass
        """,
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*thread: lingerer*", "*descriptor: * -> /dev/zero*"])


def test_methods_and_parameters_are_checked_too(project):
    """The leak fixture works in classes and with parametrised tests."""
    result = project(
        ANYIO_CONFIG,
        """
        import asyncio, anyio, pytest

        class TestIt:
            @pytest.mark.anyio
            @pytest.mark.parametrize("number", [1, 2])
            async def test_it(self, no_leaks, number, virtual_time):
                await anyio.sleep(number)
                assert virtual_time.now == number
        """,
    )
    result.assert_outcomes(passed=4)


def imported_by(statement: str, after: str = "pass") -> set[str]:
    """Return the modules that a statement loads in a new interpreter, beyond what another one has loaded."""
    code = (
        f"import sys; {after}; old = set(sys.modules); {statement}; print(*{{*sys.modules}} - old)"
    )
    run = [sys.executable, "-c", code]
    return set(subprocess.run(run, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("module", ["streamoff.testing", "streamoff.testing.plugin"])
def test_importing_the_plugin_is_light(module):
    """Neither torch nor an event loop library is imported before a fixture is used."""
    loaded = imported_by(f"import {module}", after="import pytest")
    assert module in loaded
    assert loaded.isdisjoint({"torch", "anyio", "trio", "asyncio", "numpy", "safetensors"})


def test_a_run_that_uses_no_fixture_stays_light(project):
    """A pytest run without any of the fixtures imports neither torch nor the clocks and checks behind them."""
    result = project(
        ANYIO_CONFIG,
        """
        import sys

        def test_it():
            assert "streamoff.testing.plugin" in sys.modules
            unused = {"torch", "numpy", "streamoff.testing.virtual", "streamoff.testing.leaks"}
            assert unused.isdisjoint(sys.modules)
        """,
    )
    result.assert_outcomes(passed=1)


def test_unknown_names_are_attribute_errors():
    """The package says which name it does not have."""
    import streamoff.testing

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = streamoff.testing.nonsense
