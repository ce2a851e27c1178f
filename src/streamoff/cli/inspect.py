"""``streamoff inspect``: what a safetensors file holds, without loading torch or a tensor."""

import argparse
import json
import stat
from collections import Counter
from pathlib import Path

from streamoff.cli.exits import ExitCode
from streamoff.errors import UsageError
from streamoff.sim.sizes import format_size
from streamoff.sim.tables import aligned, printable
from streamoff.tensors.layout import Layout
from streamoff.tensors.reader import read_layout

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print the layout of ``args.file``.

    Raises:
        UsageError: There is no such file, or it cannot be read.
        HeaderError: It is not a safetensors file.
        LimitError: Its header is larger than any that is accepted.
        IntegrityError: Its data section is too short or too long.
    """
    path: Path = args.file
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            raise UsageError("not a file", path=path)
        layout = read_layout(path)
    except OSError as error:
        raise UsageError(f"cannot read the file: {error.strerror}", path=path) from error
    print(json.dumps(_as_json(path, layout), indent=2) if args.json else _as_text(path, layout))
    return ExitCode.OK


def _as_json(path: Path, layout: Layout) -> dict[str, object]:
    return {
        "path": str(path),
        "bytes": layout.size,
        "header_bytes": layout.data_start,
        "metadata": dict(layout.metadata),
        "tensors": [
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "bytes": spec.nbytes,
                "data_offsets": [spec.start, spec.stop],
            }
            for spec in layout.specs
        ],
    }


def _as_text(path: Path, layout: Layout) -> str:
    rows = [["tensor", "dtype", "shape", "size"]] + [
        [printable(spec.name), spec.dtype, _shape(spec.shape), format_size(spec.nbytes)]
        for spec in layout.specs
    ]
    dtypes = Counter(spec.dtype for spec in layout.specs)
    elements = sum(spec.numel for spec in layout.specs)
    lines = [
        *aligned(rows, left=frozenset({0, 1, 2})),
        "",
        f"{printable(str(path))}: {format_size(layout.size)} ({layout.size:,} bytes)",
        f"{len(layout.specs):,} tensors, {elements:,} elements: "
        + (", ".join(f"{count:,} {dtype}" for dtype, count in dtypes.most_common()) or "none"),
    ]
    lines += [f"tied: {printable(a)} = {printable(b)}" for a, b in layout.aliases.items()]
    lines += [
        f"metadata: {printable(key)} = {printable(value)}" for key, value in layout.metadata.items()
    ]
    return "\n".join(lines)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
