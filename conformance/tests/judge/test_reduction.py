"""The reduction admits every result that some order and some choice of FMA reaches, and little
more."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail.conformance.judge import Admissible, add, multiply, rounded, weighted_sum
from moetail.conformance.judge.rounding import sum_to_odd
from moetail.spec import Rounding

FP32_OVERFLOW = 2.0**128 - 2.0**103


def bf16(mantissa: int, exponent: int) -> float:
    return math.ldexp(mantissa, exponent - 7)


SIGN = st.sampled_from([1, -1])
BF16_MANTISSA = st.integers(128, 255)
FP32_MANTISSA = st.one_of(
    st.integers(1 << 23, (1 << 24) - 1), st.sampled_from([1 << 23, (1 << 24) - 1, (1 << 23) + 1])
)


@st.composite
def _pairs(draw, count, exponents, weight_exponents):
    pairs = []
    for _ in range(count):
        x = draw(SIGN) * bf16(draw(BF16_MANTISSA), draw(exponents))
        w = draw(SIGN) * math.ldexp(draw(FP32_MANTISSA), draw(weight_exponents) - 23)
        pairs.append((w, x))
    return pairs


@st.composite
def ordinary(draw, most=4):
    return draw(_pairs(draw(st.integers(1, most)), st.integers(-4, 3), st.integers(-6, 0)))


@st.composite
def ties(draw, most=4):
    """Small integers on a grid: sums that are often ties of BF16, in every order exactly."""
    count = draw(st.integers(1, most))
    exponent = draw(st.integers(-20, 20))
    return [
        (math.ldexp(draw(st.integers(-8, 8)), exponent), float(draw(st.integers(-255, 255))))
        for _ in range(count)
    ]


@st.composite
def cancelling(draw, most=4):
    """Terms that nearly cancel in pairs, so that orders leave different residues."""
    pairs = draw(_pairs(draw(st.integers(1, 2)), st.integers(-2, 2), st.integers(-2, 0)))
    for w, x in list(pairs):
        nudge = draw(st.integers(-2, 2)) * math.ldexp(1.0, math.frexp(w)[1] - 24)
        pairs.append((float(np.float32(-(w + nudge))), x))
    return pairs[:most]


@st.composite
def subnormal(draw, most=3):
    """Factors, products and sums around the smallest normal number."""
    count = draw(st.integers(1, most))
    split = draw(st.integers(-126, 0))
    pairs = []
    for _ in range(count):
        exponent = draw(st.integers(-133, -118)) - split
        x = draw(SIGN) * bf16(draw(BF16_MANTISSA), exponent)
        w = draw(SIGN) * math.ldexp(draw(FP32_MANTISSA), split - 23)
        x = torch.tensor(x, dtype=torch.float64).bfloat16().item()
        w = torch.tensor(w, dtype=torch.float64).float().item()
        pairs.append((w, x))
    return pairs


@st.composite
def huge(draw, most=4):
    """Products and sums around the largest number."""
    return draw(_pairs(draw(st.integers(1, most)), st.integers(60, 64), st.integers(61, 64)))


@st.composite
def any_bits(draw, most=3):
    """Any finite factors at all."""
    count = draw(st.integers(1, most))
    pairs = []
    for _ in range(count):
        x = draw(st.integers(0, 0x7F7F)) | draw(st.sampled_from([0, 0x8000]))
        w = draw(st.floats(width=32, allow_nan=False, allow_infinity=False))
        pairs.append((w, float(np.array([x << 16], dtype=np.uint32).view(np.float32)[0])))
    return pairs


def admitted(pairs):
    rows = torch.tensor([[[x] for _, x in pairs]], dtype=torch.bfloat16)
    weights = torch.tensor([[w for w, _ in pairs]], dtype=torch.float32)
    assert rows.flatten().tolist() == [x for _, x in pairs]
    assert weights.flatten().tolist() == [w for w, _ in pairs]
    return weighted_sum(rows, weights, None)


def is_free(a):
    return a.free is not None and bool(a.free)


def assert_admitted(pairs, reached):
    a = admitted(pairs)
    values = torch.tensor(sorted(reached), dtype=torch.float64)
    assert bool(a.admits(values.view(-1, 1)).all()), (a.lo.item(), a.hi.item(), sorted(reached))
    r = rounded(a)
    nearest = values.float().bfloat16()
    assert bool(r.admits(nearest.view(-1, 1)).all()), (r.lo.item(), r.hi.item(), sorted(reached))


SOURCES = st.one_of(ordinary(), ties(), cancelling(), subnormal(), huge(), any_bits())


@settings(max_examples=400, deadline=None)
@given(pairs=SOURCES)
def test_every_order_is_admitted(exact, pairs):
    reached = exact.sums(pairs)
    assert_admitted(pairs, reached)


@settings(max_examples=12, deadline=None)
@given(pairs=st.one_of(ordinary(most=5), cancelling(most=5)).filter(lambda p: len(p) > 2))
def test_every_order_of_five_is_admitted(exact, pairs):
    extra = [(w / 2, -x) for w, x in pairs[: 5 - len(pairs)]]
    pairs = pairs + extra
    assert_admitted(pairs, exact.sums(pairs))


@settings(max_examples=200, deadline=None)
@given(pairs=st.one_of(subnormal(), any_bits(), cancelling(most=3)))
def test_flush_to_zero_is_admitted(exact, pairs):
    assert_admitted(pairs, exact.sums(pairs, underflow="flush"))


@settings(max_examples=60, deadline=None)
@given(pairs=subnormal(most=2))
def test_flushing_some_operations_is_admitted(exact, pairs):
    assert_admitted(pairs, exact.sums(pairs, underflow="mixed"))


@settings(max_examples=200, deadline=None)
@given(pairs=SOURCES)
def test_double_accumulation_is_admitted(exact, pairs):
    """A sum in FP64, or exact, that is rounded into FP32 once."""
    total = exact.nearest(sum(Fraction(w) * Fraction(x) for w, x in pairs), 24)
    assert_admitted(pairs, {total})


def neighbours(lo, hi):
    """The BF16 values just below lo and just above hi."""
    ends = torch.tensor([lo, hi], dtype=torch.bfloat16)
    below = torch.nextafter(ends[0], torch.tensor(-math.inf, dtype=torch.bfloat16))
    above = torch.nextafter(ends[1], torch.tensor(math.inf, dtype=torch.bfloat16))
    return below.item(), above.item()


@settings(max_examples=300, deadline=None)
@given(pairs=st.one_of(ordinary(), ties(), cancelling()))
def test_no_more_than_one_neighbour_is_added(exact, pairs):
    """The set ends at most one BF16 value beyond what orders, or an exact sum, reach."""
    reached = exact.sums(pairs)
    reached.add(exact.nearest(sum(Fraction(w) * Fraction(x) for w, x in pairs), 24))
    r = rounded(admitted(pairs))
    below, above = neighbours(exact.bf16(min(reached)), exact.bf16(max(reached)))
    assert below <= r.lo.item()
    assert r.hi.item() <= above


@settings(max_examples=80, deadline=None)
@given(pairs=subnormal(most=2))
def test_underflow_adds_no_more_than_flushing_reaches(exact, pairs):
    reached = exact.sums(pairs, underflow="mixed")
    r = rounded(admitted(pairs))
    below, above = neighbours(exact.bf16(min(reached)), exact.bf16(max(reached)))
    # What is read as zero, or stored, may be anything between the value and zero.
    quantum = 2.0**-133
    assert min(below, 0.0) - quantum <= r.lo.item()
    assert r.hi.item() <= max(above, 0.0) + quantum
    assert below <= r.lo.item() or abs(r.lo.item()) <= 2.0**-125
    assert r.hi.item() <= above or abs(r.hi.item()) <= 2.0**-125


@settings(max_examples=300, deadline=None)
@given(pairs=huge())
def test_overflow_adds_no_class(exact, pairs):
    """Free only where both signs come near to overflow, infinite only where one does, and the
    finite end stays a bound."""
    a = admitted(pairs)
    near = FP32_OVERFLOW * (1 - 2.0**-20)
    positive = sum(max(w * x, 0.0) for w, x in pairs)
    negative = sum(max(-w * x, 0.0) for w, x in pairs)
    assert not is_free(a) or min(positive, negative) >= near
    if not is_free(a):
        assert a.hi.item() < math.inf or positive >= near
        assert a.lo.item() > -math.inf or negative >= near
        r = rounded(a)
        below, above = neighbours(*(exact.bf16(end(exact.sums(pairs))) for end in (min, max)))
        assert below <= r.lo.item()
        assert r.hi.item() <= above


@settings(max_examples=100, deadline=None)
@given(pairs=ties())
def test_exact_grids_are_points(exact, pairs):
    a = rounded(admitted(pairs))
    total = sum(Fraction(w) * Fraction(x) for w, x in pairs)
    assert a.lo.item() == a.hi.item() == exact.bf16(total)


@pytest.mark.parametrize("routes", [9, 12, 16, 32])
def test_exact_grids_of_many_routes_are_points(routes):
    generator = torch.Generator().manual_seed(routes)
    rows = torch.randint(-127, 128, (4, routes, 256), generator=generator).bfloat16()
    weights = torch.randint(1, 17, (4, routes), generator=generator).float() / 16
    a = rounded(weighted_sum(rows, weights, None))
    total = (rows.double() * weights.double().unsqueeze(-1)).sum(1)
    assert torch.equal(a.lo, a.hi)
    assert torch.equal(a.lo, total.float().bfloat16().double())


def test_one_route_is_one_rounded_product():
    """n = 1 has no order: the product is rounded into FP32, then into BF16, and near a tie that
    differs from one rounding."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(64, 1, 512, generator=generator).bfloat16()
    weights = torch.rand(64, 1, generator=generator)
    r = rounded(weighted_sum(rows, weights, None))
    expected = (rows.float() * weights.unsqueeze(-1)).squeeze(1).bfloat16().double()
    assert torch.equal(r.lo, expected)
    assert torch.equal(r.hi, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("routes", [2, 8, 9, 17, 32])
@pytest.mark.parametrize("spread", [0.0, 8.0])
def test_sampled_orders_of_many_routes_are_admitted(routes, dtype, spread):
    """Sequential sums in random orders, pairwise sums, and two accumulators."""
    generator = torch.Generator().manual_seed(routes)
    tokens, size = 3, 512
    scale = torch.exp2(spread * torch.randn(tokens, routes, 1, generator=generator))
    rows = (torch.randn(tokens, routes, size, generator=generator) * scale).bfloat16()
    rows[:, -1] = -rows[:, 0]  # cancellation
    weights = torch.rand(tokens, routes, generator=generator).to(dtype)
    weights[:, -1] = weights[:, 0]
    a = weighted_sum(rows, weights, None)
    products = rows.float() * weights.float().unsqueeze(-1)

    def sequential(order):
        total = torch.zeros(tokens, size)
        for k in order:
            total = total + products[:, k]
        return total

    def pairwise(parts):
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + (
                [parts[-1]] if len(parts) % 2 else []
            )
        return parts[0]

    for _ in range(20):
        order = torch.randperm(routes, generator=generator).tolist()
        half = routes // 2
        for total in (
            sequential(order),
            pairwise([products[:, k] for k in order]),
            sequential(order[:half]) + sequential(order[half:]),
        ):
            assert bool(a.admits(total).all())
            assert bool(rounded(a).admits(total.bfloat16()).all())


def test_gradual_products_round_up():
    """A product near the smallest subnormal is rounded by half of that, not by u."""
    assert_admitted([(0.00017941166879609227, 9.183549615799121e-41)], {12 * 2.0**-149})


def test_dead_routes_are_not_read():
    rows = torch.tensor([[1.0, 2.0], [math.nan, math.inf], [3.0, -1.0]], dtype=torch.bfloat16)
    weights = torch.tensor([[0.5, math.nan, 0.25], [math.inf, math.nan, -math.inf]])
    index = torch.tensor([[0, -1, 2], [-1, -1, -1]], dtype=torch.int32)
    a = weighted_sum(rows, weights, index)
    assert a.nan is None
    assert a.free is None
    assert a.lo[1].tolist() == a.hi[1].tolist() == [0.0, 0.0]
    r = rounded(a)
    assert r.lo.tolist() == r.hi.tolist() == [[1.25, 0.75], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1.0, math.nan), (1.0, 1.0)], "nan"),
        ([(math.nan, 1.0)], "nan"),
        ([(0.0, math.inf)], "nan"),
        ([(1.0, math.inf), (1.0, -math.inf)], "nan"),
        ([(1.0, math.inf), (1.0, -5.0)], math.inf),
        ([(-1.0, math.inf), (1.0, 5.0)], -math.inf),
        ([(2.0**-130, math.inf), (1.0, 5.0)], "free"),  # read as zero, or not
        ([(2.0**-130, math.inf), (1.0, math.nan)], "nan"),
        ([(2.0, 2.0**127)], math.inf),
        ([(1.0, 2.0**127), (1.0, 2.0**127)], math.inf),
        ([(-1.0, 2.0**127), (-1.0, 2.0**127), (-1.0, 2.0**127)], -math.inf),
        ([(1.0, 2.0**127), (1.0, 2.0**127), (1.0, -(2.0**127))], (2.0**127, math.inf)),  # order
        ([(2.0, 2.0**127), (1.0, -(2.0**127))], (2.0**127, math.inf)),  # FMA decides
        ([(2.0, 2.0**127), (2.0, -(2.0**127))], "free"),  # inf - inf, or zero by FMA and order
        ([(1.0, math.inf), (2.0, -(2.0**127))], "free"),  # inf - inf, if the product overflows
        ([(2.0, 2.0**127), (1.0, -1.0)], math.inf),
        ([(1.0, 2.0**127), (1.0, -(2.0**127))], 0.0),
    ],
)
def test_classes(exact, pairs, expected):
    a = admitted_any(pairs)
    if expected == "nan":
        assert bool(a.nan)
        assert bool(a.admits(torch.tensor([[math.nan]])))
        assert not bool(a.admits(torch.tensor([[0.0]])))
    elif expected == "free":
        assert bool(a.free)
    else:
        lo, hi = expected if isinstance(expected, tuple) else (expected, expected)
        r = rounded(a)
        assert r.nan is None
        assert r.free is None
        assert (r.lo.item(), r.hi.item()) == (lo, hi)
        assert not bool(r.admits(torch.tensor([[math.nan]])))
    if not any(0 < abs(v) < 2.0**-126 for pair in pairs for v in pair):
        reached = exact.sums(pairs)
        classes = {"nan" if v != v else exact.bf16(v) for v in reached}
        if expected == "free":
            assert "nan" in classes
            assert len(classes) > 1
        else:
            assert classes == set(expected if isinstance(expected, tuple) else (expected,))


def admitted_any(pairs):
    rows = torch.tensor([[[x] for _, x in pairs]], dtype=torch.bfloat16)
    return weighted_sum(rows, torch.tensor([[w for w, _ in pairs]]), None)


@settings(max_examples=200, deadline=None)
@given(
    accumulator=st.one_of(st.just(1.0), st.floats(width=32, min_value=2.0**-20, max_value=2.0**20)),
    low=st.integers(128, 255),
    exponent=st.integers(-40, 10),
    side=st.sampled_from([1, -1]),
)
def test_fma_is_exact(exact, accumulator, low, exponent, side):
    """Products as near to a power of two as BF16 times FP32 gets: added to a number whose half ulp
    that power is, float64 loses what decides the tie."""
    weight = -(-(1 << 31) // low)  # the product is 2^31 and a little
    pair = (math.ldexp(weight, exponent - 23), side * low / 128)
    total = sum_to_odd(
        torch.tensor([accumulator], dtype=torch.float64),
        torch.tensor([pair[0] * pair[1]], dtype=torch.float64),
    )
    assert total.float().item() == exact.fma(*pair, accumulator)


def test_fma_at_a_tie(exact):
    weight = ((1 << 31) + 2) // 205
    pair = (math.ldexp(weight, -48), 205 / 128)  # 2^-24 * (1 + 2^-30)
    total = sum_to_odd(
        torch.ones(1, dtype=torch.float64),
        torch.tensor([pair[0] * pair[1]], dtype=torch.float64),
    )
    assert total.float().item() == exact.fma(*pair, 1.0) == 1.0 + 2.0**-23
    assert torch.tensor(1.0 + pair[0] * pair[1], dtype=torch.float64).float().item() == 1.0


# --- what other contracts say of the sum ----------------------------------------------------------


def routes_of(pairs):
    rows = torch.tensor([[[x] for _, x in pairs]], dtype=torch.bfloat16)
    return rows, torch.tensor([[w for w, _ in pairs]])


def test_a_single_product_may_enter_a_sum_exactly(exact):
    """A product that FP32 rounds to a tie of BF16, less that tie: nothing, or what FP32 lost. Of
    two live routes the same number is a sum, and has been rounded."""
    x, tie = 205 / 128, 1 + 2.0**-8
    weight = exact.nearest(Fraction(tie) / Fraction(x), 24)
    rest = Fraction(weight) * Fraction(x) - Fraction(tie)
    assert exact.mul(weight, x) == tie
    assert rest != 0
    other = Admissible.of(torch.tensor([[-tie]], dtype=torch.float32))
    rows = torch.tensor([[x], [0.0]], dtype=torch.bfloat16)
    weights = torch.tensor([[weight, 1.0]])
    for index, reached in (([0, -1], {0.0, float(rest)}), ([0, 1], {0.0})):
        a = weighted_sum(rows, weights, torch.tensor([index]))
        assert a.lo.item() == a.hi.item() == tie
        total = add(a, other)
        assert (total.lo.item(), total.hi.item()) == (min(reached), max(reached))


def test_a_dead_route_does_not_narrow_the_running_sum():
    rows = torch.tensor([[1.0], [2.0**-9], [5.0]], dtype=torch.bfloat16)
    weights = torch.ones(1, 3)
    for index, expected in (([0, 1, -1], 1 + 2.0**-9), ([0, -1, 1], 1 + 2.0**-9), ([0, 1, 2], 6)):
        a = weighted_sum(rows, weights, torch.tensor([index]), accumulator="bf16")
        assert a.lo.item() == a.hi.item() == expected


@pytest.mark.parametrize(("every", "expected"), [(1, 257.0), (2, 259.0), (4, 261.0)])
def test_the_running_sum_is_narrowed_after_so_many_routes(every, expected):
    pairs = [(1.0, 256.0), *[(1.0, 1.0)] * 4]
    a = weighted_sum(*routes_of(pairs), None, accumulator="bf16", every=every)
    assert a.lo.item() == a.hi.item() == expected


def test_products_are_rounded_before_they_are_added():
    pairs = [(1 + 2.0**-9, 1.0), (1 + 2.0**-9, 1.0)]
    rows, weights = routes_of(pairs)
    for format, expected in (("fp32", 2 + 2.0**-8), ("bf16", 2.0), ("fp16", 2 + 2.0**-8)):
        a = weighted_sum(rows, weights, None, product=format)
        assert a.lo.item() <= expected <= a.hi.item() < a.lo.item() + 2.0**-20
    a = weighted_sum(*routes_of([(60000.0, 2.0), (1.0, 1.0)]), None, product="fp16")
    assert a.lo.item() == math.inf


@pytest.mark.parametrize("format", ["bf16", "fp16", "tf32"])
def test_weights_are_narrowed_first(exact, format):
    weight = 1 + 2.0**-8 + 2.0**-11 + 2.0**-13
    a = weighted_sum(*routes_of([(weight, 3.0)]), None, read_as=format)
    narrow = exact.into(weight, format)
    assert narrow != weight
    assert rounded(a, Rounding("fp32")).lo.item() == pytest.approx(3 * narrow, rel=2.0**-22)


def test_weights_that_steps_have_made():
    """A product as a weight is a number; one of uncertain class leaves its token free."""
    rows, weights = routes_of([(0.3, 2.0), (0.7, -1.0)])
    made = multiply(Admissible.of(weights), 2.827)
    scaled = weights * torch.tensor(2.827)
    a, b = (weighted_sum(rows, w, None) for w in (made, scaled))
    assert torch.equal(a.lo, b.lo)
    assert torch.equal(a.hi, b.hi)
    tiny = weighted_sum(rows, Admissible.of(torch.tensor([[2.0**-130, 1.0]])), None)
    assert tiny.lo.item() <= -1.0 <= tiny.hi.item()
    kinds = (torch.tensor([[False, True]]), None), (None, torch.tensor([[False, True]]))
    nan, free = (Admissible(weights, weights, *kind) for kind in kinds)
    assert bool(weighted_sum(rows, nan, None).nan)
    assert bool(weighted_sum(rows, free, None).free)
    dead = torch.tensor([[0, -1]])
    assert weighted_sum(rows[0], free, dead).free is None
    assert bool(weighted_sum(rows, Admissible(weights, weights + 1), None).free)
