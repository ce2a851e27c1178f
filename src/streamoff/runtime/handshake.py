"""The handshake of a link: hello out, hello in, and a verdict, within ten seconds or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

from streamoff.errors import HandshakeError
from streamoff.runtime.link import Inbound, Link
from streamoff.types import Address
from streamoff.wire.frames import Error, ErrorCode, Frame, FrameType, Hello
from streamoff.wire.handshake import Accepted
from streamoff.wire.limits import clip

__all__ = ["HANDSHAKE_SECONDS", "shake_hands"]

HANDSHAKE_SECONDS: Final = 10.0


async def shake_hands(
    link: Link, mine: Hello, judge: Callable[[Hello], Accepted], *, dialled: Address | None
) -> tuple[Hello, Accepted]:
    """Agree with the peer on what the link may carry; who dialled speaks first.

    The end that was dialled does not say its hello here: it does so when the link is in service, so that who
    hears it finds it there. If it refuses, it says why instead.

    Args:
        link: Just opened. Closed unless this returns.
        mine: The hello of this end.
        judge: Decides on the hello of the peer; raises :class:`HandshakeError` to refuse it.
        dialled: The address that this end dialled; None: the peer dialled.

    Returns:
        The hello of the peer, and what both agreed on.

    Raises:
        HandshakeError: The two cannot work together, or the peer says nothing.
        LinkLostError: The link went meanwhile.
    """
    try:
        with anyio.fail_after(HANDSHAKE_SECONDS):
            if dialled is not None:
                await _say(link, mine)
            theirs = _expect_hello(await link.receive())
            try:
                accepted = judge(theirs)
            except HandshakeError as error:
                if dialled is None:
                    await _say(link, _refusal(mine, theirs, error))
                raise
    except TimeoutError as error:
        await _drop(link)
        raise HandshakeError(
            "no hello", expected=f"one within {HANDSHAKE_SECONDS:g} s", peer=dialled
        ) from error
    except BaseException:
        await _drop(link)
        raise
    link.agree(accepted.limits)
    return theirs, accepted


def _expect_hello(inbound: Inbound) -> Hello:
    frame = inbound.frame
    inbound.release()
    if isinstance(frame, Error) and frame.of is FrameType.HELLO:
        raise HandshakeError(f"refused by the peer: {frame.detail}", peer=frame.sender)
    if not isinstance(frame, Hello):
        raise HandshakeError("the first frame", expected="hello", got=type(frame).__name__)
    return frame


def _refusal(mine: Hello, theirs: Hello, error: HandshakeError) -> Frame:
    """Why not; a peer of another version understands my hello, if anything."""
    if theirs.version != mine.version:
        return mine
    return Error(
        to=theirs.address,
        sender=mine.address,
        of=FrameType.HELLO,
        id=0,
        code=ErrorCode.REFUSED,
        detail=clip(str(error)),
    )


async def _say(link: Link, frame: Frame) -> None:
    await link.send(frame, lambda: iter(()))


async def _drop(link: Link) -> None:
    with anyio.CancelScope(shield=True):
        await link.aclose()
