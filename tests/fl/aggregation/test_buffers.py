"""Memory of blocks: zeroed, aligned, and gone when nobody looks at it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from streamoff.fl.aggregation.buffers import reserve, reserve_all
from streamoff.types import MIB


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5 * MIB + 3])
def test_a_reservation_is_zeroed_writable_and_of_its_size(nbytes: int) -> None:
    """It is what it says, and may be nothing at all."""
    memory = reserve(nbytes)
    assert memory.shape == (nbytes,)
    assert not memory.any()
    memory[:] = 7
    assert int(memory.sum()) == 7 * nbytes


def test_pieces_are_aligned_and_apart() -> None:
    """Pieces of one reservation hold any dtype and do not overlap."""
    pieces = reserve_all([3, 0, 64, 65, 8])
    assert [len(piece) for piece in pieces] == [3, 0, 64, 65, 8]
    for number, piece in enumerate(pieces):
        assert piece.ctypes.data % 64 == 0
        piece[:] = number
    assert [set(piece.tolist()) for piece in pieces] == [{0}, set(), {2}, {3}, {4}]
    assert reserve_all([]) == []


def test_no_room_is_a_memory_error() -> None:
    """A reservation beyond the address space fails as any allocation does."""
    with pytest.raises(MemoryError, match="cannot reserve"):
        reserve(2**62)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_goes_back_to_the_system_from_every_thread() -> None:
    """Blocks used and dropped in thread after thread leave the process as large as it was."""
    script = """
import threading
from streamoff.fl.aggregation.buffers import reserve
from streamoff.sim.memory import resident_bytes

def use():
    for _ in range(4):
        reserve(4 << 20)[:] = 1

use()
before = resident_bytes()[1]
for _ in range(8):
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
print((resident_bytes()[1] - before) >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 4
