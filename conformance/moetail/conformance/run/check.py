"""What a test of the suite is: a rule, the cases it looks at, and a function that decides.

The suite's test functions are checks. The command line, the pytest plugin and the table of mutants
all run them through :mod:`.runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import RankError
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Tally, Trial, Violation
from moetail.spec import rule

__all__ = ["CHECKS", "TAIL", "Check", "Trials", "all_trials", "checks_rule"]

TAIL = "TAIL"
"""Stands in a rule's place where whole tails are judged: the diagnosis then names the rule."""


class _Decide(Protocol):
    def __call__(self, subject: Subject, trial: Trial) -> None: ...


Trials = Callable[[Plan, str], Iterable[Trial]]


@dataclass(frozen=True)
class Check:
    """One test of the suite.

    Attributes:
        rule: the rule it decides.
        name: the test function's name.
        operations: names of the operations it applies to.
        trials: what it is tried on, for a plan and an operation.
        decide: raises :class:`Violation` or :class:`NotJudged`.
        varies: whether its trials have a variation; None where some do.
    """

    rule: str
    name: str
    operations: tuple[str, ...]
    trials: Trials
    decide: _Decide
    varies: bool | None

    def run(self, subject: Subject, trial: Trial) -> Tally:
        """Decide one trial; the tally says how much was looked at.

        Raises:
            Violation: the rule is broken.
            NotJudged: nothing could be decided.
        """
        subject.begin(self.rule, trial)
        if trial.operation in subject.ended:
            raise NotJudged(f"ended by an earlier trial: {subject.ended[trial.operation]}")
        found = self._tried(subject, trial)
        if found is not None and subject.shared:
            found = self._tried_afresh(subject, trial, found)
        if isinstance(found, RankError):
            # Every further trial would wait as long.
            subject.ended[trial.operation] = _said(found)
            raise subject.violation(_said(found)) from found
        if found is not None:
            raise found
        return subject.tally

    def _tried(self, subject: Subject, trial: Trial) -> Violation | NotJudged | RankError | None:
        """What speaks against the trial."""
        try:
            self.decide(subject, trial)
        except (Violation, NotJudged, RankError) as error:
            return error
        except Exception as error:
            if subject.fresh or not subject.shared:
                raise
            return NotJudged(f"{type(error).__name__}: {error}")  # and tried again
        return NotJudged("no element and no comparison") if subject.tally.judged == 0 else None

    def _tried_afresh(
        self, subject: Subject, trial: Trial, found: Violation | NotJudged | RankError
    ) -> Violation | NotJudged | RankError | None:
        """What speaks against it on workspaces that have served no other trial.

        If nothing does any more, what they served before is to blame, and RUN-5 is broken.
        """
        subject.begin(self.rule, trial)
        subject.fresh = True
        again = self._tried(subject, trial)
        if again is not None or isinstance(found, NotJudged):
            subject.fresh = False
            undecided = isinstance(again, NotJudged) and not isinstance(found, NotJudged)
            return found if undecided else again
        # From here on every trial gets new workspaces, or each would be tried twice.
        subject.rule = "RUN-5"
        return subject.violation(
            f"on a workspace that served earlier calls, and not on a new one: {_said(found)}"
        )


def _said(found: Exception) -> str:
    return str(found).replace("raised Raised: ", "raised ")


CHECKS: list[Check] = []
_COMPUTING = rule("RUN-1").operations


def checks_rule(
    rule_id: str,
    trials: Trials,
    *,
    operations: Sequence[str] | None = None,
    varies: bool | None = False,
) -> Callable[[_Decide], _Decide]:
    """Make a function the check of a rule, for all operations of the rule or for those given."""
    if operations is not None:
        applies = tuple(operations)
    else:
        applies = _COMPUTING if rule_id == TAIL else rule(rule_id).operations

    def register(function: _Decide) -> _Decide:
        check = Check(rule_id, function.__name__, applies, trials, function, varies)  # type: ignore[attr-defined]
        CHECKS.append(check)
        function.moetail_check = check  # type: ignore[attr-defined]
        return function

    return register


def all_trials(
    check: Check, plan: Plan, provided: Sequence[str], operations: Sequence[str] = ()
) -> Iterator[Trial]:
    """The trials of a check on the operations that are provided and asked for, in order."""
    for name in check.operations:
        if name in provided and (not operations or name in operations):
            seen: set[str] = set()
            for trial in check.trials(plan, name):
                if trial.id not in seen:
                    seen.add(trial.id)
                    yield trial
