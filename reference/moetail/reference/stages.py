"""The arithmetic of the contract, one small function an op, and the loop that evaluates its steps.

Written to be read beside the contract: clarity first, speed second. Each op is a method, so that an
implementation that deviates is a subclass that overrides it, or has another ``contract``.

FP32 values are torch.float32 tensors and rounded ones tensors of their format throughout, so
:meth:`Stages.round` is where the contract's roundings happen, and there are no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from moetail.reference.rounding import narrowed, rounded
from moetail.spec import owned_tokens
from moetail.spec.contract import BEAM, BF16, Contract, Rounding, Step

__all__ = ["Stages"]

FP32 = torch.float32


class Stages:
    """T tokens, K routes a token, H hidden, W ranks.

    Attributes:
        contract: whose steps are evaluated.
    """

    contract: Contract = BEAM

    def evaluate(self, stages: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all steps, from the arguments by role.

        A step of another stage, or without the argument that it needs, is the identity, so that
        ``rows`` is what enters the first of the stages.
        """
        kept, made = set(stages), dict(values)
        for step in self.contract_of(values).steps:
            value: Any = made.get(step.args[0])
            if step.stage in kept and (not step.needs or made.get(step.needs) is not None):
                if step.op != "round":
                    value = getattr(self, step.op)(step, *(made.get(name) for name in step.args))
                value = value if step.rounds is None else self.round(value, step.rounds)
            made[step.name] = value
        return made

    def through(self, stages: Iterable[str], values: Mapping[str, Any]) -> Tensor:
        """What leaves the last of the stages: the steps behind it are identities."""
        left: Tensor = self.evaluate(stages, values)[self.contract_of(values).steps[-1].name]
        return left

    def contract_of(self, values: Mapping[str, Any]) -> Contract:
        """The contract that a call with these values follows."""
        return self.contract

    # --- ops, in the order in which the contract needs them first -----------------------------

    def live_routes(self, index: Tensor) -> Tensor:
        """Which routes are local: ``[T, K]`` map to ``[T, K]`` bool (ROUTE-1)."""
        return index >= 0

    def read_weights(self, weights: Tensor) -> Tensor:
        """Routing weights, in the dtype they have, widened to FP32 (ROUTE-3)."""
        return weights.to(FP32)

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """a = sum over live k of w[t, k] * x[t, k, :], in FP32 (ROUND-1, ROUTE-1, ROUTE-4).

        ``rows`` BF16 ``[R, H]``, ``weights`` ``[T, K]``, ``index`` int ``[T, K]``; FP32 ``[T, H]``.
        The row of a remote route is not looked up at all, so it need not exist.
        """
        live = self.live_routes(index)
        weights = narrowed(self.read_weights(weights), step.how["weights"])
        total = torch.zeros((index.shape[0], rows.shape[1]), dtype=FP32, device=rows.device)
        for k in range(index.shape[1]):
            tokens = live[:, k].nonzero().squeeze(1)
            routed = rows[index[tokens, k].long()].to(FP32)
            product = narrowed(weights[tokens, k, None] * routed, step.how["product"])
            total[tokens] = self.accumulate(step, total[tokens], product, k)
        return total

    def accumulate(self, step: Step, total: Tensor, product: Tensor, k: int) -> Tensor:
        """The running sum with route k's product added."""
        kept = step.how["accumulator"] if k % step.how["every"] == 0 else "fp32"
        return narrowed(total, kept) + product

    def round(self, value: Tensor, rounding: Rounding = BF16) -> Tensor:
        """FP32 to fewer bits; by default to BF16, to nearest, ties to even (ROUND-3)."""
        return rounded(value, rounding)

    def multiply(self, step: Step, value: Tensor, factor: float) -> Tensor:
        """The FP32 product of a tensor and an FP32 number (ROUND-2, ROUND-5)."""
        factor = float(factor)  # which the product takes as FP32, without a copy to the device
        if step.how["factor"] != "fp32":
            factor = float(narrowed(torch.tensor(factor, dtype=FP32), step.how["factor"]))
        return value.to(FP32) * factor

    def add(self, step: Step, value: Tensor, other: Tensor) -> Tensor:
        """The FP32 sum of two tensors (ROUND-5, ROUND-7)."""
        return value.to(FP32) + other.to(FP32)

    def sum_ranks(self, step: Step, part: Tensor) -> Tensor:
        """FP32 sum over ranks: ``[W, T, H]`` to ``[T, H]`` (ROUND-7).

        Every rank sums in the order of ranks, so that all end with the same bits (OWN-3).
        """
        total = torch.zeros(part.shape[1:], dtype=FP32, device=part.device)
        for one in part:
            total = narrowed(total, step.how["accumulator"]) + one.to(FP32)
        return total

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        """FP32 mean of squares over exactly H: ``[T, 1]`` (ROUND-4)."""
        squares = value.to(FP32).square()
        if step.how["squares"] is not None:
            squares = rounded(squares, step.how["squares"]).to(FP32)
        return squares.mean(dim=-1, keepdim=True)

    def inverse_rms(self, step: Step, value: Tensor, eps: float) -> Tensor:
        """1 / sqrt(mean of squares + eps) in FP32, one a row: ``[T, 1]`` (ROUND-4)."""
        mean, place = self.mean_square(step, value), step.how["eps"]
        if place == "outside":
            return 1.0 / (torch.sqrt(mean) + eps)
        under = {"inside": eps, "sum": eps / value.shape[-1], "squared": eps * eps, "missing": 0.0}
        inverse = 1.0 / torch.sqrt(mean + under[place])
        return inverse * (1.0 + step.how["error"]) if step.how["error"] else inverse

    def affine(self, step: Step, value: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        """value * inverse * weight, in FP32: the weight comes before the rounding (ROUND-4)."""
        normed = value.to(FP32) * inverse
        if step.how["between"] is not None:
            normed = rounded(normed, step.how["between"]).to(FP32)
        if weight is None or step.how["gain"] == "none":
            return normed
        wide = narrowed(weight.to(FP32), step.how["weight"])
        return normed * (wide + 1.0 if step.how["gain"] == "1+w" else wide)

    # --- ranks --------------------------------------------------------------------------------

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        """The tokens a rank owns (OWN-1)."""
        return owned_tokens(num_tokens, world_size, rank)
