"""FP32 values rounded to fewer bits: to nearest as the contract asks, and as others do it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moetail.spec.contract import Rounding

__all__ = ["narrowed", "rounded"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DROPPED = {"bf16": 16, "tf32": 13}  # bits of FP32's mantissa that the format lacks

# What is added to the bits of an FP32 number, as int64, before the low ones are cut off; ``last``
# is one unit of the last bit that is kept.
_ADDENDS: dict[str, Callable[[Tensor, int], Tensor | int]] = {
    "nearest-even": lambda bits, last: last // 2 - 1 + (bits & last != 0).long(),
    "half-away": lambda bits, last: last // 2,
    "half-down": lambda bits, last: last // 2 - 1,
    "half-up": lambda bits, last: last // 2 - (bits >> 31),
    "toward-zero": lambda bits, last: 0,
    "up": lambda bits, last: (last - 1) * (1 - (bits >> 31)),
    "odd": lambda bits, last: torch.where(bits & (last - 1) != 0, ~bits & last, 0),
    # A hash of the value, so that runs repeat.
    "dither": lambda bits, last: ((bits * 0x9E3779B1) >> 16) & (last - 1),
}


def rounded(value: Tensor, rounding: Rounding) -> Tensor:
    """FP32 ``value`` in the rounding's format: a tensor of its dtype, of FP32 for TF32."""
    if rounding.through:
        value = narrowed(value.to(torch.float32), rounding.through)
    if rounding.mode == "nearest-even" and rounding.format in _DTYPES:
        return value.to(_DTYPES[rounding.format])
    cut = _cut(value.to(torch.float32), _DROPPED[rounding.format], _ADDENDS[rounding.mode])
    return cut.to(_DTYPES.get(rounding.format, torch.float32))


def narrowed(value: Tensor, to: str) -> Tensor:
    """FP32 to nearest in another format, and back."""
    return value if to == "fp32" else rounded(value, Rounding(to)).to(torch.float32)


def _cut(value: Tensor, dropped: int, addend: Callable[[Tensor, int], Tensor | int]) -> Tensor:
    """As kernels do by hand: add to the bits that go, and cut them off. NaN and infinity stay."""
    bits = value.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    kept = (bits + addend(bits, 1 << dropped)) & (0xFFFFFFFF << dropped) & 0xFFFFFFFF
    signed = torch.where(kept >= 1 << 31, kept - (1 << 32), kept).to(torch.int32)
    return torch.where(value.isfinite(), signed.view(torch.float32), value)
