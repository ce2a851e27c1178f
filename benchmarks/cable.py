"""A cable to be cut: a process between two unix sockets. Killed, it takes with it what was on the way."""

import json
import socket
import sys
import threading
from collections.abc import Mapping

from benchmarks.orders import read_order, say

PIECE_BYTES = 256 * 1024


def carry(source: socket.socket, sink: socket.socket) -> None:
    """Move bytes one way until either end is closed."""
    buffer = bytearray(PIECE_BYTES)
    try:
        while got := source.recv_into(buffer):
            sink.sendall(memoryview(buffer)[:got])
    except OSError:
        pass
    sink.close()


def lie(settings: Mapping[str, str]) -> None:
    """Accept one connection, dial the other end, and carry both ways until the input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(settings["here"])
    listener.listen(1)
    say({"number": 0})
    near, _ = listener.accept()
    listener.close()
    far = socket.socket(socket.AF_UNIX)
    far.connect(settings["there"])
    for ends in ((near, far), (far, near)):
        threading.Thread(target=carry, args=ends, daemon=True).start()
    read_order()


if __name__ == "__main__":
    lie(json.loads(sys.argv[1]))
