"""The operations over several ranks: 6, and the all-reduce of 8.

Shapes, dtypes, refusals and rules of each are documented once, in :class:`moetail.spec.MoETail`.
On CUDA tensors the kernels run, on the current stream, without synchronizing; on CPU tensors the
reference. A rank that does not arrive ends in an :class:`ExchangeError` of a later call, or of
``workspace.check()``, on all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moetail.kernels import direct
from moetail.kernels.operations import (
    beam_moe_finalize,
    beam_norm_residual_norm,
    finalize_moe_output,
)
from moetail.kernels.workspace import BeamAllReduceWorkspace, Buffers, default_strategy
from moetail.reference import Reference
from moetail.reference.operations import all_gather
from moetail.spec import (
    ContractError,
    MoEOutput,
    UnfinalizedMoEOutput,
    Workspace,
    checks,
    owned_tokens,
    tokens_per_rank,
)
from moetail.spec.operations import ALLREDUCE, GATHER

__all__ = [
    "beam_finalize_allreduce_norm_residual_norm",
    "beam_moe_finalize_gather_norm_residual_norm",
]

_reference = Reference()


def _of_device(workspace: Any, tensor: Tensor) -> tuple[BeamAllReduceWorkspace, Buffers]:
    """The workspace, if its buffers are on the tensor's device and all ranks are still there."""
    buffers = getattr(workspace, "buffers", None)
    if not isinstance(workspace, BeamAllReduceWorkspace) or buffers is None:
        raise ContractError(
            "DOMAIN-1",
            "workspace",
            f"a {type(workspace).__module__}.{type(workspace).__name__} without GPU buffers",
            "for CUDA tensors, one that moetail.kernels created over an NCCL group",
        )
    if buffers.device != tensor.device:
        raise ContractError("DOMAIN-1", "workspace", f"on {buffers.device}", f"on {tensor.device}")
    workspace.raise_if_lost()
    return workspace, buffers


def _aligned(tensor: Tensor | None) -> Tensor | None:
    """16-byte accesses need it; nearly every tensor is."""
    return tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone()


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _outputs(residual: Tensor, next_eps: float | None) -> tuple[Tensor, Tensor | None]:
    hidden = torch.empty_like(residual)
    return hidden, None if next_eps is None else torch.empty_like(residual)


def _boundary(
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
) -> tuple[Any, ...]:
    """As the kernels take it; scales None are factors of 1.0, which change nothing."""
    x_scale, r_scale = (1.0, 1.0) if scales is None else scales
    return (
        _aligned(post_weight),
        _number(post_eps),
        _aligned(residual),
        float(x_scale),
        float(r_scale),
        _aligned(next_weight),
        0.0 if next_eps is None else float(next_eps),
    )


def beam_moe_finalize_gather_norm_residual_norm(
    x: UnfinalizedMoEOutput,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
    workspace: Workspace,
    routed_scale: float = 1.0,
    *,
    strategy: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See :meth:`moetail.spec.MoETail.beam_moe_finalize_gather_norm_residual_norm`."""
    tail = (residual, post_weight, post_eps, next_weight, next_eps, scales)
    made = direct.gather(x, routed_scale, strategy, workspace, tail)
    if made is not None:
        return made
    checks.check(GATHER, locals())
    if not residual.is_cuda:
        return _reference.beam_moe_finalize_gather_norm_residual_norm(
            x, *tail, workspace, routed_scale, strategy=strategy
        )
    ours, _ = _of_device(workspace, residual)
    num_tokens = residual.shape[0]
    hidden, normalized = _outputs(residual, next_eps)
    if num_tokens == 0:
        return hidden, normalized
    strategy = strategy or default_strategy(num_tokens, workspace)
    if strategy == "unfused":
        return _unfused(x, tail, ours, float(routed_scale))
    ours.launch(
        "gather",
        hidden,
        normalized,
        (
            strategy == "twoshot",
            _aligned(x.gemm2_permuted),
            x.expert_weights,
            float(routed_scale),
        ),
        _boundary(*tail),
    )
    return hidden, normalized


def _unfused(
    x: UnfinalizedMoEOutput,
    tail: tuple[Any, ...],
    workspace: BeamAllReduceWorkspace,
    routed_scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Finalize, all-gather, boundary."""
    num_tokens, hidden_size = tail[0].shape
    slots = tokens_per_rank(num_tokens, workspace.world_size)
    owned = len(owned_tokens(num_tokens, workspace.world_size, workspace.rank))
    rows, weights = x.gemm2_permuted, x.expert_weights
    top_k = weights.shape[1]
    finalized = rows.new_empty((slots, hidden_size))  # past the owned ones, for nobody to read
    beam_moe_finalize(
        rows.view(rows.shape[0] // top_k, top_k, hidden_size),
        weights,
        finalized[:owned],
        routed_scale,
    )
    gathered = rows.new_empty((workspace.world_size * slots, hidden_size))
    collective = workspace.all_gather or all_gather()
    collective(gathered, finalized, group=workspace.device_group)
    return beam_norm_residual_norm(gathered[:num_tokens], *tail)


def beam_finalize_allreduce_norm_residual_norm(
    x: MoEOutput,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
    workspace: Workspace,
) -> tuple[Tensor, Tensor | None]:
    """See :meth:`moetail.spec.MoETail.beam_finalize_allreduce_norm_residual_norm`."""
    tail = (residual, post_weight, post_eps, next_weight, next_eps, scales)
    made = direct.allreduce(x, workspace, tail)
    if made is not None:
        return made
    checks.check(ALLREDUCE, locals())
    if not residual.is_cuda:
        return _reference.beam_finalize_allreduce_norm_residual_norm(x, *tail, workspace)
    ours, buffers = _of_device(workspace, residual)
    hidden, normalized = _outputs(residual, next_eps)
    num_tokens = residual.shape[0]
    if num_tokens == 0:
        return hidden, normalized
    if buffers.width != residual.shape[1]:
        return beam_norm_residual_norm(_summed(finalize_moe_output(x), ours), *tail)
    rows, weights, index = _routed(x)
    shared, factor = x.shared_output, float(x.routed_scaling_factor)
    if weights is not None and weights.shape[1] > checks.MAX_TOP_K:
        rows, weights, index, shared, factor = finalize_moe_output(x), None, None, None, 1.0
    rows, shared = _aligned(rows), _aligned(shared)
    post, eps, residual, x_scale, r_scale, following, following_eps = _boundary(*tail)
    # What every rank sends to every other one fits into a slot.
    step = buffers.slot_rows // workspace.world_size
    for start in range(0, num_tokens, step):
        part = slice(start, min(start + step, num_tokens))

        def cut(tensor: Tensor | None, part: slice = part) -> Tensor | None:
            return None if tensor is None else tensor[part]

        ours.launch(
            "allreduce",
            hidden[part],
            cut(normalized),
            (cut(rows) if weights is None else rows, cut(weights), cut(index), cut(shared), factor),
            (post, eps, cut(residual), x_scale, r_scale, following, following_eps),
        )
    return hidden, normalized


def _summed(finalized: Tensor, workspace: BeamAllReduceWorkspace) -> Tensor:
    """The sum over ranks, for a width that the kernel has not: laid out in rows of one it has."""
    buffers = workspace.buffers
    assert buffers is not None
    elements = finalized.numel()
    rows = finalized.new_zeros((-(-elements // buffers.width), buffers.width))
    rows.view(-1)[:elements] = finalized.view(-1)
    total = torch.empty_like(rows)
    step = buffers.slot_rows // workspace.world_size
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        workspace.launch(
            "allreduce",
            total[part],
            None,
            (rows[part], None, None, None, 1.0),
            (None, None, None, 1.0, 1.0, None, 0.0),
        )
    return total.view(-1)[:elements].view(finalized.shape)


def _routed(x: MoEOutput) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Rows with weights and map, or finalized rows alone."""
    if isinstance(x.routed, Tensor):
        return x.routed, None, None
    routed = x.routed
    return routed.gemm2_permuted, routed.expert_weights, routed.expanded_idx_to_permuted_idx
