"""What a simulation costs."""

import mmap
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from streamoff.scratch.names import RootName, Stage
from streamoff.sim.memory import MemorySampler, ScratchSampler, resident_bytes

MIB = 1024 * 1024


def _fresh(nbytes: int) -> mmap.mmap:
    """Memory from the kernel: an allocator may have some left of what earlier tests have freed."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = b"x" * (nbytes // mmap.PAGESIZE)
    return block


def test_resident_memory_is_that_of_the_process_alone() -> None:
    """Linux reports anonymous memory, and it is what an allocation adds to."""
    field, before = resident_bytes()
    assert field == "RssAnon"
    with _fresh(32 * MIB):
        assert resident_bytes()[1] - before > 30 * MIB


def test_a_peak_between_two_looks_at_the_statistics_is_seen() -> None:
    """The thread samples while the program works: a peak that is gone again is in the statistics."""
    with MemorySampler(interval=0.001) as sampler:
        before = sampler.statistics()
        with _fresh(64 * MIB):
            _until(lambda: sampler.statistics().peak_delta_bytes > 60 * MIB)
    after = sampler.statistics()
    assert after.baseline_bytes == before.baseline_bytes > 0
    assert after.peak_delta_bytes > 60 * MIB
    assert sampler.field == "RssAnon"


def test_the_sampler_leaves_no_thread() -> None:
    """After its block the sampler's thread is gone, also when the block failed."""
    with pytest.raises(KeyError), MemorySampler():
        raise KeyError
    assert not [thread for thread in threading.enumerate() if "sampler" in thread.name]


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    """Pages of a mapped file are the kernel's to take back: reading them is no growth."""
    path = tmp_path / "mapped"
    path.write_bytes(bytes(32 * MIB))
    script = """
        import mmap, sys
        from streamoff.sim.memory import MemorySampler
        with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            with MemorySampler() as sampler:
                total = sum(view[::4096])
            print(sampler.statistics().peak_delta_bytes)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(ended.stdout) < 4 * MIB


def test_warming_torch_draws_no_random_number() -> None:
    """The baseline contains torch, and the global generator is as it was."""
    import torch

    from streamoff.sim.memory import warm_torch

    before, threads = torch.get_rng_state(), torch.get_num_threads()
    warm_torch()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_scratch_is_counted_while_it_is_there(tmp_path: Path) -> None:
    """The peak is the disk space of the job's roots, at whatever stage; other files are not counted."""
    (tmp_path / "foreign").write_bytes(b"x" * MIB)
    (tmp_path / str(RootName.fresh("other").at(Stage.PLACED))).mkdir()
    with ScratchSampler(tmp_path, "job 1", interval=0.001) as sampler:
        assert sampler.statistics().left_entries == 0
        name = RootName.fresh("job 1")
        placed, gone = (tmp_path / str(name.at(stage)) for stage in (Stage.PLACED, Stage.GONE))
        (placed / "transfer").mkdir(parents=True)
        (placed / "transfer" / "payload").write_bytes(b"x" * (2 * MIB))
        (placed / "link").symlink_to("/")
        _until(lambda: sampler._peak >= 2 * MIB)
        placed.rename(gone)
        now = sampler.statistics()
        assert now.left_entries == 4
        assert 2 * MIB <= now.left_bytes <= 3 * MIB
        (gone / "transfer" / "payload").unlink()
        (gone / "link").unlink()
        (gone / "transfer").rmdir()
        gone.rmdir()
    end = sampler.statistics()
    assert (end.left_bytes, end.left_entries) == (0, 0)
    assert 2 * MIB <= end.peak_bytes <= 3 * MIB


def test_a_root_that_vanishes_under_the_sampler_is_no_error(tmp_path: Path) -> None:
    """Roots come and go while the sampler looks, and it goes on."""
    with ScratchSampler(tmp_path, "job", interval=0.0001) as sampler:
        for _ in range(200):
            root = tmp_path / str(RootName.fresh("job").at(Stage.PLACED))
            root.mkdir()
            (root / "file").write_bytes(b"x")
            (root / "file").unlink()
            root.rmdir()
        assert sampler._periodic._thread.is_alive()
    assert sampler.statistics().left_entries == 0


def _until(condition: Callable[[], bool]) -> None:
    """Wait for a thread of ours to see something that stays true; the suite's own limit ends it."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


def test_large_blocks_go_back_to_the_system_when_they_are_freed():
    """After the call, freeing a large block does not make the allocator keep the next ones."""
    script = (
        "from streamoff.sim.memory import keep_large_blocks_mapped, resident_bytes\n"
        "keep_large_blocks_mapped()\n"
        "bytearray(8 << 20)\n"
        "before = resident_bytes()[1]\n"
        "for _ in range(20):\n"
        "    blocks = [b'x' * (300 << 10) for _ in range(40)]\n"
        "    del blocks\n"
        "print(resident_bytes()[1] - before)\n"
    )
    grown = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert int(grown) < 2 << 20
