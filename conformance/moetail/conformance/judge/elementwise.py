"""Products and sums of two numbers, on admissible sets.

Both are monotone in each argument, so their images are found at the endpoints. Steps between which
a contract does not round are one expression: a product may enter the sum behind it by FMA, without
a rounding of its own, or not. The set of the sum is the hull of both.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible, Product, either, flushed, rounded
from moetail.conformance.judge.rounding import (
    INFINITY,
    float32,
    round_fp32,
    round_to,
    sum_to_odd,
)
from moetail.spec.contract import Rounding


def multiply(value: Admissible, factor: float | Admissible, *, read_as: str = "fp32") -> Admissible:
    """The FP32 product with a number, or with each element's own; 1.0 is the identity.

    ``read_as`` is the format that the factor is narrowed to first. Soundness: the exact product is
    exact in float64, and monotone in each factor; it is what may be flushed, and what an FMA takes.
    Zero times infinity is NaN: certain where both are, and of uncertain class where a subnormal may
    be read as zero, or another value of a set is not zero, or not infinite.
    """
    if isinstance(factor, Admissible):
        b = rounded(factor, Rounding(read_as)).read()
    else:
        number = float32(factor)
        if read_as != "fp32":
            number = float(round_to(torch.tensor(number, dtype=torch.float64), read_as))
        if number == 1.0:
            return value
        b = Admissible.of(torch.tensor(number))
    a = value.read()
    lo, hi = _products(a, b)
    nan, free = either(a.nan, b.nan), either(a.free, b.free)
    if not _finite(lo, hi):
        undefined, certain = _zero_times_infinity(a, b)
        nan = either(nan, certain if free is None else certain & ~free)
        free = either(free, undefined & ~certain)
    if nan is not None:
        nan = nan.to(lo.device).expand_as(lo)
    exact = Admissible.build(lo, hi, nan, free)
    lo, hi = flushed(exact.lo, exact.hi)
    single = round_fp32(lo)
    return Admissible(
        single,
        single if hi is lo else round_fp32(hi),
        exact.nan,
        exact.free,
        Product(exact.lo, exact.hi),
    )


def _products(a: Admissible, b: Admissible) -> tuple[Tensor, Tensor]:
    """The ends of the exact products, in float64."""
    a_lo, b_lo = a.lo.double(), b.lo.double()
    a_hi = a_lo if a.lo is a.hi else a.hi.double()
    lo = a_lo * b_lo
    if b.lo is b.hi:
        if a_hi is a_lo:
            return lo, lo
        hi = a_hi * b_lo
        if b.lo.dim():
            return torch.minimum(lo, hi), torch.maximum(lo, hi)
        return (hi, lo) if b_lo < 0 else (lo, hi)
    b_hi = b.hi.double()
    others = a_hi * b_lo, a_lo * b_hi, a_hi * b_hi
    lo, hi = (functools.reduce(pick, others, lo) for pick in (torch.minimum, torch.maximum))
    return lo, hi


def add(a: Admissible, b: Admissible) -> Admissible:
    """The FP32 sum of two values.

    Soundness: the sum of FP32 numbers is computed here in FP32, as an implementation does. For two
    BF16 numbers, rounded into BF16 afterwards, that is what one rounding of the exact sum gives,
    and so what a wider sum gives too, since a first rounding into p' >= 2 * 8 + 2 bits is innocuous
    for a sum of two 8-bit numbers (Figueroa); in the subnormal range the sum is exact. A product
    enters rounded, or exactly, but not both of two. Infinities of opposite signs give NaN: certain
    where both are, and of uncertain class where one is.
    """
    x, y = a.read(), b.read()
    x_lo, y_lo = x.lo.float(), y.lo.float()
    x_hi = x_lo if x.lo is x.hi else x.hi.float()
    y_hi = y_lo if y.lo is y.hi else y.hi.float()
    lo = x_lo + y_lo
    hi = lo if x_hi is x_lo and y_hi is y_lo else x_hi + y_hi
    nan, free = either(a.nan, b.nan), either(a.free, b.free)
    if not _finite(lo, hi):
        opposed = ((x_hi == INFINITY) & (y_lo == -INFINITY)) | (
            (x_lo == -INFINITY) & (y_hi == INFINITY)
        )
        certain = opposed & (x_lo == x_hi) & (y_lo == y_hi)
        for product, operand in ((a.product, x_lo), (b.product, y_lo)):
            if product is not None:  # an FMA sees no infinity that only the rounding makes
                certain = certain & ~(product.lo.isfinite() & operand.isinf())
        nan, free = either(nan, certain), either(free, opposed & ~certain)
    for product, other in ((a.product, y), (b.product, x)):
        if product is not None:
            lo, hi = _or_fused(product, other, lo, hi)
    return Admissible.build(lo, hi, nan, free)


def _or_fused(product: Product, other: Admissible, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """The hull of a sum's results and those of an FMA."""
    fused = flushed(
        sum_to_odd(other.lo.double(), product.lo), sum_to_odd(other.hi.double(), product.hi)
    )
    low, high = torch.minimum(lo, round_fp32(fused[0])), torch.maximum(hi, round_fp32(fused[1]))
    if product.where is None:
        return low, high
    return torch.where(product.where, low, lo), torch.where(product.where, high, hi)


def _zero_times_infinity(a: Admissible, b: Admissible) -> tuple[Tensor, Tensor]:
    """Where a product of members may be NaN, and where it certainly is."""
    zero, infinite, sure_zero, sure_infinite = zip(_extremes(a), _extremes(b), strict=True)
    undefined = (zero[0] & infinite[1]) | (infinite[0] & zero[1])
    certain = (sure_zero[0] & sure_infinite[1]) | (sure_infinite[0] & sure_zero[1])
    return undefined, certain


def _extremes(a: Admissible) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where a value may be zero, may be infinite, is certainly zero, is certainly infinite."""
    point = a.lo == a.hi
    infinite = a.lo.isinf() | a.hi.isinf()
    return (a.lo <= 0) & (a.hi >= 0), infinite, point & (a.lo == 0), point & infinite


def _finite(lo: Tensor, hi: Tensor) -> bool:
    """Whether no endpoint is infinite or NaN."""
    ends = (lo,) if hi is lo else (lo, hi)
    return all(float(end.abs().amax()) < INFINITY for end in ends if end.numel())
