"""The header: what is planned, what is accepted, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save, save_file

from streamoff.errors import HeaderError, IntegrityError, LimitError, TruncatedFileError, UsageError
from streamoff.tensors.dtypes import ITEMSIZE
from streamoff.tensors.layout import (
    ALIASES,
    HeaderLimits,
    Layout,
    header_length,
    parse,
    plan,
    subset,
)
from streamoff.tensors.reader import read_layout
from streamoff.types import ByteRange

from .helpers import entry, header_of

STRANGE_NAMES = [
    "../../x",
    "/abs",
    "a/b",
    "",
    " ",
    "nul\0",
    "new\nline",
    "x" * 300,
    "y" * 100_000,
    "\N{GRINNING FACE}",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "e\N{COMBINING ACUTE ACCENT}",
    "Case",
    "case",
]


def test_entries_are_ordered_by_item_size_then_name() -> None:
    """Larger elements come first, so that every element is aligned to its size in the payload."""
    layout = plan([("b", "U8", (3,)), ("z", "F64", (1,)), ("a", "U8", (5,)), ("h", "BF16", (7,))])
    assert [spec.name for spec in layout.specs] == ["z", "h", "a", "b"]
    for spec in layout.specs:
        assert (layout.data_start + spec.start) % ITEMSIZE[spec.dtype] == 0


def test_no_element_straddles_a_chunk() -> None:
    """Any grid of a power of two from 8 bytes on cuts between elements."""
    layout = plan([(name, name, (5,)) for name in ITEMSIZE])
    for spec in layout.specs:
        size = ITEMSIZE[spec.dtype]
        for at in range(layout.data_start + spec.start, layout.data_start + spec.stop, size):
            assert at // 8 == (at + size - 1) // 8


def test_planned_header_is_parsed_back() -> None:
    """What a producer plans is what a receiver reads."""
    layout = plan([("a", "F32", (2, 3)), ("s", "I64", ()), ("e", "BOOL", (0, 4))], {"k": "v"})
    assert parse(layout.header, size=layout.size) == layout


@pytest.mark.parametrize("count", [0, 1, 3])
def test_safetensors_opens_what_we_plan(tmp_path: Path, count: int) -> None:
    """The header is one that safetensors itself accepts, with metadata and with no tensors at all."""
    layout = plan([(f"t{i}", "F32", (i,)) for i in range(count)], {"only": "metadata"})
    path = tmp_path / "planned.safetensors"
    path.write_bytes(layout.header + bytes(layout.data_nbytes))
    with safetensors.safe_open(path, "pt") as file:
        assert list(file.keys()) == [f"t{i}" for i in range(count)]
        assert file.metadata() == {"only": "metadata"}


def test_we_parse_what_safetensors_writes() -> None:
    """A file written by safetensors is accepted, whatever its order of entries."""
    written = save(
        {"w": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.uint8), "e": torch.ones(0)},
        metadata={"format": "pt"},
    )
    layout = parse(written[: 8 + header_length(written[:8])], size=len(written))
    assert {spec.name: spec.shape for spec in layout.specs} == {"w": (3, 4), "b": (2,), "e": (0,)}
    assert layout.metadata == {"format": "pt"}


def test_empty_metadata_is_accepted() -> None:
    """An empty ``__metadata__`` object is nothing special."""
    layout = parse(header_of({"__metadata__": {}, "a": entry("U8", [1], 0, 1)}), size=None)
    assert layout.metadata == {}


@pytest.mark.parametrize("name", STRANGE_NAMES, ids=lambda name: repr(name[:12]))
def test_any_text_is_a_name(name: str) -> None:
    """Names are data: paths, control characters, emoji and long ones survive exactly."""
    layout = plan([(name, "U8", (1,)), ("other", "U8", (1,))])
    assert parse(layout.header, size=layout.size).by_name.keys() == {name, "other"}


@pytest.mark.parametrize(
    ("name", "error"), [("__metadata__", HeaderError), ("\ud800", HeaderError), (7, HeaderError)]
)
def test_names_that_no_file_can_hold_are_refused(name: Any, error: type[Exception]) -> None:
    """The reserved name, a lone surrogate and a number are refused when planning."""
    with pytest.raises(error):
        plan([(name, "U8", (1,))])


def test_duplicate_names_are_refused_when_planning() -> None:
    """Two entries of one name never reach a file."""
    with pytest.raises(HeaderError, match="duplicate tensor name"):
        plan([("a", "U8", (1,)), ("a", "F32", (1,))])


def test_an_unknown_dtype_is_refused_when_planning() -> None:
    """Only dtypes that both sides know can be planned."""
    with pytest.raises(UsageError, match="not a dtype"):
        plan([("a", "C128", (1,))])


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 8, 11)}
BIG = 2**63

HOSTILE: dict[str, tuple[Any, str]] = {
    "hole": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [1], 3, 4)}, "hole"),
    "hole at the start": ({"a": entry("U8", [2], 1, 3)}, "hole"),
    "overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, "overlap"),
    "same range twice": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, "overlap"),
    "shape disagrees": ({"a": entry("F32", [3], 0, 8)}, "disagree"),
    "empty shape with bytes": ({"a": entry("F32", [0], 0, 4)}, "disagree"),
    "negative size": ({"a": entry("U8", [-1], 0, 0)}, "shape"),
    "size is a bool": ({"a": entry("U8", [True], 0, 1)}, "shape"),
    "size is a float": ({"a": entry("U8", [1.0], 0, 1)}, "shape"),
    "size is text": ({"a": entry("U8", ["1"], 0, 1)}, "shape"),
    "size overflows": ({"a": entry("U8", [BIG], 0, 1)}, "shape"),
    "product overflows": ({"a": entry("U8", [2**62, 4], 0, 1)}, "overflows"),
    "zero hides an overflow": ({"a": entry("U8", [0, 2**62, 2**62], 0, 0)}, "overflows"),
    "bytes overflow": ({"a": entry("F64", [2**61], 0, 0)}, "overflows"),
    "offsets reversed": ({"a": entry("U8", [1], 1, 0)}, "data_offsets"),
    "offset negative": ({"a": entry("U8", [1], -1, 0)}, "data_offsets"),
    "offset bool": ({"a": entry("U8", [1], 0, bool(1))}, "data_offsets"),
    "offset too big": ({"a": entry("U8", [1], BIG - 1, BIG)}, "data_offsets"),
    "three offsets": ({"a": {**GOOD["a"], "data_offsets": [0, 4, 8]}}, "data_offsets"),
    "offsets no list": ({"a": {**GOOD["a"], "data_offsets": 8}}, "data_offsets"),
    "dtype unknown": ({"a": entry("F33", [1], 0, 4)}, "dtype"),
    "dtype no text": ({"a": {**GOOD["a"], "dtype": 7}}, "dtype"),
    "dtype missing": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, "entry"),
    "field too many": ({"a": {**GOOD["a"], "x": 1}}, "entry"),
    "entry no object": ({"a": 7}, "entry"),
    "metadata is a tensor": ({"__metadata__": entry("U8", [1], 0, 1)}, "metadata"),
    "metadata no object": ({"__metadata__": []}, "metadata"),
    "metadata number": ({"__metadata__": {"k": 1}}, "metadata"),
    "metadata surrogate": (b'{"__metadata__":{"k":"\\ud800"}}', "metadata"),
    "name surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "UTF-8"),
    "duplicate key, other range": (
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
        ),
        "duplicate key",
    ),
    "duplicate key, identical": (
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        ),
        "duplicate key",
    ),
    "duplicate field": (
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        "duplicate key",
    ),
    "not JSON": (b"{nonsense", "not JSON"),
    "not UTF-8": (b'{"\xff":1}', "not JSON"),
    "NaN": (b'{"a":NaN}', "not JSON"),
    "no object": (b"[]", "an object"),
    "leading space": (b" {}", "an object"),
    "trailing garbage": (b"{}{}", "not JSON"),
    "nested without end": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not JSON"),
    "number of 5000 digits": (b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
    "alias of nothing": ({"__metadata__": {ALIASES: '{"x":"y"}'}}, "alias of an unknown"),
    "alias no object": ({"__metadata__": {ALIASES: "[]"}}, "aliases"),
    "alias no JSON": ({"__metadata__": {ALIASES: "{"}}, "aliases"),
    "alias is an entry": (
        {"__metadata__": {ALIASES: '{"a":"a"}'}, "a": entry("U8", [0], 0, 0)},
        "also an entry",
    ),
    "alias twice": ({"__metadata__": {ALIASES: '{"x":"a","x":"a"}'}}, "duplicate"),
    "alias reserved": (
        {"__metadata__": {ALIASES: '{"__metadata__":"a"}'}, "a": entry("U8", [0], 0, 0)},
        "reserved",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(case: str) -> None:
    """Every header that does not describe its data section exactly is a typed refusal."""
    tree, match = HOSTILE[case]
    with pytest.raises(HeaderError, match=match):
        parse(header_of(tree))


@pytest.mark.parametrize(("change", "match"), [(-1, "past the end"), (1, "trailing bytes")])
def test_the_data_section_ends_where_the_payload_ends(change: int, match: str) -> None:
    """A payload that is shorter or longer than its tensors is refused on the header alone."""
    header = header_of(GOOD)
    with pytest.raises(HeaderError, match=match):
        parse(header, size=len(header) + 11 + change)


@pytest.mark.parametrize("length", [2**62, 2**63 - 1, 2**64 - 1, 2**32, 32 * 2**20 + 1])
def test_a_huge_header_length_is_a_limit_not_an_allocation(length: int) -> None:
    """The length field alone is judged; nothing of that size is allocated."""
    with pytest.raises(LimitError, match=re.compile("limit 'header'.*at most 33554432")):
        header_length(length.to_bytes(8, "little"))


@pytest.mark.parametrize("first", [b"", b"1234567", b"\0" * 8, b"\1" + b"\0" * 7])
def test_a_header_has_a_length_and_at_least_two_bytes(first: bytes) -> None:
    """Too few bytes for the length, or a length no JSON object has, are refused."""
    with pytest.raises(HeaderError):
        header_length(first)


def test_a_header_of_another_length_is_refused() -> None:
    """The bytes given must be exactly the header."""
    header = header_of(GOOD)
    for given in (header[:-1], header + b" "):
        with pytest.raises(HeaderError, match="header length"):
            parse(given)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (HeaderLimits(header=40), "header"),
        (HeaderLimits(tensors=1), "tensors"),
        (HeaderLimits(name=0), "name"),
        (HeaderLimits(dimensions=0), "dimensions"),
    ],
)
def test_each_limit_holds_for_sender_and_receiver(limits: HeaderLimits, name: str) -> None:
    """An excess is refused naming the limit, when planning and when parsing alike."""
    layout = plan([("a", "U8", (1,)), ("b", "U8", (1,))])
    with pytest.raises(LimitError, match=f"limit '{name}'"):
        plan([("a", "U8", (1,)), ("b", "U8", (1,))], limits=limits)
    with pytest.raises(LimitError, match=f"limit '{name}'"):
        parse(layout.header, limits=limits)


@pytest.mark.parametrize(
    ("entry", "limits", "name", "most", "got"),
    [
        (("much.too.long", "U8", (1,)), HeaderLimits(name=5), "name", "at most 5 bytes", 13),
        (("deep", "U8", (1,) * 7), HeaderLimits(dimensions=6), "dimensions", "at most 6", 7),
    ],
)
def test_what_exceeds_a_limit_is_named_with_its_size_and_the_limit(
    entry: tuple[str, str, tuple[int, ...]],
    limits: HeaderLimits,
    name: str,
    most: str,
    got: int,
) -> None:
    """Whoever sends or receives an item above a limit reads which tensor it is, its size, and what is allowed."""
    entries = [("a", "U8", (1,)), entry]
    attempts: list[Callable[[], Layout]] = [
        lambda: plan(entries, limits=limits),
        lambda: parse(plan(entries).header, limits=limits),
    ]
    for attempt in attempts:
        with pytest.raises(LimitError) as caught:
            attempt()
        assert (caught.value.expected, caught.value.got) == (most, got)
        assert caught.value.where["tensor"] == entry[0]
        for word in (f"limit '{name}'", most, str(got), entry[0]):
            assert word in str(caught.value)


def test_two_hundred_thousand_tensors_are_planned_and_read_back() -> None:
    """The limit is usable: what may be sent can be read again; one more is refused at the sender."""
    entries = [(f"layer.{i:06d}.weight", "F32", (i % 3,)) for i in range(200_000)]
    layout = plan(entries)
    assert len(parse(layout.header, size=layout.size).specs) == 200_000
    with pytest.raises(LimitError, match="limit 'tensors'"):
        plan([*entries, ("one more", "F32", ())])


def test_names_that_fill_more_than_the_header_limit_are_refused_at_the_sender() -> None:
    """A header that the other side could not read is never made."""
    with pytest.raises(LimitError, match="limit 'header'"):
        plan([(f"{i:04d}" + "n" * 100_000, "U8", ()) for i in range(400)])


def test_ranges_are_relative_to_the_payload_and_merge() -> None:
    """Wanted names become payload ranges; neighbours become one; aliases bring their entry."""
    layout = plan(
        [("a", "F32", (2,)), ("b", "F32", (1,)), ("c", "F32", (1,))], {ALIASES: '{"tied":"c"}'}
    )
    at = layout.data_start
    assert tuple(layout.ranges(["b", "a"])) == (ByteRange(at, at + 12),)
    assert tuple(layout.ranges(["a", "tied"])) == (
        ByteRange(at, at + 8),
        ByteRange(at + 12, at + 16),
    )
    assert tuple(layout.ranges()) == (ByteRange(at, layout.size),)
    with pytest.raises(KeyError):
        layout.ranges(["nobody"])


def test_a_subset_keeps_ties_and_makes_lone_aliases_entries() -> None:
    """A tied name wanted without its holder holds the bytes itself."""
    layout = plan(
        [("a", "F32", (2,)), ("b", "F32", (1,))], {"k": "v", ALIASES: '{"x":"a","y":"a"}'}
    )
    lone = subset(layout, ["y", "x"])
    assert list(lone.by_name) == ["y"]
    assert dict(lone.aliases) == {"x": "y"}
    both = subset(layout, ["x", "a"])
    assert list(both.by_name) == ["a"]
    assert dict(both.aliases) == {"x": "a"}
    assert both.metadata["k"] == "v"
    assert ALIASES not in subset(layout, ["b"]).metadata


def test_a_file_written_by_safetensors_has_a_layout(tmp_path: Path) -> None:
    """An existing file is read by its header only."""
    save_file({"w": torch.ones(2, 3)}, tmp_path / "f.safetensors")
    layout = read_layout(tmp_path / "f.safetensors")
    assert layout.by_name["w"].shape == (2, 3)


def _file(tmp_path: Path, layout: Layout, size: int) -> Path:
    path = tmp_path / "cut.safetensors"
    path.write_bytes((layout.header + bytes(layout.data_nbytes))[:size])
    return path


@pytest.mark.parametrize("size", [0, 4, 8, 30])
def test_a_file_cut_in_its_header_is_called_truncated(tmp_path: Path, size: int) -> None:
    """The error says truncated and the size, not that some JSON is odd."""
    path = _file(tmp_path, plan([("first", "F32", (4,))]), size)
    with pytest.raises(TruncatedFileError, match="truncated") as caught:
        read_layout(path)
    assert caught.value.got == size
    assert caught.value.where["path"] == path


def test_a_file_cut_in_its_data_names_the_tensor(tmp_path: Path) -> None:
    """The first tensor that is not whole is named, with expected and actual size."""
    layout = plan([("first", "F32", (4,)), ("second", "F32", (4,))])
    with pytest.raises(TruncatedFileError) as caught:
        read_layout(_file(tmp_path, layout, layout.size - 1))
    assert caught.value.where["tensor"] == "second"
    assert caught.value.got == layout.size - 1
    assert str(layout.size) in str(caught.value)


def test_bytes_behind_the_data_are_refused(tmp_path: Path) -> None:
    """A file with something after its tensors is not the file its header describes."""
    layout = plan([("a", "U8", (4,))])
    path = tmp_path / "long.safetensors"
    path.write_bytes(layout.header + bytes(5))
    with pytest.raises(IntegrityError, match="trailing bytes"):
        read_layout(path)


def test_a_file_that_is_no_safetensors_names_its_path(tmp_path: Path) -> None:
    """The refusal of a foreign file says which file."""
    path = tmp_path / "text"
    path.write_bytes((12).to_bytes(8, "little") + json.dumps("hello world").encode())
    with pytest.raises(HeaderError) as caught:
        read_layout(path)
    assert caught.value.where["path"] == path
