"""What is computed from an output is judged from the output that was returned."""

import math

import pytest
import torch

from moetail.conformance.judge import judge
from moetail.conformance.judge.program import Program
from moetail.spec import BEAM
from moetail.spec.operations import BOUNDARY

SQUARES = BEAM.take("next_inverse", hidden="sum")
CONTRACTS = {
    "of the rounded hidden": BEAM,
    "of the unrounded hidden": SQUARES.take("normalized", hidden="sum"),
    "squares unrounded": SQUARES,
    "elements unrounded": BEAM.take("normalized", hidden="sum"),
    "hidden in fp32": BEAM.edit("hidden", rounds=None),
    "products and hidden in fp32": BEAM.edit("hidden", rounds=None).edit("x_product", rounds=None),
}


def a_call(tokens=6, hidden=512):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    return {
        "x": normal(tokens, hidden),
        "residual": normal(tokens, hidden),
        "post_eps": 1e-6,
        "next_weight": normal(hidden),
        "next_eps": 1e-6,
        "scales": (0.75, 1.3),
    }


def norm(squares, elements, weight, eps):
    inverse = 1 / (squares.square().mean(-1, keepdim=True) + eps).sqrt()
    return (elements * inverse * weight.float()).bfloat16()


def total(call, contract):
    """The unrounded sum of the residual add, in FP32."""
    x = call["x"].float()
    n = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16().float()
    product = n * 0.75
    if contract.step("x_product").rounds is not None:
        product = product.bfloat16().float()
    return product + (call["residual"].float() * 1.3).bfloat16().float()


def results(call, contract, unrounded):
    hidden = unrounded.bfloat16()
    rounded = contract.step("hidden").rounds is not None

    def read(name):
        step = contract.step(name)
        return hidden.float() if step.args[0] == "hidden" and rounded else unrounded

    norms = read("next_inverse"), read("normalized")
    return hidden, norm(*norms, call["next_weight"], call["next_eps"])


@pytest.mark.parametrize("name", CONTRACTS)
def test_each_contract_admits_its_own_norm_alone(name):
    call, contract = a_call(), CONTRACTS[name]
    result = results(call, contract, total(call, contract))
    for other, by in CONTRACTS.items():
        verdict = judge(BOUNDARY, [call], [result], contract=by)
        same = other == name or {other, name} == {"of the unrounded hidden", "hidden in fp32"}
        assert verdict.conforms == same, other


@pytest.mark.parametrize("name", CONTRACTS)
def test_an_error_in_hidden_is_not_counted_in_what_is_made_of_it(name):
    call, contract = a_call(), CONTRACTS[name]
    unrounded = total(call, contract)
    unrounded[2, 5] += 0.5
    unrounded[3, 7] = -unrounded[3, 7]
    hidden, normalized = judge(
        BOUNDARY, [call], [results(call, contract, unrounded)], contract=contract
    ).outputs
    assert hidden.wrong_mask.nonzero().tolist() == [[2, 5], [3, 7]]
    assert normalized.conforms


@pytest.mark.parametrize("name", CONTRACTS)
def test_hidden_and_norm_are_of_one_value(name):
    """Both ends of a set may be returned, but the norm must be that of the one that was."""
    call, contract = a_call(64), CONTRACTS[name]
    result = results(call, contract, total(call, contract))
    first = judge(BOUNDARY, [call], [result], contract=contract).outputs[0]
    token, column = (first.lo != first.hi).nonzero()[0].tolist()
    for end, other in ((first.lo, first.hi), (first.hi, first.lo)):
        hidden = result[0].clone()
        hidden[token, column] = end[token, column]
        own = hidden.float()
        legal = norm(own, own, call["next_weight"], call["next_eps"])
        mixed = legal.clone()
        own[token, column] = other[token, column]
        mixed[token, column] = norm(own, own, call["next_weight"], 1e-6)[token, column]
        found = judge(BOUNDARY, [call], [(hidden, mixed)], contract=contract).outputs
        assert found[0].conforms
        assert bool(found[1].wrong_mask[token, column])
        found = judge(BOUNDARY, [call], [(hidden, legal)], contract=contract).outputs
        if name in ("of the rounded hidden", "squares unrounded"):
            assert not bool(found[1].wrong_mask[token, column])


def test_a_value_that_another_step_reads_is_followed_to_the_returned_one():
    call = a_call()
    contract = CONTRACTS["of the unrounded hidden"]
    hidden, _ = results(call, contract, total(call, contract))
    values = Program(contract, BOUNDARY, [call]).values(0, 6)[0]
    own = values.of("sum")
    made = values.output("normalized", {"hidden": hidden})
    apart = values.output("normalized", {})
    assert bool((apart.lo <= made.lo).all())
    assert bool((made.hi <= apart.hi).all())
    assert bool((made.lo > apart.lo).any() | (made.hi < apart.hi).any())
    assert values.of("sum") is own  # asking for one output leaves the others' values alone


def test_without_a_usable_hidden_the_norm_is_judged_from_what_should_have_been():
    call, contract = a_call(), CONTRACTS["of the unrounded hidden"]
    _, normalized = results(call, contract, total(call, contract))
    for missing in (None, normalized.float(), normalized[:2]):
        verdict = judge(BOUNDARY, [call], [(missing, normalized)], contract=contract)
        assert [output.conforms for output in verdict.outputs] == [False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_class_of_its_own_in_hidden_reaches_the_norm(bad):
    call, contract = a_call(), CONTRACTS["of the unrounded hidden"]
    unrounded = total(call, contract)
    unrounded[1, 3] = bad
    result = results(call, contract, unrounded)
    hidden, normalized = judge(BOUNDARY, [call], [result], contract=contract).outputs
    assert hidden.wrong == 1
    assert normalized.conforms
    # The returned infinity may be of a finite sum, so that nothing is required of its row.
    assert normalized.not_judged == (0 if bad != bad else 512)
