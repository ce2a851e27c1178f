"""Publishing the global model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamoff.errors import HeaderError, IntegrityError, NoSpaceError, UsageError
from streamoff.fl.aggregation import Columnar
from streamoff.fl.persistor import FilePersistor
from streamoff.tensors.lazy import open_state
from streamoff.tensors.state import MemoryState

from ..disks import tmpfs
from .aggregation.support import bits, contribution, landed, terms, verified
from .aggregation.test_columnar import Cut, corrupt, model, stop_at


def names(directory: Path) -> list[str]:
    """What a directory holds."""
    return sorted(path.name for path in directory.iterdir())


OLD = {"w": torch.full((1000,), 1.0)}


@pytest.mark.parametrize("durable", [False, True])
def test_a_model_is_published_whole(tmp_path, durable):
    """Tensors and lazy states alike end as one file that plain safetensors opens."""
    persistor = FilePersistor(tmp_path / "deep" / "global.safetensors", durable=durable)
    persistor.save(OLD)
    assert torch.equal(load_file(persistor.target)["w"], OLD["w"])
    published = persistor.save(verified(tmp_path, model(1)))
    assert bits(published) == bits(MemoryState(model(1))) == bits(persistor.load())
    assert names(persistor.target.parent) == ["global.safetensors"]


def test_a_failure_leaves_the_previous_model(tmp_path):
    """Rotten bytes, a cut, or a full disk leave the published file and no partial one."""
    (tmp_path / "out").mkdir()
    persistor = FilePersistor(tmp_path / "out" / "global.safetensors")
    persistor.save(OLD)
    before = persistor.target.read_bytes()
    with pytest.raises(IntegrityError):
        persistor.save(corrupt(verified(tmp_path, model(1)), "small.3"))
    for call in range(3):
        with pytest.raises(Cut):
            persistor.save(MemoryState(model(1)), stop=stop_at(call))
    assert persistor.target.read_bytes() == before
    assert names(persistor.target.parent) == ["global.safetensors"]


def test_a_full_disk_leaves_the_previous_model(small_disk):
    """A model that does not fit is refused with the numbers and the old one still opens."""
    persistor = FilePersistor(small_disk / "global.safetensors")
    persistor.save(OLD)
    with pytest.raises(NoSpaceError) as caught:
        persistor.save({"w": torch.zeros(4 << 20)})
    assert str(small_disk) in str(caught.value)
    assert torch.equal(persistor.load().tensor("w"), OLD["w"])
    assert names(small_disk) == ["global.safetensors"]


def test_a_model_on_another_file_system_is_copied(small_disk, tmp_path):
    """The target may be on another mount than the state: nothing is renamed across."""
    persistor = FilePersistor(small_disk / "global.safetensors")
    state = landed(tmp_path, OLD)
    assert state.path.stat().st_dev != small_disk.stat().st_dev
    persistor.save(state)
    assert bits(persistor.load()) == bits(state)


def test_an_engine_publishes_straight_to_the_target(tmp_path):
    """The result of a round is written beside the target and renamed, without a second copy."""
    persistor = FilePersistor(tmp_path / "global.safetensors")
    persistor.save(OLD)
    with Columnar(terms(persistor.load())) as engine:
        engine.add(contribution("a", {"w": torch.full((1000,), 5.0)}))
        with pytest.raises(Cut):
            engine.finish(persistor.new_writer, stop=stop_at(1))
        assert persistor.load().tensor("w")[0] == 1.0
        engine.finish(persistor.new_writer)
    assert persistor.load().tensor("w")[0] == 5.0
    assert names(tmp_path) == ["global.safetensors"]


def test_lazy_tensors_in_a_mapping_are_refused(tmp_path):
    """A reference to a site's disk never becomes part of a model; the key is named, nothing touched."""
    persistor = FilePersistor(tmp_path / "global.safetensors")
    lazy = landed(tmp_path, {"v": torch.ones(1)})["v"]
    for value in (lazy, 3, None):
        with pytest.raises(UsageError) as caught:
            persistor.save({"w": torch.ones(1), "v": value})
        assert caught.value.tensor == "v"
    assert not persistor.target.exists()


def test_a_symbolic_link_stays_a_link(tmp_path):
    """Publishing through a link replaces the file it points to, beside that file."""
    (tmp_path / "real").mkdir()
    link = tmp_path / "global.safetensors"
    link.symlink_to(tmp_path / "real" / "model.safetensors")
    FilePersistor(link).save(OLD)
    assert link.is_symlink()
    assert torch.equal(open_state(tmp_path / "real" / "model.safetensors").tensor("w"), OLD["w"])


def test_everybody_may_read_what_the_umask_lets_them(tmp_path):
    """A published model has the mode of any new file, also where it replaces a private one."""
    target = tmp_path / "m.safetensors"
    target.touch(0o600)
    before = os.umask(0o022)
    try:
        FilePersistor(target).save(OLD)
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_left_over_partial_file_is_replaced(tmp_path):
    """What a crash left beside the target is in nobody's way."""
    persistor = FilePersistor(tmp_path / "global.safetensors")
    (tmp_path / "global.safetensors.part").write_bytes(b"half")
    persistor.save(OLD)
    assert names(tmp_path) == ["global.safetensors"]


def test_loading_what_is_no_model_says_so(tmp_path):
    """A missing file and a file of something else are told apart."""
    with pytest.raises(FileNotFoundError):
        FilePersistor(tmp_path / "none.safetensors").load()
    (tmp_path / "x").write_bytes(b"\x10" + bytes(7) + b"not a header ...")
    with pytest.raises(HeaderError):
        FilePersistor(tmp_path / "x").load()


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 8 MiB."""
    with tmpfs(tmp_path / "disk", "size=8m") as mount:
        yield mount
