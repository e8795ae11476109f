"""ROUTE: which row a route means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moetail.conformance.run.call import CallSpec, outputs
from moetail.conformance.run.check import Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Trial
from moetail.conformance.suite.draws import aimed, draw, trials
from moetail.spec.checks import MAX_TOP_K


def _dead_weights(plan: Plan, name: str) -> Iterator[Trial]:
    fixed = {"tokens": 6, "top_k": 4, "local": 0.5, "poison": "random"}
    for case in draw(plan, name, "dead", plan.pick(1, 4), "routes", fixed=fixed):
        yield Trial(name, case, "other-dead-weights")


@checks_rule("ROUTE-1", _dead_weights, varies=True, believed=(Phase.INVARIANCE, 20))
def test_route_1_weights_of_remote_routes_change_no_bit(subject: Subject, trial: Trial) -> None:
    first, other = subject.run(CallSpec(trial.case), CallSpec(trial.case, trial.variation))
    subject.same(first, other, "other weights in the -1 slots changed the result")


def _not_route_major(plan: Plan, name: str) -> Iterator[Trial]:
    # A fault of the route-major layout alone is PACK-3's.
    yield from (t for t in aimed("routes")(plan, name) if t.case.layout != "route_major")


def _unpadded(plan: Plan, name: str) -> Iterator[Trial]:
    # So many routes that a token has one on each rank; those of other ranks are remote as well.
    for ranks in plan.group_sizes(name):
        fixed = {
            "layout": "identity",
            "tokens": 6,
            "top_k": min(4 * ranks, MAX_TOP_K),
            "local": 0.5 if ranks == 1 else 1.0,
        }
        cases = draw(plan, name, "unpadded", plan.pick(1, 4), "routes", fixed=fixed, ranks=(ranks,))
        yield from trials(cases)


@checks_rule("ROUTE-1", _unpadded, believed=(Phase.INVARIANCE, 30))
def test_route_1_remote_routes_contribute_nothing_to_others(subject: Subject, trial: Trial) -> None:
    """As the next test, but without padding rows, and of tokens that have a local route."""
    (run,) = subject.run(CallSpec(trial.case))
    subject.returned(run)
    empty = torch.stack([_empty_tokens(call) for call in run.calls]).any(dim=0)
    subject.conforms_at(run, ~empty)


@checks_rule("ROUTE-1", _not_route_major, believed=(Phase.VALUE, 40))
def test_route_1_remote_routes_contribute_nothing(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


def _permutations(plan: Plan, name: str) -> Iterator[Trial]:
    # Sums that cancel show in which order they were taken.
    free = {"layout": "permuted", "tokens": 6}
    cancelling = {**free, "top_k": 8, "hidden": 512}
    for source, fixed in (("normal", free), ("cancel", cancelling)):
        cases = draw(
            plan, name, "permute", plan.pick(1, 4), source, free=source == "normal", fixed=fixed
        )
        yield from trials(cases, "permuted-rows")


@checks_rule("ROUTE-2", _permutations, varies=True, believed=(Phase.INVARIANCE, 50))
def test_route_2_permuting_rows_changes_no_bit(subject: Subject, trial: Trial) -> None:
    first, permuted = subject.run(CallSpec(trial.case), CallSpec(trial.case, trial.variation))
    subject.same(first, permuted, "permuting rows together with the map changed the result")


def _exact_weights(plan: Plan, name: str) -> Iterator[Trial]:
    # Powers of two and small integers: a BF16 accumulator is right on them, too.
    for dtype in ("fp32", "bf16", "fp16"):
        fixed = {"weights": dtype, "tokens": 5, "top_k": 4}
        yield from trials(draw(plan, name, dtype, plan.pick(1, 2), "grid", fixed=fixed))


@checks_rule("ROUTE-3", _exact_weights, believed=(Phase.VALUE, 20))
def test_route_3_weights_of_every_dtype_are_read(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


@checks_rule("ROUTE-3", aimed("weights"), believed=(Phase.VALUE, 80))
def test_route_3_weights_are_read_in_their_dtype(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


def _without_routes(plan: Plan, name: str) -> Iterator[Trial]:
    # One route a token and an eighth of the experts local: most tokens have none.
    fixed = {"tokens": 9, "top_k": 1, "experts": 16, "local": 0.125, "poison": "nan"}
    yield from trials(draw(plan, name, "empty", plan.pick(2, 6), "grid", fixed=fixed))


@checks_rule("ROUTE-4", _without_routes, believed=(Phase.RUN, 30))
def test_route_4_a_token_without_routes_is_written(subject: Subject, trial: Trial) -> None:
    """Fresh memory holds NaN; nothing else here is NaN, unreferenced rows included."""
    case = trial.case.replace(poison="random")
    (run,) = subject.run(CallSpec(case, fill=True))
    subject.returned(run)
    empty = [_empty_tokens(call) for call in run.calls]
    somewhere = torch.stack(empty).any(dim=0)
    if not bool(somewhere.any()):
        raise NotJudged("every token has a local route on every rank")
    for rank, value in enumerate(run.values):
        for name, output in outputs(value).items():
            unwritten = output.isnan().any(dim=-1).cpu()
            if bool((unwritten & ~somewhere).any()):
                raise NotJudged(
                    "tokens with routes are not written either, which is RUN-3's to say"
                )
            subject.tally.judged += int(somewhere.sum())
            if bool(unwritten.any()):
                token = int(unwritten.nonzero()[0])
                where = f"rank {rank}: " if case.ranks > 1 else ""
                raise subject.violation(
                    f"{where}{name}[{token}] is not written: token {token} has no local route, "
                    "and fresh memory's NaN is still there",
                    runs=[run],
                )


def _empty_tokens(call: dict[str, Any]) -> torch.Tensor:
    index: torch.Tensor = call["x"].routed.expanded_idx_to_permuted_idx
    return (index < 0).all(dim=-1).cpu()


@checks_rule("ROUTE-4", _without_routes, believed=(Phase.VALUE, 10))
def test_route_4_a_token_without_routes_is_zero(subject: Subject, trial: Trial) -> None:
    (run,) = subject.run(CallSpec(trial.case))
    subject.returned(run)
    subject.conforms_at(run, torch.stack([_empty_tokens(call) for call in run.calls]).all(dim=0))


def _special(plan: Plan, name: str) -> Iterator[Trial]:
    for source in ("nan", "inf"):
        yield from trials(draw(plan, name, "special", plan.pick(1, 4), source))
        cases = draw(plan, name, "zero weight", plan.pick(1, 2), source)
        yield from trials(cases, "zero-weights")


@checks_rule("ROUTE-5", _special, varies=None, believed=(Phase.VALUE, 30))
def test_route_5_nan_and_infinity_propagate(subject: Subject, trial: Trial) -> None:
    """Only the class is compared: how finite values are rounded is for other rules to say."""
    subject.classes(*subject.run(CallSpec(trial.case, trial.variation)))
