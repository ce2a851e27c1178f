"""Hosts in network namespaces of this machine, and cables between them with a speed."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

__all__ = ["cable", "congestion_controls", "hosts", "inside", "lack"]

BURST: Final = "64kb"
QUEUE: Final = "50ms"
"""What a cable holds before it drops."""
_CONGESTION: Final = Path("/proc/sys/net/ipv4")


def lack() -> str | None:
    """What keeps namespaces from being made here, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(["streamoff-probe"]):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


def congestion_controls() -> list[str]:
    """What TCP may use in a namespace of this machine to find out how fast a line is."""
    return sorted((_CONGESTION / "tcp_allowed_congestion_control").read_text().split())


@contextmanager
def hosts(names: Sequence[str], congestion: str | None = None) -> Iterator[list[str]]:
    """Make a namespace for each name; yield what they are called, for :func:`inside`.

    Args:
        names: Unique on this machine together with the number of the process.
        congestion: TCP's congestion control there; None: the kernel's default.
    """
    with ExitStack() as stack:
        made = [f"{name}-{os.getpid()}" for name in names]
        for name in made:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if congestion is not None:
                setting = f"echo {congestion} > {_CONGESTION / 'tcp_congestion_control'}"
                _run(*inside(name), "sh", "-c", setting)
        yield made


def inside(host: str) -> tuple[str, ...]:
    """What a command begins with to run in a host."""
    return ("ip", "netns", "exec", host)


def cable(one: str, other: str, net: int, rate: str | None = None) -> tuple[str, str]:
    """Connect two hosts, with a speed in both directions, such as ``20mbit``, or as fast as it goes.

    Returns:
        The addresses of both ends.
    """
    device = f"v{net}"
    _run("ip", "link", "add", device, "netns", one, "type", "veth", "peer", device, "netns", other)
    ends = (f"10.213.{net}.1", f"10.213.{net}.2")
    for host, address in zip((one, other), ends, strict=True):
        _run("ip", "-n", host, "address", "add", f"{address}/24", "dev", device)
        _run("ip", "-n", host, "link", "set", device, "up")
        if rate is not None:
            shape = ("tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
            _run("tc", "-n", host, "qdisc", "add", "dev", device, "root", *shape)
    return ends


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
