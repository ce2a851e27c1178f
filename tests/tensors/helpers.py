"""What the tests of this layer share: tensors of every kind, a wire without a wire, a header by hand."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from streamoff.tensors.digests import chunk_digest
from streamoff.tensors.dtypes import ITEMSIZE, torch_dtype
from streamoff.tensors.landing import Landing
from streamoff.tensors.layout import Layout, parse
from streamoff.tensors.sources import Source
from streamoff.tensors.state import State
from streamoff.tensors.views import Views

DTYPES = tuple(sorted(ITEMSIZE))


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order, bit for bit."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bit patterns: NaN payloads, subnormals and -0.0 included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == "BOOL":
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    count = torch.Size(shape).numel() * ITEMSIZE[dtype]
    bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return bits.view(torch_dtype(dtype)).reshape(shape)


def serve(source: Source, start: int, stop: int) -> Views:
    """Fetch a range as a producer does: views if there are any, else through a buffer."""
    views = source.views(start, stop)
    if views is None:
        buffer = memoryview(bytearray(stop - start))
        source.read_into(start, buffer)
        views = (buffer,)
    return views


def accept(source: Source) -> Layout:
    """Read a source's header as a receiver does."""
    header = b"".join(serve(source, 0, source.layout.data_start))
    return parse(header, size=source.layout.size)


def transfer(
    source: Source,
    landing: Landing,
    *,
    names: Iterable[str] | None = None,
    chunk: int = 4 << 20,
    seed: int | None = None,
) -> State:
    """Bring a payload over, chunk by chunk, in random order if there is a seed."""
    ranges: list[tuple[int, int]] = []
    for item in landing.open(accept(source), names):
        cuts = range(item.start, item.stop, chunk)
        ranges += [(start, min(start + chunk, item.stop)) for start in cuts]
    if seed is not None:
        random.Random(seed).shuffle(ranges)
    for start, stop in ranges:
        views = serve(source, start, stop)
        landing.write(start, views, chunk_digest(views, start))
    return landing.finish()


def assert_holds(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare every tensor of a state, bit for bit."""
    assert set(state.layout.names) == set(tensors)
    for name, tensor in tensors.items():
        assert same(state.tensor(name), tensor), name


def header_of(tree: Any, *, pad: int = 8) -> bytes:
    """Return a header made by hand."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    text += b" " * (-len(text) % pad)
    return len(text).to_bytes(8, "little") + text


def entry(dtype: str, shape: list[Any], start: Any, stop: Any) -> dict[str, Any]:
    """Return one entry of a header made by hand."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def run_script(script: str, *arguments: object, env: Mapping[str, str] | None = None) -> str:
    """Run a script in an interpreter of its own and return what it prints.

    Raises:
        AssertionError: It ended with anything but success.
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
