"""Rounding against integers only."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail.conformance.judge import round_bf16
from moetail.conformance.judge.rounding import least, round_to
from moetail.spec.contract import FORMATS, MODES


def integer_rounding(bits: np.ndarray) -> np.ndarray:
    """The BF16 bits of FP32 bit patterns, rounded to nearest even by integer arithmetic."""
    wide = bits.astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.int16).numpy().view(np.uint16)


def check_single(bits: np.ndarray) -> None:
    values = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    nan = values.isnan().numpy()
    for source in (values, values.double()):
        got = round_bf16(source)
        assert got.dtype is torch.bfloat16
        assert (bits_of(got) == integer_rounding(bits))[~nan].all()
        assert got.isnan().numpy()[nan].all()


def test_every_boundary():
    """Each BF16 value, each tie between two of them, and both one FP32 step to either side."""
    value = np.arange(1 << 16, dtype=np.uint64) << 16
    for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check_single(value + offset)


def test_random_single_patterns():
    rng = np.random.default_rng(20240611)
    check_single(rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint64))


def test_no_second_rounding_at_any_tie():
    """A float64 one step off a tie goes to the side it lies on, which torch's conversion, through
    FP32, gets wrong for half of them."""
    low = torch.arange(0x7F7F, dtype=torch.int32)  # all finite magnitudes but the largest
    tie = ((low << 16) | 0x8000).view(torch.float32).double()
    wrong = 0
    for sign in (1.0, -1.0):
        for towards, step in ((0.0, 0), (math.inf, 1)):
            value = sign * torch.nextafter(tie, torch.tensor(towards, dtype=torch.float64))
            expected = (low + step) | (0x8000 if sign < 0 else 0)
            assert (bits_of(round_bf16(value)) == expected.numpy().astype(np.uint16)).all()
            wrong += int((bits_of(value.bfloat16()) != expected.numpy().astype(np.uint16)).sum())
    assert wrong >= 2 * 0x7F7F - 4  # the trap is set: the plain conversion falls into it


def test_overflow_threshold():
    threshold = (2 - 2.0**-8) * 2.0**127
    below = math.nextafter(threshold, 0.0)
    values = torch.tensor([threshold, below, -threshold, -below, 2.0**200], dtype=torch.float64)
    largest = torch.tensor(0x7F7F, dtype=torch.int16).view(torch.bfloat16).item()
    assert round_bf16(values).tolist() == [math.inf, largest, -math.inf, -largest, math.inf]


@given(st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=1))
def test_any_double(exact, values):
    got = round_bf16(torch.tensor(values, dtype=torch.float64)).tolist()
    assert got == [exact.bf16(Fraction(value)) for value in values]


@given(
    st.integers(0, 0x7F7E),
    st.integers(0, 52 - 7),
    st.sampled_from([-1, 0, 1]),
    st.booleans(),
)
def test_around_ties(exact, low, shift, side, negative):
    """A tie, moved by any power of two that float64 can hold beside it."""
    tie = torch.tensor((low << 16) | 0x8000, dtype=torch.int32).view(torch.float32).item()
    value = tie + side * math.ldexp(math.ulp(tie), shift) / 2**7
    value = -value if negative else value
    assert round_bf16(torch.tensor([value], dtype=torch.float64)).item() == exact.bf16(value)


def test_any_layout():
    values = torch.randn(6, 8, dtype=torch.float64)
    assert torch.equal(round_bf16(values.T), round_bf16(values).T)
    assert round_bf16(torch.empty(0, 4, dtype=torch.float64)).shape == (0, 4)


NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-70000, 70000, width=32),
    st.builds(lambda m, e: math.ldexp(m, e), st.integers(-(2**13), 2**13), st.integers(-149, 110)),
)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", [*(mode for mode in MODES if mode != "dither"), "down"])
@settings(max_examples=50, deadline=None)
@given(values=st.lists(NUMBERS, min_size=1, max_size=20))
def test_every_mode_into_every_format(exact, format, mode, values):
    if format == "fp16" and mode != "nearest-even":
        values = [value for value in values if abs(value) < 65000] or [1.0]
    got = round_to(torch.tensor(values, dtype=torch.float64), format, mode)
    assert got.double().tolist() == [exact.into(value, format, mode) for value in values]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", ["half-away", "toward-zero", "odd"])
def test_what_is_not_finite_stays(format, mode):
    got = round_to(torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64), format, mode)
    assert got[:2].tolist() == [math.inf, -math.inf]
    assert bool(got[2].isnan())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_least_magnitude(dtype):
    def of(*values):
        return least(torch.tensor(values, dtype=dtype))

    assert of(3.0, -0.5, 0.0, -0.0) == 0.5
    assert of(0.0, -0.0) == math.inf
    assert of() == math.inf
    assert of(math.nan, -math.inf) == math.inf
    assert of(math.nan, 2.0, math.inf) == 2.0
    tiny = torch.tensor(2.0**-24, dtype=dtype)
    assert of(-tiny.item(), 1.0) == 2.0**-24
    if dtype is not torch.float16:
        assert of(1.0, -(2.0**-133)) == 2.0**-133
