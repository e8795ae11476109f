"""`beam_moe_finalize` in Triton: one program a token, the whole row in registers.

It runs on a GPU, and on a CPU in Triton's interpreter (TRITON_INTERPRET=1). BF16 is read and
written as bits: on a GPU `x.to(tl.float32)` and `x.to(tl.bfloat16)` do the same; the interpreter
cuts where it should round (ROUND-3) and takes subnormal numbers for others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moetail.spec import checks


@triton.jit
def _float(bits):
    """BF16 bits as FP32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round(value):
    """RN: the bits of the nearest BF16 number, the even one of two (ROUND-3)."""
    bits = value.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    # A NaN must not be counted up into a zero.
    return tl.where(value == value, bits >> 16, 0x7FC0).to(tl.int16)


@triton.jit
def _finalize(
    rows,
    weights,
    post_weight,
    output,
    routed_scale,
    post_eps,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    AFFINE: tl.constexpr,
):
    # 64 bits: a token times K times H passes 2^31 elements (RUN-6).
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN

    # reduce: a = FP32 sum over k of float(w) * float(x) (ROUND-1)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP_K):
        route = token * TOP_K + k
        row = tl.load(rows + route * HIDDEN + column, mask=inside, other=0)
        total += tl.load(weights + route) * _float(row)

    # round: r = RN(a); scale: s = RN(float(r) * scale) (ROUND-2)
    bits = _round(_float(_round(total)) * routed_scale)

    # post-norm: n = RN(s * inv * w), on the rounded s, over exactly H elements (ROUND-4)
    if NORM:
        value = tl.where(inside, _float(bits), 0.0)
        value *= 1.0 / tl.sqrt(tl.sum(value * value) / HIDDEN + post_eps)
        if AFFINE:
            value *= _float(tl.load(post_weight + column, mask=inside, other=0))
        bits = _round(value)

    tl.store(output + token * HIDDEN + column, bits, mask=inside)


def beam_moe_finalize(
    expert_outputs: Tensor,
    expert_weights: Tensor,
    output: Tensor,
    routed_scale: float = 1.0,
    post_weight: Tensor | None = None,
    post_eps: float | None = None,
) -> Tensor:
    checks.check("beam_moe_finalize", locals())
    live, hidden_size = output.shape
    if live == 0:
        return output  # nothing is launched (LIVE-2)
    with torch.cuda.device_of(output):
        _finalize[(live,)](
            expert_outputs.view(torch.int16),
            expert_weights,
            None if post_weight is None else post_weight.view(torch.int16),
            output.view(torch.int16),
            float(routed_scale),
            0.0 if post_eps is None else float(post_eps),
            TOP_K=expert_outputs.shape[1],
            HIDDEN=hidden_size,
            BLOCK=triton.next_power_of_2(hidden_size),
            NORM=post_eps is not None,
            AFFINE=post_weight is not None,
        )
    return output
