"""round_bf16 against integers only."""

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetail.conformance.judge import round_bf16


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
