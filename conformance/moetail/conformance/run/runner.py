"""Run the suite without pytest: in process, with rank processes that several runs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moetail.conformance.run.checks import Plan, Tail
from moetail.conformance.run.options import load_checks, trials_asked
from moetail.conformance.run.ranks import RankPool
from moetail.conformance.run.results import VIOLATES, Results, TrialResult
from moetail.conformance.run.trying import attempt

__all__ = ["run_suite"]


def run_suite(
    implementation: str,
    plan: Plan,
    *,
    pool: RankPool | None = None,
    operations: Sequence[str] = (),
    rules: Sequence[str] = (),
    stop_at_first: bool = False,
    after_trial: Callable[[TrialResult], None] | None = None,
) -> Results:
    """Judge an implementation, check by check in the order in which checks are believed.

    Args:
        implementation: as :func:`moetail.conformance.implementation.load` takes it.
        plan: how much, and where.
        pool: rank processes to use; without one, own ones are started when needed and ended.
        operations, rules: restrict what is tried; empty is everything.
        stop_at_first: end with the first violation, which is the one that names the rule.
        after_trial: is told of every trial.
    """
    tail = Tail.of(implementation, plan, pool)
    results = Results(
        implementation=tail.implementation.spec,
        provided=tail.implementation.provided,
        plan=plan.shown,
        operations=tuple(operations),
        rules=tuple(rules),
    )
    try:
        for check in load_checks():
            for trial in trials_asked(
                check, plan, results.provided, operations=operations, rules=rules
            ):
                result, _ = attempt(check, tail, trial)
                results.trials.append(result)
                if after_trial is not None:
                    after_trial(result)
                if stop_at_first and result.status == VIOLATES:
                    return results
    finally:
        if pool is None:
            tail.close()
    return results
