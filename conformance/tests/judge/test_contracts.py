"""Other contracts than Beam's: what follows one is admitted by it, and by no other that differs.

The implementations are the reference with the catalogue's edits, which evaluates the same steps on
tensors and shares no code with the sets.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from moetail.conformance.cases import Case
from moetail.conformance.catalogue import MUTANTS, Mutant
from moetail.conformance.catalogue.change import edited
from moetail.conformance.diagnosis import simulate
from moetail.conformance.judge import judge
from moetail.reference import Reference
from moetail.spec import BEAM, Contract, operation
from moetail.spec.rules import ALLREDUCE, BOUNDARY, FINALIZE, FUSED, GATHER, MOE_OUTPUT

_TAIL: dict[str, Any] = {"post": "affine", "next": "affine", "scales": (0.7, 1.3)}
_SIZES: dict[str, Any] = {"seed": 3, "tokens": 5, "top_k": 10, "hidden": 512}

CASES = (
    *(Case(FINALIZE, source, **_SIZES, routed_scale=2.827) for source in ("normal", "cancel")),
    Case(FINALIZE, "normal", **_SIZES, post="affine"),
    Case(FINALIZE, "tiny", **_SIZES, post="norm", routed_scale=1.3),
    *(
        Case(FUSED, source, **_SIZES, **_TAIL, strategy=strategy, routed_scale=scale)
        for source, scale in (("normal", 2.827), ("moe", 1.0), ("tiny", 1.3), ("wide", 2.5))
        for strategy in ("fused", "unfused")
    ),
    Case(FUSED, "normal", **_SIZES, next="affine", routed_scale=-0.37),
    *(
        Case(BOUNDARY, source, 3, 5, 1, 1024, **_TAIL)
        for source in ("normal", "tiny", "wide", "subnormal")
    ),
    Case(BOUNDARY, "normal", 4, 5, 1, 1024, next="affine"),
    Case(BOUNDARY, "tiny", 4, 5, 1, 1024, post="norm", next="affine", next_eps=1e-4),
    *(
        Case(GATHER, "normal", **_SIZES, **_TAIL, ranks=2, strategy=strategy, routed_scale=2.5)
        for strategy in ("oneshot", "twoshot", "unfused")
    ),
    *(
        Case(MOE_OUTPUT, source, **_SIZES, shared=shared, local=0.5, routed_scale=2.5, weights=kind)
        for source, shared, kind in (
            ("normal", True, "fp32"),
            ("cancel", True, "fp16"),
            ("normal", False, "bf16"),
        )
    ),
    Case(MOE_OUTPUT, "normal", **_SIZES, shared=True),
    Case(ALLREDUCE, "normal", **_SIZES, **_TAIL, ranks=3, shared=True, routed_scale=2.827),
    Case(ALLREDUCE, "cancel", **_SIZES, ranks=4, shared=True, next="affine"),
)

# One follows another contract on some ranks than on the others.
EDITS = [
    item for item in MUTANTS if item.edit is not None and item.id != "shared-of-rank-zero-only"
]


@cache
def calls_of(case: Case) -> list[dict[str, Any]]:
    return [case.arguments(rank) for rank in range(case.ranks)]


def contract_of(item: Mutant, case: Case) -> Contract:
    """The contract that a mutant follows on a case."""
    op, held = operation(case.operation), set()
    for rank, call in enumerate(calls_of(case)):
        values = {**op.values(call), "workspace": SimpleNamespace(rank=rank)}
        held.add(item.when is None or bool(item.when(values)))
    (holds,) = held
    return edited(item) if holds else BEAM


@pytest.mark.parametrize("item", EDITS, ids=lambda item: item.id)
def test_what_follows_a_contract_is_admitted_by_it_alone(item: Mutant) -> None:
    rejected = 0
    for case in CASES:
        if case.operation not in item.operations:
            continue
        if item.id == "post-norm-not-rounded" and case.strategy == "unfused":
            continue  # which stores the post-norm in BF16 between its two halves
        calls = calls_of(case)
        results = simulate(item.implementation, case.operation, calls)
        verdict = judge(case.operation, calls, results, contract=contract_of(item, case))
        assert verdict.conforms, f"{case}: {verdict.describe()}"
        rejected += judge(case.operation, calls, results).wrong
    assert rejected > 0


@pytest.mark.parametrize("item", EDITS, ids=lambda item: item.id)
def test_the_usual_contract_is_not_admitted_by_another(item: Mutant) -> None:
    """So that an edited set is no larger than it must be: the reference is outside it."""
    rejected = 0
    for case in CASES:
        if case.operation not in item.operations:
            continue
        contract = contract_of(item, case)
        if contract is not BEAM:
            results = simulate(Reference, case.operation, calls_of(case))
            rejected += judge(case.operation, calls_of(case), results, contract=contract).wrong
    # A dithered rounding may go to the nearest value.
    assert (rejected > 0) == (item.id != "rounds-stochastically")


def test_the_cases_are_judged_whole() -> None:
    for case in CASES:
        results = simulate(Reference, case.operation, calls_of(case))
        verdict = judge(case.operation, calls_of(case), results)
        assert verdict.conforms
        assert verdict.not_judged == 0
