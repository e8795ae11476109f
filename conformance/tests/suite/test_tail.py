"""Arbitrary whole tails: the plan says which, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moetail.conformance.cases import Case
from moetail.conformance.implementation import Implementation
from moetail.conformance.run.check import TAIL, Check, planned
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.results import VIOLATES
from moetail.conformance.run.runner import run_trial
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Trial
from moetail.conformance.suite import checks
from moetail.reference import Reference
from moetail.spec.rules import FINALIZE, OPERATIONS


def tail_trials(name: str) -> list[tuple[Check, Trial]]:
    return list(planned(checks(), Plan(), (name,), operations=(name,), rules=(TAIL,)))


def test_what_is_judged_is_what_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject.of("reference", Plan())
    made: list[str] = []
    run = subject.run

    def recorded(*specs: Any) -> Any:
        made.extend(spec.case.id for spec in specs)
        return run(*specs)

    monkeypatch.setattr(subject, "run", recorded)
    listed = tail_trials(FINALIZE)
    for check, trial in listed:
        run_trial(check, subject, trial)
    assert made == [trial.id for _, trial in listed]
    assert sum(check.name == "test_tail_on_any_case" for check, _ in listed) == 4


def test_cases_are_the_same_whatever_is_installed_and_wherever_one_is(tmp_path: Path) -> None:
    # hypothesis would draw from the constants of whatever modules lie outside of site-packages.
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from moetail.conformance.cli import main\n"
        "main(['cases', '--rule', 'TAIL'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    listed = [line.split("\t")[2] for line in done.stdout.splitlines()]
    every = [item.name for item in OPERATIONS]
    here = [trial.id for _, trial in planned(checks(), Plan(), every, rules=(TAIL,))]
    assert listed == here
    assert not list(tmp_path.iterdir())


def test_what_fails_is_made_plainer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def beam_moe_finalize(self, expert_outputs: Any, *rest: Any, **more: Any) -> Any:
            output = Reference().beam_moe_finalize(expert_outputs, *rest, **more)
            if len(output) >= 2 and more.get("routed_scale", 1.0) != 1.0:
                output[1, 3] = 77.0
            return output

    subject = Subject.of("reference", Plan())
    broken = Implementation("broken", Broken())
    monkeypatch.setattr("moetail.conformance.run.call.load", lambda spec: broken)
    (check,) = [item for item in checks() if item.name == "test_tail_on_any_case"]
    case = Case(
        FINALIZE, "wide", 871, 7, 6, 512, capacity=2, routed_scale=1.5, post="norm", post_eps=1e-5
    )
    result, _ = run_trial(check, subject, Trial(FINALIZE, case), diagnosing=False)
    assert result.status == VIOLATES
    assert result.case == Case(FINALIZE, tokens=2, top_k=1, routed_scale=1.5).id
