"""The loop that runs trials: what is kept of each, also of those that could not run."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from moetail.conformance.cases import Case
from moetail.conformance.report.junit import junit_xml
from moetail.conformance.run.check import TAIL, Check, planned
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import PoolError
from moetail.conformance.run.results import CONFORMS, NOT_DECIDED, NOT_JUDGED, VIOLATES, Results
from moetail.conformance.run.runner import run_planned
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Trial
from moetail.conformance.suite import checks
from moetail.spec.rules import FINALIZE

CASE = Case(FINALIZE, tokens=2)


def check(name: str, number: int) -> Check:
    """A check that ends in the way it is called."""

    def decide(subject: Subject, trial: Trial) -> None:
        match name:
            case "violates":
                raise subject.violation("not\x00legal in XML <&>")
            case "undecided":
                raise NotJudged("not here")
            case "faulty":
                raise ZeroDivisionError("the suite's own")
            case "starved":
                raise PoolError("the rank pool did not start: no memory")
        subject.tally.judged += 7

    return Check("ROUND-1", name, (FINALIZE,), lambda *_: [], decide, (1, number))


def run(*names: str) -> tuple[Results, list[str]]:
    subject = Subject.of("reference", Plan())
    results = Results.of(subject.implementation, subject.plan)
    watched: list[str] = []
    trials = [(check(name, number), Trial(FINALIZE, CASE)) for number, name in enumerate(names)]
    run_planned(subject, trials, results, watched.append)
    return results, watched


def test_a_fault_of_the_suite_is_no_verdict_and_ends_nothing() -> None:
    results, watched = run("conforms", "faulty", "undecided")
    assert watched == ["conforms", "faulty", "undecided"]
    assert [trial.status for trial in results.trials] == [CONFORMS, NOT_JUDGED]
    (fault,) = results.faults
    assert fault.startswith(f"faulty[{CASE.id}]\n")
    assert "ZeroDivisionError: the suite's own" in fault
    assert results.stopped == "1 trial of the suite could not run"
    assert (results.verdict, results.exit_code) == (NOT_DECIDED, 2)


def test_the_machine_that_fails_the_ranks_ends_the_run() -> None:
    results, watched = run("conforms", "starved", "conforms")
    assert watched == ["conforms", "starved"]
    assert [trial.status for trial in results.trials] == [CONFORMS]
    assert results.faults == [f"starved[{CASE.id}]\nthe rank pool did not start: no memory"]
    assert results.stopped == "the rank pool did not start: no memory"
    assert (results.verdict, results.exit_code) == (NOT_DECIDED, 2)
    # What was found before is no less wrong.
    results, _ = run("violates", "starved")
    assert (results.verdict, results.exit_code) == (VIOLATES, 1)


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    subject = Subject.of("reference", Plan())
    results = Results.of(subject.implementation, subject.plan)
    with pytest.raises(KeyboardInterrupt):
        run_planned(subject, [(check("conforms", 0), Trial(FINALIZE, CASE))], results, interrupted)


def test_junit_has_every_trial() -> None:
    results, _ = run("conforms", "violates", "undecided", "faulty")
    suite = ElementTree.fromstring(junit_xml(results).encode())[0]
    counts = {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "4", "failures": "1", "skipped": "1", "errors": "1"}
    kinds = [[part.tag for part in test if part.tag != "properties"] for test in suite]
    assert kinds == [[], ["failure"], ["skipped"], ["error"]]
    assert [str(test.get("name")).partition("[")[0] for test in suite] == [
        *("conforms", "violates", "undecided", "faulty")
    ]
    properties = {item.get("name"): item.get("value") for item in suite[0].iter("property")}
    case = {"rule": "ROUND-1", "operation": FINALIZE, "case": CASE.id, "judged": "7"}
    assert properties == case
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "not#x00legal in XML <&>"
    assert "repeat:" in str(failure.text)


# --- the suite's checks ---------------------------------------------------------------------------


def test_every_check_has_a_place_of_its_own_in_the_order_of_belief() -> None:
    assert len({check.name for check in checks()}) == len(checks()) > 50
    for first, second in pairwise(checks()):
        assert first.believed < second.believed, (first.name, second.name)
    assert {check.rule for check in checks() if check.believed[0] == 6} == {TAIL}


def test_a_case_that_is_named_runs_alone() -> None:
    provided = (FINALIZE,)
    whole = list(planned(checks(), Plan(), provided, case=Trial(FINALIZE, CASE)))
    assert whole
    assert {(check.rule, trial.id) for check, trial in whole} == {(TAIL, CASE.id)}
    under = list(planned(checks(), Plan(), provided, rules=["RUN-1"], case=Trial(FINALIZE, CASE)))
    assert [check.rule for check, _ in under] == ["RUN-1"]
    varied = Trial(FINALIZE, CASE, "rows-strided")
    assert not list(planned(checks(), Plan(), provided, rules=["RUN-1"], case=varied))
    assert not list(planned(checks(), Plan(), (), rules=["RUN-1"], case=Trial(FINALIZE, CASE)))
