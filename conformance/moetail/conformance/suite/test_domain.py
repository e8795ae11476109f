"""DOMAIN: what is refused."""

from __future__ import annotations

from moetail.conformance.checks import NotJudged, Tail, Trial, checks_rule
from moetail.conformance.execution import Step
from moetail.conformance.refusing import must_refuse, refusal_trials, steps
from moetail.spec import rule
from moetail.spec.rules import WORKSPACE

_COMPUTING = tuple(name for name in rule("DOMAIN-1").operations if name != WORKSPACE)


@checks_rule("DOMAIN-1", refusal_trials("DOMAIN-1"), operations=_COMPUTING, varies=True)
def test_domain_1_refuses_what_is_outside(tail: Tail, trial: Trial) -> None:
    must_refuse(tail, trial)


@checks_rule("DOMAIN-2", refusal_trials("DOMAIN-1", "PACK-1"), operations=_COMPUTING, varies=True)
def test_domain_2_a_refusal_changes_nothing(tail: Tail, trial: Trial) -> None:
    (before,) = tail.run(Step(trial.case))
    (refused,) = tail.run(*steps(trial))
    if not refused.refused:
        raise NotJudged("it was not refused, which is DOMAIN-1's or PACK-1's to say")
    for rank, outcome in enumerate(refused.outcomes):
        where = f" on rank {rank}" if rank else ""
        tail.require(
            not outcome.changed,
            f"refused, but changed {', '.join(outcome.changed)}{where}",
            refused,
        )
    (after,) = tail.run(Step(trial.case))
    tail.same(before, after, "a refusal changed what the next call computes")
