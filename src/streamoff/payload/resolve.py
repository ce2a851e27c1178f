"""Ending refs: now or later, all or some, in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import anyio

from streamoff.errors import PeerRefusedError, StreamoffError, UsageError
from streamoff.payload.body import leaves, replaced
from streamoff.payload.context import DecodeContext
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.tensors.landing import MemoryLanding
from streamoff.tensors.state import State
from streamoff.types import Ref

__all__ = ["Only", "pull", "resolve", "resolve_with", "whole_state"]

Only = Collection[str] | Callable[[TensorRef], bool]
"""Which leaves to end: their names, or a question asked of each."""


async def resolve(tree: Any, context: DecodeContext, *, only: Only | None = None) -> Any:
    """End the refs of a tree.

    Args:
        tree: A tree with kept refs; it is not changed.
        context: Where the tensors land.
        only: Which leaves; all by default. A slot is one pull: leaves that are left out of a ref that is
            pulled cannot be had later.

    Returns:
        The tree with tensors (memory), lazy tensors (disk) and ndarrays (always memory) in place of refs.
        Refs that were not asked for stay. What has no refs is shared with ``tree``.

    Raises:
        SingleConsumerError: A leaf has a consumer already. Nothing was pulled.
        TransferError: The first failure; the other transfers were cancelled and nothing is left of them.
        UsageError: ``only`` names something that is not in the tree, or there is nobody to pull.

    Cancellation: cancels every transfer at its source and removes what had landed.
    """
    return await resolve_with(tree, context, None, only)


async def resolve_with(
    tree: Any, context: DecodeContext, endpoint: BaseEndpoint | None, only: Only | None = None
) -> Any:
    """As :func:`resolve`, with the endpoint that received the message."""
    wanted = _wanted(tree, only)
    if not wanted:
        return tree
    puller, context = context.settled(endpoint)
    groups: dict[tuple[Batch, LeafKind], list[TensorRef]] = {}
    for leaf in wanted:
        groups.setdefault((leaf.batch, leaf.kind), []).append(leaf)
    for (batch, _), found in groups.items():
        if batch.consumed:
            batch.consume(found, str(puller.address))
    for (batch, _), found in groups.items():
        batch.consume(found, str(puller.address))
    states: dict[tuple[Batch, LeafKind], State] = {}
    failures: list[StreamoffError] = []
    async with anyio.create_task_group() as tasks:

        async def one(key: tuple[Batch, LeafKind]) -> None:
            try:
                states[key] = await _pull_batch(puller, context, key, groups[key], only)
            except StreamoffError as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

        for key in groups:
            tasks.start_soon(one, key)
    if failures:
        for state in states.values():
            state.release()
        raise failures[0]
    ends: dict[TensorRef, object] = {}
    for key, found in groups.items():
        ends |= {leaf: _end(states[key], leaf) for leaf in found}
    return replaced(tree, ends)


def _wanted(tree: Any, only: Only | None) -> list[TensorRef]:
    found = [leaf for _, leaf in leaves(tree)]
    if only is None:
        return found
    if callable(only):
        return [leaf for leaf in found if only(leaf)]
    unknown = set(only) - {leaf.name for leaf in found}
    if unknown:
        raise UsageError("no such tensors in the tree", got=sorted(unknown)[:8])
    return [leaf for leaf in found if leaf.name in only]


async def _pull_batch(
    endpoint: BaseEndpoint,
    context: DecodeContext,
    key: tuple[Batch, LeafKind],
    found: list[TensorRef],
    only: Only | None,
) -> State:
    batch, kind = key
    if not batch.vouched:
        raise PeerRefusedError(
            "the sender of the message may not speak for the source of its tensors",
            got=f"a ref to {batch.ref.source} from {batch.via}",
            ref=batch.ref.id,
        )
    names = {leaf.name for leaf in found} if batch.partial or only is not None else None
    to_disk = context.tensors == "disk" and kind is LeafKind.TENSOR
    return await pull(endpoint, batch.ref, context, names=names, to_disk=to_disk)


async def pull(
    endpoint: BaseEndpoint,
    ref: Ref,
    context: DecodeContext,
    *,
    names: Collection[str] | None = None,
    to_disk: bool | None = None,
) -> State:
    """Bring one payload; see :meth:`streamoff.payload.endpoint.Endpoint.download`."""
    job = context.job
    disk = context.tensors == "disk" if to_disk is None else to_disk
    budgets = context.budgets or endpoint.budgets
    if job is not None and disk:

        def landing(layout: Any) -> Any:
            return job.landing(
                layout, names=names, check_finite=context.check_finite, durable=context.durable
            )
    else:

        def landing(layout: Any) -> Any:  # noqa: ARG001 - memory needs no place
            return MemoryLanding(check_finite=context.check_finite)

    terms = Terms(
        landing=landing,
        names=names,
        budgets=budgets,
        accept=context.accept,
        progress=context.progress,
    )
    if job is not None:
        return await job.download(ref, terms)
    return await endpoint.run_transfer(endpoint.transfer(ref, terms))


def _end(state: State, leaf: TensorRef) -> object:
    if not isinstance(state, Mapping) or leaf.name not in state:
        raise PeerRefusedError(
            "the payload lacks a tensor that the message names",
            site=leaf.ref.source,
            ref=leaf.ref.id,
            tensor=leaf.name,
        )
    end = state[leaf.name]
    if leaf.kind is LeafKind.NDARRAY:
        return end.numpy()
    return end


def whole_state(tree: Any) -> Batch | None:
    """The one batch behind a flat state dict of refs, or None if the tree is anything else.

    A workflow that gets such a dict pulls the ref and works on the payload as a whole.
    """
    if type(tree) is not dict or not tree:
        return None
    batches = {leaf.batch for leaf in tree.values() if isinstance(leaf, TensorRef)}
    flat = all(
        isinstance(leaf, TensorRef) and leaf.name == key and leaf.kind is LeafKind.TENSOR
        for key, leaf in tree.items()
    )
    return batches.pop() if flat and len(batches) == 1 else None
