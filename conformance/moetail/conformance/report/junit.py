"""junit.xml: a run's trials as tests, for CI systems."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from moetail.conformance.report.terminal import violation_text
from moetail.conformance.run.results import NOT_JUDGED, VIOLATES, Results, TrialResult

__all__ = ["junit_xml"]

# What XML 1.0 cannot hold, escaped or not.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(results: Results) -> str:
    """One test case a trial, with its rule, operation, case and number of judged elements."""
    violations = sum(trial.status == VIOLATES for trial in results.trials)
    skipped = sum(trial.status == NOT_JUDGED for trial in results.trials)
    suites = ElementTree.Element("testsuites", name="moetail")
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        name="moetail",
        tests=str(len(results.trials) + len(results.faults)),
        failures=str(violations),
        skipped=str(skipped),
        errors=str(len(results.faults)),
        time=f"{sum(trial.seconds for trial in results.trials):.3f}",
    )
    for trial in results.trials:
        suite.append(_test(trial))
    for fault in results.faults:
        name, _, trace = fault.partition("\n")
        test = ElementTree.SubElement(suite, "testcase", classname="moetail", name=_legal(name))
        error = ElementTree.SubElement(test, "error", message="it could not be run")
        error.text = _legal(trace)
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _test(trial: TrialResult) -> ElementTree.Element:
    test = ElementTree.Element(
        "testcase",
        classname=f"moetail.{trial.rule}",
        name=_legal(f"{trial.check}[{trial.case}]"),
        time=f"{trial.seconds:.3f}",
    )
    properties = ElementTree.SubElement(test, "properties")
    for name, value in trial.properties:
        ElementTree.SubElement(properties, "property", name=name, value=_legal(value))
    if trial.status == VIOLATES:
        failure = ElementTree.SubElement(test, "failure", message=_legal(trial.found))
        failure.text = _legal(violation_text(trial))
    elif trial.status == NOT_JUDGED:
        ElementTree.SubElement(test, "skipped", message=_legal(f"not judged: {trial.found}"))
    return test


def _legal(text: str) -> str:
    return _ILLEGAL.sub(lambda found: f"#x{ord(found[0]):02X}", text)
