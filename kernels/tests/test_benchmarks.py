"""What the benchmarks conclude from their times, and compare them with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def rows(**times: tuple[float, float, float]) -> list[dict[str, Any]]:
    """From t8=(oneshot, twoshot, unfused), beside a row that is not the gather's."""
    names = ("oneshot", "twoshot", "unfused")
    gathers = [
        {"operation": "gather", "tokens": int(name[1:]), "us": dict(zip(names, us, strict=True))}
        for name, us in times.items()
    ]
    return [{"operation": "all-reduce", "tokens": 1, "us": {"fused": 1.0}}, *gathers]


@pytest.mark.parametrize(
    ("measured", "oneshot", "separate"),
    [
        # Always the fastest, or within the noise of it.
        ({"t8": (4.0, 5.0, 9.0), "t64": (101.0, 100.0, 200.0)}, 64, None),
        # Past 64 tokens twoshot leads, and from 512 on the steps do.
        (
            {
                "t512": (90.0, 70.0, 60.0),
                "t64": (10.0, 12.0, 20.0),
                "t128": (20.0, 15.0, 30.0),
                "t1024": (200.0, 150.0, 100.0),
            },
            64,
            512,
        ),
        # A lead that does not last is none.
        ({"t8": (5.0, 4.0, 9.0), "t64": (4.0, 5.0, 9.0)}, 0, None),
        ({"t8": (5.0, 6.0, 4.0), "t64": (9.0, 5.0, 9.0), "t512": (9.0, 9.0, 5.0)}, 0, 512),
        # Never the fastest, from the first size on.
        ({"t8": (5.0, 6.0, 4.0), "t64": (9.0, 9.0, 5.0)}, 0, 8),
    ],
)
def test_thresholds(
    benchmarks: Callable[[str], Any],
    measured: dict[str, Any],
    oneshot: int,
    separate: int | None,
) -> None:
    assert benchmarks("test_bench_distributed").thresholds(rows(**measured)) == {
        "moe_gather_oneshot_max_tokens": oneshot,
        "moe_gather_separate_norm_min_tokens": separate,
    }


@pytest.mark.parametrize(
    ("operation", "top_k", "stream"),
    [
        *(("finalize", 8, "8:1"), ("fused", 8, "9:2"), ("boundary", 8, "2:2")),
        *(("finalize", 10, "8:1"), ("finalize", 1, "2:2"), ("fused", 1, "2:2")),
        ("fused", 2, "2:2"),
    ],
)
def test_streams_of_an_operations_own_proportion(
    benchmarks: Callable[[str], Any], operation: str, top_k: int, stream: str
) -> None:
    timing = benchmarks("timing")
    streams = [timing.Stream(reads, writes, 1, 1.0) for reads, writes in timing.STREAMS]
    assert benchmarks("test_bench").own_stream(operation, top_k, streams).name == stream
