"""Where a case's values come from. Each source has a name; ids hold it, so names never change.

The general ones are here; those aimed at a rule are in :mod:`.aimed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moetail.conformance.producers.arithmetic import (
    bf16,
    generator,
    integers,
    signs,
    to_bf16,
    uniform,
)
from moetail.conformance.producers.case import Case
from moetail.conformance.producers.layer import MoELayer
from moetail.conformance.producers.models import MODELS, Model
from moetail.conformance.producers.problem import Problem
from moetail.conformance.producers.routing import Routing, expert_owners, random_routing
from moetail.spec.rules import ALLREDUCE, BOUNDARY, FUSED, GATHER

__all__ = ["SOURCES", "SOURCE_TABLE", "Source", "refusal"]


@dataclass(frozen=True)
class Source:
    """A named way to make the values of a case.

    Attributes:
        name: the key in SOURCES.
        description: one line.
        make: the values of a case.
        rule: the rule that decides on these values, or None for a general source.
        refuse: why the source can not serve a case, or None where it can.
    """

    name: str
    description: str
    make: Callable[[Case], Problem]
    rule: str | None = None
    refuse: Callable[[Case], str | None] = lambda case: None


def refusal(case: Case) -> str | None:
    """Why the case's source can not serve it; None where it can."""
    return SOURCE_TABLE[case.source].refuse(case)


@dataclass
class _Draws:
    """Float64 values of a case before its source shapes them."""

    case: Case

    def _normal(self, name: str, *shape: int) -> Tensor:
        gen = generator(self.case.value_key, name)
        return torch.randn(shape, generator=gen).double()

    @property
    def has_routes(self) -> bool:
        return self.case.operation != BOUNDARY and self.case.routed == "routes"

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        case = self.case
        return (case.tokens if self.has_routes else 0, case.top_k, case.hidden)

    @property
    def finalized_shape(self) -> tuple[int, int, int]:
        case = self.case
        return (0 if self.has_routes else case.ranks, case.tokens, case.hidden)

    @property
    def shared_shape(self) -> tuple[int, int, int]:
        return (self.case.ranks if self.case.shared else 0, self.case.tokens, self.case.hidden)

    @property
    def residual_shape(self) -> tuple[int, int]:
        # Without a boundary there is no residual; saying so saves memory at real sizes.
        boundary = self.case.operation in (BOUNDARY, FUSED, GATHER, ALLREDUCE)
        return (self.case.tokens if boundary else 0, self.case.hidden)

    def weights(self) -> Tensor:
        """Positive routing weights that sum to 1, as a renormalizing router leaves them."""
        gen = generator(self.case.value_key, "weights")
        drawn = uniform((self.case.tokens, self.case.top_k), gen) + 0.05
        return drawn / drawn.sum(-1, keepdim=True)

    def norm_weight(self, norm: str) -> Tensor:
        return 1.0 + 0.2 * self._normal(f"{norm}_weight", self.case.hidden)

    def problem(
        self,
        shape: Callable[[str, Tensor], Tensor] = lambda name, values: values,
        routing: Routing | None = None,
        weights: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Problem:
        """Normal values, each tensor passed through ``shape(name, values)``."""
        drawn = {
            name: shape(name, self._normal(name, *sizes))
            for name, sizes in (
                ("finalized", self.finalized_shape),
                ("residual", self.residual_shape),
                ("shared", self.shared_shape),
            )
        }
        if rows is None:
            rows = shape("rows", self._normal("rows", *self.rows_shape))
        if weights is None:
            weights = self.weights()
        return Problem(
            routing=random_routing(self.case) if routing is None else routing,
            rows=to_bf16(rows),
            weights=weights.to(torch.float32),
            finalized=to_bf16(drawn["finalized"]),
            residual=to_bf16(drawn["residual"]),
            post_weight=to_bf16(self.norm_weight("post")),
            next_weight=to_bf16(self.norm_weight("next")),
            shared=to_bf16(drawn["shared"]),
        )


def _gen(case: Case, name: str) -> torch.Generator:
    return generator(case.value_key, case.source, name)


def _normal(case: Case) -> Problem:
    return _Draws(case).problem()


def _moe(case: Case) -> Problem:
    """The MoE layer's own rows, weights, experts and shared part."""
    draws = _Draws(case)
    model = MODELS[case.model] if case.model else Model("plain", 0, 0, 0)
    layer = MoELayer(model, case.hidden, case.experts, case.top_k, case.seed)
    x = layer.tokens(case.tokens)
    ids, weights = layer.routes(x)
    if case.routed_scale == 1.0 and model.routed_scale != 1.0:
        weights = weights * model.routed_scale  # this router folds it into the weights
    rows = layer.rows(x, ids) if draws.has_routes else torch.empty(draws.rows_shape)
    routing = Routing(ids, expert_owners(case)[ids])
    made = draws.problem(routing=routing, weights=weights, rows=rows.double())
    if case.shared:
        made.shared = layer.shared(x, case.ranks)
    return made


def _grid(case: Case) -> Problem:
    """Small integers on one grid: every order of every sum is exact, and nothing is rounded."""
    gen = _gen(case, "grid")

    def shape(name: str, values: Tensor) -> Tensor:
        return integers(-4, 4, tuple(values.shape), gen)

    weights = 2.0 ** integers(-1, 1, (case.tokens, case.top_k), gen)
    made = _Draws(case).problem(shape, weights=weights)
    for name in ("post_weight", "next_weight"):
        power = 2.0 ** integers(-1, 1, (case.hidden,), gen)
        setattr(made, name, to_bf16(power * signs((case.hidden,), gen)))
    return made


def _cancel(case: Case) -> Problem:
    """The last route and the residual nearly cancel what came before."""
    draws = _Draws(case)
    weights = draws.weights().to(torch.float32).double()
    noise = _gen(case, "noise")
    rows = bf16(draws.problem().rows.double())
    if draws.has_routes and case.top_k > 1:
        before = (rows[:, :-1] * weights[:, :-1, None]).sum(1)
        left = 2.0 ** integers(-12, -4, tuple(before.shape), noise) * before
        rows[:, -1] = (left - before) / weights[:, -1:]
        rows = bf16(rows)
    made = draws.problem(weights=weights, rows=rows)
    if made.residual.numel() and case.post == "none":
        if draws.has_routes:
            total = (rows * weights[:, :, None]).sum(1) * case.routed_scale
        else:
            total = made.finalized.double().sum(0)
        x_scale, r_scale = case.scales or (1.0, 1.0)
        small = 1.0 + 2.0 ** integers(-9, -5, tuple(total.shape), noise)
        made.residual = to_bf16(-total * small * x_scale / (r_scale or 1.0))
    return made


def _scaled(low: float, high: float) -> Callable[[Case], Problem]:
    """Normal values times 2^e, e uniform in [low, high] for each element."""

    def make(case: Case) -> Problem:
        gen = _gen(case, "exponents")

        def shape(name: str, values: Tensor) -> Tensor:
            exponent = torch.round(low + (high - low) * uniform(tuple(values.shape), gen))
            return torch.ldexp(values, exponent.int())

        return _Draws(case).problem(shape)

    return make


def _subnormal(case: Case) -> Problem:
    """Rows, sums and residuals among the subnormals; powers of two as weights."""
    gen = _gen(case, "subnormal")

    def shape(name: str, values: Tensor) -> Tensor:
        mantissa = integers(-255, 255, tuple(values.shape), gen)
        exponent = integers(-133, -128, tuple(values.shape), gen)
        return torch.ldexp(mantissa, exponent.int())

    weights = 2.0 ** integers(-2, 0, (case.tokens, case.top_k), gen)
    return _Draws(case).problem(shape, weights=weights)


def _huge(case: Case) -> Problem:
    """Rows up to BF16's largest number; their weighted sum mostly stays finite."""
    gen = _gen(case, "huge")
    # What a scale multiplies must leave room for it, and so must each rank's part.
    room = max(1.0, abs(case.routed_scale), *(abs(scale) for scale in case.scales or (1.0,)))
    down = math.ceil(math.log2(room * case.ranks))

    def shape(name: str, values: Tensor) -> Tensor:
        mantissa = integers(128, 255, tuple(values.shape), gen) * signs(tuple(values.shape), gen)
        top = 120 if name == "rows" else 117
        exponent = integers(top - 4, top, tuple(values.shape), gen) - down
        return torch.ldexp(mantissa, exponent.int())

    return _Draws(case).problem(shape)


def _tiny(case: Case) -> Problem:
    """Rows whose mean square is about eps: each token another share of it."""
    gen = _gen(case, "tiny")
    norm = "post" if case.post != "none" or case.next == "none" else "next"
    unit = math.sqrt(getattr(case, f"{norm}_eps") or 1e-12)
    share = 10.0 ** (2.0 * uniform((case.tokens, 1), gen) - 1.0)

    def shape(name: str, values: Tensor) -> Tensor:
        if not values.numel():
            return values
        return values * unit * (share.unsqueeze(-1) if name == "rows" else share)

    return _Draws(case).problem(shape)


def _zeros(case: Case) -> Problem:
    """Zeros of both signs, and negatives so small that they round to -0.0."""
    gen = _gen(case, "zeros")

    def shape(name: str, values: Tensor) -> Tensor:
        kind = uniform(tuple(values.shape), gen)
        sign = signs(tuple(values.shape), gen)
        zero = torch.copysign(torch.zeros_like(values), sign)
        least = torch.full_like(values, 2.0**-133).copysign(sign)
        made = torch.where(kind < 0.15, bf16(values), torch.where(kind < 0.3, least, zero))
        made[..., ::3] = -0.0  # whole columns, so that sums stay negative zeros too
        return made

    weights = torch.full((case.tokens, case.top_k), 0.25, dtype=torch.float64)
    return _Draws(case).problem(shape, weights=weights)


def _special(value: float) -> Callable[[Case], Problem]:
    """Normal values with NaN, or infinities of both signs, in live routes, weights and addends."""

    def make(case: Case) -> Problem:
        gen = _gen(case, "special")

        def shape(name: str, values: Tensor) -> Tensor:
            shape_ = tuple(values.shape)
            hit = uniform(shape_, gen) < (0.02 if name == "rows" else 0.005)
            return torch.where(hit, signs(shape_, gen) * value, values)

        weights = _Draws(case).weights()
        if case.tokens > 2:
            weights[-1, -1] = value
        return _Draws(case).problem(shape, weights=weights)

    return make


_GENERAL = (
    Source("normal", "normal rows, weights that sum to 1", _normal),
    Source("moe", "a real MoE layer: router, top-k, SwiGLU experts", _moe),
    Source("grid", "one exact grid: every order of every sum is exact", _grid),
    Source("cancel", "the last route and the residual nearly cancel the rest", _cancel),
    Source("subnormal", "rows, sums and residuals among the subnormals", _subnormal),
    Source("huge", "rows up to the largest finite number", _huge),
    Source("tiny", "rows whose mean square is about eps", _tiny),
    Source("zeros", "zeros of both signs, and values that round to them", _zeros),
    Source("nan", "NaN in live routes, weights and addends", _special(math.nan)),
    Source(
        "inf", "infinities of both signs in live routes, weights and addends", _special(math.inf)
    ),
    Source("wide", "exponents spread over 60 binary places", _scaled(-30, 30)),
)

SOURCE_TABLE: dict[str, Source] = {source.name: source for source in _GENERAL}

# What the suite and the command line show: name -> (description, rule aimed at or None).
SOURCES: dict[str, tuple[str, str | None]] = {
    name: (source.description, source.rule) for name, source in SOURCE_TABLE.items()
}
