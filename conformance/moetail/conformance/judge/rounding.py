"""Rounding to nearest, ties to even, into BF16 and FP32, and the constants of both formats.

RN is monotone: x <= y implies RN(x) <= RN(y). So the image of an interval of reals under a
rounding is found at its endpoints, which is what carries every later proof.
"""

from __future__ import annotations

import ctypes

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

INFINITY = float("inf")

_TIE = 0x8000
_DROPPED = 0xFFFF


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
    if x.dtype is torch.bfloat16:
        return x
    if x.dtype is not torch.float64:
        return x.to(torch.float32).to(torch.bfloat16)
    single = x.contiguous().to(torch.float32)
    bits = single.view(torch.int32)
    tie = (bits & _DROPPED) == _TIE
    if bool(tie.any()):
        # Infinities are no ties; a NaN may look like one, compares false, and stays a NaN: the
        # step is then 0.
        wide = single.double()
        step = (x.abs() > wide.abs()).int() - (x.abs() < wide.abs()).int()
        single = torch.where(tie, bits + step, bits).view(torch.float32)
    return single.to(torch.bfloat16)


def float32(value: float) -> float:
    """A Python float as a kernel receives it: rounded into FP32."""
    return ctypes.c_float(value).value


def leading_power(x: Tensor) -> Tensor:
    """2^floor(log2 x) of positive normal float64 values; 0 of 0. Half an ulp of x in FP32 is u
    times this, or less than that in FP32's subnormal range."""
    return (x.contiguous().view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)


def bf16_bits(value: Tensor) -> int:
    """The 16 bits of one BF16 value."""
    return int(value.to(torch.bfloat16).reshape(1).view(torch.int16).item()) & 0xFFFF
