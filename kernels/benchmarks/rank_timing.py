"""What each rank of the distributed benchmark measures; a module, so that rank processes import it.

Times are of launches in a CUDA graph, as in :mod:`timing`. All ranks replay the same graph, and the
replay before the timed one has brought them together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import timing
import torch
import torch.distributed as dist
from torch import Tensor

import moetail.kernels as kernels
from moetail.spec import MoEOutput, UnfinalizedMoEOutput, tokens_per_rank

SCALES = (0.75, 1.25)
CALLS = 40  # of few tokens, in a graph


@functools.cache
def workspace(group: Any, hidden: int, max_tokens: int) -> Any:
    made = kernels.BeamAllReduceWorkspace.create(group, hidden, max_tokens, torch.bfloat16)
    assert made is not None, kernels.BeamAllReduceWorkspace.why_unsupported()
    return made


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _routes(tokens: int, hidden: int, top_k: int) -> UnfinalizedMoEOutput:
    return UnfinalizedMoEOutput(
        _random(tokens * top_k, hidden),
        torch.rand(tokens, top_k, device="cuda"),
        torch.arange(tokens * top_k, device="cuda", dtype=torch.int32).view(tokens, top_k),
    )


def _tail(tokens: int, hidden: int) -> tuple[Any, ...]:
    return _random(tokens, hidden), _random(hidden), 1e-6, _random(hidden), 1e-5, SCALES


def _times(
    group: Any, calls: dict[str, Callable[[Any], Any]], sets: Sequence[Any], rounds: int
) -> dict[str, float]:
    """Microseconds of each call: the slowest rank's median."""
    found = {}
    for name, call in calls.items():
        launches = [functools.partial(call, item) for _ in range(rounds) for item in sets]
        dist.barrier(group)
        times: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(times, timing.graph_time(launches), group=group)
        found[name] = max(times)
    return found


def _sets(make: Callable[[], Any], tokens: int, moved: int) -> tuple[list[Any], int]:
    number = timing.number_of_sets(tokens, moved)
    return [make() for _ in range(number)], CALLS if number == 1 else math.ceil(8 / number)


def gather(
    group: Any, rank: int, tokens: int, hidden: int, top_k: int, max_tokens: int
) -> dict[str, float]:
    """Operation 6, each strategy."""
    torch.manual_seed(rank)
    shared = workspace(group, hidden, max_tokens)
    slots = tokens_per_rank(tokens, shared.world_size)

    def call(item: Any, strategy: str | None) -> Any:
        x, tail = item
        return kernels.beam_moe_finalize_gather_norm_residual_norm(
            x, *tail, shared, 1.5, strategy=strategy
        )

    def strategy_of(name: str) -> Callable[[Any], Any]:
        return lambda item: call(item, None if name == "default" else name)

    calls = {name: strategy_of(name) for name in ("oneshot", "twoshot", "unfused", "default")}
    moved = 2 * hidden * (slots * top_k + 3 * tokens)
    sets, rounds = _sets(
        lambda: (_routes(slots, hidden, top_k), _tail(tokens, hidden)), tokens, moved
    )
    found = _times(group, calls, sets, rounds)
    shared.check()
    return found


def allreduce(
    group: Any, rank: int, tokens: int, hidden: int, top_k: int, max_tokens: int
) -> dict[str, float]:
    """Operation 8 over all ranks, and its steps over NCCL."""
    torch.manual_seed(rank)
    shared = workspace(group, hidden, max_tokens)

    def fused(item: Any) -> Any:
        x, tail = item
        return kernels.beam_finalize_allreduce_norm_residual_norm(MoEOutput(x), *tail, shared)

    def unfused(item: Any) -> Any:
        x, (residual, *norms) = item
        finalized = kernels.finalize_moe_output(MoEOutput(x))
        dist.all_reduce(finalized, group=group)
        return kernels.beam_norm_residual_norm(finalized, residual, *norms)

    moved = 2 * hidden * tokens * (top_k + 3)
    sets, rounds = _sets(
        lambda: (_routes(tokens, hidden, top_k), _tail(tokens, hidden)), tokens, moved
    )
    found = _times(group, {"fused": fused, "unfused": unfused}, sets, rounds)
    shared.check()
    return found


def links(group: Any, rank: int) -> dict[str, float]:
    """GB/s that each rank can write to the next, all at once, and NCCL's all-gather of 8 tokens."""
    import torch.distributed._symmetric_memory as symmetric

    words = 2**28 // 4
    mine = symmetric.empty(words, dtype=torch.int32, device=f"cuda:{rank}")
    handle = symmetric.rendezvous(mine, group)
    size = dist.get_world_size(group)
    peer = handle.get_buffer((rank + 1) % size, (words,), torch.int32)
    source = torch.randint(0, 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    rows = _random(8 // size, 7168)
    gathered = _random(8, 7168)
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found = _times(group, {"copy": lambda _: peer.copy_(source)}, [None], 8)
    found |= _times(
        group,
        {"nccl_all_gather_8_us": lambda _: collective(gathered, rows, group=group)},
        [None],
        CALLS,
    )
    found["link_gb_s"] = 4 * words / found.pop("copy") / 1e3
    return found
