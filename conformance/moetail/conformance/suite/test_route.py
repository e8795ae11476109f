"""ROUTE: which row a route means."""

from __future__ import annotations

from collections.abc import Iterator

from moetail.spec.rules import ALLREDUCE, MOE_OUTPUT

from moetail.conformance.checks import Plan, Tail, Trial, checks_rule
from moetail.conformance.execution import Step
from moetail.conformance.trials import aimed, draw, trials


@checks_rule("ROUTE-1", aimed("routes"))
def test_route_1_remote_routes_contribute_nothing(tail: Tail, trial: Trial) -> None:
    tail.conforms(*tail.run(Step(trial.case)))


def _permutations(plan: Plan, name: str) -> Iterator[Trial]:
    fixed = {"layout": "permuted", "tokens": 6}
    cases = draw(plan, name, "permute", plan.pick(2, 8), free=True, fixed=fixed)
    yield from trials(cases, "permuted-rows")


@checks_rule("ROUTE-2", _permutations, varies=True)
def test_route_2_permuting_rows_changes_no_bit(tail: Tail, trial: Trial) -> None:
    first, permuted = tail.run(Step(trial.case), Step(trial.case, trial.variation))
    tail.same(first, permuted, "permuting rows together with the map changed the result")


@checks_rule("ROUTE-3", aimed("weights"))
def test_route_3_weights_are_read_in_their_dtype(tail: Tail, trial: Trial) -> None:
    tail.conforms(*tail.run(Step(trial.case)))


def _without_routes(plan: Plan, name: str) -> Iterator[Trial]:
    # One route a token and an eighth of the experts local: most tokens have none.
    fixed = {"tokens": 9, "top_k": 1, "experts": 16, "local": 0.125, "poison": "nan"}
    yield from trials(draw(plan, name, "empty", plan.pick(2, 6), "grid", fixed=fixed))


@checks_rule("ROUTE-4", _without_routes, operations=(MOE_OUTPUT, ALLREDUCE))
def test_route_4_a_token_without_routes_is_zero_and_written(tail: Tail, trial: Trial) -> None:
    tail.conforms(*tail.run(Step(trial.case, fill=True)))


def _special(plan: Plan, name: str) -> Iterator[Trial]:
    for source in ("nan", "inf"):
        yield from trials(draw(plan, name, "special", plan.pick(1, 4), source))


@checks_rule("ROUTE-5", _special)
def test_route_5_nan_and_infinity_propagate(tail: Tail, trial: Trial) -> None:
    tail.conforms(*tail.run(Step(trial.case)))
