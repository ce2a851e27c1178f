"""Landing more than there is memory: what the page cache keeps counts against a container's limit, and may be dropped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamoff.scratch.space import filesystem
from streamoff.types import MIB

from ..disks import MemoryLimit, memory_limit

LIMIT = 112 * MIB
"""Python, a pool of 32 MiB, and not much more."""
UPDATE = 160 * MIB

LAND_AND_READ = """
import os, pathlib, sys
procs, scratch, page_cache, nbytes = sys.argv[1:]
pathlib.Path(procs).write_text(str(os.getpid()))

import functools, secrets
import anyio
import xxhash
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job
from streamoff.tensors.layout import plan
from streamoff.transports.memory import MemoryNetwork
from streamoff.types import CHUNK_BYTES, Address, Slot

PATTERN = memoryview(os.urandom(CHUNK_BYTES))


class Pattern:
    blocking = False
    layout = plan([("w", "U8", (int(nbytes),))])

    def views(self, start, stop):
        found = [memoryview(self.layout.header)[start:stop]]
        at = max(start - self.layout.data_start, 0)
        while at < stop - self.layout.data_start:
            piece = PATTERN[at % CHUNK_BYTES :][: stop - self.layout.data_start - at]
            found.append(piece)
            at += len(piece)
        return tuple(view for view in found if view)

    def check(self):
        pass

    def close(self):
        pass


def read(state):
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    for start in range(0, state.layout.data_nbytes, CHUNK_BYTES):
        state.read_span(start, start + CHUNK_BYTES, buffer)
        digest.update(buffer)
    return digest.digest()


async def main():
    network = MemoryNetwork()
    async with (
        BaseEndpoint("server", transports=[network]) as server,
        BaseEndpoint("site-1", transports=[network]) as site,
    ):
        await site.connect("server")
        tx = site.publish([Pattern()], [Slot(secrets.token_bytes(16), Address("server"))])
        async with open_job("job", server, scratch=scratch, page_cache=page_cache) as job:
            terms = Terms(landing=job.landing)
            state = await job.download(tx.refs(0)[0], terms)
            got = await anyio.to_thread.run_sync(read, state)
    whole = xxhash.xxh3_128()
    for _ in range(int(nbytes) // CHUNK_BYTES):
        whole.update(PATTERN)
    assert got == whole.digest()
    assert "torch" not in sys.modules
    print((await tx.wait()).status.value)


anyio.run(main)
"""


def landed(limit: MemoryLimit, scratch: Path, page_cache: str) -> str:
    """Land an update, and read it back, in a process that lives in the cgroup; what it printed."""
    command = [sys.executable, "-c", LAND_AND_READ]
    arguments = [str(limit.procs), str(scratch), page_cache, str(UPDATE)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("page_cache", ["keep", "drop"])
def test_an_update_larger_than_the_memory_limit_lands_and_is_read(
    tmp_path: Path, page_cache: str
) -> None:
    """A job in a container smaller than one update succeeds; with its pages dropped it never even hits the limit."""
    if filesystem(tmp_path).ram_backed:
        pytest.skip("the temporary directory is in RAM, where an update is memory")
    with memory_limit(LIMIT) as limit:
        assert landed(limit, tmp_path, page_cache) == "completed"
        if page_cache == "drop":
            assert limit.hits == 0
            assert limit.peak < LIMIT
        else:  # the kernel fills what there is: were it not so, the other case would prove nothing
            assert limit.peak > LIMIT - MIB
