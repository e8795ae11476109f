"""Mutants of what a route means and how rows are packed: ROUTE, PACK, RUN-6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around, with_rows
from moetail.conformance.catalogue.change import breaks
from moetail.reference import Reference
from moetail.spec import MoEOutput, Step, UnfinalizedMoEOutput
from moetail.spec.rules import FINALIZE, FUSED, MOE_OUTPUT

_MOST_ROWS = 1 << 14

# --- PACK -----------------------------------------------------------------------------------------


@breaks("PACK-1", operations=(FINALIZE, FUSED, MOE_OUTPUT))
class StridedRowsAccepted(Around):
    """Takes rows of any stride, and makes its own dense copy."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        return compute(with_rows(name, call, Tensor.contiguous))


@breaks("PACK-1", operations=(FINALIZE, FUSED, MOE_OUTPUT))
class StridedRowsReadAsDense(Around):
    """Reads rows at H apart whatever their stride."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        return compute(with_rows(name, call, self.dense))

    def dense(self, rows: Tensor) -> Tensor:
        if rows.is_contiguous():
            return rows
        strides = [1]
        for size in reversed(rows.shape[1:]):
            strides.insert(0, strides[0] * size)
        return rows.as_strided(rows.shape, strides)


@breaks("PACK-2", source="flashinfer #3671", shows=True)
class PaddingForgotten(Reference):
    """Sizes the permuted buffer as T * K rows, so that an index past that wraps."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        wrapped = torch.where(index >= 0, index % max(index.numel(), 1), index)
        return super().weighted_sum(step, rows, weights, wrapped)


@breaks("PACK-2", source="vllm #54747, transformers #48205", shows=True)
class PermutationAsMatrix(Reference):
    """Multiplies by a dense [T, rows] matrix of weights: zero times NaN in unreferenced rows."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().weighted_sum(step, rows, weights, index)
        if rows.shape[0] == index.numel():
            return total  # a row for each route: no padding, and taken as they lie
        used = torch.zeros(rows.shape[0], dtype=torch.bool)
        used[index[index >= 0].long()] = True
        # Of a huge buffer, which is there to test offsets, only the first rows.
        near = slice(0, _MOST_ROWS)
        return total + (rows[near][~used[near]].to(torch.float32) * 0.0).sum(dim=0)


@breaks("PACK-2")
class OrderFromRowCount(Reference):
    """Chooses the order of summation from the padded row count, as an autotuner's tile would."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        seed = torch.Generator().manual_seed(rows.shape[0])
        order = torch.randperm(index.shape[1], generator=seed)
        return super().weighted_sum(step, rows, weights[:, order], index[:, order])


@breaks("PACK-3", operations=(MOE_OUTPUT,), shows=True)
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


@breaks("ROUTE-1", source="TransformerEngine #2908", shows=True)
class SentinelAsRowZero(Reference):
    """Clamps -1 to row 0."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return super().weighted_sum(step, rows, weights, index.clamp(min=0))


@breaks("ROUTE-1", source="flashinfer's own finalize test", shows=True)
class SentinelAsLastRow(Reference):
    """Indexes with -1, which is the last row."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return super().weighted_sum(
            step, rows, weights, torch.where(index < 0, rows.shape[0] - 1, index)
        )


@breaks("ROUTE-1", shows=True)
class SentinelAsPreviousRoute(Reference):
    """Keeps the row of the route before in a register that -1 does not reload."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        index = index.clone()
        for k in range(1, index.shape[1]):
            index[:, k] = torch.where(index[:, k] < 0, index[:, k - 1], index[:, k])
        return super().weighted_sum(step, rows, weights, index)


@breaks("ROUTE-1", source="vllm #54747, transformers #48205", shows=True)
class SentinelTimesZero(Reference):
    """Reads the last row for -1 and multiplies it by a weight of zero: zero times NaN."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        weights = torch.where(index < 0, torch.zeros_like(weights), weights)
        return super().weighted_sum(
            step, rows, weights, torch.where(index < 0, rows.shape[0] - 1, index)
        )


@breaks("ROUTE-1", shows=True)
class DeadWeightTimesZero(Reference):
    """Multiplies the weight of a -1 route by a row of zeros: a NaN weight survives that."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().weighted_sum(step, rows, weights, index)
        dead = torch.where(index < 0, self.read_weights(weights) * 0.0, 0.0)
        return total + dead.sum(dim=1, keepdim=True)


@breaks("ROUTE-1", shows=True)
class DeadWeightsRedistributed(Reference):
    """Gives the weight of -1 routes to the live ones, so that the sum of weights stays."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        wide, dead = self.read_weights(weights), index < 0
        live_sum = torch.where(dead, 0.0, wide).sum(dim=1, keepdim=True)
        factor = wide.sum(dim=1, keepdim=True) / live_sum
        some = dead.any(dim=1, keepdim=True)
        return super().weighted_sum(step, rows, torch.where(some, wide * factor, wide), index)


@breaks("ROUTE-1", shows=True)
class StopsAtSentinel(Reference):
    """Takes -1 for the end of a token's routes."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        ended = (index < 0).cumsum(dim=1) > 0
        return super().weighted_sum(step, rows, weights, torch.where(ended, -1, index))


# --- ROUTE-2 --------------------------------------------------------------------------------------


@breaks("ROUTE-2")
class SumsInRowOrder(Reference):
    """Adds a token's routes in the order of their rows."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        index, order = index.sort(dim=1)
        return super().weighted_sum(step, rows, weights.gather(1, order), index)


# --- ROUTE-3: the weights' dtype ------------------------------------------------------------------


class RetypedWeights(Reference):
    """Reads the weights of a MoE output in another way."""

    def read_weights(self, weights: Tensor) -> Tensor:
        return super().read_weights(self.retyped(weights.contiguous()))

    def retyped(self, weights: Tensor) -> Tensor:
        raise NotImplementedError


@breaks("ROUTE-3", source="flashinfer #3595, #3644, #3925", shows=True)
class Bf16WeightsReadAsFp32(RetypedWeights):
    """Takes BF16 weights for FP32: two to a number, and past the buffer's end the same again."""

    def retyped(self, weights: Tensor) -> Tensor:
        if weights.dtype is not torch.bfloat16 or not weights.numel():
            return weights
        flat = weights.flatten()
        doubled = torch.cat([flat, flat])
        return doubled.view(torch.float32).view(weights.shape)


@breaks("ROUTE-3", shows=True)
class Fp32WeightsReadAsBf16(RetypedWeights):
    """Takes FP32 weights for BF16, at every second place: the low half of each."""

    def retyped(self, weights: Tensor) -> Tensor:
        if weights.dtype is not torch.float32:
            return weights
        return weights.view(torch.bfloat16)[:, ::2].contiguous()


@breaks("ROUTE-3", shows=True)
class Fp16WeightsReadAsBf16(RetypedWeights):
    """Takes the bits of FP16 weights for BF16."""

    def retyped(self, weights: Tensor) -> Tensor:
        return weights.view(torch.bfloat16) if weights.dtype is torch.float16 else weights


# --- ROUTE-4, ROUTE-5 -----------------------------------------------------------------------------


@breaks("ROUTE-4", also=("RUN-3",), shows=True)
class RemoteTokenUnwritten(Reference):
    """Skips a token without a local route, and leaves what its destination held."""

    def part(self, values: dict[str, Any]) -> Tensor:
        part = super().part(values)
        if values["map"] is not None:
            part[(values["map"] < 0).all(dim=1)] = 1.0
        return part


@breaks("ROUTE-4", shows=True)
class RemoteTokenDividesByZero(Reference):
    """Normalizes by the count of local routes and multiplies it back: 0 / 0 where there is none."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().weighted_sum(step, rows, weights, index)
        remote = (index < 0).all(dim=1, keepdim=True)
        return torch.where(remote, torch.nan, total)


@breaks("ROUTE-5", shows=True)
class NanReplacedByZero(Reference):
    """Replaces a NaN in a row by zero before the sum."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        live = index >= 0
        used = rows[index[live].long()].nan_to_num(0.0, torch.inf, -torch.inf)
        places = torch.where(live, live.flatten().cumsum(0).view_as(index) - 1, -1)
        return super().weighted_sum(step, used, weights, places)


@breaks("ROUTE-5", shows=True)
class InfinityClamped(Reference):
    """Clamps the sum to the largest finite BF16 number."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        most = torch.finfo(torch.bfloat16).max
        return super().weighted_sum(step, rows, weights, index).clamp(-most, most)


@breaks("ROUTE-5", shows=True)
class ZeroWeightSkipped(Reference):
    """Skips a live route whose weight is zero, so that its NaN or infinity is lost."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return super().weighted_sum(step, rows, weights, torch.where(weights == 0, -1, index))


# --- RUN-6: 32-bit offsets ------------------------------------------------------------------------


class WrappedOffsets(Reference):
    """The element offset row * H wraps at ``limit``, into the negative, and then to the buffer."""

    limit = 2**31

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        offset = index.long() * rows.shape[1]
        wrapped = (offset + self.limit) % (2 * self.limit) - self.limit
        row = (wrapped // max(rows.shape[1], 1)) % max(rows.shape[0], 1)
        return super().weighted_sum(step, rows, weights, torch.where(index < 0, -1, row))


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
