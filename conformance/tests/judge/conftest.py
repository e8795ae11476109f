"""Oracles for the judge: exact arithmetic on Python integers, sharing no code with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

import pytest

from moetail.spec import Rounding

TINY = 2.0**-126
INF = math.inf
NAN = math.nan

# Bits of the significand, exponent of the smallest normal number, largest number.
FORMATS = {
    "bf16": (8, -126, (2 - 2.0**-7) * 2.0**127),
    "fp16": (11, -14, 65504.0),
    "tf32": (11, -126, (2 - 2.0**-10) * 2.0**127),
    "fp32": (24, -126, (2 - 2.0**-23) * 2.0**127),
}


@lru_cache(maxsize=1 << 18)
def nearest(value: Fraction, bits: int) -> float:
    """RN to ``bits`` significant bits in FP32's exponent range, by integers only."""
    if value == 0:
        return 0.0
    top, bottom = abs(value.numerator), value.denominator
    exponent = top.bit_length() - bottom.bit_length()
    # 2^exponent <= |value| < 2^(exponent + 1)
    if (top << max(0, -exponent)) < (bottom << max(0, exponent)):
        exponent -= 1
    quantum = max(exponent, -126) - (bits - 1)
    quotient, rest = divmod(top << max(0, -quantum), bottom << max(0, quantum))
    half = 2 * rest - (bottom << max(0, quantum))
    if half > 0 or (half == 0 and quotient & 1):
        quotient += 1
    magnitude = Fraction(quotient) * Fraction(2) ** quantum
    result = INF if magnitude >= Fraction(2) ** 128 else float(magnitude)
    return result if value > 0 else -result


class Exact:
    """FP32 and BF16 operations on Python floats that hold such numbers."""

    nearest = staticmethod(nearest)

    @staticmethod
    def bf16(value: float | Fraction) -> float:
        """RN into BF16 of a number, an infinity or NaN."""
        if isinstance(value, float) and not math.isfinite(value):
            return value
        return nearest(Fraction(value), 8)

    @staticmethod
    def into(value: float, format: str, mode: str = "nearest-even") -> float:
        """A value rounded into a format: by its mode between the two numbers around it."""
        bits, least, largest = FORMATS[format]
        if not math.isfinite(value) or value == 0:
            return value
        quantum = Fraction(2) ** (max(math.frexp(value)[1] - 1, least) - (bits - 1))
        below = math.floor(Fraction(value) / quantum)
        rest = Fraction(value) / quantum - below
        even = below if below % 2 == 0 else below + 1
        odd = below if below % 2 else below + 1
        inward = below if value > 0 else below + 1
        at_tie = {
            "nearest-even": even,
            "half-away": 2 * below + 1 - inward,
            "half-down": inward,
            "half-up": below + 1,
        }
        if rest == 0:
            steps = below
        elif mode in at_tie:
            steps = at_tie[mode] if 2 * rest == 1 else below + (2 * rest > 1)
        else:
            steps = {"toward-zero": inward, "up": below + 1, "down": below, "odd": odd}[mode]
        result = float(steps * quantum)
        return result if abs(result) <= largest else math.copysign(INF, value)

    @classmethod
    def choices(cls, value: float, rounding: Rounding) -> set[float]:
        """What a rounding may make of an FP32 value: of a dithered one either neighbour."""
        if rounding.through:
            value = cls.into(value, rounding.through)
        modes = ("down", "up") if rounding.mode == "dither" else (rounding.mode,)
        return {cls.into(value, rounding.format, mode) for mode in modes}

    @staticmethod
    def flush(value: float) -> float:
        return 0.0 if abs(value) < TINY else value

    @staticmethod
    def fma(a: float, b: float, c: float) -> float:
        """FP32 a * b + c, rounded once."""
        if not all(map(math.isfinite, (a, b, c))):
            return a * b + c
        return nearest(Fraction(a) * Fraction(b) + Fraction(c), 24)

    @classmethod
    def mul(cls, a: float, b: float) -> float:
        return cls.fma(a, b, 0.0)

    @classmethod
    def add(cls, a: float, b: float) -> float:
        return cls.fma(a, 1.0, b)

    @classmethod
    def sums(
        cls, pairs: Sequence[tuple[float, float]], *, fused: bool = True, underflow: str = "gradual"
    ) -> set[float]:
        """Every FP32 result of sum w * x, over all orders, all association trees and all choices
        of FMA. ``underflow``: "gradual", "flush" (inputs and results, throughout), or "mixed"
        (each operation may do either)."""
        flushing = {"gradual": (False,), "flush": (True,), "mixed": (False, True)}[underflow]

        def results(a: float, b: float, c: float) -> Iterable[float]:
            for flush in flushing:
                if flush:
                    yield cls.flush(cls.fma(cls.flush(a), cls.flush(b), cls.flush(c)))
                else:
                    yield cls.fma(a, b, c)

        reach: dict[frozenset[int], set[float]] = {}
        everything = range(len(pairs))
        for k in everything:
            reach[frozenset({k})] = set(results(*pairs[k], 0.0))
        for size in range(2, len(pairs) + 1):
            for members in combinations(everything, size):
                subset, found = frozenset(members), set()
                for count in range(1, size):
                    for part in combinations(members, count):
                        left = frozenset(part)
                        for a in reach[left]:
                            for b in reach[subset - left]:
                                found.update(results(a, 1.0, b))
                if fused:
                    for k in members:
                        for c in reach[subset - {k}]:
                            found.update(results(*pairs[k], c))
                reach[subset] = _one_nan(found)
        return reach[frozenset(everything)] if pairs else {0.0}


def _one_nan(values: set[float]) -> set[float]:
    """NaN equals nothing, so a set keeps every one of them."""
    numbers = {value for value in values if value == value}
    return numbers | ({NAN} if len(numbers) < len(values) else set())


@pytest.fixture(scope="session")
def exact() -> type[Exact]:
    return Exact
