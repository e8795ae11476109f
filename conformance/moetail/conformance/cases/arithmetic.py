"""Rounding in float64 and seeded generators: what the value sources are computed with."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from moetail.conformance.judge.rounding import round_bf16

__all__ = [
    "bf16",
    "coins",
    "fp32",
    "generator",
    "integers",
    "signs",
    "stable_seed",
    "uniform",
]


def bf16(values: Tensor) -> Tensor:
    """RN of float64 values into BF16, still float64."""
    return round_bf16(values).to(torch.float64)


def fp32(values: Tensor) -> Tensor:
    """RN of float64 values into FP32, still float64."""
    return values.to(torch.float32).to(torch.float64)


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
