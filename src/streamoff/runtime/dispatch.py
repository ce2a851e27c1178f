"""Dispatch: what becomes of a frame that came, and of what was under way when a link comes or goes."""

from __future__ import annotations

import logging

from streamoff.errors import PeerError, StreamoffError, UnexpectedMessageError
from streamoff.runtime.downloads import Downloads
from streamoff.runtime.link import Inbound, LinkDriver, Placement
from streamoff.runtime.links import Behind, Links
from streamoff.runtime.messages import Mailbox
from streamoff.runtime.notices import Notifier
from streamoff.runtime.publishing import Publisher
from streamoff.runtime.relay import Relay
from streamoff.runtime.sparing import Lines
from streamoff.types import Address
from streamoff.wire.frames import (
    Ack,
    AckOf,
    Cancel,
    Chunk,
    Confirm,
    Error,
    FrameType,
    Hold,
    Message,
    Notice,
    Open,
    Opened,
    Pull,
    Routed,
    Unreachable,
)
from streamoff.wire.routes import forwarded, may_speak

__all__ = ["Dispatcher"]

logger = logging.getLogger("streamoff.endpoint")


class Dispatcher:
    """Takes every frame of one endpoint to whom it is for; see :class:`streamoff.runtime.links.Traffic`.

    Args:
        links: Over which frames come, and go on.
        publisher: Serves.
        downloads: Pull.
        mailbox: Exchanges messages.
        notifier: Waits for answers to its failure notices.
        relay: Sends on what is for others.
        lines: The endpoint's log.
    """

    def __init__(
        self,
        *,
        links: Links,
        publisher: Publisher,
        downloads: Downloads,
        mailbox: Mailbox,
        notifier: Notifier,
        relay: Relay,
        lines: Lines,
    ) -> None:
        self._me = links.me
        self._links = links
        self._publisher = publisher
        self._downloads = downloads
        self._mailbox = mailbox
        self._notifier = notifier
        self._relay = relay
        self._lines = lines
        self.ignored = 0
        """Frames that made no sense, of endpoints that are no neighbours; for reading."""

    # --- links ------------------------------------------------------------------------------------

    def peer_restarted(self, peer: Address) -> None:
        """A new instance of an address is there: slots and downloads of the old one are over."""
        self._publisher.peer_restarted(peer)
        self._downloads.source_restarted(peer)

    def link_replaced(self, behind: Behind) -> None:
        """What was under way on a link is lost; the newer one is about to be there."""
        self._downloads.link_lost(behind)
        self._relay.lost(behind)

    def link_found(self, behind: Behind) -> None:
        """What waited for a link goes on."""
        self._mailbox.repeat(behind)
        self._downloads.link_restored(behind)

    def link_lost(self, behind: Behind) -> None:
        """What was under way on a link is lost; some of it has another way, and goes on at once."""
        can_reach = self._links.can_reach
        self._relay.lost(lambda address: not can_reach(address))
        self._downloads.link_lost(behind)
        self._downloads.link_restored(lambda source: behind(source) and can_reach(source))
        self._mailbox.repeat(behind)

    # --- frames -----------------------------------------------------------------------------------

    def place(self, driver: LinkDriver, chunk: Chunk) -> Placement | None:
        """Where a chunk is received that may come, is for a transfer of ours, and was asked for."""
        mine = chunk.to == self._me
        if not mine or not may_speak(
            chunk.sender, me=self._me, uplink=driver.uplink, peers=driver.peers
        ):
            return None
        transfer = self._downloads.of(chunk.stream, chunk.sender)
        return None if transfer is None else transfer.place(chunk)

    def dispatch(self, driver: LinkDriver, inbound: Inbound) -> None:
        """Take one frame. A neighbour that talks nonsense loses its link; one behind it is not heard."""
        frame = inbound.frame
        assert isinstance(frame, Routed)
        if not may_speak(frame.sender, me=self._me, uplink=driver.uplink, peers=driver.peers):
            inbound.release()
            what = "a link spoke for somebody else"
            self._drop(driver, UnexpectedMessageError(what, expected=driver.peer, got=frame.sender))
            return
        if frame.to != self._me:
            self._forward(driver, frame, inbound)
            return
        try:
            self._handle(driver, frame, inbound)
        except PeerError as error:
            if frame.sender == driver.peer:
                self._drop(driver, error)
            else:
                self.ignored += 1
                self._warn("frame ignored", "%s ignores %s: %s", frame.sender, error)

    def _forward(self, driver: LinkDriver, frame: Routed, inbound: Inbound) -> None:
        """Send a frame of others on its way, or say that there is none."""
        onward = forwarded(frame)
        if onward is None or self._links.way(frame.to, came_from=driver.peer) is None:
            inbound.release()
            self._relay.unreachable(frame)
        else:
            self._relay.forward(onward, inbound, driver.peer)

    def _drop(self, driver: LinkDriver, error: StreamoffError) -> None:
        self._warn("link dropped", "%s drops the link to %s: %s", driver.peer, error)
        driver.lose(error)

    def _warn(self, kind: str, text: str, about: Address, error: StreamoffError) -> None:
        self._lines.tell(logger, logging.WARNING, kind, text, self._me, about, error)

    def _handle(self, driver: LinkDriver, frame: Routed, inbound: Inbound) -> None:  # noqa: C901, PLR0912 - a dispatch
        match frame:
            case Chunk():
                transfer = self._downloads.of(frame.stream, frame.sender)
                if transfer is None:
                    inbound.release()
                else:
                    transfer.on_chunk(inbound)
            case Open():
                self._publisher.on_open(frame)
            case Pull():
                self._publisher.on_pull(frame)
            case Hold():
                self._publisher.on_hold(frame)
            case Confirm():
                self._publisher.on_confirm(frame)
            case Cancel():
                self._publisher.on_cancel(frame)
            case Opened():
                if transfer := self._downloads.of(frame.stream, frame.sender):
                    transfer.on_opened(frame)
            case Message():
                instance = self._links.instance(frame.sender)
                self._mailbox.on_message(frame, instance, driver.peers, uplink=driver.uplink)
            case Ack():
                self._on_ack(frame)
            case Error():
                self._on_error(frame)
            case Unreachable():
                self._on_unreachable(driver, frame)
            case Notice():
                self._downloads.on_notice(frame)
            case _:
                raise UnexpectedMessageError("a frame nobody handles", got=type(frame).__name__)

    def _on_ack(self, frame: Ack) -> None:
        if frame.of is AckOf.MESSAGE:
            self._mailbox.on_acked(frame.sender, frame.id)
        elif frame.of is AckOf.NOTICE:
            self._notifier.on_acked(frame.sender, frame.id)
        elif transfer := self._downloads.of(frame.id, frame.sender):
            transfer.on_acked()

    def _on_error(self, frame: Error) -> None:
        if frame.of is FrameType.MESSAGE:
            why = f"{frame.code.value}: {frame.detail}"
            self._mailbox.on_refused(frame.sender, frame.id, why)
        elif frame.of is FrameType.NOTICE:
            why = f"{frame.code.value}: {frame.detail}" if frame.detail else frame.code.value
            self._notifier.on_rejected(frame.sender, frame.id, why)
        elif transfer := self._downloads.of(frame.id, frame.sender):
            transfer.on_error(frame)

    def _on_unreachable(self, driver: LinkDriver, frame: Unreachable) -> None:
        """The way ends somewhere; only who is on it can know."""
        if self._links.way(frame.address) is not driver:
            return
        if frame.of is FrameType.MESSAGE:
            self._mailbox.on_refused(frame.address, frame.about, f"{frame.address} is unreachable")
        elif frame.of is FrameType.NOTICE:
            self._notifier.on_unreachable(frame.address, frame.about)
        elif transfer := self._downloads.of(frame.about, frame.address):
            transfer.unreachable()
