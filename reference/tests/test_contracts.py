"""Contracts other than Beam's: every rounding, and every choice of an op, on exact rationals."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moetail.reference import Stages
from moetail.reference.rounding import narrowed, rounded
from moetail.spec import BEAM, Contract, Rounding
from moetail.spec.contract import BF16 as NEAREST

FORMATS = {"bf16": (8, -126), "fp16": (11, -14), "tf32": (11, -126)}


def fp32_of_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


# Bits that go are often 0, 1, a half or all but one, where ways of rounding part.
_LOW = st.sampled_from([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])


def between(least: int, greatest: int) -> st.SearchStrategy[float]:
    """FP32 numbers of either sign with exponents in a range."""
    return st.builds(
        lambda sign, exponent, high, low: fp32_of_bits(
            sign << 31 | exponent + 127 << 23 | high << 16 | low
        ),
        st.integers(0, 1),
        st.integers(least, greatest),
        st.integers(0, 127),
        _LOW,
    )


moderate, of_fp16 = between(-100, 100), between(-13, 14)
ordinary = st.integers(-255, 255).map(float)
weight = st.integers(-(2**20), 2**20).map(lambda value: value / 2.0**20)


class With(Stages):
    def __init__(self, contract: Contract) -> None:
        self.contract = contract


def through(contract: Contract, stage: str, values: dict[str, Any]) -> float:
    return float(With(contract).through([stage], values))


def neighbours(value: Fraction, name: str) -> tuple[Fraction, Fraction]:
    """The numbers of a format at ``value`` or next to it, the one nearer to zero first."""
    precision, least = FORMATS[name]
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    quantum = Fraction(2) ** (max(exponent, least) - precision + 1)
    sign = 1 if value > 0 else -1
    down = magnitude // quantum * quantum
    return sign * down, sign * (down if down == magnitude else down + quantum)


def expected(value: Fraction, name: str, mode: str) -> Fraction:
    near, far = neighbours(value, name)
    if near == far:
        return near
    middle = (near + far) / 2
    quantum = abs(far - near)
    even = near if (abs(near) / quantum) % 2 == 0 else far
    nearest = near if abs(value - near) < abs(value - far) else far
    upper = max(near, far)
    return {
        "nearest-even": even if value == middle else nearest,
        "half-away": far if value == middle else nearest,
        "half-down": near if value == middle else nearest,
        "half-up": upper if value == middle else nearest,
        "toward-zero": near,
        "up": upper,
        "odd": far if even == near else near,
    }[mode]


@pytest.mark.parametrize("name", ["bf16", "tf32"])
@pytest.mark.parametrize(
    "mode", ["nearest-even", "half-away", "half-down", "half-up", "toward-zero", "up", "odd"]
)
@given(value=moderate)
def test_every_way_of_rounding(name, mode, value):
    made = float(rounded(torch.tensor([value]), Rounding(name, mode)))
    assert made == float(expected(Fraction(value), name, mode))


@given(value=moderate)
def test_dither_gives_a_neighbour_and_always_the_same(value):
    first, again = (float(rounded(torch.tensor([value]), Rounding("bf16", "dither"))) for _ in "12")
    assert first == again
    assert Fraction(first) in neighbours(Fraction(value), "bf16")


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
@given(value=of_fp16)
def test_narrowing_keeps_a_number_of_the_format(name, value):
    made = narrowed(torch.tensor([value]), name)
    assert made.dtype is torch.float32
    assert float(made) == float(expected(Fraction(value), name, "nearest-even"))


@given(value=of_fp16)
def test_a_rounding_through_another_format_rounds_twice(value):
    once = expected(Fraction(value), "fp16", "nearest-even")
    made = float(rounded(torch.tensor([value]), Rounding("bf16", through="fp16")))
    assert made == float(expected(once, "bf16", "nearest-even"))


@pytest.mark.parametrize("mode", ["toward-zero", "half-away", "up", "odd", "dither"])
def test_what_is_not_finite_stays(mode):
    values = torch.tensor([float("inf"), float("-inf"), float("nan")])
    made = rounded(values, Rounding("bf16", mode))
    assert made[:2].tolist() == values[:2].tolist()
    assert bool(made[2].isnan())


# --- the choices of each op -----------------------------------------------------------------------


def fp(value: Fraction, oracle: Any, name: str = "fp32") -> Fraction:
    made = oracle.FP32.round(value)
    assume(not isinstance(made, float))
    return made if name == "fp32" else expected(made, name, "nearest-even") if made else made


@given(
    routes=st.lists(st.tuples(ordinary, weight), min_size=1, max_size=5),
    weights=st.sampled_from(["fp32", "bf16", "tf32"]),
    product=st.sampled_from(["fp32", "bf16"]),
    accumulator=st.sampled_from(["fp32", "bf16"]),
    every=st.integers(1, 3),
)
def test_a_weighted_sum_in_other_formats(oracle, routes, weights, product, accumulator, every):
    total = Fraction(0)
    for k, (row, factor) in enumerate(routes):
        term = fp(fp(Fraction(factor), oracle, weights) * Fraction(row), oracle, product)
        kept = accumulator if k % every == 0 else "fp32"
        total = fp(fp(total, oracle, kept) + term, oracle)
    how = {"weights": weights, "product": product, "accumulator": accumulator, "every": every}
    contract = BEAM.edit("reduce", **how)
    values = {
        "rows": torch.tensor([[row] for row, _ in routes]).to(torch.bfloat16),
        "weights": torch.tensor([[factor for _, factor in routes]]),
        "map": torch.arange(len(routes), dtype=torch.int32)[None],
    }
    assert through(contract, "reduce", values) == float(total)


@given(parts=st.lists(ordinary, min_size=1, max_size=5))
def test_a_sum_over_ranks_in_bf16(oracle, parts):
    total = Fraction(0)
    for part in parts:
        total = fp(total + Fraction(part), oracle, "bf16")
    contract = BEAM.edit("all_reduce", accumulator="bf16")
    rows = torch.tensor(parts).view(-1, 1, 1).to(torch.bfloat16)
    assert through(contract, "all-reduce", {"rows": rows}) == float(total)


@given(value=ordinary, factor=weight)
def test_a_factor_in_bf16(oracle, value, factor):
    product = fp(fp(Fraction(factor), oracle, "bf16") * Fraction(value), oracle)
    rows = torch.tensor([[value]]).to(torch.bfloat16)
    made = through(
        BEAM.edit("scale", factor="bf16", rounds=None),
        "scale",
        {"rows": rows, "routed_scale": factor},
    )
    assert made == float(product)


ROW = torch.tensor([[3.0, -1.0, 2.0, 5.0]]).to(torch.bfloat16)
GAIN = torch.tensor([1.5, -0.25, 0.0, 3.0]).to(torch.bfloat16)
SQUARES = 39.0  # of ROW


@pytest.mark.parametrize(
    ("place", "inverse"),
    [
        ("inside", (SQUARES / 4 + 0.5) ** -0.5),
        ("outside", 1.0 / ((SQUARES / 4) ** 0.5 + 0.5)),
        ("sum", ((SQUARES + 0.5) / 4) ** -0.5),
        ("squared", (SQUARES / 4 + 0.25) ** -0.5),
        ("missing", (SQUARES / 4) ** -0.5),
    ],
)
def test_places_of_eps(place, inverse):
    contract = BEAM.edit("post_inverse", eps=place).edit("post_norm", rounds=None)
    made = With(contract).through(["post-norm"], {"rows": ROW, "post_eps": 0.5})
    assert torch.allclose(made.double(), ROW.double() * inverse, rtol=2.0**-20, atol=0.0)


@pytest.mark.parametrize(
    ("gain", "factor"), [("w", GAIN.double()), ("1+w", GAIN.double() + 1.0), ("none", 1.0)]
)
def test_gains(gain, factor):
    contract = BEAM.edit("post_norm", gain=gain, rounds=None)
    values = {"rows": ROW, "post_eps": 0.5, "post_weight": GAIN}
    made = With(contract).through(["post-norm"], values)
    inverse = (SQUARES / 4 + 0.5) ** -0.5
    assert torch.allclose(made.double(), ROW.double() * inverse * factor, rtol=2.0**-20, atol=0.0)


def test_a_gain_in_another_format():
    """FP16 has no exponent for 2^-30, and rounds 1.5 * 2^-24 to 2 * 2^-24."""
    gain = torch.tensor([1.0, 2.0**-30, 1.5 * 2.0**-24, 3.0]).to(torch.bfloat16)
    held = torch.tensor([1.0, 0.0, 2.0**-23, 3.0], dtype=torch.float64)
    contract = BEAM.edit("post_norm", weight="fp16", rounds=None)
    values = {"rows": ROW, "post_eps": 0.5, "post_weight": gain}
    made = With(contract).through(["post-norm"], values)
    inverse = (SQUARES / 4 + 0.5) ** -0.5
    assert torch.allclose(made.double(), ROW.double() * inverse * held, rtol=2.0**-20, atol=0.0)


def test_an_affine_after_the_rounding_multiplies_a_rounded_value(oracle):
    contract = BEAM.edit("post_norm", between=NEAREST, rounds=None)
    values = {"rows": ROW, "post_eps": 0.5, "post_weight": GAIN}
    made = With(contract).through(["post-norm"], values)
    normed = oracle.round_bits((ROW.double() * (SQUARES / 4 + 0.5) ** -0.5).float())
    assert torch.equal(made.double(), normed.double() * GAIN.double())


def test_squares_in_another_format():
    """39/8 of each in halves of BF16: 1.0078125 squared is 1.01568..., cut to 1.015625 or 1.0."""
    row = torch.full((1, 4), 1.0078125).to(torch.bfloat16)
    contract = BEAM.edit("post_inverse", squares=Rounding("bf16", "toward-zero"))
    inverse = With(contract).evaluate(["post-norm"], {"rows": row, "post_eps": 0.0})["post_inverse"]
    assert float(inverse) == pytest.approx(1.015625**-0.5, rel=2.0**-22)


def test_an_error_of_the_inverse_is_relative():
    contract = BEAM.edit("post_inverse", error=2.0**-10)
    made = With(contract).evaluate(["post-norm"], {"rows": ROW, "post_eps": 0.5})["post_inverse"]
    assert float(made) == pytest.approx((SQUARES / 4 + 0.5) ** -0.5 * (1 + 2.0**-10), rel=2.0**-22)


# --- steps ----------------------------------------------------------------------------------------


def test_a_step_whose_option_is_not_given_does_nothing_at_all():
    value = torch.tensor([[1.0 + 2.0**-20]])
    for stage in ("shared", "post-norm", "next norm"):
        assert With(BEAM).through([stage], {"rows": value}) is value


def test_a_contract_may_take_values_from_before_a_rounding():
    """FlashInfer's and Triton's norms take the sum of the residual add, not the rounded one."""
    contract = BEAM.edit("next_inverse", args=("sum", "next_eps"))
    contract = contract.edit("normalized", args=("sum", "next_inverse", "next_weight"), rounds=None)
    x, residual = torch.tensor([[256.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    values = {"rows": x.bfloat16(), "residual": residual.bfloat16(), "next_eps": 0.0}
    made = With(contract).evaluate(["residual", "next norm"], values)
    assert made["hidden"].tolist() == [[256.0, 1.0]]
    inverse = ((257.0**2 + 1.0) / 2) ** -0.5
    assert made["normalized"].tolist() == [pytest.approx([257.0 * inverse, inverse], rel=2.0**-22)]
