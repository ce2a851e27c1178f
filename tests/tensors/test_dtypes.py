"""The table of dtypes agrees with torch and with safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from streamoff.errors import UsageError
from streamoff.tensors.dtypes import FLOATING, ITEMSIZE, dtype_name, itemsize, torch_dtype
from streamoff.tensors.layout import plan


@pytest.mark.parametrize("name", ITEMSIZE)
def test_each_name_means_the_same_everywhere(name: str, tmp_path: Path) -> None:
    """Size and kind are torch's, and safetensors reads a file of ours as the same dtype."""
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    assert dtype.itemsize == itemsize(name)
    assert (dtype.is_floating_point or dtype.is_complex) == (name in FLOATING)
    layout = plan([("t", name, (3,))])
    path = tmp_path / "t"
    path.write_bytes(layout.header + bytes(layout.data_nbytes))
    with safe_open(path, "pt") as file:
        assert file.get_tensor("t").dtype == dtype


def test_every_dtype_that_safetensors_and_torch_share_is_listed() -> None:
    """No dtype that a safetensors file of torch's can hold is missing."""
    from safetensors.torch import _TYPES

    assert {name: torch_dtype(name) for name in _TYPES} == _TYPES


@pytest.mark.parametrize("dtype", [torch.complex128, torch.qint8, torch.complex32])
def test_other_dtypes_have_no_name(dtype: torch.dtype) -> None:
    """What safetensors lacks cannot travel."""
    assert dtype_name(dtype) is None


@pytest.mark.parametrize("ask", [itemsize, torch_dtype])
def test_unknown_names_are_refused(ask: object) -> None:
    """A name from nowhere is a usage error."""
    assert callable(ask)
    with pytest.raises(UsageError, match="not a dtype"):
        ask("F128")
