"""Ending refs: now or later, all or some, in memory or on disk."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import anyio

from streamoff.errors import PeerRefusedError, SpecMismatchError, StreamoffError, UsageError
from streamoff.payload.context import DecodeContext
from streamoff.payload.leaves import Batch, LeafKind, TensorRef
from streamoff.payload.tree import leaves, replaced
from streamoff.runtime.downloading import Terms
from streamoff.runtime.endpoint import BaseEndpoint
from streamoff.tensors.landing import Landing, MemoryLanding
from streamoff.tensors.layout import Layout
from streamoff.tensors.state import State
from streamoff.types import Ref

__all__ = ["Only", "names_of", "pull", "resolve", "resolve_with", "whole_state"]

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
        PeerRefusedError: A ref to a source that the sender of the message may not speak for. Nothing was pulled.
        TransferError: The first failure. The other transfers were cancelled, nothing is left of them, and the
            refs have ended: to try again, ask for the message again.
        UnsupportedValueError: A set, or a dataclass of the tree, does not take what its refs became.
        UsageError: ``only`` names something that is not in the tree, or there is nobody to pull.

    Cancellation: cancels every transfer at its source and removes what had landed; the refs have ended.
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
    groups: dict[Batch, list[TensorRef]] = {}
    for leaf in wanted:
        groups.setdefault(leaf.batch, []).append(leaf)
    _claim(groups, str(puller.address))
    states: dict[Batch, State] = {}
    try:
        await _pull_all(puller, context, groups, states)
        ends = {
            leaf: _end(states[batch], leaf) for batch, found in groups.items() for leaf in found
        }
        return replaced(tree, ends)
    except BaseException:
        for batch in groups:
            if batch not in states:
                batch.decline("another transfer of the message failed")
        for state in states.values():
            state.release()
        states.clear()
        raise


def _wanted(tree: Any, only: Only | None) -> list[TensorRef]:
    found = [leaf for _, leaf in leaves(tree)]
    if only is None:
        return found
    if callable(only):
        return [leaf for leaf in found if only(leaf)]
    names = names_of(only)
    unknown = names - {leaf.name for leaf in found}
    if unknown:
        raise UsageError("no such tensors in the tree", got=sorted(unknown)[:8])
    return [leaf for leaf in found if leaf.name in names]


def names_of(only: Iterable[str]) -> frozenset[str]:
    """The names in ``only``; one name alone is a mistake, not its letters.

    Raises:
        UsageError: It is a string.
    """
    if isinstance(only, str):
        raise UsageError("only", expected="a collection of names", got=only)
    return frozenset(only)


def _claim(groups: Mapping[Batch, list[TensorRef]], by: str) -> None:
    """Take all batches for one consumer, or none."""
    for batch, found in groups.items():
        batch.check_free(by, found[0])
        if not batch.vouched:
            raise PeerRefusedError(
                "the sender of the message may not speak for the source of its tensors",
                got=f"a ref to {batch.ref.source} from {batch.via}",
                ref=batch.ref.id,
            )
    for batch, found in groups.items():
        batch.consume(found, by)


async def _pull_all(
    puller: BaseEndpoint,
    context: DecodeContext,
    groups: Mapping[Batch, list[TensorRef]],
    states: dict[Batch, State],
) -> None:
    """Pull every batch at once; the first failure cancels the others and is raised alone."""

    async def one(batch: Batch) -> None:
        names = {leaf.name for leaf in groups[batch]}
        whole = not batch.partial and names >= batch.names
        states[batch] = state = await pull(
            puller,
            batch.ref,
            context,
            names=None if whole else names,
            to_disk=context.tensors == "disk" and batch.kind is not LeafKind.NDARRAY,
        )
        batch.nonfinite = state.nonfinite

    if len(groups) == 1:  # nothing to do at the same time
        await one(*groups)
        return
    failures: list[StreamoffError] = []
    async with anyio.create_task_group() as tasks:

        async def attempt(batch: Batch) -> None:
            try:
                await one(batch)
            except StreamoffError as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

        for batch in groups:
            tasks.start_soon(attempt, batch)
    if failures:
        raise failures[0]


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

        def landing(layout: Layout) -> Landing:
            return job.landing(layout, names=names, check_finite=context.check_finite)
    else:

        def landing(layout: Layout) -> Landing:  # noqa: ARG001 - memory needs no place
            return MemoryLanding(check_finite=context.check_finite)

    terms = Terms(
        landing=landing,
        names=names,
        budgets=budgets,
        accept=None if context.accept is None else _typed(context.accept),
        progress=context.progress,
        in_memory=not disk,
        space=job.space if job is not None and disk else None,
    )
    try:
        if job is not None:
            return await job.download(ref, terms)
        return await endpoint.run_transfer(endpoint.transfer(ref, terms))
    except StreamoffError as error:
        _let_go(error)
        raise


def _typed(accept: Callable[[Layout], Any]) -> Callable[[Layout], Any]:
    """What a caller's check raises refuses the payload; it must not end the endpoint's own tasks."""

    def checked(layout: Layout) -> Any:
        try:
            return accept(layout)
        except StreamoffError:
            raise
        except Exception as error:
            raise SpecMismatchError(f"the payload was not accepted ({error!r})") from error

    return checked


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of a failed transfer: who keeps its error must not keep its tensors.

    Causes are ours; what the caller was handling at the time, the context, is not.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _end(state: State, leaf: TensorRef) -> object:
    assert isinstance(state, Mapping)
    try:
        end = state[leaf.name]
        return end.numpy() if leaf.kind is LeafKind.NDARRAY else end
    except KeyError:
        what = "the payload lacks a tensor that the message names"
    except TypeError:
        what = "an ndarray of a dtype that NumPy does not have"
    raise PeerRefusedError(what, site=leaf.ref.source, ref=leaf.ref.id, tensor=leaf.name)


def whole_state(tree: Any) -> Batch | None:
    """The one batch behind a flat state dict of all its refs, or None if the tree is anything else.

    A workflow that gets such a dict pulls the ref and works on the payload as a whole.
    """
    if type(tree) is not dict or not tree:
        return None
    batches = {leaf.batch for leaf in tree.values() if isinstance(leaf, TensorRef)}
    flat = all(
        isinstance(leaf, TensorRef) and leaf.name == key and leaf.kind is LeafKind.TENSOR
        for key, leaf in tree.items()
    )
    if not flat or len(batches) != 1:
        return None
    batch = batches.pop()
    return batch if tree.keys() >= batch.names else None
