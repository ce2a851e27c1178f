"""Running the command as its users do."""

import subprocess
import sys
from pathlib import Path

__all__ = ["streamoff"]


def streamoff(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m streamoff`` to its end and return its exit code, output and errors."""
    return subprocess.run(
        [sys.executable, "-m", "streamoff", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
    )
