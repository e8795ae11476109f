"""Mutants of the top-k reduction, its rounding and its scale: ROUND-1, ROUND-2, ROUND-3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import (
    Around,
    narrowed,
    rounded_to_bits,
)
from moetail.conformance.catalogue.mutant import breaks
from moetail.conformance.judge import round_bf16
from moetail.reference import Reference
from moetail.spec.rules import BOUNDARY, FINALIZE, FUSED, GATHER

BF16 = torch.bfloat16


class Accumulating(Reference):
    """The reference's reduction, with the product and the addition as stages of their own."""

    def product(self, weight: Tensor, row: Tensor) -> Tensor:
        return weight * row

    def add(self, total: Tensor, product: Tensor, k: int) -> Tensor:
        return total + product

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        live = self.live_routes(index)
        weights = self.read_weights(weights)
        shape = (index.shape[0], rows.shape[1])
        total = torch.zeros(shape, dtype=torch.float32, device=rows.device)
        for k in range(index.shape[1]):
            tokens = live[:, k].nonzero().squeeze(1)
            row = rows[index[tokens, k].long()].to(torch.float32)
            product = self.product(weights[tokens, k, None], row)
            total[tokens] = self.add(total[tokens], product, k)
        return total


# --- ROUND-1: FP32 products, FP32 accumulator ----------------------------------------------------


@breaks("ROUND-1")
class Bf16Accumulator(Accumulating):
    """Rounds the running sum to BF16 after every route."""

    def add(self, total: Tensor, product: Tensor, k: int) -> Tensor:
        return narrowed(total + product, BF16)


@breaks("ROUND-1")
class Bf16Products(Accumulating):
    """Rounds each weighted row to BF16, then sums in FP32."""

    def product(self, weight: Tensor, row: Tensor) -> Tensor:
        return narrowed(weight * row, BF16)


@breaks("ROUND-1", source="flashinfer trtllm finalize kernel")
class Bf16EveryStep(Accumulating):
    """Rounds products and the running sum to BF16 at every step."""

    def product(self, weight: Tensor, row: Tensor) -> Tensor:
        return narrowed(weight * row, BF16)

    def add(self, total: Tensor, product: Tensor, k: int) -> Tensor:
        return narrowed(total + product, BF16)


@breaks("ROUND-1")
class Fp16Accumulator(Accumulating):
    """Keeps the running sum in FP16 between the routes."""

    def add(self, total: Tensor, product: Tensor, k: int) -> Tensor:
        return narrowed(total, torch.float16) + product


@breaks("ROUND-1", operations=(FINALIZE, FUSED, GATHER))
class Tf32Products(Reference):
    """Multiplies in TF32, as a tensor core does: weights cut to ten bits of mantissa."""

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        return super().finalize_slots(slots, through_tf32(weights), live, routed_scale)


@breaks("ROUND-1", operations=(FINALIZE, FUSED, GATHER))
class RoutingWeightsInBf16(Reference):
    """Narrows the FP32 routing weights of the Beam operations to BF16 before the products."""

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        return super().finalize_slots(slots, narrowed(weights, BF16), live, routed_scale)


@breaks("ROUND-1")
class Bf16SpillAfterEightRoutes(Accumulating):
    """Stores the sum of every eight routes in BF16 before it goes on: fine up to top_k = 8."""

    def add(self, total: Tensor, product: Tensor, k: int) -> Tensor:
        return narrowed(total, BF16) + product if k and k % 8 == 0 else total + product


@breaks("ROUND-1")
class Bf16PartialSums(Accumulating):
    """Splits the routes in two halves and adds their sums after rounding each to BF16."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        half = (index.shape[1] + 1) // 2
        first = super().reduce(rows, weights[:, :half], index[:, :half])
        second = super().reduce(rows, weights[:, half:], index[:, half:])
        return narrowed(first, BF16) + narrowed(second, BF16)


@breaks("ROUND-1", operations=(FINALIZE, FUSED, GATHER))
class LastRouteDropped(Reference):
    """Stops one route early where there are more than one."""

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        last = max(slots.shape[1] - 1, 1)
        return super().finalize_slots(slots[:, :last], weights[:, :last], live, routed_scale)


# --- ROUND-2: round, scale, round ----------------------------------------------------------------


@breaks("ROUND-2")
class ScaleBeforeRounding(Reference):
    """Multiplies the FP32 sum by the scale, so that only the product is rounded."""

    def finalize(self, rows: Tensor, weights: Tensor, index: Tensor, routed_scale: float) -> Tensor:
        return self.round(self.multiply(self.reduce(rows, weights, index), routed_scale))


@breaks("ROUND-2")
class ScaleFoldedIntoWeights(Reference):
    """Multiplies the routing weights by the scale, and rounds once."""

    def finalize(self, rows: Tensor, weights: Tensor, index: Tensor, routed_scale: float) -> Tensor:
        scaled = self.multiply(self.read_weights(weights), routed_scale)
        return self.round(self.reduce(rows, scaled, index))


@breaks("ROUND-2", source="vllm #24119")
class ScaleTwice(Reference):
    """Applies the routed scale twice."""

    def scale(self, reduced: Tensor, routed_scale: float) -> Tensor:
        return super().scale(super().scale(reduced, routed_scale), routed_scale)


@breaks("ROUND-2", source="vllm #45037, sglang #8511")
class ScaleForgotten(Reference):
    """Never applies the routed scale."""

    def scale(self, reduced: Tensor, routed_scale: float) -> Tensor:
        return self.round(reduced)


@breaks("ROUND-2")
class ScaleInBf16(Reference):
    """Rounds the routed scale itself to BF16."""

    def scale(self, reduced: Tensor, routed_scale: float) -> Tensor:
        return super().scale(reduced, float(torch.tensor(routed_scale).to(BF16)))


@breaks("ROUND-2")
class ScaleWithoutItsSign(Reference):
    """Takes a negative routed scale as positive."""

    def scale(self, reduced: Tensor, routed_scale: float) -> Tensor:
        return super().scale(reduced, abs(routed_scale))


@breaks("ROUND-2")
class ScaledProductRoundedOnce(Reference):
    """Rounds the exact product of sum and scale to BF16, without FP32 between."""

    def scale(self, reduced: Tensor, routed_scale: float) -> Tensor:
        factor = torch.tensor(routed_scale, dtype=torch.float32).double()
        return round_bf16(reduced.double() * factor)


@breaks("ROUND-2", operations=(FINALIZE, FUSED), also=("ROUND-4",))
class ScaledSumNotRounded(Reference):
    """Hands the scaled sum in FP32 to the norm or the residual add: the second rounding is lost."""

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        reduced = super().finalize_slots(slots, weights, live, 1.0)
        return self.multiply(reduced, routed_scale)

    def finalize_owned(self, x: Any, slots: int, live: int, routed_scale: float) -> Tensor:
        return Reference().finalize_owned(x, slots, live, routed_scale)


@breaks("ROUND-2", operations=(FINALIZE, FUSED, GATHER))
class ScaleSkippedBeforeNorm(Around):
    """Leaves the scale out where a post-norm follows, since a norm cancels it: eps tells them
    apart, and so does the second rounding."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if "routed_scale" in call and call["post_eps"] is not None:
            call["routed_scale"] = 1.0
        return compute(call)


@breaks("ROUND-2", operations=(FUSED,))
class UnfusedForgetsScale(Around):
    """The "unfused" path of the one-rank operation does not pass the routed scale on."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if operation == FUSED and call["strategy"] == "unfused":
            call["routed_scale"] = 1.0
        return compute(call)


# --- ROUND-3: to nearest, ties to even -----------------------------------------------------------


def through_tf32(value: Tensor) -> Tensor:
    """FP32 to the ten mantissa bits of TF32, to nearest even."""
    bits = value.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    kept = (bits + 0x0FFF + ((bits >> 13) & 1)) & 0xFFFFE000
    signed = torch.where(kept >= 1 << 31, kept - (1 << 32), kept).to(torch.int32)
    return torch.where(value.isfinite(), signed.view(torch.float32), value)


@breaks("ROUND-3")
class Truncates(Reference):
    """Cuts the low 16 bits off: rounds towards zero."""

    def round(self, value: Tensor) -> Tensor:
        return rounded_to_bits(value, lambda bits: 0)


@breaks("ROUND-3")
class RoundsHalfAway(Reference):
    """Adds half and cuts: ties go away from zero."""

    def round(self, value: Tensor) -> Tensor:
        return rounded_to_bits(value, lambda bits: 0x8000)


@breaks("ROUND-3")
class RoundsHalfDown(Reference):
    """Adds just less than half and cuts: ties go towards zero."""

    def round(self, value: Tensor) -> Tensor:
        return rounded_to_bits(value, lambda bits: 0x7FFF)


@breaks("ROUND-3")
class RoundsHalfUp(Reference):
    """Ties go up, towards positive infinity."""

    def round(self, value: Tensor) -> Tensor:
        return rounded_to_bits(value, lambda bits: 0x8000 - (bits >> 31))


@breaks("ROUND-3")
class RoundsUp(Reference):
    """Rounds every value towards positive infinity."""

    def round(self, value: Tensor) -> Tensor:
        return rounded_to_bits(value, lambda bits: 0xFFFF * (1 - (bits >> 31)))


@breaks("ROUND-3")
class RoundsToOdd(Reference):
    """Sets the last bit of every inexact result."""

    def round(self, value: Tensor) -> Tensor:
        return rounded_to_bits(
            value, lambda bits: torch.where(bits & 0xFFFF != 0, (~bits) & 0x10000, 0)
        )


@breaks("ROUND-3")
class RoundsStochastically(Reference):
    """Adds dither before it cuts; the dither is a hash of the value, so that runs repeat."""

    def round(self, value: Tensor) -> Tensor:
        return rounded_to_bits(value, lambda bits: ((bits * 0x9E3779B1) >> 16) & 0xFFFF)


@breaks("ROUND-3")
class RoundsThroughFp16(Reference):
    """Converts to FP16 on the way to BF16: two roundings, and FP16's range."""

    def round(self, value: Tensor) -> Tensor:
        return value.to(torch.float16).to(BF16)


@breaks("ROUND-3")
class RoundsThroughTf32(Reference):
    """Rounds to TF32 on the way to BF16: a value just beside a tie becomes the tie."""

    def round(self, value: Tensor) -> Tensor:
        return through_tf32(value.to(torch.float32)).to(BF16)


@breaks("ROUND-3", operations=(BOUNDARY, FUSED, GATHER))
class TruncatesNormalized(Reference):
    """Cuts the next norm's result off instead of rounding it."""

    def next_norm(self, hidden: Tensor, weight: Tensor | None, eps: float | None) -> Tensor | None:
        if eps is None:
            return None
        exact = hidden.to(torch.float32) * self.inverse_rms(hidden, eps)
        if weight is not None:
            exact = exact * weight.to(torch.float32)
        return rounded_to_bits(exact, lambda bits: 0)


@breaks("ROUND-3", operations=(BOUNDARY, FUSED, GATHER))
class HiddenRoundsHalfAway(Reference):
    """The residual add alone rounds ties away from zero."""

    def residual_add(
        self, value: Tensor, residual: Tensor, scales: tuple[float, float] | None
    ) -> Tensor:
        if scales is not None:
            value = self.round(self.multiply(value, scales[0]))
            residual = self.round(self.multiply(residual, scales[1]))
        total = value.to(torch.float32) + residual.to(torch.float32)
        return rounded_to_bits(total, lambda bits: 0x8000)
