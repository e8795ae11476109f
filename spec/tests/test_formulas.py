"""Formulas and statements: Beam's as the contract's text has them, others by what is edited."""

from __future__ import annotations

import pytest

from moetail.spec import BEAM, RULES, Kind, Rounding
from moetail.spec.contract import BF16
from moetail.spec.formulas import formula, rules_of, statement

# The normative text, written out.
BEAMS = {
    "reduce": "a = FP32 sum over live k of float(w[t, k]) * float(x[t, k])",
    "round": "r = RN(a)",
    "scale": "s = RN(float(r) * float(routed_scale))",
    "shared": "p = RN(s + shared)",
    "all-reduce": "q = RN(FP32 sum over ranks of p)",
    "post-norm": "n = RN(q * inv * w), inv = 1 / sqrt(mean(q * q) + eps)",
    "residual": "hidden = RN(RN(n * x_scale) + RN(residual * r_scale))",
    "next norm": "normalized = RN(hidden * inv' * w'), "
    "inv' = 1 / sqrt(mean(hidden * hidden) + eps')",
}
STATEMENTS = {
    "ROUND-1": "The top-k reduction accumulates FP32 products in FP32.",
    "ROUND-2": "The reduction is rounded to BF16 before the scale, and the scaled value is rounded "
    "again; a scale of 1.0 is the identity.",
    "ROUND-3": "Rounding to BF16 is to nearest, ties to even.",
    "ROUND-4": "A norm computes in FP32 on the rounded input, with eps inside the root, the mean "
    "over exactly H, and the affine multiply before its one rounding; its inverse RMS is within "
    "2^-16 relative.",
    "ROUND-5": "Where scales are given, each residual product is rounded to BF16, then the sum is.",
    "ROUND-6": "The next norm takes the rounded hidden, inverse RMS and elements alike.",
    "ROUND-7": "The shared part is added after the scale and the sum is rounded; the FP32 sum over "
    "ranks is rounded to BF16 before the post-norm.",
}


@pytest.mark.parametrize("stage", BEAM.stages)
def test_beams_formulas_are_the_contracts_text(stage):
    assert formula(BEAM, stage) == BEAMS[stage]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.kind is Kind.ROUND], ids=str)
def test_beams_statements_are_the_contracts_text(rule):
    assert rule.statement == statement(BEAM, rule.id) == STATEMENTS[rule.id]


def test_every_rule_of_rounding_has_a_stage():
    found = {rule for stage in BEAM.stages for rule in rules_of(BEAM, stage)}
    assert {rule.id for rule in RULES if rule.kind is Kind.ROUND} <= found


@pytest.mark.parametrize(
    ("contract", "stage", "says"),
    [
        (
            BEAM.edit("reduce", weights="bf16", product="bf16", accumulator="bf16"),
            "reduce",
            "a = BF16 sum over live k of BF16(float(BF16(w[t, k])) * float(x[t, k]))",
        ),
        (
            BEAM.edit("reduce", accumulator="bf16", every=8),
            "reduce",
            "a = BF16 sum (every 8) over live k of float(w[t, k]) * float(x[t, k])",
        ),
        (
            BEAM.edit("post_norm", weight="fp16"),
            "post-norm",
            "n = RN(q * inv * FP16(w)), inv = 1 / sqrt(mean(q * q) + eps)",
        ),
        (BEAM.edit("round", rounds=None), "round", "r = a"),
        (
            BEAM.edit("scale", factor="bf16"),
            "scale",
            "s = RN(float(r) * float(BF16(routed_scale)))",
        ),
        (
            BEAM.edit("x_product", rounds=None),
            "residual",
            "hidden = RN(n * x_scale + RN(residual * r_scale))",
        ),
        (
            BEAM.edit("normalized", gain="1+w", between=BF16),
            "next norm",
            "normalized = RN(RN(hidden * inv') * (1 + w')), "
            "inv' = 1 / sqrt(mean(hidden * hidden) + eps')",
        ),
        (
            BEAM.edit("post_inverse", args=("reduce", "post_eps"), eps="outside"),
            "post-norm",
            "n = RN(q * inv * w), inv = 1 / (sqrt(mean(a * a)) + eps)",
        ),
        (
            BEAM.edit("shared", rounds=Rounding("bf16", "toward-zero", "tf32")),
            "shared",
            "p = round(s + shared, BF16 towards zero through TF32)",
        ),
    ],
)
def test_edits_show_in_formulas(contract, stage, says):
    assert formula(contract, stage) == says


@pytest.mark.parametrize(
    ("contract", "rule", "says"),
    [
        (BEAM.edit("reduce", accumulator="bf16"), "ROUND-1", "accumulates FP32 products in BF16."),
        (BEAM.edit("round", rounds=None), "ROUND-2", "is kept in FP32 before the scale"),
        (BEAM.each_rounding(mode="toward-zero"), "ROUND-3", "to BF16 is towards zero."),
        (BEAM.edit("post_norm", between=BF16), "ROUND-4", "affine multiply after the rounding"),
        (
            BEAM.edit("x_product", rounds=None).edit("r_product", rounds=None),
            "ROUND-5",
            "each residual product is kept in FP32",
        ),
        (
            BEAM.edit("next_inverse", args=("sum", "next_eps")),
            "ROUND-6",
            "the inverse RMS of the unrounded hidden, elements rounded.",
        ),
        (BEAM.edit("all_reduce", rounds=None), "ROUND-7", "is kept in FP32 before the post-norm."),
    ],
)
def test_edits_show_in_statements(contract, rule, says):
    assert says in statement(contract, rule)
