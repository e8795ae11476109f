"""One trial, from start to result; the one place where a verdict is turned into a result."""

from __future__ import annotations

import time

from moetail.conformance.checks import (
    Check,
    NotJudged,
    Tail,
    Trial,
    Violation,
    repeat_command,
)
from moetail.conformance.results import CONFORMS, NOT_JUDGED, VIOLATES, TrialResult

__all__ = ["attempt"]


def attempt(
    check: Check, tail: Tail, trial: Trial
) -> tuple[TrialResult, Violation | NotJudged | None]:
    """Run a trial. Any other exception is a fault of the suite, and is raised."""
    started = time.perf_counter()
    status, found = CONFORMS, ""
    error: Violation | NotJudged | None = None
    rule, diagnosis, trace = check.rule, "", ""
    try:
        check.run(tail, trial)
    except NotJudged as nothing:
        status, found, error = NOT_JUDGED, str(nothing), nothing
    except Violation as violation:
        status, found, error = VIOLATES, violation.found, violation
        rule, trial, diagnosis = violation.rule, violation.trial, violation.diagnosis
        trace = violation.trace
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
        repeat=repeat_command(tail.implementation.spec, tail.plan, check.rule, trial)
        if status == VIOLATES
        else "",
        trace=trace,
    )
    return result, error
