"""Oracles for the judge: exact arithmetic on Python integers, sharing no code with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

import pytest

TINY = 2.0**-126
INF = math.inf
NAN = math.nan


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
