"""The producers' rounding against integers, which share no code with it."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from moetail.conformance.cases.arithmetic import bf16, to_bf16

LARGEST = (2.0 - 2.0**-7) * 2.0**127


def nearest(value: float) -> float:
    """RN to eight bits, or to a multiple of 2^-133, ties to even; without an upper limit."""
    if value == 0 or not math.isfinite(value):
        return value
    quantum = Fraction(2) ** (max(math.frexp(value)[1], -125) - 8)
    return math.copysign(float(round(Fraction(value) / quantum) * quantum), value)


def bits(values: torch.Tensor) -> list[int]:
    return values.view(torch.int64).tolist()


def check(values: list[float]) -> None:
    found = bf16(torch.tensor(values, dtype=torch.float64))
    expected = torch.tensor([nearest(value) for value in values], dtype=torch.float64)
    assert bits(found) == bits(expected)


@given(st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=40))
def test_any_number(values: list[float]) -> None:
    check(values)


@given(
    st.lists(
        st.tuples(
            st.integers(128, 255),
            st.integers(-150, 120),
            st.sampled_from([-(2.0**-40), 0.0, 2.0**-40]),
            st.sampled_from([-1, 1]),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_around_ties(parts: list[tuple[int, int, float, int]]) -> None:
    """A BF16 number and a half of its last place, and beside it; subnormal ones too."""
    check([sign * math.ldexp(top + 0.5 + side, exponent) for top, exponent, side, sign in parts])


def test_zeros_infinities_and_what_is_past_the_largest() -> None:
    check([0.0, -0.0, math.inf, -math.inf, 2.0**-134, 3 * 2.0**-134, -(2.0**-135), 1e308])
    assert bool(bf16(torch.tensor([math.nan], dtype=torch.float64)).isnan())


def test_any_strides() -> None:
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).double()
    assert torch.equal(bf16(values.T), bf16(values).T)
    assert bf16(values[:0]).shape == (0, 5)


@given(st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=40))
def test_as_a_tensor(values: list[float]) -> None:
    made = to_bf16(torch.tensor(values, dtype=torch.float64))
    assert made.dtype is torch.bfloat16
    assert made.double().tolist() == [nearest(value) for value in values]


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_fp32_as_a_tensor(values: list[float]) -> None:
    """As the float64 values do, NaN and what is past the largest number included."""
    single = torch.tensor(values, dtype=torch.float32)
    made, through = to_bf16(single), to_bf16(single.double())
    assert made.dtype is torch.bfloat16
    assert made.isnan().equal(single.isnan())
    assert torch.equal(made.nan_to_num(7.0), through.nan_to_num(7.0))


def test_large_tensors_element_by_element() -> None:
    """Those are taken in pieces of 65536: one and a last element, and the ends of both."""
    values = torch.randn(2, 65536 + 3, generator=torch.Generator().manual_seed(2)).double()
    values[1, -1] = 1 + 2.0**-8 + 2.0**-40  # above a tie
    flat = values.view(-1).tolist()
    for at in (0, 65535, 65536, 131071, 131072, len(flat) - 1):
        expected = nearest(flat[at])
        assert bf16(values).view(-1)[at] == expected
        assert to_bf16(values).view(-1)[at] == expected
    assert to_bf16(values).shape == values.shape
