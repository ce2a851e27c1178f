"""Any state dict, served in any order, lands on disk and in memory bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open

from streamoff.errors import UsageError
from streamoff.tensors.digests import chunk_digest
from streamoff.tensors.landing import PAYLOAD_NAME, DiskLanding, MemoryLanding
from streamoff.tensors.layout import parse, plan
from streamoff.tensors.lazy import LazyStateDict, open_state
from streamoff.tensors.sources import FileSource, Source, StateDictSource
from streamoff.types import MIB, ByteRange

from ..disks import image
from .helpers import DTYPES, assert_holds, random_bits, raw, same, serve, transfer

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any dtype, shape and memory layout."""
    dtype = draw(st.sampled_from(DTYPES))
    tensor = random_bits(dtype, draw(SHAPES), draw(st.integers(0, 2**31)))
    how = draw(st.sampled_from(["as is", "transposed", "strided", "expanded", "offset", "conj"]))
    if how == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if how == "strided" and tensor.ndim:
        return tensor[..., ::2]
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if how == "offset" and tensor.ndim:
        return tensor[1:]
    if how == "conj" and tensor.is_complex():
        return tensor.conj()
    return tensor


STATE_DICTS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=6), tensors(), max_size=6
)


@settings(max_examples=75, deadline=None)
@given(state=STATE_DICTS, chunk=st.integers(1, 300), seed=st.integers(0, 2**31), data=st.data())
def test_any_state_dict_lands_bit_for_bit(
    state: dict[str, torch.Tensor], chunk: int, seed: int, data: st.DataObject
) -> None:
    """Every dtype, shape and layout arrives on disk and in memory, and safetensors opens the file."""
    state.pop("__metadata__", None)
    before = {name: raw(tensor) for name, tensor in state.items()}
    source = StateDictSource(state)
    wanted = data.draw(st.sets(st.sampled_from(sorted(state)))) if state else set()
    assert source.layout.data_nbytes <= sum(t.numel() * t.element_size() for t in state.values())
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("whole", "some"):
            (root / name).mkdir()
        assert_holds(transfer(source, DiskLanding(root / "whole"), chunk=chunk, seed=seed), state)
        assert_holds(transfer(source, MemoryLanding(), chunk=chunk, seed=seed), state)
        some = {name: state[name] for name in wanted}
        assert_holds(
            transfer(source, DiskLanding(root / "some"), names=wanted, chunk=chunk, seed=seed), some
        )
        assert_holds(transfer(source, MemoryLanding(), names=wanted, chunk=chunk, seed=seed), some)
        with safe_open(root / "whole" / PAYLOAD_NAME, "pt") as file:
            for name in file.keys():  # noqa: SIM118 -- safe_open is no mapping
                assert same(file.get_tensor(name), state[name])
    assert {name: raw(tensor) for name, tensor in state.items()} == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_lands_with_its_own_bits(dtype: str, tmp_path: Path) -> None:
    """NaN payloads, subnormals, -0.0, 0-dim and empty tensors survive; a file holds itemsize each."""
    state = {
        "many": random_bits(dtype, (31, 33), 1),
        "scalar": random_bits(dtype, (), 2),
        "empty": random_bits(dtype, (0, 3), 3),
    }
    landed = transfer(StateDictSource(state), DiskLanding(tmp_path), chunk=1000, seed=4)
    assert_holds(landed, state)
    payload = (31 * 33 + 1) * state["many"].element_size()
    assert (tmp_path / PAYLOAD_NAME).stat().st_size == landed.layout.data_start + payload
    assert_holds(transfer(StateDictSource(state), MemoryLanding(), chunk=1000, seed=4), state)


def test_a_landed_file_is_served_on(tmp_path: Path) -> None:
    """A lazy state dict and a plain file are sources too; ties and metadata survive both hops."""
    weight = torch.randn(300, 300)
    state = {"a": weight, "tied": weight, "b": torch.arange(7)}
    (tmp_path / "1").mkdir()
    first = transfer(StateDictSource(state, {"round": "3"}), DiskLanding(tmp_path / "1"))
    assert isinstance(first, LazyStateDict)
    hops: list[Source] = [FileSource(first), FileSource(first.path)]
    for source in hops:
        second = transfer(source, MemoryLanding(), chunk=1000, seed=1)
        assert_holds(second, state)
        assert second.layout.metadata["round"] == "3"
        assert second.tensor("a") is second.tensor("tied")


def test_empty_tensors_and_empty_state_dicts_land_everywhere(tmp_path: Path) -> None:
    """Tensors without elements, and payloads without tensors, are ordinary on every path."""
    several = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(2, 0, 3)}
    for number, state in enumerate([several, {}]):
        (tmp_path / str(number)).mkdir()
        source = StateDictSource(state, {"note": "kept"})
        landed = transfer(source, DiskLanding(tmp_path / str(number), check_finite=True))
        assert isinstance(landed, LazyStateDict)
        assert landed.layout.metadata == {"note": "kept"}
        for result in (landed, transfer(FileSource(landed), MemoryLanding(check_finite=True))):
            assert_holds(result, state)
        for lazy in landed.values():
            assert list(lazy.blocks(4)) == []
            lazy.read_into(memoryview(bytearray()))
        landed.read_span(0, 0, memoryview(bytearray()))


def test_offsets_survive_the_boundaries_of_32_bits(tmp_path: Path) -> None:
    """One tensor of 2**32 + 1 bytes is served at 2**31 and 2**32 and at its last byte."""
    size = 2**32 + 1
    layout = plan([("giant", "U8", (size,))])
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)
        for at in (2**31, 2**32):
            file.seek(layout.data_start + at)
            file.write(b"\x07")
    source = FileSource(path)
    assert parse(source.layout.header, size=layout.size).by_name["giant"].nbytes == size
    for at in (2**31, 2**32):
        (view,) = serve(source, layout.data_start + at - 1, layout.data_start + at + 1)
        assert bytes(view) == b"\x00\x07"
    with pytest.raises(UsageError, match="outside"):
        source.read_into(layout.size - 1, memoryview(bytearray(2)))


@pytest.mark.parametrize("size", [2**31 + 1, 2**32 + 1])
def test_a_tensor_beyond_32_bits_lands_where_it_belongs(tmp_path: Path, size: int) -> None:
    """Around 2**31 and 2**32, and at the end of one tensor, bytes land and are read at their exact places."""
    layout = plan([("giant", "U8", (size,))])
    with image(tmp_path / "disk", tmp_path / "image", "ext2", mebibytes=32) as disk:
        landing = DiskLanding(disk)  # which cannot reserve space there: the file is mostly a hole
        assert tuple(landing.open(layout)) == (ByteRange(layout.data_start, layout.size),)
        edges = [at for at in (2**31, 2**32) if at < size]
        for at in edges:
            views = (memoryview(b"\x05\x07"),)
            landing.write(
                layout.data_start + at - 1, views, chunk_digest(views, layout.data_start + at - 1)
            )
        (disk / f"{PAYLOAD_NAME}.part").rename(disk / "landed")
        assert (disk / "landed").stat().st_size == layout.size
        lazy = open_state(disk / "landed")["giant"]
        for at in edges:
            found = bytearray(4 if at + 2 < size else 3)
            lazy.read_into(memoryview(found), at - 2)
            assert bytes(found[:3]) == b"\x00\x05\x07"
        assert edges[-1] == size - 1
        landing.discard()


def test_one_giant_tensor_is_cut_like_any_other(tmp_path: Path) -> None:
    """A 40 MiB tensor travels in 1 MiB chunks; no chunk is larger because the tensor is."""
    state = {"giant": random_bits("F32", (10 * MIB,), 5)}
    source = StateDictSource(state)
    landing = DiskLanding(tmp_path)
    count = 0
    (wanted,) = landing.open(source.layout)
    for start in range(wanted.start, wanted.stop, MIB):
        views = serve(source, start, min(start + MIB, wanted.stop))
        assert sum(view.nbytes for view in views) <= MIB
        landing.write(start, views, chunk_digest(views, start))
        count += 1
    assert count == 40
    assert_holds(landing.finish(), state)


def test_five_thousand_tensors_are_one_file(tmp_path: Path) -> None:
    """Small tensors cost no inode each: a payload is one file of header and data."""
    state = {f"t{i}": torch.full((256,), float(i)) for i in range(5000)}
    landed = transfer(StateDictSource(state), DiskLanding(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == [PAYLOAD_NAME]
    size = (tmp_path / PAYLOAD_NAME).stat().st_size
    assert size == landed.layout.data_start + 5000 * 1024
    assert torch.equal(landed.tensor("t4999"), state["t4999"])
