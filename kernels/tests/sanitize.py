"""A launch of each kernel that sums over a token or exchanges, small: for compute-sanitizer.

    compute-sanitizer --tool memcheck python kernels/tests/sanitize.py

with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``, so that every tensor is memory of its own.
Ranks that wait for each other do not run at the same time under its tools; so exchanges have one.
"""

from __future__ import annotations

import torch
from torch import Tensor

import moetail.kernels as kernels
from moetail.spec import MoEOutput, UnfinalizedMoEOutput

# Tokens, H, K; each takes another kernel, or another part of one.
FUSED = [
    *((1, 7168, 8), (100, 512, 2), (100, 1280, 1), (100, 7168, 8), (100, 5120, 8)),
    *((100, 5120, 4), (100, 2048, 10), (20, 768, 3), (300, 7168, 8)),
]
BOUNDARY = [(100, 768), (300, 7168), (600, 7168), (600, 7936), (3, 333), (2, 9000)]
GATHER = [(tokens, hidden) for tokens in (1, 9, 300) for hidden in (512, 4608)]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def routes(tokens: int, hidden: int, top_k: int) -> UnfinalizedMoEOutput:
    index = torch.arange(tokens * top_k, dtype=torch.int32, device="cuda")
    weights = torch.rand(tokens, top_k, device="cuda")
    return UnfinalizedMoEOutput(random(tokens * top_k, hidden), weights, index.view(tokens, top_k))


def odd(tensor: Tensor) -> Tensor:
    """To an odd address."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def main() -> None:
    for tokens, hidden, top_k in FUSED:
        tail = (random(hidden), 1e-5, random(hidden), 1e-5, (0.5, 1.5))
        kernels.beam_moe_finalize_norm_residual_norm(
            routes(tokens, hidden, top_k), random(tokens, hidden), *tail, 1.5
        )
    for tokens, hidden in BOUNDARY:
        tail = (random(hidden), 1e-5, random(hidden), 1e-5, (0.5, 1.5))
        x, residual = random(tokens, hidden), random(tokens, hidden)
        kernels.beam_norm_residual_norm(x, residual, *tail)
        kernels.beam_norm_residual_norm(odd(x[:3]), residual[:3], *tail)
    for tokens, hidden in GATHER:
        (workspace,) = kernels.BeamAllReduceWorkspace.virtual(1, hidden, 512)
        x = routes(tokens, hidden, 2)
        norms = (random(hidden), 1e-5, random(hidden), 1e-5, (0.5, 1.5), workspace)
        residual = random(tokens, hidden)
        for strategy in ("oneshot", "twoshot", "unfused"):
            kernels.beam_moe_finalize_gather_norm_residual_norm(
                x, residual, *norms, strategy=strategy
            )
        for routed in (x, random(tokens, hidden)):
            kernels.beam_finalize_allreduce_norm_residual_norm(MoEOutput(routed), residual, *norms)
        workspace.check()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
