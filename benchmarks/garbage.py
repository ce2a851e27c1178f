"""What the garbage collector looks through while something is measured."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["garbage_is_new"]


@contextmanager
def garbage_is_new() -> Iterator[None]:
    """Keep the collector from what is here already: what was imported, or set up, is no garbage.

    A full search looks at every object of torch, 0.1 s each time; a long-running server does well to do the same.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
