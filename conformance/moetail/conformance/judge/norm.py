"""The RMS norm on admissible sets: an inverse for each row, and the elements.

Both steps are one expression: the inverse's error and the roundings of the products behind it are
taken together, and the products may come in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible, Product, either, rounded, some
from moetail.conformance.judge.elementwise import multiply
from moetail.conformance.judge.rounding import (
    FP32_OVERFLOW,
    HALF_QUANTUM,
    INFINITY,
    TINY,
    UNIT,
    float32,
    round_fp32,
    round_to,
)
from moetail.spec.contract import Rounding

INVERSE_SLACK = 2.0**-16
"""The contract's relative error of the inverse RMS (ROUND-4)."""

_FLOAT64 = 2.0**-38  # more than float64 can err in a mean over 2^14 elements and a square root


PLACES = ("inside", "outside", "sum", "squared", "missing")
"""Where eps may be added: inside the root, outside it, to the sum of squares, squared, nowhere."""

GAINS = ("w", "1+w", "none")


@dataclass(frozen=True)
class Inverse:
    """The inverse RMS of rows [T, 1], as the root whose reciprocal it is.

    Attributes:
        root_lo, root_hi: bounds on the root.
        source: of whose squares it is.
        magnitudes: of its elements.
        nan, free: rows of which it is NaN, or of uncertain class; None for none.
        zero: rows whose inverse is zero, since an element is infinite.
        small: rows whose inverse may be anything down to zero, since the squares may overflow.
        infinite: rows of nothing but zeros, without eps: the inverse is infinite.
        factor: times which it is taken.
        roundings: of the inverse itself.
    """

    root_lo: Tensor
    root_hi: Tensor
    source: Admissible
    magnitudes: _Magnitudes
    nan: Tensor | None = None
    free: Tensor | None = None
    zero: Tensor | None = None
    small: Tensor | None = None
    infinite: Tensor | None = None
    factor: float = 1.0
    roundings: tuple[Rounding, ...] = ()

    def rounded(self, rounding: Rounding) -> Inverse:
        """The inverse rounded by contract."""
        return replace(self, roundings=(*self.roundings, rounding))

    def bounds(self, products: int) -> tuple[Tensor, Tensor]:
        """Bounds on the inverse times what that many FP32 products behind it may err."""
        own = INVERSE_SLACK * (1.0 + 2.0**-20) + _FLOAT64
        behind = products * UNIT * (1.0 + 2.0**-12)
        at_once = own + behind if not self.roundings else own
        lo = (1.0 - at_once) * self.factor / self.root_hi
        hi = (1.0 + at_once) * self.factor / self.root_lo
        if self.roundings:
            made = Admissible(lo, hi)
            for rounding in self.roundings:
                made = rounded(made, rounding)
            lo, hi = made.lo.double() * (1.0 - behind), made.hi.double() * (1.0 + behind)
        if self.small is not None:
            lo = lo.masked_fill(self.small, 0.0)
        if self.zero is not None:
            lo, hi = lo.masked_fill(self.zero, 0.0), hi.masked_fill(self.zero, 0.0)
        return lo, hi


@dataclass(frozen=True)
class _Magnitudes:
    """A set's elements, zero where they may be infinite, with the ends of their magnitudes."""

    lo: Tensor
    hi: Tensor
    smallest: Tensor
    largest: Tensor
    infinite: Tensor | None = None
    maybe_infinite: Tensor | None = None

    @classmethod
    def of(cls, s: Admissible) -> _Magnitudes:
        lo = s.lo.double()
        point = s.lo is s.hi
        hi = lo if point else s.hi.double()
        largest = lo.abs() if point else torch.maximum(lo.abs(), hi.abs())
        sure = maybe = None
        if bool((largest == INFINITY).any()):
            sure = (largest == INFINITY) & (lo == hi)
            maybe = (largest == INFINITY) & ~sure
            lo = torch.where(sure | maybe, 0.0, lo)
            hi = lo if point else torch.where(sure | maybe, 0.0, hi)
            largest = torch.where(sure | maybe, 0.0, largest)
        smallest = largest
        if not point:
            smallest = torch.where((lo <= 0) & (hi >= 0), 0.0, torch.minimum(lo.abs(), hi.abs()))
        return cls(lo, hi, smallest, largest, sure, maybe)


def inverse_rms(
    value: Admissible,
    eps: float,
    *,
    place: str = "inside",
    squares: Rounding | None = None,
    error: float = 0.0,
) -> Inverse:
    """inv = 1/sqrt(mean(s*s) + eps), in FP32, one a row.

    ``place`` is one of :data:`PLACES`, ``squares`` a rounding of each square, and ``error`` a
    relative error that the inverse has by contract.

    Soundness. mean(s*s) lies between the means of the smallest and the largest squares in the
    intervals; inv falls with it, and errs by 2^-16 at most by contract. The FP32 squares may
    - overflow in their sum: 1/sqrt(inf) = 0, so the inverse may be anything from 0 to its value;
    - underflow: a square below H * 2^-126 (squares may be divided by H before they are summed) may
      be lost. This shows only where mean + eps is itself that small; and a sum that may be flushed
      to zero, with the inverse infinite, leaves its row free.
    A zero row without eps has an infinite inverse, certainly. NaN in a row makes the inverse NaN;
    with an infinity it is 0.
    """
    s = value.read()
    size = s.lo.shape[-1]
    magnitudes = _Magnitudes.of(s)
    under, after = _eps(float32(eps), size, place)
    if not under + after >= 0.0:
        # No contract covers a negative eps; NaN is NaN everywhere.
        one = s.lo.new_ones((*s.lo.shape[:-1], 1), dtype=torch.float64)
        every = one.bool()
        no_number = under + after != under + after
        nan, free = (every, None) if no_number else (None, every)
        return Inverse(one, one, value, magnitudes, nan, free)
    # A subnormal one may be read as zero.
    least_under, least_after = (part if part >= TINY else 0.0 for part in (under, after))
    nan = _any_row(s.nan)
    free = _any_row(s.free)
    zero = _any_row(magnitudes.infinite)
    if zero is not None and magnitudes.maybe_infinite is not None:
        free = either(free, _any_row(magnitudes.maybe_infinite & ~zero))
    squares_hi = magnitudes.largest * magnitudes.largest
    squares_lo = squares_hi
    if magnitudes.smallest is not magnitudes.largest:
        squares_lo = magnitudes.smallest * magnitudes.smallest
    if squares is not None:
        made = rounded(Admissible(squares_lo, squares_hi), squares)
        squares_lo, squares_hi = made.lo.double(), made.hi.double()
    mean_hi = squares_hi.mean(dim=-1, keepdim=True) * (1.0 + _FLOAT64)
    mean_lo = squares_lo.mean(dim=-1, keepdim=True) * (1.0 - _FLOAT64)
    infinite = None
    lost = mean_lo + least_under < 2.0**-80
    if bool(lost.any()):
        kept = torch.where(squares_lo < size * 2.0 * TINY, 0.0, squares_lo)
        mean_lo = torch.where(lost, kept.mean(dim=-1, keepdim=True) * (1.0 - _FLOAT64), mean_lo)
        nothing = mean_lo + least_under < TINY  # the root's argument may be flushed
        if least_after > 0.0:
            mean_lo = torch.where(nothing, 0.0, mean_lo)
        else:
            zeros = (squares_hi == 0).all(dim=-1, keepdim=True)
            if under + after > 0.0:
                zeros = torch.zeros_like(zeros)
            if zero is not None:
                zeros, nothing = zeros & ~zero, nothing & ~zero
            if free is not None:
                zeros = zeros & ~free
            infinite, free = some(zeros), either(free, nothing & ~zeros)
            mean_lo = torch.where(nothing, 1.0, mean_lo)
            mean_hi = torch.where(nothing, 1.0, mean_hi)
    return Inverse(
        (mean_lo + least_under).sqrt() + least_after,
        (mean_hi + under).sqrt() + after,
        value,
        magnitudes,
        nan,
        some(free),
        zero,
        some(mean_hi * size >= 2.0**127),
        infinite,
        1.0 + error,
    )


def affine(
    value: Admissible,
    inverse: Inverse,
    weight: Tensor | None,
    *,
    read_as: str = "fp32",
    gain: str = "w",
    between: Rounding | None = None,
) -> Admissible:
    """n = s * inv * w, in FP32, the weight before any rounding; w is 1 without a ``weight`` [H].

    ``read_as`` is the format that the weight is narrowed to first, ``gain`` one of :data:`GAINS`,
    1 + w being added in FP32, and ``between`` a rounding before the weight.

    Soundness. s * inv * w is monotone in s and in inv; its FP32 products, in any order, add a
    factor (1 +- u) each (one product without the affine), except where an intermediate result
    - may be subnormal: it may be flushed, so zero is admitted, and its rounding errs by 2^-150, not
      by u, so the largest of the three orders bounds the magnitude;
    - may overflow: s * w may be infinite where (s * inv) * w is not. Free, unless the value is
      beyond FP32 whatever the order.
    Where the inverse is zero, for an infinity in its row, that leaves 0, and NaN at the infinity;
    where it is infinite, zeros give NaN. Other infinities, which only an inverse of other values
    leaves in doubt, are free.
    """
    if gain == "none":
        weight = None
    if weight is not None and read_as != "fp32":
        weight = round_to(weight.double(), read_as)
    if weight is not None and gain == "1+w":
        weight = round_fp32(1.0 + weight.double())
    if between is not None:
        normed = rounded(affine(value, inverse, None), between)
        return normed if weight is None else multiply(normed, Admissible.of(weight))
    m = inverse.magnitudes if value is inverse.source else _Magnitudes.of(value.read())
    nan, free = _kinds(value, inverse, m)
    inv_lo, inv_hi = inverse.bounds(1 if weight is None else 2)
    wide, ordinary_weight = None, True
    p_lo, p_hi = m.lo, m.hi
    if weight is not None:
        wide = weight.double()
        magnitude = wide.abs()
        kept_weight = magnitude[magnitude != 0]
        ordinary_weight = bool(((kept_weight > 2.0**-30) & (kept_weight < 2.0**30)).all())
        if not bool(wide.isfinite().all()):
            nan, free = _weight_classes(wide, m, inverse.zero, nan, free)
            wide = wide.masked_fill(~wide.isfinite(), 1.0)
        p_lo = m.lo * wide
        p_hi = p_lo if m.lo is m.hi else m.hi * wide
        if p_hi is not p_lo:
            p_lo, p_hi = torch.minimum(p_lo, p_hi), torch.maximum(p_lo, p_hi)
    # Each endpoint takes the inverse that moves it outwards.
    out_lo = torch.minimum(p_lo * inv_lo, p_lo * inv_hi)
    out_hi = torch.maximum(p_hi * inv_lo, p_hi * inv_hi)

    ordinary = (
        ordinary_weight
        and bool(((inv_lo > 2.0**-45) & (inv_hi < 2.0**45)).all())
        and not bool(((m.smallest < 2.0**-50) & (m.largest > 0)).any())
    )
    if not ordinary:
        out_lo, out_hi, overflowed = _extreme_products(
            m.smallest, m.largest, wide, inv_lo, inv_hi, out_lo, out_hi
        )
        free = either(free, some(overflowed))
    made = Admissible.build(out_lo, out_hi, nan, free)
    return replace(made, product=Product(made.lo, made.hi))


def _eps(eps: float, size: int, place: str) -> tuple[float, float]:
    """What is added under the root, and to it."""
    under = {"inside": eps, "sum": eps / size, "squared": eps * eps}
    return under.get(place, 0.0), eps if place == "outside" else 0.0


def _any_row(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.any(dim=-1, keepdim=True)


def _kinds(
    value: Admissible, inverse: Inverse, m: _Magnitudes
) -> tuple[Tensor | None, Tensor | None]:
    """Which elements times the inverse are NaN, and which are of uncertain class."""
    shape = m.lo.shape
    nan, free = (
        either(mask, None if row is None else row.expand(shape))
        for mask, row in ((value.nan, inverse.nan), (value.free, inverse.free))
    )
    if m.infinite is not None:
        sure = m.infinite if inverse.zero is None else m.infinite & ~inverse.zero
        if inverse.zero is not None:
            nan = either(nan, m.infinite & inverse.zero)
        free = either(free, m.maybe_infinite, sure)
    if inverse.infinite is not None:
        zero = m.largest == 0
        nan = either(nan, inverse.infinite & zero)
        free = either(free, inverse.infinite & ~zero)
    return nan, free


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
    m: _Magnitudes,
    row_zero: Tensor | None,
    nan: Tensor | None,
    free: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Columns whose weight is not finite. A NaN weight gives NaN. An infinite one gives NaN where s
    or the inverse is certainly zero, and otherwise an infinity, or NaN if a product underflows
    first; these are left free: no checkpoint has such a weight."""
    zero = (m.largest == 0) & (m.smallest == 0)
    if row_zero is not None:
        zero = zero | row_zero
    infinite = weight.isinf()
    nan = either(nan, weight.isnan().expand_as(zero), infinite & zero)
    return nan, either(free, infinite & ~zero)
