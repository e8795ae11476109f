"""Changes to a case's arguments that must not matter, or that make a legal call of another kind.

A change is named in the id of its trial, so names never change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases.case import Arguments, Case
from moetail.spec import Argument

__all__ = ["REWRITES", "Change"]

Change = Callable[[Case, int, Arguments], Arguments]
"""The arguments of a case on a rank, changed; the given ones stay as they are."""

PAST_INT32 = 1 << 31

_ROUTE_MAJOR = Argument("x.routed.route_major", "route_major", "other")


def _routes(case: Case, arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """(rows ``[rows, H]``, weights, map), where there is no map that of all live routes."""
    rows, weights = (case.target.argument(role).of(arguments) for role in ("rows", "weights"))
    if case.target.takes("map"):
        return rows, weights, case.target.argument("map").of(arguments)
    index = torch.arange(case.tokens * case.top_k, device=rows.device)
    return rows.flatten(0, 1), weights, index.view(case.tokens, case.top_k)


def _with(case: Case, arguments: Arguments, **values: Any) -> Arguments:
    """Other values by role."""
    for role, value in values.items():
        arguments = case.target.argument(role).put(arguments, value)
    return arguments


def _permuted_rows(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """Rows and map permuted together (ROUTE-2)."""
    rows, _, index = _routes(case, arguments)
    gen = torch.Generator().manual_seed(case.seed + 1000003 * rank)
    order = torch.randperm(rows.shape[0], generator=gen).to(rows.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(rows.shape[0], device=rows.device)
    moved = torch.where(index >= 0, place[index.clamp(min=0).long()].to(index.dtype), index)
    return _ROUTE_MAJOR.put(_with(case, arguments, rows=rows[order], map=moved), False)


def _more_rows(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """More padding after the last row (PACK-2)."""
    rows, _, _ = _routes(case, arguments)
    padding = rows.new_full((137, case.hidden), torch.nan)
    return _with(case, arguments, rows=torch.cat([rows, padding]))


def _past_int32(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """The rows that routes name lie past 2^31 elements (RUN-6).

    The buffer is not written but at its end, so that a machine with lazily mapped memory needs
    little of it.
    """
    rows, _, index = _routes(case, arguments)
    offset = PAST_INT32 // case.hidden + 1
    far = torch.empty((offset + rows.shape[0], case.hidden), dtype=rows.dtype, device=rows.device)
    far[offset:] = rows
    moved = torch.where(index >= 0, index + offset, index)
    return _ROUTE_MAJOR.put(_with(case, arguments, rows=far, map=moved), False)


def _other_dead_weights(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """Other weights in the -1 slots, finite ones (ROUTE-1)."""
    _, weights, index = _routes(case, arguments)
    return _with(case, arguments, weights=weights.masked_fill(index < 0, 3.0))


def _zero_weights(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """Weight zero on live routes whose row holds NaN or infinity: a product is NaN (ROUTE-5)."""
    rows, weights, index = _routes(case, arguments)
    if rows.shape[0] == 0:
        return arguments
    special = ~rows.isfinite().all(dim=-1)[index.clamp(min=0).long()] & (index >= 0)
    changed = weights.clone()
    changed[: len(index)][special] = 0.0
    return _with(case, arguments, weights=changed)


def _repeated_past_int32(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """The case's tokens over and over, until rows and outputs pass 2^31 elements (RUN-6)."""
    times = -(-PAST_INT32 // (case.tokens * case.hidden)) + 1
    routes = case.tokens * case.top_k
    live = {"T": case.tokens, "slots": case.tokens, "slots * K": routes}
    for item, tensor in case.target.tensors(arguments):
        if item.role == "map":
            many = torch.arange(times * routes, dtype=tensor.dtype, device=tensor.device)
            arguments = item.put(arguments, many.view(-1, case.top_k))
        elif item.shape[0] in live:
            many = tensor[: live[item.shape[0]]]
            arguments = item.put(arguments, many.repeat(times, *[1] * (many.dim() - 1)))
    return arguments


def _cancelling_ranks(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """Finalized parts of which the first and the last rank's cancel, and swallow what is added
    between (OWN-3): FP32 sums in another order differ."""
    given = case.target.argument("finalized").of(arguments)
    gen = torch.Generator().manual_seed(case.seed)
    large = torch.randn((case.tokens, case.hidden), generator=gen).to(given) * 2.0**20
    part = {0: large, case.ranks - 1: -large}.get(rank, given * 2.0**-6)
    return _with(case, arguments, finalized=part.contiguous())


REWRITES: dict[str, Change] = {
    "cancelling-ranks": _cancelling_ranks,
    "repeated-past-int32": _repeated_past_int32,
    "zero-weights": _zero_weights,
    "other-dead-weights": _other_dead_weights,
    "permuted-rows": _permuted_rows,
    "more-rows": _more_rows,
    "past-int32": _past_int32,
}
