"""Rank processes for ``test_ranks.py``: ``python ranks.py FOLDER WORLD_SIZE...``.

For each world size it forks that many ranks from one process that has imported torch and started no
thread, and each rank writes what it saw to ``FOLDER/WORLD_SIZE-RANK.pt``. It is a script because a
forked test runner would carry threads along, and a spawned one would import torch in every rank.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from moetail import reference
from moetail.spec import ContractError, MoEOutput, UnfinalizedMoEOutput

TOP_K, HIDDEN, SCALE = 3, 256, 2.5
MAX_TOKENS = 64
STRATEGIES = ("oneshot", "twoshot", "unfused")
TAILS = ("bare", "full")
TIMEOUT = timedelta(seconds=60)
NAN = float("nan")


def token_counts(world_size: int) -> list[int]:
    return sorted({0, 1, max(world_size - 1, 0), world_size, world_size + 1, 7, 17})


def grid(seed: int, *shape: int, low: int, high: int, unit: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator) * unit


def routed(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Rows ``[T, K, H]`` and weights ``[T, K]`` of all tokens, on a grid exact in FP32."""
    rows = grid(num_tokens, num_tokens, TOP_K, HIDDEN, low=-255, high=256, unit=1 / 16)
    weights = grid(num_tokens + 100, num_tokens, TOP_K, low=1, high=256, unit=1 / 256)
    return rows.to(torch.bfloat16), weights.to(torch.float32)


def residual_of(num_tokens: int) -> Tensor:
    wide = grid(num_tokens + 200, num_tokens, HIDDEN, low=-255, high=256, unit=1 / 8)
    residual = wide.to(torch.bfloat16)
    residual[:, ::5] = -0.0
    return residual


def tail_of(name: str) -> tuple[Any, ...]:
    """post_weight, post_eps, next_weight, next_eps, scales."""
    if name == "bare":
        return None, None, None, None, None
    affine = grid(300, 2, HIDDEN, low=64, high=256, unit=1 / 128).to(torch.bfloat16)
    return affine[0], 1e-5, affine[1], 1e-6, (0.7, 1.3)


def beam_part(num_tokens: int, owned: list[int], slots: int) -> UnfinalizedMoEOutput:
    """The rank's token slots, and two more: poison in all that it does not own."""
    all_rows, all_weights = routed(num_tokens)
    capacity = slots + 2
    rows = torch.full((capacity, TOP_K, HIDDEN), NAN, dtype=torch.bfloat16)
    weights = torch.full((capacity, TOP_K), NAN)
    rows[: len(owned)], weights[: len(owned)] = all_rows[owned], all_weights[owned]
    index = torch.full((capacity, TOP_K), -9, dtype=torch.int32)
    index[: len(owned)] = torch.arange(len(owned) * TOP_K, dtype=torch.int32).view(-1, TOP_K)
    return UnfinalizedMoEOutput(rows.view(-1, HIDDEN), weights, index)


def deal(num_tokens: int, world_size: int) -> list[list[int]]:
    """Who owns what, by dealing tokens out one at a time into blocks of ceil(T / W)."""
    slots = (num_tokens + world_size - 1) // world_size
    owned: list[list[int]] = [[]]
    for token in range(num_tokens):
        if len(owned[-1]) == slots:
            owned.append([])
        owned[-1].append(token)
    return owned + [[] for _ in range(world_size - len(owned))]


def expert_part(num_tokens: int, rank: int, world_size: int) -> MoEOutput:
    """The rank's experts: route (t, k) is local to rank (t + k) % W, rows reversed."""
    rows, weights = routed(num_tokens)
    routes = num_tokens * TOP_K
    index = torch.arange(routes, dtype=torch.int32).flip(0).view(num_tokens, TOP_K)
    flat = rows.view(-1, HIDDEN).flip(0).clone()
    tokens, slots = torch.arange(num_tokens)[:, None], torch.arange(TOP_K)[None]
    local = (tokens + slots) % world_size == rank
    flat[index[~local].long()] = NAN
    index[~local] = -1
    shared = grid(num_tokens + rank + 400, num_tokens, HIDDEN, low=-64, high=65, unit=1 / 4)
    return MoEOutput(UnfinalizedMoEOutput(flat, weights, index), shared.to(torch.bfloat16), SCALE)


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or the refusal in words."""
    try:
        return call()
    except ContractError as refusal:
        return f"{refusal.rule} {refusal.argument}: {refusal.found}"


def gathers(workspace: Any, rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for num_tokens in token_counts(world_size):
        owned = deal(num_tokens, world_size)[rank]
        slots = (num_tokens + world_size - 1) // world_size
        for tail in TAILS:
            for strategy in STRATEGIES:
                x, residual = beam_part(num_tokens, owned, slots), residual_of(num_tokens)
                inputs = (x.gemm2_permuted, x.expert_weights, residual)
                before = [tensor.clone() for tensor in inputs]
                result = reference.beam_moe_finalize_gather_norm_residual_norm(
                    x, residual, *tail_of(tail), workspace, SCALE, strategy=strategy
                )
                results["gather", num_tokens, tail, strategy] = result
                for now, then in zip(inputs, before, strict=True):
                    assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
    return results


def all_reduces(workspace: Any, rank: int, world_size: int) -> dict[Any, Any]:
    return {
        ("all-reduce", num_tokens, tail): reference.beam_finalize_allreduce_norm_residual_norm(
            expert_part(num_tokens, rank, world_size),
            residual_of(num_tokens),
            *tail_of(tail),
            workspace,
        )
        for num_tokens in token_counts(world_size)
        for tail in TAILS
    }


def hook_calls(workspace: Any, rank: int, world_size: int) -> dict[Any, Any]:
    """How often, and how, each strategy calls the all_gather hook; and default choices."""
    calls: list[tuple[int, tuple[str, ...], bool]] = []

    def hook(*arguments: Any, **options: Any) -> Any:
        calls.append((len(arguments), tuple(options), options["group"] is workspace.device_group))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed the function
            return dist.all_gather_into_tensor(*arguments, **options)

    chosen: list[str] = []

    class Watched(type(reference._reference)):  # type: ignore[misc]
        def twoshot(self, *arguments: Any) -> Any:
            chosen.append("twoshot")
            return super().twoshot(*arguments)

        def gather(self, *arguments: Any, through_hook: bool = False) -> Tensor:
            if not chosen:
                chosen.append("unfused" if through_hook else "oneshot")
            return super().gather(*arguments, through_hook=through_hook)

    implementation = Watched()
    results: dict[Any, Any] = {}
    num_tokens = world_size + 1
    owned = deal(num_tokens, world_size)[rank]
    workspace.all_gather = hook
    thresholds = [(num_tokens, None), (num_tokens - 1, None), (num_tokens - 1, num_tokens)]
    thresholds += [(0, num_tokens + 1), (num_tokens, num_tokens), (0, 0)]
    for strategy in (*STRATEGIES, *thresholds):
        calls.clear()
        chosen.clear()
        if not isinstance(strategy, str):
            workspace.moe_gather_oneshot_max_tokens = strategy[0]
            workspace.moe_gather_separate_norm_min_tokens = strategy[1]
        output = implementation.beam_moe_finalize_gather_norm_residual_norm(
            beam_part(num_tokens, owned, 2),
            residual_of(num_tokens),
            *tail_of("full"),
            workspace,
            SCALE,
            strategy=strategy if isinstance(strategy, str) else None,
        )
        results["hook", strategy] = (list(calls), list(chosen), output)
    workspace.all_gather = None
    return results


def requests(rank: int, world_size: int) -> dict[Any, Any]:
    """What create() answers: it must be the same answer everywhere, and nobody may wait."""
    create = reference.BeamAllReduceWorkspace.create
    group = dist.group.WORLD
    results: dict[Any, Any] = {}
    for name, arguments in {
        "half": (HIDDEN, 8, torch.float16),
        "single": (HIDDEN, 8, torch.float32),
        "hidden differs": (HIDDEN * (1 + rank), 8, torch.bfloat16),
        "tokens differ": (HIDDEN, 8 + rank, torch.bfloat16),
        "dtype differs": (HIDDEN, 8, torch.float16 if rank == 0 else torch.bfloat16),
        "last is impossible": (HIDDEN if rank < world_size - 1 else 0, 8, torch.bfloat16),
        "all are impossible": (HIDDEN, -1, torch.bfloat16),
        "no tokens": (HIDDEN, 0, torch.bfloat16),
        "default group": None,
    }.items():
        if arguments is None:
            made = attempt(lambda: create(None, HIDDEN, 8, torch.bfloat16))
        else:
            made = attempt(lambda arguments=arguments: create(group, *arguments))
        results["create", name] = made if made is None or isinstance(made, str) else "made"
    if world_size > 1:
        pair = dist.new_group([0, world_size - 1])
        made = create(pair, HIDDEN, 8, torch.bfloat16)
        inside = rank in (0, world_size - 1)
        results["create", "outsider"] = (made is not None) == inside
        if made is not None:
            results["create", "pair"] = (made.world_size, made.rank, made.device_group is pair)
    return results


def refusals(workspace: Any, rank: int, world_size: int) -> dict[Any, Any]:
    """Refused on every rank alike, so that no rank waits for another."""

    def gather(num_tokens: int, strategy: str | None, *, missing: int = 0) -> Any:
        slots = (num_tokens + world_size - 1) // world_size
        part = beam_part(num_tokens, deal(num_tokens, world_size)[rank], slots)
        kept = slots - missing if missing else slots + 2
        part.gemm2_permuted = part.gemm2_permuted[: kept * TOP_K]
        return attempt(
            lambda: reference.beam_moe_finalize_gather_norm_residual_norm(
                part,
                residual_of(num_tokens),
                *tail_of("bare"),
                workspace,
                strategy=strategy,
            )
        )

    return {
        ("refuse", "strategy"): gather(3, "fused"),
        ("refuse", "strategy, no tokens"): gather(0, "fused"),
        ("refuse", "max_tokens"): gather(MAX_TOKENS + 1, None),
        ("refuse", "slots"): gather(2 * world_size, None, missing=1),
        ("refuse", "all-reduce max_tokens"): attempt(
            lambda: reference.beam_finalize_allreduce_norm_residual_norm(
                expert_part(MAX_TOKENS + 1, rank, world_size),
                residual_of(MAX_TOKENS + 1),
                *tail_of("bare"),
                workspace,
            )
        ),
    }


def run(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        workspace = reference.BeamAllReduceWorkspace.create(
            dist.group.WORLD, HIDDEN, MAX_TOKENS, torch.bfloat16
        )
        assert workspace is not None
        fields = vars(workspace) | {"device_group": workspace.device_group is dist.group.WORLD}
        # One workspace serves all of it, sizes and strategies mixed (RUN-5).
        results = {
            ("fields",): fields,
            **gathers(workspace, rank, world_size),
            **all_reduces(workspace, rank, world_size),
            **hook_calls(workspace, rank, world_size),
            **requests(rank, world_size),
            **refusals(workspace, rank, world_size),
        }
        torch.save(results, f"{folder}/{world_size}-{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main(folder: str, world_sizes: list[int]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("fork")
    for world_size in world_sizes:
        ranks = [
            context.Process(target=run, args=(rank, world_size, folder), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(2 * TIMEOUT.total_seconds())
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
        if failed:
            sys.exit(f"of {world_size} ranks, these failed or did not end: {failed}")


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), [int(argument) for argument in sys.argv[2:]])
