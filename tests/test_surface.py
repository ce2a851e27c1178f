"""The public surface, and the layers under it: names and signatures are pinned, imports point downward."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamoff

PACKAGE = Path(streamoff.__file__).parent

LAYERS = {
    "errors": 0,
    "types": 0,
    "activity": 0,
    "machines": 1,
    "wire": 1,
    "tensors": 1,
    "scratch": 1,
    "runtime": 2,
    "transports": 2,
    "payload": 3,
    "fl": 4,
    "sim": 5,
    "testing": 5,
    "integrations": 5,
    "cli": 6,
}
"""Layer of each room; one may import those of lower layers, and inside its own room."""

NEIGHBOURS = {("transports", "runtime")}
"""Rooms of one layer of which one may see the other: transports make the links that the runtime defines."""

LATE = {
    ("streamoff.sim.tasks", "streamoff.sim.checkpoint"),
    ("streamoff.sim.tasks", "streamoff.sim.digits"),
    ("streamoff.testing.virtual", "streamoff.testing.virtual_trio"),
}
"""Imports inside functions that close a cycle: a registry loads the one that was asked for, when it is."""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """What a module imports, dotted: at the top, in functions, and for types only."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def room(module: str) -> str:
    """The folder, or the module, right below the package."""
    return module.split(".")[1]


def test_every_room_has_a_layer() -> None:
    """A new folder or top-level module says on which layer it is."""
    rooms = {room(name) for name in MODULES if "." in name} - {"__main__"}
    assert rooms <= LAYERS.keys()


@pytest.mark.parametrize("name", [name for name in MODULES if "." in name and room(name) in LAYERS])
def test_imports_point_downward(name: str) -> None:
    """A module imports lower layers and its own room; nothing above, nothing beside, not for types either."""
    mine = LAYERS[room(name)]
    for target in imports(name):
        if not target.startswith("streamoff.") or room(target) == room(name):
            continue
        below = LAYERS[room(target)] < mine or (mine == 0 == LAYERS[room(target)])
        beside = (room(name), room(target)) in NEIGHBOURS
        assert below or beside, f"{name} imports {target}"


def test_there_are_no_cycles() -> None:
    """No module imports itself by way of others, not even under TYPE_CHECKING or inside functions."""
    graph = {
        name: {
            target
            for target in imports(name)
            if target in MODULES and target != name and (name, target) not in LATE
        }
        for name in MODULES
        if name != "streamoff"
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done or name not in graph:
            return
        for target in graph[name]:
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_the_core_is_free_of_torch_and_event_loops() -> None:
    """Machines and wire import the standard library, each their own, msgpack and nothing else."""
    allowed = {"streamoff", "msgpack", "xxhash"} | set(sys.stdlib_module_names)
    for name in MODULES:
        if name.startswith(
            ("streamoff.machines", "streamoff.wire", "streamoff.errors", "streamoff.types")
        ):
            foreign = {target.split(".")[0] for target in imports(name)} - allowed
            assert not foreign, f"{name} imports {foreign}"
            assert not {"asyncio", "threading", "time"} & set(imports(name)), name


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("streamoff.scratch")])
def test_scratch_needs_no_event_loop(name: str) -> None:
    """What reclaims the disk works in any thread, and in a process that never starts a loop."""
    assert not {"torch", "anyio", "trio", "asyncio"} & {one.split(".")[0] for one in imports(name)}


@pytest.mark.parametrize("statement", ["import streamoff", "import streamoff; dir(streamoff)"])
def test_importing_costs_nothing(statement: str) -> None:
    """``import streamoff`` imports neither torch nor NumPy nor an event loop, nor anything else of ours."""
    script = (
        f"import sys; {statement}; heavy = {{'torch', 'numpy', 'anyio', 'trio', 'asyncio', 'msgpack'}};"
        "print(sorted(heavy & set(sys.modules)),"
        "sorted(m for m in sys.modules if m.startswith('streamoff.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] []"


def test_public_names_are_sorted_and_there() -> None:
    """Every public name resolves, is the object its home defines, and stands in order."""
    assert list(streamoff.__all__) == sorted(streamoff.__all__)
    assert set(streamoff.__all__) <= set(dir(streamoff))
    for name in streamoff.__all__:
        found = getattr(streamoff, name)
        assert getattr(sys.modules[found.__module__], name) is found
        assert found.__doc__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        streamoff.nonsense  # noqa: B018 - the access is the test


SIGNATURES = """
Address(text: str) -> Self
Budgets(*, acquire: float = 120.0, idle: float = 150.0, stall: float = 20.0, backoff: tuple[float, ...] = (2.0, 4.0, 8.0), hold: float = 600.0, reconnect_grace: float = 30.0, settle: float = 60.0, confirm: float = 5.0, deadline: float | None = None) -> None
DecodeContext(*, tensors: Destination = 'memory', job: Job | None = None, endpoint: BaseEndpoint | None = None, budgets: Budgets | None = None, check_finite: bool = False, accept: Callable[[Layout], Any] | None = None, progress: Progress | None = None) -> None
Delivery.cancel(self, reason: str = '') -> None
Delivery.outcome
Delivery.wait(self) -> Outcome
Endpoint(address: str, *, transports: Iterable[Transport] = (), limits: Limits = DEFAULT_LIMITS, budgets: Budgets | None = None, dataclasses: Iterable[type] = (), capabilities: Iterable[Capability] = (CANCEL, NOTICE), close_timeout: float = 5.0, seed: int | None = None) -> None
Endpoint.connect(self, to: str) -> None
Endpoint.download(self, ref: Ref, context: DecodeContext | None = None, *, only: Iterable[str] | None = None) -> State
Endpoint.receive(self, topic: str) -> Messages
Endpoint.send(self, to: str | Iterable[str], topic: str, tree: Any, *, receivers: Iterable[str | None] | None = None, pass_through: bool = False, min_receivers: int | None = None, budgets: Budgets | None = None, on_settled: tuple[OutcomeCallback, ...] = (), snapshot: Job | None = None) -> Delivery
Job.finalise(self) -> None
Job.report
Job.start(self, fn: Callable[[Unpack[Ts]], Awaitable[object]], *args: *Ts, name: str | None = None) -> Consumer
LazyStateDict.path
LazyStateDict.release(self) -> None
LazyTensor.blocks(self, max_bytes: int) -> Iterator[torch.Tensor]
LazyTensor.dtype
LazyTensor.load(self, device: torch.device | str | None = None) -> torch.Tensor
LazyTensor.materialize(self, device: torch.device | str | None = None) -> torch.Tensor
LazyTensor.nbytes
LazyTensor.read_into(self, buffer: memoryview, start: int = 0) -> None
LazyTensor.shape
Message.decline(self, reason: str) -> None
Message.decode(self, context: DecodeContext | None = None, *, only: Only | None = None) -> Any
Message.nonfinite
Message.pass_through
Message.resolve(self, context: DecodeContext, *, only: Only | None = None) -> Any
Message.sender
Message.topic
Outcome(status: OutcomeStatus, reason: str, slots: Mapping[str, Mapping[RefId, SlotVerdict]], min_receivers: int | None = None, settled_at: float = 0.0) -> None
Outcome.quorum
Outcome.succeeded
Ref(source: Address, id: RefId, ticket: bytes, size: int) -> None
open_job(name: str, endpoint: BaseEndpoint, *, drain_window: float = 5.0, scratch: Path | str | None = None, quota: int | None = None, space_wait: float = 30.0, ram_backed: RamBacked = 'warn', durable: bool = False, page_cache: PageCache = 'keep') -> None
open_state(path: Path | str, *, limits: HeaderLimits = DEFAULT_LIMITS, storage: Storage = Storage(durable=False, page_cache=keep, public=False)) -> LazyStateDict
resolve(tree: Any, context: DecodeContext, *, only: Only | None = None) -> Any
"""
"""What users call; a change here is a change for them. Defaults that are objects are written by name."""


def signature_of(name: str) -> str:
    """One public name, or an attribute of one, as it is written above."""
    found = getattr(streamoff, name.partition(".")[0])
    for part in name.split(".")[1:]:
        found = inspect.getattr_static(found, part)
    if isinstance(found, property) or not callable(found):
        return name
    shown = inspect.signature(found)
    parameters = [
        one.replace(default=_Named(one.default)) if one.default is not one.empty else one
        for one in shown.parameters.values()
    ]
    return f"{name}{shown.replace(parameters=parameters)}".replace("'", "").replace('"', "")


class _Named:
    """A default value as a reader writes it."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        if type(self.value).__name__ in {"Limits", "HeaderLimits"}:
            return "DEFAULT_LIMITS"
        if isinstance(self.value, tuple):
            return f"({', '.join(str(getattr(item, 'name', item)) for item in self.value)})"
        return repr(self.value)


@pytest.mark.parametrize("line", SIGNATURES.split("\n")[1:-1], ids=lambda line: line.split("(")[0])
def test_signatures_are_pinned(line: str) -> None:
    """A public call takes and gives what it did."""
    assert signature_of(line.partition("(")[0]) == line.replace("'", "")


def test_every_public_name_is_pinned() -> None:
    """A name that becomes public, or leaves, is noticed here."""
    pinned = {line.split("(")[0].split(".")[0] for line in SIGNATURES.split("\n")[1:-1]}
    others = {
        "Delivery",
        "Job",
        "JobReport",
        "LazyStateDict",
        "LazyTensor",
        "MemoryNetwork",
        "Message",
    }
    assert pinned | others == set(streamoff.__all__)


async def test_coroutines_are_coroutines() -> None:
    """What waits is awaited and what does not wait is not."""
    from streamoff import Delivery, Endpoint, Job, LazyTensor, Message, resolve

    waiting = [Endpoint.send, Endpoint.connect, Endpoint.download, Message.decode, Message.resolve]
    waiting += [Delivery.wait, LazyTensor.load, resolve]
    assert all(map(inspect.iscoroutinefunction, waiting))
    at_once = [Endpoint.receive, Message.decline, Delivery.cancel, Job.start, Job.finalise]
    assert not any(map(inspect.iscoroutinefunction, at_once))
