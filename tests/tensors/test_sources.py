"""Sources: what is borrowed, what is refused, and what is noticed when it changes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from streamoff.errors import (
    HeaderError,
    JobClosedError,
    LimitError,
    SourceChangedError,
    TruncatedFileError,
    UnsupportedTensorError,
    UsageError,
)
from streamoff.tensors.landing import MemoryLanding
from streamoff.tensors.layout import ALIASES, HeaderLimits
from streamoff.tensors.sources import FileSource, StateDictSource

from .helpers import assert_holds, random_bits, raw, serve, transfer


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_ranges_are_views_of_the_tensors_own_memory() -> None:
    """Serving a contiguous tensor copies nothing: the view's address is the tensor's."""
    tensor = torch.randn(1000)
    source = StateDictSource({"w": tensor})
    views = source.views(source.layout.data_start + 400, source.layout.size)
    assert views is not None
    assert [_address(view) for view in views] == [tensor.data_ptr() + 400]
    assert not source.blocking


def test_a_range_may_span_header_and_tensors() -> None:
    """The header is bytes 0 to N of the payload and is served like any range."""
    state = {"a": torch.arange(4.0), "b": torch.arange(3, dtype=torch.uint8)}
    source = StateDictSource(state)
    whole = b"".join(serve(source, 0, source.layout.size))
    assert whole == source.layout.header + raw(state["a"]) + raw(state["b"])
    for start in range(source.layout.size):
        stop = min(start + 9, source.layout.size)
        assert b"".join(serve(source, start, stop)) == whole[start:stop]


LAYOUTS: dict[str, torch.Tensor] = {
    "one of stride two": torch.randn(2)[::2],
    "transposed": torch.randn(30, 50).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 7),
    "every second": torch.randn(100)[::2],
    "four of a million": torch.randn(1_000_000)[10:14],
    "diagonal": torch.randn(9, 9).diagonal(),
    "conjugate": torch.randn(6, 7, dtype=torch.complex64).conj(),
    "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
    "flipped deep": torch.randn(2, 3, 4, 5, 6).permute(4, 2, 0, 3, 1),
    "scalar of a row": torch.randn(8)[3],
    "parameter": torch.nn.Parameter(torch.randn(3, 3)),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 3, 7, 64, 10_000])
def test_any_memory_layout_is_served_element_by_element(kind: str, chunk: int) -> None:
    """Strided, expanded, conjugate and negative tensors travel as their values, in any cut."""
    tensor = LAYOUTS[kind]
    source = StateDictSource({"t": tensor})
    assert source.layout.data_nbytes == tensor.numel() * tensor.element_size()
    base = source.layout.data_start
    cuts = range(base, source.layout.size, chunk)
    got = b"".join(
        bytes(view)
        for start in cuts
        for view in serve(source, start, min(start + chunk, source.layout.size))
    )
    assert got == raw(tensor)


def test_what_must_be_gathered_says_that_it_blocks() -> None:
    """Copying element by element wants a thread, and so do thousands of small tensors; large ones do not."""
    assert StateDictSource({"t": torch.randn(4, 5).t()}).blocking
    assert StateDictSource({str(i): torch.zeros(1) for i in range(1000)}).blocking
    assert not StateDictSource({str(i): torch.zeros(4096) for i in range(1000)}).blocking


def test_a_range_of_very_many_tensors_is_copied_instead() -> None:
    """Thousands of pieces are not handed on one by one: the range asks for a buffer."""
    source = StateDictSource({f"{i:04d}": torch.full((2,), float(i)) for i in range(1000)})
    assert source.views(source.layout.data_start, source.layout.size) is None
    assert_holds(
        transfer(source, MemoryLanding()),
        {f"{i:04d}": torch.full((2,), float(i)) for i in range(1000)},
    )


def test_tied_tensors_travel_once() -> None:
    """One object under two keys, and two views of the same memory, are one entry and an alias."""
    weight = torch.randn(10, 10)
    state = {"embed": weight, "head": weight, "view": weight.view(10, 10), "row": weight[0]}
    source = StateDictSource(state)
    assert set(source.layout.by_name) == {"embed", "row"}
    assert dict(source.layout.aliases) == {"head": "embed", "view": "embed"}
    assert source.layout.data_nbytes == 440
    landed = transfer(source, MemoryLanding())
    assert_holds(landed, state)
    assert landed.tensor("head") is landed.tensor("embed")


def test_two_views_of_one_buffer_are_two_tensors() -> None:
    """Sharing a buffer is not being tied: both views arrive with their own values."""
    buffer = torch.arange(10.0)
    state = {"low": buffer[:5], "high": buffer[5:], "overlap": buffer[3:8]}
    source = StateDictSource(state)
    assert not source.layout.aliases
    assert source.layout.data_nbytes == 60
    assert_holds(transfer(source, MemoryLanding()), state)


class _Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes contents
        return "wrapper"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's own way
        raise AssertionError("a refused tensor is not computed with")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "COO": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "CSR": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "complex128": (lambda: torch.zeros(3, dtype=torch.complex128), "complex128"),
    "complex32": (lambda: torch.zeros(3, dtype=torch.complex32), "complex32"),
    "wrapper subclass": (lambda: _Wrapper(torch.zeros(3)), "_Wrapper"),
    "uninitialised": (torch.nn.UninitializedParameter, "UninitializedParameter"),
    "number": (lambda: 3, "int"),
    "nothing": (lambda: None, "NoneType"),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta:UserWarning",
    "ignore:ComplexHalf support is experimental:UserWarning",
)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_travel_is_refused_by_name(kind: str) -> None:
    """The refusal names key and reason, and comes before anything is served."""
    make, word = REFUSED[kind]
    with pytest.raises(UnsupportedTensorError, match=word) as caught:
        StateDictSource({"fine": torch.zeros(1), "layer.bad": make()})
    assert caught.value.where["tensor"] == "layer.bad"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_and_nested_tensors_are_refused_by_name() -> None:
    """A quantised tensor has scales that its bytes lack; a nested one has no shape."""
    quantised = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for tensor, word in ((quantised, "qint8"), (nested, "nested")):
        with pytest.raises(UnsupportedTensorError, match=word):
            StateDictSource({"bad": tensor})


@pytest.mark.parametrize("name", [7, None, "__metadata__", "\ud800"])
def test_names_that_cannot_travel_are_refused(name: Any) -> None:
    """Names that no file can hold are refused with the tensors, before the first byte."""
    with pytest.raises(UnsupportedTensorError, match="name"):
        StateDictSource({name: torch.zeros(1)})


def test_metadata_is_text_and_leaves_our_key_alone() -> None:
    """Metadata is checked where it enters."""
    with pytest.raises(UsageError, match="reserved"):
        StateDictSource({}, {ALIASES: "{}"})
    with pytest.raises(HeaderError, match="text to text"):
        StateDictSource({}, {"k": 1})  # type: ignore[dict-item]


def test_a_state_dict_above_a_limit_is_refused_at_the_source() -> None:
    """What the receiver would refuse is refused before the first byte."""
    with pytest.raises(LimitError, match="limit 'tensors'"):
        StateDictSource({str(i): torch.zeros(i) for i in range(3)}, limits=HeaderLimits(tensors=2))


def test_a_changed_tensor_fails_its_range_and_no_other() -> None:
    """An in-place change is noticed at the next read of that tensor, by name."""
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    source = StateDictSource(state)
    source.check()
    state["b"].add_(1)
    base = source.layout.data_start
    assert source.views(base, base + 16) is not None
    calls: list[Callable[[], object]] = [
        lambda: source.views(base, base + 17),
        lambda: source.read_into(base + 16, memoryview(bytearray(1))),
        source.check,
    ]
    for call in calls:
        with pytest.raises(SourceChangedError) as caught:
            call()
        assert caught.value.where["tensor"] == "b"


def test_an_optimiser_step_is_a_change() -> None:
    """The usual way to change a model while it is served is noticed."""
    model = torch.nn.Linear(3, 2)
    source = StateDictSource(dict(model.named_parameters()))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    with pytest.raises(SourceChangedError):
        source.check()


def test_a_freed_storage_is_never_read() -> None:
    """A tensor whose storage was shrunk under the loan is a change, not a crash."""
    tensor = torch.zeros(1000)
    source = StateDictSource({"w": tensor})
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SourceChangedError):
        source.views(source.layout.data_start, source.layout.size)


def test_inference_tensors_travel() -> None:
    """Tensors made in inference mode have no version counter and travel all the same."""
    with torch.inference_mode():
        state = {"w": torch.randn(5)}
    assert_holds(transfer(StateDictSource(state), MemoryLanding()), state)


def test_rebinding_data_does_not_touch_what_is_borrowed() -> None:
    """``parameter.data = ...`` lets go of the served memory, which stays as it was."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    source = StateDictSource({"p": parameter})
    parameter.data = torch.ones(3)
    assert b"".join(serve(source, source.layout.data_start, source.layout.size)) == bytes(12)


def test_a_closed_source_serves_nothing_and_holds_nothing() -> None:
    """Closing gives the tensors back; later requests are typed errors."""
    tensor = torch.zeros(3)
    storage = weakref.ref(tensor)
    source = StateDictSource({"w": tensor})
    source.close()
    source.close()
    del tensor
    assert storage() is None
    calls: list[Callable[[], object]] = [lambda: source.views(0, 1), source.check]
    for call in calls:
        with pytest.raises(JobClosedError):
            call()


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (4, 3), (0, 10**6), (10**6, 10**6)])
def test_ranges_outside_the_payload_are_refused(start: int, stop: int) -> None:
    """A range is validated before anything is served."""
    source = StateDictSource({"w": torch.zeros(3)})
    with pytest.raises(UsageError, match="outside the payload"):
        source.views(start, stop)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a safetensors file of somebody else's making."""
    path = tmp_path / "model.safetensors"
    save_file({"w": random_bits("BF16", (500, 7), 1), "b": torch.arange(9)}, path)
    return path


def test_a_file_is_served_as_it_stands(file: Path) -> None:
    """The payload of a file source is the file, byte for byte."""
    source = FileSource(file)
    assert source.blocking
    assert source.views(0, 8) is None
    assert b"".join(serve(source, 0, source.layout.size)) == file.read_bytes()


def _touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def _replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


def _grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("change", [_touched, _replaced, _grown, _cut])
def test_a_changed_file_fails_the_transfer(file: Path, change: Any) -> None:
    """Another mtime, inode or size is noticed at the next read and at the check."""
    source = FileSource(file)
    source.check()
    change(file)
    with pytest.raises(SourceChangedError):
        source.check()
    with pytest.raises(SourceChangedError):
        source.read_into(0, memoryview(bytearray(8)))


def test_a_file_that_is_gone_or_closed_is_a_typed_error(file: Path) -> None:
    """A removed file and a closed source never surface as FileNotFoundError."""
    source = FileSource(file)
    file.unlink()
    with pytest.raises(JobClosedError, match="gone"):
        source.read_into(0, memoryview(bytearray(8)))
    source.close()
    with pytest.raises(JobClosedError, match="closed"):
        source.check()


def test_a_truncated_file_is_refused_when_the_source_is_made(file: Path) -> None:
    """Damage is found before a receiver is invited."""
    _cut(file)
    with pytest.raises(TruncatedFileError):
        FileSource(file)
