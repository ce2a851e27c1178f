"""What a killed process left in the scratch directory goes when the next job opens there."""

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job

OWNER = """
import sys, anyio
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import open_job

async def main():
    async with BaseEndpoint("owner") as endpoint, open_job("dead", endpoint, scratch=sys.argv[1]) as job:
        (job.path / "landed").write_bytes(bytes(100_000))
        print("up", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


def listed(path: Path) -> list[str]:
    """Names in a directory."""
    return [item.name for item in path.iterdir()]


@pytest.mark.real_time
async def test_the_next_job_reclaims_what_a_killed_owner_left(tmp_path: Path):
    """A root whose owner was killed is removed while a live one beside it stays."""
    with subprocess.Popen(  # noqa: ASYNC220 - the child must run beside this
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        owner.kill()
    assert len(listed(tmp_path)) == 1
    async with (
        BaseEndpoint("next") as endpoint,
        open_job("live", endpoint, scratch=tmp_path) as job,
    ):
        with anyio.fail_after(30):
            while listed(tmp_path) != [job.path.name]:  # noqa: ASYNC110 - another thread removes it
                await anyio.sleep(0.01)
    assert listed(tmp_path) == []
