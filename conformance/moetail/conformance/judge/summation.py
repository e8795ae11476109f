"""FP32 sums in any order: what they can give.

The sum of leaves t_1 .. t_n is evaluated by some binary tree of FP32 additions. A leaf that is a
product is rounded first, or enters its first addition exactly (FMA). Three bounds, each sound, and
each looked at only where the one before leaves more than one value after the rounding behind it.

1. *Rounding errors add up.* An addition returns its exact sum plus a local error, later additions
   pass that error on as it is, so the result is S plus all local errors. A product's is at most
   u * |t_k|, and none if the product fits 24 bits. Each computed partial sum is
   sum over A of t_k * (1 + theta_k) for some set A and |theta_k| <= gamma_n, so its magnitude is at
   most B = max(P, N) * (1 + gamma_n), with P and N the sums of the positive and of the negative
   leaves' magnitudes: positive leaves alone raise it, negative ones alone lower it. Rounding a
   number of magnitude at most B errs by at most u * 2^floor(log2 B), so

       |a - S| <= u * M + (n - 1) * u * 2^floor(log2 B),    M = P + N.

   This is never wider than the textbook gamma_n * M by more than second order terms, and some
   four times tighter where signs mix.
2. *A common grid.* If all leaves are multiples of g and M <= 2^24 * g, then each partial sum is a
   multiple of g of magnitude at most 2^24 * g, which FP32 holds: every order is exact and gives S.
   With g >= 2^-126 no partial sum is subnormal either.
3. *All orders at once*, for n <= 8. Let R(A) be the smallest interval with all results for the
   subset A of leaves. The last operation adds the results for a split of A, or fuses one leaf's
   exact product into the result for the rest. RN is monotone, and the two sides of a split are
   evaluated independently, so R(A)'s endpoints are the extremes, over the last operation, of the
   rounded sums of endpoints: 3^n small steps instead of all trees, and both endpoints are reached
   by some legal evaluation. The exactly rounded S is admitted as well, for an implementation that
   accumulates in FP64. With 6 to 8 leaves only the first 256 undecided elements of a token are
   followed: random rows have some ten, rows that cancel throughout would take minutes.

Flush-to-zero adds to 1. what may vanish (see ``_unusual_sum`` in ``reduction``), and to 3. the hull
of each subnormal result with zero.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import flushed
from moetail.conformance.judge.rounding import (
    FP32_OVERFLOW,
    INFINITY,
    TINY,
    UNIT,
    leading_power,
    round_fp32,
    round_to,
    sum_to_odd,
)
from moetail.spec.contract import BF16, Rounding

MAX_EXACT = 8
"""The most leaves whose orders are followed one and all: 3^8 steps for an element."""

_CHEAP = 5
_DEEP = 256

NO_UNDERFLOW = 2.0**-93
"""Without a nonzero term below this no partial sum can be subnormal: exact products of a BF16 and
an FP32 number have 32 bits, so all terms, rounded or not, are multiples of 2^-126."""

_DOUBLE_UNIT = 2.0**-53
_BLOCK = 1 << 16  # elements at a time at most
_STEPS = 1 << 24  # of bound 3 at a time: what fits a CPU's caches, and keeps a GPU busy


def error_bound(total: Tensor, magnitude: Tensor, leaves: Tensor | int, *, exact: bool) -> Tensor:
    """Bound 1 on |a - total|, float64's own error in ``total`` and ``magnitude`` included.

    ``exact`` says that a product of two leaves' factors always fits FP32's 24 bits.
    """
    count = torch.as_tensor(leaves, dtype=torch.float64, device=total.device)
    growth = 1.0 + 2.0 * (count + 1.0) * UNIT
    largest = 0.5 * (magnitude + total.abs()) * growth
    error = (count - 1.0).clamp(min=0.0) * (UNIT * leading_power(largest))
    products = 0.0 if exact else UNIT
    return error * (1.0 + 2.0**-40) + magnitude * (products + 2.0 * (count + 1.0) * _DOUBLE_UNIT)


def on_common_grid(leaves: Tensor, magnitude: Tensor, bits: int, least: float) -> Tensor:
    """Bound 2: whether all leaves [n, A] are multiples of one power of two g >= ``least`` with
    magnitude <= 2^bits * g. float64 sums of such leaves are exact, too, up to bits = 50."""
    # The power of two above magnitude / 2^bits, doubled at an exact power: never too small, and
    # at most one bit short of the best grid.
    grid = (leading_power(magnitude) * 2.0 ** (1 - bits)).clamp(min=least)
    magic = grid * (1.5 * 2.0**52)
    return ((leaves + magic) - magic == leaves).all(dim=0)


def undecided(lo: Tensor, hi: Tensor, to: Rounding) -> tuple[Tensor, Tensor]:
    """Where bound 1 [T, H] leaves more than one value after the rounding behind the sum, and for
    which of those bound 3 is worth its price. Both depend on the token alone, so on no chunk."""
    if to.format == "fp32":  # nearly all differ there: what counts is what is left of them in BF16
        to = BF16
    if to != BF16:
        lo, hi = round_fp32(lo).double(), round_fp32(hi).double()
    mode = "down" if to.mode == "dither" else to.mode
    need = round_to(lo, to.format, mode) != round_to(hi, to.format, mode)
    return need, (need.cumsum(dim=-1) <= _DEEP)[need]


def narrow(
    lo: Tensor,
    hi: Tensor,
    deep: Tensor,
    leaf_lo: Tensor,
    leaf_hi: Tensor,
    *,
    products: bool,
) -> tuple[Tensor, Tensor]:
    """Bounds 2 and 3 for elements [A] of which 1 gave [lo, hi].

    ``leaf_*`` [n, A] are the leaves as intervals, exact and in float64, with zero in the interval
    where a leaf may be read as zero; ``products`` says that they may enter by FMA. Zero leaves are
    allowed. Orders may overflow to one infinity, not to both.
    """
    magnitude = torch.maximum(leaf_lo.abs(), leaf_hi.abs()).sum(dim=0)
    point = (leaf_lo == leaf_hi).all(dim=0)
    sum_lo, sum_hi = leaf_lo.sum(dim=0), leaf_hi.sum(dim=0)
    grid = point & (magnitude < FP32_OVERFLOW) & on_common_grid(leaf_lo, magnitude, 24, TINY)
    lo, hi = torch.where(grid, sum_lo, lo), torch.where(grid, sum_hi, hi)

    # Leaves that are zero take no part: sort them last, and look at each count on its own.
    present = (leaf_lo != 0) | (leaf_hi != 0)
    count = present.sum(dim=0)
    order = torch.argsort(present.to(torch.int8), dim=0, descending=True, stable=True)
    leaf_lo, leaf_hi = leaf_lo.gather(0, order), leaf_hi.gather(0, order)
    exact64 = on_common_grid(leaf_lo, magnitude, 50, 0.0)
    exact64 &= on_common_grid(leaf_hi, magnitude, 50, 0.0)
    slack = torch.where(exact64, 0.0, magnitude * (leaf_lo.shape[0] * 2.0 * _DOUBLE_UNIT))
    smallest = torch.where(present, torch.minimum(leaf_lo.abs(), leaf_hi.abs()), INFINITY)
    normal = bool((smallest >= NO_UNDERFLOW).all())
    for leaves in range(1, min(MAX_EXACT, leaf_lo.shape[0]) + 1):
        chosen = (count == leaves) & ~grid
        if leaves > _CHEAP:
            chosen &= deep
        where = chosen.nonzero().flatten()
        block = min(_BLOCK, _STEPS // 3**leaves)
        for at in torch.split(where, block) if len(where) else ():
            leaf = leaf_lo[:leaves, at], leaf_hi[:leaves, at]
            part_lo, part_hi = _all_orders(*leaf, products=products, normal=normal)
            once_lo, once_hi = flushed(sum_lo[at] - slack[at], sum_hi[at] + slack[at])
            lo[at] = torch.minimum(part_lo, round_fp32(once_lo)).double()
            hi[at] = torch.maximum(part_hi, round_fp32(once_hi)).double()
    return lo, hi


def _all_orders(
    leaf_lo: Tensor, leaf_hi: Tensor, *, products: bool, normal: bool
) -> tuple[Tensor, Tensor]:
    """Bound 3: R of the full set, FP32 [A], from leaves [n, A], none of them zero.

    What counts as subnormal is taken before the rounding, which is the wider choice; hardware does
    it either way. ``normal`` says that nothing can be subnormal.
    """
    leaves = leaf_lo.shape[0]
    # A leaf is the product itself on its way into an FMA, and rounded otherwise.
    low, high = (leaf_lo, leaf_hi) if normal else flushed(leaf_lo, leaf_hi)
    lo = torch.zeros(1 << leaves, leaf_lo.shape[1], dtype=torch.float32, device=leaf_lo.device)
    hi = torch.zeros_like(lo)
    for k in range(leaves):
        lo[1 << k], hi[1 << k] = round_fp32(low[k]), round_fp32(high[k])
    for subsets, left, right, rest, single in _splits(leaves, leaf_lo.device):
        low = (lo[left] + lo[right]).amin(dim=1)
        high = (hi[left] + hi[right]).amax(dim=1)
        if products:
            fused_low = sum_to_odd(lo[rest].double(), leaf_lo[single]).amin(dim=1)
            fused_high = sum_to_odd(hi[rest].double(), leaf_hi[single]).amax(dim=1)
            if not normal:
                fused_low, fused_high = flushed(fused_low, fused_high)
            low = torch.minimum(low, round_fp32(fused_low))
            high = torch.maximum(high, round_fp32(fused_high))
        # A subnormal sum of two FP32 numbers is exact.
        lo[subsets], hi[subsets] = (low, high) if normal else flushed(low, high)
    return lo[-1], hi[-1]


@lru_cache(maxsize=64)
def _splits(
    leaves: int, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], ...]:
    """For each size of subset: the subsets [C], their splits [C, 2^(size-1) - 1] left and right,
    and, for FMA, the rest and the single leaf [C, size]. Subsets are bit masks."""
    sizes = []
    for size in range(2, leaves + 1):
        subsets, left, right, rest, single = [], [], [], [], []
        for members in combinations(range(leaves), size):
            mask = sum(1 << k for k in members)
            # The lowest member always goes left, so that each unordered split occurs once.
            others = members[1:]
            lefts = [
                (1 << members[0]) | sum(1 << k for j, k in enumerate(others) if choice >> j & 1)
                for choice in range((1 << len(others)) - 1)
            ]
            subsets.append(mask)
            left.append(lefts)
            right.append([mask ^ part for part in lefts])
            rest.append([mask ^ (1 << k) for k in members])
            single.append(list(members))
        sizes.append(
            tuple(torch.tensor(x, device=device) for x in (subsets, left, right, rest, single))
        )
    return tuple(sizes)  # type: ignore[arg-type]
