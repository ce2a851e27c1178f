"""Messages with tensors between any two endpoints: taken, declined, ignored, withdrawn, given up, passed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

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


Act: TypeAlias = Callable[[Message], Awaitable[object]]


def tensors_of(number: int, move: Move) -> dict[str, torch.Tensor]:
    """What one move moves."""
    return {
        f"t{index}": torch.arange(move.elements, dtype=torch.float32) * (index + 1) + number
        for index in range(move.tensors)
    }


class Moves(Stage):
    """Each move is a task at its sender and one at each of its receivers."""

    def __init__(self, scenario: ShellScenario, scratch: Path) -> None:
        super().__init__(scenario, scratch)
        self._open = len(scenario.moves)
        self._done = anyio.Event()
        if not self._open:
            self._done.set()

    def model_bytes(self) -> int:
        """What the largest move takes."""
        return max((4 * move.elements * move.tensors for move in self.scenario.moves), default=0)

    async def serve(self, server: WatchedEndpoint, job: Job) -> None:
        """Take part like a site, with the job's disk, until all moves have ended."""
        await self._take_part(-1, server, job)

    async def take_part(self, index: int, endpoint: WatchedEndpoint) -> None:
        """Send and receive until all moves have ended."""
        async with open_job(JOB, endpoint, scratch=self.scratch, ram_backed="allow") as job:
            self.jobs.append(job)
            await self._take_part(index, endpoint, job)

    async def _take_part(self, index: int, endpoint: WatchedEndpoint, job: Job) -> None:
        async with anyio.create_task_group() as group:
            self._start(index, endpoint, job, group.start_soon)
            with anyio.move_on_after(2000):
                await self._done.wait()
            group.cancel_scope.cancel()

    def _start(
        self, index: int, endpoint: WatchedEndpoint, job: Job, spawn: Callable[..., object]
    ) -> None:
        """Read what comes here, then send: what is sent to a topic that nobody reads is refused."""
        for number, move in enumerate(self.scenario.moves):
            end = End(number, move, endpoint, job)
            through = move.how == "pass"
            if index in ((-1,) if through else move.receivers):
                spawn(self._with_message, end.read("move"), self._acting(end))
            if index == move.receiver and through:
                spawn(self._with_message, end.read("passed"), end.take)
            if index == move.sender and move.how == "again":
                spawn(self._with_messages, end.read("again"), end.take)
            if index == move.sender:
                spawn(self._send, end)
        self.ready(index)

    # --- the sender -----------------------------------------------------------------------------

    async def _send(self, end: End) -> None:
        await self.wait_ready()
        await anyio.sleep(end.move.starts)
        sender = self._send_from_below if end.move.below else self._deliver
        try:
            with anyio.move_on_after(1500) as patience:
                await sender(end)
            if patience.cancelled_caught:
                raise ViolationError("a delivery that does not end", end.number, end.move)
        finally:
            self._open -= 1
            if not self._open:
                self._done.set()

    async def _send_from_below(self, owner: End) -> None:
        """Send from an endpoint below, which may die: its owner tells everybody who might pull."""
        name = f"{owner.endpoint.address}.trainer-{owner.number}"
        sent = anyio.Event()

        async def die() -> None:
            await sent.wait()
            assert owner.move.dies is not None
            await anyio.sleep(owner.move.dies)
            self.network.kill(name)

        options = self.options(owner.move.sender)
        with self.network.life(name) as life:
            async with (
                WatchedEndpoint(name, self.watch, **options) as trainer,
                anyio.create_task_group() as group,
            ):
                await self.connect(trainer, owner.endpoint.address)
                if owner.move.dies is not None:
                    group.start_soon(die)
                await self._deliver(replace(owner, endpoint=trainer), sent)
                group.cancel_scope.cancel()
        if life.cancelled_caught and sent.is_set():
            await self._notify(owner, name)

    async def _notify(self, owner: End, dead: str) -> None:
        """Tell that a source is dead; whoever knows pulls from it no more."""
        refs = [
            ref
            for one in self.watch.published
            if one.endpoint == dead
            for ref in one.transaction.record.refs
        ]
        targets = self._targets(owner.move)
        if owner.move.how == "pass":
            targets.append(self.scenario.name(owner.move.receiver))
        told = await owner.endpoint.notify_failure(targets, dead, refs, "exit code 137")
        for pulled in self.watch.pulled:
            knows = told.get(pulled.endpoint) == "" and pulled.transfer.ref.source == dead
            if knows and not pulled.transfer.record.ended:
                raise ViolationError("pulled from a source that is known to be dead", dead)

    def _targets(self, move: Move) -> list[str]:
        if move.how == "pass":
            return [SERVER]
        return [self.scenario.name(index) for index in move.receivers]

    async def _deliver(self, end: End, sent: anyio.Event | None = None) -> None:
        move = end.move
        tensors = tensors_of(end.number, move)
        tree = {"number": end.number, "tensors": tensors}
        delivery = await self._sent(end, self._targets(move), tree)
        if sent is not None:
            sent.set()
        if delivery is None:
            return
        if move.snapshot:
            for tensor in tensors.values():
                tensor.fill_(-1.0)
        if move.withdrawn is not None:
            await anyio.sleep(move.withdrawn)
            delivery.cancel("withdrawn")
        outcome = await delivery.wait()
        if outcome.status is not OutcomeStatus.COMPLETED and self._owed(move):
            raise ViolationError("a delivery that nothing happened to failed", outcome, move)

    @staticmethod
    async def _sent(end: End, targets: list[str], tree: dict[str, Any]) -> Delivery | None:
        """Send, and try again while there is no way; None if that lasts, or it cannot be sent."""
        move, give_up_at = end.move, anyio.current_time() + RETRY_FOR
        while True:
            try:
                return await end.endpoint.send(
                    targets,
                    f"move-{end.number}",
                    tree,
                    pass_through=move.how == "pass",
                    snapshot=end.job if move.snapshot else None,
                )
            except UnreachableError:
                if anyio.current_time() > give_up_at:
                    return None
                await anyio.sleep(0.5)
            except StreamoffError:
                return None

    def _owed(self, move: Move) -> bool:
        """Whether nothing happens that a delivery could fail of."""
        ends = [one for one in (move.sender, *move.receivers) if one >= 0]
        untouched = not any(self.scenario.touched(index) for index in ends)
        whole = move.how in {"take", "pass", "again"} and move.withdrawn is move.dies is None
        return whole and untouched and not self.scenario.troubled

    # --- the receivers --------------------------------------------------------------------------

    def _acting(self, end: End) -> Act:
        """What a receiver does with a move."""
        move = end.move

        async def act(message: Message) -> None:
            match move.how:
                case "take":
                    await end.take(message)
                case "some":
                    await end.take(message, only={"t0"})
                case "decline":
                    message.decline("not wanted")
                case "give up":
                    with anyio.move_on_after(move.after):
                        await end.take(message)
                case "pass":
                    await anyio.sleep(move.after)
                    to = self.scenario.name(move.receiver)
                    await end.endpoint.send(to, f"passed-{end.number}", message.tree)
                case "again":
                    await end.send_back(message, self.scenario.name(move.sender))
                case "ignore":
                    pass

        return act

    async def _with_message(self, messages: Messages, act: Act) -> None:
        with messages, anyio.move_on_after(PATIENCE):
            await self._next(messages, act)

    async def _with_messages(self, messages: Messages, act: Act) -> None:
        """As :meth:`_with_message`, for what several receivers send."""
        with messages, anyio.move_on_after(PATIENCE):
            while True:
                await self._next(messages, act)

    @staticmethod
    async def _next(messages: Messages, act: Act) -> None:
        message = await anext(messages, None)
        if message is None:
            await anyio.sleep_forever()
            return
        try:
            await act(message)
        except StreamoffError as error:
            message.decline(error.what)


@dataclass(frozen=True, slots=True)
class End:
    """One end of a move: whose it is, and where tensors land there."""

    number: int
    move: Move
    endpoint: WatchedEndpoint
    job: Job

    def read(self, topic: str) -> Messages:
        """Read a topic of this move from now on."""
        return self.endpoint.receive(f"{topic}-{self.number}")

    async def take(self, message: Message, only: set[str] | None = None) -> dict[str, Any]:
        """End the refs and look at every value."""
        where: Any = "disk" if self.move.disk or self.move.how == "again" else "memory"
        context = DecodeContext(tensors=where, job=self.job)
        tree: dict[str, Any] = await message.resolve(context, only=only)
        for name, tensor in tensors_of(self.number, self.move).items():
            if only is not None and name not in only:
                continue
            there = tree["tensors"][name]
            there = there.materialize() if hasattr(there, "materialize") else there
            if not torch.equal(there, tensor):
                raise ViolationError("a payload that is not what was sent", self.number, name)
        return tree

    async def send_back(self, message: Message, to: str) -> None:
        """Land it on disk, and serve it from there to whom it came from."""
        tree = await self.take(message)
        delivery = await self.endpoint.send(to, f"again-{self.number}", tree)
        await delivery.wait()
