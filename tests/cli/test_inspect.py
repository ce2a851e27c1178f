"""``streamoff inspect``."""

import json
import os
from pathlib import Path

import pytest

from streamoff.cli import main


def write(path: Path, tree: object, data: bytes = b"") -> Path:
    """Write a safetensors file with any header."""
    header = json.dumps(tree).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a small well-formed file."""
    return write(
        tmp_path / "model.safetensors",
        {
            "__metadata__": {"format": "pt"},
            "layer.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "layer.bias": {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]},
            "steps": {"dtype": "I64", "shape": [], "data_offsets": [30, 38]},
        },
        bytes(38),
    )


def test_the_tensors_are_listed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, dtypes, shapes, sizes, sums and metadata are printed in the order of the file."""
    assert main(["inspect", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["tensor", "dtype", "shape", "size"],
        ["layer.weight", "F32", "2", "x", "3", "24", "B"],
        ["layer.bias", "BF16", "3", "6", "B"],
        ["steps", "I64", "scalar", "8", "B"],
    ]
    assert "3 tensors, 10 elements: 1 F32, 1 BF16, 1 I64" in lines
    assert "metadata: format = pt" in lines


def test_the_json_says_the_same(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read the layout as JSON."""
    assert main(["inspect", "--json", str(model)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == model.stat().st_size == found["header_bytes"] + 38
    assert found["metadata"] == {"format": "pt"}
    assert found["tensors"][1] == {
        "name": "layer.bias",
        "dtype": "BF16",
        "shape": [3],
        "bytes": 6,
        "data_offsets": [24, 30],
    }


def test_an_empty_file_of_tensors_is_fine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A safetensors file without a tensor is one, too."""
    assert main(["inspect", str(write(tmp_path / "none", {}))]) == 0
    assert "0 tensors, 0 elements: none" in capsys.readouterr().out


def test_a_name_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control and direction characters in a stranger's names and metadata are escaped."""
    tensor = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    tree = {"__metadata__": {"a\x07": "b\u202e"}, "evil\x1b[2J\nname": tensor, "größe": tensor}
    assert main(["inspect", str(write(tmp_path / "evil", tree))]) == 0
    printed = capsys.readouterr().out
    assert r"evil\x1b[2J\nname" in printed
    assert r"metadata: a\x07 = b\u202e" in printed
    assert "größe" in printed
    assert all(line.isprintable() for line in printed.splitlines())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated"),
        (b"1234567", "truncated"),
        ((2**62).to_bytes(8, "little"), "limit 'header'"),
        ((100).to_bytes(8, "little") + b"{}", "truncated"),
        ((2).to_bytes(8, "little") + b"[]", "header JSON"),
        ((2).to_bytes(8, "little") + b"{}x", "trailing bytes"),
        (b"\x7fELF" + bytes(100), "limit 'header'"),
    ],
)
def test_a_hostile_file_is_an_error_in_one_line(
    tmp_path: Path, content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no safetensors file ends with 1 and the reason, never with a traceback."""
    path = tmp_path / "hostile"
    path.write_bytes(content)
    assert main(["inspect", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("streamoff inspect: error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_what_is_no_file_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file, a directory and a pipe (which would be waited for) are the caller's mistake."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", ".", "pipe"):
        assert main(["inspect", str(tmp_path / name)]) == 2
        assert "file" in capsys.readouterr().err
