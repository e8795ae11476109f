"""Strategies yield valid cases, whose ids round-trip, and shrink to small ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, find, given, settings

from conformance.tests.cases.strategies import case_strategy
from moetail.conformance.cases import CALLED, SOURCES, Case

QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))


@given(case_strategy(ranks=(1, 2, 3, 8)))
@settings(QUIET, max_examples=200)
def test_ids_round_trip(case: Case) -> None:
    assert Case.parse(case.id) == case
    assert Case.parse(case.id).id == case.id
    assert re.fullmatch(r"[\w./:+-]+", case.id)


@given(case_strategy(ranks=(1, 3), tokens=(0, 5), max_hidden=256))
@settings(QUIET, max_examples=60)
def test_every_case_has_arguments(case: Case) -> None:
    for rank in range(case.ranks):
        assert case.arguments(rank)


@pytest.mark.parametrize("operation", list(CALLED))
def test_shrinks_to_a_small_plain_case(operation: str) -> None:
    case = find(case_strategy(operation), lambda case: case.tokens >= 2, settings=QUIET)
    assert case == Case(operation, "normal", 0, 2, 1, 256)


@pytest.mark.parametrize("source", list(SOURCES))
def test_every_source_is_reachable(source: str) -> None:
    seen = []

    @given(case_strategy(ranks=(1, 2), sources=[source]))
    @settings(QUIET, max_examples=3, database=None)
    def collect(case: Case) -> None:
        seen.append(case.source)

    collect()
    assert set(seen) == {source}
