"""Mutants of the arithmetic that are no other contract: ROUND-1 to ROUND-7."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.change import breaks
from moetail.conformance.judge import round_bf16
from moetail.reference import Reference
from moetail.reference.rounding import narrowed
from moetail.spec import Rounding, Step
from moetail.spec.contract import BF16
from moetail.spec.operations import BOUNDARY
from moetail.spec.rules import ALLREDUCE, FINALIZE, FUSED, GATHER

_BEAM = (FINALIZE, FUSED, GATHER)

# --- ROUND-1, ROUND-2, ROUND-5: sums and products -------------------------------------------------


@breaks("ROUND-1", shows=True)
class Bf16PartialSums(Reference):
    """Splits the routes in two halves and adds their sums after rounding each to BF16."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        half = (index.shape[1] + 1) // 2
        first = super().weighted_sum(step, rows, weights[:, :half], index[:, :half])
        second = super().weighted_sum(step, rows, weights[:, half:], index[:, half:])
        return narrowed(first, "bf16") + narrowed(second, "bf16")


@breaks("ROUND-1", operations=_BEAM, shows=True)
class LastRouteDropped(Reference):
    """Stops one route early where there are more than one."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        last = max(index.shape[1] - 1, 1)
        return super().weighted_sum(step, rows, weights[:, :last], index[:, :last])


@breaks("ROUND-2", shows=True)
class ScaleWithoutItsSign(Reference):
    """Takes a negative routed scale as positive."""

    def multiply(self, step: Step, value: Tensor, factor: float) -> Tensor:
        return super().multiply(step, value, abs(factor) if step.name == "scale" else factor)


class ExactProducts(Reference):
    """Products of some steps in float64, which holds them exactly, and rounded from there."""

    exact: tuple[str, ...] = ()

    def multiply(self, step: Step, value: Tensor, factor: float) -> Tensor:
        if step.name not in self.exact:
            return super().multiply(step, value, factor)
        return value.double() * torch.tensor(factor, dtype=torch.float32).double()

    def round(self, value: Tensor, rounding: Rounding = BF16) -> Tensor:
        if value.dtype is not torch.float64:
            return super().round(value, rounding)
        return round_bf16(value)


@breaks("ROUND-2", shows=True)
class ScaledProductRoundedOnce(ExactProducts):
    """Rounds the exact product of sum and scale to BF16, without FP32 between."""

    exact = ("scale",)


@breaks("ROUND-5", shows=True)
class ProductsRoundedOnce(ExactProducts):
    """Rounds the exact products to BF16, without FP32 between."""

    exact = ("x_product", "r_product")


# --- ROUND-4: the mean of a norm ------------------------------------------------------------------


@breaks("ROUND-4", shows=True)
class MeanSharedByTwoTokens(Reference):
    """Two tokens a block take the mean of both, where the number of tokens is even."""

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        mean = super().mean_square(step, value)
        if mean.shape[0] % 2 or not mean.numel():
            return mean
        pairs = mean.view(-1, 2, 1)
        return pairs.mean(dim=1, keepdim=True).expand_as(pairs).reshape_as(mean)


@breaks("ROUND-4", shows=True)
class MeanOverPaddedWidth(Reference):
    """Divides the sum of squares by H padded to a power of two."""

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        width = value.shape[-1]
        return super().mean_square(step, value) * (width / 2.0 ** (width - 1).bit_length())


@breaks("ROUND-4", shows=True)
class MeanOverOneLess(Reference):
    """Divides the sum of squares by H - 1, as an unbiased variance does."""

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        width = value.shape[-1]
        return super().mean_square(step, value) * (width / max(width - 1, 1))


@breaks("ROUND-4", operations=_BEAM, shows=True)
class MeanOverAllRoutes(Reference):
    """Divides the post-norm's sum of squares by K * H."""

    routes = 1

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        self.routes = index.shape[1]
        return super().weighted_sum(step, rows, weights, index)

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        routes = self.routes if step.name == "post_inverse" else 1
        return super().mean_square(step, value) / routes


@breaks("ROUND-4", shows=True)
class MeanDropsTheTail(Reference):
    """Sums the squares of whole vectors of 512 elements only; for H below 512 of all."""

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        width = value.shape[-1]
        whole = width - width % 512 or width
        return super().mean_square(step, value[..., :whole]) * (whole / width)


@breaks("ROUND-4", shows=True)
class SubtractsTheMean(Reference):
    """Divides by the standard deviation: a LayerNorm's denominator."""

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        return value.to(torch.float32).var(dim=-1, correction=0, keepdim=True)


# --- ROUND-7: the shared part ---------------------------------------------------------------------


@breaks("ROUND-7", operations=(ALLREDUCE,), shows=True)
class SharedAfterAllReduce(Reference):
    """Reduces the routed and the shared part apart, and adds the two sums."""

    def part(self, values: dict[str, Any]) -> Tensor:
        return super().part({**values, "shared_output": None})

    def boundary(
        self, values: dict[str, Any], stages: Iterable[str] = BOUNDARY.stages
    ) -> tuple[Tensor, Tensor | None]:
        rows = self.through(("all-reduce",), values)
        if values["shared_output"] is not None:
            parts = self.exchange(values["shared_output"], values["workspace"])
            shared = self.through(("all-reduce",), {**values, "rows": parts})
            rows = self.through(("shared",), {**values, "rows": rows, "shared_output": shared})
        return super().boundary({**values, "rows": rows})
