"""A real MoE layer: router, top-k, SwiGLU experts in BF16, stopped after its second GEMM.

Matrix products run in float64 and are rounded to BF16 once. The operands are short integers times
a power of two, so that the first product is exact: no thread count or library changes a bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moetail.conformance.cases.arithmetic import bf16, generator, integers
from moetail.conformance.cases.models import Model

__all__ = ["MoELayer", "route"]


def route(logits: Tensor, bias: Tensor, model: Model, top_k: int) -> tuple[Tensor, Tensor]:
    """(ids, weights) ``[T, K]`` of router logits ``[T, E]``; the routed scale is not in them."""
    scores = logits.softmax(-1) if model.scoring == "softmax" else logits.sigmoid()
    choice = scores + bias if model.bias else scores
    experts = logits.shape[1]
    groups = model.groups
    # Scaled-down layers may have too few experts for the model's groups.
    if groups > 1 and experts % groups == 0 and experts // groups * model.kept_groups >= top_k:
        by_group = choice.view(-1, groups, experts // groups)
        best = by_group.topk(min(2, experts // groups), dim=-1).values.sum(-1)
        kept = best.topk(model.kept_groups, dim=-1).indices
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        choice = torch.where(mask.unsqueeze(-1), by_group, -torch.inf).view(-1, experts)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if model.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


@dataclass
class MoELayer:
    """A layer whose expert weights are windows of one pool, so that hundreds of experts cost none.

    Attributes:
        model: routing rules; sizes may be scaled down from its own.
        hidden, experts, top_k: H, E, K.
        seed: everything random follows from it.
        intermediate: SwiGLU's width; small, since only its result matters here.
    """

    model: Model
    hidden: int
    experts: int
    top_k: int
    seed: int
    intermediate: int = 16

    def __post_init__(self) -> None:
        gen = generator("moe layer", self.model.name, self.hidden, self.experts, self.seed)
        size = self.intermediate * self.hidden
        # One entry more per expert than a window: every expert starts at another offset.
        self._pool = integers(-127, 127, (3 * size + 7 * (self.experts + 1),), gen) / 128.0
        self._router = integers(-127, 127, (self.experts, self.hidden), gen) / 128.0
        self._bias = integers(0, 127, (self.experts,), gen) / 1024.0

    def expert_weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """(w13 ``[2I, H]``, w2 ``[H, I]``) of an expert; the shared expert is number E."""
        size = self.intermediate * self.hidden
        start = 7 * expert
        w13 = self._pool[start : start + 2 * size].view(2 * self.intermediate, self.hidden)
        w2 = self._pool[start + 2 * size : start + 3 * size].view(self.hidden, self.intermediate)
        return w13, w2

    def expert(self, number: int, x: Tensor) -> Tensor:
        """SwiGLU of tokens ``[n, H]``: float64 on BF16's grid."""
        w13, w2 = self.expert_weights(number)
        gate_up = bf16(x @ w13.T * (1.7 / math.sqrt(self.hidden)))
        gate, up = gate_up.chunk(2, dim=-1)
        activated = bf16(gate * gate.sigmoid() * up)
        return bf16(activated @ w2.T * (4.0 / math.sqrt(self.intermediate)))

    def tokens(self, count: int) -> Tensor:
        """``count`` layer inputs: float64 on BF16's grid, no bit below 2^-14."""
        gen = generator("moe tokens", self.seed, self.hidden)
        values = torch.randn((count, self.hidden), generator=gen, dtype=torch.float64)
        return torch.round(bf16(values) * 2**14) / 2**14

    def routes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(ids ``[T, K]``, FP32 weights ``[T, K]``)."""
        logits = x @ self._router.T * (3.0 / math.sqrt(self.hidden))
        ids, weights = route(logits, self._bias, self.model, self.top_k)
        return ids, weights.to(torch.float32)

    def rows(self, x: Tensor, ids: Tensor) -> Tensor:
        """BF16 ``[T, K, H]``: the unweighted result of every route."""
        out = torch.empty((*ids.shape, self.hidden), dtype=torch.bfloat16)
        for expert in sorted(set(ids.flatten().tolist())):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            out[token, slot] = self.expert(expert, x[token]).to(torch.bfloat16)
        return out

    def shared(self, x: Tensor, ranks: int) -> Tensor:
        """BF16 ``[ranks, T, H]``: each rank's part of the shared expert, split along I."""
        w13, w2 = self.expert_weights(self.experts)
        gate, up = bf16(x @ w13.T * (1.7 / math.sqrt(self.hidden))).chunk(2, dim=-1)
        activated = bf16(gate * gate.sigmoid() * up) * (4.0 / math.sqrt(self.intermediate))
        owner = torch.arange(self.intermediate) * ranks // self.intermediate
        parts = [bf16(activated * (owner == rank) @ w2.T) for rank in range(ranks)]
        return torch.stack(parts).to(torch.bfloat16)
