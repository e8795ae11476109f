"""The operations of the contract, in its order: the shared checks, then one operator.

Shapes, dtypes, refusals and rules of each are documented once, in :class:`moetail.spec.MoETail`.
On CUDA tensors the kernels run, on the current stream, without synchronizing, so that the values of
a route map are taken as the contract promises them. On CPU tensors the reference runs.
"""

from __future__ import annotations

from torch import Tensor

from moetail.kernels import direct, operators
from moetail.reference import convert_flashinfer_moe_output, route_major_moe_output
from moetail.spec import MoEOutput, UnfinalizedMoEOutput, checks
from moetail.spec.operations import BOUNDARY, FINALIZE, FUSED, MOE_OUTPUT

__all__ = [
    "beam_moe_finalize",
    "beam_moe_finalize_norm_residual_norm",
    "beam_norm_residual_norm",
    "convert_flashinfer_moe_output",
    "finalize_moe_output",
    "route_major_moe_output",
]


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _scales(scales: tuple[float, float] | None) -> tuple[float, float]:
    """None as factors: a product with 1.0 changes nothing, and nor does its rounding."""
    return (1.0, 1.0) if scales is None else (float(scales[0]), float(scales[1]))


def beam_moe_finalize(
    expert_outputs: Tensor,
    expert_weights: Tensor,
    output: Tensor,
    routed_scale: float = 1.0,
    post_weight: Tensor | None = None,
    post_eps: float | None = None,
) -> Tensor:
    """See :meth:`moetail.spec.MoETail.beam_moe_finalize`."""
    made = direct.finalize(
        expert_outputs, expert_weights, output, routed_scale, post_weight, post_eps
    )
    if made is not None:
        return made
    checks.check(FINALIZE, locals())
    operators.finalize_into(
        expert_outputs, expert_weights, output, float(routed_scale), post_weight, _number(post_eps)
    )
    return output


def beam_norm_residual_norm(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
) -> tuple[Tensor, Tensor | None]:
    """See :meth:`moetail.spec.MoETail.beam_norm_residual_norm`."""
    tail = (residual, post_weight, post_eps, next_weight, next_eps, scales)
    made = direct.boundary(x, tail)
    if made is not None:
        return made
    checks.check(BOUNDARY, locals())
    hidden, normalized = operators.boundary(
        x,
        residual,
        post_weight,
        _number(post_eps),
        next_weight,
        _number(next_eps),
        *_scales(scales),
    )
    return hidden, None if next_eps is None else normalized


def beam_moe_finalize_norm_residual_norm(
    x: UnfinalizedMoEOutput,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
    routed_scale: float = 1.0,
    *,
    strategy: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See :meth:`moetail.spec.MoETail.beam_moe_finalize_norm_residual_norm`.

    "fused", the default, is faster for every number of tokens: it neither writes the finalized rows
    nor reads them again.
    """
    tail = (residual, post_weight, post_eps, next_weight, next_eps, scales)
    if strategy is None or strategy == "fused":
        made = direct.fused(x, routed_scale, tail)
        if made is not None:
            return made
    checks.check(FUSED, locals())
    rows, weights = x.gemm2_permuted, x.expert_weights
    if strategy == "unfused" and rows.is_cuda:
        top_k, hidden_size = weights.shape[1], rows.shape[1]
        finalized = beam_moe_finalize(
            rows.view(rows.shape[0] // top_k, top_k, hidden_size),
            weights,
            residual.new_empty(residual.shape),
            routed_scale,
            post_weight,
            post_eps,
        )
        return beam_norm_residual_norm(
            finalized, residual, None, None, next_weight, next_eps, scales
        )
    hidden, normalized = operators.finalize_boundary(
        rows,
        weights,
        x.expanded_idx_to_permuted_idx,
        residual,
        post_weight,
        _number(post_eps),
        next_weight,
        _number(next_eps),
        *_scales(scales),
        float(routed_scale),
    )
    return hidden, None if next_eps is None else normalized


def finalize_moe_output(x: MoEOutput) -> Tensor:
    """See :meth:`moetail.spec.MoETail.finalize_moe_output`."""
    made = direct.finalize_output(x)
    if made is not None:
        return made
    checks.check(MOE_OUTPUT, locals())
    routed, factor = x.routed, float(x.routed_scaling_factor)
    if isinstance(routed, Tensor):
        if factor == 1.0 and x.shared_output is None:
            return routed
        finalized: Tensor = operators.finalize(routed, None, None, x.shared_output, factor)
    else:
        finalized = operators.finalize(
            routed.gemm2_permuted,
            routed.expert_weights,
            routed.expanded_idx_to_permuted_idx,
            x.shared_output,
            factor,
        )
    return finalized
