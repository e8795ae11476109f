"""The contract's arithmetic, computed in other ways than the reference computes it.

Scalars: exact rationals, rounded by integer division. Tensors: float64 where it is exact, and a
rounding that works on the bits of an FP32 number. Nothing here converts to torch.bfloat16 by
``.to``, which is what the reference does and what is under test.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: precision in bits, exponents of its normal numbers."""

    precision: int
    least_exponent: int
    greatest_exponent: int

    def round(self, value: Fraction) -> Fraction | float:
        """To nearest, ties to even; a signed infinity where IEEE 754 says so."""
        if value == 0:
            return value
        magnitude = abs(value)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        exponent = max(exponent, self.least_exponent)
        quantum = Fraction(2) ** (exponent - self.precision + 1)
        units, rest = divmod(magnitude / quantum, 1)
        if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and units % 2 == 1):
            units += 1
        rounded = units * quantum
        sign = 1 if value > 0 else -1
        if rounded >= Fraction(2) ** (self.greatest_exponent + 1):
            return sign * float("inf")
        return sign * rounded


BF16 = Format(precision=8, least_exponent=-126, greatest_exponent=127)
FP32 = Format(precision=24, least_exponent=-126, greatest_exponent=127)


def exact(value: float) -> Fraction:
    return Fraction(float(value))


def as_bf16(bits: Tensor) -> Tensor:
    """Int32 tensor of 16-bit patterns to BF16."""
    return torch.where(bits >= 2**15, bits - 2**16, bits).to(torch.int16).view(torch.bfloat16)


def round_bits(value: Tensor) -> Tensor:
    """FP32 (no NaN) to BF16 by integer arithmetic on the bits: to nearest, ties to even."""
    assert value.dtype is torch.float32
    pattern = value.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    sign, magnitude = pattern >> 31, pattern & 0x7FFFFFFF
    kept, dropped = magnitude >> 16, magnitude & 0xFFFF
    up = (dropped > 0x8000) | ((dropped == 0x8000) & (kept % 2 == 1))
    # A carry out of the mantissa goes into the exponent, and out of the last exponent to infinity.
    return as_bf16(((sign << 15) | (kept + up.to(torch.int64))).to(torch.int32))


def round_exact(value: Tensor) -> Tensor:
    """A float64 tensor that FP32 holds exactly, to BF16."""
    narrow = value.to(torch.float32)
    assert torch.equal(narrow.to(torch.float64), value), "not on a grid that FP32 holds"
    return round_bits(narrow)


def times(value: Tensor, factor: float) -> Tensor:
    """RN(float32(value) * float32(factor)) of BF16 ``value``, through one float64 product.

    8 bits by 24 bits fit float64, so narrowing to FP32 is the one rounding of an FP32 product.
    """
    narrow_factor = torch.tensor([factor], dtype=torch.float64).to(torch.float32)
    return round_bits((value.to(torch.float64) * narrow_factor.to(torch.float64)).to(torch.float32))


def plus(left: Tensor, right: Tensor) -> Tensor:
    """RN(left + right) of BF16 tensors: the float64 sum narrows to what an FP32 add gives."""
    return round_bits((left.to(torch.float64) + right.to(torch.float64)).to(torch.float32))


def finalize(rows: Tensor, weights: Tensor, index: Tensor, routed_scale: float) -> Tensor:
    """reduce, round, scale, for rows and weights on a grid where every FP32 order is exact."""
    num_tokens, top_k = index.shape
    total = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float64)
    for token in range(num_tokens):
        for k in range(top_k):
            row = int(index[token, k])
            if row != -1:
                total[token] += float(weights[token, k]) * rows[row].to(torch.float64)
    return times(round_exact(total), routed_scale)


@dataclass
class Interval:
    """The BF16 values from ``low`` to ``high``, element by element."""

    low: Tensor
    high: Tensor

    @classmethod
    def point(cls, value: Tensor) -> Interval:
        return cls(value, value)

    def holds(self, value: Tensor) -> bool:
        wide = value.to(torch.float64)
        inside = (self.low.to(torch.float64) <= wide) & (wide <= self.high.to(torch.float64))
        return bool(inside.all())

    def decided(self) -> float:
        """The share of elements that have one value."""
        return float((self.low == self.high).to(torch.float64).mean()) if self.low.numel() else 1.0


def reduction(rows: Tensor, weights: Tensor, index: Tensor) -> Interval:
    """round(reduce(...)) over every order: gamma_n = n * 2^-24 / (1 - n * 2^-24)."""
    live = index >= 0
    chosen = rows[index.clamp(min=0).long()].to(torch.float64)
    products = torch.where(live[..., None], chosen * weights.to(torch.float64)[..., None], 0.0)
    total, magnitude = products.sum(dim=1), products.abs().sum(dim=1)
    count = live.sum(dim=1, keepdim=True).to(torch.float64)
    slack = magnitude * (count * 2.0**-24 / (1 - count * 2.0**-24)) + count * 2.0**-149
    return Interval(
        round_bits((total - slack).to(torch.float32)), round_bits((total + slack).to(torch.float32))
    )


def norm(value: Tensor, weight: Tensor | None, eps: float | None) -> Interval:
    """The legal norms of one BF16 input: inverse RMS within 2^-16, two FP32 products."""
    if eps is None:
        return Interval.point(value)
    wide = value.to(torch.float64)
    inverse = 1.0 / torch.sqrt(wide.square().sum(dim=-1, keepdim=True) / value.shape[-1] + eps)
    result = wide * inverse * (1.0 if weight is None else weight.to(torch.float64))
    slack = result.abs() * (2.0**-16 + 2.0**-22)
    return Interval(
        round_bits((result - slack).to(torch.float32)),
        round_bits((result + slack).to(torch.float32)),
    )


def residual_add(value: Interval, residual: Tensor, scales: tuple[float, float] | None) -> Interval:
    ends = [value.low, value.high]
    if scales is not None:
        ends = [times(end, scales[0]) for end in ends]
        residual = times(residual, scales[1])
    low, high = (plus(end, residual) for end in ends)
    return Interval(torch.minimum(low, high), torch.maximum(low, high))


def assert_boundary(
    finalized: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
    result: tuple[Tensor, Tensor | None],
    *,
    decided: float = 0.95,
) -> None:
    """The result is a legal boundary of ``finalized``, nearly all of whose elements have one value.

    ``normalized`` is judged from the result's own hidden, as the contract defines it.
    """
    hidden, normalized = result
    allowed = residual_add(norm(finalized, post_weight, post_eps), residual, scales)
    assert hidden.shape == residual.shape
    assert hidden.dtype is torch.bfloat16
    assert allowed.holds(hidden)
    assert allowed.decided() >= decided
    assert (normalized is None) == (next_eps is None)
    if normalized is not None:
        allowed = norm(hidden, next_weight, next_eps)
        assert normalized.shape == residual.shape
        assert normalized.dtype is torch.bfloat16
        assert allowed.holds(normalized)
        assert allowed.decided() >= decided


def raw(tensor: Tensor) -> bytes:
    """The elements' bytes, in order."""
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit, except that the sign of a zero is free."""
    return (
        left.dtype is right.dtype
        and left.shape == right.shape
        and raw(left + 0.0) == raw(right + 0.0)
    )
