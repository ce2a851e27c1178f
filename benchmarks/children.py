"""Processes of their own that a suite conducts: it tells them what to do and reads what they measured."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["Child", "ChildError"]

REPOSITORY: Final = Path(__file__).parents[1]
PATIENCE_SECONDS: Final = 300.0
"""An order that takes longer has failed."""
END_SECONDS: Final = 30.0
READ_BYTES: Final = 64 * 1024


class ChildError(RuntimeError):
    """A child ended, or did not answer."""


class Child:
    """A module of this package that runs in a process of its own and takes orders.

    Args:
        module: Its name in this package.
        settings: Passed as its only argument, as JSON.
        python: Interpreter.
        prefix: Words before it, such as ``("ip", "netns", "exec", "host")``.
        environment: Added to this process's.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        python: str = sys.executable,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._numbers = count(1)
        self._pending = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._process = subprocess.Popen(
            [*prefix, python, "-m", f"benchmarks.{module}", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
        )

    def order(self, what: str, **facts: Any) -> int:
        """Tell it to do something, and do not wait.

        Returns:
            The number by which :meth:`answer` knows it.

        Raises:
            ChildError: It has ended.
        """
        number = next(self._numbers)
        line = json.dumps({"what": what, "number": number, **facts}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError as error:
            raise self._ended() from error
        return number

    def answer(self, number: int = 0) -> dict[str, Any]:
        """Wait for what it says about an order; 0: that it is ready.

        Raises:
            ChildError: It failed, has ended, or says nothing for :data:`PATIENCE_SECONDS`.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        while number not in self._answers:
            said = json.loads(self._line(until))
            if "failed" in said:
                raise ChildError(f"{self._module} failed: {said['failed']}")
            self._answers[said.pop("number")] = said
        return self._answers.pop(number)

    def ask(self, what: str, **facts: Any) -> dict[str, Any]:
        """Tell it to do something and wait for what it says; raises as :meth:`answer`."""
        return self.answer(self.order(what, **facts))

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self._process.kill()

    def _line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise ChildError(f"{self._module} did not answer in {PATIENCE_SECONDS:g} s")
            got = os.read(pipe, READ_BYTES)
            if not got:
                raise self._ended()
            self._pending += got
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _ended(self) -> ChildError:
        code = self._process.wait(END_SECONDS)
        return ChildError(f"{self._module} ended with exit code {code}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End its input, which ends it; kill it if not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
