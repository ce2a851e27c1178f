"""What the tests of payload trees share: two endpoints, trees compared to the bit, bodies made by hand."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import msgpack
import numpy as np
import torch

from streamoff.payload.body import join, unpack
from streamoff.payload.context import DecodeContext
from streamoff.payload.encode import encode
from streamoff.payload.endpoint import Endpoint, Message
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import Address, Outcome, Ref
from streamoff.wire.frames import Views
from streamoff.wire.limits import DEFAULT_LIMITS, Limits

from ..tensors.helpers import same

TOPIC = "trees"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A dataclass with two fields of any kind; hashable, so that a set can hold it."""

    left: Any
    right: Any = None


@dataclasses.dataclass
class Derived:
    """A dataclass one field of which follows from the other."""

    count: int
    twice: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.count


@dataclasses.dataclass
class Picky:
    """A dataclass that does not take everything."""

    count: Any

    def __post_init__(self) -> None:
        if not isinstance(self.count, int):
            raise TypeError("count is no int")


CLASSES = (Pair, Derived, Picky)
KNOWN = {kind.__name__: kind for kind in CLASSES}


@asynccontextmanager
async def connected(
    *names: str, net: MemoryNetwork | None = None, limits: Limits = DEFAULT_LIMITS
) -> AsyncIterator[list[Endpoint]]:
    """Open ``server`` and some sites whose uplink it is; afterwards nothing is open at any of them."""
    net = net or MemoryNetwork()
    made = [
        Endpoint(name, transports=[net], dataclasses=CLASSES, limits=limits)
        for name in ("server", *names)
    ]
    async with made[0] as server, AsyncSites(made[1:]) as sites:
        for site in sites:
            await site.connect("server")
        yield [server, *sites]
        await anyio.sleep(1)  # the last acknowledgements
        for endpoint in made:
            assert_idle(endpoint)


class AsyncSites:
    """Enter endpoints in order and leave them in reverse."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints

    async def __aenter__(self) -> list[Endpoint]:
        for endpoint in self._endpoints:
            await endpoint.__aenter__()
        return self._endpoints

    async def __aexit__(self, *error: object) -> None:
        for endpoint in reversed(self._endpoints):
            await endpoint.__aexit__(*error)  # type: ignore[arg-type]


def assert_idle(endpoint: Endpoint) -> None:
    """No transaction, stream, download or unacknowledged message is left."""
    found = endpoint.statistics()
    assert (found.publisher.open, found.publisher.streams) == (0, 0), found
    assert (found.downloads.active, found.mailbox.unacked) == (0, 0), found


async def until(condition: Callable[[], object]) -> None:
    """Let others run until something is so; virtual time stands still meanwhile."""
    while not condition():
        await anyio.lowlevel.checkpoint()


async def received(
    sender: Endpoint, receiver: Endpoint, tree: Any, **how: Any
) -> tuple[Message, Any]:
    """Send a tree and take the message; returns it with its delivery."""
    with receiver.receive(TOPIC) as box:
        delivery = await sender.send(receiver.address, TOPIC, tree, **how)
        return await anext(box), delivery


async def exchanged(
    tree: Any, context: DecodeContext | None = None, **how: Any
) -> tuple[Any, Outcome]:
    """What becomes of a tree between two endpoints that know nothing but each other."""
    async with connected("site-1") as (server, site):
        message, delivery = await received(site, server, tree, **how)
        arrived = await message.decode(context)
        return arrived, await delivery.wait()


def alike(left: Any, right: Any) -> bool:  # noqa: PLR0911 - one return per type
    """Whether two trees agree in every type, key, order and bit; an OrderedDict counts as a dict."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and same(left, right)
    if isinstance(left, np.ndarray):
        return (
            type(right) is np.ndarray
            and (left.dtype.newbyteorder("="), left.shape) == (right.dtype, right.shape)
            and np.ascontiguousarray(left, right.dtype).tobytes() == right.tobytes()
        )
    if isinstance(left, np.generic):
        return type(left) is type(right) and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True) if type(right) is dict else None
        return pairs is not None and all(
            type(a) is type(b) and a == b and alike(x, y) for (a, x), (b, y) in pairs
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(alike, left, right))
    if isinstance(left, (set, frozenset)):
        return len(left) == len(right) and all(any(alike(a, b) for b in right) for a in left)
    if dataclasses.is_dataclass(left):
        names = [item.name for item in dataclasses.fields(left)]
        return all(alike(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    return bool(left == right)


def through(tree: Any, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Pack and unpack a tree without tensors."""
    encoded = encode(tree, limits)
    assert not encoded.refs
    return unpack(join([], encoded.tree, limits), KNOWN, limits)[0]


def a_ref(number: int = 0, source: str = "site-1") -> Ref:
    """A ref to nothing."""
    return Ref(Address(source), f"r{number}", bytes([number % 256]) * 16, 1000)


def body_of(tree: Any, *, partial: bool = False) -> Views:
    """Encode a tree, with refs to nothing in the place of its payloads."""
    encoded = encode(tree)
    encoded.close()
    return join([(a_ref(n), partial) for n, _ in enumerate(encoded.refs)], encoded.tree)


def kept(tree: Any) -> Any:
    """A tree as it arrives: refs in the place of tensors."""
    return unpack(body_of(tree), KNOWN)[0]


def tokens(*values: Any, refs: Iterable[Any] = (0,)) -> Views:
    """A body made by hand, token by token."""
    return (memoryview(b"".join(msgpack.packb(value) for value in (*refs, *values))),)


def tensors_of(count: int, elements: int = 3) -> Mapping[str, torch.Tensor]:
    """A state dict of ``count`` small tensors that are all different."""
    return {
        f"w{index}": torch.arange(elements, dtype=torch.float32) + 100 * index
        for index in range(count)
    }
