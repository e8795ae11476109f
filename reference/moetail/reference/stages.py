"""The arithmetic of the contract, one small function a stage, in the order data flows.

Written to be read beside the contract: clarity first, speed second. Each stage is a method, so that
an implementation that deviates in one stage is a subclass that overrides it.

BF16 values are torch.bfloat16 tensors and FP32 values torch.float32 tensors throughout, so every
``.to(torch.bfloat16)`` is a rounding the contract asks for, and there are no others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetail.spec import owned_tokens

__all__ = ["Stages"]


class Stages:
    """T tokens, K routes a token, H hidden, W ranks."""

    # --- the top-k reduction ------------------------------------------------------------------

    def live_routes(self, index: Tensor) -> Tensor:
        """Which routes are local: ``[T, K]`` map to ``[T, K]`` bool (ROUTE-1)."""
        return index >= 0

    def read_weights(self, weights: Tensor) -> Tensor:
        """Routing weights, in the dtype they have, widened to FP32 (ROUTE-3)."""
        return weights.to(torch.float32)

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """a = sum over live k of w[t, k] * x[t, k, :], in FP32 (ROUND-1, ROUTE-1, ROUTE-4).

        ``rows`` BF16 ``[R, H]``, ``weights`` ``[T, K]``, ``index`` int ``[T, K]``; FP32 ``[T, H]``.
        The row of a remote route is not looked up at all, so it need not exist.
        """
        live = self.live_routes(index)
        weights = self.read_weights(weights)
        total = torch.zeros(
            (index.shape[0], rows.shape[1]), dtype=torch.float32, device=rows.device
        )
        for k in range(index.shape[1]):
            tokens = live[:, k].nonzero().squeeze(1)
            routed = rows[index[tokens, k].long()].to(torch.float32)
            total[tokens] += weights[tokens, k, None] * routed
        return total

    def round(self, value: Tensor) -> Tensor:
        """FP32 to BF16, to nearest, ties to even (ROUND-3)."""
        return value.to(torch.bfloat16)

    def scale(self, reduced: Tensor, routed_scale: float) -> Tensor:
        """s = RN(r * routed_scale), on the rounded reduction (ROUND-2)."""
        return self.round(self.multiply(reduced, routed_scale))

    def multiply(self, value: Tensor, factor: float) -> Tensor:
        """The FP32 product of a BF16 tensor and an FP32 number."""
        factor32 = torch.tensor(factor, dtype=torch.float32, device=value.device)
        return value.to(torch.float32) * factor32

    def finalize(self, rows: Tensor, weights: Tensor, index: Tensor, routed_scale: float) -> Tensor:
        """reduce, round, scale: BF16 ``[T, H]``."""
        return self.scale(self.round(self.reduce(rows, weights, index)), routed_scale)

    def add_shared(self, scaled: Tensor, shared: Tensor) -> Tensor:
        """p = RN(s + shared), after the scale (ROUND-7)."""
        return self.round(scaled.to(torch.float32) + shared.to(torch.float32))

    # --- norms --------------------------------------------------------------------------------

    def mean_square(self, value: Tensor) -> Tensor:
        """FP32 mean of squares over exactly H: ``[T, 1]`` (ROUND-4)."""
        return value.to(torch.float32).square().mean(dim=-1, keepdim=True)

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        """1 / sqrt(mean of squares + eps) in FP32, of the rounded value (ROUND-4, ROUND-6)."""
        return 1.0 / torch.sqrt(self.mean_square(value) + eps)

    def rms_norm(self, value: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """RN(value * inverse RMS * weight): the affine comes before the rounding (ROUND-4)."""
        normalized = value.to(torch.float32) * self.inverse_rms(value, eps)
        if weight is not None:
            normalized = normalized * weight.to(torch.float32)
        return self.round(normalized)

    def post_norm(self, value: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
        """The optional norm of the scaled reduction; eps None: none."""
        return value if eps is None else self.rms_norm(value, weight, eps)

    def next_norm(self, hidden: Tensor, weight: Tensor | None, eps: float | None) -> Tensor | None:
        """The optional norm of the rounded hidden (ROUND-6); eps None: None."""
        return None if eps is None else self.rms_norm(hidden, weight, eps)

    # --- the residual -------------------------------------------------------------------------

    def residual_add(
        self, value: Tensor, residual: Tensor, scales: tuple[float, float] | None
    ) -> Tensor:
        """hidden = RN(RN(n * x_scale) + RN(residual * r_scale)) (ROUND-5)."""
        if scales is not None:
            x_scale, r_scale = scales
            value = self.round(self.multiply(value, x_scale))
            residual = self.round(self.multiply(residual, r_scale))
        return self.round(value.to(torch.float32) + residual.to(torch.float32))

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
        """post-norm, residual add, next norm: (hidden, normalized or None)."""
        normed = self.post_norm(value, post_weight, post_eps)
        hidden = self.residual_add(normed, residual, scales)
        return hidden, self.next_norm(hidden, next_weight, next_eps)

    # --- ranks --------------------------------------------------------------------------------

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        """The tokens a rank owns (OWN-1)."""
        return owned_tokens(num_tokens, world_size, rank)

    def sum_ranks(self, parts: Tensor) -> Tensor:
        """q = RN(FP32 sum over ranks): BF16 ``[W, T, H]`` to BF16 ``[T, H]`` (ROUND-7).

        Every rank sums in the order of ranks, so that all end with the same bits (OWN-3).
        """
        total = torch.zeros(parts.shape[1:], dtype=torch.float32, device=parts.device)
        for part in parts:
            total += part.to(torch.float32)
        return self.round(total)
