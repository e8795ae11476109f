"""One trial, from start to result; the one place where a verdict is turned into a result."""

from __future__ import annotations

import time
from typing import Any

from moetail.conformance.adapters import ADAPTERS, NotMapped
from moetail.conformance.run.checks import (
    TAIL,
    Check,
    NotJudged,
    Tail,
    Trial,
    Violation,
    repeat_command,
)
from moetail.conformance.run.results import CONFORMS, NOT_JUDGED, VIOLATES, TrialResult

__all__ = ["attempt"]


# A diagnosis evaluates the whole catalogue, so not every one of many violations gets one: those do
# that may be the smallest of their rule and, where the diagnosis names the rule, the first few.
_MOST_TAILS = 12


def attempt(
    check: Check, tail: Tail, trial: Trial, *, diagnosing: bool = True
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
        _run(check, tail, trial)
    except NotJudged as nothing:
        status, found, error = NOT_JUDGED, str(nothing), nothing
    except Violation as violation:
        status, found, error = VIOLATES, violation.found, violation
        rule, trial, trace = violation.rule, violation.trial, violation.trace
        asked = rule
        if diagnosing and _worth_it(tail, violation):
            diagnosis, rule = _diagnosed(violation)
        if diagnosing and _is_shown(tail, rule, trial):
            evidence = _evidence(violation)
    result = TrialResult(
        rule=rule,
        operation=trial.operation,
        case=trial.id,
        check=check.name,
        status=status,
        judged=tail.tally.judged,
        not_judged=tail.tally.not_judged,
        ambiguous=tail.tally.ambiguous,
        elements=trial.case.elements,
        seconds=round(time.perf_counter() - started, 4),
        found=found,
        diagnosis=diagnosis,
        repeat=repeat_command(tail.implementation.spec, tail.plan, asked, trial)
        if status == VIOLATES
        else "",
        trace=trace,
        evidence=evidence,
    )
    return result, error


def _run(check: Check, tail: Tail, trial: Trial) -> None:
    """The check; what an adapter has nothing to map to is not judged.

    Only adapters may say so: anybody else's exception on legal arguments breaks a rule.
    """
    try:
        check.run(tail, trial)
    except Violation as violation:
        outcomes = [outcome for run in violation.runs for outcome in run.outcomes]
        # Also of a call that was not reached, since an earlier one of the trial is not mapped.
        parts = [outcome.refusal.partition(f"{NotMapped.__name__}: ") for outcome in outcomes]
        unmapped = [reason for _, found, reason in parts if found]
        if not unmapped or tail.implementation.spec not in ADAPTERS:
            raise
        raise NotJudged(unmapped[0]) from violation


def _worth_it(tail: Tail, violation: Violation) -> bool:
    if violation.verdict is None or not violation.runs:
        return False
    key = (violation.rule, violation.operation)
    seen = tail.diagnosed.setdefault(key, [])
    elements = violation.trial.case.elements
    worth = (
        len(seen) < _MOST_TAILS if violation.rule == TAIL else elements < min(seen, default=1e99)
    )
    if worth:
        seen.append(elements)
    return worth


def _is_shown(tail: Tail, rule: str, trial: Trial) -> bool:
    """Whether a report would show this violation, if the run ended here.

    It shows the smallest, and the largest one's picture.
    """
    elements = trial.case.elements
    key = (rule, trial.operation)
    least, most = tail.shown.get(key, (elements + 1, elements - 1))
    tail.shown[key] = (min(least, elements), max(most, elements))
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
        run.step.case.operation, run.calls, violation.verdict, prefer=violation.rule
    )
    return diagnosis.describe(), rule_named(violation.rule, diagnosis)
