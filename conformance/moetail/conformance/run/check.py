"""What a test of the suite is: a rule, the cases it looks at, and a function that decides.

The suite's test functions are checks. The command line, the pytest plugin and the table of mutants
all run them through :mod:`.runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import PoolError, RankError
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Tally, Trial, Violation
from moetail.spec import rule

__all__ = ["TAIL", "Check", "Phase", "Trials", "check_of", "checks_rule", "planned"]

TAIL = "TAIL"
"""Stands in a rule's place where whole tails are judged: the diagnosis then names the rule."""


class Phase(IntEnum):
    """The order in which checks are believed.

    A broken implementation fails more than the one check that is about its fault: an output that is
    not written is not right either. So results are read in this order, and the first violation
    names the rule. A check stands behind all those whose faults would fail it too:

    - refusals look at nothing but whether something was raised;
    - what is not written, differs from run to run, or is left over from another call spoils every
      comparison and every value;
    - comparisons of bits between two calls come before values, since a wrong rounding passes them;
    - then values, in the order of the arithmetic, each on sources on which the others do not
      decide;
    - whole tails last.
    """

    REFUSAL = 1
    CONVERSION = 2
    RUN = 3
    INVARIANCE = 4
    VALUE = 5
    WHOLE = 6


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
        believed: its phase, and its place there; of two checks the smaller is believed first.
        varies: whether its trials have a variation; None where some do.
    """

    rule: str
    name: str
    operations: tuple[str, ...]
    trials: Trials
    decide: _Decide
    believed: tuple[int, int]
    varies: bool | None = False

    def tries(self, trial: Trial) -> bool:
        """Whether a trial that is named by its case can be one of this check."""
        fits = self.varies is None or self.varies == bool(trial.variation)
        return fits and trial.operation in self.operations

    def run(self, subject: Subject, trial: Trial) -> Tally:
        """Decide one trial; the tally says how much was looked at.

        Raises:
            Violation: the rule is broken.
            NotJudged: nothing could be decided.
            PoolError: the machine failed the ranks, whatever the implementation is.
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
            if subject.fresh or not subject.shared or isinstance(error, PoolError):
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


_COMPUTING = rule("RUN-1").operations


def checks_rule(
    rule_id: str,
    trials: Trials,
    *,
    believed: tuple[Phase, int],
    operations: Sequence[str] | None = None,
    varies: bool | None = False,
) -> Callable[[_Decide], _Decide]:
    """Make a function the check of a rule, for all operations of the rule or for those given.

    Args:
        believed, varies: as in :class:`Check`.
    """
    if operations is not None:
        applies = tuple(operations)
    else:
        applies = _COMPUTING if rule_id == TAIL else rule(rule_id).operations

    def register(function: _Decide) -> _Decide:
        name = function.__name__  # type: ignore[attr-defined]
        place = (int(believed[0]), believed[1])
        function.moetail_check = Check(  # type: ignore[attr-defined]
            rule_id, name, applies, trials, function, place, varies
        )
        return function

    return register


def check_of(item: object) -> Check | None:
    """The check that a function was made; None where it is none."""
    return getattr(item, "moetail_check", None)


def planned(
    checks: Iterable[Check],
    plan: Plan,
    provided: Sequence[str],
    *,
    operations: Sequence[str] = (),
    rules: Sequence[str] = (),
    case: Trial | None = None,
) -> Iterator[tuple[Check, Trial]]:
    """The trials of checks that were asked for, in order.

    Args:
        provided: the operations that there are.
        operations, rules: restrict what is tried; empty is everything.
        case: this trial alone, under the rules given, or else under the check of whole tails.
    """
    if case is not None and not rules:
        rules = (TAIL,)
    wanted = [name for name in provided if not operations or name in operations]
    for check in checks:
        if rules and check.rule not in rules:
            continue
        if case is not None:
            trial = case if not operations else Trial(operations[0], case.case, case.variation)
            if check.tries(trial) and trial.operation in provided:
                yield check, trial
            continue
        for name in check.operations:
            if name in wanted:
                for trial in _distinct(check.trials(plan, name)):
                    yield check, trial


def _distinct(trials: Iterable[Trial]) -> Iterator[Trial]:
    seen: set[str] = set()
    for trial in trials:
        if trial.id not in seen:
            seen.add(trial.id)
            yield trial
