"""Scale, residual, shared and all-reduce against exact fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail.conformance.judge import (
    Admissible,
    admit_rank_sum,
    admit_residual,
    admit_scale,
    admit_shared,
)


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
    assert_hull(admit_scale(of(value), scale), reached, exactly=True)


def test_scale_rounds_twice(exact):
    """fl(r * c) lands on a tie of BF16 that r * c is not on: the contract rounds both times."""
    found = 0
    for low in range(128, 256, 5):
        for high in range(257, 512, 6):
            value, tie = low / 128, Fraction(high, 256)
            scale = exact.nearest(tie / Fraction(value), 24)
            once = exact.bf16(Fraction(value) * Fraction(scale))
            twice = exact.bf16(exact.mul(value, scale))
            s = admit_scale(of(value), scale)
            assert s.lo.item() == s.hi.item() == twice
            found += once != twice
    assert found > 50


def test_flush_may_come_before_the_rounding():
    """2^-126 * (1 - 2^-24) rounds up to a normal number; hardware may see a subnormal first."""
    s = admit_scale(of(2.0**-126), 1 - 2.0**-24)
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
    s = admit_scale(of(value), scale)
    assert (s.nan is not None) == (expected == "nan")
    assert (s.free is not None) == (expected == "free")
    if not isinstance(expected, str):
        assert s.lo.item() == s.hi.item() == expected


@settings(max_examples=300, deadline=None)
@given(pairs=st.one_of(st.tuples(USUAL, USUAL), st.tuples(FINITE, FINITE)))
def test_residual_without_scales(exact, pairs):
    n, residual = pairs
    hidden = admit_residual(of(n), torch.tensor([[residual]], dtype=torch.bfloat16), None)
    assert_hull(hidden, added(exact, {n}, {residual}), exactly=True)
    shared = admit_shared(of(n), torch.tensor([[residual]], dtype=torch.bfloat16))
    assert torch.equal(shared.lo, hidden.lo)


def test_sum_of_distant_numbers_is_rounded_once(exact):
    """A tie and a number far below it: FP32, or float64, cannot hold the sum, and still the result
    is that of one rounding."""
    for big in (1.0078125, 256.0, 3.0):
        for small in (2.0**-8 * big, 2.0**-9, 2.0**-40, 2.0**-100):
            for sign in (1, -1):
                value = sign * torch.tensor(small).bfloat16().item()
                hidden = admit_residual(of(big), torch.tensor([[value]]).bfloat16(), None)
                expected = exact.bf16(Fraction(big) + Fraction(value))
                assert hidden.lo.item() == hidden.hi.item() == expected


@settings(max_examples=300, deadline=None)
@given(
    n=st.one_of(USUAL, FINITE), residual=st.one_of(USUAL, FINITE), scales=st.tuples(SCALE, SCALE)
)
def test_residual_with_scales(exact, n, residual, scales):
    hidden = admit_residual(of(n), torch.tensor([[residual]], dtype=torch.bfloat16), scales)
    a, b = (
        flushes(exact, {v}) if exact.nearest(Fraction(c), 24) == 1.0 else scaled(exact, v, c)
        for v, c in ((n, scales[0]), (residual, scales[1]))
    )
    infinite = any(abs(v) == math.inf for v in a | b)
    reached = added(exact, a, b)
    assert_hull(hidden, reached, exactly=not infinite)


def test_opposite_infinities():
    inf = torch.tensor([[-math.inf]], dtype=torch.bfloat16)
    assert bool(admit_residual(of(math.inf), inf, None).nan)
    one = torch.ones(1, 1, dtype=torch.float64)
    maybe = Admissible(one, one * math.inf)
    assert bool(admit_residual(maybe, inf, None).free)
    assert admit_residual(of(1.0), inf, None).hi.item() == -math.inf


@st.composite
def rank_values(draw):
    kind = draw(st.sampled_from(["usual", "cancelling", "finite", "subnormal", "huge"]))
    ranks = draw(st.integers(1, 4))
    if kind == "cancelling":
        values = [draw(USUAL) for _ in range(ranks)]
        return [v if k % 2 == 0 else -values[k - 1] for k, v in enumerate(values)]
    if kind == "subnormal":
        bits = st.builds(lambda m, s: m | s, st.integers(0, 0x0400), st.sampled_from([0, 0x8000]))
        return [from_bits(draw(bits)) for _ in range(ranks)]
    if kind == "huge":
        bits = st.builds(
            lambda m, s: m | s, st.integers(0x7E00, 0x7F7F), st.sampled_from([0, 0x8000])
        )
        return [from_bits(draw(bits)) for _ in range(ranks)]
    return [draw(USUAL if kind == "usual" else FINITE) for _ in range(ranks)]


@settings(max_examples=400, deadline=None)
@given(values=rank_values(), underflow=st.sampled_from(["gradual", "flush"]))
def test_every_order_of_ranks_is_admitted(exact, values, underflow):
    reached = exact.sums([(1.0, v) for v in values], fused=False, underflow=underflow)
    q = admit_rank_sum([of(v) for v in values])
    got = torch.tensor(sorted(reached)).bfloat16().view(-1, 1)
    assert bool(q.admits(got).all()), (values, reached, q)


@settings(max_examples=200, deadline=None)
@given(values=st.lists(USUAL, min_size=1, max_size=4))
def test_rank_sums_are_what_orders_reach(exact, values):
    reached = exact.sums([(1.0, v) for v in values], fused=False)
    reached.add(exact.nearest(sum(map(Fraction, values)), 24))
    q = admit_rank_sum([of(v) for v in values])
    rounded = {exact.bf16(v) for v in reached}
    assert (q.lo.item(), q.hi.item()) == (min(rounded), max(rounded))


@pytest.mark.parametrize("seed", range(6))
def test_cancelling_sums_of_six_ranks_are_what_orders_reach(exact, seed):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([2.0**20, 1.0, 2.0**-18])
    half = torch.randn(3, generator=generator) * spread
    values = torch.cat([half, -half]).bfloat16().tolist()
    reached = exact.sums([(1.0, v) for v in values], fused=False)
    reached.add(exact.nearest(sum(map(Fraction, values)), 24))
    q = admit_rank_sum([of(v) for v in values])
    rounded = {exact.bf16(v) for v in reached}
    assert (q.lo.item(), q.hi.item()) == (min(rounded), max(rounded))


@settings(max_examples=150, deadline=None)
@given(values=st.lists(st.one_of(USUAL, FINITE), min_size=2, max_size=3), data=st.data())
def test_rank_sums_of_intervals(exact, values, data):
    """Intervals of neighbours: every choice from them, in every order."""
    infinity = torch.tensor(math.inf, dtype=torch.bfloat16)
    ups = [torch.nextafter(torch.tensor(v).bfloat16(), infinity).item() for v in values]
    one = torch.ones(1, 1, dtype=torch.float64)
    parts = [
        Admissible(of(v).lo, torch.maximum(of(v).hi, one * u))
        for v, u in zip(values, ups, strict=True)
    ]
    q = admit_rank_sum(parts)
    choice = [data.draw(st.sampled_from(pair)) for pair in zip(values, ups, strict=True)]
    reached = exact.sums([(1.0, v) for v in choice], fused=False)
    got = torch.tensor(sorted(reached)).bfloat16().view(-1, 1)
    assert bool(q.admits(got).all()), (values, choice, reached, q)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.nan], "nan"),
        ([math.inf, -math.inf, 1.0], "nan"),
        ([math.inf, 1.0, -5.0], math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([2.0**127, 2.0**127], math.inf),
        ([2.0**127, 2.0**127, -(2.0**127), -(2.0**127)], "free"),
        ([math.inf, -(2.0**127), -(2.0**127)], "free"),
    ],
)
def test_rank_sum_classes(values, expected):
    q = admit_rank_sum([of(v) for v in values])
    assert (q.nan is not None) == (expected == "nan")
    assert (q.free is not None) == (expected == "free")
    if not isinstance(expected, str):
        assert q.lo.item() == q.hi.item() == expected


@pytest.mark.parametrize("ranks", [9, 16])
def test_sampled_orders_of_many_ranks(ranks):
    generator = torch.Generator().manual_seed(ranks)
    values = torch.randn(ranks, 4, 256, generator=generator).bfloat16()
    q = admit_rank_sum([Admissible.of(v) for v in values])
    for _ in range(50):
        total = torch.zeros(4, 256)
        for rank in torch.randperm(ranks, generator=generator).tolist():
            total = total + values[rank].float()
        assert bool(q.admits(total.bfloat16()).all())
    assert (q.lo != q.hi).double().mean() < 0.01
