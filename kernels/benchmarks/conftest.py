"""Collects the benchmark's rows and writes them: a table, JSON, and a plot."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

RESULTS = Path(__file__).parents[2] / "conformance" / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, default=RESULTS, help="folder for JSON and plot")


@pytest.fixture(scope="session")
def host() -> dict[str, dict[str, float]]:
    """What an eager call costs the host, by operation."""
    return {}


@pytest.fixture(scope="session")
def rows(
    request: pytest.FixtureRequest, host: dict[str, dict[str, float]]
) -> Iterator[list[dict[str, Any]]]:
    """A row for each operation, model and number of tokens; written at the end, with ``host``."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    found: list[dict[str, Any]] = []
    yield found
    if not found:
        return
    import timing

    streams = timing.streams(BIG)
    best = max(stream.bandwidth for stream in streams)
    for row in found:
        row["best_bandwidth_floor_us"] = row["bytes"] / best / 1e6
        row["share_of_best_bandwidth"] = row["best_bandwidth_floor_us"] / row["us"]
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "empty_kernel_us": timing.empty_kernel(),
        "best_bandwidth_tb_s": best,
        "streams": [
            {"reads": s.reads, "writes": s.writes, "bytes": s.bytes, "tb_s": s.bandwidth}
            for s in streams
        ],
    }
    folder: Path = request.config.getoption("--results")
    folder.mkdir(parents=True, exist_ok=True)
    name = "bench-kernels-" + machine["gpu"].lower().replace(" ", "-")
    text = json.dumps({"machine": machine, "host": host, "rows": found}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
    _print(machine, found)
    for operation, times in host.items():
        print(f"host: {operation:28} {times['us']:6.2f} us  of torch.add's {times['of_add']:.2f}")
    _plot(folder / f"{name}.png", machine, found)


BIG = 2 * 2**30  # bytes at which a stream's launch no longer counts


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[0]


def _print(machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    print(f"\n{ {key: value for key, value in machine.items() if key != 'streams'} }")
    for s in machine["streams"]:
        print(f"stream {s['reads']}:{s['writes']} {s['tb_s']:.3f} TB/s")
    for row in rows:
        peers = "  ".join(f"{name} x{row[name] / row['us']:.2f}" for name in PEERS if name in row)
        print(
            f"{row['operation']:9} {row['model']:14} T={row['tokens']:<6} {row['us']:8.2f} us "
            f"{row['tb_s']:6.3f} TB/s  of best {row['share_of_best_bandwidth']:.3f}  of a stream "
            f"{row.get('share_of_stream', float('nan')):.3f}  of its own stream "
            f"{row.get('share_of_own_stream', float('nan')):.3f}  x empty "
            f"{row['us'] / machine['empty_kernel_us']:6.2f}  {peers}"
        )


PEERS = ("torch.compile", "unfused", "unfused, vLLM's boundary", "vLLM", "vLLM, dependent launch")


def _plot(path: Path, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    operations = ("finalize", "fused", "boundary")
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), sharex=True)
    for (top, bottom), operation in zip(axes.T, operations, strict=True):
        mine = [r for r in rows if r["operation"] == operation and r["model"] == "DeepSeek-V3"]
        tokens = [row["tokens"] for row in mine]
        top.plot(tokens, [row["us"] for row in mine], "o-", label="moetail")
        for name in PEERS:
            if any(name in row for row in mine):
                have = [row for row in mine if name in row]
                top.plot([r["tokens"] for r in have], [r[name] for r in have], ".--", label=name)
        floor = [max(r["best_bandwidth_floor_us"], machine["empty_kernel_us"]) for r in mine]
        top.plot(tokens, floor, "k:", label="floor: best bandwidth, or an empty kernel")
        top.set(title=f"{operation}, H = 7168, K = 8", xscale="log", yscale="log", ylabel="us")
        top.legend(fontsize=7)
        for model in dict.fromkeys(r["model"] for r in rows if r["operation"] == operation):
            line = [r for r in rows if r["operation"] == operation and r["model"] == model]
            bottom.plot(
                [row["tokens"] for row in line],
                [
                    max(row["best_bandwidth_floor_us"], machine["empty_kernel_us"]) / row["us"]
                    for row in line
                ],
                ".-",
                label=model,
            )
        bottom.axhline(1.0, color="k", linewidth=0.5)
        bottom.set(xscale="log", xlabel="tokens", ylabel="floor / time", ylim=(0, 1.1))
        bottom.legend(fontsize=7)
    figure.suptitle(
        f"{machine['gpu']}, torch {machine['torch']}, CUDA {machine['cuda']}, {machine['date']}; "
        f"best bandwidth {machine['best_bandwidth_tb_s']:.2f} TB/s, empty kernel "
        f"{machine['empty_kernel_us']:.2f} us"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
