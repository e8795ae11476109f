"""Checks of refusals, which PACK and DOMAIN share."""

from __future__ import annotations

from collections.abc import Iterator

from moetail.conformance.cases.refusals import refusals
from moetail.conformance.run.call import CallSpec
from moetail.conformance.run.check import Trials
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Trial
from moetail.conformance.suite.draws import draw
from moetail.spec.rules import BOUNDARY, GATHER, MOE_OUTPUT, ROUTE_MAJOR

__all__ = ["must_refuse", "refusal_trials", "specs"]


def refusal_trials(*rules: str) -> Trials:
    """One trial for every refusal of an operation by those rules."""

    def made(plan: Plan, name: str) -> Iterator[Trial]:
        sizes = plan.group_sizes(name)
        if plan.profile == "quick":
            sizes = sizes[:2]
        for ranks in sizes:
            # Two slots a rank at least: a tensor with one row is contiguous whatever its strides.
            top_k = 1 if name == BOUNDARY else 4
            fixed = {"tokens": 2 * ranks + 1, "top_k": top_k, "hidden": 512}
            plain = {"local": 0.5} if name in (MOE_OUTPUT, ROUTE_MAJOR) else {}
            (case,) = draw(plan, name, "plain", 1, fixed={**fixed, **plain}, ranks=(ranks,))
            if name == ROUTE_MAJOR:
                yield Trial(name, case, "rows-strided")
                continue
            cases = [case]
            for change in ({"post": "affine"}, {"shared": True}):
                try:
                    cases.append(case.replace(**change))
                except ValueError:
                    continue
            for refusal in refusals(name):
                for candidate in cases:
                    if refusal.rule in rules and refusal.needs(candidate):
                        yield Trial(name, candidate, refusal.name)
                        break
            if name == GATHER and "DOMAIN-1" in rules:
                yield Trial(name, case.replace(tokens=0), "strategy-unknown")

    return made


def specs(trial: Trial) -> tuple[CallSpec, ...]:
    """The call that must be refused."""
    if trial.variation == "past-max-tokens":
        return (CallSpec(trial.case, trial.variation, max_tokens=trial.case.tokens - 1),)
    return (CallSpec(trial.case, trial.variation),)


def must_refuse(subject: Subject, trial: Trial) -> None:
    """Every rank raises something."""
    (run,) = subject.run(*specs(trial))
    accepted = [rank for rank, outcome in enumerate(run.outcomes) if not outcome.refusal]
    where = f" by rank {accepted[0]}" if trial.case.ranks > 1 and accepted else ""
    subject.require(not accepted, f"{trial.variation}: accepted{where}", run)
