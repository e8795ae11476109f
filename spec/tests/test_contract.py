"""The program: what may be written down, what edits make of it, and that it fits the operations."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest

from moetail import spec
from moetail.spec import BEAM, OPERATIONS, Contract, Rounding, Step
from moetail.spec.contract import BF16


def taken(contract: Contract) -> dict[str, tuple[str, ...]]:
    return {step.name: step.args for step in contract.steps}


def test_every_rounding_of_beam_is_to_bf16_to_nearest_even():
    assert {step.rounds for step in BEAM.steps} == {None, Rounding("bf16", "nearest-even")}


def test_beam_rounds_where_the_rules_say():
    """ROUND-2, 4, 5, 6, 7 each name roundings; what they do not name stays in FP32."""
    rounded = [step.name for step in BEAM.steps if step.rounds is not None]
    assert rounded == [
        "round",
        "scale",
        "shared",
        "all_reduce",
        "post_norm",
        "x_product",
        "r_product",
        "hidden",
        "normalized",
    ]


@pytest.mark.parametrize("step", BEAM.steps, ids=lambda step: step.name)
def test_a_step_takes_arguments_or_earlier_values(step):
    names = [other.name for other in BEAM.steps]
    roles = {argument.role for item in OPERATIONS for argument in item.arguments}
    for arg in step.args:
        earlier = arg in names and names.index(arg) < names.index(step.name)
        assert earlier or arg in roles | {"x_scale", "r_scale"}
    assert spec.rule(step.rule).kind is spec.Kind.ROUND


def test_an_edit_changes_one_step_and_nothing_else():
    edited = BEAM.edit("round", rounds=None)
    assert BEAM.differences(edited) == ("round",)
    assert edited.step("round").rounds is None
    assert BEAM.step("round").rounds == BF16
    assert BEAM.differences(BEAM.edit("scale", factor="bf16")) == ("scale",)
    assert BEAM.edit("scale", factor="bf16").step("scale").how == {"factor": "bf16"}
    assert BEAM.differences(BEAM.edit("scale", factor="fp32")) == ()


def test_a_step_left_out_hands_its_input_on():
    edited = BEAM.without("scale")
    assert "scale" not in taken(edited)
    assert taken(edited)["shared"] == ("round", "shared_output")


def test_a_step_put_in_stands_between():
    again = Step("again", "multiply", ("scale", "routed_scale"), BF16, "ROUND-2", "scale")
    edited = BEAM.insert("scale", again)
    assert taken(edited)["again"] == ("scale", "routed_scale")
    assert taken(edited)["shared"] == ("again", "shared_output")
    first = Step("scaled", "multiply", ("shared_output", "routed_scale"), BF16, stage="shared")
    assert taken(BEAM.insert("shared_output", first))["shared"] == ("scale", "scaled")


def test_several_steps_are_put_in_as_they_follow_each_other():
    rounded = Step("rounded", "round", ("sum",), BF16, stage="residual")
    scaled = Step("scaled", "multiply", ("rounded", "x_scale"), None, stage="residual")
    edited = BEAM.insert("sum", rounded, scaled)
    assert taken(edited)["scaled"] == ("rounded", "x_scale")
    assert taken(edited)["hidden"] == ("scaled",)
    assert BEAM.differences(edited) == ("hidden", "rounded", "scaled")


def test_a_step_that_takes_another_value():
    edited = BEAM.take("next_inverse", hidden="sum")
    assert taken(edited)["next_inverse"] == ("sum", "next_eps")
    assert BEAM.differences(edited) == ("next_inverse",)
    with pytest.raises(KeyError, match="next_inverse takes no 'total'; it takes hidden, next_eps"):
        BEAM.take("next_inverse", total="sum")


def test_a_step_moved_behind_another():
    edited = BEAM.move("scale", after="shared")
    assert taken(edited)["shared"] == ("round", "shared_output")
    assert taken(edited)["scale"] == ("shared", "routed_scale")
    assert taken(edited)["all_reduce"] == ("scale",)


def test_every_step_of_an_op_can_be_changed_at_once():
    edited = BEAM.each("affine", gain="none", rounds=None)
    assert BEAM.differences(edited) == ("post_norm", "normalized")
    assert {edited.step(name).rounds for name in ("post_norm", "normalized")} == {None}
    assert edited.step("post_norm").how["gain"] == "none"


def test_every_rounding_can_be_changed_at_once():
    edited = BEAM.each_rounding(mode="toward-zero")
    assert {step.rounds.mode for step in edited.steps if step.rounds} == {"toward-zero"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Step("a", "subtract", ("x",)), "op: 'subtract'"),
        (lambda: Step("a", "add", ("x", "y"), how={"factor": "bf16"}), "'factor' says nothing"),
        (lambda: Rounding("bf8"), "format: 'bf8'"),
        (lambda: Rounding("bf16", "to-zero"), "mode: 'to-zero'"),
        (lambda: Rounding("bf16", through="bf8"), "through: 'bf8'"),
        (lambda: BEAM.edit("scale", colour="red"), "'colour' says nothing of multiply"),
        (lambda: Contract("c", (BEAM.steps[0], BEAM.steps[0])), "two are called 'reduce'"),
        (lambda: Contract("c", BEAM.steps[1::-1]), "takes 'reduce', which comes later"),
    ],
)
def test_what_is_no_contract_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_name_that_is_not_there_is_told():
    with pytest.raises(KeyError, match="no step 'scales'"):
        BEAM.edit("scales", rounds=None)


def test_a_contract_travels():
    assert pickle.loads(pickle.dumps(BEAM)) == BEAM


COMPUTING = [item for item in OPERATIONS if item.computes]


@pytest.mark.parametrize("item", COMPUTING, ids=str)
def test_an_operation_has_stages_and_outputs_of_the_contract(item):
    assert list(item.stages) == [name for name in BEAM.stages if name in item.stages]
    for output in item.outputs:
        assert BEAM.step(output.step).stage in item.stages
    assert item.takes(item.counts)


@pytest.mark.parametrize("item", COMPUTING, ids=str)
def test_arguments_are_those_of_the_api(item):
    parameters = list(inspect.signature(getattr(spec.MoETail, item.name)).parameters)[1:]
    assert {argument.name.split(".")[0] for argument in item.arguments} == set(parameters)


def test_an_argument_is_read_and_replaced_where_it_lies():
    routed = spec.UnfinalizedMoEOutput(1, 2, 3)
    call = {"x": spec.MoEOutput(routed, None, 2.5)}
    weights = spec.operations.MOE_OUTPUT.argument("weights")
    assert weights.of(call) == 2
    changed = weights.put(call, 7)
    assert changed["x"].routed == dataclasses.replace(routed, expert_weights=7)
    assert call["x"].routed is routed
    assert routed.expert_weights == 2
    assert weights.of({"x": None}) is None


def test_values_go_by_role():
    call = {
        "x": spec.MoEOutput(spec.UnfinalizedMoEOutput("r", "w", "m"), "s", 2.5),
        "scales": (1, 2),
    }
    values = spec.operations.ALLREDUCE.values(call)
    assert (values["rows"], values["weights"], values["map"]) == ("r", "w", "m")
    assert (values["shared_output"], values["routed_scale"]) == ("s", 2.5)
    assert (values["x_scale"], values["r_scale"], values["post_eps"]) == (1, 2, None)
