"""The scratch directory of a run: what must never be touched in it, and what must not stay."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from streamoff.scratch.lease import EXPIRY
from streamoff.scratch.names import RootName, Stage

__all__ = ["Scene"]

_ROOT: Final = "streamoff_tensor_offload_{}_0123456789abcdef"
_Print = tuple[object, ...]


class Scene:
    """A scratch directory with strangers in it.

    Args:
        place: An empty directory; ``place/scratch`` is the scratch directory, the rest lies outside.
    """

    def __init__(self, place: Path) -> None:
        self.scratch = place / "scratch"
        self.scratch.mkdir()
        self._outside = place / "precious"
        self.neighbours: set[str] = set()
        self._strangers = self._invite()
        self._before = self._prints()

    def _invite(self) -> frozenset[str]:
        """Other programs' files, roots without a lease or with a strange one, and links dressed as roots."""
        self._outside.mkdir()
        (self._outside / "model").write_bytes(b"precious" * 1000)
        (self.scratch / "pip-build-env").mkdir()
        (self.scratch / "notes.txt").write_text("not ours", encoding="utf-8")
        leaseless = self.scratch / _ROOT.format("leaseless")
        leaseless.mkdir()
        (leaseless / "payload.safetensors").write_bytes(bytes(5000))
        strange = self.scratch / _ROOT.format("strange")
        strange.mkdir()
        (strange / ".lease").write_text(json.dumps({"owner": "somebody else"}), encoding="utf-8")
        borrowed = self.scratch / _ROOT.format("borrowed")
        borrowed.mkdir()
        (borrowed / ".lease").symlink_to(strange / ".lease")
        (self.scratch / _ROOT.format("link")).symlink_to(self._outside)
        (self.scratch / f".gone-{_ROOT.format('link')}").symlink_to(self._outside)
        (self.scratch / f".gone-{_ROOT.format('file')}").write_bytes(b"a file is no directory")
        return frozenset(os.listdir(self.scratch))  # noqa: PTH208 - names

    def _prints(self) -> dict[str, _Print]:
        """All that can be seen of the strangers and of what lies outside."""
        found: dict[str, _Print] = {}
        for top in (*(self.scratch / name for name in sorted(self._strangers)), self._outside):
            for path in (top, *([] if top.is_symlink() else sorted(top.rglob("*")))):
                facts = path.lstat()
                content: object = None
                if path.is_symlink():
                    content = str(path.readlink())
                elif path.is_file():
                    content = path.read_bytes()
                found[str(path)] = (facts.st_mode, facts.st_ino, facts.st_mtime_ns, content)
        return found

    def check_strangers(self) -> None:
        """Make sure that nothing of them was changed, removed, or followed.

        Raises:
            AssertionError: It was.
        """
        now = self._prints()
        touched = {
            path for path in {*now, *self._before} if now.get(path) != self._before.get(path)
        }
        if touched:
            raise AssertionError(f"what is not ours was touched: {sorted(touched)}")

    def may_stay(self, path: Path) -> bool:
        """Whether an entry is a stranger's or a neighbour's, or was half made when its maker died."""
        return path.name in self._strangers | self.neighbours or self.half_made(path)

    @staticmethod
    def half_made(path: Path) -> bool:
        """Whether its maker died before it could write into a directory whose it was: it has ten minutes."""
        name = RootName.parse(path.name)
        made = name is not None and name.stage is Stage.NEW
        return made and not any(item.lstat().st_size for item in path.iterdir())

    def left(self) -> list[Path]:
        """What is there besides strangers and neighbours."""
        known = self._strangers | self.neighbours
        return sorted(path for path in self.scratch.iterdir() if path.name not in known)

    @staticmethod
    def nbytes(paths: list[Path]) -> int:
        """Disk space of the files in some directories."""
        files = [file for path in paths for file in path.rglob("*") if file.is_file()]
        return sum(file.lstat().st_blocks * 512 for file in files)

    @staticmethod
    def age(paths: list[Path]) -> None:
        """Let ten minutes pass for them."""
        past = time.time() - EXPIRY - 1
        for path in paths:
            for item in (*path.iterdir(), path):
                os.utime(item, (past, past))

    def command(self, action: str) -> Any:
        """Run ``streamoff scratch`` as its users do, and return its JSON."""
        command = [sys.executable, "-m", "streamoff", "scratch", action, "--json", "--scratch"]
        done = subprocess.run(
            [*command, str(self.scratch)], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)
