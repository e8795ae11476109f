"""Rounding into the formats that a contract names, and the constants of FP32 and BF16.

Every rounding here is monotone: x <= y implies RN(x) <= RN(y), and so for the other modes. So the
image of an interval of reals under a rounding is found at its endpoints, which is what carries
every later proof.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

UNIT = 2.0**-24
"""u, the largest relative error of one rounding into FP32."""

TINY = 2.0**-126
"""The smallest normal number of FP32, and of BF16, which has the same exponents."""

HALF_QUANTUM = 2.0**-150
"""The largest absolute error of a rounding into the subnormal numbers of FP32."""

FP32_OVERFLOW = 2.0**128 - 2.0**103
"""The smallest magnitude that FP32 rounds to infinity: the tie above its largest number."""

BF16_OVERFLOW = 2.0**128 - 2.0**119
"""The same of BF16."""

INFINITY = float("inf")

_TIE = 0x8000
_DROPPED = 0xFFFF

_FORMATS: Mapping[str, tuple[torch.dtype, int, float, float]] = {
    # as which dtype it is held, bits of the significand, smallest normal, largest number
    "bf16": (torch.bfloat16, 8, TINY, 2.0**128 - 2.0**120),
    "fp16": (torch.float16, 11, 2.0**-14, 65504.0),
    "tf32": (torch.float32, 11, TINY, 2.0**128 - 2.0**117),
    "fp32": (torch.float32, 24, TINY, 2.0**128 - 2.0**104),
}

_BITS = {
    torch.bfloat16: (torch.int16, "<f"),
    torch.float16: (torch.int16, "<e"),
    torch.float32: (torch.int32, "<f"),
}

# A value in units of the last place that is kept, to an integer.
_MODES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nearest-even": torch.round,
    "half-away": lambda x: torch.copysign((x.abs() + 0.5).floor(), x),
    "half-down": lambda x: torch.copysign((x.abs() - 0.5).ceil(), x),
    "half-up": lambda x: (x + 0.5).floor(),
    "toward-zero": torch.trunc,
    "up": torch.ceil,
    "down": torch.floor,
    "odd": lambda x: torch.where(x == x.floor(), x, 2.0 * (0.5 * x).floor() + 1.0),
}


def round_fp32(x: Tensor) -> Tensor:
    """RN of float64 values into FP32: one rounding, done by the conversion."""
    return x.to(torch.float32)


def round_bf16(x: Tensor) -> Tensor:
    """RN of float64 (or FP32) values into BF16, exactly; a ``bfloat16`` tensor.

    torch converts float64 to BF16 through FP32, which is two roundings. They differ from one only
    where the first lands on a tie of the second: BF16's ties are FP32 numbers, so x and RN_fp32(x)
    lie on the same side of every tie unless RN_fp32(x) is one. There, and only where x itself is
    not the tie, the FP32 value is moved one step towards x, off the tie.
    """
    if x.dtype is not torch.float64:
        return x.to(torch.bfloat16)
    x = x.contiguous()
    single = x.to(torch.float32)
    bits = single.view(torch.int32).view(-1)
    at = ((bits & _DROPPED) == _TIE).nonzero().squeeze(1)
    if len(at):
        # Infinities are no ties; a NaN may look like one, compares false, and stays a NaN: the
        # step is then 0.
        exact, wide = x.view(-1)[at].abs(), single.view(-1)[at].double().abs()
        bits[at] += (exact > wide).int() - (exact < wide).int()
    return single.to(torch.bfloat16)


def round_to(x: Tensor, format: str, mode: str = "nearest-even") -> Tensor:
    """FP32 values, as float64, rounded into one of the contract's formats, in one of its modes, or
    "down"; a tensor of the dtype that holds the format, float32 for "tf32"."""
    dtype, bits, least, largest = _FORMATS[format]
    if mode == "nearest-even" and format in ("bf16", "fp32"):
        return round_bf16(x) if format == "bf16" else round_fp32(x)
    unit = leading_power(x.abs()).clamp(min=least) * 2.0 ** (1 - bits)
    # Scaling by a power of two is exact, and so are the sums with a half: FP32 has 24 bits.
    kept = _MODES[mode](x / unit) * unit
    kept = torch.where(kept.abs() > largest, torch.copysign(kept.new_tensor(INFINITY), x), kept)
    return torch.where(x.isfinite(), kept, x).to(dtype)


def float32(value: float) -> float:
    """A Python float as a kernel receives it: rounded into FP32."""
    return ctypes.c_float(value).value


def sum_to_odd(accumulator: Tensor, product: Tensor) -> Tensor:
    """A float64 that rounds into FP32 as the exact sum does: where the float64 sum is inexact, it
    is moved one step towards the exact sum, so that it is no tie of FP32 unless the sum is one."""
    total = accumulator + product
    back = total - accumulator
    error = (accumulator - (total - back)) + (product - back)
    towards = torch.copysign(torch.full_like(error, INFINITY), error)
    return torch.where(error != 0, torch.nextafter(total, towards), total)


def leading_power(x: Tensor) -> Tensor:
    """2^floor(log2 x) of positive normal float64 values; 0 of 0. Half an ulp of x in FP32 is u
    times this, or less than that in FP32's subnormal range."""
    return (x.contiguous().view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)


def least(values: Tensor) -> float:
    """The smallest nonzero magnitude, infinity if there is none; NaN and infinities are large."""
    if not values.numel():
        return INFINITY
    if values.dtype is torch.float64:
        magnitude = values.abs()
        smallest = float(magnitude.amin())
        if smallest > 0.0:
            return smallest
        return float(magnitude.masked_fill(~(magnitude > 0), INFINITY).amin())
    kind, code = _BITS[values.dtype]
    # Magnitudes as integers, less one so that zero comes last.
    bits = int(((values.contiguous().view(kind) - 1) & torch.iinfo(kind).max).amin()) + 1
    if values.dtype is torch.bfloat16:
        bits <<= 16
    smallest = struct.unpack(code, bits.to_bytes(4, "little")[: struct.calcsize(code)])[0]
    return smallest if smallest > 0.0 else INFINITY


def bf16_bits(value: Tensor) -> int:
    """The 16 bits of one BF16 value."""
    return int(value.to(torch.bfloat16).reshape(1).view(torch.int16).item()) & 0xFFFF
