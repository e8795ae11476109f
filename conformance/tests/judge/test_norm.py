"""The norm admits FP32 evaluations within the contract, and little more."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail.conformance.judge import Admissible, add, affine, inverse_rms, rounded
from moetail.spec import Rounding


def norm(s, weight, eps):
    return rounded(affine(s, inverse_rms(s, eps), weight))


TINY = np.float32(2.0**-126)
SLACK = 2.0**-16


def flush(values, on):
    return np.where(np.abs(values) < TINY, np.float32(0), values) if on else values


def products(s, inverse, weight, ftz):
    """s * inverse * weight in FP32, in every order."""

    def times(a, b):
        return flush(flush(a, ftz) * flush(b, ftz), ftz)

    if weight is None:
        return [times(s, inverse)]
    return [
        times(times(s, inverse), weight),
        times(s, times(inverse, weight)),
        times(times(s, weight), inverse),
    ]


def inverses(s, eps, ftz):
    """The inverse RMS of one row, as different FP32 implementations get it."""
    size = np.float32(len(s))
    eps = flush(np.float32(eps), ftz)
    s = flush(s, ftz)
    squares = flush(s * s, ftz)
    divided = flush(flush(s * flush(np.float32(1) / size, ftz), ftz) * s, ftz)

    def sequential(terms):
        total = np.float32(0)
        for term in terms:
            total = flush(total + term, ftz)
        return total

    def pairwise(terms):
        terms = list(terms)
        while len(terms) > 1:
            terms = [flush(a + b, ftz) for a, b in zip(terms[::2], terms[1::2], strict=False)] + (
                [terms[-1]] if len(terms) % 2 else []
            )
        return terms[0]

    means = [
        flush(sequential(squares) / size, ftz),
        flush(pairwise(squares) / size, ftz),
        sequential(divided),
    ]
    found = []
    for mean in means:
        root = np.sqrt(np.float64(flush(mean + eps, ftz)))
        found.append(np.float32(np.float64(1) / root))
    return found


def within_contract(s, eps):
    """The exact inverse, and the FP32 numbers nearest to both ends of what the contract permits."""
    value = math.fsum(float(v) * float(v) for v in s) / len(s) + float(np.float32(eps))
    if not 2.0**-120 < value < 2.0**120 / len(s):
        return []
    true = 1 / math.sqrt(value)
    high, low = np.float32(true * (1 + SLACK)), np.float32(true * (1 - SLACK))
    if float(high) > true * (1 + SLACK):
        high = np.nextafter(high, np.float32(0))
    if float(low) < true * (1 - SLACK):
        low = np.nextafter(low, np.float32(math.inf))
    return [np.float32(true), high, low]


def nearest(values):
    return torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16()


def tensors(s, weight):
    row = torch.from_numpy(s).bfloat16().view(1, -1)
    assert np.array_equal(row.float().numpy()[0], s)
    if weight is None:
        return row, None
    return row, torch.from_numpy(weight).bfloat16()


def bf16_array(mantissas, exponents, signs):
    parts = zip(mantissas, exponents, signs, strict=True)
    values = [sign * math.ldexp(mantissa, exponent - 7) for mantissa, exponent, sign in parts]
    return torch.tensor(values, dtype=torch.float64).bfloat16().float().numpy()


@st.composite
def bf16_vector(draw, size, center, spread):
    base = draw(center)
    return bf16_array(
        draw(st.lists(st.integers(0, 255), min_size=size, max_size=size)),
        [min(127, max(-133, base + draw(st.integers(-spread, spread)))) for _ in range(size)],
        draw(st.lists(st.sampled_from([1, -1]), min_size=size, max_size=size)),
    )


EPS = st.sampled_from([1e-6, 1e-5, 1e-12, 1e-30, 1e-37, 1.2e-38, 1.1e-38, 0.0, 0.0, 1.0])


@st.composite
def rows(draw, center, weights):
    size = draw(st.sampled_from([1, 2, 5, 8]))
    s = draw(bf16_vector(size, center, draw(st.sampled_from([0, 2, 12]))))
    weight = draw(st.one_of(st.none(), bf16_vector(size, weights, 2)))
    return s, weight, draw(EPS)


# Squares, and mean + eps, around the smallest normal number.
SMALL = rows(st.integers(-66, -58), st.integers(-2, 2))
# s * w is subnormal and inv large; inv * w is subnormal and s large.
SMALL_WEIGHTS = rows(st.integers(-62, -50), st.integers(-98, -70))
LARGE_ROWS = rows(st.integers(40, 56), st.integers(-100, -66))
WIDE = rows(st.integers(-133, 125), st.integers(-2, 2))
WIDEST = rows(st.integers(-133, 125), st.integers(-120, 120))
ORDINARY = rows(st.integers(-8, 8), st.integers(-2, 2))


@settings(max_examples=500, deadline=None)
@given(case=st.one_of(ORDINARY, SMALL, SMALL_WEIGHTS, LARGE_ROWS, WIDE, WIDEST), ftz=st.booleans())
def test_every_evaluation_is_admitted(case, ftz):
    s, weight, eps = case
    row, w = tensors(s, weight)
    n = norm(Admissible.of(row), w, eps)
    with np.errstate(all="ignore"):
        for inverse in (*inverses(s, eps, ftz), *within_contract(s, eps)):
            for result in products(s, inverse, weight, ftz):
                got = nearest(result).view(1, -1)
                fits = n.admits(got)
                assert bool(fits.all()), (s, weight, eps, got, n.lo, n.hi, n.free)


@settings(max_examples=150, deadline=None)
@given(case=ORDINARY)
def test_sets_are_narrow(exact, case):
    """At most one BF16 value more than what inverses at both ends of the slack give; and for
    usual numbers nothing is left free."""
    s, weight, eps = case
    if not np.any(s) and eps < 1e-30:
        return
    row, w = tensors(s, weight)
    n = norm(Admissible.of(row), w, eps)
    assert n.nan is None
    value = math.fsum(float(v) * float(v) for v in s) / len(s) + float(np.float32(eps))
    if value < 2.0**-60:
        return
    assert n.free is None
    for column, element in enumerate(s):
        factor = 1.0 if weight is None else float(weight[column])
        true = float(element) * factor / math.sqrt(value)
        ends = sorted(exact.bf16(true * (1 + side * (SLACK + 2.0**-22))) for side in (1, -1))
        assert n.lo[0, column].item() >= ends[0]
        assert n.hi[0, column].item() <= ends[1]


def test_every_evaluation_of_long_rows_is_admitted():
    rng = np.random.default_rng(3)

    def normal(size):
        return torch.from_numpy(rng.standard_normal(size).astype(np.float32)).bfloat16()

    for size in (256, 2048, *[8192] * 12):
        s, weight = normal(size), normal(size)
        n = norm(Admissible.of(s.view(1, -1)), weight, 1e-6)
        assert n.nan is None
        assert n.free is None
        wide = s.float().numpy()
        w = weight.float().numpy()
        for inverse in within_contract(wide, 1e-6):
            for result in products(wide, inverse, w, False):
                assert bool(n.admits(nearest(result).view(1, -1)).all())
        # One step off is refused wherever the set is a point.
        point = n.lo == n.hi
        assert point.double().mean() > 0.99
        for direction in (-math.inf, math.inf):
            off = torch.nextafter(n.lo.bfloat16(), torch.tensor(direction, dtype=torch.bfloat16))
            assert not bool(n.admits(off)[point].any())


@pytest.mark.parametrize(("weight", "units"), [(None, 1), ([1.0, 1.0], 2)])
def test_products_have_room_for_their_roundings(weight, units):
    """Beyond the slack of the inverse there is one u for each product, and no more: eps is chosen
    so that a tie lies just inside the set, or just outside."""

    def ends(inverse):
        n = norm_of([1.0, 1.0], weight, eps=inverse**-2 - 1)
        return n.lo[0, 0].item(), n.hi[0, 0].item()

    tie = 1 - 2.0**-9  # goes up, to 1
    for part, expected in ((0.9, 1.0), (1.1, 1 - 2.0**-8)):
        assert ends(tie / ((1 + SLACK) * (1 + part * units * 2.0**-24)))[1] == expected
    tie = 1 - 3 * 2.0**-9  # goes down, to 1 - 2^-7
    for part, expected in ((0.9, 1 - 2.0**-7), (1.1, 1 - 2.0**-8)):
        assert ends(tie / ((1 - SLACK) * (1 - part * units * 2.0**-24)))[0] == expected


def test_inverse_off_by_more_than_the_slack_is_refused():
    generator = torch.Generator().manual_seed(11)
    s = torch.randn(4, 8192, generator=generator).bfloat16()
    weight = torch.randn(8192, generator=generator).bfloat16()
    n = norm(Admissible.of(s), weight, 1e-6)
    inverse = 1 / (s.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = s.double() * weight.double() * inverse
    for factor in (1 + 2.0**-14, 1 - 2.0**-14):
        refused = ~n.admits((exact * factor).float().bfloat16())
        assert bool(refused.any(dim=-1).all())


def test_sign_rows_are_exact():
    """Rows of +-1 without eps: the inverse is 1, and n is the weight itself."""
    s = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([0.5, 1.0078125, -3.0, 0.0], dtype=torch.bfloat16)
    n = norm(Admissible.of(s), weight, 0.0)
    assert n.lo.tolist() == n.hi.tolist() == [[0.5, -1.0078125, -3.0, 0.0]]


def norm_of(values, weight=None, eps=1e-6):
    w = None if weight is None else torch.tensor(weight, dtype=torch.bfloat16)
    return norm(Admissible.of(torch.tensor([values], dtype=torch.bfloat16)), w, eps)


def test_nan_fills_its_row_only():
    s = torch.tensor([[1.0, math.nan, 0.0], [1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    n = norm(Admissible.of(s), None, 0.0)
    assert n.nan.tolist() == [[True] * 3, [False] * 3]
    assert n.lo[1].tolist() == [1.0] * 3


def test_infinity_leaves_zeros_and_one_nan():
    n = norm_of([1.0, math.inf, -2.0])
    assert n.nan.tolist() == [[False, True, False]]
    assert n.free is None
    assert n.lo.tolist() == n.hi.tolist() == [[0.0, 0.0, 0.0]]


def test_zero_row():
    assert norm_of([0.0, 0.0]).hi.tolist() == [[0.0, 0.0]]
    assert norm_of([0.0, 0.0], eps=0.0).nan.tolist() == [[True, True]]  # 0 * inf


def test_row_that_may_be_flushed_is_free():
    assert norm_of([2.0**-70, 0.0], eps=0.0).free.tolist() == [[True, True]]
    assert norm_of([2.0**-70, 0.0], eps=1e-6).free is None


def test_subnormal_eps_may_be_read_as_zero():
    eps = 1.1e-38
    n = norm_of([2.0**-62] * 2, eps=eps)
    assert n.hi[0, 0].item() == 1.0
    assert n.lo[0, 0].item() == pytest.approx((1 + eps / 2.0**-124) ** -0.5, rel=2.0**-8)


def test_sum_of_squares_may_overflow():
    """FP32 gets inf, an inverse of 0, and zeros; an evaluation that divides first does not."""
    n = norm_of([2.0**63, 2.0**63, 2.0**63, 2.0**63])
    assert n.free is None
    assert n.lo.tolist() == [[0.0] * 4]
    assert n.hi.tolist() == [[1.0] * 4]
    assert norm_of([2.0**62, 2.0**62]).lo.tolist() == [[1.0] * 2]


def test_small_element_of_a_large_row():
    """s * inv is subnormal in FP32, and may be flushed before a large weight brings it back."""
    n = norm_of([2.0**44, 2.0**-90], weight=[1.0, 2.0**29])
    assert n.lo[0, 1].item() == 0.0
    assert n.hi[0, 1].item() > 2.0**-106


def test_weights_that_are_no_numbers():
    n = norm_of([1.0, 1.0, 0.0, 1.0], weight=[1.0, math.nan, math.inf, math.inf])
    assert n.nan.tolist() == [[False, True, True, False]]
    assert n.free.tolist() == [[False, False, False, True]]


def test_intermediate_overflow_is_free():
    """s * w is beyond FP32 in one order of the products, and not in the others."""
    n = norm_of([2.0**60, 2.0**60], weight=[2.0**100, 1.0])
    assert n.free.tolist() == [[True, False]]
    assert norm_of([2.0, 2.0], weight=[2.0**100, 1.0]).free is None


@pytest.mark.parametrize("free", [False, True])
def test_uncertain_elements_make_their_row_free(free):
    lo = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False]]) if free else None
    hi = lo if free else torch.tensor([[math.inf, 2.0]], dtype=torch.float64)
    n = norm(Admissible(lo, hi, None, mask), None, 1e-6)
    assert n.free.tolist() == [[True, True]]


@settings(max_examples=100, deadline=None)
@given(case=ORDINARY, data=st.data())
def test_intervals_contain_their_points(case, data):
    """A set of inputs gives a set that holds the sets of its members."""
    s, weight, eps = case
    row, w = tensors(s, weight)
    lo = row.double()
    up = torch.nextafter(row, torch.tensor(math.inf, dtype=torch.bfloat16)).double()
    wide = norm(Admissible(lo, up), w, eps)
    for _ in range(3):
        picks = torch.tensor([data.draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s)))])
        member = torch.where(picks, up, lo)
        inner = norm(Admissible.of(member.bfloat16()), w, eps)
        if wide.free is not None or inner.free is not None or inner.nan is not None:
            continue
        assert bool((wide.lo <= inner.lo).all())
        assert bool((inner.hi <= wide.hi).all())


# --- what other contracts say of a norm -----------------------------------------------------------

BF16, TO_ZERO, FP16 = Rounding(), Rounding(mode="toward-zero"), Rounding("fp16")


def fp32(value):
    return np.float32(value)


def into(exact, values, rounding):
    if rounding is None:
        return values
    made = [min(exact.choices(float(value), rounding)) for value in values]
    return np.array(made, dtype=np.float32)


def inverse_of(exact, source, eps, rng, *, place="inside", squares=None, error=0.0, rounds=None):
    """The inverse RMS of a row in FP32, one of the ways: squares, some order of their sum, root."""
    terms = into(exact, source * source, squares)
    mean = np.float32(0)
    for term in rng.permutation(terms):
        mean = mean + term
    size, eps = fp32(len(source)), fp32(eps)
    if place == "sum":
        mean = (mean + eps) / size if rng.random() < 0.5 else mean / size + eps / size
    else:
        mean = mean / size + {"inside": eps, "squared": eps * eps}.get(place, fp32(0))
    root = np.sqrt(mean) + (eps if place == "outside" else fp32(0))
    inverse = fp32(1) / root * fp32(1 + error)
    off = fp32(1 + rng.uniform(-0.9, 0.9) * SLACK)  # and as far as the contract permits
    return into(exact, [inverse * off], rounds)[0]


def elements_of(exact, s, inverse, weight, rng, *, gain="w", between=None, narrow=None):
    if weight is None or gain == "none":
        return into(exact, s * inverse, between)
    wide = into(exact, weight, narrow)
    if gain == "1+w":
        wide = fp32(1) + wide
    if between is not None:
        return into(exact, s * inverse, between) * wide
    return (s * inverse * wide, s * (inverse * wide), s * wide * inverse)[rng.integers(3)]


OPTIONS = [
    ({"place": "outside"}, {}),
    ({"place": "sum"}, {}),
    ({"place": "squared"}, {}),
    ({"place": "missing"}, {}),
    ({"squares": BF16}, {}),
    ({"squares": TO_ZERO}, {"gain": "1+w"}),
    ({"squares": FP16}, {}),
    ({"error": 2.0**-12}, {}),
    ({"error": -(2.0**-13)}, {"between": BF16}),
    ({"rounds": BF16}, {}),
    ({"rounds": TO_ZERO, "place": "outside"}, {"gain": "1+w"}),
    ({}, {"gain": "1+w"}),
    ({}, {"gain": "none"}),
    ({}, {"between": BF16}),
    ({}, {"between": TO_ZERO, "gain": "1+w"}),
    ({}, {"between": FP16, "gain": "none"}),
    ({}, {"narrow": FP16}),
]


def norm_by(source, value, eps, weight, inverse_how, how):
    how = dict(how)
    if "narrow" in how:
        how["read_as"] = how.pop("narrow").format
    inverse_how = dict(inverse_how)
    rounds = inverse_how.pop("rounds", None)
    inverse = inverse_rms(source, eps, **inverse_how)
    if rounds is not None:
        inverse = inverse.rounded(rounds)
    return affine(value, inverse, weight, **how)


def rows_of(rng, size, spread):
    s = rng.standard_normal(size) * 2.0 ** rng.integers(-spread, spread + 1)
    return torch.from_numpy(s).bfloat16().float().numpy()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("other", ["the same", "squares of others", "unrounded"])
def test_every_option_of_a_norm_is_admitted_and_little_more(exact, options, other):
    rng = np.random.default_rng(len(other))
    inverse_how, how = options
    wider = 0
    for trial in range(40):
        size = int(rng.integers(2, 9))
        s = rows_of(rng, size, trial % 5)
        if other == "unrounded":
            s = fp32(s * (1 + 2.0**-12 * rng.standard_normal(size)))
        source = s
        if other == "squares of others":
            source = fp32(s * (1 + 2.0**-10 * rng.standard_normal(size)))
        weight = None if trial % 4 == 3 else rows_of(rng, size, 1)
        eps = (1e-6, 1e-3, 1e-2)[trial % 3]
        value = Admissible.of(torch.from_numpy(s)[None])
        squares = value if source is s else Admissible.of(torch.from_numpy(source)[None])
        wide = None if weight is None else torch.from_numpy(weight).bfloat16()
        unrounded = norm_by(squares, value, eps, wide, inverse_how, how)
        n = rounded(unrounded)
        assert n.nan is None
        assert n.free is None
        reached = []
        for _ in range(12):
            inverse = inverse_of(exact, source, eps, rng, **inverse_how)
            made = elements_of(exact, s, inverse, weight, rng, **how)
            assert bool(unrounded.admits(torch.from_numpy(made)[None]).all())
            got = nearest(made).view(1, -1)
            assert bool(n.admits(got).all()), (s, weight, eps, got, n.lo, n.hi)
            reached.append(got.float())
        low, high = torch.stack(reached).aminmax(dim=0)
        wider += int(((n.hi.float() - n.lo.float()) > (high - low) + low.abs() * 2.0**-6).sum())
    assert wider <= 3  # of some two hundred elements: what the draws have missed


@pytest.mark.parametrize(
    ("source", "value", "nan", "free"),
    [
        ([math.inf, 1.0], [math.inf, 1.0], [True, False], [False, False]),
        ([3e38, 1.0], [math.inf, 1.0], [False, False], [True, False]),
        ([math.inf, 1.0], [3e38, 1.0], [False, False], [False, False]),
        ([math.nan, 1.0], [2.0, 1.0], [True, True], [False, False]),
        ([2.0, 1.0], [math.nan, 1.0], [True, False], [False, False]),
        ([0.0, 0.0], [0.0, 1.0], [True, False], [False, True]),
    ],
)
def test_classes_where_the_squares_are_of_other_values(source, value, nan, free):
    a, b = (Admissible.of(torch.tensor([row])) for row in (source, value))
    n = affine(b, inverse_rms(a, 0.0), None)
    for mask, expected in ((n.nan, nan), (n.free, free)):
        assert (mask.tolist() if mask is not None else [[False, False]]) == [expected]


def test_eps_outside_leaves_a_zero_row_finite():
    zero = Admissible.of(torch.zeros(1, 4).bfloat16())
    for place, infinite in (("outside", False), ("sum", False), ("missing", True)):
        n = affine(zero, inverse_rms(zero, 1e-6, place=place), None)
        assert (n.nan is not None) == infinite
        assert n.lo.tolist() == n.hi.tolist() == [[0.0] * 4]


def test_an_unrounded_norm_may_enter_a_sum_by_fma():
    """Each order of the products, rounded or not before the sum, in the rows of one draw."""
    rng = np.random.default_rng(8)
    s, weight = rows_of(rng, 512, 0), rows_of(rng, 512, 0)
    row, w = tensors(s, weight)
    n = affine(Admissible.of(row), inverse_rms(Admissible.of(row), 1e-6), w)
    residual = (-(n.lo + n.hi) / 2).float() * fp32(1 + 2.0**-9)
    total = add(n, Admissible.of(residual))
    inverse = np.float64(within_contract(s, 1e-6)[0])
    last = [  # the exact last product of every order
        np.float64(fp32(s * fp32(inverse))) * weight,
        s * np.float64(fp32(fp32(inverse) * weight)),
        np.float64(fp32(s * weight)) * np.float64(fp32(inverse)),
    ]
    for product in last:
        for added in (product, np.float64(fp32(product))):
            got = torch.from_numpy(added + residual.numpy().astype(np.float64)).float()
            assert bool(total.admits(got).all())
    width = (total.hi - total.lo).abs() / residual.abs()
    assert float(width.max()) < 3 * SLACK


def test_a_rounded_inverse_leaves_room_for_the_products_behind_it():
    """The inverse is 1 whatever it errs, and rounding errors are all that is left."""
    s = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    inverse = inverse_rms(Admissible.of(s), 0.0).rounded(BF16)
    assert inverse.bounds(0) == (torch.ones(1, 1), torch.ones(1, 1))
    for products in (1, 2):
        lo, hi = (end.item() for end in inverse.bounds(products))
        assert products * 2.0**-24 <= 1 - lo < 1.01 * products * 2.0**-24
        assert products * 2.0**-24 <= hi - 1 < 1.01 * products * 2.0**-24
