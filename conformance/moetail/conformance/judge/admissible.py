"""The set of values that legal evaluations can give an element, and its rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moetail.conformance.judge.rounding import (
    BF16_OVERFLOW,
    INFINITY,
    TINY,
    least,
    round_fp32,
    round_to,
)
from moetail.spec.contract import BF16, Rounding


@dataclass(frozen=True)
class Product:
    """Bounds, in float64, on a product before its rounding into FP32: what an FMA adds.

    ``where`` is a mask, None where all elements are products.
    """

    lo: Tensor
    hi: Tensor
    where: Tensor | None = None


@dataclass(frozen=True)
class Admissible:
    """For each element, a set of values that contains all that a legal evaluation can give.

    Three kinds of element:
    - a number: any value in ``[lo, hi]``, infinity included: where some orders overflow and others
      do not, ``hi`` is infinity;
    - ``nan``: every legal evaluation gives NaN;
    - ``free``: some legal evaluation gives NaN and another does not, so nothing is required and the
      element is not judged.
    ``nan`` and ``free`` are masks, None where no element is of that kind. They are disjoint, and
    ``lo`` and ``hi`` are 0 there. ``lo is hi`` where every interval is known to be a point.

    The dtype of ``lo`` and ``hi`` says what the values are: BF16 or FP16 numbers, or FP32 numbers;
    float64 holds bounds on FP32 numbers that need not be FP32 numbers themselves. ``product`` is
    there where the last operation was a multiplication whose result has not been rounded further,
    so that an addition may take it in exactly.

    The set may contain more than what is reachable (a judge that accepts too much there), never
    less: every stage maps a set that contains the reachable inputs to one that contains the
    reachable outputs.
    """

    lo: Tensor
    hi: Tensor
    nan: Tensor | None = None
    free: Tensor | None = None
    product: Product | None = None

    @classmethod
    def of(cls, values: Tensor) -> Admissible:
        """Given values as an FP32 operation reads them: a subnormal may be read as zero."""
        nan = some(values.isnan())
        if nan is not None:
            values = values.masked_fill(nan, 0.0)
        lo, hi = flushed(values, values)
        return cls(lo, hi, nan)

    @classmethod
    def build(
        cls,
        lo: Tensor,
        hi: Tensor,
        nan: Tensor | None,
        free: Tensor | None,
        product: Product | None = None,
    ) -> Admissible:
        """Brings masks and endpoints into the form that the class promises."""
        nan, free = some(nan), some(free)
        if nan is not None and free is not None:
            free = some(free & ~nan)
        for mask in (nan, free):
            if mask is not None:
                same = lo is hi
                lo = lo.masked_fill(mask, 0.0)
                hi = lo if same else hi.masked_fill(mask, 0.0)
        return cls(lo, hi, nan, free, product)

    @classmethod
    def cat(cls, parts: Sequence[Admissible]) -> Admissible:
        """Rows of several parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        points = all(part.lo is part.hi for part in parts)
        lo = torch.cat([part.lo for part in parts])
        hi = lo if points else torch.cat([part.hi for part in parts])
        nan = _cat_masks(parts, [part.nan for part in parts])
        free = _cat_masks(parts, [part.free for part in parts])
        return cls(lo, hi, nan, free)

    def mapped(self, lo: Tensor, hi: Tensor) -> Admissible:
        """Of the same kinds, with other endpoints; one tensor where they are equal."""
        if hi is not lo and torch.equal(lo, hi):
            hi = lo
        return Admissible(lo, hi, self.nan, self.free)

    def where(self, mask: Tensor, other: Admissible) -> Admissible:
        """This set where the mask is set, the other one elsewhere."""
        lo, hi = torch.where(mask, self.lo, other.lo), torch.where(mask, self.hi, other.hi)
        nan, free = (
            None
            if mine is None and theirs is None
            else torch.where(mask, _mask(mine, lo), _mask(theirs, lo))
            for mine, theirs in ((self.nan, other.nan), (self.free, other.free))
        )
        return Admissible.build(lo, hi, nan, free)

    def read(self) -> Admissible:
        """The numbers that an FP32 operation reads: FP32 ones, or of fewer bits.

        RN is monotone and leaves FP32 numbers as they are, so that bounds on them may be rounded. A
        subnormal one may have been flushed when it was written, or may be when it is read.
        """
        if self.lo.dtype in (torch.bfloat16, torch.float16):
            return self
        lo, hi = flushed(self.lo, self.hi)
        if lo.dtype is torch.float32:
            return self if lo is self.lo and hi is self.hi else replace(self, lo=lo, hi=hi)
        single = round_fp32(lo)
        return replace(self, lo=single, hi=single if hi is lo else round_fp32(hi))

    def admits(self, got: Tensor) -> Tensor:
        """Whether each value of ``got`` is admissible; free elements admit anything."""
        point = self.lo is self.hi
        fits = got == self.lo if point else (self.lo <= got) & (got <= self.hi)
        if self.nan is not None:
            fits = torch.where(self.nan, got.isnan(), fits)
        if self.free is not None:
            fits = fits | self.free
        return fits


def rounded(a: Admissible, rounding: Rounding = BF16) -> Admissible:
    """What a rounding makes of FP32 results, of which a subnormal one may have been flushed.

    Values that the format holds stay as they are, and are not looked at. Dither may go either way,
    so the ends move outwards.
    """
    if _holds(rounding, a.lo.dtype):
        return a if a.product is None else replace(a, product=None)
    if rounding.through:
        a = rounded(a, Rounding(rounding.through))
    ends = ("down", "up") if rounding.mode == "dither" else (rounding.mode, rounding.mode)
    if rounding.format != "bf16" or rounding.mode != "nearest-even":
        a = a.read()
    lo, hi = flushed(a.lo, a.hi)
    low = round_to(_wide(lo, rounding), rounding.format, ends[0])
    if hi is lo and ends[0] == ends[1]:
        return a.mapped(low, low)
    return a.mapped(low, round_to(_wide(hi, rounding), rounding.format, ends[1]))


def part_of(a: Admissible, rounded_to: Tensor) -> Admissible:
    """The part of a set that a rounding to BF16, to nearest even, takes to given values [T, H].

    An element that no part of its set rounds to is wrong already: it may then be any value that
    does, so that an error is not counted again in what is computed from it.
    """
    lo, hi = (_origin(rounded_to, up) for up in (False, True))
    low, high = torch.maximum(a.lo.double(), lo), torch.minimum(a.hi.double(), hi)
    outside = low > high
    for mask in (a.nan, a.free):
        outside = outside if mask is None else outside | mask
    low, high = torch.where(outside, lo, low), torch.where(outside, hi, high)
    return Admissible.build(low, high, rounded_to.isnan(), None, a.product)


def _origin(values: Tensor, up: bool) -> Tensor:
    """The least, or greatest, number that may be rounded to a BF16 value: the tie towards its
    neighbour. What is flushed to zero is less than the smallest normal number."""
    side = 1.0 if up else -1.0
    other = torch.nextafter(values, values.new_tensor(side * INFINITY)).double()
    wide = values.double()
    tie = 0.5 * (wide + other)
    tie = torch.where(other.isinf() & wide.isfinite(), side * BF16_OVERFLOW, tie)
    # From the other side infinity's neighbour is the largest number.
    tie = torch.where(wide == -side * INFINITY, -side * BF16_OVERFLOW, tie)
    return torch.where(wide == 0, side * TINY, tie)


def flushed(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Widens to zero what may have been flushed: gradual underflow and flush-to-zero are both
    legal, and both are monotone, so the hull of both images of the endpoints holds every result."""
    if least(lo) >= TINY and (hi is lo or least(hi) >= TINY):
        return lo, hi
    up = (lo > 0) & (lo < TINY)
    down = (hi < 0) & (hi > -TINY)
    if not (bool(up.any()) or bool(down.any())):
        return lo, hi
    return lo.masked_fill(up, 0.0), hi.masked_fill(down, 0.0)


def some(mask: Tensor | None) -> Tensor | None:
    """The mask, or None if nothing is set in it."""
    return mask if mask is not None and bool(mask.any()) else None


def either(*masks: Tensor | None) -> Tensor | None:
    """The union of masks."""
    union: Tensor | None = None
    for mask in masks:
        if mask is not None:
            union = mask if union is None else union | mask
    return union


def _holds(rounding: Rounding, dtype: torch.dtype) -> bool:
    """Whether a rounding leaves every value of a dtype as it is, whatever its mode."""
    held = {
        torch.bfloat16: ("bf16", "tf32", "fp32"),
        torch.float16: ("fp16", "tf32", "fp32"),
        torch.float32: ("fp32",),
    }.get(dtype, ())
    return rounding.format in held and rounding.through in ("", *held)


def _wide(endpoint: Tensor, rounding: Rounding) -> Tensor:
    # RN from FP32 to BF16 is torch's own conversion; everything else is computed in float64.
    direct = endpoint.dtype is torch.float32 and rounding == BF16
    return endpoint if direct else endpoint.double()


def _cat_masks(parts: Sequence[Admissible], masks: Sequence[Tensor | None]) -> Tensor | None:
    if all(mask is None for mask in masks):
        return None
    return torch.cat([_mask(mask, part.lo) for part, mask in zip(parts, masks, strict=True)])


def _mask(mask: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool) if mask is None else mask
