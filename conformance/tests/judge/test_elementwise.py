"""Products and sums of two values against exact fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail.conformance.judge import Admissible, add, multiply, rounded
from moetail.spec import Rounding


def from_bits(bits: int) -> float:
    return torch.tensor(bits << 16, dtype=torch.int64).to(torch.int32).view(torch.float32).item()


FINITE_BITS = st.builds(lambda m, s: m | s, st.integers(0, 0x7F7F), st.sampled_from([0, 0x8000]))
USUAL_BITS = st.builds(
    lambda m, s: m | s, st.integers(0x3D00, 0x42FF), st.sampled_from([0, 0x8000])
)
FINITE = st.builds(from_bits, FINITE_BITS)
USUAL = st.builds(from_bits, USUAL_BITS)
SCALE = st.one_of(
    st.floats(-4, 4), st.floats(allow_nan=False, allow_infinity=False, width=32), st.just(2.5)
)


def of(*values: float) -> Admissible:
    return Admissible.of(torch.tensor([values], dtype=torch.bfloat16))


def scaled_by(value, factor):
    return rounded(multiply(value, factor))


def residual_sum(n, residual, scales):
    b = Admissible.of(residual)
    if scales is None:
        return rounded(add(n, b))
    return rounded(add(scaled_by(n, scales[0]), scaled_by(b, scales[1])))


def flushes(exact, values):
    """Each value as it is and, if subnormal, as zero."""
    return {choice for value in values for choice in (value, exact.flush(value))}


def scaled(exact, value, scale):
    """RN(fl(value * scale)), for each choice of flushing."""
    factor = exact.nearest(Fraction(scale), 24)
    found = set()
    for v in flushes(exact, {value}):
        for f in flushes(exact, {factor}):
            products = flushes(exact, {exact.mul(v, f)})
            found |= flushes(exact, {exact.bf16(p) for p in products})
    return found


def added(exact, left, right):
    found = set()
    for a in flushes(exact, left):
        for b in flushes(exact, right):
            found |= flushes(exact, {exact.bf16(exact.add(a, b))})
    return found


def assert_hull(admissible: Admissible, reached: set[float], *, exactly: bool) -> None:
    assert admissible.free is None
    if any(value != value for value in reached):
        assert bool(admissible.nan)
        assert all(value != value for value in reached)
        return
    lo, hi = admissible.lo.item(), admissible.hi.item()
    assert lo <= min(reached)
    assert max(reached) <= hi
    if exactly:
        assert (lo, hi) == (min(reached), max(reached))


@settings(max_examples=400, deadline=None)
@given(value=st.one_of(USUAL, FINITE), scale=SCALE)
def test_scale(exact, value, scale):
    reached = scaled(exact, value, scale)
    if exact.nearest(Fraction(scale), 24) == 1.0:
        reached = flushes(exact, {value})
    assert_hull(scaled_by(of(value), scale), reached, exactly=True)


def test_scale_rounds_twice(exact):
    """fl(r * c) lands on a tie of BF16 that r * c is not on: the contract rounds both times."""
    found = 0
    for low in range(128, 256, 5):
        for high in range(257, 512, 6):
            value, tie = low / 128, Fraction(high, 256)
            scale = exact.nearest(tie / Fraction(value), 24)
            once = exact.bf16(Fraction(value) * Fraction(scale))
            twice = exact.bf16(exact.mul(value, scale))
            s = scaled_by(of(value), scale)
            assert s.lo.item() == s.hi.item() == twice
            found += once != twice
    assert found > 50


def test_flush_may_come_before_the_rounding():
    """2^-126 * (1 - 2^-24) rounds up to a normal number; hardware may see a subnormal first."""
    s = scaled_by(of(2.0**-126), 1 - 2.0**-24)
    assert (s.lo.item(), s.hi.item()) == (0.0, 2.0**-126)


@pytest.mark.parametrize(
    ("value", "scale", "expected"),
    [
        (math.inf, 2.0, math.inf),
        (math.inf, -2.0, -math.inf),
        (math.inf, 0.0, "nan"),
        (0.0, math.inf, "nan"),
        (1.0, math.inf, math.inf),
        (-1.0, math.inf, -math.inf),
        (1.0, math.nan, "nan"),
        (math.nan, 1.0, "nan"),
        (math.nan, 0.0, "nan"),
        (math.inf, 1e-40, "free"),
        (1e-39, math.inf, "free"),
        (2.0**127, 2.0, math.inf),
        (5.0, 0.0, 0.0),
        (1.0, 1e40, math.inf),  # beyond FP32 as the kernel receives it
    ],
)
def test_scale_classes(value, scale, expected):
    s = scaled_by(of(value), scale)
    assert (s.nan is not None) == (expected == "nan")
    assert (s.free is not None) == (expected == "free")
    if not isinstance(expected, str):
        assert s.lo.item() == s.hi.item() == expected


@settings(max_examples=300, deadline=None)
@given(pairs=st.one_of(st.tuples(USUAL, USUAL), st.tuples(FINITE, FINITE)))
def test_residual_without_scales(exact, pairs):
    n, residual = pairs
    hidden = residual_sum(of(n), torch.tensor([[residual]], dtype=torch.bfloat16), None)
    assert_hull(hidden, added(exact, {n}, {residual}), exactly=True)


def test_sum_of_distant_numbers_is_rounded_once(exact):
    """A tie and a number far below it: FP32, or float64, cannot hold the sum, and still the result
    is that of one rounding."""
    for big in (1.0078125, 256.0, 3.0):
        for small in (2.0**-8 * big, 2.0**-9, 2.0**-40, 2.0**-100):
            for sign in (1, -1):
                value = sign * torch.tensor(small).bfloat16().item()
                hidden = residual_sum(of(big), torch.tensor([[value]]).bfloat16(), None)
                expected = exact.bf16(Fraction(big) + Fraction(value))
                assert hidden.lo.item() == hidden.hi.item() == expected


@settings(max_examples=300, deadline=None)
@given(
    n=st.one_of(USUAL, FINITE), residual=st.one_of(USUAL, FINITE), scales=st.tuples(SCALE, SCALE)
)
def test_residual_with_scales(exact, n, residual, scales):
    hidden = residual_sum(of(n), torch.tensor([[residual]], dtype=torch.bfloat16), scales)
    a, b = (
        flushes(exact, {v}) if exact.nearest(Fraction(c), 24) == 1.0 else scaled(exact, v, c)
        for v, c in ((n, scales[0]), (residual, scales[1]))
    )
    infinite = any(abs(v) == math.inf for v in a | b)
    reached = added(exact, a, b)
    assert_hull(hidden, reached, exactly=not infinite)


def test_opposite_infinities():
    inf = torch.tensor([[-math.inf]], dtype=torch.bfloat16)
    assert bool(residual_sum(of(math.inf), inf, None).nan)
    one = torch.ones(1, 1, dtype=torch.float64)
    maybe = Admissible(one, one * math.inf)
    assert bool(residual_sum(maybe, inf, None).free)
    assert residual_sum(of(1.0), inf, None).hi.item() == -math.inf


# --- steps between which nothing is rounded -------------------------------------------------------

FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
USUAL_FP32 = st.one_of(
    st.floats(-8, 8, width=32), st.builds(lambda b: from_bits(b) * (1 + 2.0**-20), USUAL_BITS)
)


def single(value: float) -> Admissible:
    return Admissible.of(torch.tensor([[value]], dtype=torch.float32))


@st.composite
def near_ties(draw):
    """v * f + b where the product ends beside, or on, a tie of the sum's last place."""
    b = draw(USUAL.filter(bool))
    offset = draw(st.sampled_from([0.0, 2.0**-23, -(2.0**-23), 2.0**-12]))
    exponent = math.frexp(b)[1] - 25
    v = draw(st.sampled_from([1.0, -1.0, 1.0078125, 1 + 2.0**-20]))
    return v, math.ldexp(1.0 + offset, exponent), b


@settings(max_examples=400, deadline=None)
@given(
    numbers=st.one_of(
        near_ties(), st.tuples(USUAL_FP32, USUAL_FP32, USUAL_FP32), st.tuples(FP32, FP32, FP32)
    ),
    side=st.booleans(),
)
def test_a_product_enters_a_sum_rounded_or_by_fma(exact, numbers, side):
    v, factor, other = (exact.nearest(Fraction(number), 24) for number in numbers)
    product = multiply(single(v), factor)
    pair = (product, single(other)) if side else (single(other), product)
    total = add(*pair)
    reached = set()
    for a in flushes(exact, {v}):
        for f in flushes(exact, {factor}):
            for b in flushes(exact, {other}):
                apart = {exact.add(p, b) for p in flushes(exact, {exact.mul(a, f)})}
                reached |= flushes(exact, apart | {exact.fma(a, f, b)})
    if factor == 1.0:
        reached = {exact.add(a, b) for a in flushes(exact, {v}) for b in flushes(exact, {other})}
        reached = flushes(exact, reached)
    classes = {value != value for value in reached}
    if classes == {True, False}:
        assert total.free is not None
        return
    # What is rounded to the smallest normal number may have been flushed before.
    near = any(abs(value) <= 2.0**-126 for value in reached)
    assert_hull(total.read(), reached, exactly=not near)


def test_fma_or_not_makes_two_values():
    """(1 + 2^-12)^2 rounded into FP32 is 2^-24 off; what is left after taking 1 + 2^-11 away is
    that 2^-24, or nothing."""
    total = add(multiply(single(1 + 2.0**-12), 1 + 2.0**-12), single(-(1 + 2.0**-11)))
    assert (total.lo.item(), total.hi.item()) == (0.0, 2.0**-24)


def test_of_two_products_one_enters_exactly(exact):
    a, b = (1 + 2.0**-12, 1 + 2.0**-12), (-(1 + 2.0**-13), 1 + 2.0**-12)
    total = add(multiply(single(a[0]), a[1]), multiply(single(b[0]), b[1]))
    reached = {
        exact.add(exact.mul(*a), exact.mul(*b)),
        exact.fma(*a, exact.mul(*b)),
        exact.fma(*b, exact.mul(*a)),
    }
    assert len(reached) > 1
    assert (total.lo.item(), total.hi.item()) == (min(reached), max(reached))
    both = Fraction(a[0]) * Fraction(a[1]) + Fraction(b[0]) * Fraction(b[1])
    assert Fraction(max(reached)) != both


def test_a_rounding_into_fp32_forbids_fma():
    product = rounded(multiply(single(1 + 2.0**-12), 1 + 2.0**-12), Rounding("fp32"))
    total = add(product, single(-(1 + 2.0**-11)))
    assert total.lo.item() == total.hi.item() == 0.0


def test_a_product_that_only_the_rounding_makes_infinite():
    """fma(2^100, 2^100, -inf) is -inf, and inf - inf is NaN: either may happen."""
    total = add(multiply(single(2.0**100), 2.0**100), single(-math.inf))
    assert bool(total.free)
    assert bool(add(multiply(single(math.inf), 2.0), single(-math.inf)).nan)
    total = add(multiply(single(2.0**100), 2.0**28), single(-(2.0**127)))
    assert (total.lo.item(), total.hi.item()) == (2.0**127, math.inf)


@pytest.mark.parametrize(
    ("value", "factor", "expected"),
    [
        (math.inf, [0.0, 2.0, -2.0, math.nan], ["nan", math.inf, -math.inf, "nan"]),
        (0.0, [math.inf, -math.inf, 1.0, 0.0], ["nan", "nan", 0.0, 0.0]),
        (2.0, [math.inf, 1e-40, 0.5, -1.0], [math.inf, (0.0, 2e-40), 1.0, -2.0]),
        (math.inf, [1e-40], ["free"]),
        (1e-39, [math.inf], ["free"]),
    ],
)
def test_each_element_has_its_factor(value, factor, expected):
    row = torch.full((1, len(factor)), value, dtype=torch.float32)
    made = multiply(Admissible.of(row), Admissible.of(torch.tensor(factor, dtype=torch.float32)))
    for place, want in enumerate(expected):
        kinds = {"nan": made.nan, "free": made.free}
        for kind, mask in kinds.items():
            assert (mask is not None and bool(mask[0, place])) == (want == kind)
        if want not in kinds:
            low, high = want if isinstance(want, tuple) else (want, want)
            read = made.read()
            assert (read.lo[0, place].item(), read.hi[0, place].item()) == pytest.approx(
                (low, high)
            )


@pytest.mark.parametrize(("format", "narrowed"), [("bf16", 1.2968750), ("fp16", 1.2998046875)])
def test_the_factor_may_be_narrowed_first(format, narrowed):
    made = multiply(of(3.0), 1.3, read_as=format)
    assert made.lo.item() == made.hi.item() == 3 * narrowed
