"""The RMS norm on admissible sets: the post-norm and the next norm."""

from __future__ import annotations

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible, either, some
from moetail.conformance.judge.rounding import (
    FP32_OVERFLOW,
    HALF_QUANTUM,
    INFINITY,
    TINY,
    UNIT,
    float32,
)

INVERSE_SLACK = 2.0**-16
"""The contract's relative error of the inverse RMS (ROUND-4)."""

_FLOAT64 = 2.0**-38  # more than float64 can err in a mean over 2^14 elements and a square root


def admit_norm(s: Admissible, weight: Tensor | None, eps: float) -> Admissible:
    """post, next: n = RN(s * inv * w), inv = 1/sqrt(mean(s*s) + eps), affine before the rounding.

    Soundness. mean(s*s) lies between the means of the smallest and the largest squares in the
    intervals; inv falls with it, and errs by 2^-16 at most by contract. s * inv * w is monotone in
    s and in inv; its FP32 products, in any order, add a factor (1 +- u) each (one product without
    the affine), except where an intermediate result
    - may be subnormal: it may be flushed, so zero is admitted, and its rounding errs by 2^-150, not
      by u, so the largest of the three orders bounds the magnitude;
    - may overflow: s * w may be infinite where (s * inv) * w is not. Free, unless the value is
      beyond FP32 whatever the order.
    The FP32 squares may
    - overflow in their sum: 1/sqrt(inf) = 0, so the inverse may be anything from 0 to its value;
    - underflow: a square below H * 2^-126 (squares may be divided by H before they are summed) may
      be lost. This shows only where mean + eps is itself that small; and a sum that may be flushed
      to zero, with the inverse infinite, leaves its row free.
    A zero row without eps gives 0 * inf, NaN, certainly. NaN in a row makes all of it NaN; with an
    infinity inv is 0, which leaves 0, and NaN at the infinity.
    """
    size = s.lo.shape[-1]
    epsilon = float32(eps)
    lo, hi = s.lo, s.hi
    if not epsilon >= 0.0:
        # No contract covers a negative eps; NaN is NaN everywhere.
        every = torch.ones_like(lo, dtype=torch.bool)
        no_number = epsilon != epsilon
        return Admissible.build(lo, hi, every if no_number else s.nan, every)
    least_epsilon = epsilon if epsilon >= TINY else 0.0  # a subnormal may be read as zero
    point = lo is hi
    nan, free = s.nan, s.free
    largest = lo.abs() if point else torch.maximum(lo.abs(), hi.abs())
    row_nan = None if nan is None else nan.any(dim=-1, keepdim=True)
    row_free = None if free is None else free.any(dim=-1, keepdim=True)
    row_inf = None
    if bool((largest == INFINITY).any()):
        sure = (largest == INFINITY) & (lo == hi)
        maybe = (largest == INFINITY) & ~sure
        row_inf = sure.any(dim=-1, keepdim=True)
        row_free = either(row_free, maybe.any(dim=-1, keepdim=True) & ~row_inf)
        nan, free = either(nan, sure), either(free, maybe)
        lo = torch.where(sure | maybe, 0.0, lo)
        hi = lo if point else torch.where(sure | maybe, 0.0, hi)
        largest = torch.where(sure | maybe, 0.0, largest)
    free = either(free, None if row_free is None else row_free.expand_as(lo))
    nan = either(nan, None if row_nan is None else row_nan.expand_as(lo))

    squares_hi = largest * largest
    squares_lo = squares_hi
    smallest = largest
    if not point:
        smallest = torch.where((lo <= 0) & (hi >= 0), 0.0, torch.minimum(lo.abs(), hi.abs()))
        squares_lo = smallest * smallest
    mean_hi = squares_hi.mean(dim=-1, keepdim=True) * (1.0 + _FLOAT64)
    mean_lo = squares_lo.mean(dim=-1, keepdim=True) * (1.0 - _FLOAT64)
    lost = mean_lo + least_epsilon < 2.0**-80
    if bool(lost.any()):
        kept = torch.where(squares_lo < size * 2.0 * TINY, 0.0, squares_lo)
        mean_lo = torch.where(lost, kept.mean(dim=-1, keepdim=True) * (1.0 - _FLOAT64), mean_lo)
        zero = (largest == 0).all(dim=-1, keepdim=True) & (epsilon == 0.0)
        nothing = mean_lo + least_epsilon < TINY  # the root's argument may be flushed
        if row_inf is not None:
            zero, nothing = zero & ~row_inf, nothing & ~row_inf
        if row_free is not None:
            zero = zero & ~row_free
        nan = either(nan, zero.expand_as(lo))
        free = either(free, nothing.expand_as(lo))
        mean_lo = torch.where(nothing, 1.0, mean_lo)
        mean_hi = torch.where(nothing, 1.0, mean_hi)

    products = 1 if weight is None else 2
    slack = INVERSE_SLACK * (1.0 + 2.0**-20) + products * UNIT * (1.0 + 2.0**-12) + _FLOAT64
    inv_hi = (1.0 + slack) / (mean_lo + least_epsilon).sqrt()
    inv_lo = (1.0 - slack) / (mean_hi + epsilon).sqrt()
    overflow = mean_hi * size >= 2.0**127
    if bool(overflow.any()):
        inv_lo = inv_lo.masked_fill(overflow, 0.0)
    if row_inf is not None:
        inv_lo, inv_hi = inv_lo.masked_fill(row_inf, 0.0), inv_hi.masked_fill(row_inf, 0.0)

    wide, ordinary_weight = None, True
    p_lo, p_hi = lo, hi
    if weight is not None:
        wide = weight.double()
        magnitude = wide.abs()
        kept_weight = magnitude[magnitude != 0]
        ordinary_weight = bool(((kept_weight > 2.0**-30) & (kept_weight < 2.0**30)).all())
        if not bool(wide.isfinite().all()):
            nan, free = _weight_classes(wide, smallest, largest, inv_lo, row_inf, nan, free)
            wide = wide.masked_fill(~wide.isfinite(), 1.0)
        p_lo = lo * wide
        p_hi = p_lo if point else hi * wide
        if not point:
            p_lo, p_hi = torch.minimum(p_lo, p_hi), torch.maximum(p_lo, p_hi)
    # Each endpoint takes the inverse that moves it outwards.
    out_lo = torch.minimum(p_lo * inv_lo, p_lo * inv_hi)
    out_hi = torch.maximum(p_hi * inv_lo, p_hi * inv_hi)

    ordinary = (
        ordinary_weight
        and bool(((inv_lo > 2.0**-45) & (inv_hi < 2.0**45)).all())
        and not bool(((smallest < 2.0**-50) & (largest > 0)).any())
    )
    if not ordinary:
        out_lo, out_hi, overflowed = _extreme_products(
            smallest, largest, wide, inv_lo, inv_hi, out_lo, out_hi
        )
        free = either(free, some(overflowed))
    return Admissible.build(out_lo, out_hi, nan, free).rounded()


def _extreme_products(
    smallest: Tensor,
    largest: Tensor,
    weight: Tensor | None,
    inv_lo: Tensor,
    inv_hi: Tensor,
    lo: Tensor,
    hi: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Widens products whose intermediates may underflow, and says which may overflow."""
    h = HALF_QUANTUM
    growth = 1.0 + 4.0 * UNIT
    may_vanish = (smallest < TINY) | (smallest * inv_lo < TINY)
    bound = largest * inv_hi + h
    reach = bound
    if weight is not None:
        w = weight.abs()
        may_vanish = may_vanish | (w < TINY) | (smallest * w < TINY) | (inv_lo * w < TINY)
        reach = torch.maximum(torch.maximum(bound, largest * w), inv_hi * w)
        orders = (bound * w + h, (inv_hi * w + h) * largest + h, (largest * w + h) * inv_hi + h)
        bound = torch.maximum(torch.maximum(orders[0], orders[1]), orders[2])
    bound = bound * growth
    lo = torch.where(may_vanish, torch.where(lo < 0, -bound, 0.0), lo)
    hi = torch.where(may_vanish, torch.where(hi > 0, bound, 0.0), hi)
    beyond = (lo >= FP32_OVERFLOW) | (hi <= -FP32_OVERFLOW)
    overflowed = (reach * growth >= FP32_OVERFLOW) & ~beyond
    return lo, hi, overflowed


def _weight_classes(
    weight: Tensor,
    smallest: Tensor,
    largest: Tensor,
    inv_lo: Tensor,
    row_inf: Tensor | None,
    nan: Tensor | None,
    free: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Columns whose weight is not finite. A NaN weight gives NaN. An infinite one gives NaN where s
    or the inverse is certainly zero, and otherwise an infinity, or NaN if a product underflows
    first; these are left free: no checkpoint has such a weight."""
    zero = (largest == 0) & (smallest == 0)
    if row_inf is not None:
        zero = zero | row_inf
    infinite = weight.isinf()
    nan = either(nan, weight.isnan().expand_as(zero), infinite & zero)
    return nan, either(free, infinite & ~zero)
