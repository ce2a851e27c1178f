"""What a conductor tells its children, and what they answer: a JSON object a line, on standard streams.

Only the standard library is imported here: a child may run under an interpreter without streamoff.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["orders", "read_order", "say"]


def read_order() -> dict[str, Any] | None:
    """Wait for the next order; None at the end of the input."""
    line = sys.stdin.readline()
    return dict(json.loads(line)) if line else None


def orders() -> Iterator[dict[str, Any]]:
    """Orders until the end of the input."""
    while (order := read_order()) is not None:
        yield order


def say(facts: dict[str, Any]) -> None:
    """Answer."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
