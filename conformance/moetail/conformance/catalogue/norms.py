"""Mutants of the two norms: ROUND-4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around, narrowed
from moetail.conformance.catalogue.mutant import breaks
from moetail.reference import Reference
from moetail.spec import Workspace
from moetail.spec.rules import BOUNDARY, FINALIZE, FUSED, GATHER

BF16 = torch.bfloat16

# --- rows and weights -----------------------------------------------------------------------------


@breaks("ROUND-4")
class MeanSharedByTwoTokens(Reference):
    """Two tokens a block take the mean of both, where the number of tokens is even."""

    def mean_square(self, value: Tensor) -> Tensor:
        mean = super().mean_square(value)
        if mean.shape[0] % 2 or not mean.numel():
            return mean
        pairs = mean.view(-1, 2, 1)
        return pairs.mean(dim=1, keepdim=True).expand_as(pairs).reshape_as(mean)


@breaks("ROUND-4")
class NormWeightsThroughFp16(Reference):
    """Keeps the norms' weights in FP16, which holds fewer exponents than BF16."""

    def rms_norm(self, value: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        narrow = None if weight is None else weight.to(torch.float16).to(BF16)
        return super().rms_norm(value, narrow, eps)


# --- eps ------------------------------------------------------------------------------------------


@breaks("ROUND-4")
class EpsOutsideRoot(Reference):
    """Adds eps to the root instead of under it."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return 1.0 / (torch.sqrt(self.mean_square(value)) + eps)


@breaks("ROUND-4")
class EpsMissing(Reference):
    """Leaves eps out."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return super().inverse_rms(value, 0.0)


@breaks("ROUND-4")
class EpsAddedToSum(Reference):
    """Adds eps to the sum of squares, before it is divided by H."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return super().inverse_rms(value, eps / value.shape[-1])


@breaks("ROUND-4")
class EpsSquared(Reference):
    """Adds the square of eps under the root."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return super().inverse_rms(value, eps * eps)


@breaks("ROUND-4", operations=(BOUNDARY, FUSED, GATHER))
class EpsOfTheOtherNorm(Reference):
    """Takes the next norm's eps for the post-norm, where both are on."""

    def boundary(
        self,
        value: Tensor,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor | None]:
        if post_eps is not None and next_eps is not None:
            post_eps = next_eps
        return super().boundary(
            value, residual, post_weight, post_eps, next_weight, next_eps, scales
        )


# --- the inverse ----------------------------------------------------------------------------------


@breaks("ROUND-4")
class InverseTooLarge(Reference):
    """An approximate reciprocal root, too large by 2^-12."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return super().inverse_rms(value, eps) * (1.0 + 2.0**-12)


@breaks("ROUND-4")
class InverseTooSmall(Reference):
    """An approximate reciprocal root, too small by 2^-13."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return super().inverse_rms(value, eps) * (1.0 - 2.0**-13)


@breaks("ROUND-4")
class InverseInBf16(Reference):
    """Rounds the inverse RMS to BF16."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return narrowed(super().inverse_rms(value, eps), BF16)


@breaks("ROUND-4")
class SquaresTruncatedToBf16(Reference):
    """Cuts the squares to BF16 before it sums them."""

    def mean_square(self, value: Tensor) -> Tensor:
        squares = value.to(torch.float32).square()
        cut = (squares.view(torch.int32) & -65536).view(torch.float32)
        return cut.mean(dim=-1, keepdim=True)


class RemembersUnrounded(Reference):
    """Where nothing scales, the finalized rows carry the FP32 sum that they were rounded from."""

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        finalized = super().finalize_slots(slots, weights, live, routed_scale)
        if routed_scale == 1.0:
            top_k = slots.shape[1]
            rows = slots[:live].reshape(live * top_k, slots.shape[2])
            index = torch.arange(live * top_k).view(live, top_k)
            total = self.reduce(rows, weights[:live], index)
            finalized.unrounded = total  # type: ignore[attr-defined]
        return finalized

    def unrounded(self, value: Tensor) -> Tensor:
        exact: Tensor = getattr(value, "unrounded", value)
        return exact


@breaks("ROUND-4", operations=(FINALIZE, FUSED), also=("ROUND-2",))
class InverseOfUnroundedInput(RemembersUnrounded):
    """Takes the post-norm's inverse RMS of the FP32 sum, where nothing scales, and applies it to
    the rounded one."""

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return super().inverse_rms(self.unrounded(value), eps)


@breaks("ROUND-4", operations=(FINALIZE, FUSED), also=("ROUND-2",))
class NormOfUnroundedInput(RemembersUnrounded):
    """Takes the post-norm of the FP32 sum, where nothing scales, instead of the rounded one."""

    def rms_norm(self, value: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return super().rms_norm(self.unrounded(value), weight, eps)


# --- the mean -------------------------------------------------------------------------------------


@breaks("ROUND-4")
class MeanOverPaddedWidth(Reference):
    """Divides the sum of squares by H padded to a power of two."""

    def mean_square(self, value: Tensor) -> Tensor:
        width = value.shape[-1]
        return super().mean_square(value) * (width / 2.0 ** (width - 1).bit_length())


@breaks("ROUND-4")
class MeanOverOneLess(Reference):
    """Divides the sum of squares by H - 1, as an unbiased variance does."""

    def mean_square(self, value: Tensor) -> Tensor:
        width = value.shape[-1]
        return super().mean_square(value) * (width / max(width - 1, 1))


@breaks("ROUND-4", operations=(FINALIZE, FUSED, GATHER))
class MeanOverAllRoutes(Reference):
    """Divides the post-norm's sum of squares by K * H."""

    routes = 1

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        self.routes = slots.shape[1]
        return super().finalize_slots(slots, weights, live, routed_scale)

    def post_norm(self, value: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
        if eps is None:
            return value
        wide = value.to(torch.float32)
        normed = wide / torch.sqrt(self.mean_square(value) / self.routes + eps)
        if weight is not None:
            normed = normed * weight.to(torch.float32)
        return self.round(normed)

    def beam_norm_residual_norm(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        self.routes = 1
        return super().beam_norm_residual_norm(*args, **kwargs)

    def all_reduce(self, partial: Tensor, workspace: Workspace) -> Tensor:
        self.routes = 1
        return super().all_reduce(partial, workspace)


@breaks("ROUND-4")
class MeanDropsTheTail(Reference):
    """Sums the squares of whole vectors of 512 elements only; for H below 512 of all."""

    def mean_square(self, value: Tensor) -> Tensor:
        width = value.shape[-1]
        whole = width - width % 512 or width
        return super().mean_square(value[..., :whole]) * (whole / width)


@breaks("ROUND-4")
class SubtractsTheMean(Reference):
    """Divides by the standard deviation: a LayerNorm's denominator."""

    def mean_square(self, value: Tensor) -> Tensor:
        return value.to(torch.float32).var(dim=-1, correction=0, keepdim=True)


# --- the affine -----------------------------------------------------------------------------------


@breaks("ROUND-4", source="sglang #25920")
class AffineAfterRounding(Reference):
    """Rounds before the affine multiply and again after it, as LlamaRMSNorm does."""

    def rms_norm(self, value: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        normed = super().rms_norm(value, None, eps)
        if weight is None:
            return normed
        return self.round(normed.to(torch.float32) * weight.to(torch.float32))


@breaks("ROUND-4")
class AffineAfterRoundingOfPostNorm(Reference):
    """Rounds before the affine multiply in the post-norm only: one path lost the option."""

    def post_norm(self, value: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
        normed = super().post_norm(value, None, eps)
        if eps is None or weight is None:
            return normed
        return self.round(normed.to(torch.float32) * weight.to(torch.float32))


@breaks("ROUND-4")
class AffinePlusOne(Reference):
    """Multiplies by 1 + weight, as Gemma's norm does."""

    def rms_norm(self, value: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return super().rms_norm(value, None if weight is None else weight.float() + 1.0, eps)


@breaks("ROUND-4")
class AffineMissing(Reference):
    """Leaves the affine multiply out."""

    def rms_norm(self, value: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return super().rms_norm(value, None, eps)


@breaks("ROUND-4", operations=(BOUNDARY, FUSED, GATHER))
class NormWeightsSwapped(Reference):
    """Gives each norm the other's weight, where both have one."""

    def boundary(
        self,
        value: Tensor,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor | None]:
        if post_weight is not None and next_weight is not None:
            post_weight, next_weight = next_weight, post_weight
        return super().boundary(
            value, residual, post_weight, post_eps, next_weight, next_eps, scales
        )


# --- the rounding ---------------------------------------------------------------------------------


@breaks("ROUND-4", operations=(BOUNDARY, FUSED, GATHER))
class PostNormNotRounded(Reference):
    """Hands the post-norm's FP32 result to the residual add."""

    def boundary(
        self,
        value: Tensor,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor | None]:
        if post_eps is not None:
            value = value.to(torch.float32) * self.inverse_rms(value, post_eps)
            if post_weight is not None:
                value = value * post_weight.to(torch.float32)
        return super().boundary(value, residual, None, None, next_weight, next_eps, scales)


@breaks("ROUND-4", operations=(FUSED,))
class UnfusedNormsTwice(Around):
    """The "unfused" path runs the post-norm in the finalization and in the boundary too."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        hidden_and_normalized = compute(call)
        if operation != FUSED or call["strategy"] != "unfused" or call["post_eps"] is None:
            return hidden_and_normalized
        if not call["residual"].shape[0]:
            return hidden_and_normalized
        post = (call["post_weight"], call["post_eps"])
        x, residual = call["x"], call["residual"]
        finalized = self.finalize_slots(
            self.as_slots(x), x.expert_weights, residual.shape[0], call["routed_scale"]
        )
        tail = (call["next_weight"], call["next_eps"], call["scales"])
        return self.boundary(self.post_norm(finalized, *post), residual, *post, *tail)
