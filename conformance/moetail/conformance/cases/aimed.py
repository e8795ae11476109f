"""Sources on which one rule decides.

Each makes legal and broken results differ on most elements where its rule is broken, while, as far
as arithmetic allows, an implementation that breaks any other rule still gives the legal result; so
that a failure names the rule. The means are always the same:

- Sums are planted exactly: an element's value, of as many bits as wanted, is dealt to one or two
  random routes as a large part and a small one, whose sum is exact in every order; all other rows
  of the element are zero.
- A rounding is made visible by what follows it: a cancelling addend leaves nothing but a few units
  of the large value's last place, on whose finer grid the error shows.
- The inverse RMS of a row is set to any wanted number by a few ballast elements, which also hold
  nearly all of the row's energy; the other elements can then be chosen one by one.

Values are float64 on exact grids throughout, and searched for among 8-bit mantissas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases.arithmetic import (
    bf16,
    fp32,
    generator,
    integers,
    signs,
    uniform,
)
from moetail.conformance.cases.case import Case
from moetail.conformance.cases.problem import Problem, Routing
from moetail.conformance.cases.routing import holed_routing, home_routing, spread_routing
from moetail.conformance.cases.source import Source
from moetail.conformance.cases.values import Draws
from moetail.conformance.judge.rounding import round_bf16
from moetail.spec import operation

__all__ = ["AIMED", "aimed_cases"]

_Check = Callable[[Case], str | None]
_BALLAST = 5  # elements of a row that set its mean square to about 2^-25 relative
_SCALED_BALLAST = 12  # of four bits each, so that most scales multiply them exactly


# What a source needs of a case. ------------------------------------------------------------------


def _need(*checks: _Check) -> _Check:
    """The first complaint of the checks; no aimed source serves operations that only convert."""

    def refuse(case: Case) -> str | None:
        if not case.target.computes:
            return f"{case.operation} does no arithmetic"
        return next((why for why in (check(case) for check in checks) if why), None)

    return refuse


def _power_of_two(value: float) -> bool:
    return math.frexp(abs(value))[0] in (0.0, 0.5)


def _routes(case: Case) -> str | None:
    return None if case.has_routes else "needs routes"


def _unscaled(case: Case) -> str | None:
    return None if case.routed_scale == 1.0 else "needs routed_scale 1"


def _no_scales(case: Case) -> str | None:
    return None if case.scales is None else "needs scales None"


def _odd_scale(case: Case) -> str | None:
    odd = not _power_of_two(case.routed_scale)
    return None if odd else "needs a routed_scale that is no power of two"


def _a_norm(case: Case) -> str | None:
    return None if (case.post, case.next) != ("none", "none") else "needs a norm"


def _no_post(case: Case) -> str | None:
    return None if case.post == "none" else "needs post none"


def _two_local(case: Case) -> str | None:
    return None if case.top_k >= 2 else "needs top_k >= 2"


# Planting. ---------------------------------------------------------------------------------------


def _pick(table: Tensor, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """Random entries of a table ``[n, ...]``: shape + the entry's own."""
    return table[torch.randint(0, table.shape[0], shape, generator=gen)]


def _units(shape: tuple[int, ...], gen: torch.Generator, low: int = -3, high: int = 3) -> Tensor:
    """+-2^e: the sign and place of a value that is searched for as an integer mantissa."""
    return signs(shape, gen) * 2.0 ** (integers(low, high, shape, gen) - 7)


def _at_home(case: Case, values: Tensor) -> Tensor:
    """``[T, H]`` values as ``[W, T, H]``: rank t mod W has those of token t, the others zero."""
    home = torch.arange(case.tokens) % case.shards
    mine = home == torch.arange(case.shards).unsqueeze(1)
    return torch.where(mine.unsqueeze(-1), values, 0.0)


def _plant(
    case: Case, routing: Routing, large: Tensor, small: Tensor | None, gen: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(rows ``[T, K, H]``, weights ``[T, K]``) whose sums on each rank are large + small exactly.

    Weights are powers of two. A rank with one route of a token gets the large part only, one with
    none gets nothing.
    """
    shape = (case.tokens, case.top_k, case.hidden)
    rows = torch.zeros(shape, dtype=torch.float64)
    for rank in range(case.shards):
        mine = routing.owners == rank
        count = mine.sum(1)[:, None, None]
        order = torch.rand(shape, generator=gen) + mine.unsqueeze(-1)
        chosen = order.topk(min(2, case.top_k), dim=1).indices
        parts = [(large, 0)] if small is None or case.top_k < 2 else [(large, 0), (small, 1)]
        for part, turn in parts:
            value = torch.where(count > turn, part[rank].unsqueeze(1), 0.0)
            rows.scatter_add_(1, chosen[:, turn : turn + 1], value)
    weights = 2.0 ** integers(-2, 1, (case.tokens, case.top_k), gen)
    return rows / weights.unsqueeze(-1), weights


def _problem(
    case: Case,
    *,
    large: Tensor,
    small: Tensor | None = None,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    routing: Routing | None = None,
    rows: Tensor | None = None,
    weights: Tensor | None = None,
) -> Problem:
    """A problem of planted sums ``[W, T, H]``; residual and shared part are zero where not given.

    Norm weights are powers of two, so that the place of the affine's rounding does not matter.
    """
    gen = _gen(case, "plant")
    draws = Draws(case)
    routing = home_routing(case) if routing is None else routing
    if rows is None or weights is None:
        if case.has_routes:
            rows, weights = _plant(case, routing, large, small, gen)
        else:
            rows = torch.zeros(draws.rows_shape, dtype=torch.float64)
            weights = torch.ones((case.tokens, case.top_k), dtype=torch.float64)
    finalized = torch.zeros(draws.finalized_shape, dtype=torch.float64)
    if not case.has_routes:
        finalized[: large.shape[0]] = large
    zero_residual = torch.zeros(draws.residual_shape, dtype=torch.float64)
    zero_shared = torch.zeros(draws.shared_shape, dtype=torch.float64)
    return Problem(
        routing=routing,
        rows=round_bf16(rows),
        weights=weights.to(torch.float32),
        finalized=round_bf16(finalized),
        residual=round_bf16(
            zero_residual if residual is None or not zero_residual.numel() else residual
        ),
        post_weight=round_bf16(_power_weights(case, gen)),
        next_weight=round_bf16(_power_weights(case, gen)),
        shared=round_bf16(zero_shared if shared is None or not zero_shared.numel() else shared),
    )


def _power_weights(case: Case, gen: torch.Generator) -> Tensor:
    return signs((case.hidden,), gen) * 2.0 ** integers(-1, 1, (case.hidden,), gen)


def _gen(case: Case, name: str) -> torch.Generator:
    return generator(case.value_key, "aimed", name)


def _size(case: Case) -> tuple[int, int]:
    return case.tokens, case.hidden


def _addend(case: Case, large: Tensor, small: Tensor) -> Problem:
    """large + small where the first sum is not over routes: small is the next addend."""
    parts = _at_home(case, large)
    if case.shared:
        return _problem(case, large=parts, shared=_at_home(case, small))
    return _problem(case, large=parts, residual=small)


def _products(
    case: Case, multipliers: list[int], good: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(rows, weights) for K = 1, where a value needs its bits from one product.

    Of the multipliers, those are taken for which most mantissas make ``good`` products.
    """
    gen = _gen(case, "products")
    mantissas = torch.arange(128, 256, dtype=torch.float64)
    products = torch.tensor(multipliers, dtype=torch.float64).unsqueeze(1) * mantissas
    fits = good(products)
    best = fits.sum(1).argsort(descending=True)[:4]
    best = best[fits[best].sum(1) * 2 >= fits[best[0]].sum()]
    row = _pick(best, (case.tokens,), gen)
    chance = fits[row].double() + 1e-12
    if case.tokens:
        index = torch.multinomial(chance, case.hidden, replacement=True, generator=gen)
    else:
        index = torch.zeros(_size(case), dtype=torch.int64)
    rows = mantissas[index] * _units(_size(case), gen)
    weights = torch.tensor(multipliers, dtype=torch.float64)[row].unsqueeze(1)
    return rows.unsqueeze(1), weights / 2.0 ** torch.floor(torch.log2(weights))


def _ulp(values: Tensor) -> Tensor:
    """The place of the last BF16 bit of (normal, nonzero) values."""
    return 2.0 ** (torch.floor(torch.log2(values.abs())) - 7)


# ROUND-3: nearest, ties to even. -----------------------------------------------------------------


def _ties(down: float, up: float) -> Callable[[Case], Problem]:
    """Sums on midpoints: with that share below an even upper neighbour, and so on; the rest near.

    down: the lower neighbour is even, so that the tie rounds towards zero; up: the upper one is.
    """

    def make(case: Case) -> Problem:
        gen = _gen(case, "ties")
        size = _size(case)
        kind = uniform(size, gen)
        low = integers(64, 127, size, gen) * 2
        low = torch.where((kind >= down) & (kind < down + up), low + 1, low)
        beside = signs(size, gen) / 64
        part = torch.where(kind < down + up, 0.5, 0.5 + beside)
        above = uniform(size, gen) < 0.5
        unit = _units(size, gen)
        large = (low + above) * unit
        small = (part - above.double()) * unit
        if not case.has_routes:
            return _addend(case, large, small)
        if case.top_k > 1:
            return _problem(case, large=_at_home(case, large), small=_at_home(case, small))

        def good(products: Tensor) -> Tensor:
            place = products / _ulp(products)
            tie = place % 1 == 0.5
            odd = torch.floor(place) % 2 == 1
            if down + up == 0.0:
                return ((place % 1 - 0.5).abs() <= 0.25) & ~tie
            return tie & ((odd & (up > 0)) | (~odd & (down > 0)))

        near = down + up == 0.0
        rows, weights = _products(case, [17, 19, 21, 23] if near else [3, 5, 7], good)
        return _problem(case, large=_at_home(case, large), rows=rows, weights=weights)

    return make


def _ties_addend(case: Case) -> str | None:
    if case.has_routes or case.shared:
        return None
    return _no_post(case) if case.target.has_boundary else "needs routes or a shared part"


# ROUND-1: FP32 accumulation; ROUTE-3: the weights' dtype. ----------------------------------------


def _turns(routing: Routing) -> tuple[Tensor, Tensor]:
    """(turn, count) ``[T, K]``: a route's place among those of its token on its rank."""
    same = routing.owners.unsqueeze(2) == routing.owners.unsqueeze(1)
    earlier = same & torch.ones_like(same).tril(-1)
    return earlier.sum(2), same.sum(2)


def _accumulate(case: Case) -> Problem:
    """Products of 16 bits whose sum is an 8-bit number: the last route cancels the others."""
    gen = _gen(case, "accumulate")
    routing = home_routing(case)
    turn, count = _turns(routing)
    last = turn == count - 1
    shape = (case.tokens, case.top_k)
    others = integers(64, 95, shape, gen) * 2 + 1
    final = integers(96, 127, shape, gen) * 2 + 1
    weights = torch.where(last, final, others)
    # A token's only route on a rank: no sum, so its product has 8 bits.
    weights = torch.where(count == 1, 128.0, weights)
    rows = torch.zeros((*shape, case.hidden), dtype=torch.float64)
    # One partial sum for each owner; the last entry is REMOTE's.
    sums = torch.zeros((case.shards + 1, *_size(case)), dtype=torch.float64)
    token = torch.arange(case.tokens)
    for slot in range(case.top_k):
        owner = routing.owners[:, slot]
        before = sums[owner, token]
        weight = weights[:, slot : slot + 1]
        toward_zero = torch.where(before != 0, -before.sign(), signs(_size(case), gen))
        free = integers(128, 255, _size(case), gen) * toward_zero
        closing = torch.round(-before / weight)
        closes = (last[:, slot] & (count[:, slot] > 1)).unsqueeze(1)
        rows[:, slot] = torch.where(closes, closing, free)
        sums[owner, token] = before + weight * rows[:, slot]
    # K = 1 leaves only the range of FP16 to get wrong.
    low, high = (17, 19) if case.top_k == 1 else (-2, 2)
    unit = 2.0 ** (integers(low, high, _size(case), gen) - 7)
    return _problem(
        case,
        large=_at_home(case, torch.zeros(_size(case), dtype=torch.float64)),
        routing=routing,
        rows=rows * unit.unsqueeze(1),
        weights=weights / 128,
    )


def _weights(case: Case) -> Problem:
    """Pairs of routes that cancel up to the low bits of one weight."""
    gen = _gen(case, "weights")
    routing = home_routing(case)
    turn, count = _turns(routing)
    shape = (case.tokens, case.top_k)
    # The bits below BF16's eighth, where the dtype has them.
    place, odd = {"fp32": (-12, (5, 7)), "fp16": (-10, (1, 3)), "bf16": (-7, (3, 7))}[case.weights]
    low_bits = _pick(torch.tensor(odd, dtype=torch.float64), shape, gen) * 2.0**place
    pair = turn // 2
    whole = pair * 2 + 1 < count
    active = torch.floor(uniform((case.tokens, 1), gen) * (count // 2).clamp(min=1))
    first = turn % 2 == 0
    lead = low_bits.clone()
    # Both routes of an idle pair have the same weight: whatever it is read as, they cancel.
    token = torch.arange(case.tokens).unsqueeze(1)
    partner = _partner(routing, turn, count)
    idle = torch.where(first, low_bits, low_bits[token, partner])
    weights = 1.0 + torch.where(pair == active, torch.where(first, lead, 0.0), idle)
    lone = (count == 1).unsqueeze(-1)
    below = 2.0**-8 - 2.0**place if case.weights == "fp32" else 3 * 2.0**-10
    weights = torch.where(count == 1, 1.0 + (0.0625 if case.weights == "bf16" else below), weights)
    unit = _units((case.tokens, 1, case.hidden), gen)
    value = integers(8, 15, (*shape, case.hidden), gen) * unit
    # The pair's second route negates its first: same draw, other sign.
    value = torch.where(first.unsqueeze(-1), value, -value[token, partner])
    value = torch.where(whole.unsqueeze(-1), value, 0.0)
    single = integers(208, 254, (*shape, case.hidden), gen) * unit
    rows = torch.where(lone, single, value)
    return _problem(
        case,
        large=_at_home(case, torch.zeros(_size(case), dtype=torch.float64)),
        routing=routing,
        rows=rows,
        weights=weights,
    )


def _partner(routing: Routing, turn: Tensor, count: Tensor) -> Tensor:
    """``[T, K]``: the slot of the other route of a pair, or the route's own where it has none."""
    other = torch.where(turn % 2 == 0, turn + 1, turn - 1)
    same = routing.owners.unsqueeze(2) == routing.owners.unsqueeze(1)
    hit = same & (other.unsqueeze(2) == turn.unsqueeze(1))
    own = torch.arange(turn.shape[1]).expand_as(turn)
    return torch.where(hit.any(2), hit.long().argmax(2), own)


# ROUND-2: rounded before the scale, and after it. ------------------------------------------------


def _scaled(values: Tensor, scale: float) -> Tensor:
    """float32(values) * float32(scale), rounded to FP32 as the contract has it."""
    return fp32(values * float(torch.tensor(scale, dtype=torch.float32)))


@functools.lru_cache(maxsize=64)
def _scale_table(scale: float) -> Tensor:
    """``[n, 2]``: (mantissa, part of its last place) of sums for which the order of rounding and
    scaling matters; of those the ones with a product that is exact, and a sum that truncates to
    what it rounds to, where the scale has such. Empty where it never matters."""
    mantissa = torch.arange(128, 256, dtype=torch.float64).unsqueeze(1)
    part = torch.arange(-15, 16, dtype=torch.float64).unsqueeze(0) / 32
    total = mantissa + part
    legal = bf16(_scaled(bf16(total), scale))
    wrong = bf16(_scaled(total, scale))
    differ = (legal != wrong) & (bf16(total) == mantissa)
    exact = _scaled(mantissa, scale) == legal
    score = (4 * exact.expand_as(differ) + 2 * (part > 0)) * differ + differ.double()
    best = differ & (score == score.max())
    return torch.stack(
        [grid[best] for grid in (mantissa.expand_as(score), part.expand_as(score))],
        dim=1,
    )


def _scale(case: Case) -> Problem:
    gen = _gen(case, "scale")
    if case.top_k == 1:

        def good(products: Tensor) -> Tensor:
            legal = bf16(_scaled(bf16(products), case.routed_scale))
            differ = legal != bf16(_scaled(products, case.routed_scale))
            towards = differ & (bf16(products) <= products)
            return towards if bool(towards.sum(1).max() >= 16) else differ

        rows, weights = _products(case, list(range(129, 256, 2)), good)
        zeros = torch.zeros(_size(case), dtype=torch.float64)
        return _problem(case, large=_at_home(case, zeros), rows=rows, weights=weights)
    mantissa, part = _pick(_scale_table(case.routed_scale), _size(case), gen).unbind(-1)
    unit = _units(_size(case), gen)
    return _problem(case, large=_at_home(case, mantissa * unit), small=_at_home(case, part * unit))


@functools.lru_cache(maxsize=64)
def _product_table(scale: float) -> Tensor:
    """``[n, 3]``: (mantissa, its product's BF16, the product) for products far from BF16's grid,
    and rather above it, so that truncation gives what rounding gives. Empty where the scale has
    hardly any."""
    mantissa = torch.arange(128, 256, dtype=torch.float64)
    product = _scaled(mantissa, scale)
    rounded = bf16(product)
    off = (product - rounded) * product.sign() / _ulp(rounded)
    good = (off > 0.2) & (off < 0.5)
    if int(good.sum()) < 8:
        good = (off.abs() > 0.2) & (off.abs() < 0.5)
    if int(good.sum()) < 8:
        good = torch.zeros_like(good)
    return torch.stack([mantissa[good], rounded[good], product[good]], dim=1)


@functools.lru_cache(maxsize=64)
def _double_table(scale: float) -> Tensor:
    """``[n]``: mantissas whose FP32 product with the scale is a midpoint that the exact product is
    not, so that one rounding instead of the contract's two gives the other neighbour."""
    mantissa = torch.arange(128, 256, dtype=torch.float64)
    exact = mantissa * float(torch.tensor(scale, dtype=torch.float32))
    return mantissa[bf16(_scaled(mantissa, scale)) != bf16(exact)]


def _double(case: Case) -> Problem:
    """Values that the factor takes to such midpoints, and zero as what is added to them."""
    gen = _gen(case, "double")
    factor = case.routed_scale if case.scales is None else case.scales[0]
    table = _double_table(factor).unsqueeze(1)
    (mantissa,) = _pick(table, _size(case), gen).unbind(-1)
    zeros = torch.zeros(_size(case), dtype=torch.float64)
    values = mantissa * _units(_size(case), gen)
    return _problem(case, large=_at_home(case, values), residual=zeros)


def _double_shows(case: Case) -> str | None:
    if case.scales is not None or not len(_double_table(case.routed_scale)):
        return "needs a routed_scale with such midpoints, such as 17/7"
    return None


def _double_residual_shows(case: Case) -> str | None:
    if case.scales is None or not len(_double_table(case.scales[0])):
        return "needs an x_scale with such midpoints, such as 17/7"
    return None


def _order_shows(case: Case) -> str | None:
    return None if len(_scale_table(case.routed_scale)) else "needs a routed_scale further from 1"


def _product_shows(case: Case) -> str | None:
    return None if len(_product_table(case.routed_scale)) else "needs a routed_scale further from 1"


def _leftover(rounded: Tensor, gen: torch.Generator) -> Tensor:
    """An addend that leaves 1 to 31 units of a value's last place, with its sign."""
    place = _ulp(rounded) * rounded.sign()
    return integers(1, 31, tuple(rounded.shape), gen) * place - rounded


def _scale_round(case: Case) -> Problem:
    gen = _gen(case, "scale-round")
    if case.post != "none":
        return _norm_rows(case, _pick_scaled)
    mantissa, rounded, _ = _pick(_product_table(case.routed_scale), _size(case), gen).unbind(-1)
    unit = _units(_size(case), gen)
    residual = _leftover(rounded * unit, gen)
    return _problem(case, large=_at_home(case, mantissa * unit), residual=residual)


# ROUND-4 and ROUND-6: the norms. -----------------------------------------------------------------


def _site(case: Case) -> str:
    """The norm that is aimed at."""
    return "post" if case.post != "none" else "next"


def _eps(case: Case) -> float:
    return float(getattr(case, f"{_site(case)}_eps"))


_Choice = tuple[Tensor, Tensor, Tensor]
_Choose = Callable[[Case, Tensor, Tensor, torch.Generator], _Choice]


def _norm_rows(
    case: Case,
    choose: _Choose,
    *,
    mean: Tensor | None = None,
    weight: Tensor | None = None,
    spread: bool = False,
) -> Problem:
    """Rows whose inverse RMS is known beforehand, at the norm that is aimed at.

    ``choose(case, inverse [T, 1], weight [H], gen)`` gives (large, small, value) ``[T, H]``: what
    routes must sum to in two parts, and what the norm then sees. Ballast elements complete the
    row's mean square to ``mean`` ``[T, 1]``, by default a random one of order 1 to 4.

    ``spread``: large and small are planted on two ranks, and meet in the all-reduce.
    """
    gen = _gen(case, "norm rows")
    tokens, hidden = _size(case)
    if mean is None:
        mean = 1.0 + 3.0 * uniform((tokens, 1), gen)
    inverse = 1.0 / torch.sqrt(mean + _eps(case))
    seen = _power_weights(case, gen) if weight is None else weight
    affine = seen if getattr(case, _site(case)) == "affine" else torch.ones_like(seen)
    large, small, value = choose(case, inverse, affine, gen)
    scale = case.routed_scale if _site(case) == "post" else 1.0
    count = _BALLAST if scale == 1.0 else _SCALED_BALLAST
    at = torch.rand((tokens, hidden), generator=gen).argsort(1)[:, :count]
    for tensor in (large, small, value):
        tensor.scatter_(1, at, 0.0)
    left = mean * hidden - value.square().sum(1, keepdim=True)
    for turn in range(count):
        size = _down(torch.sqrt(left.clamp(min=0.0)), scale)
        part = bf16(_scaled(size, scale))
        left = left - part.square()
        sign = signs((tokens, 1), gen)
        large.scatter_(1, at[:, turn : turn + 1], size * sign)
        value.scatter_(1, at[:, turn : turn + 1], part * sign)
    made = _deliver_norm(case, large, small, value, spread=spread)
    setattr(made, f"{_site(case)}_weight", round_bf16(seen))
    return made


def _down(root: Tensor, scale: float) -> Tensor:
    """The largest BF16 size whose product with the scale is no larger than root, or nearly."""
    size = root / abs(scale)
    place = 2.0 ** (torch.floor(torch.log2(size.clamp(min=2.0**-100))) - (7 if scale == 1.0 else 3))
    size = torch.floor(size / place) * place
    return torch.where(bf16(_scaled(size, scale)).abs() > root, 0.0, size)


def _deliver_norm(
    case: Case, large: Tensor, small: Tensor, value: Tensor, *, spread: bool
) -> Problem:
    if spread:
        return _over_ranks(case, large, small, None)
    if _site(case) == "post":
        home = _at_home(case, small) if bool(small.any()) else None
        return _problem(case, large=_at_home(case, large), small=home)
    if bool(small.any()):  # hidden is large + small, rounded
        return _problem(case, large=_at_home(case, large), residual=small)
    return _problem(case, large=_at_home(case, 2.0 * large), residual=-large)


def _first(ok: Tensor, *candidates: Tensor) -> list[Tensor]:
    """Of candidates ``[C, T, H]``, element by element, the first that is ok; else number 0."""
    index = ok.to(torch.uint8).argmax(0, keepdim=True)
    return [candidate.gather(0, index).squeeze(0) for candidate in candidates]


def _mantissas(case: Case, gen: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """(integers 128..255, +-2^e) ``[count, T, H]``: values of 1/16 to 1/4, next to the ballast."""
    shape = (count, *_size(case))
    return integers(128, 255, shape, gen), _units(shape, gen, -4, -3)


def _steady(values: Tensor) -> Tensor:
    """Where BF16 rounding does not depend on an error of 2^-14 relative."""
    return bf16(values * (1 + 2.0**-14)) == bf16(values * (1 - 2.0**-14))


def _zeros_like(value: Tensor) -> Tensor:
    return torch.zeros_like(value)


def _pick_scaled(case: Case, inverse: Tensor, weight: Tensor, gen: torch.Generator) -> _Choice:
    """Scaled sums of which the norm shows whether they were rounded."""
    table = _product_table(case.routed_scale)
    mantissa, rounded, product = _pick(table, (12, *_size(case)), gen).unbind(-1)
    # The product must not outweigh the ballast either.
    down = 2.0 ** -math.ceil(math.log2(abs(case.routed_scale)))
    unit = _units((12, *_size(case)), gen, -4, -3) * down
    right, wrong = rounded * unit * inverse, product * unit * inverse
    ok = (bf16(right) != bf16(wrong)) & _steady(right) & _steady(wrong)
    large, value = _first(ok, mantissa * unit, rounded * unit)
    return large, _zeros_like(large), value


def _pick_affine(case: Case, inverse: Tensor, weight: Tensor, gen: torch.Generator) -> _Choice:
    """Values whose norm differs when it is rounded before the affine multiply."""
    mantissa, unit = _mantissas(case, gen, 16)
    normed = mantissa * unit * inverse
    right, wrong = normed * weight, bf16(normed) * weight
    ok = (bf16(right) != bf16(wrong)) & _steady(right) & _steady(wrong) & _steady(normed)
    (value,) = _first(ok, mantissa * unit)
    return value.clone(), _zeros_like(value), value


def _pick_unrounded(case: Case, inverse: Tensor, weight: Tensor, gen: torch.Generator) -> _Choice:
    """Sums just below the midpoint above them, whose norm shows whether they were rounded."""
    mantissa, unit = _mantissas(case, gen, 12)
    part = integers(11, 15, tuple(mantissa.shape), gen) / 32
    right, wrong = mantissa * unit * inverse, (mantissa + part) * unit * inverse
    ok = (bf16(right) != bf16(wrong)) & _steady(right) & _steady(wrong)
    value, small = _first(ok, mantissa * unit, part * unit)
    return value.clone(), small, value


def _norm_unrounded(case: Case) -> Problem:
    return _norm_rows(case, _pick_unrounded)


def _norm_affine(case: Case) -> Problem:
    gen = _gen(case, "affine")
    weight = signs((case.hidden,), gen) * (integers(64, 127, (case.hidden,), gen) * 2 + 1) / 128
    return _norm_rows(case, _pick_affine, weight=weight)


def _norm_eps(case: Case) -> Problem:
    """Rows whose mean square is a quarter to four times eps."""
    gen = _gen(case, "eps")
    mean = _eps(case) * 4.0 ** (2.0 * uniform((case.tokens, 1), gen) - 1.0)

    def choose(case: Case, inverse: Tensor, weight: Tensor, gen: torch.Generator) -> _Choice:
        mantissa, unit = _mantissas(case, gen, 1)
        place = 2.0 ** torch.floor(torch.log2(mean) / 2)
        value = (mantissa * unit)[0] * place * 2
        return value.clone(), _zeros_like(value), value

    return _norm_rows(case, choose, mean=mean)


def _norm_mean(case: Case) -> Problem:
    """Norms just beyond a midpoint, so near that a count wrong by one falls short of it."""
    tokens = torch.arange(case.tokens, dtype=torch.float64).unsqueeze(1)
    beyond = torch.where(tokens % 4 == 3, -1.0, 1.0) / (4 * case.hidden)
    mean = 1.0 / (0.75 * (1.0 + beyond)) ** 2 - _eps(case)
    # Three quarters of these mantissas end on a half.
    odd = torch.arange(129, 171, 2, dtype=torch.float64)
    table = torch.cat([odd, torch.arange(174, 256, 4, dtype=torch.float64)])

    def choose(case: Case, inverse: Tensor, weight: Tensor, gen: torch.Generator) -> _Choice:
        value = _pick(table, _size(case), gen) * _units(_size(case), gen, -4, -2)
        return value.clone(), _zeros_like(value), value

    return _norm_rows(case, choose, mean=mean)


def _norm_outlier(case: Case) -> Problem:
    """One element holds half of a row's energy: it swallows the others in a short accumulator,
    and its square overflows FP16."""
    mean = torch.full((case.tokens, 1), 4915.0, dtype=torch.float64)

    def choose(case: Case, inverse: Tensor, weight: Tensor, gen: torch.Generator) -> _Choice:
        value = integers(128, 255, _size(case), gen) * _units(_size(case), gen, 5, 5)
        return value.clone(), _zeros_like(value), value

    return _norm_rows(case, choose, mean=mean)


def _small_eps(case: Case) -> str | None:
    if case.hidden < 64:
        return "needs hidden >= 64"
    return None if _eps(case) <= 0.125 else "needs an eps of at most 0.125"


def _site_reachable(case: Case) -> str | None:
    """The norm's input must be exact: no odd factor before it."""
    if _site(case) == "next":
        return _no_scales(case)
    return None


# ROUND-5: the residual products. -----------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _any_product_table(scale: float) -> Tensor:
    """As _product_table, of all mantissas where the products are exact."""
    if not _power_of_two(scale):
        return _product_table(scale)
    mantissa = torch.arange(128, 256, dtype=torch.float64)
    return torch.stack([mantissa, mantissa * scale, mantissa * scale], dim=1)


def _residual(case: Case) -> Problem:
    """Products far from BF16's grid that nearly cancel, so that every missing rounding shows."""
    gen = _gen(case, "residual")
    assert case.scales is not None
    x_scale, r_scale = case.scales
    x_table, r_table = _any_product_table(x_scale), _any_product_table(r_scale)
    x, x_rounded, x_product = _pick(x_table, _size(case), gen).unbind(-1)
    r, r_rounded, r_product = _pick(r_table, (32, *_size(case)), gen).unbind(-1)
    # Into one binade, with opposite signs.
    ratio = -(_ulp(x_rounded) * x_rounded.sign()) / (_ulp(r_rounded) * r_rounded.sign())
    r, r_rounded, r_product = r * ratio, r_rounded * ratio, r_product * ratio
    legal = bf16(x_rounded + r_rounded)
    shown = torch.zeros_like(legal)
    for wrong in (x_product + r_product, x_rounded + r_product, x_product + r_rounded):
        shown += bf16(fp32(wrong)) != legal
    # Sums that are exact leave the last rounding nothing to do.
    shown += 0.5 * (legal == x_rounded + r_rounded)
    (r,) = _first(shown == shown.amax(0), r)
    unit = _units(_size(case), gen)
    return _problem(case, large=_at_home(case, x * unit), residual=r * unit)


def _residual_needs(case: Case) -> str | None:
    if case.scales is None or 0.0 in case.scales or all(map(_power_of_two, case.scales)):
        return "needs scales, one of them no power of two"
    if not all(len(_any_product_table(scale)) for scale in case.scales):
        return "needs scales further from 1"
    return None


# ROUND-7: the shared part and the all-reduced sum. -----------------------------------------------


def _shared(case: Case) -> Problem:
    """The shared part cancels the scaled sum up to a few units of its last place."""
    gen = _gen(case, "shared")
    unit = _units(_size(case), gen)
    small = None
    if _power_of_two(case.routed_scale):
        large = integers(128, 255, _size(case), gen) * unit
        small = _at_home(case, integers(5, 15, _size(case), gen) / 32 * unit)
        rounded = large * case.routed_scale
    else:
        table = _product_table(case.routed_scale)
        mantissa, product, _ = _pick(table, _size(case), gen).unbind(-1)
        large, rounded = mantissa * unit, product * unit
    shared = _leftover(rounded, gen)
    return _problem(case, large=_at_home(case, large), small=small, shared=_at_home(case, shared))


def _shared_needs(case: Case) -> str | None:
    if not case.shared:
        return "needs shared"
    if case.routed_scale == 0.0:
        return "needs a routed_scale that is not 0"
    if case.top_k == 1 or case.routed != "routes":
        return _odd_scale(case) or _product_shows(case)
    return None if _power_of_two(case.routed_scale) else _product_shows(case)


def _over_ranks(case: Case, large: Tensor, small: Tensor, residual: Tensor | None) -> Problem:
    """large on rank t mod W, small on the next one."""
    parts = _at_home(case, large)
    beside = _at_home(case, small).roll(1, 0)
    if case.shared:
        return _problem(
            case, large=parts, shared=beside, residual=residual, routing=spread_routing(case)
        )
    return _problem(case, large=parts + beside, residual=residual, routing=spread_routing(case))


def _allreduce(case: Case) -> Problem:
    """Sums over ranks that need more than eight bits, before a norm or a cancelling residual."""
    if case.post != "none":
        return _norm_rows(case, _pick_unrounded, spread=True)
    gen = _gen(case, "allreduce")
    unit = _units(_size(case), gen)
    large = integers(128, 255, _size(case), gen) * unit
    small = integers(10, 15, _size(case), gen) / 32 * unit
    return _over_ranks(case, large, small, _leftover(large, gen))


def _allreduce_needs(case: Case) -> str | None:
    if case.shards < 2:
        return "needs an all-reduce over 2 or more ranks"
    if case.top_k == 1 and not case.shared and case.routed == "routes":
        return "needs top_k >= 2, a shared part, or a finalized one"
    return _no_scales(case) if case.post == "none" else None


# ROUTE-1 and ROUTE-4: routes that are not local. -------------------------------------------------


def _holes(case: Case) -> Problem:
    """-1 slots with NaN, infinite and large weights; first and last rows that would show."""
    gen = _gen(case, "holes")
    routing = holed_routing(case)
    shape = (case.tokens, case.top_k, case.hidden)
    rows = integers(1, 4, shape, gen) * signs(shape, gen)
    # Row 0 and the last row, in whatever layout, are of the first and the last expert of a rank,
    # or of the first and the last route.
    loud = torch.zeros(shape[:2], dtype=torch.bool)
    for rank in range(case.shards):
        mine = routing.owners == rank
        if bool(mine.any()):
            ids = routing.ids[mine]
            loud |= mine & ((routing.ids == ids.min()) | (routing.ids == ids.max()))
    if case.tokens:
        loud[0, 0] = loud[-1, -1] = True
    # The tokens that have them have nothing else, so that every sum stays short.
    rows = torch.where(loud.any(1)[:, None, None], 0.0, rows)
    numbers = 1024.0 * integers(1, 3, shape, gen) * signs(shape, gen)
    # Not even a weight of zero hides an infinity.
    numbers[..., 5::16] = torch.inf
    rows = torch.where(loud.unsqueeze(-1), numbers, rows)
    weights = 2.0 ** integers(-1, 1, shape[:2], gen)
    zeros = torch.zeros(_size(case), dtype=torch.float64)
    made = _problem(case, large=_at_home(case, zeros), routing=routing, rows=rows, weights=weights)
    dead = _pick(torch.tensor([math.nan, math.inf, -math.inf, 1024.0, -768.0]), shape[:2], gen)
    made.dead_weights = dead
    made.tight = True
    return made


def _holes_need(case: Case) -> str | None:
    if not case.target.remote:
        return f"{case.operation} has no -1 routes"
    if case.routed != "routes":
        return "needs routes"
    if case.local == 1.0 and case.ranks == 1:
        return "needs local below 1, or ranks"
    return None


_REDUCTION = _need(_routes, _unscaled, _no_scales)
_TIES = _need(_unscaled, _no_scales, _ties_addend)
_NORM = _need(_a_norm, _unscaled, _site_reachable, _small_eps)


def _affine_needs(case: Case) -> str | None:
    return None if getattr(case, _site(case)) == "affine" else f"needs {_site(case)} affine"


def _eps_needs(case: Case) -> str | None:
    return None if _eps(case) > 1e-30 else "needs an eps above 1e-30"


def _prenorm_needs(case: Case) -> str | None:
    return None if case.post != "none" else "needs post"


def _hidden_needs(case: Case) -> str | None:
    return None if case.next != "none" else "needs next"


def _scale_round_needs(case: Case) -> str | None:
    if case.target.takes("shared_output"):
        return f"does not apply to {case.operation}; source shared does"
    if case.post != "none":
        return _small_eps(case)
    return _no_scales(case) if case.target.has_boundary else "needs post"


# The sources, each with the options under which it shows most, tried in turn. --------------------

_NEXT: dict[str, Any] = {"next": "norm"}
_AFFINE: dict[str, Any] = {"next": "affine"}
_POST: dict[str, Any] = {"post": "norm"}
_NORMED: tuple[dict[str, Any], ...] = (_POST, {"post": "affine"}, _NEXT, _AFFINE)
_SCALES: tuple[dict[str, Any], ...] = tuple(
    {"routed_scale": scale} for scale in (2.5, 1.5, 0.75, 16 / 3)
)
_DOUBLING = (17 / 7, 7 / 24, 11 / 7)  # found by search: the most mantissas with such midpoints

AIMED = (
    Source(
        "ties",
        "sums on midpoints, either neighbour even",
        _ties(0.46, 0.46),
        "ROUND-3",
        _TIES,
        ({}, {"shared": True}, {"shared": True, "routed": "finalized"}),
    ),
    Source(
        "ties-down",
        "sums on midpoints that go towards zero",
        _ties(1.0, 0.0),
        "ROUND-3",
        _TIES,
    ),
    Source(
        "ties-up",
        "sums on midpoints that go away from zero",
        _ties(0.0, 1.0),
        "ROUND-3",
        _TIES,
    ),
    Source("ties-near", "sums just beside a midpoint", _ties(0.0, 0.0), "ROUND-3", _TIES),
    Source(
        "accumulate",
        "products of 16 bits that cancel to a sum of 8",
        _accumulate,
        "ROUND-1",
        _REDUCTION,
    ),
    Source(
        "weights",
        "routes that cancel up to the low bits of a weight",
        _weights,
        "ROUTE-3",
        _REDUCTION,
        ({}, {"weights": "bf16"}, {"weights": "fp16"}),
    ),
    Source(
        "scale",
        "sums for which rounding and scaling do not commute",
        _scale,
        "ROUND-2",
        _need(_routes, _odd_scale, _order_shows, _no_scales),
        (*_SCALES, {"routed_scale": -2.5}),
    ),
    Source(
        "scale-round",
        "scaled sums whose own rounding shows in what follows",
        _scale_round,
        "ROUND-2",
        _need(_routes, _odd_scale, _product_shows, _scale_round_needs),
        tuple(scale | more for more in ({}, _POST) for scale in _SCALES[:3]),
    ),
    Source(
        "scale-double",
        "scaled sums whose FP32 product is a midpoint that the exact one is not",
        _double,
        "ROUND-2",
        _need(_routes, _no_post, _double_shows),
        tuple({"routed_scale": scale} for scale in _DOUBLING),
    ),
    Source(
        "norm-affine",
        "norms that differ when rounded before the affine multiply",
        _norm_affine,
        "ROUND-4",
        _need(_a_norm, _unscaled, _site_reachable, _small_eps, _affine_needs),
        ({"post": "affine"}, _AFFINE),
    ),
    Source(
        "norm-eps",
        "rows whose mean square is about eps",
        _norm_eps,
        "ROUND-4",
        _need(_a_norm, _unscaled, _site_reachable, _small_eps, _eps_needs),
        _NORMED,
    ),
    Source(
        "norm-mean",
        "norms so near a midpoint that H - 1 falls short",
        _norm_mean,
        "ROUND-4",
        _NORM,
        _NORMED,
    ),
    Source(
        "norm-outlier",
        "one element holds half of a row's energy",
        _norm_outlier,
        "ROUND-4",
        _NORM,
        _NORMED,
    ),
    Source(
        "norm-prenorm",
        "sums whose post-norm shows whether they were rounded",
        _norm_unrounded,
        "ROUND-4",
        _need(_routes, _unscaled, _prenorm_needs, _small_eps, _two_local),
        _NORMED[:2],
    ),
    Source(
        "residual",
        "scaled products that nearly cancel",
        _residual,
        "ROUND-5",
        _need(_unscaled, _no_post, _residual_needs),
        ({"scales": (0.7, 1.3)}, {"scales": (1.0, 0.3)}, {"scales": (0.3, 1.0)}),
    ),
    Source(
        "residual-double",
        "residual products in FP32 that are midpoints, as the exact ones are not",
        _double,
        "ROUND-5",
        _need(_unscaled, _no_post, _double_residual_shows),
        tuple({"scales": (scale, 1.0)} for scale in _DOUBLING),
    ),
    Source(
        "hidden",
        "hidden values whose norm shows whether they were rounded",
        _norm_unrounded,
        "ROUND-6",
        _need(_unscaled, _no_post, _no_scales, _hidden_needs, _small_eps),
        (_NEXT, _AFFINE),
    ),
    Source(
        "shared",
        "a shared part that nearly cancels the scaled sum",
        _shared,
        "ROUND-7",
        _need(_shared_needs, _no_scales),
        (
            {"shared": True, "routed_scale": 2.5},
            {"shared": True},
            {"shared": True, "routed_scale": 1.5, "routed": "finalized"},
        ),
    ),
    Source(
        "allreduce",
        "sums over ranks of more than eight bits",
        _allreduce,
        "ROUND-7",
        _need(_allreduce_needs, _unscaled),
        ({}, {"post": "norm"}, {"shared": True}, {"routed": "finalized"}),
    ),
    Source(
        "routes",
        "-1 slots with NaN and large weights, first and last rows that show",
        _holes,
        "ROUTE-1",
        _holes_need,
        (
            {"local": 0.5},
            {"local": 0.5, "layout": "route_major"},
            {"local": 0.5, "layout": "identity"},
            {"local": 0.5, "poison": "random"},
        ),
    ),
)


def aimed_cases(
    name: str,
    *,
    source: str | None = None,
    ranks: int = 1,
    seed: int = 0,
    tokens: int = 5,
    top_k: int = 4,
    hidden: int = 256,
) -> list[Case]:
    """The cases by which each aimed source, or the one given, decides its rule on an operation.

    Sources and options that do not apply to the operation are left out.
    """
    if not operation(name).has_routes:
        top_k = 1
    made = []
    for item in AIMED:
        if source not in (None, item.name):
            continue
        for options in item.options:
            more = dict(options) if ranks == 1 else {**options, "ranks": ranks}
            try:
                made.append(Case(name, item.name, seed, tokens, top_k, hidden, **more))
            except ValueError:
                continue  # does not apply
    return made
