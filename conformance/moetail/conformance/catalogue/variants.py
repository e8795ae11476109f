"""Variants: legal implementations that differ from the reference in bits.

A suite is worth as much for what it accepts: every variant obeys the contract, and a suite that
rejects one is wrong. They take each freedom that the contract gives (the order of sums, FMA, wider
accumulators, flush-to-zero, the error of the inverse RMS, the strategies, the sign of a zero, the
exception of a refusal) to its end.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around
from moetail.conformance.catalogue.change import legal
from moetail.reference import Reference
from moetail.spec import OPERATIONS, Contract, ContractError, Rounding, Step
from moetail.spec.contract import BF16
from moetail.spec.rules import ALLREDUCE, FUSED, GATHER, MOE_OUTPUT

__all__ = ["fma", "fp32_sum"]

TINY = 2.0**-126
"""The smallest normal number of FP32 and of BF16."""

_COMPUTING = tuple(item.name for item in OPERATIONS if item.computes)
_REDUCING = tuple(item.name for item in OPERATIONS if item.reduces)
_NORMING = tuple(item.name for item in OPERATIONS if item.takes("post_eps"))


# --- exact FP32 arithmetic, vectorized ------------------------------------------------------------


def _to_odd(total: Tensor, error: Tensor) -> Tensor:
    """``total + error`` in float64, rounded to odd, where error is below total's last place.

    Rounding to odd keeps the fact that something was cut off, so that a second rounding to a
    format at least two bits narrower gives what one rounding of the exact sum gives.
    """
    bits = total.contiguous().view(torch.int64)
    # Towards zero first: a step back where the error points the other way than the total ...
    back = (error != 0) & ((error < 0) != (total < 0)) & (total != 0)
    chopped = torch.where(back, bits - 1, bits)
    # ... then the last bit set, as the result is inexact.
    odd = torch.where((error != 0) & total.isfinite(), chopped | 1, chopped)
    return torch.where(total.isfinite(), odd.view(torch.float64), total)


def fp32_sum(first: Tensor, second: Tensor) -> Tensor:
    """RN of the exact sum of two float64 tensors into FP32, rounded once."""
    total = first + second
    # TwoSum: the sum's rounding error, exactly.
    part = total - first
    error = (first - (total - part)) + (second - part)
    return _to_odd(total, torch.where(error.isfinite(), error, 0.0)).to(torch.float32)


def fma(weight: Tensor, row: Tensor, total: Tensor) -> Tensor:
    """RN(weight * row + total) for FP32 ``weight`` and ``total`` and a BF16-valued FP32 ``row``.

    The product has 32 bits at most, so float64 holds it exactly (float64's exponents reach well
    past those of any product of FP32 numbers).
    """
    return fp32_sum(weight.double() * row.double(), total.double())


# --- the order of the top-k sum -------------------------------------------------------------------


class Terms(Reference):
    """The reduction from the FP32 products ``[T, K, H]``, zero for -1 routes, by ``combined``."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        live = self.live_routes(index)
        wide = torch.where(live, self.read_weights(weights), 0.0)
        picked = torch.zeros((*index.shape, rows.shape[1]), dtype=torch.float32, device=rows.device)
        picked[live] = rows[index[live].long()].to(torch.float32)
        return self.combined(wide, picked)

    def combined(self, weights: Tensor, rows: Tensor) -> Tensor:
        return self.summed((weights[..., None] * rows).unbind(1))

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        raise NotImplementedError


@legal(*_REDUCING)
class ReversedSum(Terms):
    """Adds the routes from the last to the first."""

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        return functools.reduce(torch.add, reversed(terms))


@legal(*_REDUCING)
class PairwiseSum(Terms):
    """Adds neighbours, then neighbours of the sums, as a tree of warp shuffles does."""

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        level = list(terms)
        while len(level) > 1:
            pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
            level = pairs + level[len(pairs) * 2 :]
        return level[0]


@legal(*_REDUCING)
class HalvesSum(Terms):
    """Adds route k to route k + K/2, the butterfly of a warp."""

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        level = list(terms)
        while len(level) > 1:
            half = (len(level) + 1) // 2
            paired = [left + right for left, right in zip(level, level[half:], strict=False)]
            level = paired + level[len(paired) : half]
        return level[0]


@legal(*_REDUCING)
class ShuffledSum(Terms):
    """Adds the routes in a random order that K alone decides."""

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        order = torch.randperm(len(terms), generator=torch.Generator().manual_seed(len(terms)))
        shuffled: list[Tensor] = [terms[int(k)] for k in order]
        return functools.reduce(torch.add, shuffled)


@legal(*_REDUCING)
class SmallestFirst(Terms):
    """Adds the smallest magnitude first, for every element on its own."""

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        stacked = torch.stack(terms)
        order = stacked.abs().nan_to_num(nan=torch.inf).argsort(dim=0, stable=True)
        return functools.reduce(torch.add, stacked.gather(0, order).unbind(0))


@legal(*_REDUCING)
class LargestFirst(Terms):
    """Adds the largest magnitude first, for every element on its own."""

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        stacked = torch.stack(terms)
        order = stacked.abs().nan_to_num(nan=torch.inf).argsort(dim=0, descending=True, stable=True)
        return functools.reduce(torch.add, stacked.gather(0, order).unbind(0))


@legal(*_REDUCING)
class FourAccumulators(Terms):
    """Keeps four running sums, as unrolled code does, and adds them at the end."""

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        parts = [functools.reduce(torch.add, terms[lane::4]) for lane in range(min(4, len(terms)))]
        return functools.reduce(torch.add, parts)


@legal(*_REDUCING)
class FusedMultiplyAdd(Terms):
    """Adds by FMA: no product is rounded."""

    def combined(self, weights: Tensor, rows: Tensor) -> Tensor:
        total = torch.zeros_like(rows[:, 0])
        for k in range(rows.shape[1]):
            total = fma(weights[:, k, None], rows[:, k], total)
        return total


@legal(*_REDUCING)
class FmaFromTheEnd(Terms):
    """Rounds the last product, and adds the others to it by FMA, backwards."""

    def combined(self, weights: Tensor, rows: Tensor) -> Tensor:
        total = weights[:, -1, None] * rows[:, -1]
        for k in range(rows.shape[1] - 2, -1, -1):
            total = fma(weights[:, k, None], rows[:, k], total)
        return total


@legal(*_REDUCING)
class DoubleAccumulator(Terms):
    """Accumulates in FP64, and rounds to FP32 once before the rounding to BF16."""

    def combined(self, weights: Tensor, rows: Tensor) -> Tensor:
        return (weights.double()[..., None] * rows.double()).sum(dim=1).to(torch.float32)


@legal(*_REDUCING)
class CompensatedSum(Terms):
    """Carries the error of every addition along, and adds it at the end (Neumaier's sum)."""

    def summed(self, terms: tuple[Tensor, ...]) -> Tensor:
        total, error = terms[0], torch.zeros_like(terms[0])
        for term in terms[1:]:
            new = total + term
            part = new - total
            error = error + ((total - (new - part)) + (term - part))
            total = new
        corrected = total + error
        # An overflow, or an infinity among the terms, has no error to correct.
        return torch.where(error.isfinite() & total.isfinite(), corrected, total)


# --- subnormals and zeros -------------------------------------------------------------------------


def _flushed(value: Tensor) -> Tensor:
    """In FP32."""
    value = value.to(torch.float32)
    return torch.where(value.abs() < TINY, torch.copysign(torch.zeros_like(value), value), value)


@legal(*_COMPUTING)
class FlushToZero(Reference):
    """Reads subnormals as zero and writes zero for them, as code built with -ftz does."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        live = self.live_routes(index)
        wide = _flushed(self.read_weights(weights))
        total = torch.zeros((index.shape[0], rows.shape[1]), device=rows.device)
        for k in range(index.shape[1]):
            tokens = live[:, k].nonzero().squeeze(1)
            routed = _flushed(rows[index[tokens, k].long()])
            product = _flushed(wide[tokens, k, None] * routed)
            total[tokens] = _flushed(total[tokens] + product)
        return total

    def round(self, value: Tensor, rounding: Rounding = BF16) -> Tensor:
        return super().round(_flushed(value), rounding)

    def multiply(self, step: Step, value: Tensor, factor: float) -> Tensor:
        return _flushed(super().multiply(step, _flushed(value), factor))

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        return super().mean_square(step, _flushed(value))

    def affine(self, step: Step, value: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        weight = None if weight is None else _flushed(weight)
        return super().affine(step, _flushed(value), inverse, weight)


@legal(*_COMPUTING)
class ZeroSignsFlipped(Reference):
    """Gives every rounded zero the other sign."""

    def round(self, value: Tensor, rounding: Rounding = BF16) -> Tensor:
        rounded = super().round(value, rounding)
        return torch.where(rounded == 0, -rounded, rounded)


@legal(*_REDUCING)
class NegativeZeroStart(Reference):
    """Starts every sum from -0.0, the neutral element, so that negative zeros stay."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().weighted_sum(step, rows, weights, index)
        return torch.where(total == 0, torch.full_like(total, -0.0), total)


# --- norms ----------------------------------------------------------------------------------------


@legal(*_NORMING)
def inverse_at_the_upper_bound(contract: Contract) -> Contract:
    """An inverse RMS too large by just under the permitted 2^-16."""
    return contract.each("inverse_rms", error=0.98 * 2.0**-16)


@legal(*_NORMING)
def inverse_at_the_lower_bound(contract: Contract) -> Contract:
    """An inverse RMS too small by just under the permitted 2^-16."""
    return contract.each("inverse_rms", error=-0.98 * 2.0**-16)


@legal(*_NORMING)
class InverseInDouble(Reference):
    """Mean, root and reciprocal in FP64, the result rounded to FP32."""

    def inverse_rms(self, step: Step, value: Tensor, eps: float) -> Tensor:
        mean = value.double().square().mean(dim=-1, keepdim=True)
        eps32 = float(torch.tensor(eps, dtype=torch.float32))
        return (1.0 / torch.sqrt(mean + eps32)).to(torch.float32)


@legal(*_NORMING)
class InverseByNewton(Reference):
    """The reciprocal root from a guess by its exponent and four Newton steps, without a root."""

    def inverse_rms(self, step: Step, value: Tensor, eps: float) -> Tensor:
        mean = self.mean_square(step, value) + eps
        guess = (0x5F3759DF - (mean.view(torch.int32) >> 1)).view(torch.float32)
        for _ in range(4):
            guess = guess * (1.5 - 0.5 * mean * guess * guess)
        ordinary = (mean > TINY) & (mean < 1.0 / TINY)
        return torch.where(ordinary, guess, super().inverse_rms(step, value, eps))


@legal(*_NORMING)
class MeanBlockByBlock(Reference):
    """Sums the squares, each divided by H first, one after the other in blocks of 64, and then the
    blocks: over all of H one after the other may err by more than the permitted 2^-16."""

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        share = value.to(torch.float32).square() / value.shape[-1]
        padded = torch.nn.functional.pad(share, (0, -share.shape[-1] % 64))
        blocks = padded.view(*share.shape[:-1], -1, 64).cumsum(dim=-1)[..., -1]
        return blocks.cumsum(dim=-1)[..., -1:]


@legal(*_NORMING)
class MeanByLanes(Reference):
    """Sums the squares in 32 lanes, then over the lanes, backwards."""

    def mean_square(self, step: Step, value: Tensor) -> Tensor:
        squares = value.to(torch.float32).square()
        width = squares.shape[-1]
        padded = torch.nn.functional.pad(squares, (0, -width % 32))
        lanes = padded.view(*squares.shape[:-1], -1, 32).flip(-2).sum(dim=-2)
        return lanes.flip(-1).sum(dim=-1, keepdim=True) / width


@legal(*_NORMING)
class AffineTimesInverseFirst(Reference):
    """Computes s * (inv * w)."""

    def affine(self, step: Step, value: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        factor = inverse if weight is None else inverse * weight.to(torch.float32)
        return value.to(torch.float32) * factor


@legal(*_NORMING)
class AffineTimesValueFirst(Reference):
    """Computes (s * w) * inv."""

    def affine(self, step: Step, value: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        product = value.to(torch.float32)
        if weight is not None:
            product = product * weight.to(torch.float32)
        return product * inverse


# --- strategies, ranks and results ----------------------------------------------------------------


class Forced(Around):
    """Runs one strategy for another; both give what the contract says."""

    asked, forced = "", ""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["strategy"] == self.asked:
            call["strategy"] = self.forced
        return compute(call)


@legal(FUSED)
class AlwaysUnfused(Forced):
    """Runs the one-rank operation in two steps also where "fused" is asked."""

    asked, forced = "fused", "unfused"


@legal(FUSED)
class AlwaysFused(Forced):
    """Runs the one-rank operation in one step also where "unfused" is asked."""

    asked, forced = "unfused", "fused"


@legal(GATHER)
class AlwaysOneshot(Forced):
    """Gathers finalized rows also where "twoshot" is asked."""

    asked, forced = "twoshot", "oneshot"


@legal(GATHER)
class AlwaysTwoshot(Forced):
    """Lets the owner run the boundary also where "oneshot" is asked."""

    asked, forced = "oneshot", "twoshot"


@legal(ALLREDUCE)
class RanksFromTheLast(Reference):
    """Sums over ranks from the last to the first, on every rank alike."""

    def sum_ranks(self, step: Step, part: Tensor) -> Tensor:
        return super().sum_ranks(step, part.flip(0))


@legal(ALLREDUCE)
class RanksInDouble(Reference):
    """Sums over ranks in FP64, and rounds to FP32 once before the rounding to BF16."""

    def sum_ranks(self, step: Step, part: Tensor) -> Tensor:
        return part.double().sum(dim=0).to(torch.float32)


@legal(MOE_OUTPUT)
class FinalizedIsCopied(Reference):
    """Returns a tensor of its own also where there is nothing to finalize."""

    def part(self, values: dict[str, Any]) -> Tensor:
        return super().part(values).clone()


@legal(MOE_OUTPUT)
class FinalizedIsPassedOn(Reference):
    """Returns the given tensor itself where there is nothing to finalize."""

    def part(self, values: dict[str, Any]) -> Tensor:
        changed = values["shared_output"] is not None or values["routed_scale"] != 1.0
        finalized: Tensor = values["rows"]
        return super().part(values) if changed or values["map"] is not None else finalized


@legal(*_COMPUTING)
class RefusesByAssertion(Around):
    """Refuses with an AssertionError, as a kernel's launcher does."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        try:
            return compute(call)
        except ContractError as error:
            raise AssertionError(str(error)) from None


@legal(*_COMPUTING)
class RefusesByTypeError(Around):
    """Refuses with a TypeError, as a binding does whose signature does not match."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        try:
            return compute(call)
        except ContractError as error:
            raise TypeError(str(error)) from None
