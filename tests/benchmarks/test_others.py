"""What else the machine did while a suite ran."""

import json
import subprocess
import sys

import pytest

from benchmarks.others import STAT, Others

BURN = """
import sys, time
while time.process_time() < 0.5:
    pass
print(flush=True)
sys.stdin.read()
"""


def test_a_stranger_at_work_is_noticed():
    """CPU time of a process that is not one of ours that ended is told, in the text and in the JSON."""
    if not STAT.exists():
        pytest.skip(f"there is no {STAT}")
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as stranger:
        with Others() as others:
            assert stranger.stdout is not None
            stranger.stdout.readline()  # it has not ended, and counts as a stranger
        stranger.communicate()
    told = json.loads(json.dumps(others.to_json()))
    assert told["other_cpu_seconds"] >= 0.3  # it had begun before, and ticks are coarse
    assert "other programs used" in others.to_text()
