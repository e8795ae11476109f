"""Rounding in float64 and seeded generators: what the value sources are computed with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "bf16",
    "coins",
    "fp32",
    "generator",
    "integers",
    "signs",
    "stable_seed",
    "to_bf16",
    "uniform",
]

_DROPPED = 52 - 7  # bits of float64's mantissa that BF16's lacks
_MIN_NORMAL = 2.0**-126
_QUANTUM = 2.0**-133  # between BF16's subnormals
_PIECE = 1 << 16  # elements whose intermediates stay in a cache


def bf16(values: Tensor) -> Tensor:
    """RN of float64 values into BF16's grid, still float64.

    torch casts float64 to BF16 through FP32, which rounds twice; this rounds once. What is past
    BF16's largest number stays finite: the exponent is float64's.
    """
    return _by_pieces(_rounded, values, torch.float64)


def _rounded(values: Tensor) -> Tensor:
    bits = values.view(torch.int64)
    last = (bits >> _DROPPED) & 1  # of a tie, the even one: a carry where the last kept bit is set
    carried = (bits + last).add_((1 << (_DROPPED - 1)) - 1)
    rounded = carried.bitwise_and_(-1 << _DROPPED).view(torch.float64)
    magnitude = values.abs()
    subnormal, special = magnitude < _MIN_NORMAL, ~(magnitude < torch.inf)
    if bool(subnormal.any()):
        # Scaling is exact, and torch rounds halves to even.
        rounded[subnormal] = torch.round(values[subnormal] / _QUANTUM) * _QUANTUM
    if bool(special.any()):
        rounded[special] = values[special]
    return rounded


def _by_pieces(function: Callable[[Tensor], Tensor], values: Tensor, dtype: torch.dtype) -> Tensor:
    """``function`` of every element: what large tensors take is mostly the way to memory."""
    made = torch.empty(values.shape, dtype=dtype)
    flat, places = values.contiguous().view(-1), made.view(-1)
    for at in range(0, flat.numel(), _PIECE):
        places[at : at + _PIECE] = function(flat[at : at + _PIECE])
    return made


def fp32(values: Tensor) -> Tensor:
    """RN of float64 values into FP32, still float64."""
    return values.to(torch.float32).to(torch.float64)


def to_bf16(values: Tensor) -> Tensor:
    """float64 or FP32 values as a BF16 tensor, rounded once."""
    if values.dtype is torch.float32:
        return values.to(torch.bfloat16)
    return _by_pieces(_rounded, values, torch.bfloat16)


def stable_seed(*parts: object) -> int:
    """The same 63 bits for the same parts in every process and on every machine."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator of its own for those parts."""
    made = torch.Generator()
    made.manual_seed(stable_seed(*parts))
    return made


def integers(low: int, high: int, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """Integers of [low, high], both included, as float64."""
    return torch.randint(low, high + 1, shape, generator=gen).to(torch.float64)


def coins(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """True or False."""
    return torch.randint(0, 2, shape, generator=gen, dtype=torch.bool)


def signs(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """-1 or +1, as float64."""
    return coins(shape, gen).to(torch.float64) * 2 - 1


def uniform(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """Float64 of [0, 1)."""
    return torch.rand(shape, generator=gen, dtype=torch.float64)
