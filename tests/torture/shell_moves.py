"""Messages with tensors between any two endpoints: taken, declined, ignored, withdrawn, given up, passed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import anyio
import torch

from streamoff.errors import StreamoffError, UnreachableError
from streamoff.payload.context import DecodeContext
from streamoff.payload.endpoint import Delivery, Message, Messages
from streamoff.runtime.jobs import Job, open_job
from streamoff.types import OutcomeStatus

from .shell_scenario import SERVER, Move, ShellScenario
from .shell_stage import JOB, Stage
from .shell_watch import WatchedEndpoint
from .tier import ViolationError

__all__ = ["Moves"]

PATIENCE: Final = 400.0
"""Seconds that a receiver waits for a message."""
RETRY_FOR: Final = 60.0
"""Seconds for which a sender tries to send."""


def tensors_of(number: int, move: Move) -> dict[str, torch.Tensor]:
    """What one move moves."""
    return {
        f"t{index}": torch.arange(move.elements, dtype=torch.float32) * (index + 1) + number
        for index in range(move.tensors)
    }


class Moves(Stage):
    """Each move is a task at its sender and one at its receiver."""

    def __init__(self, scenario: ShellScenario, scratch: Path) -> None:
        super().__init__(scenario, scratch)
        self._open = len(scenario.moves)
        self._done = anyio.Event()
        self.completed = 0
        if not self._open:
            self._done.set()

    def model_bytes(self) -> int:
        """What the largest move takes."""
        return max((4 * move.elements * move.tensors for move in self.scenario.moves), default=0)

    async def serve(self, server: WatchedEndpoint, job: Job) -> None:
        """Take part like a site, with the job's disk, until all moves have ended."""
        async with anyio.create_task_group() as group:
            self._start(-1, server, job, group.start_soon)
            with anyio.move_on_after(2000):
                await self._done.wait()
            group.cancel_scope.cancel()

    async def take_part(self, index: int, endpoint: WatchedEndpoint) -> None:
        """Send and receive until all moves have ended."""
        async with (
            open_job(JOB, endpoint, scratch=self.scratch) as job,
            anyio.create_task_group() as group,
        ):
            self.jobs.append(job)
            self._start(index, endpoint, job, group.start_soon)
            with anyio.move_on_after(2000):
                await self._done.wait()
            group.cancel_scope.cancel()

    def _start(
        self, index: int, endpoint: WatchedEndpoint, job: Job, spawn: Callable[..., object]
    ) -> None:
        for number, move in enumerate(self.scenario.moves):
            through = move.how == "pass"
            if index == (-1 if through else move.receiver):
                messages = endpoint.receive(f"move-{number}")
                spawn(self._receive, number, move, endpoint, job, messages)
            if through and index == move.receiver:
                messages = endpoint.receive(f"passed-{number}")
                spawn(self._receive_passed, number, move, job, messages)
            if move.sender == index:
                spawn(self._send, number, move, endpoint)
        self.ready(index)

    # --- the sender -----------------------------------------------------------------------------

    async def _send(self, number: int, move: Move, endpoint: WatchedEndpoint) -> None:
        try:
            with anyio.move_on_after(1500) as patience:
                await self._deliver(number, move, endpoint)
            if patience.cancelled_caught:
                raise ViolationError("a delivery that does not end", number, move)
        finally:
            self._open -= 1
            if not self._open:
                self._done.set()

    async def _deliver(self, number: int, move: Move, endpoint: WatchedEndpoint) -> None:
        await self.wait_ready()
        await anyio.sleep(move.starts)
        tree = {"number": number, "tensors": tensors_of(number, move)}
        through = move.how == "pass"
        target = SERVER if through else self.scenario.name(move.receiver)
        give_up_at = anyio.current_time() + RETRY_FOR
        delivery: Delivery | None = None
        while delivery is None:
            try:
                delivery = await endpoint.send(target, f"move-{number}", tree, pass_through=through)
            except UnreachableError:
                if anyio.current_time() > give_up_at:
                    return
                await anyio.sleep(0.5)
        if move.withdrawn is not None:
            await anyio.sleep(move.withdrawn)
            delivery.cancel("withdrawn")
        outcome = await delivery.wait()
        if outcome.status is OutcomeStatus.COMPLETED:
            self.completed += 1
        elif self._owed(move):
            raise ViolationError("a delivery that nothing happened to failed", outcome, move)

    def _owed(self, move: Move) -> bool:
        """Whether nothing happens that a delivery could fail of."""
        ends = [one for one in (move.sender, move.receiver) if one >= 0]
        untouched = not any(self.scenario.touched(index) for index in ends)
        at_all = self.scenario.endings or self.scenario.quota is not None
        return move.how in {"take", "pass"} and move.withdrawn is None and untouched and not at_all

    # --- the receiver ---------------------------------------------------------------------------

    async def _receive(
        self, number: int, move: Move, endpoint: WatchedEndpoint, job: Job, messages: Messages
    ) -> None:
        async def act(message: Message) -> None:
            match move.how:
                case "take":
                    await self._take(number, move, message, job)
                case "some":
                    await self._take(number, move, message, job, only={"t0"})
                case "decline":
                    message.decline("not wanted")
                case "give up":
                    with anyio.move_on_after(move.after):
                        await self._take(number, move, message, job)
                case "pass":
                    await anyio.sleep(move.after)
                    to = self.scenario.name(move.receiver)
                    await endpoint.send(to, f"passed-{number}", message.tree)
                case "ignore":
                    pass

        await self._with_message(messages, act)

    async def _receive_passed(self, number: int, move: Move, job: Job, messages: Messages) -> None:
        async def act(message: Message) -> None:
            await self._take(number, move, message, job)

        await self._with_message(messages, act)

    @staticmethod
    async def _with_message(messages: Messages, act: Callable[[Message], Awaitable[None]]) -> None:
        with messages, anyio.move_on_after(PATIENCE):
            message = await anext(messages, None)
            if message is None:
                return
            try:
                await act(message)
            except StreamoffError as error:
                message.decline(error.what)

    async def _take(
        self, number: int, move: Move, message: Message, job: Job, only: set[str] | None = None
    ) -> None:
        """End the refs and look at every value."""
        context = DecodeContext(tensors="disk" if move.disk else "memory", job=job)
        tree: dict[str, Any] = await message.resolve(context, only=only)
        for name, tensor in tensors_of(number, move).items():
            if only is not None and name not in only:
                continue
            there = tree["tensors"][name]
            there = there.materialize() if hasattr(there, "materialize") else there
            if not torch.equal(there, tensor):
                raise ViolationError("a payload that is not what was sent", number, name)
