"""Where a case's values come from. Each source has a name; ids hold it, so names never change.

The general ones are here; those aimed at a rule are in :mod:`.aimed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moetail.conformance.cases.aimed import AIMED
from moetail.conformance.cases.arithmetic import (
    bf16,
    generator,
    integers,
    signs,
    uniform,
)
from moetail.conformance.cases.case import Case
from moetail.conformance.cases.layer import MoELayer
from moetail.conformance.cases.models import MODELS, Model
from moetail.conformance.cases.problem import Problem, Routing
from moetail.conformance.cases.routing import expert_owners
from moetail.conformance.cases.source import SOURCES, Source
from moetail.conformance.cases.values import Draws
from moetail.conformance.judge.rounding import round_bf16

__all__ = ["SOURCES"]


def _gen(case: Case, name: str) -> torch.Generator:
    return generator(case.value_key, case.source, name)


def _normal(case: Case) -> Problem:
    return Draws(case).problem()


def _moe(case: Case) -> Problem:
    """The MoE layer's own rows, weights, experts and shared part."""
    draws = Draws(case)
    model = MODELS[case.model] if case.model else Model("plain", 0, 0, 0)
    layer = MoELayer(model, case.hidden, case.experts, case.top_k, case.seed)
    x = layer.tokens(case.tokens)
    ids, weights = layer.routes(x)
    if case.routed_scale == 1.0 and model.routed_scale != 1.0:
        weights = weights * model.routed_scale  # this router folds it into the weights
    rows = layer.rows(x, ids) if case.has_routes else torch.empty(draws.rows_shape)
    routing = Routing(ids, expert_owners(case))
    made = draws.problem(routing=routing, weights=weights, rows=rows.float())
    if case.shared:
        made.shared = layer.shared(x, case.ranks)
    return made


def _grid(case: Case) -> Problem:
    """Small integers on one grid: every order of every sum is exact, and nothing is rounded."""
    gen = _gen(case, "grid")

    def shape(name: str, values: Tensor) -> Tensor:
        return integers(-4, 4, tuple(values.shape), gen)

    weights = 2.0 ** integers(-1, 1, (case.tokens, case.top_k), gen)
    made = Draws(case).problem(shape, weights=weights)
    for name in ("post_weight", "next_weight"):
        power = 2.0 ** integers(-1, 1, (case.hidden,), gen)
        setattr(made, name, round_bf16(power * signs((case.hidden,), gen)))
    return made


def _cancel(case: Case) -> Problem:
    """The last route and the residual nearly cancel what came before."""
    draws = Draws(case)
    weights = draws.weights().to(torch.float32).double()
    noise = _gen(case, "noise")
    rows = bf16(draws.problem().rows.double())
    if case.has_routes and case.top_k > 1:
        before = (rows[:, :-1] * weights[:, :-1, None]).sum(1)
        left = 2.0 ** integers(-12, -4, tuple(before.shape), noise) * before
        rows[:, -1] = (left - before) / weights[:, -1:]
        rows = bf16(rows)
    made = draws.problem(weights=weights, rows=rows)
    if made.residual.numel() and case.post == "none":
        if case.has_routes:
            total = (rows * weights[:, :, None]).sum(1) * case.routed_scale
        else:
            total = made.finalized.double().sum(0)
        x_scale, r_scale = case.scales or (1.0, 1.0)
        small = 1.0 + 2.0 ** integers(-9, -5, tuple(total.shape), noise)
        made.residual = round_bf16(-total * small * x_scale / (r_scale or 1.0))
    return made


def _scaled(low: float, high: float) -> Callable[[Case], Problem]:
    """Normal values times 2^e, e uniform in [low, high] for each element."""

    def make(case: Case) -> Problem:
        gen = _gen(case, "exponents")

        def shape(name: str, values: Tensor) -> Tensor:
            exponent = torch.round(low + (high - low) * uniform(tuple(values.shape), gen))
            return torch.ldexp(values, exponent.int())

        made = Draws(case).problem(shape)
        if high - low > 16:  # wider than FP16: norm weights, too
            for name in ("post_weight", "next_weight"):
                setattr(made, name, round_bf16(shape(name, getattr(made, name).double())))
        return made

    return make


def _subnormal(case: Case) -> Problem:
    """Rows, sums and residuals among the subnormals; powers of two as weights."""
    gen = _gen(case, "subnormal")

    def shape(name: str, values: Tensor) -> Tensor:
        mantissa = integers(-255, 255, tuple(values.shape), gen)
        exponent = integers(-133, -128, tuple(values.shape), gen)
        return torch.ldexp(mantissa, exponent.int())

    weights = 2.0 ** integers(-2, 0, (case.tokens, case.top_k), gen)
    return Draws(case).problem(shape, weights=weights)


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

    return Draws(case).problem(shape)


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

    return Draws(case).problem(shape)


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
    return Draws(case).problem(shape, weights=weights)


def _special(value: float) -> Callable[[Case], Problem]:
    """Normal values with NaN, or infinities of both signs, in live routes, weights and addends."""

    def make(case: Case) -> Problem:
        gen = _gen(case, "special")

        def shape(name: str, values: Tensor) -> Tensor:
            shape_ = tuple(values.shape)
            hit = uniform(shape_, gen) < (0.02 if name == "rows" else 0.005)
            return torch.where(hit, signs(shape_, gen) * value, values)

        weights = Draws(case).weights()
        if case.tokens > 2:
            weights[-1, -1] = value
        return Draws(case).problem(shape, weights=weights)

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

SOURCES.update({source.name: source for source in (*_GENERAL, *AIMED)})
