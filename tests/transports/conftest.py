"""Fixtures of this package; large libraries are taken out of the garbage collector's rounds: every test collects."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401 - it looks for referrers while it loads, which freezing hides
import pytest
import torch  # noqa: F401 - its tens of thousands of objects are what is frozen

from ..disks import tmpfs
from .real import KINDS, Consortium, Net

gc.collect()
gc.freeze()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="so") as path:
        yield Path(path)


@pytest.fixture(params=["on a disk", "in memory"])
def scratch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where jobs land: on the machine's disk, or on a file system in RAM, where chunks land while they come."""
    if request.param == "on a disk":
        yield tmp_path
    else:
        with tmpfs(tmp_path / "ram", "size=600m") as mount:
            yield mount


@pytest.fixture(scope="session")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    """The authority that the endpoints of these tests believe."""
    return Consortium(tmp_path_factory.mktemp("consortium"))


@pytest.fixture(params=KINDS)
def net(request: pytest.FixtureRequest, short_path: Path, consortium: Consortium) -> Net:
    """Places for each kind of transport."""
    return Net(request.param, short_path, consortium)


@pytest.fixture
def unix(short_path: Path, consortium: Consortium) -> Net:
    """Places of unix sockets."""
    return Net("unix", short_path, consortium)


@pytest.fixture
def tcp(short_path: Path, consortium: Consortium) -> Net:
    """Places of TCP without TLS."""
    return Net("tcp", short_path, consortium)


@pytest.fixture
def tls(short_path: Path, consortium: Consortium) -> Net:
    """Places of TLS."""
    return Net("tls", short_path, consortium)
