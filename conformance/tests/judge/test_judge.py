"""The judge as a whole: legal results conform, broken ones do not, and the report says where."""

import math

import pytest
import torch

from moetail.conformance.judge import judge, round_bf16
from moetail.spec import MoEOutput, UnfinalizedMoEOutput

FUSED = "beam_moe_finalize_norm_residual_norm"
GATHER = "beam_moe_finalize_gather_norm_residual_norm"
ALLREDUCE = "beam_finalize_allreduce_norm_residual_norm"
BOUNDARY = "beam_norm_residual_norm"


def rn(x):
    return x.float().to(torch.bfloat16).float()


def rms_norm(s, weight, eps, *, factor=1.0, affine_last=False, order=0):
    """FP32 throughout; not rounded."""
    inverse = ((s.double().square().mean(-1, keepdim=True) + eps) ** -0.5 * factor).float()
    w = torch.ones(s.shape[-1]) if weight is None else weight.float()
    if affine_last:
        return rn(s * inverse) * w
    return (s * inverse * w, s * (inverse * w), (s * w) * inverse)[order]


def make_case(tokens=5, routes=8, size=512, *, seed=0, affine=True, scales=(0.75, 1.3), **given):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    case = {
        "x": UnfinalizedMoEOutput(
            normal(tokens * routes, size).bfloat16(),
            torch.softmax(normal(tokens, routes), -1),
            torch.arange(tokens * routes, dtype=torch.int32).view(tokens, routes),
        ),
        "residual": normal(tokens, size).bfloat16(),
        "post_weight": (1 + 0.2 * normal(size)).bfloat16() if affine else None,
        "post_eps": 1e-6,
        "next_weight": (1 + 0.2 * normal(size)).bfloat16() if affine else None,
        "next_eps": 1e-5,
        "scales": scales,
        "routed_scale": 2.5,
    }
    case.update(given)
    return case


def evaluate(case, **stages):
    """An implementation of the fused operation, with stages to replace."""
    x = case["x"]
    tokens, routes = x.expert_weights.shape
    terms = x.gemm2_permuted.view(tokens, routes, -1).float() * x.expert_weights[..., None].float()
    a = stages.get("reduce", lambda t: t.sum(1))(terms)
    scale = torch.tensor(case["routed_scale"], dtype=torch.float32)
    s = stages.get("scale", lambda v: rn(rn(v) * scale))(a)
    n = s
    if case["post_eps"] is not None:
        post = stages.get("post", rms_norm)
        n = rn(post(s, case["post_weight"], case["post_eps"]))
    b = case["residual"].float()
    if case["scales"] is not None:
        n, b = rn(n * case["scales"][0]), rn(b * case["scales"][1])
    unrounded = stages.get("add", lambda u, v: u + v)(n, b)
    hidden = rn(unrounded)
    if case["next_eps"] is None:
        return hidden.bfloat16(), None
    source = unrounded if stages.get("unanchored") else hidden
    normalized = rn(stages.get("next", rms_norm)(source, case["next_weight"], case["next_eps"]))
    return hidden.bfloat16(), normalized.bfloat16()


def share_wrong(verdict, name):
    (output,) = (o for o in verdict.outputs if o.name == name)
    return output.wrong / output.judged


OPTIONS = [
    {},
    {"affine": False},
    {"scales": None},
    {"post_eps": None},
    {"next_eps": None},
    {"post_eps": None, "next_eps": None, "scales": None, "routed_scale": 1.0},
    {"routed_scale": -0.3, "routes": 1},
    {"routes": 32},
    {"routed_scale": 0.0},
]

LEGAL = {
    "torch": {},
    "reversed": {"reduce": lambda t: sum(t.flip(1).unbind(1)[1:], t[:, -1])},
    "double": {"reduce": lambda t: t.double().sum(1).float()},
    "inverse up": {
        stage: lambda s, w, e: rms_norm(s, w, e, factor=1 + 2.0**-16.05)
        for stage in ("post", "next")
    },
    "inverse down": {
        stage: lambda s, w, e: rms_norm(s, w, e, factor=1 - 2.0**-16.05)
        for stage in ("post", "next")
    },
    "weight times inverse": {
        stage: lambda s, w, e: rms_norm(s, w, e, order=1) for stage in ("post", "next")
    },
    "weight first": {
        stage: lambda s, w, e: rms_norm(s, w, e, order=2) for stage in ("post", "next")
    },
    "zero signs": {"scale": lambda a: rn(rn(a) * 2.5) * 1.0, "add": lambda u, v: 0.0 - (-u - v)},
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("legal", [name for name in LEGAL if name != "zero signs"])
def test_legal_evaluations_conform(options, legal):
    case = make_case(**options)
    verdict = judge(FUSED, [case], [evaluate(case, **LEGAL[legal])])
    assert verdict.conforms, verdict.describe()
    assert verdict.not_judged == 0
    assert verdict.judged == (1 if case["next_eps"] is None else 2) * 5 * 512


@pytest.mark.parametrize(("routes", "size"), [(2, 1024), (8, 4096), (8, 7168), (32, 7168)])
def test_few_elements_have_two_values(routes, size):
    case = make_case(8, routes, size)
    verdict = judge(FUSED, [case], [evaluate(case)])
    assert verdict.conforms, verdict.describe()
    for output in verdict.outputs:
        assert 0 < output.ambiguous < 0.007 * output.judged


BROKEN = {
    "scale before the rounding": ({"scale": lambda a: rn(a * 2.5)}, "hidden", 0.05),
    "truncating": ({"scale": lambda a: rn(rn(a * (1 - 2.0**-9)) * 2.5)}, "hidden", 0.2),
    "BF16 accumulator": (
        {
            "reduce": lambda t: [
                acc := torch.zeros(()),
                *[acc := rn(acc + v) for v in t.unbind(1)],
            ][-1]
        },
        "hidden",
        0.2,
    ),
    "affine last": (
        {"next": lambda s, w, e: rms_norm(s, w, e, affine_last=True)},
        "normalized",
        0.1,
    ),
    "post affine last": (
        {"post": lambda s, w, e: rms_norm(s, w, e, affine_last=True)},
        "hidden",
        0.05,
    ),
    "norm of the unrounded hidden": ({"unanchored": True}, "normalized", 0.1),
    "norm without eps": ({"next": lambda s, w, e: rms_norm(s, w, 0.0)}, "normalized", None),
    "residual products not rounded": (
        {"add": lambda u, v: u + v * (1 + 2.0**-9)},
        "hidden",
        0.05,
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_results_are_refused(broken):
    stages, name, least = BROKEN[broken]
    case = make_case(16, 8, 1024, next_eps=1e-5 if least is not None else 0.05)
    verdict = judge(FUSED, [case], [evaluate(case, **stages)])
    assert not verdict.conforms
    assert share_wrong(verdict, name) > (least or 0.05)
    if name == "normalized":
        assert share_wrong(verdict, "hidden") == 0  # anchored: the break shows where it is


def test_unrounded_hidden_is_refused_on_most_elements():
    """The boundary alone, a + b far apart in binades so that the rounding of hidden matters."""
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(8, 2048, generator=generator).bfloat16() for _ in range(2))
    residual = (residual.float() * 3).bfloat16()
    call = {"x": x, "residual": residual, "scales": None, "next_eps": 1e-6}
    hidden = rn(x.float() + residual.float())
    good = rn(rms_norm(hidden, None, 1e-6)).bfloat16()
    bad = rn(rms_norm(x.float() + residual.float(), None, 1e-6)).bfloat16()
    assert judge(BOUNDARY, [call], [(hidden.bfloat16(), good)]).conforms
    verdict = judge(BOUNDARY, [call], [(hidden.bfloat16(), bad)])
    differ = float((good != bad).double().mean())
    assert differ > 0.1
    assert share_wrong(verdict, "normalized") > 0.9 * differ


def test_one_step_off_is_refused():
    case = make_case(next_eps=None)
    hidden, _ = evaluate(case)
    first = judge(FUSED, [case], [(hidden, None)]).outputs[0]
    point = (first.lo == first.hi).nonzero()
    for t, h in point[:: len(point) // 50].tolist():
        for step in (-1, 1):
            off = hidden.clone()
            off.view(torch.int16)[t, h] += step
            verdict = judge(FUSED, [case], [(off, None)])
            assert verdict.wrong == 1
            assert verdict.first.first[0] == (t, h)
            assert verdict.first.wrong_mask.nonzero().tolist() == [[t, h]]


def test_classes_are_told_apart():
    case = make_case(next_eps=None)
    hidden, _ = evaluate(case)
    for bad in (math.nan, math.inf, -math.inf):
        off = hidden.clone()
        off[1, 2] = bad
        assert judge(FUSED, [case], [(off, None)]).wrong == 1
    case["residual"][3, 4] = math.nan
    hidden, _ = evaluate(case)
    verdict = judge(FUSED, [case], [(hidden, None)])
    assert verdict.conforms
    hidden[3, 4] = 1.0
    verdict = judge(FUSED, [case], [(hidden, None)])
    assert verdict.describe() == "hidden[3, 4] = 0x3f80 (1.0); admissible: NaN"


def test_special_values_in_live_routes():
    case = make_case(routes=4, post_eps=None)
    x = case["x"].gemm2_permuted.view(5, 4, 512)
    x[0, 1, 7] = math.nan
    x[1, 2, 8] = math.inf
    x[2, 0, 9] = -math.inf
    x[2, 3, 9] = math.inf
    verdict = judge(FUSED, [case], [evaluate(case)])
    assert verdict.conforms, verdict.describe()
    assert verdict.not_judged == 0


def test_sign_of_zero_is_free():
    call = {"x": torch.zeros(2, 256).bfloat16(), "residual": torch.zeros(2, 256).bfloat16()}
    result = (-torch.zeros(2, 256)).bfloat16()
    assert judge(BOUNDARY, [call], [(result, None)]).conforms


def test_describe():
    call = {"x": torch.ones(4, 256).bfloat16(), "residual": torch.zeros(4, 256).bfloat16()}
    result = torch.ones(4, 256).bfloat16()
    assert judge(BOUNDARY, [call], [(result, None)]).describe() == (
        "beam_norm_residual_norm: 1024 elements conform"
    )
    result[3, 17] = 1.0078125
    verdict = judge(BOUNDARY, [call], [(result, None)])
    assert verdict.describe() == ("hidden[3, 17] = 0x3f81 (1.0078125); admissible: 0x3f80 (1.0)")
    assert verdict.first.first == ((3, 17), 1.0078125, 1.0, 1.0)
    call["x"][3, 17] = math.inf
    verdict = judge(BOUNDARY, [call], [(result, None)])
    assert verdict.describe().endswith("admissible: +inf")


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (None, "the result is None, not a pair (hidden, normalized)"),
        (torch.zeros(2, 256).bfloat16(), "the result is a tensor, not a pair (hidden, normalized)"),
        ((None, None), "hidden is None, not a tensor"),
        ((torch.zeros(2, 255).bfloat16(), None), "hidden has shape [2, 255], not [2, 256]"),
        ((torch.zeros(2, 256), None), "hidden is torch.float32, not torch.bfloat16"),
        (
            (torch.zeros(2, 256).bfloat16(),) * 2,
            "normalized is a tensor, but next_eps was not given",
        ),
    ],
)
def test_structure(result, sentence):
    call = {"x": torch.zeros(2, 256).bfloat16(), "residual": torch.zeros(2, 256).bfloat16()}
    verdict = judge(BOUNDARY, [call], [result])
    assert not verdict.conforms
    assert verdict.describe() == sentence
    assert verdict.wrong >= 512


def test_normalized_missing():
    call = {
        "x": torch.ones(2, 256).bfloat16(),
        "residual": torch.zeros(2, 256).bfloat16(),
        "next_eps": 1e-6,
    }
    hidden = torch.ones(2, 256).bfloat16()
    verdict = judge(BOUNDARY, [call], [(hidden, None)])
    assert verdict.describe() == "normalized is None, but next_eps was given"
    # Without a usable hidden, normalized is judged from the admissible one.
    verdict = judge(BOUNDARY, [call], [(None, hidden)])
    assert [o.conforms for o in verdict.outputs] == [False, True]


def test_no_tokens():
    call = {
        "x": torch.ones(0, 256).bfloat16(),
        "residual": torch.zeros(0, 256).bfloat16(),
        "next_eps": 1e-6,
    }
    empty = torch.empty(0, 256).bfloat16()
    verdict = judge(BOUNDARY, [call], [(empty, empty)])
    assert verdict.conforms
    assert verdict.judged == 0
    assert not judge(BOUNDARY, [call], [(empty, None)]).conforms


def test_usage():
    call = {"x": torch.ones(1, 256).bfloat16(), "residual": torch.ones(1, 256).bfloat16()}
    with pytest.raises(ValueError, match="not judged by its arithmetic"):
        judge("route_major_moe_output", [call], [None])
    with pytest.raises(ValueError, match="2 calls and 1 results"):
        judge(GATHER, [call, call], [None])
    with pytest.raises(ValueError, match="runs on one rank"):
        judge(BOUNDARY, [call, call], [None, None])


def test_finalize_alone():
    case = make_case(6, 4)
    x = case["x"]
    call = {
        "expert_outputs": x.gemm2_permuted.view(6, 4, 512).clone(),
        "expert_weights": x.expert_weights,
        "output": torch.empty(5, 512).bfloat16(),
        "routed_scale": 2.5,
        "post_eps": 1e-6,
        "post_weight": case["post_weight"],
    }
    call["expert_outputs"][5] = math.nan  # capacity
    a = (call["expert_outputs"][:5].float() * x.expert_weights[:5, :, None]).sum(1)
    result = rn(rms_norm(rn(rn(a) * 2.5), case["post_weight"], 1e-6)).bfloat16()
    assert judge("beam_moe_finalize", [call], [result]).conforms
    call["routed_scale"] = 2.0  # the norm hides a scale, up to eps and roundings
    assert judge("beam_moe_finalize", [call], [result]).wrong > 100
    del call["post_eps"]
    assert judge("beam_moe_finalize", [call], [result]).wrong > 2000


def gathered(case, world, *, poison=math.nan):
    """One call a rank, each with the slots of its own tokens and poison in the others."""
    x = case["x"]
    tokens, routes = x.expert_weights.shape
    slots = -(-tokens // world)
    calls = []
    for rank in range(world):
        rows = torch.full((slots * routes, x.gemm2_permuted.shape[1]), poison).bfloat16()
        weights = torch.full((slots, routes), poison)
        first, last = min(rank * slots, tokens), min((rank + 1) * slots, tokens)
        owned = last - first
        rows[: owned * routes] = x.gemm2_permuted[first * routes : last * routes]
        weights[:owned] = x.expert_weights[first:last]
        index = torch.arange(slots * routes, dtype=torch.int32).view(slots, routes)
        calls.append({**case, "x": UnfinalizedMoEOutput(rows, weights, index)})
    return calls


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("tokens", [1, 5, 7])
def test_gather(world, tokens):
    case = make_case(tokens, 4, 256)
    result = evaluate(case)
    calls = gathered(case, world)
    verdict = judge(GATHER, calls, [result] * world)
    assert verdict.conforms, verdict.describe()
    assert verdict.judged == world * 2 * tokens * 256
    shifted = tuple(part.roll(1, 0) for part in result)
    if tokens > 1:
        results = [result] * (world - 1) + [shifted]
        verdict = judge(GATHER, calls, results)
        assert {o.rank for o in verdict.outputs if not o.conforms} == {world - 1}
        assert ("rank " in verdict.describe()) == (world > 1)


def test_gather_takes_each_ranks_residual():
    calls = gathered(make_case(4, 2, 256), 2)
    results = [evaluate(make_case(4, 2, 256))] * 2
    calls[1]["residual"] = calls[1]["residual"].flip(0)
    verdict = judge(GATHER, calls, results)
    assert [o.conforms for o in verdict.outputs if o.name == "hidden"] == [True, False]


def _changed(result, place):
    """A copy with one element moved to the next value."""
    copies = [part.clone() for part in result]
    copies[place[0]].view(torch.int16)[place[1:]] += 1
    return tuple(copies)


@pytest.mark.parametrize("terms", [1, 1 << 22])  # a token at a time, and all at once
@pytest.mark.parametrize("fault", ["none", "hidden", "normalized", "both alike", "other norm"])
def test_replicas_are_judged_each_for_itself(terms, fault):
    """What is found of a rank does not depend on the ranks beside it, which may be its equals."""
    case = make_case(5, 4, 256)
    result = evaluate(case)
    calls = gathered(case, 3)
    # Large enough a step to be outside any set.
    wrong = {"hidden": (0, 3, 7), "normalized": (1, 2, 9), "both alike": (0, 3, 7)}.get(fault)
    results = [result] * 3
    if wrong is not None:
        broken = _changed(_changed(_changed(result, wrong), wrong), wrong)
        results = [result, broken, broken if fault == "both alike" else result]
    if fault == "other norm":
        calls[1]["next_weight"] = case["next_weight"] * 1.25
    together = judge(GATHER, calls, results, chunk_terms=terms)
    for rank in range(3):
        # This rank's result and norm on all ranks: the first rank has nobody before it.
        norm = {"next_weight": calls[rank]["next_weight"]}
        alone = judge(GATHER, [{**call, **norm} for call in calls], [results[rank]] * 3)
        for name in ("hidden", "normalized"):
            mine = next(o for o in together.outputs if o.rank == rank and o.name == name)
            other = next(o for o in alone.outputs if o.rank == 0 and o.name == name)
            counts = ("judged", "not_judged", "ambiguous", "wrong")
            assert [getattr(mine, c) for c in counts] == [getattr(other, c) for c in counts]
            assert torch.equal(mine.wrong_mask, other.wrong_mask)
            assert torch.equal(mine.lo, other.lo)
            assert torch.equal(mine.hi, other.hi)
    broken_ranks = {o.rank for o in together.outputs if not o.conforms}
    assert (
        broken_ranks
        == {
            "none": set(),
            "hidden": {1},
            "normalized": {1},
            "both alike": {1, 2},
            "other norm": {1},
        }[fault]
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finalize_and_allreduce(world, dtype):
    generator = torch.Generator().manual_seed(world)
    case = make_case(5, 8, 256)
    x = case["x"]
    owner = torch.randint(0, world, (5, 8), generator=generator)
    owner[0] = 0  # a token that is remote on all ranks but one
    permutation = torch.randperm(40, generator=generator)
    rows = torch.full((64, 256), math.nan).bfloat16()
    rows[permutation] = x.gemm2_permuted
    weights = x.expert_weights.to(dtype)
    calls, parts = [], []
    for rank in range(world):
        local = owner == rank
        index = torch.where(local, permutation.view(5, 8), -1).int()
        dirty = weights.masked_fill(~local, math.nan)
        shared = torch.randn(5, 256, generator=generator).bfloat16() if rank != 1 else None
        output = MoEOutput(UnfinalizedMoEOutput(rows, dirty, index), shared, 2.5)
        call = {key: value for key, value in case.items() if key != "routed_scale"}
        calls.append({**call, "x": output})
        clean = weights.float().masked_fill(~local, 0.0)
        a = (x.gemm2_permuted.view(5, 8, 256).float() * clean[..., None]).sum(1)
        s = rn(rn(a) * 2.5)
        p = s if shared is None else rn(s + shared.float())
        parts.append(p)
        verdict = judge("finalize_moe_output", [calls[-1]], [p.bfloat16()])
        assert verdict.conforms, verdict.describe()
        if shared is not None:
            early = rn(rn(a + shared.float()) * 2.5).bfloat16()
            assert judge("finalize_moe_output", [calls[-1]], [early]).wrong > 500
        ready = MoEOutput(rn(a).bfloat16(), shared, 2.5)
        assert judge("finalize_moe_output", [{"x": ready}], [p.bfloat16()]).conforms

    def finish(q):
        n = rn(rms_norm(q, case["post_weight"], case["post_eps"]))
        hidden = rn(rn(n * 0.75) + rn(case["residual"].float() * 1.3))
        normalized = rn(rms_norm(hidden, case["next_weight"], case["next_eps"]))
        return hidden.bfloat16(), normalized.bfloat16()

    for order in (parts, parts[::-1]):
        total = sum(order[1:], order[0])
        verdict = judge(ALLREDUCE, calls, [finish(rn(total))] * world)
        assert verdict.conforms, verdict.describe()
    if world > 2:
        stepwise = parts[0]
        for part in parts[1:]:
            stepwise = rn(stepwise + part)
        assert not judge(ALLREDUCE, calls, [finish(stepwise)] * world).conforms
        unrounded = sum(parts[1:], parts[0])
        assert not judge(ALLREDUCE, calls, [finish(unrounded)] * world).conforms


def same(one, other):
    assert len(one.outputs) == len(other.outputs)
    for a, b in zip(one.outputs, other.outputs, strict=True):
        for name in ("rank", "name", "judged", "not_judged", "ambiguous", "wrong", "structure"):
            assert getattr(a, name) == getattr(b, name)
        assert torch.equal(a.wrong_mask, b.wrong_mask)
        for name in ("lo", "hi"):
            assert torch.equal(
                getattr(a, name).view(torch.int16), getattr(b, name).view(torch.int16)
            )


def test_chunks_change_nothing():
    """Tokens with unusual numbers share a chunk with plain ones, or do not."""
    case = make_case(7, 8, 256)
    x = case["x"].gemm2_permuted.view(7, 8, 256)
    x[1, 0, 3] = math.nan
    x[2, 0, 3] = math.inf
    x[3] *= 2.0**-120
    x[4, :, :9] = 2.0**127
    x[5] = x[5] * 2.0**60
    case["residual"][6] = 0.0
    result = evaluate(case)
    result[0][0, 0] += 1.0
    whole = judge(FUSED, [case], [result])
    assert whole.wrong > 0
    for terms in (1, 2 * 8 * 256, 3 * 8 * 256, 5 * 8 * 256):
        same(whole, judge(FUSED, [case], [result], chunk_terms=terms))
    calls, results = gathered(case, 3), [result] * 3
    whole = judge(GATHER, calls, results)
    for terms in (1, 2 * 8 * 256, 4 * 8 * 256):
        same(whole, judge(GATHER, calls, results, chunk_terms=terms))


def test_round_bf16_is_what_an_implementation_may_use():
    total = torch.randn(64, dtype=torch.float64)
    assert torch.equal(round_bf16(total.float()), total.float().bfloat16())
