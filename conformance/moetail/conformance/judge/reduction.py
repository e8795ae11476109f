"""The two sums of many terms, on admissible sets: over a token's routes, and over the ranks.

``summation`` proves the bounds that are used here; what is added is what becomes of them where
numbers may overflow, underflow or are not finite, and the sums whose order a contract fixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible, Product, either, rounded, some
from moetail.conformance.judge.elementwise import add, multiply
from moetail.conformance.judge.rounding import (
    FP32_OVERFLOW,
    HALF_QUANTUM,
    INFINITY,
    TINY,
    least,
    round_fp32,
    round_to,
)
from moetail.conformance.judge.summation import NO_UNDERFLOW, error_bound, narrow, undecided
from moetail.spec.contract import BF16, Rounding


def weighted_sum(
    rows: Tensor,
    weights: Tensor | Admissible,
    index: Tensor | None,
    *,
    read_as: str = "fp32",
    product: str = "fp32",
    accumulator: str = "fp32",
    every: int = 1,
    to: Rounding = BF16,
) -> Admissible:
    """The FP32 sum over live k of float(w[t,k]) * float(x[t,k,:]), any order, FMA allowed.

    ``rows`` [R, H] BF16 with ``index`` [T, K] naming each route's row (-1: not live), or
    ``rows`` [T, K, H] with ``index`` None. ``weights`` [T, K] in the dtype they have, or what steps
    have made of them. ``read_as`` is the format that the weights are narrowed to first, ``product``
    the one that each FP32 product is rounded to. With an ``accumulator`` of another format the
    routes are added in their order, and the running sum is rounded to it before the first, and
    again after ``every`` so many of them. ``to`` is the rounding behind the sum,
    which says where the bounds are narrow enough; it is not applied.

    Soundness: products of two such numbers are exact in float64, so S and M are known up to
    float64's own error, which the bound includes; ``summation`` proves the bounds. Where numbers
    may overflow, underflow or are not finite, ``_unusual_sum`` says what is admitted and why. A
    product that is rounded by contract is a leaf as it then is, and no FMA takes it in. One route
    alone is a product, which a sum behind it may take in by FMA.
    """
    if isinstance(weights, Admissible):
        numbers, unsure = _numbers(weights)
        how = {"read_as": read_as, "product": product, "accumulator": accumulator}
        made = weighted_sum(rows, numbers, index, **how, every=every, to=to)
        if unsure is None:
            return made
        if index is not None:
            unsure = unsure & (index >= 0)
        free = either(made.free, unsure.any(dim=1, keepdim=True).expand_as(made.lo))
        return Admissible.build(made.lo, made.hi, made.nan, free, made.product)
    x, given, live = _routes(rows, weights, index)
    routes = x.shape[1]
    if routes == 0:
        zero = x.new_zeros((x.shape[0], x.shape[2]))
        return Admissible(zero, zero)
    if accumulator != "fp32":
        products = [_product(x[:, k], given[:, k, None], read_as, product) for k in range(routes)]
        return _in_order(products, accumulator, every, live)
    leaves = routes if live is None else live.sum(dim=1, keepdim=True)
    w = given if read_as == "fp32" else round_to(given.double(), read_as)
    # 8 bits and 8 or 11 of them: such a product fits FP32's 24.
    fits = w.dtype in (torch.bfloat16, torch.float16) or read_as == "tf32"
    exact = terms = x.double() * w.double().unsqueeze(-1)
    fused = product == "fp32"
    if not fused:
        terms, fits = round_to(round_fp32(exact).double(), product).double(), True
    total, magnitude = terms.sum(dim=1), terms.abs().sum(dim=1)
    error = error_bound(total, magnitude, leaves, exact=fits)
    smallest, vanishes = (least(x), least(w)), None
    if (
        bool((magnitude < 2.0**126).all())  # False for NaN and infinity
        and smallest[0] * smallest[1] >= NO_UNDERFLOW
        and min(*smallest, least(given)) >= TINY
    ):
        a, single = Admissible(total - error, total + error), Admissible(total, total)
    else:
        read = [_subnormal(part) for part in (x, w.unsqueeze(-1), given.unsqueeze(-1))]
        vanishes = read[0] | read[1] | read[2]
        absent = vanishes | _subnormal(exact)
        a = single = _unusual_sum(terms, absent, leaves, exact=fits)
        vanishes = vanishes if fused else absent
    alone = _alone(single, leaves) if fused else None
    need, deep = undecided(a.lo, a.hi, to)
    if not bool(need.any()):
        return replace(a, product=alone)
    token, column = need.nonzero(as_tuple=True)
    leaf_lo = leaf_hi = terms[token, :, column].T
    if vanishes is not None:
        gone = vanishes[token, :, column].T
        leaf_lo = torch.where(gone, leaf_lo.clamp(max=0.0), leaf_lo)
        leaf_hi = torch.where(gone, leaf_hi.clamp(min=0.0), leaf_hi)
    lo, hi = narrow(a.lo[need], a.hi[need], deep, leaf_lo, leaf_hi, products=fused)
    lo, hi = a.lo.masked_scatter(need, lo), a.hi.masked_scatter(need, hi)
    return Admissible(lo, hi, a.nan, a.free, alone)


def sum_ranks(
    parts: Sequence[Admissible], *, accumulator: str = "fp32", to: Rounding = BF16
) -> Admissible:
    """The FP32 sum over ranks, any order; in the ranks' order where the ``accumulator`` has another
    format, to which the running sum is rounded before each rank. ``to`` as in the reduction.

    Soundness: as the reduction, with leaves that are intervals: S and the bounds hold for every
    choice of values in them, so they hold for the extremes. What a rank hands on is a number, so
    that no FMA takes a product in.
    """
    ranks = len(parts)
    if ranks == 1:
        return parts[0]
    if accumulator != "fp32":
        return _in_order([replace(part, product=None) for part in parts], accumulator, 1, None)
    parts = [part.read() for part in parts]
    nan = either(*(part.nan for part in parts))
    free = either(*(part.free for part in parts))
    lo = torch.stack([part.lo.double() for part in parts])
    points = all(part.lo is part.hi for part in parts)
    hi = lo if points else torch.stack([part.hi.double() for part in parts])
    magnitude = torch.maximum(lo.abs(), hi.abs()).sum(dim=0)
    total_lo, total_hi = lo.sum(dim=0), hi.sum(dim=0)
    infinite = magnitude == INFINITY
    if bool(infinite.any()):
        up, down = (lo == INFINITY).any(dim=0), (hi == -INFINITY).any(dim=0)
        nan = either(nan, up & down)
        maybe_up, maybe_down = (hi == INFINITY).any(dim=0), (lo == -INFINITY).any(dim=0)
        certain = (up & ~maybe_down) | (down & ~maybe_up)
        free = either(free, infinite & ~certain & ~(up & down))
        # A certain infinity stays one unless the finite part may overflow to the other one.
        finite = torch.where(lo.isinf() | hi.isinf(), 0.0, torch.maximum(lo.abs(), hi.abs()))
        free = either(free, infinite & (finite.sum(dim=0) >= 2.0**127))
        plain = lambda x: torch.where(infinite, 0.0, x)  # noqa: E731
        lo, hi, total_lo, total_hi, magnitude = map(plain, (lo, hi, total_lo, total_hi, magnitude))
    extent = torch.maximum(total_lo.abs(), total_hi.abs())
    error = error_bound(extent, magnitude, ranks, exact=True)
    small = torch.maximum(lo.abs(), hi.abs())
    smallest = torch.where(small > 0, torch.minimum(lo.abs(), hi.abs()), INFINITY).amin(dim=0)
    # BF16 numbers from 2^-118 on are multiples of 2^-125, FP32 ones from 2^-102 on, so that no sum
    # is subnormal, and flushed; smaller ones are left where the rows are not ordinary.
    few = all(part.lo.dtype is torch.bfloat16 for part in parts)
    slack = (smallest < (2.0**-118 if few else 2.0**-102)).double() * ((ranks - 1) * TINY)
    sum_lo, sum_hi = total_lo - error - slack, total_hi + error + slack
    if bool((magnitude >= 2.0**127).any()):
        positive, negative = hi.clamp(min=0).sum(dim=0), (-lo).clamp(min=0).sum(dim=0)
        sum_lo, sum_hi, both = _overflowed(sum_lo, sum_hi, positive + error, negative + error)
        free = either(free, both)
    if bool(infinite.any()):
        infinity = torch.where(up, INFINITY, -INFINITY)
        sum_lo = torch.where(infinite, infinity, sum_lo)
        sum_hi = torch.where(infinite, infinity, sum_hi)
    q = Admissible.build(sum_lo, sum_hi, nan, free)
    need, deep = undecided(q.lo, q.hi, to)
    if bool(need.any()):
        at = lo[:, need], hi[:, need]
        low, high = narrow(q.lo[need], q.hi[need], deep, *at, products=False)
        q = Admissible(
            q.lo.masked_scatter(need, low), q.hi.masked_scatter(need, high), q.nan, q.free
        )
    return q


def _routes(
    rows: Tensor, weights: Tensor, index: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows [T, K, H] and weights [T, K] of the routes, exact zeros where one is not live, and which
    are live, None for all: neither a dead route's weight nor any row is read for value."""
    if index is None:
        return rows, weights, None
    if rows.shape[0] == 0:  # no route is live, and there is no row to stand in for theirs
        rows = rows.new_zeros((1, rows.shape[1]))
    live = index >= 0
    x = rows[index.clamp(min=0).long()]
    if bool(live.all()):
        return x, weights, None
    return x.masked_fill(~live.unsqueeze(-1), 0.0), weights.masked_fill(~live, 0.0), live


def _product(row: Tensor, weight: Tensor, read_as: str, format: str) -> Admissible:
    """One route's product, rounded where its format is not FP32."""
    made = multiply(Admissible.of(row), Admissible.of(weight), read_as=read_as)
    return made if format == "fp32" else rounded(made, Rounding(format))


def _numbers(weights: Admissible) -> tuple[Tensor, Tensor | None]:
    """Weights that steps have made, as numbers, and which may be others. One that may have been
    flushed is the number that it was: whoever reads it may take it for zero."""
    read = weights.read()
    value = torch.where(read.lo.abs() > read.hi.abs(), read.lo, read.hi).float()
    other = (read.lo != read.hi) & ~((read.lo * read.hi == 0) & _subnormal(value))
    if read.nan is not None:
        value = value.masked_fill(read.nan, float("nan"))
    return value, some(either(other, read.free))


def _in_order(
    parts: Iterable[Admissible], accumulator: str, every: int, live: Tensor | None
) -> Admissible:
    """The sum of parts [T, H], one after the other, where they are ``live`` [T, parts]."""
    total: Admissible | None = None
    for k, part in enumerate(parts):
        if total is None:
            zero = torch.zeros_like(part.lo)
            total = Admissible(zero, zero)
        kept = total if k % every else rounded(total, Rounding(accumulator))
        added = add(kept, part)
        total = added if live is None else added.where(live[:, k, None], total)
    assert total is not None
    return total


def _alone(a: Admissible, leaves: Tensor | int) -> Product | None:
    """The exact product, or bounds on it, where a token has one live route."""
    if isinstance(leaves, int):
        return Product(a.lo, a.hi) if leaves == 1 else None
    where = some(leaves == 1)
    return None if where is None else Product(a.lo, a.hi, where)


def _subnormal(values: Tensor) -> Tensor:
    return (values.abs() < TINY) & (values != 0)


def _unusual_sum(terms: Tensor, absent: Tensor, leaves: Tensor | int, *, exact: bool) -> Admissible:
    """The reduction where some numbers are not finite, may overflow, or may underflow.

    - *NaN*: a NaN term, 0 * inf, or infinities of both signs give NaN in every order. An infinite
      term whose other factor is subnormal is NaN if that is read as zero: free, unless NaN anyway.
    - *Infinity*: of one sign, it stays, unless the finite terms may overflow to the other: free.
    - *Overflow*: see _overflowed.
    - *Underflow*: a term that may vanish moves the sum by up to itself, towards zero. Otherwise a
      subnormal product errs by 2^-150 at most. Each of the n - 1 additions may flush a subnormal
      result, an error below 2^-126, if any term is below 2^-93 (see NO_UNDERFLOW).
    """
    total = terms.sum(dim=1)
    nan = total.isnan()
    infinite = terms.isinf()
    free = (infinite & absent).any(dim=1) & ~nan
    finite = torch.where(terms.isfinite(), terms, 0.0)
    # The same sums as in the ordinary case, so that a usual element's set does not depend on
    # whether an unusual one is near.
    small = finite.abs()
    finite_total, magnitude = finite.sum(dim=1), small.sum(dim=1)
    positive, negative = 0.5 * (magnitude + finite_total), 0.5 * (magnitude - finite_total)
    error = error_bound(finite_total, magnitude, leaves, exact=exact)
    slack = ((small < TINY) & (small > 0)).sum(dim=1).double() * HALF_QUANTUM
    adds = torch.as_tensor(leaves, dtype=torch.float64, device=terms.device) - 1.0
    may_flush = ((small < NO_UNDERFLOW) & (small > 0)).any(dim=1)
    slack = slack + torch.where(may_flush, adds.clamp(min=0) * TINY, 0.0)
    gone = torch.where(absent, finite, 0.0)
    lo = finite_total - error - slack - gone.clamp(min=0).sum(dim=1)
    hi = finite_total + error + slack + (-gone).clamp(min=0).sum(dim=1)

    lo, hi, both = _overflowed(lo, hi, positive + error, negative + error)
    free |= both & ~infinite.any(dim=1)
    certain = total.isinf()
    against = torch.where(total > 0, negative + error, positive + error)
    free |= certain & (against >= FP32_OVERFLOW)
    lo, hi = torch.where(certain, total, lo), torch.where(certain, total, hi)
    return Admissible.build(lo, hi, nan, some(free))


def _overflowed(lo: Tensor, hi: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Widens the bounds of sums to what may overflow, and says which may overflow both ways.

    No partial sum exceeds ``up`` or falls below ``-down`` before its rounding. Below FP32's
    threshold, none overflows. If only +infinity can arise, the result is within the bounds in an
    order without an overflow, and +infinity in one with: the hull of both holds it. If both
    infinities can, so can NaN.
    """
    may_up, may_down = up >= FP32_OVERFLOW, down >= FP32_OVERFLOW
    hi = torch.where(may_up, INFINITY, hi)
    lo = torch.where(may_down, -INFINITY, lo)
    return lo, hi, may_up & may_down
