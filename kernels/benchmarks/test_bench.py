"""The kernels against their floors and their peers: ``pytest kernels/benchmarks``.

Times are device times of a launch in a CUDA graph, hot for up to 64 tokens and on rotating buffers
past the L2 for more. Two floors: the bytes that must move at the best bandwidth that any streaming
kernel reached in this run, and a streaming kernel of the same bytes. Beside them, what an eager
call costs the host, and what ``torch.add`` does. ``--results DIR`` says where JSON and plot go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import peers
import pytest
import timing
import torch
from torch import Tensor

import moetail.kernels as kernels
from moetail.spec import MoEOutput, UnfinalizedMoEOutput

TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
MODELS = {  # H, K
    "DeepSeek-V3": (7168, 8),
    "Kimi-K2": (7168, 8),
    "Qwen3-235B": (4096, 8),
    "GLM-4.5": (5120, 8),
    "MiniMax-M2": (3072, 8),
    "Mixtral-8x7B": (4096, 2),
    "Qwen3-Next": (2048, 10),
    "Llama-4": (5120, 1),
}
# Kimi-K2's tail is DeepSeek-V3's; all others at the sizes where bandwidth is all.
GRID = [("DeepSeek-V3", tokens) for tokens in TOKENS] + [
    (model, tokens)
    for model in MODELS
    if model not in ("DeepSeek-V3", "Kimi-K2")
    for tokens in (64, 1024, 4096, 16384)
]
SCALES = (0.75, 1.25)


@dataclass
class Inputs:
    """What an operation reads, of random values; outputs are the launch's own."""

    rows: Tensor
    weights: Tensor
    index: Tensor
    residual: Tensor
    routed: Tensor
    post: Tensor
    following: Tensor

    @property
    def x(self) -> UnfinalizedMoEOutput:
        return UnfinalizedMoEOutput(self.rows, self.weights, self.index)

    @property
    def slots(self) -> Tensor:
        return self.rows.view(*self.weights.shape, -1)


def inputs(tokens: int, hidden: int, top_k: int) -> Inputs:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return Inputs(
        random(tokens * top_k, hidden),
        torch.rand(tokens, top_k, device="cuda"),
        torch.arange(tokens * top_k, device="cuda", dtype=torch.int32).view(tokens, top_k),
        random(tokens, hidden),
        random(tokens, hidden),
        random(hidden),
        random(hidden),
    )


def finalize(i: Inputs) -> Tensor:
    return kernels.beam_moe_finalize(i.slots, i.weights, torch.empty_like(i.residual), 1.5)


def fused(i: Inputs, strategy: str = "fused") -> Any:
    return kernels.beam_moe_finalize_norm_residual_norm(
        i.x, i.residual, i.post, 1e-6, i.following, 1e-5, SCALES, 1.5, strategy=strategy
    )


def boundary(i: Inputs) -> Any:
    return kernels.beam_norm_residual_norm(
        i.routed, i.residual, i.post, 1e-6, i.following, 1e-5, SCALES
    )


OPERATIONS = {"finalize": finalize, "fused": fused, "boundary": boundary}


def rows_moved(operation: str, top_k: int) -> tuple[int, int]:
    """Rows of H read and written a token, each once."""
    return {"finalize": (top_k, 1), "fused": (top_k + 1, 2), "boundary": (2, 2)}[operation]


def own_stream(operation: str, top_k: int, streams: Sequence[timing.Stream]) -> timing.Stream:
    """The one of those that reads and writes in the operation's proportion, or nearly."""
    reads, writes = rows_moved(operation, top_k)
    own = reads / (reads + writes)
    both = [stream for stream in streams if stream.writes]
    return min(both, key=lambda stream: abs(stream.reads / (stream.reads + stream.writes) - own))


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize(("model", "tokens"), GRID)
def test_bench(
    benchmark: Any, rows: list[dict[str, Any]], operation: str, model: str, tokens: int
) -> None:
    hidden, top_k = MODELS[model]
    weights = 4 * tokens * top_k if operation != "boundary" else 0
    moved = 2 * hidden * tokens * sum(rows_moved(operation, top_k)) + weights
    sets = [inputs(tokens, hidden, top_k) for _ in range(timing.number_of_sets(tokens, moved))]

    def measure(call: Any) -> float:
        return timing.graph_time(timing.rotated(call, sets))

    call = OPERATIONS[operation]
    us = benchmark.pedantic(measure, args=(call,), rounds=1, iterations=1)
    row = {
        "operation": operation,
        "model": model,
        "hidden": hidden,
        "top_k": top_k,
        "tokens": tokens,
        "us": us,
        "bytes": moved,
        "tb_s": moved / us / 1e6,
    }
    if tokens > timing.HOT_TOKENS:
        streams = timing.streams(moved)
        own = own_stream(operation, top_k, streams)
        row["stream_us"] = min(moved / s.bandwidth / 1e6 for s in streams)
        row["share_of_stream"] = row["stream_us"] / us
        row["own_stream"] = own.name
        row["share_of_own_stream"] = moved / own.bandwidth / 1e6 / us
    if model == "DeepSeek-V3":
        row.update(peers_of(operation, measure))
    benchmark.extra_info.update(row)
    rows.append(row)


def host_calls() -> dict[str, Callable[[], Any]]:
    """An eager call of each operation, into new tensors, beside calls of torch.

    The exchanges have one rank, so that their kernels wait for nobody.
    """
    hidden, top_k = MODELS["DeepSeek-V3"]
    i = inputs(1, hidden, top_k)
    x, slots = i.x, i.slots
    tail = (i.residual, i.post, 1e-6, i.following, 1e-5, SCALES)
    output = MoEOutput(x, i.residual, 1.5)
    (workspace,) = kernels.BeamAllReduceWorkspace.virtual(1, hidden, 8)
    outputs = torch.empty_like(i.residual), torch.empty_like(i.residual)
    return {
        "torch.add": lambda: torch.add(i.residual, i.routed),
        "torch's rms_norm": lambda: torch.nn.functional.rms_norm(i.residual, (hidden,), i.post),
        "finalize": lambda: kernels.beam_moe_finalize(
            slots, i.weights, torch.empty_like(i.residual), 1.5
        ),
        "boundary": lambda: kernels.beam_norm_residual_norm(i.routed, *tail),
        "fused": lambda: kernels.beam_moe_finalize_norm_residual_norm(x, *tail, 1.5),
        "finalize_moe_output": lambda: kernels.finalize_moe_output(output),
        "gather": lambda: kernels.beam_moe_finalize_gather_norm_residual_norm(
            x, *tail, workspace, 1.5
        ),
        "all-reduce": lambda: kernels.beam_finalize_allreduce_norm_residual_norm(
            output, *tail, workspace
        ),
        "gather, the launch alone": lambda: workspace.launch(
            "gather",
            *outputs,
            (False, i.rows, i.weights, 1.5),
            (i.post, 1e-6, i.residual, *SCALES, i.following, 1e-5),
        ),
    }


def test_host_time(rows: list[dict[str, Any]], host: dict[str, dict[str, float]]) -> None:
    times = timing.host_times(host_calls())
    for name, us in times.items():
        host[name] = {"us": us, "of_add": us / times["torch.add"]}


def peers_of(operation: str, measure: Any) -> dict[str, float]:
    """Microseconds of each peer that is there."""
    vllm = peers.vllm_boundary()

    def vllm_boundary(i: Inputs, pdl: bool = False) -> Any:
        assert vllm is not None
        return vllm(i.routed, i.residual, i.post, 1e-6, i.following, 1e-5, SCALES, launch_pdl=pdl)

    def finalize_and_vllm(i: Inputs, pdl: bool = False) -> Any:
        # Its boundary always has a post-norm; the bytes are those of one that has none.
        finalized = kernels.beam_moe_finalize(
            i.slots, i.weights, torch.empty_like(i.residual), 1.5, i.post, 1e-6
        )
        assert vllm is not None
        return finalized, vllm(
            finalized, i.residual, i.post, 1e-6, i.following, 1e-5, SCALES, launch_pdl=pdl
        )

    found = {}
    if operation == "boundary" and vllm is not None:
        found["vLLM"] = measure(vllm_boundary)
        found["vLLM, dependent launch"] = measure(lambda i: vllm_boundary(i, True))
    norm = peers.flashinfer_norm()
    if operation == "boundary" and norm is not None:
        # The residual add and the next norm alone: no post-norm and no scales. In place, so last.
        def add_and_norm(i: Inputs, dependent: bool) -> None:
            norm(i.routed, i.residual, i.following, 1e-5, dependent)

        found["FlashInfer's fused_add_rmsnorm"] = min(
            measure(lambda i: add_and_norm(i, False)), measure(lambda i: add_and_norm(i, True))
        )
    if operation == "fused":
        found["unfused"] = measure(lambda i: fused(i, "unfused"))
        if vllm is not None:
            # Neither is the faster one at every T.
            found["unfused, vLLM's boundary"] = min(
                measure(finalize_and_vllm), measure(lambda i: finalize_and_vllm(i, True))
            )
        compiled = peers.compiled_fused()
        found["torch.compile"] = measure(
            lambda i: compiled(i.slots, i.weights, i.residual, i.post, i.following)
        )
    return found
