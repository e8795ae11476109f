"""What the distributed benchmark concludes from its times."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("test_bench_distributed").thresholds
    for name in ("test_bench_distributed", "rank_timing", "timing", "peers"):
        sys.modules.pop(name, None)


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
    thresholds: Any, measured: dict[str, Any], oneshot: int, separate: int | None
) -> None:
    assert thresholds(rows(**measured)) == {
        "moe_gather_oneshot_max_tokens": oneshot,
        "moe_gather_separate_norm_min_tokens": separate,
    }
