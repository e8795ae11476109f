"""ROUND-3 and ROUND-2 on single values: exact rationals against the reference's stages."""

from __future__ import annotations

import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moetail.reference import Stages
from moetail.spec import BEAM

stages = Stages()


def scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    return stages.through(["scale"], {"rows": value, "routed_scale": factor})


def residual_add(value: torch.Tensor, residual: torch.Tensor, scales: tuple | None) -> torch.Tensor:
    x_scale, r_scale = scales or (None, None)
    values = {"rows": value, "residual": residual, "x_scale": x_scale, "r_scale": r_scale}
    return stages.through(["residual"], values)


def fp32_of_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


finite_fp32 = st.integers(0, 2**32 - 1).map(fp32_of_bits).filter(lambda v: abs(v) < float("inf"))
finite_bf16 = st.integers(0, 2**16 - 1).map(lambda b: fp32_of_bits(b << 16))
finite_bf16 = finite_bf16.filter(lambda v: abs(v) < float("inf"))


def bf16(value: float) -> torch.Tensor:
    """A BF16 number whose value FP32 has exactly, from its upper bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    assert bits & 0xFFFF == 0
    signed = (bits >> 16) - 2**16 if bits >> 31 else bits >> 16
    return torch.tensor([signed], dtype=torch.int16).view(torch.bfloat16)


def test_every_boundary_between_neighbours_rounds_to_even(oracle):
    """All 2^16 upper halves, with lower halves just below, at and just above the tie."""
    upper = torch.arange(2**16, dtype=torch.int64)
    upper = upper[(upper & 0x7F80) != 0x7F80]
    lower = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = ((upper[:, None] << 16) | lower).flatten()
    signed = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32)
    numbers = signed.view(torch.float32)
    ours = stages.round(numbers).view(torch.int16)
    assert torch.equal(ours, oracle.round_bits(numbers).view(torch.int16))


@given(finite_fp32)
def test_the_integer_rounding_is_the_rational_one(oracle, value):
    expected = oracle.BF16.round(Fraction(value))
    assert float(oracle.round_bits(torch.tensor([value]))) == float(expected)
    assert float(stages.round(torch.tensor([value]))) == float(expected)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F80),  # 1 + half an ulp: a tie, down to even
        (0x3F818000, 0x3F82),  # 1 + an ulp and a half: a tie, up to even
        (0x7F7F8000, 0x7F80),  # the greatest BF16 and half an ulp: infinity
        (0x7F7F7FFF, 0x7F7F),
        (0x00008000, 0x0000),  # half the least subnormal
        (0x00008001, 0x0001),
        (0xFF800000, 0xFF80),  # -infinity
    ],
)
def test_known_values(oracle, bits, expected):
    number = torch.tensor([fp32_of_bits(bits)])
    assert int(stages.round(number).view(torch.int16)) & 0xFFFF == expected
    assert int(oracle.round_bits(number).view(torch.int16)) & 0xFFFF == expected


def test_nan_stays_nan():
    assert bool(stages.round(torch.tensor([float("nan")])).isnan().all())


@given(finite_bf16, finite_fp32)
def test_the_scale_rounds_an_fp32_product(oracle, value, factor):
    """RN(float32(r) * float32(scale)): the product is rounded to FP32, then to BF16."""
    product = oracle.FP32.round(Fraction(value) * Fraction(factor))
    expected = product if isinstance(product, float) else oracle.BF16.round(product)
    assert float(scaled(bf16(value), factor)) == float(expected)
    assert float(oracle.times(bf16(value), factor)) == float(expected)


@given(finite_bf16, finite_bf16, finite_fp32, finite_fp32)
def test_the_residual_add_rounds_products_and_sum(oracle, x, residual, x_scale, r_scale):
    def product(value: float, factor: float) -> Fraction | float:
        wide = oracle.FP32.round(Fraction(value) * Fraction(factor))
        return wide if isinstance(wide, float) else oracle.BF16.round(wide)

    a, b = product(x, x_scale), product(residual, r_scale)
    assume(not isinstance(a, float))
    assume(not isinstance(b, float))
    wide = oracle.FP32.round(a + b)
    expected = wide if isinstance(wide, float) else oracle.BF16.round(wide)
    hidden = residual_add(bf16(x), bf16(residual), (x_scale, r_scale))
    assert float(hidden) == float(expected)


@given(finite_bf16, finite_bf16)
def test_scales_none_adds_as_is(oracle, x, residual):
    wide = oracle.FP32.round(Fraction(x) + Fraction(residual))
    expected = wide if isinstance(wide, float) else oracle.BF16.round(wide)
    assert float(residual_add(bf16(x), bf16(residual), None)) == float(expected)
    assert float(
        stages.through(["shared"], {"rows": bf16(x), "shared_output": bf16(residual)})
    ) == float(expected)


@given(st.lists(st.tuples(finite_bf16, finite_fp32), min_size=1, max_size=6))
def test_a_reduction_is_reached_by_fp32_sums_of_fp32_products(oracle, routes):
    """The reference's order is k = 0, 1, ...: each product and each sum rounded to FP32."""
    routes = [(x, w) for x, w in routes if abs(x * w) < 2.0**120 and abs(x) < 2.0**100]
    assume(routes)
    total: Fraction | float = Fraction(0)
    for x, w in routes:
        product = oracle.FP32.round(Fraction(x) * Fraction(w))
        total = oracle.FP32.round(total + product)
    rows = torch.cat([bf16(x) for x, _ in routes])[:, None]
    weights = torch.tensor([[w for _, w in routes]], dtype=torch.float32)
    index = torch.arange(len(routes), dtype=torch.int32)[None]
    assert float(stages.weighted_sum(BEAM.step("reduce"), rows, weights, index)) == float(total)
    allowed = oracle.reduction(rows, weights, index)
    assert allowed.holds(oracle.round_bits(torch.tensor([[float(total)]])))
