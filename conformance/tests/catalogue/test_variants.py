"""Variants: they differ, and they are legal."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail.conformance.cases import Case
from moetail.conformance.catalogue import VARIANTS, Variant, change
from moetail.conformance.catalogue.variants import fma, fp32_sum
from moetail.conformance.diagnosis import simulate
from moetail.conformance.judge import judge
from moetail.conformance.run.call import outputs, same_bits
from moetail.reference import Reference
from moetail.spec import ContractError
from moetail.spec.rules import ALLREDUCE, BOUNDARY, FINALIZE, FUSED, GATHER, MOE_OUTPUT

_TAIL: dict[str, Any] = {"post": "affine", "next": "affine", "scales": (0.7, 1.3)}

# Sources on which the order, the width or the flushing of an operation shows.
_CASES = (
    *(
        Case(FINALIZE, source, 5, 9, 8, 512, post="affine", routed_scale=2.5)
        for source in ("cancel", "wide", "subnormal", "zeros")
    ),
    Case(FINALIZE, "cancel", 7, 40, 8, 512),
    Case(FINALIZE, "zeros", 7, 9, 4, 512, routed_scale=-2.0),
    # An ulp of FP32 moves one BF16 value of some 2^15.
    Case(BOUNDARY, "normal", 5, 240, 1, 1024, **_TAIL),
    Case(BOUNDARY, "subnormal", 5, 9, 1, 768, **_TAIL),
    Case(FUSED, "cancel", 5, 9, 8, 512, **_TAIL),
    Case(MOE_OUTPUT, "cancel", 5, 40, 8, 512, local=0.5, shared=True),
    Case(MOE_OUTPUT, "normal", 5, 9, 8, 512, routed="finalized"),
    Case(GATHER, "cancel", 5, 9, 8, 512, ranks=2, strategy="oneshot", **_TAIL),
    Case(ALLREDUCE, "cancel", 5, 9, 8, 512, ranks=3, **_TAIL),
    Case(ALLREDUCE, "wide", 5, 40, 8, 512, ranks=4, shared=True),
)

# These differ in what no value shows: which path ran, whose memory it is, how a refusal is raised.
_SAME_VALUES = {
    "always-unfused",
    "always-fused",
    "always-oneshot",
    "always-twoshot",
    "finalized-is-copied",
    "finalized-is-passed-on",
    "refuses-by-assertion",
    "refuses-by-type-error",
}


def test_there_are_enough_and_ids_are_unique() -> None:
    assert len(VARIANTS) >= 15
    assert len({item.id for item in VARIANTS}) == len(VARIANTS)
    assert len({item.made for item in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("item", VARIANTS, ids=lambda item: item.id)
def test_every_variant_is_accepted_and_differs(item: Variant) -> None:
    differs = 0
    for case in _CASES:
        if case.operation not in item.operations:
            continue
        calls = [case.arguments(rank) for rank in range(case.ranks)]
        got = simulate(item.implementation, case.operation, calls)
        verdict = judge(case.operation, calls, got)
        assert verdict.conforms, f"{case}: {verdict.describe()}"
        plain = simulate(Reference, case.operation, calls)
        for left, right in zip(got, plain, strict=True):
            pairs = zip(outputs(left).values(), outputs(right).values(), strict=True)
            differs += sum(not same_bits(one, other) for one, other in pairs)
    assert (differs > 0) is (item.id not in _SAME_VALUES)


def test_a_finalized_tensor_is_passed_on_or_copied() -> None:
    case = Case(MOE_OUTPUT, "normal", 5, 3, 2, 256, routed="finalized")
    x = case.arguments()["x"]
    copied, passed = change("finalized-is-copied"), change("finalized-is-passed-on")
    assert passed.implementation().finalize_moe_output(x) is x.routed
    assert copied.implementation().finalize_moe_output(x).data_ptr() != x.routed.data_ptr()


@pytest.mark.parametrize(
    ("variant_id", "kind"),
    [("refuses-by-assertion", AssertionError), ("refuses-by-type-error", TypeError)],
)
def test_refusals_keep_their_message(variant_id: str, kind: type[Exception]) -> None:
    made = change(variant_id).implementation()
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(kind, match="residual") as caught:
        made.beam_norm_residual_norm(x, x[:1], None, None, None, None, None)
    assert not isinstance(caught.value, ContractError)


# --- exact FP32 arithmetic ------------------------------------------------------------------------


def _fp32(value: Fraction) -> float:
    """RN into FP32, by integers alone; infinity where it overflows."""
    if value == 0:
        return 0.0
    sign, value = (-1 if value < 0 else 1), abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent += 1 if value >= Fraction(2) ** (exponent + 1) else 0
    exponent -= 1 if value < Fraction(2) ** exponent else 0
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    steps, rest = divmod(value, quantum)
    half = quantum / 2
    steps += rest > half or (rest == half and steps % 2 == 1)
    rounded = steps * quantum
    return sign * (math.inf if rounded >= Fraction(2) ** 128 else float(rounded))


def _float32(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


_FP32 = st.integers(0, 2**32 - 1).map(_float32).filter(math.isfinite)
_BF16 = st.integers(0, 2**16 - 1).map(lambda bits: _float32(bits << 16)).filter(math.isfinite)


@st.composite
def _near_ties(draw: st.DrawFn) -> tuple[float, float, float]:
    """w * x + a where the product ends beside, or on, a tie of the accumulator's last place."""
    a = float(torch.tensor(draw(_FP32.filter(lambda v: 2.0**-60 < abs(v) < 2.0**60))))
    _, exponent = math.frexp(a)
    x = draw(st.sampled_from((1.0, -1.0, 1.0078125, 0.99609375)))
    offset = draw(st.sampled_from((0.0, 2.0**-23, -(2.0**-23), 2.0**-20)))
    w = float(torch.tensor(math.ldexp(1.0 + offset, exponent - 25), dtype=torch.float32))
    return w, x, a


@settings(max_examples=600, deadline=None)
@given(st.one_of(st.tuples(_FP32, _BF16, _FP32), _near_ties()))
def test_fma_rounds_once(numbers: tuple[float, float, float]) -> None:
    w, x, a = numbers
    got = fma(*(torch.tensor([value], dtype=torch.float32) for value in (w, x, a)))
    assert got.item() == _fp32(Fraction(w) * Fraction(x) + Fraction(a))


@settings(max_examples=400, deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120),
    st.floats(allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120),
)
def test_sum_of_two_float64_rounds_once(first: float, second: float) -> None:
    pair = (torch.tensor([value], dtype=torch.float64) for value in (first, second))
    assert fp32_sum(*pair).item() == _fp32(Fraction(first) + Fraction(second))


def test_fma_of_what_is_not_finite_is_ieee() -> None:
    inf, nan = math.inf, math.nan
    w, x, a = torch.tensor([[inf, 1.0, 0.0], [1.0, inf, -inf], [inf, 0.0, 1.0], [1.0, 1.0, nan]]).T
    expected = w * x + a
    got = fma(w, x, a)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~got.isnan()])
