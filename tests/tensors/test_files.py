"""System calls are continued when short, and their failures explained."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from streamoff.errors import LandingError, NoSpaceError
from streamoff.tensors.files import allocate, opened, read_exactly, translated, write_all

from .helpers import run_script


def test_more_pieces_than_one_call_takes_are_written_and_read(tmp_path: Path) -> None:
    """A run of thousands of views exceeds IOV_MAX and arrives whole, with empty views in between."""
    pieces = [bytes([number % 251]) * (number % 3) for number in range(5000)]
    content = b"".join(pieces)
    with opened(tmp_path / "f", os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, tuple(map(memoryview, pieces)), 10)
        buffers = tuple(memoryview(bytearray(len(piece))) for piece in pieces)
        assert read_exactly(fd, buffers, 10) == len(content)
    assert b"".join(buffers) == content
    assert (tmp_path / "f").read_bytes() == bytes(10) + content


def test_reading_stops_at_the_end_of_the_file(tmp_path: Path) -> None:
    """The number of bytes read says that a file is short."""
    (tmp_path / "f").write_bytes(b"abc")
    buffer = memoryview(bytearray(8))
    with opened(tmp_path / "f", os.O_RDONLY) as fd:
        assert read_exactly(fd, (buffer[:2], buffer[2:]), 1) == 2
    assert bytes(buffer) == b"bc" + bytes(6)


SHORT_WRITE = """
import os, resource, sys
from streamoff.tensors.files import write_all
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
views = tuple(memoryview(bytes([number]) * 300) for number in range(5))
try:
    write_all(fd, views, 0)
except OSError as error:
    print(error.errno, os.fstat(fd).st_size)
"""


def test_a_short_write_is_continued_until_the_system_refuses(tmp_path: Path) -> None:
    """What the kernel takes in part is continued at the right byte, and the refusal is seen."""
    assert run_script(SHORT_WRITE, tmp_path / "f") == f"{errno.EFBIG} 1000\n"
    expected = b"".join(bytes([number]) * 300 for number in range(4))[:1000]
    assert (tmp_path / "f").read_bytes() == expected


def test_allocating_reserves_real_blocks(tmp_path: Path) -> None:
    """Where fallocate(2) works, the space is taken; nothing is asked for an empty file."""
    with opened(tmp_path / "f", os.O_RDWR | os.O_CREAT) as fd:
        assert not allocate(fd, 0)
        if not allocate(fd, 1 << 20):
            pytest.skip("this file system has no fallocate(2)")
        stat = os.fstat(fd)
        assert stat.st_size == 1 << 20
        assert stat.st_blocks * 512 >= 1 << 20


def test_allocating_what_the_file_system_lacks_is_no_error() -> None:
    """A file system without fallocate(2) is written without a reservation: never by emulation."""
    with opened(Path("/dev/null"), os.O_RDWR) as fd:
        assert not allocate(fd, 1 << 20)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (errno.ENOSPC, NoSpaceError, "full"),
        (errno.EDQUOT, NoSpaceError, "quota is spent"),
        (errno.EIO, LandingError, "EIO"),
        (errno.EROFS, LandingError, "EROFS"),
    ],
)
def test_failures_say_what_is_lacking(
    tmp_path: Path, code: int, error: type[LandingError], words: str
) -> None:
    """Each refusal of the system becomes one typed error with path and numbers."""
    with pytest.raises(error, match=words) as caught, translated(tmp_path / "f", "write", 77):
        raise OSError(code, os.strerror(code))
    assert type(caught.value) is error
    assert caught.value.where["path"] == tmp_path / "f"
    assert caught.value.where.get("needed", 77) == 77


def test_an_error_without_a_place_has_no_numbers(tmp_path: Path) -> None:
    """Space that cannot be asked for is unknown, not zero."""
    gone = tmp_path / "absent" / "f"
    with pytest.raises(NoSpaceError) as caught, translated(gone, "write", 1):
        raise OSError(errno.ENOSPC, "")
    assert "free" not in caught.value.where


def test_our_own_errors_pass_unchanged(tmp_path: Path) -> None:
    """A landing error raised inside is not wrapped again."""
    inner = LandingError("inner")
    with pytest.raises(LandingError) as caught, translated(tmp_path, "write"):
        raise inner
    assert caught.value is inner
