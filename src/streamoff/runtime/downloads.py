"""The downloads of an endpoint: begun, found again by what comes for them, and told what befalls their source."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio

from streamoff.errors import SourceFailedError, UnreachableError
from streamoff.machines.notice import NoticeBook
from streamoff.runtime.downloading import Terms, Transfer, Wire
from streamoff.runtime.links import Behind, Links
from streamoff.runtime.resources import Resources
from streamoff.runtime.timers import Timers
from streamoff.tensors.state import State
from streamoff.types import Address, Capability, Ref
from streamoff.wire.codec import encode
from streamoff.wire.frames import Ack, AckOf, Notice, Open
from streamoff.wire.limits import Limits

__all__ = ["Downloads"]


class Downloads:
    """What one endpoint pulls, and the sources of which it has heard that they are dead.

    Args:
        links: The ways to the sources.
        capabilities: What this end names to them.
        limits: Of what it sends.
        resources: Of this event loop.
        timers: The endpoint's clock.
    """

    def __init__(
        self,
        *,
        links: Links,
        capabilities: frozenset[Capability],
        limits: Limits,
        resources: Resources,
        timers: Timers,
    ) -> None:
        self.wire = Wire(links.me, links.send)
        self.notices = NoticeBook()
        self._links = links
        self._capabilities = capabilities
        self._limits = limits
        self._resources = resources
        self._timers = timers
        self._transfers: set[Transfer] = set()

    def __len__(self) -> int:
        return len(self._transfers)

    def prepare(self, ref: Ref, terms: Terms) -> Transfer:
        """Prepare a download; :meth:`run` runs it.

        Raises:
            SourceFailedError: The owner of the source has said that it is dead. Nothing was sent.
            UnreachableError: There is no way to the source.
            LimitError, UsageError: The names wanted cannot be asked for.
        """
        reason = self.notices.reason(anyio.current_time(), ref.source, ref.id)
        if reason is not None:
            raise _source_failed(ref, reason)
        way = self._links.way(ref.source)
        if way is None:
            raise UnreachableError("no way to the source", site=ref.source, ref=ref.id)
        if terms.names is not None:
            self._check_names(ref, tuple(terms.names))
        direct = way.peer == ref.source
        return Transfer(
            ref,
            terms,
            mine=self._capabilities,
            theirs=way.accepted.capabilities if direct else None,
            resources=self._resources,
            timers=self._timers,
            wire=self.wire,
            chunk=way.accepted.limits.chunk,
        )

    def _check_names(self, ref: Ref, names: tuple[str, ...]) -> None:
        """Refuse here what the link would refuse to carry."""
        request = Open(
            to=ref.source,
            sender=self._links.me,
            stream=0,
            ref=ref.id,
            ticket=ref.ticket,
            names=names,
        )
        encode(request, self._limits)

    async def run(self, transfer: Transfer, spawn: Callable[..., object]) -> State:
        """Run a transfer in a task of ``spawn`` and wait for it.

        Raises:
            TransferError: How it ended, if it did not bring the payload.

        Cancellation: cancels the transfer, waits until nothing of it is left, then goes on.
        """
        spawn(self._run, transfer)
        self._transfers.add(transfer)
        transfer.begin()
        try:
            await transfer.closed.wait()
        except BaseException:
            transfer.cancel("the receiver was cancelled")
            with anyio.CancelScope(shield=True):
                await transfer.closed.wait()
            transfer.release()
            raise
        return transfer.result()

    async def _run(self, transfer: Transfer) -> None:
        try:
            await transfer.run()
        finally:
            self._transfers.discard(transfer)

    def of(self, stream: int, source: Address) -> Transfer | None:
        """The transfer of a stream, if it is the source who speaks."""
        transfer = self.wire.streams.get(stream)
        return transfer if transfer is not None and transfer.ref.source == source else None

    # --- what befalls their sources ---------------------------------------------------------------

    def on_notice(self, frame: Notice) -> None:
        """The owner of sources says that they are dead: their downloads end, and later ones do not begin."""
        now = anyio.current_time()
        dead = set(self.notices.enter(now, frame.sender, frame.source, frame.refs, frame.reason))
        for transfer in tuple(self._transfers):
            if (transfer.ref.source, transfer.ref.id) in dead:
                transfer.fail(_source_failed(transfer.ref, frame.reason))
        self._links.send(Ack(to=frame.sender, sender=self._links.me, of=AckOf.NOTICE, id=frame.id))

    def source_restarted(self, source: Address) -> None:
        """A new instance of the address knows nothing of what the old one served."""
        for transfer in tuple(self._transfers):
            if transfer.ref.source == source:
                transfer.fail(SourceFailedError("the source restarted", site=source))

    def link_lost(self, behind: Behind) -> None:
        """What is pulled from behind a link waits for a way."""
        for transfer in self._from(behind):
            transfer.link_lost()

    def link_restored(self, behind: Behind) -> None:
        """There is a way to what is pulled from behind a link."""
        for transfer in self._from(behind):
            transfer.link_restored()

    def _from(self, behind: Behind) -> Iterable[Transfer]:
        return tuple(one for one in self._transfers if behind(one.ref.source))

    # --- the way out ------------------------------------------------------------------------------

    def cancel(self, why: str) -> None:
        """Give all of them up. Does not block."""
        for transfer in tuple(self._transfers):
            transfer.cancel(why)

    async def ended(self) -> None:
        """Wait until nothing is left of any of them; the caller bounds it."""
        for transfer in tuple(self._transfers):
            await transfer.closed.wait()


def _source_failed(ref: Ref, reason: str) -> SourceFailedError:
    return SourceFailedError(f"the source failed: {reason}", site=ref.source, ref=ref.id)
