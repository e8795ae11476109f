"""The diagnosis names what was done, also two things at once, and does not name what was not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from moetail.conformance.cases import Case
from moetail.conformance.catalogue import Mutant, change, changed, edited
from moetail.conformance.diagnosis import (
    DEVIATIONS,
    Diagnosis,
    diagnose,
    evidence,
    rule_named,
    simulate,
)
from moetail.conformance.judge import judge
from moetail.reference import Reference
from moetail.spec import Contract, Step
from moetail.spec.rules import ALLREDUCE, FINALIZE, FUSED, GATHER, MOE_OUTPUT

_TAIL: dict[str, Any] = {"post": "affine", "next": "affine", "scales": (0.7, 1.3)}
_FUSED = Case(FUSED, "normal", 1, 9, 6, 512, routed_scale=2.5, **_TAIL)
_FINALIZE = Case(FINALIZE, "normal", 1, 9, 6, 512, routed_scale=2.5)
_GATHER = Case(GATHER, "normal", 1, 5, 4, 256, ranks=2, strategy="twoshot", **_TAIL)
_ALLREDUCE = Case(ALLREDUCE, "normal", 1, 5, 6, 256, ranks=3, shared=True, **_TAIL)


def _diagnosed(case: Case, broken: type[Reference], prefer: str = "") -> Diagnosis:
    calls = [case.arguments(rank) for rank in range(case.ranks)]
    verdict = judge(case.operation, calls, simulate(broken, case.operation, calls))
    assert not verdict.conforms
    return diagnose(case.operation, calls, verdict, prefer=prefer)


def _mutant(mutant_id: str) -> Mutant:
    item = change(mutant_id)
    assert isinstance(item, Mutant)
    return item


def _ids(found: Diagnosis) -> list[str]:
    return [item.id for item in found.deviations]


@pytest.mark.parametrize(
    ("mutant_id", "case"),
    [
        ("scale-before-rounding", _FINALIZE),
        ("truncates", _FUSED),
        ("bf16-accumulator", _FUSED),
        ("affine-after-rounding", _FUSED),
        ("inverse-too-large", _FUSED),
        ("x-product-not-rounded", _FUSED),
        ("next-norm-of-unrounded-hidden", _FUSED),
        ("ownership-round-robin", _GATHER),
        ("all-reduce-not-rounded", _ALLREDUCE),
        ("shared-forgotten", _ALLREDUCE),
    ],
)
def test_names_a_single_deviation(mutant_id: str, case: Case) -> None:
    item = _mutant(mutant_id)
    found = _diagnosed(case, item.implementation)
    assert _ids(found) == [mutant_id]
    assert found.rules == (item.rule,)
    assert found.explained == found.wrong
    assert found.precision == 1.0


@pytest.mark.parametrize("mutant_id", ["scale-before-rounding", "affine-after-rounding"])
def test_a_legal_order_of_the_sum_does_not_hide_it(mutant_id: str) -> None:
    case = Case(FUSED, "cancel", 1, 9, 6, 512, routed_scale=2.5, **_TAIL)
    found = _diagnosed(case, changed(change(mutant_id), change("reversed-sum")))
    assert _ids(found) == [mutant_id]
    assert found.share > 0.95


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("truncates", "scale-before-rounding"),
        ("affine-after-rounding", "scale-twice"),
        ("residual-product-not-rounded", "bf16-accumulator"),
        ("bf16-partial-sums", "scale-before-rounding"),
        ("mean-over-one-less", "scales-in-bf16"),
    ],
)
def test_names_two_at_once(first: str, second: str) -> None:
    found = _diagnosed(_FUSED, changed(change(first), change(second)))
    assert sorted(_ids(found)) == sorted((first, second))
    assert found.share > 0.97


class _Unheard(Reference):
    """Adds a constant: no mutant does."""

    def add(self, step: Step, value: Tensor, other: Tensor) -> Tensor:
        return super().add(step, value, other) + 0.375


def test_says_so_where_nothing_known_explains_it() -> None:
    found = _diagnosed(_FUSED, _Unheard)
    assert found.deviations == ()
    assert found.wrong > 0


class _With(Reference):
    def __init__(self, contract: Contract) -> None:
        self.contract = contract


def test_a_deviation_that_is_wrong_elsewhere_is_not_named() -> None:
    """One token of nine is truncated: truncation explains it, and contradicts the eight others."""
    contract = edited(change("truncates"))

    class OneToken(Reference):
        def finalize(self, values: Any, live: int, stages: Any) -> Tensor:
            finalized = super().finalize(values, live, stages)
            finalized[0] = _With(contract).finalize(values, live, stages)[0]
            return finalized

    assert _diagnosed(_FINALIZE, OneToken).deviations == ()


def test_the_preferred_rule_decides_between_equals() -> None:
    case = Case(GATHER, "normal", 1, 5, 4, 256, ranks=2, strategy="unfused", routed_scale=2.5)
    broken = change("unfused-gather-forgets-scale").implementation
    assert _diagnosed(case, broken, prefer="OWN-4").rules == ("OWN-4",)
    assert _diagnosed(case, broken, prefer="ROUND-2").rules == ("ROUND-2",)


def test_the_rule_is_the_checks_unless_another_explains_nearly_all() -> None:
    other = _mutant("inverse-too-large")
    assert rule_named("ROUND-2", Diagnosis((other,), 95, 100, 1.0)) == "ROUND-4"
    assert rule_named("ROUND-2", Diagnosis((other,), 80, 100, 1.0)) == "ROUND-2"
    assert rule_named("ROUND-2", Diagnosis((), 0, 100, 0.0)) == "ROUND-2"
    assert rule_named("TAIL", Diagnosis((other,), 60, 100, 1.0)) == "ROUND-4"
    both = (other, _mutant("scale-twice"))
    assert rule_named("ROUND-2", Diagnosis(both, 100, 100, 1.0)) == "ROUND-2"


@pytest.mark.parametrize(
    "case",
    [
        Case(FINALIZE, "normal", 1, 33, 6, 512, routed_scale=2.5, capacity=3),
        Case(FUSED, "normal", 1, 33, 6, 512, routed_scale=2.5, **_TAIL),
        Case(MOE_OUTPUT, "normal", 1, 33, 6, 512, routed_scale=2.5, local=0.5, shared=True),
        Case(MOE_OUTPUT, "normal", 1, 33, 6, 512, routed_scale=2.5, layout="route_major"),
        Case(ALLREDUCE, "normal", 1, 33, 6, 256, routed_scale=2.5, ranks=2, **_TAIL),
        Case(GATHER, "normal", 1, 33, 6, 256, routed_scale=2.5, ranks=2, capacity=1, **_TAIL),
    ],
    ids=lambda case: case.id.split("/")[0],
)
def test_a_large_call_is_cut_to_some_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MOST_TERMS", 1 << 14)
    found = _diagnosed(case, change("scale-before-rounding").implementation)
    assert _ids(found) == ["scale-before-rounding"]
    assert found.wrong < 33 * 256


def test_deviations_change_values() -> None:
    rules = {item.rule for item in DEVIATIONS}
    assert {f"ROUND-{number}" for number in range(1, 8)} <= rules
    assert not any(item.split("-")[0] in ("RUN", "DOMAIN", "CONVERT") for item in rules)


def test_conforming_results_need_no_diagnosis() -> None:
    calls = [_FINALIZE.arguments()]
    verdict = judge(FINALIZE, calls, simulate(Reference, FINALIZE, calls))
    assert diagnose(FINALIZE, calls, verdict).wrong == 0
