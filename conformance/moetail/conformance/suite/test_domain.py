"""DOMAIN: what is refused."""

from __future__ import annotations

from collections.abc import Iterator

from moetail.conformance.run.call import CallSpec
from moetail.conformance.run.check import Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Trial
from moetail.conformance.suite.draws import draw
from moetail.conformance.suite.refusing import must_refuse, refusal_trials, specs
from moetail.spec import rule
from moetail.spec.rules import GATHER, WORKSPACE

_COMPUTING = tuple(name for name in rule("DOMAIN-1").operations if name != WORKSPACE)


@checks_rule(
    "DOMAIN-1",
    refusal_trials("DOMAIN-1"),
    operations=_COMPUTING,
    varies=True,
    believed=(Phase.REFUSAL, 40),
)
def test_domain_1_refuses_what_is_outside(subject: Subject, trial: Trial) -> None:
    must_refuse(subject, trial)


def _groups(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name)[:3]:
        (case,) = draw(plan, GATHER, "workspace", 1, fixed={"tokens": 4}, ranks=(ranks,))
        yield Trial(name, case)


@checks_rule("DOMAIN-1", _groups, operations=(WORKSPACE,), believed=(Phase.REFUSAL, 50))
def test_domain_1_no_workspace_that_cannot_serve(subject: Subject, trial: Trial) -> None:
    """None on every rank, or a refusal on every rank: never one rank with and one without."""
    case = trial.case
    for hidden, most, dtype in (
        (case.hidden, 33, "float64"),
        (0, 33, "bfloat16"),
        (case.hidden, -1, "bfloat16"),
    ):
        asked = f"hidden_size {hidden}, max_tokens {most}, {dtype}"
        found = subject.workspaces(case.ranks, hidden, most, dtype)
        made = [rank for rank, one in enumerate(found) if not ("none" in one or "raised" in one)]
        subject.require(not made, f"create made a workspace for {asked} on ranks {made}")
        kinds = {tuple(one) for one in found}
        subject.require(len(kinds) == 1, f"create did not agree on all ranks for {asked}: {found}")


@checks_rule(
    "DOMAIN-2",
    refusal_trials("DOMAIN-1", "PACK-1"),
    operations=_COMPUTING,
    varies=True,
    believed=(Phase.RUN, 120),
)
def test_domain_2_a_refusal_changes_nothing(subject: Subject, trial: Trial) -> None:
    (before,) = subject.run(CallSpec(trial.case))
    (refused,) = subject.run(*specs(trial))
    if not refused.refused:
        raise NotJudged("it was not refused, which is DOMAIN-1's or PACK-1's to say")
    for rank, outcome in enumerate(refused.outcomes):
        where = f" on rank {rank}" if rank else ""
        subject.require(
            not outcome.changed,
            f"refused, but changed {', '.join(outcome.changed)}{where}",
            refused,
        )
    (after,) = subject.run(CallSpec(trial.case))
    subject.same(before, after, "a refusal changed what the next call computes")
