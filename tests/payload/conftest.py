"""Leak checks collect garbage around every test: what was there before the tests need not be walked each time."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> Iterator[None]:
    """Leave torch and everything else that was imported out of the collector while a module's tests run."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
