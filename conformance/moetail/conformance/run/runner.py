"""Run trials of the suite, from start to result: one, or all that were asked for."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

from moetail.conformance.adapters import ADAPTERS, NotMapped
from moetail.conformance.run.check import TAIL, Check
from moetail.conformance.run.options import load_checks, trials_asked
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import RankPool
from moetail.conformance.run.results import CONFORMS, NOT_JUDGED, VIOLATES, Results, TrialResult
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Trial, Violation

__all__ = ["attempt", "run_suite"]

# A diagnosis evaluates the whole catalogue, so not every one of many violations gets one: those do
# that may be the smallest of their rule and, where the diagnosis names the rule, the first few.
_MOST_TAILS = 12


def attempt(
    check: Check, subject: Subject, trial: Trial, *, diagnosing: bool = True
) -> tuple[TrialResult, Violation | NotJudged | None]:
    """Run a trial. Any other exception is a fault of the suite, and is raised.

    Args:
        diagnosing: ask the catalogue what explains the elements that are wrong, and keep what a
            report shows of them.
    """
    started = time.perf_counter()
    status, found = CONFORMS, ""
    error: Violation | NotJudged | None = None
    rule, diagnosis, trace = check.rule, "", ""
    asked = rule
    evidence: list[dict[str, Any]] = []
    try:
        _run(check, subject, trial)
    except NotJudged as nothing:
        status, found, error = NOT_JUDGED, str(nothing), nothing
    except Violation as violation:
        status, found, error = VIOLATES, violation.found, violation
        rule, trial, trace = violation.rule, violation.trial, violation.trace
        asked = rule
        if diagnosing and _worth_it(subject, violation):
            diagnosis, rule = _diagnosed(violation)
        if diagnosing and _is_shown(subject, rule, trial):
            evidence = _evidence(violation)
    result = TrialResult(
        rule=rule,
        operation=trial.operation,
        case=trial.id,
        check=check.name,
        status=status,
        judged=subject.tally.judged,
        not_judged=subject.tally.not_judged,
        ambiguous=subject.tally.ambiguous,
        elements=trial.case.elements,
        seconds=round(time.perf_counter() - started, 4),
        found=found,
        diagnosis=diagnosis,
        repeat=repeat_command(subject.implementation.spec, subject.plan, asked, trial)
        if status == VIOLATES
        else "",
        trace=trace,
        evidence=evidence,
    )
    return result, error


def _run(check: Check, subject: Subject, trial: Trial) -> None:
    """The check; what an adapter has nothing to map to is not judged.

    Only adapters may say so: anybody else's exception on legal arguments breaks a rule.
    """
    try:
        check.run(subject, trial)
    except Violation as violation:
        outcomes = [outcome for run in violation.runs for outcome in run.outcomes]
        # Also of a call that was not reached, since an earlier one of the trial is not mapped.
        parts = [outcome.refusal.partition(f"{NotMapped.__name__}: ") for outcome in outcomes]
        unmapped = [reason for _, found, reason in parts if found]
        if not unmapped or subject.implementation.spec not in ADAPTERS:
            raise
        raise NotJudged(unmapped[0]) from violation


def _worth_it(subject: Subject, violation: Violation) -> bool:
    if violation.verdict is None or not violation.runs:
        return False
    key = (violation.rule, violation.operation)
    seen = subject.diagnosed.setdefault(key, [])
    elements = violation.trial.case.elements
    worth = (
        len(seen) < _MOST_TAILS if violation.rule == TAIL else elements < min(seen, default=1e99)
    )
    if worth:
        seen.append(elements)
    return worth


def _is_shown(subject: Subject, rule: str, trial: Trial) -> bool:
    """Whether a report would show this violation, if the run ended here.

    It shows the smallest, and the largest one's picture.
    """
    elements = trial.case.elements
    key = (rule, trial.operation)
    least, most = subject.shown.get(key, (elements + 1, elements - 1))
    subject.shown[key] = (min(least, elements), max(most, elements))
    return elements < least or elements > most


def _evidence(violation: Violation) -> list[dict[str, Any]]:
    from moetail.conformance.report.evidence import comparison_evidence, verdict_evidence

    if violation.verdict is not None:
        return verdict_evidence(violation.verdict)
    return comparison_evidence(*violation.compared) if violation.compared else []


def _diagnosed(violation: Violation) -> tuple[str, str]:
    """What explains it, and the rule to name."""
    from moetail.conformance.diagnosis import diagnose, rule_named

    run = violation.runs[0]
    assert violation.verdict is not None
    diagnosis = diagnose(
        run.spec.case.operation, run.calls, violation.verdict, prefer=violation.rule
    )
    return diagnosis.describe(), rule_named(violation.rule, diagnosis)


def repeat_command(spec: str, plan: Plan, rule_id: str, trial: Trial) -> str:
    """The one command that repeats a trial."""
    words = ["moetail", "check", spec, "--rule", rule_id, "--op", trial.operation]
    words += ["--case", trial.id]
    if plan.device != "cpu":
        words += ["--device", plan.device]
    if plan.virtual_ranks:
        words.append("--virtual-ranks")
    return shlex.join(words)


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
    subject = Subject.of(implementation, plan, pool)
    results = Results(
        implementation=subject.implementation.spec,
        provided=subject.implementation.provided,
        plan=plan.shown,
        operations=tuple(operations),
        rules=tuple(rules),
    )
    try:
        for check in load_checks():
            for trial in trials_asked(
                check, plan, results.provided, operations=operations, rules=rules
            ):
                result, _ = attempt(check, subject, trial)
                results.trials.append(result)
                if after_trial is not None:
                    after_trial(result)
                if stop_at_first and result.status == VIOLATES:
                    return results
    finally:
        if pool is None:
            subject.close()
    return results
