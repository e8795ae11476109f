"""A call cut to some of its tokens, which is a smaller call of the same operation.

Whatever has an axis of tokens is cut together, so that the smaller call means for each kept token
what the large one meant for it. Rows that no kept route refers to are dropped, and with them the
padding; what belongs to no token (norm weights, scales) stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases.tensors import mapped
from moetail.spec import Operation, operation, owned_tokens, tokens_per_rank

__all__ = ["choose", "cut_call", "cut_result", "tokens_of"]


def tokens_of(name: str, call: Mapping[str, Any]) -> int:
    """T of a call: live tokens, over all ranks. 0 for the conversions, which compute nothing."""
    target = operation(name)
    counted = [(item.role, one) for item, one in target.tensors(call) if item.shape[0] == "T"]
    counted.sort(key=lambda pair: pair[0] != target.counts)  # which is not there if it is finalized
    return int(counted[0][1].shape[0]) if counted else 0


def choose(name: str, tokens: Sequence[int], num_tokens: int, world_size: int = 1) -> list[int]:
    """The tokens to keep: those of ``tokens`` that a call of ``num_tokens`` has, in order.

    Where tokens have owners (``beam_moe_finalize_gather_norm_residual_norm``), each rank's block is
    filled up with its first other tokens until all blocks keep as many as the fullest one, or all
    they have. The smaller call then has blocks of ceil(T' / W) too, each owned by the same rank.
    """
    kept = sorted({token for token in tokens if 0 <= token < num_tokens})
    if not operation(name).owns or not kept:
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
    name: str,
    call: Mapping[str, Any],
    kept: Sequence[int],
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, Any]:
    """The arguments of the smaller call; ``kept`` as :func:`choose` gives it.

    Tensors are new, on the device where they were. The conversions' arguments stay whole.

    Raises:
        ValueError, RuntimeError, IndexError, AttributeError, TypeError: arguments outside the
            contract, which would hide in a smaller call that they are.
    """
    target, cut, num_tokens = operation(name), dict(call), tokens_of(name, call)
    tokens = torch.tensor(kept, dtype=torch.int64)
    slots = _slots(target, call, kept, rank, world_size) if target.owns else tokens
    taken = {"T": tokens, "slots": slots}
    index, top_k, moved = None, 1, None
    if target.takes("map") and isinstance(index := target.argument("map").of(call), Tensor):
        top_k, owner = index.shape[1], taken[target.shape("map")[0]]
        rows, moved = _moved(call, index, owner, ordered=not target.permuted)
        taken |= {"rows": rows, "slots * K": rows}
    for item, tensor in target.tensors(call):
        axis, size = item.shape[0], tensor.shape[0]
        odd = size != num_tokens if axis == "T" else axis == "slots * K" and size % top_k
        if odd or not tensor.is_contiguous():
            raise ValueError(f"{item.name} is not as the contract has it")
        if axis in taken:
            cut = item.put(cut, moved if tensor is index else _take(tensor, taken[axis]))
    return cut


def cut_result(value: Any, num_tokens: int, kept: Sequence[int]) -> Any:
    """The results of the smaller call. A tensor that has not ``num_tokens`` rows stays as it is."""
    index = torch.tensor(kept, dtype=torch.int64)

    def cut(tensor: Tensor) -> Tensor:
        fits = tensor.dim() > 0 and tensor.shape[0] == num_tokens
        return _take(tensor, index) if fits else tensor

    return mapped(value, cut)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.index_select(0, index.to(tensor.device))


def _slots(
    target: Operation, call: Mapping[str, Any], kept: Sequence[int], rank: int, world_size: int
) -> Tensor:
    """The rank's slots: those of kept tokens that it owns, and padding up to the blocks' size."""
    owned = owned_tokens(tokens_of(target.name, call), world_size, rank)
    own = [token - owned.start for token in kept if token in owned]
    missing = tokens_per_rank(len(kept), world_size) - len(own)
    spare = range(len(owned), len(target.argument("weights").of(call)))
    return torch.tensor([*own, *spare[:missing]], dtype=torch.int64)


def _moved(
    call: Mapping[str, Any], index: Tensor, kept: Tensor, *, ordered: bool
) -> tuple[Tensor, Tensor]:
    """(the rows that stay, the map of the kept tokens or slots, which names them there)."""
    top_k, moved = index.shape[1], _take(index, kept)
    if ordered or call["x"].routed.route_major:
        # All of a token's rows stay, also those of routes that are not local. A map that is not the
        # identity still is not.
        by = (kept - torch.arange(len(kept))).to(index.device, index.dtype) * top_k
        rows = kept[:, None] * top_k + torch.arange(top_k)
        return rows.flatten(), torch.where(moved < 0, moved, moved - by[:, None])
    live = moved >= 0
    rows, place = torch.unique(moved[live], return_inverse=True)
    moved[live] = place.to(index.dtype)
    return rows.long(), moved
