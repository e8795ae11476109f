"""Sets, their rounding, and the part of a set that rounds to a given value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail.conformance.judge import Admissible, rounded
from moetail.conformance.judge.admissible import part_of
from moetail.spec import Rounding
from moetail.spec.contract import BF16, FORMATS, MODES

FP32 = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-4, 4, width=32),
    st.floats(-70000, 70000, width=32),
)
ROUNDINGS = st.one_of(
    st.builds(Rounding, st.sampled_from(["bf16", "tf32", "fp32"]), st.sampled_from(MODES)),
    st.builds(
        Rounding, st.sampled_from(FORMATS), st.just("nearest-even"), st.sampled_from(FORMATS)
    ),
    st.builds(Rounding, st.just("bf16"), st.sampled_from(MODES), st.sampled_from(FORMATS)),
)


def interval(low: float, high: float, dtype=torch.float32) -> Admissible:
    return Admissible(*(torch.tensor([[end]], dtype=dtype) for end in (low, high)))


@settings(max_examples=600, deadline=None)
@given(
    ends=st.tuples(FP32, FP32).map(sorted),
    inside=st.lists(st.floats(0, 1), max_size=4),
    rounding=ROUNDINGS,
    wide=st.booleans(),
)
def test_the_rounded_set_holds_every_rounded_value(exact, ends, inside, rounding, wide):
    low, high = ends
    # As the next operation reads it: what is left in FP32 is flushed there, if at all.
    made = rounded(interval(low, high, torch.float64 if wide else torch.float32), rounding).read()
    between = (torch.tensor(low + share * (high - low)).item() for share in inside)
    values = [low, high, *(value for value in between if low <= value <= high)]

    def reach(numbers):
        read = [choice for value in numbers for choice in (value, exact.flush(value))]
        return {choice for value in read for choice in exact.choices(value, rounding)}

    assert made.lo.item() <= min(reach(values))
    assert max(reach(values)) <= made.hi.item()
    at_ends = reach([low, high])
    assert (made.lo.item(), made.hi.item()) == (min(at_ends), max(at_ends))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, ("bf16", "tf32", "fp32")), (torch.float16, ("fp16", "tf32", "fp32"))],
)
def test_values_that_a_format_holds_are_not_looked_at(dtype, kept):
    a = Admissible.of(torch.randn(3, 4).to(dtype))
    for format in FORMATS:
        assert (rounded(a, Rounding(format)) is a) == (format in kept)
    assert rounded(a, Rounding(kept[0], "odd")) is a
    assert rounded(a, Rounding(kept[0], through="tf32")) is a


def test_through_fp16_takes_its_range():
    a = Admissible.of(torch.tensor([[1e5, 1e-6]]).bfloat16())
    made = rounded(a, Rounding("bf16", through="fp16"))
    assert made.lo[0, 0].item() == math.inf
    assert made.lo[0, 1].item() == torch.tensor(1e-6).bfloat16().half().bfloat16().item()


@settings(max_examples=400, deadline=None)
@given(value=FP32, around=st.tuples(FP32, FP32).map(sorted), whole=st.booleans())
def test_the_part_holds_what_rounds_to_the_value(exact, value, around, whole):
    """Of a set that holds a number, and the number's rounding, the part holds the number."""
    low, high = min(value, around[0]), max(value, around[1])
    if whole:
        low, high = -math.inf, math.inf
    for got in {exact.bf16(value), exact.bf16(exact.flush(value))}:
        part = part_of(interval(low, high), torch.tensor([[got]], dtype=torch.bfloat16))
        assert part.lo.item() <= value <= part.hi.item()
        assert low <= part.lo.item()
        assert part.hi.item() <= high
        # And nothing else but what may be flushed: rounded again it is the value.
        ends = {exact.bf16(end) for end in (part.lo.item(), part.hi.item())}
        neighbours = {
            torch.nextafter(torch.tensor(got).bfloat16(), torch.tensor(to).bfloat16()).item()
            for to in (-math.inf, math.inf)
        }
        assert ends <= {got, *neighbours} or (got == 0 and max(map(abs, ends)) <= 2.0**-126)


@pytest.mark.parametrize("got", [2.0, math.inf, -math.inf, math.nan, 0.0])
def test_a_wrong_value_has_a_part_of_its_own(got):
    """Where no part of the set rounds to it, what is computed from it is judged from it alone."""
    returned = torch.tensor([[got]], dtype=torch.bfloat16)
    part = part_of(interval(1.0, 1.001), returned)
    assert (part.nan is not None) == (got != got)
    if got == got:
        assert part.lo.item() <= got <= part.hi.item()
        assert not part.lo.item() <= 1.0 <= part.hi.item()
    mask = torch.tensor([[True]])
    zero = torch.zeros(1, 1)
    for kinds in ((mask, None), (None, mask)):
        part = part_of(Admissible(zero, zero, *kinds), returned)
        assert part.free is None
        assert (part.nan is not None) == (got != got)
        assert part.lo.item() <= (0.0 if got != got else got) <= part.hi.item()


def test_cat_and_where_keep_kinds():
    lo = torch.tensor([[1.0, 0.0]])
    nan = Admissible(lo, lo, torch.tensor([[False, True]]))
    interval_ = Admissible(lo, lo + 1)
    both = Admissible.cat([nan, interval_])
    assert both.nan.tolist() == [[False, True], [False, False]]
    assert both.hi.tolist() == [[1.0, 0.0], [2.0, 1.0]]
    mixed = nan.where(torch.tensor([[True], [False]]), interval_)
    assert mixed.nan.tolist() == [[False, True], [False, False]]
    assert mixed.hi.tolist() == [[1.0, 0.0], [2.0, 1.0]]
    assert interval_.where(torch.tensor([[True]]), interval_).nan is None


def test_bf16_is_the_rounding_by_default():
    a = interval(1 + 2.0**-8, 1 + 3 * 2.0**-8)
    made = rounded(a)
    assert (made.lo.item(), made.hi.item()) == (1.0, 1 + 2.0**-6)
    assert torch.equal(made.lo, rounded(a, BF16).lo)
