"""One run of a check: what is tried, what it looked at, and what speaks against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from moetail.conformance.cases import Case, variations
from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.judge import Verdict
from moetail.conformance.run.call import CallResult, CallSpec

__all__ = ["NotJudged", "Run", "Tally", "Trial", "Violation"]


@dataclass(frozen=True)
class Trial:
    """One run of a check.

    Attributes:
        operation: the operation on trial.
        case: whose arguments it gets.
        variation: of the arguments, a name of :mod:`.variations`, or "".
    """

    operation: str
    case: Case
    variation: str = ""

    @property
    def id(self) -> str:
        """The case's id, and the variation behind a tilde."""
        return f"{self.case.id}~{self.variation}" if self.variation else self.case.id

    @classmethod
    def parse(cls, text: str, operation: str = "") -> Trial:
        """The trial of that id; ValueError where it is none."""
        shown, _, variation = text.partition("~")
        case = Case.parse(shown)
        if variation:
            variations.find(variation, case)
        return cls(operation or case.operation, case, variation)


class NotJudged(Exception):
    """A trial that cannot be decided here; the message says why."""


class Violation(AssertionError):
    """An implementation breaks a rule.

    Attributes:
        rule, operation, trial: what was broken by what, and the trial's id.
        found: one sentence, with the first wrong element and what was admissible.
        verdict: the judge's verdict, where the judge decided.
        runs: the runs that showed it.
        compared: an output's name and its two values, where two runs should have given the same.
    """

    def __init__(
        self,
        rule_id: str,
        trial: Trial,
        found: str,
        *,
        verdict: Verdict | None = None,
        runs: Sequence[Run] = (),
        compared: tuple[str, Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(found)
        self.rule = rule_id
        self.operation = trial.operation
        self.trial = trial
        self.found = found
        self.verdict = verdict
        self.runs = tuple(runs)
        self.compared = compared

    @property
    def trace(self) -> str:
        """The first traceback of the implementation among the runs, or ""."""
        traces = (outcome.trace for run in self.runs for outcome in run.outcomes if outcome.trace)
        return next(traces, "")


@dataclass
class Tally:
    """What a trial looked at; a trial that looked at nothing is not green.

    Attributes:
        judged: elements that the judge decided, or comparisons made where there are no elements.
        not_judged: elements whose class depends on a legal choice.
        ambiguous: judged elements with two admissible values.
    """

    judged: int = 0
    not_judged: int = 0
    ambiguous: int = 0

    def add(self, other: Tally) -> None:
        self.judged += other.judged
        self.not_judged += other.not_judged
        self.ambiguous += other.ambiguous


@dataclass
class Run:
    """A call and what came of it on every rank."""

    spec: CallSpec
    outcomes: list[CallResult]

    @property
    def refused(self) -> bool:
        """Every rank raised."""
        return all(outcome.refusal for outcome in self.outcomes)

    @property
    def values(self) -> list[Any]:
        return [outcome.value for outcome in self.outcomes]

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """The arguments before the call, rank by rank, where the results are."""
        case = self.spec.case
        device = next((str(t.device) for _, t in tensors_in(self.values)), "cpu")
        calls = [case.arguments(rank, device) for rank in range(case.ranks)]
        if self.spec.variation:
            name = self.spec.variation
            calls = [variations.apply(name, case, rank, call) for rank, call in enumerate(calls)]
        return calls
