"""The kernels across GPUs: ``pytest kernels/benchmarks/test_bench_distributed.py``.

H = 7168, K = 8, one rank a GPU. Strategies of operation 6 beside each other, "unfused" being the
path over NCCL; operation 8 beside its steps over NCCL. Floors: the bytes that oneshot must move at
the best bandwidth of any streaming kernel in this run, and the bytes that a rank must send at what
its link carried in this run. ``--results DIR`` says where the JSON goes.
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

from moetail.conformance.ranks import RankPool
from moetail.spec import tokens_per_rank

HIDDEN, TOP_K, MAX_TOKENS = 7168, 8, 8192
GATHER_TOKENS = (1, 8, 32, 128, 512, 2048, 4096, 8192)
ALLREDUCE_TOKENS = (1, 8, 32, 128, 512)
# Microseconds of FlashInfer's fused finalize, all-reduce and norm on two H200s, another run.
FLASHINFER = {1: 7.4, 8: 7.7, 32: 10.2, 128: 26.8, 512: 142.0}


class Ranks:
    def __init__(self, pool: RankPool, number: int) -> None:
        self.pool, self.number = pool, number
        self.rows: list[dict[str, Any]] = []
        self.machine: dict[str, Any] = {}

    def run(self, function: Any, *arguments: int) -> dict[str, float]:
        outcomes = self.pool.run(self.number, function, *arguments, operation=function.__name__)
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
    text = json.dumps({"machine": ranks.machine, "rows": ranks.rows}, indent=1)
    path.write_text(text + "\n")


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
    times = ranks.run(rank_timing.allreduce, tokens, HIDDEN, TOP_K, MAX_TOKENS)
    row = {
        "operation": "all-reduce",
        "tokens": tokens,
        "us": times,
        "flashinfer_us_other_run": FLASHINFER[tokens],
        "fused_of_unfused": times["fused"] / times["unfused"],
    }
    ranks.rows.append(row)
    print(f"\n{row}")
