"""Large libraries are loaded once and taken out of the garbage collector's rounds: every test collects."""

import gc

import hypothesis  # noqa: F401 - it looks for referrers while it loads, which freezing hides
import torch  # noqa: F401 - its tens of thousands of objects are what is frozen

gc.collect()
gc.freeze()
