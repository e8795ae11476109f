"""The catalogue of mutants: complete, well formed, and each of them really broken."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import moetail.conformance.catalogue as package
from moetail.conformance.cases import Case
from moetail.conformance.catalogue import MUTANTS, VARIANTS, Change, Mutant, change, changed, edited
from moetail.conformance.catalogue.change import CATALOGUE
from moetail.conformance.run.call import same_bits
from moetail.conformance.run.check import planned
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Violation
from moetail.conformance.score.compare import Line, markdown, ordinary_cases
from moetail.conformance.score.table import Row, Table, examine
from moetail.conformance.suite import checks
from moetail.reference import Reference
from moetail.spec import BEAM, OPERATIONS, RULES, operation, rule
from moetail.spec.rules import BOUNDARY, FUSED, MOE_OUTPUT

NAMES = {item.name for item in OPERATIONS}

# What public trackers report, each by some of the words that its mutant's source has.
PUBLIC_BUGS = (
    "aiter #2586",
    "vllm-omni #6878",
    "sglang #25920",
    "flashinfer #3595",
    "#3644",
    "#3925",
    "flashinfer trtllm finalize kernel",
    "TransformerEngine #2908",
    "flashinfer #2643",
    "TensorRT-LLM #15887",
    "vllm #54747",
    "transformers #48205",
    "flashinfer's own finalize test",
    "vllm #24119",
    "#45037",
    "sglang #8511",
    "sglang #28237",
    "sglang #28574",
    "flashinfer #3671",
    "DeepGEMM #451",
    "flashinfer #3053",
    "sglang #38300",
    "VeOmni #61",
    "vllm #39593",
)


def test_there_are_enough_and_ids_are_unique() -> None:
    assert len(MUTANTS) >= 188
    assert len({item.id for item in CATALOGUE.values()}) == len(MUTANTS) + len(VARIANTS)


@pytest.mark.parametrize("item", MUTANTS, ids=lambda item: item.id)
def test_every_entry_is_well_formed(item: Mutant) -> None:
    assert item.id == item.id.lower()
    assert item.attribute.isidentifier()
    assert item.sentence.endswith(".")
    assert rule(item.rule).id == item.rule
    assert item.rule not in item.also
    assert all(rule(other) for other in item.also)
    assert item.operations
    assert set(item.operations) <= NAMES
    assert issubclass(item.implementation, Reference)
    assert item.when is None or item.edit is not None


@pytest.mark.parametrize("item", CATALOGUE.values(), ids=lambda item: item.id)
def test_every_entry_loads_by_its_name(item: Change) -> None:
    module, attribute = item.name.split(":")
    loaded = getattr(importlib.import_module(module), attribute)
    assert type(loaded) is item.implementation
    assert getattr(package, item.attribute) is loaded


EDITS = [item for item in CATALOGUE.values() if item.edit is not None]


@pytest.mark.parametrize("item", EDITS, ids=lambda item: item.id)
def test_every_edit_gives_another_contract(item: Change) -> None:
    contract = edited(item)
    differing = BEAM.differences(contract)
    assert differing
    every = (*BEAM.steps, *contract.steps)
    stages = {stage for name in item.operations for stage in operation(name).stages}
    assert {step.stage for step in every if step.name in differing} & stages
    # The same edit twice is one change only where calls or operations tell them apart.
    same = [
        other for other in EDITS if other.edit is not item.edit and other.edit(BEAM) == contract
    ]
    told = (item.when, item.operations)
    assert all((other.when, other.operations) != told for other in same)


def test_an_edit_leaves_other_operations_alone() -> None:
    case = Case(BOUNDARY, "normal", 1, 3, 1, 256, next="affine")
    plain, broken = Reference(), change("scale-in-bf16").implementation()
    other = change("truncates-normalized").implementation()
    calls = case.arguments(), case.arguments(), case.arguments()
    expected, same, differs = (
        made.beam_norm_residual_norm(**call)
        for made, call in zip((plain, broken, other), calls, strict=True)
    )
    assert same_bits(expected[1], same[1])
    assert not same_bits(expected[1], differs[1])
    everywhere = changed(change("tf32-products"))
    routed = Case(MOE_OUTPUT, "normal", 1, 9, 6, 256).arguments()["x"]
    assert same_bits(
        change("tf32-products").implementation().finalize_moe_output(routed),
        plain.finalize_moe_output(routed),
    )
    assert not same_bits(
        everywhere().finalize_moe_output(routed), plain.finalize_moe_output(routed)
    )


def test_an_edit_holds_only_for_its_calls() -> None:
    item = change("unfused-forgets-scale")
    case = Case(FUSED, "normal", 1, 5, 4, 256, routed_scale=2.5, next="affine")
    for strategy, holds in (("fused", False), ("unfused", True), (None, False)):
        one = case.replace(strategy=strategy)
        got = item.implementation().beam_moe_finalize_norm_residual_norm(**one.arguments())
        due = Reference().beam_moe_finalize_norm_residual_norm(**one.arguments())
        assert same_bits(got[0], due[0]) is not holds


def test_two_edits_make_one_contract() -> None:
    first, second = change("scale-before-rounding"), change("affine-plus-one")
    assert edited(first, second) == edited(second, first)
    assert set(BEAM.differences(edited(first, second))) == {"round", "post_norm", "normalized"}
    assert edited(first, change("sentinel-as-row-zero")) == edited(first)
    with pytest.raises(KeyError, match="no step 'scale'"):
        edited(change("scale-forgotten"), change("scale-in-bf16"))


def test_every_rule_is_broken_by_some_mutant() -> None:
    assert {item.id for item in RULES} == {item.rule for item in MUTANTS}


@pytest.mark.parametrize("bug", PUBLIC_BUGS)
def test_every_public_bug_is_covered(bug: str) -> None:
    assert any(bug in (item.source or "") for item in MUTANTS)


def test_unknown_ids_are_named() -> None:
    with pytest.raises(KeyError, match="no change 'nothing'"):
        change("nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing


# The checks that need ranks run with the whole catalogue (`moetail mutants`), not here.
LOCAL = [
    item for item in MUTANTS if any(not operation(name).distributed for name in item.operations)
]


@pytest.mark.parametrize("item", LOCAL, ids=lambda item: item.id)
def test_every_local_mutant_differs(item: Mutant) -> None:
    """A check of a rule that it breaks rejects it."""
    operations = [name for name in item.operations if not operation(name).distributed]
    wanted = {item.rule, *item.also, "TAIL"}
    wanted_checks = [check for check in checks() if check.rule in wanted]
    wanted_checks.sort(key=lambda check: check.rule != item.rule)
    for seed in range(3):
        plan = Plan(profile="quick", seed=seed, ranks=(1,))
        subject = Subject.of(item.name, plan)
        provided = subject.implementation.provided
        for check, trial in planned(wanted_checks, plan, provided, operations=operations):
            try:
                check.run(subject, trial)
            except Violation:
                return
            except Exception:
                continue  # nothing to judge, or a check that another rule's fault stops
    pytest.fail(f"no check of {', '.join(wanted)} rejects it")


# --- the table ------------------------------------------------------------------------------------


def test_examine_ends_with_the_check_that_rejects() -> None:
    row = examine(change("scale-before-rounding"), Plan(ranks=(1,)))
    assert row.killed
    assert row.right
    assert row.first == "ROUND-2"
    assert row.case.startswith(row.operation)
    assert row.exposure is not None
    assert row.exposure > 0.5
    assert row.deviations == ("scale-before-rounding",)
    assert row.explained == 1.0


def test_a_table_counts_what_is_not_right() -> None:
    rows: list[dict[str, Any]] = [
        {"id": "killed", "variant": False, "expected": "ROUND-1", "first": "ROUND-1"},
        {"id": "misnamed", "variant": False, "expected": "ROUND-1", "first": "ROUND-2"},
        {"id": "survivor", "variant": False, "expected": "ROUND-1"},
        {"id": "accepted", "variant": True, "judged": 5},
        {"id": "rejected", "variant": True, "first": "ROUND-1", "judged": 7},
    ]
    table = Table(Plan(), [Row(**row) for row in rows])
    assert [row.id for row in table.misnamed] == ["misnamed"]
    assert [row.id for row in table.survivors] == ["survivor"]
    assert [row.id for row in table.false_alarms] == ["rejected"]
    assert table.judged == 12
    assert table.exit_code == 1
    assert Table(Plan(), [table.rows[0], table.rows[3]]).exit_code == 0


def test_the_comparison_is_a_markdown_table() -> None:
    lines = [Line("1e-1", "a test", ("one", "two"), (), 10, 4)]
    text = markdown(lines, suite=(0, 0))
    assert "| 1e-1 | a test | 2 | 0 |" in text
    assert text.count("\n") == 4


def test_ordinary_cases_are_legal_and_cover_every_computing_operation() -> None:
    computing = {name for item in RULES if item.id == "RUN-3" for name in item.operations}
    assert {case.operation for case in ordinary_cases()} == computing


def test_the_catalogue_is_in_files_of_one_concern() -> None:
    folder = Path(package.__file__).parent
    assert all(len(path.read_text().splitlines()) < 600 for path in folder.glob("*.py"))
