"""Mutants of the residual add, the next norm's input, the shared part and the all-reduce:
ROUND-5, ROUND-6, ROUND-7."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around
from moetail.conformance.catalogue.mutant import breaks
from moetail.conformance.judge import round_bf16
from moetail.reference import Reference
from moetail.spec import MoEOutput, Workspace
from moetail.spec.rules import ALLREDUCE, MOE_OUTPUT

Scales = tuple[float, float] | None

# --- ROUND-5 --------------------------------------------------------------------------------------


class ResidualParts(Reference):
    """The reference's residual add, with each product as a stage of its own."""

    def x_part(self, value: Tensor, scale: float) -> Tensor:
        return self.round(self.multiply(value, scale))

    def r_part(self, residual: Tensor, scale: float) -> Tensor:
        return self.round(self.multiply(residual, scale))

    def residual_add(self, value: Tensor, residual: Tensor, scales: Scales) -> Tensor:
        if scales is not None:
            value, residual = self.x_part(value, scales[0]), self.r_part(residual, scales[1])
        return self.round(value.to(torch.float32) + residual.to(torch.float32))


@breaks("ROUND-5")
class XProductNotRounded(ResidualParts):
    """Keeps n * x_scale in FP32 into the add."""

    def x_part(self, value: Tensor, scale: float) -> Tensor:
        return self.multiply(value, scale)


@breaks("ROUND-5")
class ResidualProductNotRounded(ResidualParts):
    """Keeps residual * r_scale in FP32 into the add."""

    def r_part(self, residual: Tensor, scale: float) -> Tensor:
        return self.multiply(residual, scale)


@breaks("ROUND-5")
class NoProductRounded(ResidualParts):
    """Computes both products and the sum in FP32, and rounds once."""

    def x_part(self, value: Tensor, scale: float) -> Tensor:
        return self.multiply(value, scale)

    def r_part(self, residual: Tensor, scale: float) -> Tensor:
        return self.multiply(residual, scale)


@breaks("ROUND-5")
class ProductsRoundedOnce(ResidualParts):
    """Rounds the exact products to BF16, without FP32 between."""

    def x_part(self, value: Tensor, scale: float) -> Tensor:
        return _once(value, scale)

    def r_part(self, residual: Tensor, scale: float) -> Tensor:
        return _once(residual, scale)


def _once(value: Tensor, scale: float) -> Tensor:
    factor = torch.tensor(scale, dtype=torch.float32).double()
    return round_bf16(value.double() * factor).to(torch.float32)


@breaks("ROUND-5")
class ScalesSwapped(Reference):
    """Multiplies x by r_scale and the residual by x_scale."""

    def residual_add(self, value: Tensor, residual: Tensor, scales: Scales) -> Tensor:
        return super().residual_add(value, residual, scales and (scales[1], scales[0]))


@breaks("ROUND-5")
class ResidualScaleOnly(Reference):
    """Applies r_scale and forgets x_scale."""

    def residual_add(self, value: Tensor, residual: Tensor, scales: Scales) -> Tensor:
        return super().residual_add(value, residual, scales and (1.0, scales[1]))


@breaks("ROUND-5")
class SumScaled(Reference):
    """Adds first, and multiplies the sum by x_scale."""

    def residual_add(self, value: Tensor, residual: Tensor, scales: Scales) -> Tensor:
        hidden = super().residual_add(value, residual, None)
        return hidden if scales is None else self.round(self.multiply(hidden, scales[0]))


@breaks("ROUND-5")
class ScalesInBf16(Reference):
    """Rounds x_scale and r_scale to BF16."""

    def residual_add(self, value: Tensor, residual: Tensor, scales: Scales) -> Tensor:
        if scales is not None:
            narrow = torch.tensor(scales).to(torch.bfloat16).tolist()
            scales = (narrow[0], narrow[1])
        return super().residual_add(value, residual, scales)


# --- ROUND-6 --------------------------------------------------------------------------------------


class UnroundedHidden(Reference):
    """The hidden rows carry the FP32 sum that they were rounded from."""

    def residual_add(self, value: Tensor, residual: Tensor, scales: Scales) -> Tensor:
        hidden = super().residual_add(value, residual, scales)
        if scales is not None:
            value = self.round(self.multiply(value, scales[0]))
            residual = self.round(self.multiply(residual, scales[1]))
        exact = value.to(torch.float32) + residual.to(torch.float32)
        hidden.unrounded = exact  # type: ignore[attr-defined]
        return hidden


@breaks("ROUND-6", source="vllm-omni #6878")
class NextNormOfUnroundedHidden(UnroundedHidden):
    """Stores the rounded hidden, and normalizes the unrounded one."""

    def next_norm(self, hidden: Tensor, weight: Tensor | None, eps: float | None) -> Tensor | None:
        return super().next_norm(getattr(hidden, "unrounded", hidden), weight, eps)


@breaks("ROUND-6")
class NextInverseOfUnroundedHidden(UnroundedHidden):
    """Takes the next norm's inverse RMS of the unrounded hidden, its elements of the rounded."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return super().inverse_rms(getattr(value, "unrounded", value), eps)


@breaks("ROUND-6")
class NextElementsOfUnroundedHidden(UnroundedHidden):
    """Takes the next norm's inverse RMS of the rounded hidden, its elements of the unrounded."""

    def rms_norm(self, value: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        normed = getattr(value, "unrounded", value) * self.inverse_rms(value, eps)
        return self.round(normed if weight is None else normed * weight.to(torch.float32))


@breaks("ROUND-6", also=("ROUND-4",))
class NextNormBeforeResidual(Reference):
    """Normalizes what enters the residual add instead of what leaves it."""

    def boundary(
        self,
        value: Tensor,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: Scales,
    ) -> tuple[Tensor, Tensor | None]:
        normed = self.post_norm(value, post_weight, post_eps)
        hidden = self.residual_add(normed, residual, scales)
        return hidden, self.next_norm(normed, next_weight, next_eps)


# --- ROUND-7: the shared part ---------------------------------------------------------------------


@breaks("ROUND-7", source="sglang #28237")
class SharedScaled(Reference):
    """Multiplies the shared part by the routed scaling factor too."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        if isinstance(x.shared_output, Tensor) and x.shared_output.dtype is torch.bfloat16:
            x = replace(x, shared_output=self.scale(x.shared_output, x.routed_scaling_factor))
        return super().finalize_moe_output(x)


@breaks("ROUND-7")
class SharedAddedBeforeScale(Reference):
    """Adds the shared part to the reduction, and scales the rounded sum."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        unscaled = super().finalize_moe_output(replace(x, routed_scaling_factor=1.0))
        return self.scale(unscaled, x.routed_scaling_factor)


@breaks("ROUND-7")
class SharedAddedToUnroundedProduct(Reference):
    """Adds the shared part to the scaled value before that is rounded, as an FMA would."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        finalized = super().finalize_moe_output(x)
        if x.shared_output is None:
            return finalized
        reduced = super().finalize_moe_output(
            replace(x, shared_output=None, routed_scaling_factor=1.0)
        )
        product = self.multiply(reduced, x.routed_scaling_factor)
        return self.round(product + x.shared_output.to(torch.float32))


@breaks("ROUND-7", also=("ROUND-2",))
class SharedAddedToUnroundedSum(Reference):
    """Adds the shared part to the FP32 sum of the routes, and rounds once, where nothing scales."""

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        finalized = super().finalize_moe_output(x)
        routed = x.routed
        if isinstance(routed, Tensor) or x.shared_output is None or x.routed_scaling_factor != 1.0:
            return finalized
        total = self.reduce(
            routed.gemm2_permuted, routed.expert_weights, routed.expanded_idx_to_permuted_idx
        )
        return self.round(total + x.shared_output.to(torch.float32))


@breaks("ROUND-7")
class SharedForgotten(Reference):
    """Never adds the shared part."""

    def add_shared(self, scaled: Tensor, shared: Tensor) -> Tensor:
        return scaled


@breaks("ROUND-7", operations=(ALLREDUCE,))
class SharedOfRankZeroOnly(Around):
    """Takes the shared part for replicated, and adds rank 0's alone."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if operation == ALLREDUCE and call["workspace"].rank and hasattr(call["x"], "routed"):
            call["x"] = replace(call["x"], shared_output=None)
        return compute(call)


# --- ROUND-7: the all-reduce ----------------------------------------------------------------------


@breaks("ROUND-7", source="ROCm/aiter #2586", operations=(ALLREDUCE,))
class AllReduceNotRounded(Reference):
    """Carries the FP32 sum over ranks into the post-norm or the residual add."""

    def sum_ranks(self, parts: Tensor) -> Tensor:
        total = torch.zeros(parts.shape[1:], dtype=torch.float32, device=parts.device)
        for part in parts:
            total += part.to(torch.float32)
        return total


@breaks("ROUND-7", operations=(ALLREDUCE,))
class AllReduceInBf16(Reference):
    """Rounds the sum over ranks to BF16 after every rank."""

    def sum_ranks(self, parts: Tensor) -> Tensor:
        total = torch.zeros_like(parts[0])
        for part in parts:
            total = self.round(total.to(torch.float32) + part.to(torch.float32))
        return total


@breaks("ROUND-7", operations=(ALLREDUCE,))
class PartsNotRounded(Reference):
    """Sums over ranks what each rank has in FP32, before its own last rounding."""

    def scale(self, reduced: Tensor, routed_scale: float) -> Tensor:
        scaled = super().scale(reduced, routed_scale)
        exact = self.multiply(reduced, routed_scale)
        scaled.unrounded = exact  # type: ignore[attr-defined]
        return scaled

    def add_shared(self, scaled: Tensor, shared: Tensor) -> Tensor:
        added = super().add_shared(scaled, shared)
        exact = scaled.to(torch.float32) + shared.to(torch.float32)
        added.unrounded = exact  # type: ignore[attr-defined]
        return added

    def all_reduce(self, partial: Tensor, workspace: Workspace) -> Tensor:
        return super().all_reduce(getattr(partial, "unrounded", partial), workspace)


@breaks("ROUND-7", operations=(ALLREDUCE,))
class SharedAfterAllReduce(Around):
    """Reduces the routed and the shared part apart, and adds the two sums."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if operation != MOE_OUTPUT:
            return compute(call)
        finalized = compute(call)
        x = call["x"]
        if x.shared_output is not None:
            apart = compute({"x": replace(x, shared_output=None)})
            finalized.parts = (apart, x.shared_output)
        return finalized

    def all_reduce(self, partial: Tensor, workspace: Workspace) -> Tensor:
        parts = getattr(partial, "parts", None)
        if parts is None:
            return super().all_reduce(partial, workspace)
        routed, shared = (super(SharedAfterAllReduce, self).all_reduce(p, workspace) for p in parts)
        return self.add_shared(routed, shared)
