"""The contract's arithmetic, stage by stage, on admissible sets.

Read beside the contract's "Arithmetic", in its order. Each stage takes sets that contain what legal
evaluations can arrive with, and returns sets that contain what they can leave with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible, either, flushed, some
from moetail.conformance.judge.rounding import (
    FP32_OVERFLOW,
    HALF_QUANTUM,
    INFINITY,
    TINY,
    float32,
    round_fp32,
)
from moetail.conformance.judge.summation import NO_UNDERFLOW, error_bound, narrow, undecided


def admit_reduction(rows: Tensor, weights: Tensor, index: Tensor | None) -> Admissible:
    """reduce: a = FP32 sum over live k of float(w[t,k]) * float(x[t,k,:]), any order, FMA allowed.

    ``rows`` [R, H] BF16 with ``index`` [T, K] naming each route's row (-1: not live), or
    ``rows`` [T, K, H] with ``index`` None. ``weights`` [T, K] in the dtype they have. The set is of
    FP32 values, not yet rounded into BF16.

    Soundness: products of two such numbers are exact in float64, so S and M are known up to
    float64's own error, which the bound includes; ``summation`` proves the bounds. Where numbers
    may overflow, underflow or are not finite, ``_unusual_sum`` says what is admitted and why.
    """
    if index is None:
        x, w = rows, weights
        live = rows.shape[1]
        leaves: Tensor | int = live
    else:
        alive = index >= 0
        if rows.shape[0] == 0:  # no route is live, and there is no row to stand in for theirs
            rows = rows.new_zeros((1, rows.shape[1]))
        x = rows[index.clamp(min=0).long()]
        w = weights
        leaves = live = index.shape[1]
        if not bool(alive.all()):
            # Neither a dead route's weight nor any row is read for value: exact zeros.
            x = x.masked_fill(~alive.unsqueeze(-1), 0.0)
            w = w.masked_fill(~alive, 0.0)
            leaves = alive.sum(dim=1, keepdim=True)
    if live == 0:
        zero = x.new_zeros((x.shape[0], x.shape[2]), dtype=torch.float64)
        return Admissible(zero, zero)
    fits = weights.dtype in (torch.bfloat16, torch.float16)  # 8 + 8 or 8 + 11 bits: exact products
    terms = x.double() * w.double().unsqueeze(-1)
    total, magnitude = terms.sum(dim=1), terms.abs().sum(dim=1)
    error = error_bound(total, magnitude, leaves, exact=fits)
    least = _least(x) * _least(w)
    ordinary = (
        bool((magnitude < 2.0**126).all())  # False for NaN and infinity
        and least >= NO_UNDERFLOW
        and min(_least(x), _least(w)) >= TINY
    )
    if ordinary:
        a = Admissible(total - error, total + error)
    else:
        absent = _absent(x.double(), w.double().unsqueeze(-1), terms)
        a = _unusual_sum(terms, absent, leaves, exact=fits)
    need, deep = undecided(a.lo, a.hi)
    if not bool(need.any()):
        return a
    token, column = need.nonzero(as_tuple=True)
    xs = x[token, :, column].double().T
    ws = w[token].double().T
    leaf = xs * ws
    zero = torch.zeros_like(leaf)
    vanishes = ((xs.abs() < TINY) & (xs != 0)) | ((ws.abs() < TINY) & (ws != 0))
    leaf_lo = torch.where(vanishes, torch.minimum(leaf, zero), leaf)
    leaf_hi = torch.where(vanishes, torch.maximum(leaf, zero), leaf)
    lo, hi = narrow(a.lo[need], a.hi[need], deep, leaf_lo, leaf_hi, products=True)
    return Admissible(a.lo.masked_scatter(need, lo), a.hi.masked_scatter(need, hi), a.nan, a.free)


def admit_round(a: Admissible) -> Admissible:
    """round: r = RN(a), before the scale, always."""
    return a.rounded()


def admit_scale(r: Admissible, scale: float) -> Admissible:
    """scale: s = RN(float32(r) * float32(scale)); 1.0 is the identity.

    Soundness: RN(fl(r * c)), two roundings by contract, is monotone in r (falling for c < 0), and
    r * c is exact in float64.
    """
    factor = float32(scale)
    if factor == 1.0:
        return r
    if factor != factor:
        return Admissible.build(r.lo, r.hi, torch.ones_like(r.lo, dtype=torch.bool), None)
    lo = r.lo * factor
    hi = lo if r.lo is r.hi else r.hi * factor
    if factor < 0:
        lo, hi = hi, lo
    nan, free = r.nan, r.free
    infinite = r.lo.isinf() | r.hi.isinf()
    if abs(factor) == INFINITY:
        # inf * 0 is NaN; a set that holds zero and more may give any class.
        zero = (r.lo == 0) & (r.hi == 0)
        nan = either(nan, zero)
        free = either(free, (r.lo <= 0) & (r.hi >= 0) & ~zero)
    elif factor == 0 or abs(factor) < TINY:
        # A subnormal factor may be read as zero, and 0 * inf is NaN where finite * 0 is 0.
        certain = infinite & (r.lo == r.hi) & (factor == 0)
        nan = either(nan, certain)
        free = either(free, infinite & ~certain)
        zeros = torch.zeros_like(lo)
        lo, hi = torch.minimum(lo, zeros), torch.maximum(hi, zeros)
    s = Admissible.build(lo, hi, nan, free)
    # The exact product is what may be flushed; then its own rounding, then RN.
    lo, hi = flushed(s.lo, s.hi)
    single = round_fp32(lo).double()
    hi = single if hi is lo else round_fp32(hi).double()
    return Admissible(single, hi, s.nan, s.free).rounded()


def admit_shared(s: Admissible, shared: Tensor) -> Admissible:
    """shared: p = RN(s + shared)."""
    return _add(s, Admissible.of(shared))


def admit_rank_sum(parts: Sequence[Admissible]) -> Admissible:
    """all-reduce: q = RN(FP32 sum over ranks of p, any order).

    Soundness: as the reduction, with leaves that are intervals: S and the bounds hold for every
    choice of values in them, so they hold for the extremes. BF16 numbers need no product.
    """
    ranks = len(parts)
    nan = either(*(part.nan for part in parts))
    free = either(*(part.free for part in parts))
    if ranks == 1:
        return parts[0].rounded()
    lo = torch.stack([part.lo for part in parts])
    hi = torch.stack([part.hi for part in parts])
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
    least = torch.where(small > 0, torch.minimum(lo.abs(), hi.abs()), INFINITY).amin(dim=0)
    # Multiples of 2^-133 whose sums may be subnormal, and flushed: below 2^-118 only.
    slack = (least < 2.0**-118).double() * ((ranks - 1) * TINY)
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
    need, deep = undecided(q.lo, q.hi)
    if bool(need.any()):
        at = lo[:, need], hi[:, need]
        low, high = narrow(q.lo[need], q.hi[need], deep, *at, products=False)
        q = Admissible(
            q.lo.masked_scatter(need, low), q.hi.masked_scatter(need, high), q.nan, q.free
        )
    return q.rounded()


def admit_residual(
    n: Admissible, residual: Tensor, scales: tuple[float, float] | None
) -> Admissible:
    """residual: a = RN(n * x_scale), b = RN(residual * r_scale), hidden = RN(a + b); scales None:
    a = n, b = residual.

    Soundness: each map is monotone in each argument. The sum of two BF16 numbers is computed in
    FP32 by an implementation and in float64 here, and then rounded into BF16; both give what one
    rounding of the exact sum gives, since a first rounding into p' >= 2 * 8 + 2 bits is innocuous
    for a sum of two 8-bit numbers (Figueroa), and 24 and 53 both are; in the subnormal range the
    sum is exact.
    """
    b = Admissible.of(residual)
    if scales is None:
        return _add(n, b)
    x_scale, r_scale = scales
    return _add(admit_scale(n, x_scale), admit_scale(b, r_scale))


def _add(a: Admissible, b: Admissible) -> Admissible:
    """RN(a + b) for BF16 values."""
    lo = a.lo + b.lo
    points = a.lo is a.hi and b.lo is b.hi
    hi = lo if points else a.hi + b.hi
    nan, free = either(a.nan, b.nan), either(a.free, b.free)
    # Infinities of opposite signs: NaN if both are certain, of uncertain class if one is.
    opposed = ((a.hi == INFINITY) & (b.lo == -INFINITY)) | (
        (a.lo == -INFINITY) & (b.hi == INFINITY)
    )
    if bool(opposed.any()):
        certain = opposed & (a.lo == a.hi) & (b.lo == b.hi)
        nan, free = either(nan, certain), either(free, opposed & ~certain)
    return Admissible.build(lo, hi, nan, free).rounded()


def _least(values: Tensor) -> float:
    """The smallest nonzero magnitude, infinity if there is none; NaN and infinities are large."""
    if values.dtype is torch.bfloat16:
        # Magnitudes as 15-bit integers, less one so that zero comes last.
        bits = (values.contiguous().view(torch.int16) - 1) & 0x7FFF
        least = int(bits.amin()) + 1 if bits.numel() else 0x7F80
        at = torch.tensor(min(least, 0x7F80) << 16, dtype=torch.int32)
        return float(at.view(torch.float32))
    magnitude = values.float().abs()
    magnitude = magnitude.masked_fill(~(magnitude > 0), INFINITY)
    return float(magnitude.amin()) if magnitude.numel() else INFINITY


def _absent(x: Tensor, w: Tensor, terms: Tensor) -> Tensor:
    """Terms that may vanish: a factor is subnormal and may be read as zero, or the product is and
    may be flushed."""
    subnormal = [(v.abs() < TINY) & (v != 0) for v in (x, w, terms)]
    return subnormal[0] | subnormal[1] | subnormal[2]


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
