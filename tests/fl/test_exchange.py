"""The exchange format setting."""

from __future__ import annotations

import pytest

from streamoff.errors import UsageError
from streamoff.fl.exchange import ExchangeFormat


@pytest.mark.parametrize("text", ["pytorch", "PYTORCH", " PyTorch ", ExchangeFormat.PYTORCH])
def test_names_are_read_in_any_case(text):
    """A format is known by its name, however it is written."""
    assert ExchangeFormat.of(text) is ExchangeFormat.PYTORCH


@pytest.mark.parametrize("value", ["torch", "", None, 1, True, b"numpy"], ids=repr)
def test_anything_else_is_refused_with_the_setting(value):
    """The message names the setting that holds the value."""
    with pytest.raises(UsageError, match="aggregation_format"):
        ExchangeFormat.of(value, "aggregation_format")


def test_only_arrays_warn_about_offload():
    """NumPy arrays cannot land on disk; the warning says what to set."""
    warning = ExchangeFormat.NUMPY.offload_warning("aggregation_format")
    assert warning is not None
    assert "aggregation_format='pytorch'" in warning
    assert ExchangeFormat.PYTORCH.offload_warning() is None
