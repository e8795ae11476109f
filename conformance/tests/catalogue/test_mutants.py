"""The catalogue of mutants: complete, well formed, and each of them really broken."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import moetail.conformance.catalogue as package
from moetail.conformance.catalogue import MUTANTS, Mutant, mutant
from moetail.conformance.catalogue.around import rounded_to_bits
from moetail.conformance.catalogue.reduction import through_tf32
from moetail.conformance.run.check import planned
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Violation
from moetail.conformance.score.compare import Line, markdown, ordinary_cases
from moetail.conformance.score.table import Row, Table, examine
from moetail.conformance.suite import checks
from moetail.reference import Reference
from moetail.spec import OPERATIONS, RULES, operation, rule

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
    assert len(MUTANTS) >= 45
    assert len({item.id for item in MUTANTS}) == len(MUTANTS)


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


@pytest.mark.parametrize("item", MUTANTS, ids=lambda item: item.id)
def test_every_mutant_loads_by_its_name(item: Mutant) -> None:
    module, attribute = item.name.split(":")
    loaded = getattr(importlib.import_module(module), attribute)
    assert type(loaded) is item.implementation
    assert getattr(package, item.attribute) is loaded


def test_every_rule_is_broken_by_some_mutant() -> None:
    assert {item.id for item in RULES} == {item.rule for item in MUTANTS}


@pytest.mark.parametrize("bug", PUBLIC_BUGS)
def test_every_public_bug_is_covered(bug: str) -> None:
    assert any(bug in (item.source or "") for item in MUTANTS)


def test_unknown_ids_are_named() -> None:
    with pytest.raises(KeyError, match="no mutant 'nothing'"):
        mutant("nothing")
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


# --- the roundings that mutants are made of -------------------------------------------------------


def _values() -> torch.Tensor:
    gen = torch.Generator().manual_seed(3)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (20000,), generator=gen)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45])
    return torch.cat([bits.to(torch.int32).view(torch.float32), special])


def test_adding_to_the_bits_can_round_as_the_contract_does() -> None:
    value = _values()
    got = rounded_to_bits(value, lambda bits: 0x7FFF + ((bits >> 16) & 1))
    expected = value.to(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    number = ~got.isnan()
    assert torch.equal(got[number].view(torch.int16), expected[number].view(torch.int16))


@pytest.mark.parametrize(
    ("mutant_id", "expected"),
    [
        ("truncates", [1.0, -1.0, 1.0, 1.0078125]),
        ("rounds-half-away", [1.0078125, -1.0078125, 1.0, 1.015625]),
        ("rounds-half-down", [1.0, -1.0, 1.0, 1.0078125]),
        ("rounds-half-up", [1.0078125, -1.0, 1.0, 1.015625]),
        ("rounds-up", [1.0078125, -1.0, 1.0, 1.015625]),
        ("rounds-to-odd", [1.0078125, -1.0078125, 1.0, 1.0078125]),
    ],
)
def test_modes_on_ties(mutant_id: str, expected: list[float]) -> None:
    """A tie above an even number, its negative, no tie at all, and a tie above an odd number."""
    value = torch.tensor([1.00390625, -1.00390625, 1.0, 1.01171875])
    assert mutant(mutant_id).implementation().round(value).float().tolist() == expected


def test_tf32_has_ten_bits() -> None:
    value = torch.tensor([1.0 + 2.0**-10, 1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, torch.inf])
    expected = [1.0 + 2.0**-10, 1.0, 1.0 + 2.0**-9, torch.inf]
    assert through_tf32(value).tolist() == expected


# --- the table ------------------------------------------------------------------------------------


def test_examine_ends_with_the_check_that_rejects() -> None:
    row = examine(mutant("scale-before-rounding"), Plan(ranks=(1,)))
    assert row.killed
    assert row.right
    assert row.first == "ROUND-2"
    assert row.case.startswith(row.operation)
    assert row.exposure is not None
    assert row.exposure > 0.5
    assert "scale-before-rounding" in row.diagnosis


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
