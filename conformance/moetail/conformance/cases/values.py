"""The plain draws that sources shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moetail.conformance.cases.arithmetic import generator, uniform
from moetail.conformance.cases.case import Case
from moetail.conformance.cases.problem import Problem, Routing
from moetail.conformance.cases.routing import random_routing
from moetail.conformance.judge.rounding import round_bf16

__all__ = ["Draws"]


@dataclass
class Draws:
    """Values of a case before its source shapes them, which it does in float64."""

    case: Case

    def _normal(self, name: str, *shape: int) -> Tensor:
        gen = generator(self.case.value_key, name)
        return torch.randn(shape, generator=gen)

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        case = self.case
        return (case.tokens if case.has_routes else 0, case.top_k, case.hidden)

    @property
    def finalized_shape(self) -> tuple[int, int, int]:
        case = self.case
        return (0 if case.has_routes else case.ranks, case.tokens, case.hidden)

    @property
    def shared_shape(self) -> tuple[int, int, int]:
        return (self.case.ranks if self.case.shared else 0, self.case.tokens, self.case.hidden)

    @property
    def residual_shape(self) -> tuple[int, int]:
        # Without a boundary there is no residual; saying so saves memory at real sizes.
        return (self.case.tokens if self.case.target.has_boundary else 0, self.case.hidden)

    def weights(self) -> Tensor:
        """Positive routing weights that sum to 1, as a renormalizing router leaves them."""
        gen = generator(self.case.value_key, "weights")
        drawn = uniform((self.case.tokens, self.case.top_k), gen) + 0.05
        return drawn / drawn.sum(-1, keepdim=True)

    def norm_weight(self, norm: str) -> Tensor:
        return 1.0 + 0.2 * self._normal(f"{norm}_weight", self.case.hidden).double()

    def problem(
        self,
        shape: Callable[[str, Tensor], Tensor] | None = None,
        routing: Routing | None = None,
        weights: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Problem:
        """Normal values, each tensor passed through ``shape(name, values)`` if that is given."""

        def shaped(name: str, sizes: tuple[int, ...]) -> Tensor:
            values = self._normal(name, *sizes)
            return values if shape is None else shape(name, values.double())

        drawn = {
            name: shaped(name, sizes)
            for name, sizes in (
                ("finalized", self.finalized_shape),
                ("residual", self.residual_shape),
                ("shared", self.shared_shape),
            )
        }
        if rows is None:
            rows = shaped("rows", self.rows_shape)
        if weights is None:
            weights = self.weights()
        return Problem(
            routing=random_routing(self.case) if routing is None else routing,
            rows=round_bf16(rows),
            weights=weights.to(torch.float32),
            finalized=round_bf16(drawn["finalized"]),
            residual=round_bf16(drawn["residual"]),
            post_weight=round_bf16(self.norm_weight("post")),
            next_weight=round_bf16(self.norm_weight("next")),
            shared=round_bf16(drawn["shared"]),
        )
