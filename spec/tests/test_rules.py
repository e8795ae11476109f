"""The rules as data: complete, stable, and what the docstrings say."""

from __future__ import annotations

import inspect
import re

import pytest

from moetail import spec
from moetail.spec.api import WorkspaceFactory

# Public ids, written out: renaming or dropping one breaks those who refer to it.
COUNTS = {
    "PACK": 3,
    "ROUTE": 5,
    "CONVERT": 4,
    "ROUND": 7,
    "LIVE": 2,
    "OWN": 4,
    "DOMAIN": 2,
    "RUN": 7,
}
IDS = [f"{kind}-{number}" for kind, count in COUNTS.items() for number in range(1, count + 1)]

OPERATIONS = [
    "convert_flashinfer_moe_output",
    "route_major_moe_output",
    "beam_moe_finalize",
    "beam_norm_residual_norm",
    "beam_moe_finalize_norm_residual_norm",
    "beam_moe_finalize_gather_norm_residual_norm",
    "BeamAllReduceWorkspace",
    "finalize_moe_output",
    "beam_finalize_allreduce_norm_residual_norm",
]


def contract_of(operation: str):
    if operation == "BeamAllReduceWorkspace":
        return WorkspaceFactory.create
    return getattr(spec.MoETail, operation)


def ids_in(text: str) -> list[str]:
    """Ids of a ``Rules:`` line, with ranges such as ROUND-1 to ROUND-4 spelled out."""
    ids = []
    for item in re.split(r",\s*", text):
        first, _, last = item.strip().partition(" to ")
        kind, number = first.split("-")
        end = int(last.split("-")[1]) if last else int(number)
        ids += [f"{kind}-{n}" for n in range(int(number), end + 1)]
    return ids


def test_the_ids_are_the_public_ones():
    assert [rule.id for rule in spec.RULES] == IDS
    assert [operation.name for operation in spec.OPERATIONS] == OPERATIONS


@pytest.mark.parametrize("rule", spec.RULES, ids=lambda rule: rule.id)
def test_a_rule_is_complete(rule):
    assert rule.kind.value == rule.id.split("-")[0]
    assert rule.statement.endswith(".")
    assert rule.breaks
    assert not rule.breaks.endswith(".")
    assert rule.source
    assert rule.operations
    assert list(rule.operations) == [name for name in OPERATIONS if name in rule.operations]
    assert "|" not in rule.statement + rule.breaks, "it would end a cell of the page's table"


def test_only_the_rule_without_a_source_text_is_derived():
    assert [rule.id for rule in spec.RULES if rule.derived] == ["ROUND-7"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_docstrings_name_the_rules_that_apply(operation):
    text = " ".join(contract_of(operation).__doc__.split())
    (line,) = re.findall(r"Rules: (.*?)\. Source: ", text)
    assert ids_in(line) == [rule.id for rule in spec.rules_for(operation)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_docstrings_describe_every_argument(operation):
    function = contract_of(operation)
    described = re.findall(r"^ {4}([\w, ]+):", inspect.getdoc(function), re.MULTILINE)
    names = {name.strip() for line in described for name in line.split(",")}
    count = function.__code__.co_argcount + function.__code__.co_kwonlyargcount
    assert set(function.__code__.co_varnames[1:count]) <= names


def test_lookups():
    assert spec.rule("round-2") is spec.rule("ROUND-2")
    assert spec.operation("moe-output").name == "finalize_moe_output"
    assert spec.operation("moe output") is spec.operation("finalize_moe_output")
    with pytest.raises(spec.ContractError, match="ROUND-7"):
        spec.rule("ROUND-8")
    with pytest.raises(spec.ContractError, match="beam_moe_finalize"):
        spec.operation("nothing")
    with pytest.raises(spec.ContractError):
        spec.rules_for("nothing")


def test_every_kind_has_a_heading_and_a_rule():
    assert {rule.kind for rule in spec.RULES} == set(spec.Kind)
    assert len({kind.heading for kind in spec.Kind}) == len(spec.Kind)
