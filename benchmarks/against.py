"""Another program that moves the same model: NVFlare, under an interpreter of its own."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import streamoff
from benchmarks.children import Child
from benchmarks.pairs import Sample
from benchmarks.peers import LOOPBACK

__all__ = ["Peer", "peer"]

SOURCES: Final = Path(streamoff.__file__).parents[1]


class Peer:
    """Its source and its receiver, at work.

    Args:
        source: Its process.
        receiver: Its process.
        name: With version.
        tensors: Their number.
    """

    def __init__(self, source: Child, receiver: Child, name: str, tensors: int) -> None:
        self.name = name
        self._source = source
        self._receiver = receiver
        self._tensors = tensors

    def transfer(self, mode: str) -> Sample:
        """One transfer to memory or to disk."""
        watched = self._source.order("watch")
        got = self._receiver.ask("pull", mode=mode, tensors=self._tensors)
        self._source.ask("rest")
        return Sample.of(got, self._source.answer(watched))


@contextmanager
def peer(python: str, scratch: Path, shapes: str, nbytes: int) -> Iterator[Peer]:
    """Start both processes; what they land goes below ``scratch``."""
    port = _free_port()
    environment = {"PYTHONPATH": str(SOURCES), "TMPDIR": str(scratch)}

    def child(role: str) -> Child:
        settings = {"role": role, "port": port, "model": (shapes, nbytes)}
        return Child("nvflare_peer", settings, python=python, environment=environment)

    with child("receiver") as receiver:
        version = receiver.answer()["version"]
        with child("source") as source:
            tensors = source.answer()["tensors"]
            yield Peer(source, receiver, f"NVFlare {version}", tensors)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
