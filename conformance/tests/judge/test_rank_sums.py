"""The sum over ranks admits every result that some order reaches, and little more."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail.conformance.judge import Admissible, rounded, sum_ranks


def from_bits(bits: int) -> float:
    return torch.tensor(bits << 16, dtype=torch.int64).to(torch.int32).view(torch.float32).item()


FINITE_BITS = st.builds(lambda m, s: m | s, st.integers(0, 0x7F7F), st.sampled_from([0, 0x8000]))
USUAL_BITS = st.builds(
    lambda m, s: m | s, st.integers(0x3D00, 0x42FF), st.sampled_from([0, 0x8000])
)
FINITE = st.builds(from_bits, FINITE_BITS)
USUAL = st.builds(from_bits, USUAL_BITS)


def of(*values: float) -> Admissible:
    return Admissible.of(torch.tensor([values], dtype=torch.bfloat16))


def rank_sum(parts):
    return rounded(sum_ranks(parts))


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
    q = rank_sum([of(v) for v in values])
    got = torch.tensor(sorted(reached)).bfloat16().view(-1, 1)
    assert bool(q.admits(got).all()), (values, reached, q)


@settings(max_examples=200, deadline=None)
@given(values=st.lists(USUAL, min_size=1, max_size=4))
def test_rank_sums_are_what_orders_reach(exact, values):
    reached = exact.sums([(1.0, v) for v in values], fused=False)
    reached.add(exact.nearest(sum(map(Fraction, values)), 24))
    q = rank_sum([of(v) for v in values])
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
    q = rank_sum([of(v) for v in values])
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
    q = rank_sum(parts)
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
    q = rank_sum([of(v) for v in values])
    assert (q.nan is not None) == (expected == "nan")
    assert (q.free is not None) == (expected == "free")
    if not isinstance(expected, str):
        assert q.lo.item() == q.hi.item() == expected


@pytest.mark.parametrize("ranks", [9, 16])
def test_sampled_orders_of_many_ranks(ranks):
    generator = torch.Generator().manual_seed(ranks)
    values = torch.randn(ranks, 4, 256, generator=generator).bfloat16()
    q = rank_sum([Admissible.of(v) for v in values])
    for _ in range(50):
        total = torch.zeros(4, 256)
        for rank in torch.randperm(ranks, generator=generator).tolist():
            total = total + values[rank].float()
        assert bool(q.admits(total.bfloat16()).all())
    assert (q.lo != q.hi).double().mean() < 0.01


@pytest.mark.parametrize("flush", [False, True])
def test_parts_in_fp32_may_leave_a_subnormal_sum_that_is_flushed(flush):
    """Normal numbers with low bits, of more ranks than orders are followed: two of them leave
    2^-127, which takes the last over a tie of BF16, or is flushed."""
    unit, left = 2.0**-116, 2.0**-127
    last = unit * (1 + 2.0**-8) - left / 2
    values = [unit, left - unit, *[unit, -unit] * 3, last]
    parts = [Admissible.of(torch.tensor([[value]], dtype=torch.float32)) for value in values]
    assert [part.lo.item() for part in parts] == values
    q = rank_sum(parts)
    expected = torch.tensor(last if flush else last + left).bfloat16()
    assert bool(q.admits(expected)), q
    assert unit * (1 - 2.0**-6) <= q.lo.item()
    assert q.hi.item() <= unit * (1 + 2.0**-6)


def test_a_narrow_running_sum_goes_by_the_order_of_ranks():
    values = [256.0, 1.0, 1.0]  # one by one they are lost in BF16, together they are not
    for order, expected in ((values, 256.0), (values[::-1], 258.0)):
        q = rounded(sum_ranks([of(value) for value in order], accumulator="bf16"))
        assert q.lo.item() == q.hi.item() == expected
    assert rank_sum([of(value) for value in values]).lo.item() == 258.0
