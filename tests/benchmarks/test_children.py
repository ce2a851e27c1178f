"""Conducted processes: orders and answers, and children that fail."""

import socket
import threading
from pathlib import Path

import pytest

from benchmarks import rawcopy
from benchmarks.__main__ import main
from benchmarks.children import Child, ChildError
from benchmarks.models import tensors_of
from streamoff.types import MIB


def test_a_child_that_ends_is_an_error_and_no_wait():
    """Whoever waits for a child that ended is told so, with its exit code."""
    with Child("orders", {}) as child, pytest.raises(ChildError, match="ended with exit code 0"):
        child.answer()


def test_a_child_that_fails_at_an_order_says_why():
    """An order that raises is an error at the conductor, and the child does not keep it waiting."""
    endpoint = {"address": "receiver", "listen": True, "dial": {}}
    with Child("peers", {"endpoints": [endpoint]}) as child:
        assert child.answer()["ports"]["receiver"] > 0
        with pytest.raises(ChildError, match="KeyError"):
            child.ask("serve", at="receiver", to=["nobody"])


@pytest.mark.parametrize("piece", [64 * 1024, rawcopy.WHOLE])
@pytest.mark.parametrize("to", ["file", "memory"])
def test_a_raw_copy_is_the_payload(tmp_path: Path, to, piece):
    """The yardstick moves every byte: what lands is the file that ours would land."""
    views = rawcopy.views_of(tensors_of("3", 9 * MIB))
    payload = b"".join(views)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = rawcopy.dial("127.0.0.1", listener.getsockname()[1], None)
        receiver = rawcopy.accept(listener, None)
    thread = threading.Thread(target=rawcopy.send, args=(sender, views, piece))
    with sender, receiver:
        thread.start()
        path = tmp_path / "raw.bin"
        copy: rawcopy.ToFile | rawcopy.ToMemory = (
            rawcopy.ToFile(receiver, len(payload), path)
            if to == "file"
            else rawcopy.ToMemory(receiver, len(payload))
        )
        copy.run()
        thread.join()
        landed = path.read_bytes() if isinstance(copy, rawcopy.ToFile) else copy.memory[:]
        copy.free()
    assert landed == payload
    assert not path.exists()


def test_only_some_suites_compare_with_another_program(monkeypatch, capsys):
    """An option that would have no effect is refused."""
    monkeypatch.setattr("sys.argv", ["benchmarks", "control", "--peer-python", "python"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "--peer-python goes with transfer and giant" in capsys.readouterr().err
