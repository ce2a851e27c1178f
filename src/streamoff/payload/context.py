"""How the refs of one message end: chosen by the call, never by the endpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from streamoff.errors import UsageError
from streamoff.runtime.downloading import Progress
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.runtime.jobs import Job
from streamoff.tensors.layout import Layout
from streamoff.types import Budgets

__all__ = ["DecodeContext", "Destination"]

logger = logging.getLogger("streamoff.payload")

Destination = Literal["memory", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """Where the tensors of one call land.

    The call is aborted by the cancel scope it runs in.

    Args:
        tensors: ``"memory"``: torch tensors; ``"disk"``: lazy tensors under ``job``.
        job: The open job; without one, ``"disk"`` falls back to memory and says so once.
        endpoint: Who pulls; by default the job's endpoint, or the one that received the message.
        budgets: The receiver's side counts; by default the endpoint's.
        check_finite: Whether to note tensors with NaN or infinities while landing.
        accept: Checks the layout of a payload before anything is allocated; runs in a worker thread. What it
            raises ends the transfer; an error that is not streamoff's becomes a SpecMismatchError.
        progress: Told about landed bytes.

    Raises:
        UsageError: Another destination.
    """

    tensors: Destination = "memory"
    job: Job | None = None
    endpoint: BaseEndpoint | None = None
    budgets: Budgets | None = None
    check_finite: bool = False
    accept: Callable[[Layout], Any] | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.tensors not in ("memory", "disk"):
            raise UsageError("tensors", expected="'memory' or 'disk'", got=self.tensors)

    def settled(self, endpoint: BaseEndpoint | None) -> tuple[BaseEndpoint, DecodeContext]:
        """Who pulls, and the context without wishes that cannot be met.

        Raises:
            UsageError: There is nobody to pull, or the job belongs to another endpoint than the one that
                shall.
        """
        owner = self.job.endpoint if self.job is not None else None
        puller = self.endpoint or owner or endpoint
        if owner is not None and puller is not owner:
            raise UsageError(
                "the job belongs to another endpoint", expected=puller, got=owner.address
            )
        if puller is None:
            raise UsageError(
                "nobody to pull the tensors", hint="Give the context an endpoint or an open job"
            )
        if self.tensors == "disk" and self.job is None:
            _warn_no_job(puller)
            return puller, replace(self, tensors="memory")
        return puller, self


def _warn_no_job(endpoint: BaseEndpoint) -> None:
    """Say once per endpoint that offload has no place to go."""
    if not endpoint.warned_no_job:
        endpoint.warned_no_job = True
        logger.warning(
            "%s: tensors were to land on disk, but there is no open job; they land in memory. "
            "Open one with open_job() and pass it in the DecodeContext",
            endpoint.address,
        )
