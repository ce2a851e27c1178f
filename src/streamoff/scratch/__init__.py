"""Job-root directories on disk: names, leases, quota, removal; no event loop and no torch."""

import sys

if sys.platform == "win32":
    raise ImportError(
        "streamoff keeps landed tensors in leased directories, which needs POSIX file locks and "
        "directory descriptors; Windows is not supported, use Linux (WSL will do)"
    )
