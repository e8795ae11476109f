"""The set of values that legal evaluations can give an element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moetail.conformance.judge.rounding import TINY, round_bf16


@dataclass(frozen=True)
class Admissible:
    """For each element, a set of values that contains all that a legal evaluation can give.

    Three kinds of element:
    - a number: any value in ``[lo, hi]``, extended reals held in float64 (infinity included: where
      some orders overflow and others do not, ``hi`` is infinity);
    - ``nan``: every legal evaluation gives NaN;
    - ``free``: some legal evaluation gives NaN and another does not, so nothing is required and the
      element is not judged.
    ``nan`` and ``free`` are masks, None where no element is of that kind. They are disjoint, and
    ``lo`` and ``hi`` are 0 there. ``lo is hi`` where every interval is known to be a point.

    The set may contain more than what is reachable (a judge that accepts too much there), never
    less: every stage maps a set that contains the reachable inputs to one that contains the
    reachable outputs.
    """

    lo: Tensor
    hi: Tensor
    nan: Tensor | None = None
    free: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor) -> Admissible:
        """Given values as an FP32 operation reads them: a subnormal may be read as zero."""
        exact = values.double()
        nan = some(exact.isnan())
        if nan is not None:
            exact = exact.masked_fill(nan, 0.0)
        lo, hi = flushed(exact, exact)
        return cls(lo, hi, nan)

    @classmethod
    def build(cls, lo: Tensor, hi: Tensor, nan: Tensor | None, free: Tensor | None) -> Admissible:
        """Brings masks and endpoints into the form that the class promises."""
        nan, free = some(nan), some(free)
        if nan is not None and free is not None:
            free = some(free & ~nan)
        for mask in (nan, free):
            if mask is not None:
                same = lo is hi
                lo = lo.masked_fill(mask, 0.0)
                hi = lo if same else hi.masked_fill(mask, 0.0)
        return cls(lo, hi, nan, free)

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

    def rounded(self) -> Admissible:
        """RN of FP32 results, of which a subnormal one may have been flushed to zero."""
        lo, hi = flushed(self.lo, self.hi)
        low = round_bf16(lo)
        high = low if hi is lo else round_bf16(hi)
        lo = low.double()
        hi = lo if high is low or torch.equal(low, high) else high.double()
        return Admissible(lo, hi, self.nan, self.free)

    def admits(self, got: Tensor) -> Tensor:
        """Whether each value of ``got`` is admissible; free elements admit anything."""
        exact = got.double()
        fits = (self.lo <= exact) & (exact <= self.hi)
        if self.nan is not None:
            fits = torch.where(self.nan, exact.isnan(), fits)
        if self.free is not None:
            fits = fits | self.free
        return fits


def flushed(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Widens to zero what may have been flushed: gradual underflow and flush-to-zero are both
    legal, and both are monotone, so the hull of both images of the endpoints holds every result."""
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


def _cat_masks(parts: Sequence[Admissible], masks: Sequence[Tensor | None]) -> Tensor | None:
    if all(mask is None for mask in masks):
        return None
    return torch.cat(
        [
            torch.zeros_like(part.lo, dtype=torch.bool) if mask is None else mask
            for part, mask in zip(parts, masks, strict=True)
        ]
    )
