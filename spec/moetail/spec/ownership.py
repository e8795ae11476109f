"""Which rank owns which tokens."""

from __future__ import annotations

from moetail.spec.errors import ContractError

__all__ = ["owned_tokens", "tokens_per_rank"]


def tokens_per_rank(num_tokens: int, world_size: int) -> int:
    """L = ceil(T / W), the slots each rank contributes to a gather (OWN-1)."""
    if num_tokens < 0:
        raise ContractError("OWN-1", "num_tokens", str(num_tokens), ">= 0")
    if world_size < 1:
        raise ContractError("OWN-1", "world_size", str(world_size), ">= 1")
    return -(-num_tokens // world_size)


def owned_tokens(num_tokens: int, world_size: int, rank: int) -> range:
    """The tokens that ``rank`` owns: consecutive blocks of ceil(T / W) (OWN-1).

    The last ranks may own fewer, or none: the range is then empty, and starts at T so that it
    always slices ``[T, ...]`` tensors.
    """
    if not 0 <= rank < max(world_size, 1):
        raise ContractError("OWN-1", "rank", str(rank), f"0 <= rank < {world_size}")
    slots = tokens_per_rank(num_tokens, world_size)
    return range(min(rank * slots, num_tokens), min((rank + 1) * slots, num_tokens))
