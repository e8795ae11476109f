"""Mutants of what a route means and how rows are packed: ROUTE, PACK, RUN-6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around, narrowed, with_rows
from moetail.conformance.catalogue.mutant import breaks
from moetail.conformance.catalogue.reduction import Accumulating
from moetail.reference import Reference
from moetail.spec import MoEOutput, UnfinalizedMoEOutput
from moetail.spec.rules import FINALIZE, FUSED, MOE_OUTPUT

_MOST_ROWS = 1 << 14

# --- PACK -----------------------------------------------------------------------------------------


@breaks("PACK-1", operations=(FINALIZE, FUSED, MOE_OUTPUT))
class StridedRowsAccepted(Around):
    """Takes rows of any stride, and makes its own dense copy."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if operation in (FINALIZE, FUSED, MOE_OUTPUT):
            call = with_rows(call, lambda rows: rows.contiguous())
        return compute(call)


@breaks("PACK-1", operations=(FINALIZE, FUSED, MOE_OUTPUT))
class StridedRowsReadAsDense(Around):
    """Reads rows at H apart whatever their stride."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if operation in (FINALIZE, FUSED, MOE_OUTPUT):
            call = with_rows(call, self.dense)
        return compute(call)

    def dense(self, rows: Tensor) -> Tensor:
        if rows.is_contiguous():
            return rows
        strides = [1]
        for size in reversed(rows.shape[1:]):
            strides.insert(0, strides[0] * size)
        return rows.as_strided(rows.shape, strides)


@breaks("PACK-2", source="flashinfer #3671")
class PaddingForgotten(Reference):
    """Sizes the permuted buffer as T * K rows, so that an index past that wraps."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        routed = x.routed
        if isinstance(routed, UnfinalizedMoEOutput) and routed.expert_weights.numel():
            index = routed.expanded_idx_to_permuted_idx
            wrapped = torch.where(index >= 0, index % routed.expert_weights.numel(), index)
            x = replace(x, routed=replace(routed, expanded_idx_to_permuted_idx=wrapped))
        return super().finalize_moe_output(x)


@breaks("PACK-2", source="vllm #54747, transformers #48205")
class PermutationAsMatrix(Reference):
    """Multiplies by a dense [T, rows] matrix of weights: zero times NaN in unreferenced rows."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        routed = x.routed
        if isinstance(routed, UnfinalizedMoEOutput):
            index = routed.expanded_idx_to_permuted_idx
            used = torch.zeros(routed.gemm2_permuted.shape[0], dtype=torch.bool)
            used[index[index >= 0].long()] = True
            if len(used) == index.numel():
                used[:] = True  # a row for each route: no padding, and taken as they lie
            # Of a huge buffer, which is there to test offsets, only the first rows.
            near = slice(0, _MOST_ROWS)
            self.unused = routed.gemm2_permuted[near][~used[near]].to(torch.float32)
        try:
            return super().finalize_moe_output(x)
        finally:
            self.unused = torch.empty(0)

    unused = torch.empty(0)

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().reduce(rows, weights, index)
        return total + (self.unused * 0.0).sum(dim=0) if self.unused.numel() else total


@breaks("PACK-2")
class OrderFromRowCount(Reference):
    """Chooses the order of summation from the padded row count, as an autotuner's tile would."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        routed = x.routed
        if isinstance(routed, UnfinalizedMoEOutput):
            top_k = routed.expert_weights.shape[1]
            seed = torch.Generator().manual_seed(routed.gemm2_permuted.shape[0])
            order = torch.randperm(top_k, generator=seed)
            self.order = order
        try:
            return super().finalize_moe_output(x)
        finally:
            self.order = None

    order: Tensor | None = None

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        if self.order is not None:
            weights, index = weights[:, self.order], index[:, self.order]
        return super().reduce(rows, weights, index)


@breaks("PACK-3", operations=(MOE_OUTPUT,))
class RouteMajorReadAsCompact(Reference):
    """Takes route-major rows for compacted: the n-th local route is row n."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        routed = x.routed
        if isinstance(routed, UnfinalizedMoEOutput) and routed.route_major:
            index = routed.expanded_idx_to_permuted_idx
            live = index.flatten() >= 0
            packed = torch.where(live, live.cumsum(0) - 1, -1).to(index.dtype).view_as(index)
            x = replace(
                x, routed=replace(routed, expanded_idx_to_permuted_idx=packed, route_major=False)
            )
        return super().finalize_moe_output(x)


# --- ROUTE-1: -1 contributes nothing --------------------------------------------------------------


@breaks("ROUTE-1", source="TransformerEngine #2908")
class SentinelAsRowZero(Reference):
    """Clamps -1 to row 0."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return super().reduce(rows, weights, index.clamp(min=0))


@breaks("ROUTE-1", source="flashinfer's own finalize test")
class SentinelAsLastRow(Reference):
    """Indexes with -1, which is the last row."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return super().reduce(rows, weights, torch.where(index < 0, rows.shape[0] - 1, index))


@breaks("ROUTE-1")
class SentinelAsPreviousRoute(Reference):
    """Keeps the row of the route before in a register that -1 does not reload."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        index = index.clone()
        for k in range(1, index.shape[1]):
            index[:, k] = torch.where(index[:, k] < 0, index[:, k - 1], index[:, k])
        return super().reduce(rows, weights, index)


@breaks("ROUTE-1", source="vllm #54747, transformers #48205")
class SentinelTimesZero(Reference):
    """Reads the last row for -1 and multiplies it by a weight of zero: zero times NaN."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        weights = torch.where(index < 0, torch.zeros_like(weights), weights)
        return super().reduce(rows, weights, torch.where(index < 0, rows.shape[0] - 1, index))


@breaks("ROUTE-1")
class DeadWeightTimesZero(Reference):
    """Multiplies the weight of a -1 route by a row of zeros: a NaN weight survives that."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().reduce(rows, weights, index)
        dead = torch.where(index < 0, self.read_weights(weights) * 0.0, 0.0)
        return total + dead.sum(dim=1, keepdim=True)


@breaks("ROUTE-1")
class DeadWeightsRedistributed(Reference):
    """Gives the weight of -1 routes to the live ones, so that the sum of weights stays."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        wide, dead = self.read_weights(weights), index < 0
        live_sum = torch.where(dead, 0.0, wide).sum(dim=1, keepdim=True)
        factor = wide.sum(dim=1, keepdim=True) / live_sum
        some = dead.any(dim=1, keepdim=True)
        return super().reduce(rows, torch.where(some, wide * factor, wide), index)


@breaks("ROUTE-1")
class StopsAtSentinel(Reference):
    """Takes -1 for the end of a token's routes."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        ended = (index < 0).cumsum(dim=1) > 0
        return super().reduce(rows, weights, torch.where(ended, -1, index))


# --- ROUTE-2 --------------------------------------------------------------------------------------


@breaks("ROUTE-2")
class SumsInRowOrder(Reference):
    """Adds a token's routes in the order of their rows."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        index, order = index.sort(dim=1)
        return super().reduce(rows, weights.gather(1, order), index)


# --- ROUTE-3: the weights' dtype ------------------------------------------------------------------


def _dense(weights: Tensor) -> bool:
    return weights.is_contiguous() and weights.dim() == 2 and weights.device.type != "meta"


class RetypedWeights(Reference):
    """Reads the weights of a MoE output in another way."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        routed = x.routed
        if isinstance(routed, UnfinalizedMoEOutput) and _dense(routed.expert_weights):
            weights = self.retyped(routed.expert_weights)
            x = replace(x, routed=replace(routed, expert_weights=weights))
        return super().finalize_moe_output(x)

    def retyped(self, weights: Tensor) -> Tensor:
        raise NotImplementedError


@breaks("ROUTE-3", source="flashinfer #3595, #3644, #3925")
class Bf16WeightsReadAsFp32(RetypedWeights):
    """Takes BF16 weights for FP32: two to a number, and past the buffer's end the same again."""

    def retyped(self, weights: Tensor) -> Tensor:
        if weights.dtype is not torch.bfloat16 or not weights.numel():
            return weights
        flat = weights.flatten()
        doubled = torch.cat([flat, flat])
        return doubled.view(torch.float32).view(weights.shape)


@breaks("ROUTE-3")
class Fp32WeightsReadAsBf16(RetypedWeights):
    """Takes FP32 weights for BF16, at every second place: the low half of each."""

    def retyped(self, weights: Tensor) -> Tensor:
        if weights.dtype is not torch.float32:
            return weights
        return weights.view(torch.bfloat16)[:, ::2].contiguous()


@breaks("ROUTE-3")
class Fp16WeightsReadAsBf16(RetypedWeights):
    """Takes the bits of FP16 weights for BF16."""

    def retyped(self, weights: Tensor) -> Tensor:
        return weights.view(torch.bfloat16) if weights.dtype is torch.float16 else weights


@breaks("ROUTE-3")
class Fp32WeightsNarrowed(RetypedWeights):
    """Narrows the FP32 weights of a modular expert to BF16, the activation's dtype."""

    def retyped(self, weights: Tensor) -> Tensor:
        fp32 = weights.dtype is torch.float32
        return narrowed(weights, torch.bfloat16) if fp32 else weights


@breaks("ROUTE-3")
class Fp16WeightsNarrowed(RetypedWeights):
    """Converts FP16 weights to BF16 first, which loses three bits."""

    def retyped(self, weights: Tensor) -> Tensor:
        return weights.to(torch.bfloat16) if weights.dtype is torch.float16 else weights


# --- ROUTE-4, ROUTE-5 -----------------------------------------------------------------------------


@breaks("ROUTE-4", also=("RUN-3",))
class RemoteTokenUnwritten(Reference):
    """Skips a token without a local route, and leaves what its destination held."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        finalized = super().finalize_moe_output(x)
        if isinstance(x.routed, UnfinalizedMoEOutput):
            remote = (x.routed.expanded_idx_to_permuted_idx < 0).all(dim=1)
            finalized[remote] = 1.0
        return finalized


@breaks("ROUTE-4")
class RemoteTokenDividesByZero(Reference):
    """Normalizes by the count of local routes and multiplies it back: 0 / 0 where there is none."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().reduce(rows, weights, index)
        remote = (index < 0).all(dim=1, keepdim=True)
        return torch.where(remote, torch.nan, total)


@breaks("ROUTE-5")
class NanReplacedByZero(Accumulating):
    """Replaces a NaN in a row by zero before the sum."""

    def product(self, weight: Tensor, row: Tensor) -> Tensor:
        return super().product(weight, torch.where(row.isnan(), 0.0, row))


@breaks("ROUTE-5")
class InfinityClamped(Reference):
    """Clamps the sum to the largest finite BF16 number."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        most = torch.finfo(torch.bfloat16).max
        return super().reduce(rows, weights, index).clamp(-most, most)


@breaks("ROUTE-5")
class ZeroWeightSkipped(Reference):
    """Skips a live route whose weight is zero, so that its NaN or infinity is lost."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return super().reduce(rows, weights, torch.where(weights == 0, -1, index))


# --- RUN-6: 32-bit offsets ------------------------------------------------------------------------


class WrappedOffsets(Reference):
    """The element offset row * H wraps at ``limit``, into the negative, and then to the buffer."""

    limit = 2**31

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        offset = index.long() * rows.shape[1]
        wrapped = (offset + self.limit) % (2 * self.limit) - self.limit
        row = (wrapped // max(rows.shape[1], 1)) % max(rows.shape[0], 1)
        return super().reduce(rows, weights, torch.where(index < 0, -1, row))


@breaks(
    "RUN-6",
    source="TransformerEngine #2908, flashinfer #2643, TensorRT-LLM #15887",
    operations=(MOE_OUTPUT,),
)
class OffsetsWrap(WrappedOffsets):
    """Multiplies row by hidden size in 32 bits, which wraps past 2^31 elements."""


@breaks("RUN-6", operations=(MOE_OUTPUT,))
class ByteOffsetsWrap(WrappedOffsets):
    """Computes byte offsets in 32 bits, which wrap past 2^30 elements of BF16."""

    limit = 2**30
