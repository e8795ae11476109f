"""What each rank of the distributed benchmark measures; a module, so that rank processes import it.

Times are of launches in a CUDA graph, as in :mod:`timing`. All ranks replay the same graph, and the
replay before the timed one has brought them together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import peers
import timing
import torch
import torch.distributed as dist
from torch import Tensor

import moetail.kernels as kernels
from moetail.conformance.adapters import flashinfer_kernel
from moetail.conformance.judge.rounding import round_bf16
from moetail.reference.operations import all_gather
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
    """FP32 weights with BF16 values: FlashInfer's kernel takes the same ones as BF16."""
    return UnfinalizedMoEOutput(
        _random(tokens * top_k, hidden),
        torch.rand(tokens, top_k, device="cuda").bfloat16().float(),
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


def _allreduce_sets(tokens: int, hidden: int, top_k: int) -> tuple[list[Any], int]:
    moved = 2 * hidden * tokens * (top_k + 3)
    return _sets(lambda: (_routes(tokens, hidden, top_k), _tail(tokens, hidden)), tokens, moved)


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

    sets, rounds = _allreduce_sets(tokens, hidden, top_k)
    found = _times(group, {"fused": fused, "unfused": unfused}, sets, rounds)
    shared.check()
    return found


def has_flashinfer(group: Any, rank: int) -> dict[str, float]:
    """Whether FlashInfer's kernel is there, for that many ranks."""
    able = dist.get_world_size(group) in flashinfer_kernel.WORLD_SIZES
    return {"flashinfer": float(able and peers.flashinfer_finalize() is not None)}


def _flashinfer(group: Any, tokens: int, hidden: int, dependent: bool) -> Callable[[Any], Any]:
    """FlashInfer's kernel on an item of the sets, whose weights come as BF16 beside it."""
    function = peers.flashinfer_finalize()
    assert function is not None
    exchange = flashinfer_kernel.exchange_for(group, tokens, hidden)

    def call(item: Any) -> Any:
        (x, (residual, _, _, gamma, eps, _)), weights = item
        return flashinfer_kernel.launch(
            function,
            exchange,
            x.gemm2_permuted,
            x.expanded_idx_to_permuted_idx,
            weights,
            None,
            1.0,
            residual,
            gamma,
            eps,
            dependent=dependent,
        )

    return call


def _with_weights(item: Any) -> Any:
    return item, item[0].expert_weights.bfloat16()


def flashinfer(
    group: Any, rank: int, tokens: int, hidden: int, top_k: int, max_tokens: int
) -> dict[str, float]:
    """FlashInfer's kernel on the inputs of :func:`allreduce`; the faster way to launch it counts.

    It finalizes, sums over ranks, adds the residual and norms: no post-norm and no scales, which
    "fused" has in addition.
    """
    torch.manual_seed(rank)
    sets, rounds = _allreduce_sets(tokens, hidden, top_k)
    calls = {
        str(dependent): _flashinfer(group, tokens, hidden, dependent) for dependent in (False, True)
    }
    found = _times(group, calls, [_with_weights(item) for item in sets], rounds)
    return {"flashinfer": min(found.values())}


def _not_rounded(
    group: Any, tokens: int, hidden: int, top_k: int, call: Callable[[Any], Tensor]
) -> float:
    """The share of elements of hidden that are not the rounded ones, on the worst rank.

    Without a post-norm and scales. What is right is computed in float64 and rounded where the
    contract says so: a rank's sum, the sum over ranks, and the sum with the residual.
    """
    item = _routes(tokens, hidden, top_k), _tail(tokens, hidden)
    x, (residual, *_) = item
    rows = x.gemm2_permuted.view(tokens, top_k, hidden).double()
    part = round_bf16((rows * x.expert_weights.double()[..., None]).sum(1))
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    total = round_bf16(torch.stack(parts).double().sum(0))
    right = round_bf16(total.double() + residual.double())
    wrong = float((call(item) != right).float().mean())
    shares: list[Any] = [None] * len(parts)
    dist.all_gather_object(shares, wrong, group=group)
    return float(max(shares))


def rounding(
    group: Any, rank: int, tokens: int, hidden: int, top_k: int, max_tokens: int
) -> dict[str, float]:
    """The share of wrongly rounded elements of operation 8's hidden."""
    torch.manual_seed(rank)
    shared = workspace(group, hidden, max_tokens)

    def call(item: Any) -> Tensor:
        x, (residual, _, _, *following, _) = item
        plain = (residual, None, None, *following, None)
        made: Tensor = kernels.beam_finalize_allreduce_norm_residual_norm(
            MoEOutput(x), *plain, shared
        )[0]
        return made

    return {"fused": _not_rounded(group, tokens, hidden, top_k, call)}


def flashinfer_rounding(
    group: Any, rank: int, tokens: int, hidden: int, top_k: int, max_tokens: int
) -> dict[str, float]:
    """As :func:`rounding`, of FlashInfer's kernel on the same inputs."""
    torch.manual_seed(rank)
    kernel = _flashinfer(group, tokens, hidden, True)

    def call(item: Any) -> Tensor:
        made: Tensor = kernel(_with_weights(item))[0]
        return made

    return {"flashinfer": _not_rounded(group, tokens, hidden, top_k, call)}


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
    collective = all_gather()
    found = _times(group, {"copy": lambda _: peer.copy_(source)}, [None], 8)
    found |= _times(
        group,
        {"nccl_all_gather_8_us": lambda _: collective(gathered, rows, group=group)},
        [None],
        CALLS,
    )
    found["link_gb_s"] = 4 * words / found.pop("copy") / 1e3
    return found
