"""A contract's steps on sets against every legal evaluation of them, enumerated exactly."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moetail.conformance.judge.program import Program
from moetail.spec import BEAM, MoEOutput, Rounding, Step, UnfinalizedMoEOutput
from moetail.spec.operations import ALLREDUCE, BOUNDARY, GATHER, MOE_OUTPUT

TF32, FP16, FP32 = Rounding("tf32"), Rounding("fp16"), Rounding("fp32")
TO_ZERO = Rounding("bf16", "toward-zero")

# --- an evaluation, exactly, of all legal choices -------------------------------------------------


class Reach:
    """Every number that a step may make for one element, as an enumeration of all orders, trees and
    choices of FMA, and of the exact sum; a subnormal is kept or flushed between the steps.

    A value is a set of floats; one that is a product which is not rounded also has the pairs of its
    factors, since an addition may take it in exactly.
    """

    def __init__(self, exact, contract, operation, element):
        self.exact, self.contract, self.operation = exact, contract, operation
        self.made = {name: (value, ()) for name, value in element.items()}

    def of(self, name):
        """The set of a step's values, and the factors of its products."""
        if name not in self.made:
            step = self.contract.step(name)
            missing = step.needs and self.made.get(step.needs, (None,))[0] is None
            if step.stage not in self.operation.stages or missing:
                self.made[name] = self.of(step.args[0])
            else:
                self.made[name] = self.computed(step)
        return self.made[name]

    def numbers(self, name):
        value, pairs = self.of(name)
        value = value if isinstance(value, set) else {value}
        return self.either(value), pairs

    def either(self, values):
        return {choice for value in values for choice in (value, self.exact.flush(value))}

    def computed(self, step):
        exact, how = self.exact, step.how
        if step.op == "round":
            values, pairs = self.numbers(step.args[0])
        elif step.op == "multiply":
            value, _ = self.numbers(step.args[0])
            factor = exact.nearest(Fraction(self.of(step.args[1])[0]), 24)
            factor = exact.into(factor, how["factor"])
            values, pairs = value, ()
            if factor != 1.0:
                pairs = [(a, b) for a in value for b in self.either({factor})]
                values = {exact.mul(a, b) for a, b in pairs}
        elif step.op == "add":
            (left, first), (right, second) = map(self.numbers, step.args)
            values = {exact.add(a, b) for a in left for b in right}
            values |= {exact.fma(*pair, b) for pair in first for b in right}
            values |= {exact.fma(*pair, a) for pair in second for a in left}
            pairs = ()
        elif step.op == "sum_ranks":
            values, pairs = self.summed([(1.0, v) for v in self.of(step.args[0])[0]], how), ()
        else:
            values, pairs = self.weighted(*(self.of(name)[0] for name in step.args), how)
        if step.rounds is not None:
            read = self.either(values)
            values = {made for value in read for made in exact.choices(value, step.rounds)}
            pairs = ()
        return values, pairs

    def weighted(self, rows, weights, index, how):
        exact = self.exact
        pairs = [
            (exact.into(w, how["weights"]), x)
            for x, w, live in zip(rows, weights, index, strict=True)
            if live >= 0
        ]
        if how["product"] != "fp32":
            leaves = [exact.into(exact.mul(*pair), how["product"]) for pair in pairs]
            return self.summed([(1.0, leaf) for leaf in leaves], how), ()
        return self.summed(pairs, how, fused=True), pairs if len(pairs) == 1 else ()

    def summed(self, pairs, how, *, fused=False):
        exact, accumulator = self.exact, how["accumulator"]
        if accumulator == "fp32":
            total = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
            return exact.sums(pairs, fused=fused) | {exact.nearest(total, 24)}
        totals = {0.0}
        for pair in pairs:
            read = {exact.into(total, accumulator) for total in totals}
            totals = {exact.add(exact.mul(*pair), total) for total in read}
            if fused:
                totals |= {exact.fma(*pair, total) for total in read}
        return totals


# --- finalize_moe_output --------------------------------------------------------------------------

USUAL = st.builds(
    lambda m, e, s: s * math.ldexp(m, e - 7),
    st.integers(128, 255),
    st.integers(-3, 3),
    st.sampled_from([1, -1]),
)
WEIGHTS = st.builds(
    lambda m, e: math.ldexp(m, e - 23), st.integers(1 << 23, (1 << 24) - 1), st.integers(-4, 0)
)
GRID = st.builds(lambda m, e: math.ldexp(m, e), st.integers(-9, 9), st.integers(-2, 2))


@st.composite
def elements(draw):
    """Routes of one element of one token, cancelling now and then, and what is done with them."""
    count = draw(st.integers(1, 3))
    value = draw(st.sampled_from([USUAL, GRID]))
    rows = [draw(value) for _ in range(count)]
    weights = [draw(WEIGHTS) for _ in range(count)]
    if count > 1 and draw(st.booleans()):
        rows[-1], weights[-1] = -rows[0], weights[0] * (1 + draw(st.integers(-2, 2)) * 2.0**-23)
    index = [k if draw(st.integers(0, 4)) else -1 for k in range(count)]
    scale = draw(st.sampled_from([1.0, 2.5, -0.37, 2.827]))
    shared = draw(st.one_of(st.none(), value, st.just(-rows[0])))
    return rows, weights, index, scale, shared


FINALIZING = {
    "beam": BEAM,
    "weights as bf16": BEAM.edit("reduce", weights="bf16"),
    "weights as fp16": BEAM.edit("reduce", weights="fp16"),
    "weights as tf32": BEAM.edit("reduce", weights="tf32"),
    "bf16 products": BEAM.edit("reduce", product="bf16"),
    "fp16 products": BEAM.edit("reduce", product="fp16"),
    "bf16 accumulator": BEAM.edit("reduce", accumulator="bf16"),
    "fp16 accumulator, bf16 weights": BEAM.edit("reduce", accumulator="fp16", weights="bf16"),
    "bf16 at every step": BEAM.edit("reduce", accumulator="bf16", product="bf16"),
    "bf16 products, scaled in fp32": BEAM.edit("reduce", product="bf16").edit("round", rounds=None),
    "scale before rounding": BEAM.edit("round", rounds=None),
    "scale in bf16": BEAM.edit("scale", factor="bf16"),
    "scaled sum not rounded": BEAM.edit("scale", rounds=None),
    "nothing rounded but the end": BEAM.edit("round", rounds=None).edit("scale", rounds=None),
    "no scale, shared unrounded": BEAM.without("scale").edit("round", rounds=None),
    "round to tf32": BEAM.edit("round", rounds=TF32),
    "round to fp32": BEAM.edit("round", rounds=FP32),
    "scale to fp32": BEAM.edit("scale", rounds=FP32),
    "round to fp16": BEAM.edit("round", rounds=FP16),
    "truncates": BEAM.each_rounding(mode="toward-zero"),
    "half away": BEAM.each_rounding(mode="half-away"),
    "to odd": BEAM.each_rounding(mode="odd"),
    "dithers": BEAM.each_rounding(mode="dither"),
    "through fp16": BEAM.each_rounding(through="fp16"),
    "through tf32": BEAM.each_rounding(through="tf32"),
    "scaled twice": BEAM.insert(
        "scale", Step("again", "multiply", ("scale", "routed_scale"), TO_ZERO, stage="scale")
    ),
    "shared before the scale": BEAM.edit("shared", args=("round", "shared_output")).edit(
        "scale", args=("round", "routed_scale")
    ),
}


UNROUNDED = [
    contract for contract in FINALIZING.values() if contract.step("round").rounds in (None, FP32)
]


def admitted(contract, operation, calls, output):
    values = Program(contract, operation, calls).values(0, 1)
    return values[0].output(output, {})


def unfinalized(rows, weights, index):
    return UnfinalizedMoEOutput(
        torch.tensor(rows, dtype=torch.float64).bfloat16().view(-1, 1),
        torch.tensor([weights], dtype=torch.float32),
        torch.tensor([index], dtype=torch.int32),
    )


@pytest.mark.parametrize("contract", FINALIZING.values(), ids=FINALIZING.keys())
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(element=elements())
def test_finalizing_admits_every_evaluation_and_little_more(exact, contract, element):
    rows, weights, index, scale, shared = element
    other = None if shared is None else torch.tensor([[shared]], dtype=torch.bfloat16)
    call = {"x": MoEOutput(unfinalized(rows, weights, index), other, scale)}
    names = ("rows", "weights", "map", "routed_scale", "shared_output")
    reach = Reach(exact, contract, MOE_OUTPUT, dict(zip(names, element, strict=True)))
    output = MOE_OUTPUT.outputs[0].step
    read = reach.either(reach.of(output)[0])
    reached = {exact.bf16(value) for value in read}
    found = admitted(contract, MOE_OUTPUT, [call], output)
    assert found.nan is None
    assert found.free is None
    assert found.lo.item() <= min(reached), (element, found, reached)
    assert max(reached) <= found.hi.item(), (element, found, reached)
    ends = torch.tensor([min(reached), max(reached)]).bfloat16()
    low, high = torch.nextafter(ends, torch.tensor([-math.inf, math.inf]).bfloat16()).tolist()
    if contract in UNROUNDED:
        # What bound 1 leaves of a sum is not looked at again where it is rounded only later.
        size = sum(abs(w * x) for w, x in zip(weights, rows, strict=True))
        slack = 2.0**-22 * size * max(1.0, abs(scale))
        low, high = low - slack, high + slack
    assert low <= found.lo.item(), (element, found, reached)
    assert found.hi.item() <= high, (element, found, reached)


# --- the residual add, and ranks ------------------------------------------------------------------

RESIDUAL = {
    "beam": BEAM,
    "x product not rounded": BEAM.edit("x_product", rounds=None),
    "residual product not rounded": BEAM.edit("r_product", rounds=None),
    "no product rounded": BEAM.edit("x_product", rounds=None).edit("r_product", rounds=None),
    "hidden not rounded": BEAM.edit("x_product", rounds=None).edit("hidden", rounds=None),
    "hidden half away": BEAM.edit("hidden", rounds=Rounding("bf16", "half-away")),
    "hidden in fp16": BEAM.edit("hidden", rounds=FP16),
    "scales in bf16": BEAM.edit("x_product", factor="bf16").edit("r_product", factor="tf32"),
    "sum rounded twice": BEAM.edit("sum", rounds=TF32),
}


@pytest.mark.parametrize("contract", RESIDUAL.values(), ids=RESIDUAL.keys())
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    x=USUAL,
    residual=USUAL,
    scales=st.one_of(st.none(), st.tuples(st.floats(-2, 2), st.sampled_from([1.0, 1.3, -0.7]))),
    cancel=st.booleans(),
)
def test_the_residual_add_is_what_evaluations_reach(exact, contract, x, residual, scales, cancel):
    if cancel:
        residual = -x
    x_scale, r_scale = scales or (None, None)
    names = {"rows": x, "residual": residual, "x_scale": x_scale, "r_scale": r_scale}
    reach = Reach(exact, contract, BOUNDARY, names)
    reached = {exact.bf16(value) for value in reach.either(reach.of("hidden")[0])}
    tensors = (torch.tensor([[value]], dtype=torch.bfloat16) for value in (x, residual))
    call = {**dict(zip(("x", "residual"), tensors, strict=True)), "scales": scales}
    found = admitted(contract, BOUNDARY, [call], "hidden")
    assert (found.lo.item(), found.hi.item()) == (min(reached), max(reached))


RANKS = {
    "beam": BEAM,
    "parts not rounded": BEAM.edit("shared", rounds=None).edit("scale", rounds=None),
    "in bf16, rank by rank": BEAM.edit("all_reduce", accumulator="bf16"),
    "in fp16, rank by rank, of unrounded parts": BEAM.edit("all_reduce", accumulator="fp16").edit(
        "scale", rounds=None
    ),
    "sum not rounded": BEAM.edit("all_reduce", rounds=None),
    "sum truncated": BEAM.edit("all_reduce", rounds=TO_ZERO),
}


@pytest.mark.parametrize("contract", RANKS.values(), ids=RANKS.keys())
@settings(max_examples=50, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    parts=st.lists(st.tuples(USUAL, WEIGHTS), min_size=1, max_size=3),
    scale=st.sampled_from([1.0, 2.5, -0.37]),
    residual=USUAL,
)
def test_sums_over_ranks_admit_every_evaluation(exact, contract, parts, scale, residual):
    calls, parted = [], []
    for x, weight in parts:
        output = MoEOutput(unfinalized([x], [weight], [0]), None, scale)
        calls.append({"x": output, "residual": torch.tensor([[residual]]).bfloat16()})
        names = {"rows": [x], "weights": [weight], "map": [0], "routed_scale": scale}
        reach = Reach(exact, contract, ALLREDUCE, {**names, "shared_output": None})
        parted.append(reach.numbers("shared")[0])
    reached = set()
    for choice in itertools.product(*parted):
        # Handed on as numbers: whatever each part is, the ranks add that.
        made = Reach(exact, contract, ALLREDUCE, {"shared": list(choice), "residual": residual})
        made.made |= dict.fromkeys(("post_eps", "x_scale", "r_scale"), (None, ()))
        reached |= {exact.bf16(value) for value in made.either(made.of("hidden")[0])}
    values = Program(contract, ALLREDUCE, calls).values(0, 1)
    assert all(one is values[0] for one in values)
    found = values[0].output("hidden", {})
    assert found.lo.item() <= min(reached)
    assert max(reached) <= found.hi.item()
    ends = torch.tensor([min(reached), max(reached)]).bfloat16()
    low, high = torch.nextafter(ends, torch.tensor([-math.inf, math.inf]).bfloat16()).tolist()
    slack = 0.0
    if contract.step("all_reduce").rounds is None or contract.step("scale").rounds is None:
        slack = 2.0**-21 * max(1.0, abs(scale)) * sum(abs(x * weight) for x, weight in parts)
    assert low - slack <= found.lo.item()
    assert found.hi.item() <= high + slack


# --- where sets of several steps meet -------------------------------------------------------------


def test_a_step_of_no_stage_or_without_its_argument_is_nothing():
    """Not even a rounding: what is given goes through as the very same numbers."""
    contract = BEAM.each_rounding(mode="toward-zero")
    x = torch.randn(2, 256).bfloat16()
    zero = torch.zeros_like(x)
    values = Program(contract, BOUNDARY, [{"x": x, "residual": zero}]).values(0, 2)[0]
    for step in ("round", "scale", "shared", "all_reduce", "post_norm", "x_product"):
        assert values.of(step).lo is x or torch.equal(values.of(step).lo, x)
    finalized = {"x": MoEOutput(x)}
    made = Program(contract, MOE_OUTPUT, [finalized]).values(0, 2)[0].output("shared", {})
    assert torch.equal(made.lo, x)
    assert made.hi is made.lo


def test_scaling_by_one_and_rounding_again_touch_nothing():
    call = {"x": MoEOutput(unfinalized([1.5, 2.0], [0.3, 0.2], [0, 1]), None, 1.0)}
    values = Program(BEAM, MOE_OUTPUT, [call]).values(0, 1)[0]
    assert values.of("scale") is values.of("round")
    assert values.output("shared", {}) is values.of("round")


def test_each_rank_of_a_gather_finalizes_the_tokens_that_it_owns():
    calls = []
    for rank in range(3):  # five tokens, two a rank; the last one owns one
        x = unfinalized([float(10 * rank + k) for k in range(2)], [1.0], [0])
        x = UnfinalizedMoEOutput(x.gemm2_permuted, torch.ones(2, 1), torch.tensor([[0], [1]]).int())
        residual = torch.zeros(5, 1).bfloat16()
        calls.append({"x": x, "residual": residual, "routed_scale": 2.0})
    program = Program(BEAM, GATHER, calls)
    assert program.shape == (5, 1)
    for start, stop in ((0, 5), (1, 4), (4, 5)):
        (first, *others) = program.values(start, stop)
        assert all(one is first for one in others)
        hidden = first.output("hidden", {}).lo.flatten().tolist()
        assert hidden == [0.0, 2.0, 20.0, 22.0, 40.0][start:stop]


@pytest.mark.parametrize(
    ("operation", "contract", "names"),
    [
        (MOE_OUTPUT, BEAM.edit("reduce", product="fp8"), ("reduce", "product", "fp8", "bf16")),
        (MOE_OUTPUT, BEAM.edit("reduce", accumulator=16), ("reduce", "accumulator", "16")),
        (BOUNDARY, BEAM.edit("post_inverse", eps="twice"), ("post_inverse", "eps", "outside")),
        (BOUNDARY, BEAM.edit("normalized", gain="w+1"), ("normalized", "gain", "1\\+w")),
        (
            MOE_OUTPUT,
            BEAM.edit("round", rounds=Rounding("fp16", "up")),
            ("round", "rounds", "up", "fp16"),
        ),
        (
            BOUNDARY,
            BEAM.edit("next_inverse", squares=Rounding("fp16", "odd")),
            ("next_inverse", "squares", "odd"),
        ),
        (MOE_OUTPUT, BEAM.edit("reduce", every=0), ("reduce", "every", "0")),
        (BOUNDARY, BEAM.without("hidden"), ("beam", "hidden")),
    ],
)
def test_what_is_not_judged_is_refused_by_name(operation, contract, names):
    one = torch.ones(1, 1).bfloat16()
    x = one if operation is BOUNDARY else MoEOutput(unfinalized([1.0], [1.0], [0]))
    call = {"x": x, "residual": one}
    with pytest.raises(ValueError, match=".*".join(names)):
        Program(contract, operation, [call])


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (BEAM.take("x_product", post_norm="post_inverse"), "x_product.*post_inverse.*Inverse"),
        (BEAM.take("sum", r_product="shared_output"), "sum.*'shared_output'"),
        (BEAM.take("post_inverse", post_eps="next_eps"), "post_inverse.*next_eps.*None"),
    ],
)
def test_a_step_that_takes_what_is_not_there_is_named(contract, message):
    call = {"x": torch.ones(1, 4).bfloat16(), "residual": torch.ones(1, 4).bfloat16()}
    program = Program(contract, BOUNDARY, [{**call, "post_eps": 1e-6, "scales": (2.0, 1.0)}])
    with pytest.raises(ValueError, match=message):
        program.values(0, 1)[0].output("hidden", {})
