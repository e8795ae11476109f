"""Device time of a launch in a CUDA graph, host time of a call, and the memory's own speed."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetail.kernels import build

HOT_TOKENS = 64  # up to here a model finds its tensors in the L2, and so does the benchmark
ROTATION = 12  # above: as many sets of tensors as make 12 times the L2
STREAMS = ((8, 0), (8, 1), (9, 2), (2, 2), (1, 1))  # reads, writes


def graph_time(launches: Sequence[Callable[[], Any]], replays: int = 9) -> float:
    """Microseconds a launch: the median over replays of a graph of all of them.

    Every launch's outputs are kept, so that each writes memory of its own. A replay runs before
    the first event, so that the host's launch of the second is not in the time.
    """
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        kept = [launch() for launch in launches]
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    del kept
    return statistics.median(times)


def host_times(
    calls: Mapping[str, Callable[[], Any]], samples: int = 60, batch: int = 100
) -> dict[str, float]:
    """Microseconds of the host for an eager call of each: the median over samples.

    The calls take turns, a batch of each, so that all have the machine in the same state. A batch
    is short enough for the GPU's queue to take it all, and so nothing waits for the GPU.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for sample in range(samples + 3):  # the first ones warm up
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(batch):
                    call()
                elapsed = time.perf_counter() - start
                if sample >= 3:
                    times[name].append(elapsed * 1e6 / batch)
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return {name: statistics.median(found) for name, found in times.items()}


def number_of_sets(tokens: int, bytes_a_set: int) -> int:
    if tokens <= HOT_TOKENS:
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, math.ceil(ROTATION * cache / bytes_a_set))


def rotated(call: Callable[[Any], Any], sets: Sequence[Any]) -> list[Callable[[], Any]]:
    """Launches over all sets, and over again until there are enough to time."""
    rounds = 100 if len(sets) == 1 else max(1, math.ceil(16 / len(sets)))
    return [functools.partial(call, item) for _ in range(rounds) for item in sets]


@functools.cache
def _streams() -> Any:
    import tvm_ffi.cpp

    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    home = build._cuda_home()
    with build._environment({"CUDA_HOME": str(home), "TVM_FFI_CUDA_ARCH_LIST": capability}):
        return tvm_ffi.cpp.load(
            "moetail_streams",
            sources=[str(Path(__file__).parent / "streams.cu")],
            extra_ldflags=[f"-L{home / name}" for name in ("lib64", "lib")],
        )


@functools.cache
def empty_kernel() -> float:
    """Microseconds of a kernel that does nothing, in a graph, without dependent launch."""
    any_tensor = torch.zeros(1, device="cuda")
    return graph_time([lambda: _streams().empty(any_tensor)] * 100)


@dataclass(frozen=True)
class Stream:
    """A streaming kernel's time for so many bytes."""

    reads: int
    writes: int
    bytes: int
    microseconds: float

    @property
    def name(self) -> str:
        return f"{self.reads}:{self.writes}"

    @property
    def bandwidth(self) -> float:
        """TB/s."""
        return self.bytes / self.microseconds / 1e6


@functools.cache
def streams(total_bytes: int) -> tuple[Stream, ...]:
    """Every streaming kernel over about that many bytes, on rotating buffers."""
    results = []
    for reads, writes in STREAMS:
        n = max(256, total_bytes // (16 * (reads + writes)) // 256 * 256)
        moved = 16 * (reads + writes) * n
        sets = [
            (
                torch.randint(0, 2**31 - 1, (4 * reads * n,), device="cuda", dtype=torch.int32),
                torch.empty(4 * max(writes, 1) * n, device="cuda", dtype=torch.int32),
            )
            for _ in range(number_of_sets(HOT_TOKENS + 1, moved))
        ]

        def call(
            pair: tuple[torch.Tensor, torch.Tensor], n: int = n, r: int = reads, w: int = writes
        ) -> None:
            _streams().stream(*pair, n, r, w)

        results.append(Stream(reads, writes, moved, graph_time(rotated(call, sets), 5)))
    return tuple(results)
