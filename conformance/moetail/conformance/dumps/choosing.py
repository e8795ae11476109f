"""A call cut to some of its tokens, which is a smaller call of the same operation.

Rows, weights, map, residual, destination and results are cut together, so that the smaller call
means for each kept token what the large one meant for it. Rows that no kept route refers to are
dropped, and with them the padding; what belongs to no token (norm weights, scales) stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from moetail.spec import MoEOutput, UnfinalizedMoEOutput, owned_tokens
from moetail.spec.rules import ALLREDUCE, BOUNDARY, FINALIZE, FUSED, GATHER, MOE_OUTPUT

__all__ = ["choose", "cut_call", "cut_result", "tokens_of"]

_CUT = (FINALIZE, BOUNDARY, FUSED, GATHER, MOE_OUTPUT, ALLREDUCE)


def tokens_of(operation_name: str, call: Mapping[str, Any]) -> int:
    """T of a call: live tokens, over all ranks. 0 for the conversions, which compute nothing."""
    if operation_name not in _CUT:
        return 0
    if operation_name == FINALIZE:
        return int(call["output"].shape[0])
    if operation_name == MOE_OUTPUT:
        routed = call["x"].routed
        owner = routed if isinstance(routed, Tensor) else routed.expert_weights
        return int(owner.shape[0])
    return int(call["residual"].shape[0])


def choose(
    operation_name: str, tokens: Sequence[int], num_tokens: int, world_size: int = 1
) -> list[int]:
    """The tokens to keep: those of ``tokens`` that a call of ``num_tokens`` has, in order.

    Where tokens have owners (``beam_moe_finalize_gather_norm_residual_norm``), each rank's block is
    filled up with its first other tokens until all blocks keep as many as the fullest one, or all
    they have. The smaller call then has blocks of ceil(T' / W) too, each owned by the same rank.
    """
    kept = sorted({token for token in tokens if 0 <= token < num_tokens})
    if operation_name != GATHER or not kept:
        return kept
    blocks = [owned_tokens(num_tokens, world_size, rank) for rank in range(world_size)]
    most = max(sum(token in block for token in kept) for block in blocks)
    filled: list[int] = []
    for block in blocks:
        own = {token for token in kept if token in block}
        others = (token for token in block if token not in own)
        missing = min(most, len(block)) - len(own)
        filled += sorted(own.union(islice(others, missing)))
    return filled


def cut_call(
    operation_name: str,
    call: Mapping[str, Any],
    kept: Sequence[int],
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, Any]:
    """The arguments of the smaller call; ``kept`` as :func:`choose` gives it.

    Tensors are new, on the device where they were. The conversions' arguments stay whole.

    Raises:
        RuntimeError, IndexError, AttributeError, TypeError: arguments outside the contract, which
            cannot be cut.
    """
    cut = dict(call)
    if operation_name not in _CUT:
        return cut
    tokens = torch.tensor(kept, dtype=torch.int64)
    if "residual" in cut:
        cut["residual"] = _take(cut["residual"], tokens)
    if operation_name == FINALIZE:
        for name in ("expert_outputs", "expert_weights", "output"):
            cut[name] = _take(cut[name], tokens)
    elif operation_name == BOUNDARY:
        cut["x"] = _take(cut["x"], tokens)
    elif operation_name == FUSED:
        cut["x"] = _cut_slots(cut["x"], tokens)
    elif operation_name == GATHER:
        cut["x"] = _cut_slots(cut["x"], _slots(call, kept, rank, world_size))
    else:
        cut["x"] = _cut_output(cut["x"], tokens)
    return cut


def cut_result(value: Any, num_tokens: int, kept: Sequence[int]) -> Any:
    """The results of the smaller call. A tensor that has not ``num_tokens`` rows stays as it is."""
    if isinstance(value, Tensor):
        fits = value.dim() > 0 and value.shape[0] == num_tokens
        return _take(value, torch.tensor(kept, dtype=torch.int64)) if fits else value
    if isinstance(value, (tuple, list)):
        parts = [cut_result(item, num_tokens, kept) for item in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.index_select(0, index.to(tensor.device))


def _slots(call: Mapping[str, Any], kept: Sequence[int], rank: int, world_size: int) -> Tensor:
    """This rank's slots: those of kept tokens that it owns, and padding up to the blocks' size."""
    owned = owned_tokens(tokens_of(GATHER, call), world_size, rank)
    own = [token - owned.start for token in kept if token in owned]
    block = len(owned_tokens(len(kept), world_size, 0))
    spare = range(len(owned), call["x"].expert_weights.shape[0])
    return torch.tensor(own + list(spare)[: block - len(own)], dtype=torch.int64)


def _cut_slots(x: UnfinalizedMoEOutput, slots: Tensor) -> UnfinalizedMoEOutput:
    """Token-major rows. A map that is not the identity still is not: it moves with its slots."""
    index = x.expanded_idx_to_permuted_idx
    top_k = index.shape[1]
    rows = x.gemm2_permuted.view(-1, top_k, x.gemm2_permuted.shape[1])
    moved = (slots - torch.arange(len(slots))) * top_k
    return replace(
        x,
        gemm2_permuted=_take(rows, slots).flatten(0, 1),
        expert_weights=_take(x.expert_weights, slots),
        expanded_idx_to_permuted_idx=(
            _take(index, slots) - moved.to(index.device, index.dtype)[:, None]
        ),
    )


def _cut_output(x: MoEOutput, tokens: Tensor) -> MoEOutput:
    shared = None if x.shared_output is None else _take(x.shared_output, tokens)
    if isinstance(x.routed, Tensor):
        return replace(x, routed=_take(x.routed, tokens), shared_output=shared)
    return replace(x, routed=_cut_routes(x.routed, tokens), shared_output=shared)


def _cut_routes(x: UnfinalizedMoEOutput, tokens: Tensor) -> UnfinalizedMoEOutput:
    """Any permutation: the rows that kept routes refer to, in their order."""
    rows, weights = x.gemm2_permuted, x.expert_weights
    index = _take(x.expanded_idx_to_permuted_idx, tokens)
    if x.route_major:
        # All of a token's rows stay, also those of routes that are not local.
        top_k = index.shape[1]
        moved = (tokens - torch.arange(len(tokens))) * top_k
        moved = moved.to(index.device, index.dtype)[:, None]
        used = (tokens[:, None] * top_k + torch.arange(top_k)).flatten()
        cut = torch.where(index < 0, index, index - moved)
    else:
        live = index >= 0
        used, place = torch.unique(index[live], return_inverse=True)
        cut = index.clone()
        cut[live] = place.to(index.dtype)
    return replace(
        x,
        gemm2_permuted=_take(rows, used.long()),
        expert_weights=_take(weights, tokens),
        expanded_idx_to_permuted_idx=cut,
    )
