"""Every error streamoff raises, grouped by who must act.

Facts are keyword-only attributes; the message is built from them in one place, says what was expected,
what came, and where, and every error survives pickling. Errors of other libraries are mapped once, at
the edge, with ``from``.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import ClassVar, Self

__all__ = [
    "AggregationError",
    "ContributionRejectedError",
    "DrainError",
    "DtypeError",
    "GoneError",
    "HandshakeError",
    "HeaderError",
    "IntegrityError",
    "InvariantError",
    "JobClosedError",
    "JobExistsError",
    "LandingError",
    "LimitError",
    "LinkLostError",
    "MalformedFrameError",
    "NoSpaceError",
    "PeerError",
    "PeerRefusedError",
    "QuorumLostError",
    "QuotaExceededError",
    "ScratchError",
    "SingleConsumerError",
    "SourceChangedError",
    "SourceFailedError",
    "SourceLostError",
    "SpecMismatchError",
    "StreamoffError",
    "TransferError",
    "TransferTimeoutError",
    "TruncatedFileError",
    "UnexpectedMessageError",
    "UnreachableError",
    "UnsupportedTensorError",
    "UnsupportedValueError",
    "UsageError",
    "WeightError",
]


class StreamoffError(Exception):
    """Root of all errors raised by streamoff.

    Args:
        what: What happened, in one clause.
        expected: What the check wanted, if it is a check that failed.
        got: What came instead.
        hint: What the reader can do.
        story: The recent transitions of the machine involved, oldest first.
        where: Any of ``site``, ``job``, ``ref``, ``tensor``, ``path`` and other small facts.
    """

    advice: ClassVar[str | None] = None

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
        story: tuple[str, ...] = (),
        **where: object,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.got = got
        self.hint = hint if hint is not None else self.advice
        self.story = story
        self.where = {name: value for name, value in where.items() if value is not None}

    def __getattr__(self, name: str) -> object:
        """Return a fact of ``where`` as an attribute."""
        where = self.__dict__.get("where", {})
        if name in where:
            return where[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def located(self, **where: object) -> Self:
        """Add facts that an inner layer could not know (site, job); what is there stays."""
        for name, value in where.items():
            if value is not None:
                self.where.setdefault(name, value)
        return self

    def line(self, *known: str) -> str:
        """The message without the story; what a log says.

        Args:
            known: Facts of ``where`` that the reader has from elsewhere.
        """
        parts = [self.what]
        if self.expected is not None:
            parts.append(f"expected {_short(self.expected)}, got {_short(self.got)}")
        elif self.got is not None:
            parts.append(_short(self.got))
        text = ": ".join(parts)
        where = {name: value for name, value in self.where.items() if name not in known}
        if where:
            text += f" [{', '.join(f'{name}={_short(value)}' for name, value in where.items())}]"
        return f"{text}. {self.hint}" if self.hint else text

    def __str__(self) -> str:
        text = self.line()
        if self.story:
            text += "\n  story:\n    " + "\n    ".join(self.story)
        return text

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by facts, so that an error crosses a process boundary whole."""
        return (_rebuild, (type(self), self.what, self.__dict__))


def _rebuild(kind: type[StreamoffError], what: str, state: dict[str, object]) -> StreamoffError:
    error = kind.__new__(kind, what)
    error.__dict__.update(state)
    return error


def _short(value: object) -> str:
    """Render a fact in at most 200 characters: peers choose names and messages stay readable."""
    plain = str(value) if isinstance(value, PurePath) else value
    text = plain if isinstance(plain, str) and plain.isprintable() and plain else repr(plain)
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text)} characters)"


class UsageError(StreamoffError, ValueError):
    """The call is wrong; nothing was started."""


class JobClosedError(UsageError):
    """The job root no longer admits work, or its files are gone."""


class JobExistsError(UsageError):
    """A job of this name is already open on this endpoint."""


class SpecMismatchError(UsageError):
    """Keys, shapes or dtypes differ from what was agreed."""


class SingleConsumerError(UsageError):
    """A leaf that has one consumer was asked for a second time."""


class UnsupportedTensorError(UsageError, TypeError):
    """A tensor that cannot travel: refused by name before the first byte."""

    advice = "Make it dense, strided and of a dtype that safetensors knows, or exclude it"


class UnsupportedValueError(UsageError, TypeError):
    """A value of a payload tree that cannot travel: refused with its path."""


class WeightError(UsageError):
    """An aggregation weight that is not a finite, non-negative number."""


class DtypeError(UsageError, TypeError):
    """A dtype that travels and lands, but that no CPU arithmetic reaches."""


class PeerError(StreamoffError):
    """The other side is wrong; the link or the transfer ends, nothing of ours changed."""


class MalformedFrameError(PeerError, ValueError):
    """Bytes that are no frame, or a field of the wrong type or range."""


class UnexpectedMessageError(PeerError):
    """A well-formed frame that makes no sense in this state."""


class LimitError(PeerError, ValueError):
    """A named limit was exceeded, by a peer or by us."""


class HandshakeError(PeerError):
    """Two endpoints cannot work together, or one of them is not who it says."""


class HeaderError(PeerError, ValueError):
    """A safetensors header that is not acceptable; nothing was allocated for it."""


class TransferError(StreamoffError):
    """A transfer ended without its data; expected in production."""


class TransferTimeoutError(TransferError, TimeoutError):
    """No progress within the receiver's whole retry schedule, or past the deadline."""


class LinkLostError(TransferError, ConnectionError):
    """The link to a peer was reset or stayed silent."""


class UnreachableError(TransferError, ConnectionError):
    """No route to an address."""


class SourceLostError(TransferError):
    """The link to the source did not come back within the reconnect grace."""


class SourceFailedError(TransferError):
    """The owner of the source said that it is dead."""


class SourceChangedError(TransferError):
    """A borrowed tensor or file changed while it was being served."""


class PeerRefusedError(TransferError):
    """The source refused the request: unknown ref, wrong ticket, unknown tensor, bad range."""


class GoneError(TransferError):
    """The ref is settled; its verdict is known, its data is not there any more."""


class IntegrityError(TransferError):
    """Bytes do not have the digest they were sent or landed with."""


class TruncatedFileError(IntegrityError):
    """A file is shorter than its header says."""


class LandingError(TransferError, OSError):
    """Bytes could not be put on disk; what had been written is gone."""


class NoSpaceError(LandingError):
    """The file system has no room, no inodes or no quota left."""


class QuotaExceededError(TransferError):
    """The job's own scratch quota is spent."""


class ScratchError(StreamoffError, OSError):
    """The scratch directory cannot be used."""


class AggregationError(StreamoffError):
    """A round cannot be averaged; the previous model stands."""


class ContributionRejectedError(AggregationError):
    """One site's contribution breaks a policy; the other sites are untouched."""


class QuorumLostError(AggregationError):
    """Fewer contributions than ``min_responses`` can still arrive."""


class DrainError(StreamoffError):
    """The drain window closed on somebody."""


class InvariantError(StreamoffError):
    """A bug of ours: a machine reached a combination that its invariants exclude."""

    advice = "This is a defect in streamoff; please report it with the story"
