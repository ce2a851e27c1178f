"""NVFlare as a peer of the transfer suite: its tensor codec over its own TCP driver, between two processes.

It runs under the interpreter of ``--peer-python``, which has nvflare and torch; of streamoff only what needs
neither a package nor an event loop is imported. The receiver asks, as its own server does for a result, and the
answer's tensors are downloaded while it is decoded: into memory, or into files with tensor disk offload on.
"""

import json
import sys
from typing import Any

import nvflare
from nvflare.app_common.utils.tensor_disk_offload_context import (
    cleanup_tensor_disk_offload,
    setup_tensor_disk_offload,
)
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils import fobs

from benchmarks.meter import Meter
from benchmarks.models import tensors_of
from benchmarks.orders import orders, say
from streamoff.sim.memory import resident_bytes, warm_torch

CHANNEL, TOPIC = "benchmark", "model"
ADDRESSES = {"receiver": "server", "source": "site-1"}
TIMEOUT_SECONDS = 300.0


class Engine:
    """What its offload switch wants to know of an engine: the cell."""

    run_manager = None

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def get_cell(self) -> Any:
        """The cell whose downloads go to disk."""
        return self._cell


def receive(cell: Any, floor: int) -> None:
    """Pull the model when told to, and free it."""
    for order in orders():
        engine = Engine(cell)
        offload = setup_tensor_disk_offload(engine, order["mode"] == "disk")
        with Meter(floor) as meter:
            reply = cell.send_request(
                channel=CHANNEL,
                topic=TOPIC,
                target=ADDRESSES["source"],
                request=Message(payload={}),
                timeout=TIMEOUT_SECONDS,
            )
        if not isinstance(reply.payload, dict) or len(reply.payload["params"]) != order["tensors"]:
            say({"number": order["number"], "failed": f"no model came: {reply.headers}"})
            return
        del reply
        cleanup_tensor_disk_offload(engine, offload)
        say({"number": order["number"], **meter.spent.to_json()})


def serve(floor: int) -> None:
    """Measure between ``watch`` and ``rest``; the cell's threads do the rest."""
    for watch in orders():
        with Meter(floor) as meter:
            rest = next(orders())
        say({"number": watch["number"], **meter.spent.to_json()})
        say({"number": rest["number"]})


def main() -> None:
    """Play the part that the argument describes."""
    settings = json.loads(sys.argv[1])
    warm_torch()
    fobs.register(TensorDecomposer)
    place = f"tcp://127.0.0.1:{settings['port']}"
    cell = Cell(ADDRESSES[settings["role"]], place, secure=False, credentials={})
    model = tensors_of(*settings["model"]) if settings["role"] == "source" else {}
    if model:
        cell.register_request_cb(
            channel=CHANNEL, topic=TOPIC, cb=lambda _: Message(payload={"params": model})
        )
    cell.start()
    floor = resident_bytes()[1]
    say({"number": 0, "version": nvflare.__version__, "tensors": len(model)})
    if model:
        serve(floor)
    else:
        receive(cell, floor)
    cell.stop()


if __name__ == "__main__":
    main()
