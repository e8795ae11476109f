"""Run trials of the suite, from start to result: the one loop that all who judge go through."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from moetail.conformance.adapters import ADAPTERS
from moetail.conformance.run.check import TAIL, Check
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import PoolError
from moetail.conformance.run.results import (
    CONFORMS,
    NOT_JUDGED,
    VIOLATES,
    Results,
    TrialResult,
    count,
)
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Trial, Violation

if TYPE_CHECKING:
    from moetail.conformance.diagnosis import Diagnosis

__all__ = ["diagnosis_fields", "run_planned", "run_trial"]


def run_planned(
    subject: Subject,
    trials: Iterable[tuple[Check, Trial]],
    results: Results,
    watch: Callable[[str], None] = lambda name: None,
) -> None:
    """Run trials and add what came of each to the results.

    A trial that the suite cannot carry out, by a fault of its own, is no verdict; the others run
    on, and the results say that the run is not complete. One where the machine fails the ranks ends
    the run.

    Args:
        watch: is told the name of each check before its trial.
    """
    trials = list(trials)
    results.planned += len(trials)
    for check, trial in trials:
        watch(check.name)
        try:
            result, _ = run_trial(check, subject, trial)
        except KeyboardInterrupt:
            results.stopped = f"interrupted while {check.rule} was tried on {trial.id}"
            raise
        except PoolError as error:
            results.faults.append(f"{check.name}[{trial.id}]\n{error}")
            results.stopped = str(error)
            return
        except Exception:
            results.faults.append(f"{check.name}[{trial.id}]\n{traceback.format_exc()}")
            failed = count(len(results.faults), "trial")
            results.stopped = f"{failed} of the suite could not run"
        else:
            results.trials.append(result)


# A diagnosis evaluates the whole catalogue, so not every one of many violations gets one: those do
# that may be the smallest of their rule and, where the diagnosis names the rule, the first few.
_MOST_TAILS = 12


def run_trial(
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
    rule, trace = check.rule, ""
    asked = rule
    diagnosed: dict[str, Any] = {}
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
            diagnosed, rule = _diagnosed(violation)
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
        believed=check.believed,
        found=found,
        **diagnosed,
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
        # Also of a call that was not reached, since an earlier one of the trial is not mapped.
        outcomes = [outcome for run in violation.runs for outcome in run.outcomes]
        unmapped = [outcome.not_mapped for outcome in outcomes if outcome.not_mapped]
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
    from moetail.conformance.run.evidence import comparison_evidence, verdict_evidence

    if violation.verdict is not None:
        return verdict_evidence(violation.verdict)
    return comparison_evidence(*violation.compared) if violation.compared else []


def _diagnosed(violation: Violation) -> tuple[dict[str, Any], str]:
    """A result's fields that say what explains it, and the rule to name."""
    from moetail.conformance.diagnosis import diagnose, rule_named

    run = violation.runs[0]
    assert violation.verdict is not None
    diagnosis = diagnose(
        run.spec.case.operation, run.calls, violation.verdict, prefer=violation.rule
    )
    return diagnosis_fields(diagnosis), rule_named(violation.rule, diagnosis)


def diagnosis_fields(diagnosis: Diagnosis) -> dict[str, Any]:
    """What a :class:`TrialResult` keeps of a diagnosis."""
    return {
        "deviations": tuple(item.id for item in diagnosis.deviations),
        "wrong": diagnosis.wrong,
        "explained": diagnosis.share,
    }


def repeat_command(spec: str, plan: Plan, rule_id: str, trial: Trial) -> str:
    """The one command that repeats a trial."""
    words = ["moetail", "check", spec, "--rule", rule_id, "--op", trial.operation]
    words += ["--case", trial.id]
    if plan.device != "cpu":
        words += ["--device", plan.device]
    if plan.virtual_ranks:
        words.append("--virtual-ranks")
    return shlex.join(words)
