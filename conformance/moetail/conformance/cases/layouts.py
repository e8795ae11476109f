"""How a producer lays out one row per route: permuted, route-major, or capacity slots."""

from __future__ import annotations

import torch
from torch import Tensor

from moetail.conformance.cases.arithmetic import coins, integers

__all__ = ["capacity_slots", "permuted_rows", "poisoned", "route_major_rows"]

_LARGEST = 3.3895e38  # rounds to BF16's largest finite number


def poisoned(
    shape: tuple[int, ...],
    poison: str,
    gen: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """A tensor of what must never be read for value: NaN, +-inf, +-huge, or plausible numbers."""
    if poison == "nan":
        return torch.full(shape, torch.nan, dtype=dtype)
    if poison == "random":
        return (torch.randn(shape, generator=gen) * 3.0).to(dtype)
    largest = torch.inf if poison == "inf" else min(_LARGEST, torch.finfo(dtype).max)
    value = torch.tensor(largest, dtype=dtype)
    return torch.where(coins(shape, gen), value, -value)


def permuted_rows(
    rows: Tensor,
    local: Tensor,
    experts: Tensor,
    *,
    tile: int,
    poison: str,
    gen: torch.Generator,
    tight: bool = False,
) -> tuple[Tensor, Tensor]:
    """TRTLLM-Gen's layout of ``rows`` [T, K, H]: (gemm2_permuted, map).

    Rows of one expert lie together, in random order, each group padded to a multiple of ``tile``;
    then some more rows, since the figure comes from an autotuner. ``tight`` drops what follows the
    last referenced row.
    """
    tokens, top_k, hidden = rows.shape
    index = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    flat_local = local.reshape(-1)
    flat_experts = experts.reshape(-1)
    at = 0
    last = 0
    for expert in sorted(set(flat_experts[flat_local].tolist())):
        group = ((flat_experts == expert) & flat_local).nonzero().squeeze(1)
        group = group[torch.randperm(group.numel(), generator=gen)]
        last = at + group.numel()
        index[group] = torch.arange(at, last, dtype=torch.int32)
        at += -(-group.numel() // tile) * tile
    total = last if tight else at + int(integers(0, 2 * tile, (1,), gen))
    # A rank without a single route still has a row, as no buffer of a producer is empty.
    total = max(total, min(tokens, 1))
    named = rows.reshape(-1, hidden)[flat_local]
    out = _placed(named, index[flat_local].long(), total, poison=poison, gen=gen)
    return out, index.view(tokens, top_k)


def route_major_rows(
    rows: Tensor, local: Tensor, *, poison: str, gen: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Row t * K + k for route (t, k), poison and -1 where it is not local: (rows, map)."""
    tokens, top_k, hidden = rows.shape
    at = local.reshape(-1).nonzero().squeeze(1)
    named = rows.reshape(-1, hidden)[at]
    out = _placed(named, at, tokens * top_k, poison=poison, gen=gen)
    index = torch.arange(tokens * top_k, dtype=torch.int32).view(tokens, top_k)
    return out, torch.where(local, index, torch.full_like(index, -1))


def _placed(rows: Tensor, at: Tensor, total: int, *, poison: str, gen: torch.Generator) -> Tensor:
    """``rows`` at the indices ``at`` of ``total`` rows, and poison in all others."""
    dead = torch.ones(total, dtype=torch.bool)
    dead[at] = False
    hidden = rows.shape[1]
    out = rows.new_empty((total, hidden))
    out[at] = rows
    out[dead] = poisoned((int(dead.sum()), hidden), poison, gen)
    return out


def capacity_slots(values: Tensor, *, extra: int, poison: str, gen: torch.Generator) -> Tensor:
    """What live slots hold, then ``extra`` slots of poison: of MegaMoE's ``[capacity, K, H]``, of
    weights, or of plain rows."""
    dead = poisoned((extra, *values.shape[1:]), poison, gen, values.dtype)
    return torch.cat([values, dead])
