"""One launch of each kernel whose limits are in question, for Nsight Compute.

    ncu --clock-control none --metrics METRICS --csv python kernels/benchmarks/counters.py

``--list`` prints METRICS: time, memory throughput and traffic, and what warps wait for. Launches
are those of CASES, in order; ``--kernel-name regex:"tail|finalize"`` leaves out torch's.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed.avg.per_cycle_elapsed",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "launch__registers_per_thread",
    "launch__waves_per_multiprocessor",
)
CASES = (  # operation, model of the benchmark, tokens
    ("finalize", "DeepSeek-V3", 1024),
    ("finalize", "DeepSeek-V3", 16384),
    ("fused", "DeepSeek-V3", 1),
    ("fused", "DeepSeek-V3", 64),
    ("fused", "DeepSeek-V3", 1024),
    ("fused", "DeepSeek-V3", 4096),
    ("boundary", "DeepSeek-V3", 4096),
    ("fused", "Mixtral-8x7B", 4096),
    ("fused", "Llama-4", 4096),
    ("finalize", "Llama-4", 4096),
)


def main() -> None:
    import torch
    from test_bench import MODELS, OPERATIONS, inputs

    for operation, model, tokens in CASES:
        given = inputs(tokens, *MODELS[model])
        torch.cuda.synchronize()
        OPERATIONS[operation](given)
        torch.cuda.synchronize()


if __name__ == "__main__":
    if "--list" in sys.argv:
        print(",".join(METRICS))
    else:
        main()
