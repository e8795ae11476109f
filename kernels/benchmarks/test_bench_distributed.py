"""The kernels across GPUs: ``pytest kernels/benchmarks/test_bench_distributed.py``.

H = 7168, K = 8, one rank a GPU. Strategies of operation 6 beside each other, "unfused" being the
path over NCCL; operation 8 beside its steps over NCCL and, where :mod:`peers` has built it, beside
FlashInfer's kernel. Floors: the bytes that oneshot must move at the best bandwidth of any streaming
kernel in this run, and the bytes that a rank must send at what its link carried in this run.
``--results DIR`` says where the JSON goes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_timing
import timing
import torch

from moetail.conformance.run.ranks import RankError, RankPool
from moetail.spec import tokens_per_rank

HIDDEN, TOP_K, MAX_TOKENS = 7168, 8, 8192
GATHER_TOKENS = (1, 8, 32, 128, 512, 2048, 4096, 8192)
ALLREDUCE_TOKENS = (1, 8, 32, 128, 512)
PEER_TIMEOUT = 60.0  # seconds: a peer's kernel that waits for a rank in vain does so for good


class Ranks:
    def __init__(self, pool: RankPool, number: int) -> None:
        self.pool, self.number = pool, number
        self.rows: list[dict[str, Any]] = []
        self.machine: dict[str, Any] = {}

    def run(self, function: Any, *arguments: int, timeout: float | None = None) -> dict[str, float]:
        outcomes = self.pool.run(
            self.number, function, *arguments, operation=function.__name__, timeout=timeout
        )
        for outcome in outcomes:
            assert outcome.error is None, outcome.error.traceback
        result: dict[str, float] = outcomes[0].value
        return result


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    number = torch.cuda.device_count()
    if number < 2:
        pytest.skip("needs two GPUs")
    number = min(number, 8)
    with RankPool(number, device="cuda", timeout=300.0) as pool:
        ranks = Ranks(pool, number)
        name = torch.cuda.get_device_name()
        best = max(stream.bandwidth for stream in timing.streams(2 * 2**30))
        torch.cuda.empty_cache()
        ranks.machine = {
            "gpus": number,
            "gpu": name,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "best_bandwidth_tb_s": best,
            **ranks.run(rank_timing.links),
        }
        print(f"\n{ranks.machine}")
        yield ranks
    folder: Path = request.config.getoption("--results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bench-distributed-{number}x-{name.lower().replace(' ', '-')}.json"
    report = {"machine": ranks.machine, "thresholds": thresholds(ranks.rows), "rows": ranks.rows}
    path.write_text(json.dumps(report, indent=1) + "\n")


NOISE = 1.02  # a strategy that is slower by less is as good


def thresholds(rows: list[dict[str, Any]]) -> dict[str, int | None]:
    """The workspace's thresholds that these times ask for.

    Of the numbers of tokens that were measured: the largest up to which "oneshot" is always as good
    as the others (0 if it never is), and the smallest from which "unfused" always is, or None.
    """
    oneshot, separate, leads = 0, None, True
    for row in sorted((r for r in rows if r["operation"] == "gather"), key=lambda r: r["tokens"]):
        times = {name: row["us"][name] for name in ("oneshot", "twoshot", "unfused")}
        good = NOISE * min(times.values())
        leads = leads and times["oneshot"] <= good
        if leads:
            oneshot = row["tokens"]
        if leads or times["unfused"] > good:
            separate = None
        elif separate is None:
            separate = row["tokens"]
    return {
        "moe_gather_oneshot_max_tokens": oneshot,
        "moe_gather_separate_norm_min_tokens": separate,
    }


@pytest.mark.parametrize("tokens", GATHER_TOKENS)
def test_gather(ranks: Ranks, tokens: int) -> None:
    times = ranks.run(rank_timing.gather, tokens, HIDDEN, TOP_K, MAX_TOKENS)
    slots = tokens_per_rank(tokens, ranks.number)
    machine = ranks.machine
    moved = 2 * HIDDEN * (slots * TOP_K + 3 * tokens)
    sent = 2 * HIDDEN * slots * (ranks.number - 1)
    row = {
        "operation": "gather",
        "tokens": tokens,
        "us": times,
        "memory_floor_us": moved / machine["best_bandwidth_tb_s"] / 1e6,
        "link_floor_us": sent / machine["link_gb_s"] / 1e3,
        "default_of_unfused": times["default"] / times["unfused"],
        "default_of_best": times["default"] / min(times.values()),
    }
    row["default_of_floor"] = times["default"] / max(row["memory_floor_us"], row["link_floor_us"])
    ranks.rows.append(row)
    print(f"\n{row}")


@pytest.mark.parametrize("tokens", ALLREDUCE_TOKENS)
def test_allreduce(ranks: Ranks, tokens: int) -> None:
    sizes = (tokens, HIDDEN, TOP_K, MAX_TOKENS)
    times = ranks.run(rank_timing.allreduce, *sizes)
    shares = ranks.run(rank_timing.rounding, *sizes)
    row: dict[str, Any] = {
        "operation": "all-reduce",
        "tokens": tokens,
        "us": times,
        "fused_of_unfused": times["fused"] / times["unfused"],
        # Of hidden, without a post-norm and scales.
        "not_correctly_rounded": shares,
    }
    ranks.rows.append(row)
    if ranks.run(rank_timing.has_flashinfer)["flashinfer"]:
        try:
            times |= ranks.run(rank_timing.flashinfer, *sizes, timeout=PEER_TIMEOUT)
            shares |= ranks.run(rank_timing.flashinfer_rounding, *sizes, timeout=PEER_TIMEOUT)
            row["fused_of_flashinfer"] = times["fused"] / times["flashinfer"]
        except RankError as error:
            row["flashinfer_failed"] = str(error)
    print(f"\n{row}")
